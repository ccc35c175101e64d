"""A quantum of each class of work of a pipeline, made up, to be repeated beside other work."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from longtail.cluster.measure_rig import STEPS, Rig
from longtail.cluster.measure_sampling import COARSE_BATCHES, LEAST_BATCHES, Room, choose_contexts, step_s
from longtail.cluster.measure_together import Pace, Together, Work
from longtail.cluster.measure_training import Training
from longtail.core.errors import CapacityError

if TYPE_CHECKING:
    from longtail.cluster.tenant import Tenant

PROBE = Pace(0.02, 1, 3)
PROBE_TOKENS, PROBE_BATCH = 16, 8
LEAST_TRAIN_TOKENS = 8
LONGEST = 512
"""Tokens that made-up sequences have at most."""


class Sizes(NamedTuple):
    """``prefill`` tokens of a chunk, ``train`` of a micro-batch, and ``context`` of each sequence of a decode step, of
    which a large batch has at most ``large``."""

    prefill: int
    train: int
    context: int
    large: int


def work_classes(tenant: Tenant, room: Room, sizes: Sizes, stack: contextlib.ExitStack) -> dict[str, Work]:
    """By class (``costs/interference.py``); those for which lanes are too few are left out. ``stack`` gives back what
    they hold."""

    def rig(columns: int) -> Rig:
        made = Rig(tenant.model, tenant.store, tenant.rollout, columns=columns)
        stack.callback(made.close)
        return made

    classes: dict[str, Work] = {}
    columns = -(-(sizes.prefill + STEPS) // room.block_tokens)
    left = room.columns - columns
    classes["prefill"] = partial(rig(columns).prefill, sizes.prefill)
    each = -(-(sizes.context + STEPS) // room.block_tokens)
    large = min(sizes.large, left // each - 1)
    for name, batch in (("decode_small", 1), ("decode_large", max(1, large))):
        if batch * each <= left:
            left -= batch * each
            classes[name] = _Decoding(rig(batch * each), batch, sizes.context).run
    classes["train"] = Training(tenant.trainer, sizes.train, max_tokens=tenant.rollout.max_tokens).run
    return classes


def quick_classes(tenant: Tenant, together: Together, quantum_s: float, stack: contextlib.ExitStack) -> dict[str, Work]:
    """:func:`work_classes` of quanta that take about ``quantum_s`` each, by a quick look at what they take here; longer
    ones where even the shortest do.

    Collective. Raises :class:`CapacityError` on all workers alike where lanes are too few to measure anything.
    """
    store, rollout, config = tenant.store, tenant.rollout, tenant.model.config
    free = int(-together.slowest(-store.free))
    room = Room(free // config.kv_heads, store.block_tokens)
    samples = rollout.prompts * tenant.trainer.algorithm.group_size
    batch = max(LEAST_BATCHES, min(rollout.max_running, -(-samples // together.size)))
    contexts = choose_contexts(
        room, batch=batch, max_tokens=rollout.max_tokens, max_context=config.max_context, most=LONGEST, count=3
    )
    if not contexts:
        raise CapacityError(
            f"the KV memory of {tenant.name} holds {free} blocks of {store.block_tokens} tokens, too few to measure"
            " costs with; raise rollout.kv_gib"
        )
    context = contexts[len(contexts) // 2]
    rig = Rig(tenant.model, store, rollout, columns=room.columns)
    try:
        rig.warm_up()
        most = min(rollout.chunk_tokens, room.longest(4), config.max_context - STEPS)
        probe = max(1, min(PROBE_TOKENS, most))
        prefill_s = together.median_s(partial(rig.prefill, probe), PROBE) / probe
        fitting = [b for b in (*COARSE_BATCHES, batch) if b <= batch and room.holds(b + 1, context)] or [1]
        probe = max(b for b in fitting if b <= PROBE_BATCH)
        sequence_s = step_s(together, rig, probe, context, PROBE) / probe
    finally:
        rig.close()
    micro = min(tenant.trainer.train.micro_tokens, config.max_context, LONGEST)
    training = Training(tenant.trainer, min(PROBE_TOKENS, micro), max_tokens=rollout.max_tokens)
    train_s = together.median_s(training.run, PROBE) / training.tokens
    sizes = Sizes(
        prefill=max(1, min(most, round(quantum_s / prefill_s))),
        train=max(LEAST_TRAIN_TOKENS, min(micro, round(quantum_s / train_s))),
        context=context,
        large=max(b for b in fitting if b <= max(PROBE_BATCH, quantum_s / sequence_s)),
    )
    return work_classes(tenant, room, sizes, stack)


class _Decoding:
    """Decode steps without end: the same sequences begin anew before they outgrow their lanes."""

    def __init__(self, rig: Rig, batch: int, context: int) -> None:
        self._rig, self._batch, self._context = rig, batch, context
        self._left = 0

    def run(self) -> float:
        if self._left == 0:
            self._rig.fill(self._batch, self._context)
            self._left = STEPS
        self._left -= 1
        return self._rig.step()
