"""All layers of a forward pass as one call: a list of kernels that a team of threads runs through together.

At small batches a step is some hundred kernels of a few microseconds each, and calling them one by one from Python
costs as much again. Here each kernel's argument block is a row of one array; a thread that finds no more items in one
waits until those of the others are finished, and goes on to the next.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import carray
from torch import Tensor

from longtail.engine import attention, linear
from longtail.engine.attention import attention_items
from longtail.engine.jit import callback, jit, one_process
from longtail.engine.lanes import LanePool
from longtail.engine.linear import linear_items
from longtail.engine.simd import as_pointer, atomic_load
from longtail.engine.team import FINISHED, Kernel, float_word, team_size, words

if TYPE_CHECKING:
    from longtail.engine.model import Decoder

_Header = words(2)
"""Count and address of the rows."""
_BLOCK = 32
"""Words of a row: at least those of every kernel."""
_KIND = _BLOCK - 1
_LINEAR, _ATTENTION = 0, 1
(_QKV, _WRITE, _ATTEND, _O, _GATE_UP, _DOWN) = range(6)
"""Kernels of a layer; the second only where a chunk's keys must be in place before its queries."""
_PARAMETERS = {
    "attn_norm": (_QKV, linear.NORM),
    "qkv": (_QKV, linear.W),
    "qkv_bias": (_QKV, linear.BIAS),
    "q_norm": (_ATTEND, attention.Q_NORM),
    "k_norm": (_ATTEND, attention.K_NORM),
    "o": (_O, linear.W),
    "o_bias": (_O, linear.BIAS),
    "mlp_norm": (_GATE_UP, linear.NORM),
    "gate_up": (_GATE_UP, linear.W),
    "gate_up_bias": (_GATE_UP, linear.BIAS),
    "down": (_DOWN, linear.W),
    "down_bias": (_DOWN, linear.BIAS),
}
"""Where the address of each parameter of a layer goes."""


class LayerProgram(attention.LaneAttention):
    """Attention over lanes that also runs all layers of ``model`` at once (``Attend.run_layers``).

    ``pool`` holds all KV heads of the model, and the kernels serve both (``attention.supports``, ``linear.serves``).
    """

    def __init__(self, model: Decoder, pool: LanePool) -> None:
        super().__init__(pool, model.rope)
        c = model.config
        self._model = model
        self._rows = np.zeros((c.layers, 6, _BLOCK), np.int64)
        self._addresses: list[int] = []
        rows = self._rows
        rows[:, [_WRITE, _ATTEND], _KIND] = _ATTENTION
        width = c.heads * c.head_dim
        shapes = {
            _QKV: (c.kv_heads * c.qkv_rows_per_kv, c.hidden_size),
            _O: (c.hidden_size, width),
            _GATE_UP: (2 * c.intermediate_size, c.hidden_size),
            _DOWN: (c.hidden_size, c.intermediate_size),
        }
        for at, (outputs, inputs) in shapes.items():
            rows[:, at, linear.N], rows[:, at, linear.K], rows[:, at, linear.W_STRIDE] = outputs, inputs, inputs
            rows[:, at, linear.EPS] = float_word(c.rms_eps)
        rows[:, _GATE_UP, linear.BLOCK] = c.mlp_block

    def run_layers(self, x_TD: Tensor) -> Tensor:
        """The residual stream ``[T, D]`` after the last layer; overwrites ``x_TD``."""
        self._rows[:, :, : linear.ROWS_DONE + 1] = 0
        self._place_parameters()
        work = len(x_TD) * sum(p.numel() for p in self._model.layers[0].parameters())
        threads = team_size() if max(work, 4 * work // len(x_TD)) > linear.PARALLEL_WORK else 1
        activations = self._place_activations(x_TD, threads)
        self._place_attention(activations)
        header = _Header(self._rows.shape[0] * self._rows.shape[1], self._rows.ctypes.data)
        compiled(x_TD.dtype).run(header, threads)
        return x_TD

    def _place_parameters(self) -> None:
        """Addresses of all parameters, again if any has changed."""
        layers = self._model.layers
        addresses = [p.data_ptr() for layer in layers for p in layer._parameters.values() if p is not None]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for name, (at, word) in _PARAMETERS.items():
            parameters = [getattr(layer, name) for layer in layers]
            self._rows[:, at, word] = [0 if p is None else p.data_ptr() for p in parameters]

    def _place_activations(self, x_TD: Tensor, threads: int) -> tuple[Tensor, ...]:
        """Allocate what the layers pass on, in turn the same memory; returns it, to be kept until they have run."""
        c, rows, tokens = self._model.config, self._rows, len(x_TD)
        D = c.hidden_size
        per_thread = linear.scratch_words(tokens, D, x_TD.itemsize, c.mlp_block)
        widths = (c.kv_heads * c.qkv_rows_per_kv, c.heads * c.head_dim, D, D, c.intermediate_size)
        qkv, o, normed, y, h = (torch.empty(tokens, width, dtype=x_TD.dtype) for width in widths)
        scratch = torch.empty(threads * per_thread, dtype=x_TD.dtype)
        a_qkv, a_o, a_normed, a_y, a_h, a_x, a_scratch = (t.data_ptr() for t in (qkv, o, normed, y, h, x_TD, scratch))
        rows[:, _QKV, [linear.M, linear.X, linear.NORMED, linear.OUT]] = tokens, a_x, a_normed, a_qkv
        plain = [linear.M, linear.X, linear.NORMED, linear.RESIDUAL, linear.OUT]
        rows[:, _O, plain] = tokens, a_o, a_o, a_x, a_y
        gated = [linear.M, linear.X, linear.NORMED, linear.OUT, linear.SCRATCH]
        rows[:, _GATE_UP, gated] = tokens, a_y, a_normed, a_h, a_scratch
        rows[:, _DOWN, plain] = tokens, a_h, a_h, a_y, a_x
        return qkv, o, normed, y, h, scratch

    def _place_attention(self, activations: tuple[Tensor, ...]) -> None:
        qkv, o = activations[:2]
        announced, attend = self.announced(), self._rows[:, _ATTEND]
        attend[:, : attention.Q_NORM] = announced[: attention.Q_NORM]
        attend[:, attention.K_NORM + 1 : attention.WORDS] = announced[attention.K_NORM + 1 :]
        attend[:, attention.LAYER] = np.arange(len(attend))
        attend[:, attention.QKV], attend[:, attention.OUT] = qkv.data_ptr(), o.data_ptr()
        attend[:, attention.ATTEND] = 1
        write = self._rows[:, _WRITE]
        write[:] = attend
        attend[:, attention.WRITE] = self.decode
        write[:, attention.WRITE], write[:, attention.ATTEND] = 1, 0
        if self.decode:
            write[:, attention.ITEMS] = 0


@functools.cache
def compiled(dtype: torch.dtype) -> Kernel:
    """The kernel for float32 or float64."""
    with one_process():
        return Kernel(_compile32() if dtype == torch.float32 else _compile64())


def _compile32():
    @callback
    def program32(pointer):
        _run_rows(pointer, np.float32)

    return program32


def _compile64():
    @callback
    def program64(pointer):
        _run_rows(pointer, np.float64)

    return program64


@jit
def _run_rows(pointer, dtype):
    header = carray(pointer, 2, np.int64)
    for i in range(header[0]):
        row = as_pointer(header[1] + i * _BLOCK * 8)
        args = carray(row, _BLOCK, np.int64)
        items = linear_items(row, dtype) if args[_KIND] == _LINEAR else attention_items(row, dtype)
        while atomic_load(args, FINISHED) < items:
            pass
