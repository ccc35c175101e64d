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
    atomic_load,
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
from longtail.engine.team import FINISHED, NEXT, TICKET, Kernel, float_word, team_size, words

_ITEM_ROWS = 8 * DOT_COLUMNS
"""Weight rows of one work item, where no activation asks for more."""
_PANEL_BYTES = 1 << 19
"""Rows of ``x`` are taken in panels of at most this, to stay in the second-level cache."""
PARALLEL_WORK = 400_000
"""Multiply-adds below which waking a second thread costs more than it brings."""

# Words of an argument block, after those of every kernel (team.py).
(NEXT_ROW, ROWS_DONE, M, N, K, X, W, W_STRIDE, BIAS) = range(3, 12)
(NORM, NORMED, RESIDUAL, RESIDUAL_STRIDE, OUT, OUT_STRIDE, BLOCK, SCRATCH, EPS) = range(12, 21)
WORDS = 21
_Args = words(WORDS)


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
    ``silu(gate) * up`` ``[M, N / 2]``. ``weight_NK`` and ``residual_MN`` may be column views.
    """
    x_MK = x_MK.contiguous()
    rows, inputs = x_MK.shape
    outputs, dtype = weight_NK.shape[0], x_MK.dtype
    threads = team_size() if outputs * inputs * max(rows, 4) > PARALLEL_WORK else 1
    width = outputs // 2 if swiglu_block else outputs
    out = torch.empty(rows, width, dtype=dtype)
    normed = x_MK if norm_K is None else torch.empty(rows, inputs, dtype=dtype)
    scratch = None
    if swiglu_block:
        scratch = torch.empty(threads * scratch_words(rows, inputs, x_MK.itemsize, swiglu_block), dtype=dtype)
    args = _Args(
        *(0, 0, 0, 0, 0),
        *(rows, outputs, inputs),
        x_MK.data_ptr(),
        weight_NK.data_ptr(),
        weight_NK.stride(0),
        0 if bias_N is None else bias_N.data_ptr(),
        0 if norm_K is None else norm_K.data_ptr(),
        normed.data_ptr(),
        0 if residual_MN is None else residual_MN.data_ptr(),
        0 if residual_MN is None else residual_MN.stride(0),
        out.data_ptr(),
        width,
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
    args[M], args[K] = x_MK.shape
    args[X], args[NORM], args[NORMED] = x_MK.data_ptr(), weight_K.data_ptr(), out.data_ptr()
    args[EPS] = float_word(eps)
    compiled(x_MK.dtype).run(args, 1)
    return out


def scratch_words(rows: int, inputs: int, itemsize: int, swiglu_block: int) -> int:
    """Elements that each thread needs for a gated layer."""
    return _panel_rows(rows, inputs, itemsize) * 2 * swiglu_block


def _panel_rows(rows, inputs, itemsize):
    return min(rows, max(DOT_ROWS, _PANEL_BYTES // (inputs * itemsize) // DOT_ROWS * DOT_ROWS))


_compiled_panel_rows = jit(_panel_rows)


@functools.cache
def compiled(dtype: torch.dtype) -> Kernel:
    """The kernel for float32 or float64."""
    with one_process():
        return Kernel(_compile32() if dtype == torch.float32 else _compile64())


def _compile32():
    @callback
    def linear32(pointer):
        linear_items(pointer, np.float32)

    return linear32


def _compile64():
    @callback
    def linear64(pointer):
        linear_items(pointer, np.float64)

    return linear64


@jit
def linear_items(pointer, dtype):
    """A thread's part: normalise rows until all are, then compute blocks of outputs until none is left.

    Returns the number of blocks; those that are done are counted in ``FINISHED``.
    """
    args = carray(pointer, WORDS, np.int64)
    rows, outputs, inputs, block = args[M], args[N], args[K], args[BLOCK]
    x = carray(as_pointer(args[NORMED]), rows * inputs, dtype)
    if args[NORM] != 0:
        raw = carray(as_pointer(args[X]), rows * inputs, dtype)
        norm = carray(as_pointer(args[NORM]), inputs, dtype)
        eps = dtype(carray(pointer, WORDS, np.float64)[EPS])
        while True:
            m = fetch_add(args, NEXT_ROW, 1)
            if m >= rows:
                break
            _norm_row(raw, x, m * inputs, inputs, norm, eps, dtype(1.0))
            fetch_add(args, ROWS_DONE, 1)
        while atomic_load(args, ROWS_DONE) < rows:
            pass
    if outputs == 0:
        return 0
    stride = args[W_STRIDE]
    w = carray(as_pointer(args[W]), outputs * stride, dtype)
    bias = carray(as_pointer(args[BIAS]), outputs, dtype)
    residual_stride, out_stride = args[RESIDUAL_STRIDE], args[OUT_STRIDE]
    residual = carray(as_pointer(args[RESIDUAL]), rows * residual_stride, dtype)
    out = carray(as_pointer(args[OUT]), rows * out_stride, dtype)
    step = 2 * block if block > 0 else _ITEM_ROWS
    items = (outputs + step - 1) // step
    panel = _compiled_panel_rows(rows, inputs, x.itemsize)
    ticket = fetch_add(args, TICKET, 1)
    scratch = carray(as_pointer(args[SCRATCH] + ticket * panel * step * x.itemsize), panel * step, dtype)
    done = 0
    while True:
        item = fetch_add(args, NEXT, 1)
        if item >= items:
            break
        done += 1
        n0, n1 = item * step, min(outputs, (item + 1) * step)
        for m0 in range(0, rows, panel):
            m1 = min(rows, m0 + panel)
            if block > 0:
                _block(x, w, scratch, m0, m1, n0, n1, inputs, stride, -m0 * step - n0, step)
                if args[BIAS] != 0:
                    for m in range(m1 - m0):
                        for n in range(step):
                            scratch[m * step + n] += bias[n0 + n]
                for m in range(m0, m1):
                    _swiglu_row(scratch, (m - m0) * step, block, out, m * out_stride + n0 // 2, dtype(1.0))
                continue
            _block(x, w, out, m0, m1, n0, n1, inputs, stride, 0, out_stride)
            if args[BIAS] != 0:
                for m in range(m0, m1):
                    for n in range(n0, n1):
                        out[m * out_stride + n] += bias[n]
            if args[RESIDUAL] != 0:
                for m in range(m0, m1):
                    for n in range(n0, n1):
                        out[m * out_stride + n] += residual[m * residual_stride + n]
    fetch_add(args, FINISHED, done)
    return items


@jit
def _block(x, w, out, m0, m1, n0, n1, inputs, w_stride, out_at, out_stride):
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
                m * inputs,
                inputs,
                w,
                n * w_stride,
                w_stride,
                out,
                out_at + m * out_stride + n,
                out_stride,
                inputs,
            )
        n += columns


@jit
def _norm_row(raw, out, at, inputs, weight, eps, one):
    lanes = VECTOR_BYTES // raw.itemsize
    squares = splat(one - one)
    for k in range(0, inputs, lanes):
        v = load(raw, at + k)
        squares = fma(v, v, squares)
    root = splat(one / np.sqrt(total(squares) / raw.dtype.type(inputs) + eps))
    for k in range(0, inputs, lanes):
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
