"""All layers of a forward pass as one call: a list of kernels that a team of threads runs through together.

At small batches a step is some hundred kernels of a few microseconds each, and calling them one by one from Python
costs as much again. Here each kernel's argument block is a row of one array; a thread that finds no more items in one
waits until those of the others are finished, and goes on to the next.

In a tensor-parallel group on one host, each rank computes its columns (``engine/shard.py``) of what the layers pass on,
in memory that all ranks share, and rows between the kernels are barriers. A layer, with its private part in brackets::

    [qkv = norm(x) Wqkv]   o = attention(qkv)   BARRIER   y = x + o Wo          BARRIER
                           h = swiglu(norm(y))  BARRIER   x = y + h Wdown       BARRIER

Where the ranks have different numbers of KV heads, the projection would keep one waiting: qkv is dealt evenly, too, in
shared memory, and a fifth barrier stands before attention.

The barrier before each reader of other ranks' columns keeps reads behind writes. The same barriers also keep a buffer's
next write behind its last reads: every rank reads o, y, h (and qkv) before the barrier that follows, and they are
written again a layer later; x is read by the next layer's first kernel and written again three barriers later. So a
rank that passes the last barrier before it writes knows that all have read. Residuals are read by their own writer
alone. After the last layer x is read by the final norm, and what is written next may be another program's in the same
memory (``ShmCommunicator.scratch``): therefore a program begins with a barrier, too.
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
from longtail.engine.shard import CACHE_LINE, cut, shard_of
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
(_MEET, _QKV, _MEET_QKV, _WRITE, _ATTEND, _MEET_O, _O, _MEET_Y, _GATE_UP, _MEET_H, _DOWN, _MEET_X) = range(12)
"""Rows of a layer; ``_WRITE`` only has work where a chunk's keys must be in place before its queries, and a barrier of
one rank is none."""
_MEETINGS = (_MEET, _MEET_QKV, _MEET_O, _MEET_Y, _MEET_H, _MEET_X)
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
    """What kernels pass on, one row a token: ``o`` ``[T, Q]``, ``y`` and ``x`` ``[T, D]``, ``h`` ``[T, F]``, all whole,
    and ``qkv`` ``[T, E]``, whole or of the rank's own heads."""

    qkv: Tensor
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
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._model, self._comm, self._shard = model, comm, shard_of(c, rank, size)
        self._of_rank, self._shares_qkv = self._shard.rows(c), c.kv_heads % size > 0
        if self._shares_qkv:
            even = cut(c.kv_heads * c.qkv_rows_per_kv, CACHE_LINE, size)
            self._of_rank = self._of_rank._replace(qkv=slice(*even[rank]))
        self._rows = np.zeros((c.layers, 12, _BLOCK), np.int64)
        self._addresses: list[int] = []
        self._shared: list[Tensor] = []
        """What is shared of ``_Passed``, in the order of its fields, for as many tokens as there may be."""
        self._place_shapes()
        if comm is not None:
            self._place_meetings(comm)
            self._share(rows)

    def run_layers(self, x_TD: Tensor) -> Tensor:
        """The residual stream ``[T, D]`` after the last layer, valid until the next call; may overwrite ``x_TD``."""
        self._rows[:, :, : linear.ROWS_DONE + 1] = 0
        self._place_parameters()
        work = len(x_TD) * sum(p.numel() for p in self._model.layers[0].parameters()) // self._shard.size
        threads = team_size() if max(work, 4 * work // len(x_TD)) > linear.PARALLEL_WORK else 1
        passed = self._passed(x_TD)
        private = self._place_activations(x_TD, passed, threads)
        self._place_attention(passed)
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
        """Shared memory for batches of so many tokens; no other engine works while this one does."""
        assert self._comm is not None
        dtype, widths = self._model.dtype, self._widths()[not self._shares_qkv :]
        memory = self._comm.scratch(tokens * sum(widths) * dtype.itemsize).view(dtype)
        parts = memory.split([tokens * width for width in widths])
        self._shared = [part.view(tokens, width) for part, width in zip(parts, widths, strict=True)]

    def _passed(self, x_TD: Tensor) -> _Passed:
        """Memory for a batch; ``x`` is that of ``x_TD`` where nothing is shared."""
        tokens = len(x_TD)
        if self._comm is not None and tokens > len(self._shared[0]):  # on all ranks alike
            self._share(tokens)
        shared = [part[:tokens] for part in self._shared] or [x_TD]
        private = [torch.empty(tokens, width, dtype=x_TD.dtype) for width in self._widths()[: 5 - len(shared)]]
        return _Passed(*private, *shared)

    def _widths(self) -> list[int]:
        """Of the fields of ``_Passed``."""
        c = self._model.config
        qkv = c.kv_heads * c.qkv_rows_per_kv if self._shares_qkv else self._of_rank.qkv.stop - self._of_rank.qkv.start
        return [qkv, c.heads * c.head_dim, c.hidden_size, c.intermediate_size, c.hidden_size]

    # Argument blocks

    def _place_shapes(self) -> None:
        c, rows, of_rank = self._model.config, self._rows, self._of_rank
        E, Q, D, F, _ = self._widths()
        for at, of_kernel, inputs, width in (
            (_QKV, of_rank.qkv, D, E),
            (_O, of_rank.o, Q, D),
            (_GATE_UP, of_rank.gate_up, D, F),
            (_DOWN, of_rank.down, F, D),
        ):
            rows[:, at, linear.N] = of_kernel.stop - of_kernel.start
            rows[:, at, linear.K] = rows[:, at, linear.W_STRIDE] = inputs
            rows[:, at, linear.OUT_STRIDE] = rows[:, at, linear.RESIDUAL_STRIDE] = width
            rows[:, at, linear.EPS] = float_word(c.rms_eps)
        rows[:, _GATE_UP, linear.BLOCK] = c.mlp_block
        for at in (_WRITE, _ATTEND):
            rows[:, at, _KIND] = _ATTENTION
        rows[:, _MEETINGS, _KIND], rows[:, _MEETINGS, _SIZE] = _BARRIER, 1

    def _place_meetings(self, comm: ShmCommunicator) -> None:
        for word, value in ((_CONTROL, comm.control_address), (_RANK, comm.rank), (_SIZE, comm.size)):
            self._rows[:, _MEETINGS, word] = value
        self._rows[1:, _MEET, _SIZE] = 1
        if not self._shares_qkv:
            self._rows[:, _MEET_QKV, _SIZE] = 1

    def _place_parameters(self) -> None:
        """Addresses of all parameters, again if any has changed."""
        layers = self._model.layers
        addresses = [p.data_ptr() for layer in layers for p in layer._parameters.values() if p is not None]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        of_rank = self._of_rank._asdict()
        for name, (at, word) in _PARAMETERS.items():
            mine = of_rank.get(name.removesuffix("_bias"), slice(None))
            parameters = [getattr(layer, name) for layer in layers]
            self._rows[:, at, word] = [0 if p is None else p[mine].data_ptr() for p in parameters]

    def _place_activations(self, x_TD: Tensor, passed: _Passed, threads: int) -> tuple[Tensor, ...]:
        """Where the projections read and write; returns what is allocated for them, to be kept until they have run."""
        c, rows, tokens, itemsize = self._model.config, self._rows, len(x_TD), x_TD.itemsize
        per_thread = linear.scratch_words(tokens, c.hidden_size, itemsize, c.mlp_block)
        scratch = torch.empty(threads * per_thread, dtype=x_TD.dtype)
        normed = torch.empty(tokens, c.hidden_size, dtype=x_TD.dtype)
        a_normed, a_in = normed.data_ptr(), x_TD.data_ptr()
        qkv, o, y, h, x = (part.data_ptr() for part in passed)
        at_qkv = self._of_rank.qkv.start * itemsize if self._shares_qkv else 0
        at_hidden, at_mlp = self._shard.hidden[0] * itemsize, self._shard.mlp_columns(c)[0] * itemsize
        rows[:, _QKV, [linear.M, linear.X, linear.NORMED, linear.OUT]] = tokens, x, a_normed, qkv + at_qkv
        plain = [linear.M, linear.X, linear.NORMED, linear.RESIDUAL, linear.OUT]
        rows[:, _O, plain] = tokens, o, o, x + at_hidden, y + at_hidden
        gated = [linear.M, linear.X, linear.NORMED, linear.OUT, linear.SCRATCH]
        rows[:, _GATE_UP, gated] = tokens, y, a_normed, h + at_mlp, scratch.data_ptr()
        rows[:, _DOWN, plain] = tokens, h, h, y + at_hidden, x + at_hidden
        rows[0, _QKV, linear.X], rows[0, _O, linear.RESIDUAL] = a_in, a_in + at_hidden
        return normed, scratch

    def _place_attention(self, passed: _Passed) -> None:
        c, announced, attend = self._model.config, self.announced(), self._rows[:, _ATTEND]
        attend[:, : attention.Q_NORM] = announced[: attention.Q_NORM]
        attend[:, attention.K_NORM + 1 : attention.WORDS] = announced[attention.K_NORM + 1 :]
        attend[:, attention.LAYER] = np.arange(len(attend))
        first = self._shard.rows(c).qkv.start if self._shares_qkv else 0
        attend[:, attention.QKV] = passed.qkv.data_ptr() + first * passed.qkv.itemsize
        attend[:, attention.OUT] = passed.o.data_ptr() + self._shard.query_columns(c)[0] * passed.o.itemsize
        attend[:, attention.QKV_STRIDE], attend[:, attention.OUT_STRIDE] = passed.qkv.stride(0), passed.o.stride(0)
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
