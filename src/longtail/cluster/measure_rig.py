"""An engine whose sequences are made up: any number of them, of any length, without computing a prompt.

How long a step takes depends on where keys and values lie and how many there are, not on what they are. But they must
lie somewhere: memory that was never written is one and the same page, which is always in cache.
"""

from __future__ import annotations

import time
import weakref

import numpy as np

from longtail.core.comm import Communicator
from longtail.core.config import Rollout
from longtail.core.types import Request, SamplingParams
from longtail.engine.blocks import MISSING, BlockStore
from longtail.engine.cargo import CargoGroup, CargoSample
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder
from longtail.engine.shard import shard_of

STEPS = 16
"""Most decode steps after a :meth:`Rig.fill`: its lanes have room for so many tokens more."""
_LIMIT = 1 << 20
"""Tokens after which a made-up sequence would end: never."""
_written: weakref.WeakKeyDictionary[BlockStore, np.ndarray] = weakref.WeakKeyDictionary()
"""Of each store: which blocks have been written here."""


class Rig:
    """Makes sequences in ``columns`` blocks of each KV head of ``store``; one rank of a group if ``comm`` has several.

    Samples as ``rollout`` does. As with :class:`Engine`, all ranks of a group must do the same. Raises
    :class:`CapacityError` where memory does not suffice. What it holds of the store is given back by :meth:`close`.
    """

    def __init__(
        self, model: Decoder, store: BlockStore, rollout: Rollout, *, columns: int, comm: Communicator | None = None
    ) -> None:
        heads = (0, model.config.kv_heads)
        if comm is not None and comm.size > 1:
            heads = shard_of(model.config, comm.rank, comm.size).heads
        self._store, self._vocab_size = store, model.config.vocab_size
        self._params = SamplingParams(
            max_tokens=_LIMIT, temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p
        )
        pool = LanePool.over(store, range(*heads), columns)
        try:
            self._engine = Engine(
                model, pool, max_running=rollout.max_running, chunk_tokens=rollout.chunk_tokens, comm=comm
            )
        except BaseException:
            pool.vacate()
            raise

    def warm_up(self) -> None:
        """The first step of an engine loads kernels and makes buffers."""
        self.fill(2, 2)
        self.step()
        self.clear()

    def fill(self, batch: int, context: int) -> None:
        """``batch`` sequences with ``context`` tokens in their lanes each, in place of those before."""
        self.clear()
        width = self._engine.lanes.blocks_of(context)
        columns = np.full((batch * width, self._engine.lanes.heads), MISSING, np.int32)
        prompt = self._tokens(context)
        groups = []
        for i in range(batch):
            sample = CargoSample(
                sample=0,
                tokens=np.array([i % self._vocab_size], np.int32),
                logprobs=np.zeros(1),
                preemptions=0,
                lanes=np.arange(i * width, (i + 1) * width, dtype=np.int32),
            )
            request = Request(
                request_id=f"made-up {i}", prompt=prompt, seeds=(i,), params=self._params, forced_lengths=(_LIMIT,)
            )
            groups.append(CargoGroup(request=request, limits=(_LIMIT,), samples=(sample,), prompt=None))
        self._engine.adopt(groups, columns)
        write(self._store, columns.ravel())

    def step(self) -> float:
        """Seconds of one decode step of all sequences: layers, logits, sampling and what is around them."""
        start = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        """Seconds of computing a prompt of ``tokens`` (at most one chunk) with the first token after it."""
        request = Request(
            request_id="prompt", prompt=self._tokens(tokens), seeds=(0,), params=self._params, forced_lengths=(2,)
        )
        self._engine.add(request)
        start = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - start
        self._engine.abort(request.request_id)
        return seconds

    def clear(self) -> None:
        """Forget all sequences."""
        for request_id in self._engine.request_ids:
            self._engine.abort(request_id)

    def close(self) -> None:
        self._engine.let_go()

    def _tokens(self, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int32) % self._vocab_size


def write(store: BlockStore, blocks: np.ndarray) -> None:
    """Make those of ``blocks`` that nothing here has written yet be somewhere in memory; their contents are lost."""
    written = _written.setdefault(store, np.zeros(store.total, bool))
    fresh = np.unique(blocks[~written[blocks]])
    for block in fresh.tolist():
        store.k[block].zero_()
        store.v[block].zero_()
    written[fresh] = True
