"""All layers of a forward pass as one call: a list of kernels that a team of threads runs through together.

At small batches a step is some hundred kernels of a few microseconds each, and calling them one by one from Python
costs as much again. Here each kernel's argument block is a row of one array; a thread that finds no more items in one
waits until those of the others are finished, and goes on to the next.

In a tensor-parallel group on one host, each rank computes its columns (``engine/shard.py``) of what the layers pass on,
in memory that all ranks share, and rows between the kernels are barriers. A layer, with its private parts in brackets::

    [qkv = norm(x) Wqkv]   o = attention(qkv)   BARRIER   y = x + o Wo          BARRIER
                           h = swiglu(norm(y))  BARRIER   x = y + h Wdown       BARRIER

The barrier before each reader of other ranks' columns keeps reads behind writes. The same four also keep a buffer's
next write behind its last reads: every rank reads o, y and h before the barrier that follows, and they are written
again a layer later; x is read by the next layer's first kernel (after the last layer: by the final norm) and written
again three barriers later. So a rank that passes the last barrier before it writes knows that all have read. Residuals
are read by their own writer alone. Layer 0 reads the embeddings, which are private, so no step begins with a barrier.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from longtail.engine import attention, linear
from longtail.engine.attention import attention_items
from longtail.engine.jit import callback, jit, one_process
from longtail.engine.lanes import LanePool
from longtail.engine.linear import linear_items
from longtail.engine.shard import shard_of
from longtail.engine.shm import CONTROL_WORDS, SPINS, ShmCommunicator, arrive, wait
from longtail.engine.simd import VECTOR_BYTES, as_pointer, atomic_load, fetch_add
from longtail.engine.team import FINISHED, NEXT, Kernel, float_word, team_size, words

if TYPE_CHECKING:
    from longtail.engine.model import Decoder

(_FIRST, _COUNT, _ADDRESS, _STOPPED) = range(4)
"""Of the header: the row to begin with, count and address of all, and the one at which the program stopped."""
_Header = words(4)
_BLOCK = 40
"""Words of a row: at least those of every kernel."""
_KIND = _BLOCK - 1
_LINEAR, _ATTENTION, _BARRIER = 0, 1, 2
(_QKV, _WRITE, _ATTEND, _MEET_O, _O, _MEET_Y, _GATE_UP, _MEET_H, _DOWN, _MEET_X) = range(10)
"""Rows of a layer; the second only has work where a chunk's keys must be in place before its queries."""
_MEETINGS = (_MEET_O, _MEET_Y, _MEET_H, _MEET_X)
_ARRIVED = 3
(_CONTROL, _RANK, _SIZE) = range(5, 8)
"""Words of a barrier, after those of every kernel."""
_PASSED, _GAVE_UP = 1, 2
"""``FINISHED`` of a barrier."""
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


class _Passed(NamedTuple):
    """What layers pass on, one row a token, whole: ``o`` ``[T, Q]``, ``y`` and ``x`` ``[T, D]``, ``h`` ``[T, F]``."""

    o: Tensor
    y: Tensor
    h: Tensor
    x: Tensor


def serves(model: Decoder, pool: LanePool) -> bool:
    """Whether the kernels run all layers of ``model`` over ``pool``."""
    c = model.config
    widths = (c.hidden_size, c.heads * c.head_dim, c.intermediate_size)
    return attention.supports(pool) and not any(width * model.dtype.itemsize % VECTOR_BYTES for width in widths)


class LayerProgram(attention.LaneAttention):
    """Attention over lanes that also runs all layers of ``model`` at once (``Attend.run_layers``).

    ``pool`` holds all KV heads of the model, and the kernels serve both (:func:`serves`). With ``comm`` this is one
    rank of a group: ``pool`` holds the heads of its shard, every rank runs the same batches, and all get the whole
    result. ``rows`` is the size of batch to be ready for. Construction is then collective, and so is
    :meth:`run_layers`; both raise :class:`longtail.core.errors.PeerLost`.
    """

    def __init__(self, model: Decoder, pool: LanePool, *, comm: ShmCommunicator | None = None, rows: int = 0) -> None:
        super().__init__(pool, model.rope)
        c = model.config
        self._model, self._comm = model, comm
        self._shard = shard_of(c, comm.rank, comm.size) if comm is not None else shard_of(c, 0, 1)
        self._shared: _Passed | None = None
        self._rows = np.zeros((c.layers, 10, _BLOCK), np.int64)
        self._addresses: list[int] = []
        self._place_shapes()
        if comm is not None:
            self._share(rows)
            self._rows[:, _MEETINGS, _CONTROL] = comm.control_address
            self._rows[:, _MEETINGS, _RANK] = comm.rank
        self._rows[:, _MEETINGS, _SIZE] = self._shard.size

    def run_layers(self, x_TD: Tensor) -> Tensor:
        """The residual stream ``[T, D]`` after the last layer, valid until the next call; may overwrite ``x_TD``."""
        self._rows[:, :, : linear.ROWS_DONE + 1] = 0
        self._place_parameters()
        work = len(x_TD) * sum(p.numel() for p in self._model.layers[0].parameters()) // self._shard.size
        threads = team_size() if max(work, 4 * work // len(x_TD)) > linear.PARALLEL_WORK else 1
        passed = self._passed(x_TD)
        private = self._place_activations(x_TD, passed, threads)
        self._place_attention(passed.o)
        self._run_program(threads)
        del private
        return passed.x

    def _run_program(self, threads: int) -> None:
        rows = self._rows.reshape(-1, _BLOCK)
        header = _Header(0, len(rows), rows.ctypes.data, len(rows))
        kernel = compiled(self._model.dtype)
        kernel.run(header, threads)
        while (stopped := header[_STOPPED]) < len(rows):
            assert self._comm is not None
            self._comm.check()
            rows[stopped, [NEXT, FINISHED, _ARRIVED]] = 0, 0, 1
            header[_FIRST], header[_STOPPED] = stopped, len(rows)
            kernel.run(header, threads)

    def _share(self, tokens: int) -> None:
        """Allocate shared memory for batches of so many tokens."""
        assert self._comm is not None
        c, dtype = self._model.config, self._model.dtype
        widths = (c.heads * c.head_dim, c.hidden_size, c.intermediate_size, c.hidden_size)
        memory = self._comm.allocate(tokens * sum(widths) * dtype.itemsize).view(dtype)
        o, y, h, x = memory.split([tokens * width for width in widths])
        self._shared = _Passed(*(part.view(tokens, -1) for part in (o, y, h, x)))

    def _passed(self, x_TD: Tensor) -> _Passed:
        c, tokens = self._model.config, len(x_TD)
        if self._comm is None:
            widths = (c.heads * c.head_dim, c.hidden_size, c.intermediate_size)
            o, y, h = (torch.empty(tokens, width, dtype=x_TD.dtype) for width in widths)
            return _Passed(o, y, h, x_TD)
        if self._shared is None or tokens > len(self._shared.x):  # on all ranks alike
            self._share(tokens)
        assert self._shared is not None
        return _Passed(*(part[:tokens] for part in self._shared))

    def _place_shapes(self) -> None:
        c, shard, rows = self._model.config, self._shard, self._rows
        rows[:, [_WRITE, _ATTEND], _KIND] = _ATTENTION
        rows[:, _MEETINGS, _KIND] = _BARRIER
        D, Q, F = c.hidden_size, c.heads * c.head_dim, c.intermediate_size
        of_rank = shard.rows(c)
        shapes = {_QKV: (of_rank.qkv, D), _O: (of_rank.o, Q), _GATE_UP: (of_rank.gate_up, D), _DOWN: (of_rank.down, F)}
        for at, (outputs, inputs) in shapes.items():
            rows[:, at, linear.N] = outputs.stop - outputs.start
            rows[:, at, linear.K] = rows[:, at, linear.W_STRIDE] = inputs
            rows[:, at, linear.EPS] = float_word(c.rms_eps)
        rows[:, _QKV, linear.OUT_STRIDE] = rows[:, _QKV, linear.N]
        rows[:, [_O, _DOWN], linear.OUT_STRIDE] = rows[:, [_O, _DOWN], linear.RESIDUAL_STRIDE] = D
        rows[:, _GATE_UP, linear.OUT_STRIDE], rows[:, _GATE_UP, linear.BLOCK] = F, c.mlp_block

    def _place_parameters(self) -> None:
        """Addresses of all parameters, again if any has changed."""
        layers = self._model.layers
        addresses = [p.data_ptr() for layer in layers for p in layer._parameters.values() if p is not None]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        of_rank = self._shard.rows(self._model.config)._asdict()
        for name, (at, word) in _PARAMETERS.items():
            mine = of_rank.get(name.removesuffix("_bias"), slice(None))
            parameters = [getattr(layer, name) for layer in layers]
            self._rows[:, at, word] = [0 if p is None else p[mine].data_ptr() for p in parameters]

    def _place_activations(self, x_TD: Tensor, passed: _Passed, threads: int) -> tuple[Tensor, ...]:
        """Allocate what is private; returns it, to be kept until the layers have run."""
        c, rows, tokens, itemsize = self._model.config, self._rows, len(x_TD), x_TD.itemsize
        per_thread = linear.scratch_words(tokens, c.hidden_size, itemsize, c.mlp_block)
        qkv = torch.empty(tokens, int(rows[0, _QKV, linear.N]), dtype=x_TD.dtype)
        normed = torch.empty(tokens, c.hidden_size, dtype=x_TD.dtype)
        scratch = torch.empty(threads * per_thread, dtype=x_TD.dtype)
        o, y, h, x = (part.data_ptr() for part in passed)
        hidden, mlp = self._shard.hidden[0] * itemsize, self._shard.mlp_columns(c)[0] * itemsize
        rows[:, _QKV, [linear.M, linear.X, linear.NORMED, linear.OUT]] = tokens, x, normed.data_ptr(), qkv.data_ptr()
        plain = [linear.M, linear.X, linear.NORMED, linear.RESIDUAL, linear.OUT]
        rows[:, _O, plain] = tokens, o, o, x + hidden, y + hidden
        gated = [linear.M, linear.X, linear.NORMED, linear.OUT, linear.SCRATCH]
        rows[:, _GATE_UP, gated] = tokens, y, normed.data_ptr(), h + mlp, scratch.data_ptr()
        rows[:, _DOWN, plain] = tokens, h, h, y + hidden, x + hidden
        rows[0, _QKV, linear.X], rows[0, _O, linear.RESIDUAL] = x_TD.data_ptr(), x_TD.data_ptr() + hidden
        self._rows[:, [_WRITE, _ATTEND], attention.QKV] = qkv.data_ptr()
        return qkv, normed, scratch

    def _place_attention(self, o_TQ: Tensor) -> None:
        announced, attend = self.announced(), self._rows[:, _ATTEND]
        qkv = attend[:, attention.QKV].copy()
        attend[:, : attention.Q_NORM] = announced[: attention.Q_NORM]
        attend[:, attention.K_NORM + 1 : attention.WORDS] = announced[attention.K_NORM + 1 :]
        attend[:, attention.LAYER], attend[:, attention.QKV] = np.arange(len(attend)), qkv
        attend[:, attention.OUT] = o_TQ[:, self._shard.query_columns(self._model.config)[0] :].data_ptr()
        attend[:, attention.OUT_STRIDE] = o_TQ.stride(0)
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
    header = carray(pointer, 4, np.int64)
    for i in range(header[_FIRST], header[_COUNT]):
        row = as_pointer(header[_ADDRESS] + i * _BLOCK * 8)
        args = carray(row, _BLOCK, np.int64)
        if args[_KIND] == _BARRIER:
            if args[_SIZE] > 1 and not _meet(args):
                header[_STOPPED] = i
                return
            continue
        items = linear_items(row, dtype) if args[_KIND] == _LINEAR else attention_items(row, dtype)
        while atomic_load(args, FINISHED) < items:
            pass


@jit
def _meet(args):
    """Whether all ranks have come here; False when they are late, for all threads of the team alike.

    One thread speaks for the team: each comes here only when all items before are finished.
    """
    if fetch_add(args, NEXT, 1) == 0:
        control = carray(as_pointer(args[_CONTROL]), CONTROL_WORDS, np.int64)
        if args[_ARRIVED] == 0:
            arrive(control, args[_RANK])
        fetch_add(args, FINISHED, _PASSED if wait(control, args[_RANK], args[_SIZE], SPINS) else _GAVE_UP)
    while atomic_load(args, FINISHED) == 0:
        pass
    return atomic_load(args, FINISHED) == _PASSED
