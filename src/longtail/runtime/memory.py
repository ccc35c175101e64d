"""Does it fit? A ledger of what each pipeline takes on each worker, granted one after another before anything starts.

Every worker keeps a pipeline's whole weights and the sum of its gradients, its share of the optimizer state, and its KV
blocks, for as long as the run lasts; and what a micro-batch keeps until its end, as others may have their turn before
it (``cluster/slices.py``). What a decode step needs, or on CUDA a micro-batch, lives within one quantum, and quanta of
different pipelines never overlap on a worker, so only the largest of them counts. All figures are bytes on one worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from longtail.core.config import Pipeline
from longtail.core.errors import CapacityError
from longtail.engine.config import ModelConfig
from longtail.engine.shard import head_bounds
from longtail.planner.tree import possible_degrees
from longtail.rl.exact import PIECE
from longtail.rl.packing import LEAST_TOKENS

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
BLOCK_TOKENS = 16
"""Positions of a KV block: the default of :class:`longtail.engine.lanes.LanePool`."""
LOGITS_CHUNK = 1 << 24
"""Logits that the trainer holds at once (``rl/logprobs.py``)."""
SUM_BYTES = 8
"""An element of the sum of gradients (``rl/exact.py``), whatever the dtype of the weights."""
PROCESS_BYTES = 500 << 20
"""What a worker process takes before it has loaded anything (Python, torch, Ray, transformers; 490 MiB measured)."""
USABLE = 0.92
"""Share of the free memory that is handed out; the rest is for fragmentation and the controller."""


@dataclass(frozen=True)
class Footprint:
    """What one pipeline takes. ``kv_wanted`` is the KV cache of all of a step that may come to a worker, ``kv_least``
    of one sequence, ``kv`` what it was given; ``training`` is a micro-batch that is left before its end, ``peak`` the
    largest quantum."""

    weights: int
    gradients: int
    optimizer: int
    peak: int
    kv_wanted: int
    kv_least: int
    kv: int = 0
    training: int = 0

    @property
    def resident(self) -> int:
        """All but the KV cache and the peak."""
        return self.weights + self.gradients + self.optimizer + self.training

    @property
    def most_training(self) -> int:
        """While it trains."""
        return self.training + self.peak


@dataclass(frozen=True)
class Shape:
    """The sizes of a pipeline's work: the longest prompt in tokens, on how many workers, and whether they are
    shared in such a way that a whole rollout may come to one of them. ``slices``: micro-batches are left before their
    end for others."""

    prompt_tokens: int
    workers: int
    company: bool = False
    slices: bool = False


def footprint(config: ModelConfig, parameters: int, pipeline: Pipeline, shape: Shape) -> Footprint:
    """What ``pipeline`` takes of each worker; ``kv`` is set only where the job file sets it (``kv_gib``)."""
    item = ITEM_BYTES[pipeline.dtype]
    wide = max(item, 4)
    copies = 1 + (pipeline.algorithm.beta > 0) + (pipeline.max_staleness > 0)
    states = 2 + (item < wide)
    kv_gib = pipeline.rollout.kv_gib
    activations, passing = _training(config, pipeline, shape, item)
    return Footprint(
        weights=copies * parameters * item,
        gradients=parameters * SUM_BYTES,
        optimizer=-(-states * parameters * wide // shape.workers),
        peak=max(
            passing if shape.slices else activations + passing,
            _decoding_peak(config, pipeline, shape),
            SUM_BYTES * min(PIECE, parameters) if shape.workers > 1 else 0,  # sums that come in from others
        ),
        kv_wanted=blocks_wanted(config, pipeline, shape) * block_bytes(config, pipeline),
        kv_least=blocks_least(config, pipeline, shape) * block_bytes(config, pipeline),
        kv=int(kv_gib * GIB) if kv_gib is not None else 0,
        training=activations if shape.slices else 0,
    )


def block_bytes(config: ModelConfig, pipeline: Pipeline) -> int:
    """Keys and values of one KV head over ``BLOCK_TOKENS`` positions, all layers."""
    return 2 * config.layers * config.head_dim * BLOCK_TOKENS * ITEM_BYTES[pipeline.dtype]


def blocks_least(config: ModelConfig, pipeline: Pipeline, shape: Shape) -> int:
    """Blocks of the longest possible sequence."""
    return config.kv_heads * _blocks(shape.prompt_tokens + pipeline.rollout.max_tokens)


def blocks_wanted(config: ModelConfig, pipeline: Pipeline, shape: Shape) -> int:
    """Blocks with which no sequence of a step is ever preempted: all prompts longest, all samples full.

    In a tensor-parallel group of t workers, the one with the most KV heads holds those of t workers' sequences. In
    company, a whole rollout may be placed on one worker, or its tail be moved there.
    """
    share = max(
        Fraction(degree * max(last - first for first, last in head_bounds(config.kv_heads, degree)), config.kv_heads)
        for degree in sampling_degrees(config, pipeline, shape.workers)
    )
    wanted = ceil(share * _narrow_blocks_wanted(config, pipeline, shape))
    if shape.company:
        wanted = max(wanted, _narrow_blocks_wanted(config, pipeline, replace(shape, workers=1)))
    return max(wanted, blocks_least(config, pipeline, shape))


def sampling_degrees(config: ModelConfig, pipeline: Pipeline, workers: int) -> tuple[int, ...]:
    """The tensor-parallel degrees in which a pipeline may come to sample on so many workers."""
    tp = pipeline.rollout.tp
    most = min(workers, config.kv_heads)
    return (1, min(tp, most)) if isinstance(tp, int) else possible_degrees(workers, most)


def _narrow_blocks_wanted(config: ModelConfig, pipeline: Pipeline, shape: Shape) -> int:
    requests, samples = _requests(pipeline, shape.workers)
    running = min(requests * samples, pipeline.rollout.max_running)
    prompts = -(-running // samples)
    whole = shape.prompt_tokens // BLOCK_TOKENS
    own = _blocks(shape.prompt_tokens + pipeline.rollout.max_tokens) - whole
    # The prompt's last block is held once more until the last sample has its own copy of it.
    return config.kv_heads * (prompts * (whole + 1) + running * own)


def admit(footprints: Mapping[str, Footprint], free_bytes: int | None, workers: int) -> dict[str, Footprint]:
    """Grant each pipeline its KV cache, in order: what it asks for, else what its step needs, else a fair part of what
    is left but never less than one sequence.

    ``free_bytes`` is what one worker has; None means unknown (a Ray cluster), and grants everything. Raises
    :class:`CapacityError` naming the first pipeline that does not fit beside those before it, with the sum.
    """
    if free_bytes is None:
        return {name: replace(f, kv=f.kv or f.kv_wanted) for name, f in footprints.items()}
    budget = int(free_bytes * USABLE)
    taken = peak = 0
    for name, f in footprints.items():
        peak = max(peak, f.peak)
        least = f.kv or f.kv_least
        if taken + f.resident + least + peak > budget:
            raise CapacityError(_does_not_fit(name, f, least, peak, taken, budget, workers))
        taken += f.resident + least
    spare = budget - taken - peak
    wishes = {name: max(0, f.kv_wanted - f.kv_least) for name, f in footprints.items() if not f.kv}
    share = min(1.0, spare / total) if (total := sum(wishes.values())) else 1.0
    return {name: replace(f, kv=f.kv or f.kv_least + int(wishes[name] * share)) for name, f in footprints.items()}


def gib(size: float) -> str:
    """``0.5 GiB``, or MiB below 0.1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{max(1, round(size / (1 << 20)))} MiB"


def _does_not_fit(name: str, f: Footprint, kv: int, peak: int, taken: int, budget: int, workers: int) -> str:
    parts = f"weights {gib(f.weights)} + gradients {gib(f.gradients)} + optimizer {gib(f.optimizer)} + KV {gib(kv)}"
    parts += f" + training {gib(f.training + peak)} on each of {workers} worker{'s' * (workers > 1)}"
    others = f", {gib(taken)} taken by the pipelines before it" if taken else ""
    kv_advice = "Lower rollout.kv_gib" if f.kv else "Lower rollout.max_tokens"
    return (
        f"{name} does not fit: {parts}, "
        f"{gib(budget)} free{others}. {kv_advice} or train.micro_tokens, use bfloat16, or run fewer pipelines together."
    )


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _requests(pipeline: Pipeline, workers: int) -> tuple[int, int]:
    """(requests, samples of each) that one worker gets at most; see ``StepBatch.requests``."""
    prompts, group = pipeline.rollout.prompts, pipeline.algorithm.group_size
    parts = min(group, max(1, -(-workers // prompts)))
    return -(-prompts * parts // workers), -(-group // parts)


def _training(c: ModelConfig, pipeline: Pipeline, shape: Shape, item: int) -> tuple[int, int]:
    """(What autograd keeps of one micro-batch; what comes and goes without a pause between: a chunk of logits with its
    gradient, and the gradients of the vocabulary: of the head, in float32 at least, and of the embeddings). The
    gradients of layers come one by one and are small beside these.

    A token keeps, per layer, about 4 hidden vectors, 3 QKV rows (projection, rotated, padded), 2 attention outputs and
    5 MLP rows; the sum is 4 to 20 % above what was measured for SmolLM2-135M with 1,024 to 4,096 tokens.
    """
    tokens = largest_micro_batch(pipeline, shape)
    per_layer = 4 * c.hidden_size + 3 * c.kv_heads * c.qkv_rows_per_kv + 2 * c.heads * c.head_dim
    per_layer += 5 * c.intermediate_size
    activations = tokens * (c.layers * per_layer + 4 * c.hidden_size) * item
    wide = max(item, 4)
    logits = min(LOGITS_CHUNK, tokens * c.vocab_size) * wide
    return activations, 2 * logits + c.vocab_size * c.hidden_size * (wide + item)


def largest_micro_batch(pipeline: Pipeline, shape: Shape) -> int:
    """Tokens of the largest in any plan (``rl/packing.py``): an even share of the step or a group that is not split,
    and another one with it if that is small; or a single sample."""
    group = shape.prompt_tokens + pipeline.algorithm.group_size * pipeline.rollout.max_tokens
    step = pipeline.rollout.prompts * group
    most = max(-(-step // shape.workers), group, LEAST_TOKENS) + LEAST_TOKENS
    longest = shape.prompt_tokens + pipeline.rollout.max_tokens
    return max(longest, min(pipeline.train.micro_tokens, step, most))


def _decoding_peak(c: ModelConfig, pipeline: Pipeline, shape: Shape) -> int:
    """Logits of one decode step, twice: as they come and as the sampler works on them."""
    requests, samples = _requests(pipeline, 1 if shape.company else shape.workers)
    running = min(requests * samples, pipeline.rollout.max_running)
    return 2 * running * c.vocab_size * 4
