"""Linear layers for inference on the CPU, fused with the norm before them and the activation or addition after.

Batches of 1 to a few dozen rows are what decoding is made of, and what BLAS libraries are worst at. Here weights are
read once, in their natural ``[out, in]`` layout, at the speed of memory; rows of ``x`` stay in cache.

An output element is a dot product in a fixed order of additions, whatever the number of rows or threads: a sequence
gets the same bits alone, in a batch and in a prefill. This is what makes schedule invariance exact in float32.

Shape suffixes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import carray
from torch import Tensor

from longtail.engine.jit import callback, jit, one_process
from longtail.engine.simd import (
    DOT_COLUMNS,
    DOT_ROWS,
    VECTOR_BYTES,
    add,
    as_pointer,
    div,
    dot_tile,
    exp,
    fetch_add,
    fma,
    load,
    mul,
    splat,
    store,
    sub,
    total,
)
from longtail.engine.team import Kernel, float_word, team_size, words

_ITEM_ROWS = 8 * DOT_COLUMNS
"""Weight rows of one work item, where no activation asks for more."""
_PANEL_BYTES = 1 << 19
"""Rows of ``x`` are taken in panels of at most this, to stay in the second-level cache."""
_PARALLEL_WORK = 400_000
"""Multiply-adds below which waking a second thread costs more than it brings."""

(_NEXT, _TICKET, _NEXT_ROW, _ROWS_DONE, _M, _N, _K, _X, _W, _W_STRIDE, _BIAS) = range(11)
(_NORM, _NORMED, _RESIDUAL, _OUT, _BLOCK, _SCRATCH, _EPS) = range(11, 18)
_WORDS = 18
_Args = words(_WORDS)


def serves(x_MK: Tensor, *widths: int) -> bool:
    """Whether the kernels here take ``x``, and inputs of these widths: in inference mode, on the CPU, float32 or
    float64, whole vectors."""
    return (
        torch.is_inference_mode_enabled()
        and x_MK.device.type == "cpu"
        and x_MK.dtype in (torch.float32, torch.float64)
        and not any(width * x_MK.itemsize % VECTOR_BYTES for width in (x_MK.shape[1], *widths))
    )


def linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    swiglu_block: int = 0,
) -> Tensor:
    """``x @ weight.T + bias``, of ``rms_norm(x) * norm`` if ``norm_K`` is given, plus ``residual_MN`` if given.

    With ``swiglu_block``, rows of ``weight`` are blocks of gate and up in turn, and the result is
    ``silu(gate) * up`` ``[M, N / 2]``. ``weight_NK`` may be a column view.
    """
    x_MK = x_MK.contiguous()
    M, K = x_MK.shape
    N, stride = weight_NK.shape[0], weight_NK.stride(0)
    dtype = x_MK.dtype
    threads = team_size() if N * K * max(M, 4) > _PARALLEL_WORK else 1
    out = torch.empty(M, N // 2 if swiglu_block else N, dtype=dtype)
    normed = x_MK if norm_K is None else torch.empty(M, K, dtype=dtype)
    scratch = None
    if swiglu_block:
        scratch = torch.empty(threads * _panel_rows(M, K, x_MK.itemsize) * 2 * swiglu_block, dtype=dtype)
    args = _Args(
        0,
        0,
        0,
        0,
        M,
        N,
        K,
        x_MK.data_ptr(),
        weight_NK.data_ptr(),
        stride,
        0 if bias_N is None else bias_N.data_ptr(),
        0 if norm_K is None else norm_K.data_ptr(),
        normed.data_ptr(),
        0 if residual_MN is None else residual_MN.data_ptr(),
        out.data_ptr(),
        swiglu_block,
        0 if scratch is None else scratch.data_ptr(),
        float_word(eps),
    )
    compiled(dtype).run(args, threads)
    return out


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, as :func:`linear` computes it."""
    x_MK = x_MK.contiguous()
    out = torch.empty_like(x_MK)
    args = _Args()
    args[_M], args[_K] = x_MK.shape
    args[_X], args[_NORM], args[_NORMED] = x_MK.data_ptr(), weight_K.data_ptr(), out.data_ptr()
    args[_EPS] = float_word(eps)
    compiled(x_MK.dtype).run(args, 1)
    return out


def _panel_rows(M, K, itemsize):
    return min(M, max(DOT_ROWS, _PANEL_BYTES // (K * itemsize) // DOT_ROWS * DOT_ROWS))


_compiled_panel_rows = jit(_panel_rows)


@functools.cache
def compiled(dtype: torch.dtype) -> Kernel:
    """The kernel for float32 or float64."""
    with one_process():
        return Kernel(_compile32() if dtype == torch.float32 else _compile64())


def _compile32():
    @callback
    def linear32(pointer):
        _team_member(pointer, np.float32)

    return linear32


def _compile64():
    @callback
    def linear64(pointer):
        _team_member(pointer, np.float64)

    return linear64


@jit
def _team_member(pointer, dtype):
    """Normalise rows until all are, then compute blocks of outputs until none is left."""
    args = carray(pointer, _WORDS, np.int64)
    M, N, K, block = args[_M], args[_N], args[_K], args[_BLOCK]
    x = carray(as_pointer(args[_NORMED]), M * K, dtype)
    if args[_NORM] != 0:
        raw = carray(as_pointer(args[_X]), M * K, dtype)
        norm = carray(as_pointer(args[_NORM]), K, dtype)
        eps = dtype(carray(pointer, _WORDS, np.float64)[_EPS])
        while True:
            m = fetch_add(args, _NEXT_ROW, 1)
            if m >= M:
                break
            _norm_row(raw, x, m * K, K, norm, eps, dtype(1.0))
            fetch_add(args, _ROWS_DONE, 1)
        while fetch_add(args, _ROWS_DONE, 0) < M:
            pass
    if N == 0:
        return
    stride = args[_W_STRIDE]
    w = carray(as_pointer(args[_W]), N * stride, dtype)
    bias = carray(as_pointer(args[_BIAS]), N, dtype)
    residual = carray(as_pointer(args[_RESIDUAL]), M * N, dtype)
    width = N // 2 if block > 0 else N
    out = carray(as_pointer(args[_OUT]), M * width, dtype)
    step = 2 * block if block > 0 else _ITEM_ROWS
    panel = _compiled_panel_rows(M, K, x.itemsize)
    ticket = fetch_add(args, _TICKET, 1)
    scratch = carray(as_pointer(args[_SCRATCH] + ticket * panel * step * x.itemsize), panel * step, dtype)
    while True:
        n0 = fetch_add(args, _NEXT, 1) * step
        if n0 >= N:
            return
        n1 = min(N, n0 + step)
        for m0 in range(0, M, panel):
            m1 = min(M, m0 + panel)
            if block > 0:
                _block(x, w, scratch, m0, m1, n0, n1, K, stride, -m0 * step - n0, step)
                if args[_BIAS] != 0:
                    for m in range(m1 - m0):
                        for n in range(step):
                            scratch[m * step + n] += bias[n0 + n]
                for m in range(m0, m1):
                    _swiglu_row(scratch, (m - m0) * step, block, out, m * width + n0 // 2, dtype(1.0))
                continue
            _block(x, w, out, m0, m1, n0, n1, K, stride, 0, N)
            if args[_BIAS] != 0:
                for m in range(m0, m1):
                    for n in range(n0, n1):
                        out[m * N + n] += bias[n]
            if args[_RESIDUAL] != 0:
                for m in range(m0, m1):
                    for n in range(n0, n1):
                        out[m * N + n] += residual[m * N + n]


@jit
def _block(x, w, out, m0, m1, n0, n1, K, w_stride, out_at, out_stride):
    """``out[m, n] = x[m] . w[n]`` for a block; element (m, n) is ``out[out_at + m * out_stride + n]``."""
    n = n0
    while n < n1:
        columns = DOT_COLUMNS if n + DOT_COLUMNS <= n1 else (2 if n + 2 <= n1 else 1)
        for m in range(m0, m1, DOT_ROWS):
            dot_tile(
                min(DOT_ROWS, m1 - m),
                columns,
                m == 0,
                x,
                m * K,
                K,
                w,
                n * w_stride,
                w_stride,
                out,
                out_at + m * out_stride + n,
                out_stride,
                K,
            )
        n += columns


@jit
def _norm_row(raw, out, at, K, weight, eps, one):
    lanes = VECTOR_BYTES // raw.itemsize
    squares = splat(one - one)
    for k in range(0, K, lanes):
        v = load(raw, at + k)
        squares = fma(v, v, squares)
    root = splat(one / np.sqrt(total(squares) / raw.dtype.type(K) + eps))
    for k in range(0, K, lanes):
        store(out, at + k, mul(mul(load(raw, at + k), root), load(weight, k)))


@jit
def _swiglu_row(raw, at, block, out, to, one):
    """``gate / (1 + exp(-gate)) * up`` of one pair of blocks."""
    lanes = VECTOR_BYTES // raw.itemsize
    if block % lanes != 0:
        for j in range(block):
            gate = raw[at + j]
            out[to + j] = gate / (one + np.exp(-gate)) * raw[at + block + j]
        return
    ones = splat(one)
    zero = sub(ones, ones)
    for j in range(0, block, lanes):
        gate = load(raw, at + j)
        silu = div(gate, add(ones, exp(sub(zero, gate))))
        store(out, to + j, mul(silu, load(raw, at + block + j)))
