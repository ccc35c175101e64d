"""The engine: requests in, tokens and completions out, one quantum per :meth:`Engine.step`.

Same requests and same number of steps give the same bits, whatever else the process does. A sample's tokens depend on
its prompt, parameters and seed alone, not on the batch, the order, the chunk size or the size of the lane pool
(exactly up to the rounding of the matrix products, whose kernels vary with the number of rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import torch

from longtail.core.comm import Communicator
from longtail.core.errors import CapacityError, ModelError, RequestError
from longtail.core.types import Completion, Emitted, FinishReason, Request, SamplingParams, SubStage
from longtail.engine import attention, jit, linear, program, sampling, sharded_sampling, shm
from longtail.engine.attention import LaneAttention
from longtail.engine.attention_torch import TorchLaneAttention
from longtail.engine.cargo import Cargo, CargoGroup, lanes_of, pack
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder
from longtail.engine.program import LayerProgram
from longtail.engine.sampling import NOT_FINITE, Draws, Sampler, filters
from longtail.engine.scheduler import FRESH, Fill, Group, Scheduler
from longtail.engine.sequences import Sequences
from longtail.engine.sharded import ShardedDecoder
from longtail.engine.sharded_sampling import ShardedSampler
from longtail.engine.shm import ShmCommunicator
from longtail.engine.stop import stop_position
from longtail.engine.top_logprobs import top_logprobs

MOST_TOP_LOGPROBS = 20
MOST_TEMPERATURE = 1e30
"""Far above it, 1 / temperature is 0 in float32, and no draw is defined."""


@dataclass(slots=True)
class StepResult:
    """What one quantum did. ``tokens`` counts the positions computed, ``batch`` the sequences that they belong to;
    ``context`` is how many positions all of those have now.

    ``emitted`` lists the tokens drawn, in batch order; each token of a sample appears once, in order.
    """

    substage: SubStage
    tokens: int
    batch: int
    context: int = 0
    emitted: list[Emitted] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)


class Engine:
    """Continuous batching of ``model`` over ``lanes``.

    ``detokenize`` turns generated ids into text; without it completions have empty texts and stop strings are
    refused. ``max_context`` lowers the model's own. Prefill goes before decode, so that batches are full.

    With a ``comm`` of several ranks this is one rank of a tensor-parallel group, and ``lanes`` holds the KV heads of
    its shard (``engine/shard.py``), with as many blocks for each head as on every other rank. All ranks must get the
    same calls in the same order. They make the same schedule and the same draws, without a word about it, and their
    results are equal. Construction and :meth:`step` are collective, and raise :class:`PeerLost`.

    >>> engine.add(Request(request_id="a", prompt=np.array([1, 2]), seeds=(0, 1), params=SamplingParams(max_tokens=8)))
    >>> while engine.has_work:
    ...     for completion in engine.step().completions:
    ...         print(completion.text)
    """

    def __init__(
        self,
        model: Decoder,
        lanes: LanePool,
        *,
        detokenize: Callable[[list[int]], str] | None = None,
        max_running: int = 256,
        chunk_tokens: int = 512,
        max_context: int | None = None,
        comm: Communicator | None = None,
    ) -> None:
        self.model, self.lanes = model, lanes
        self._detokenize = detokenize
        self._chunk_tokens = chunk_tokens
        self._max_context = min(max_context or model.config.max_context, model.config.max_context)
        self._sequences = Sequences()
        self._scheduler = Scheduler(lanes, self._sequences, max_running)
        self._groups: dict[str, Group] = {}
        self._next_number = 0
        self._sample = Sampler(model.config.vocab_size)
        self._decoder: Decoder | ShardedDecoder = model
        self._sample_sharded: ShardedSampler | None = None
        if comm is not None and comm.size > 1:
            self._decoder = ShardedDecoder(model, comm, lanes.kv_heads)
            self._sample_sharded = ShardedSampler(comm, self._decoder.vocab)
        self._attend = _attention(model, lanes, comm, rows=max(chunk_tokens, max_running))

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises :class:`RequestError` for values that no engine could serve, and :class:`CapacityError` if the request
        can never fit the context or the lane pool.
        """
        limits = self._check(request)
        group = Group(request, self._next_number, limits)
        self._next_number += request.samples
        self._groups[request.request_id] = group
        self._scheduler.submit(group)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its lanes at once; unknown (or finished) ids are ignored."""
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._scheduler.abort(group)

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that have not ended, oldest first."""
        return list(self._groups)

    @property
    def waiting(self) -> int:
        """Samples that hold no lanes of their own (a group whose prompt is being prefilled counts as running)."""
        return sum(w.group.request.samples if w.slot == FRESH else 1 for w in self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Samples that decode, or whose KV is being computed."""
        fills = sum(f.group.request.samples if f.slot == FRESH else 1 for f in self._scheduler.fills)
        return len(self._scheduler.running) + fills

    def progress(self) -> dict[str, np.ndarray]:
        """Tokens so far of every request in flight: int32 [samples], -1 for those that have ended; an empty array while
        its prompt is not prefilled."""
        seq, found = self._sequences, {}
        for request_id, group in self._groups.items():
            generated = np.full(group.request.samples if group.slots else 0, -1, np.int32)
            generated[seq.sample[group.slots]] = seq.generated[group.slots]
            found[request_id] = generated
        return found

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its lanes so far."""
        return self._scheduler.preemptions

    @property
    def recomputed_tokens(self) -> int:
        """Positions whose KV was computed again after a preemption, so far."""
        return self._scheduler.recomputed_tokens

    # Quanta

    def next_substage(self) -> SubStage:
        """What :meth:`step` would do next; changes nothing."""
        return SubStage.PREFILL if self._scheduler.prefills_next() else SubStage.DECODE

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Run one quantum: one decode step of all running sequences, or one prefill chunk."""
        if not self.has_work:
            raise RuntimeError("step() was called on an engine without requests; ask has_work first")
        self._scheduler.admit()
        return self._prefill() if self._scheduler.fills else self._decode()

    def _prefill(self) -> StepResult:
        chunks: list[tuple[Fill, int]] = []
        budget = self._chunk_tokens
        for fill in sorted(self._scheduler.fills, key=lambda f: f.number):
            count = min(budget, len(fill.tokens) - fill.done)
            chunks.append((fill, count))
            budget -= count
            if budget == 0:
                break
        counts = np.array([count for _, count in chunks])
        tokens = np.concatenate([fill.tokens[fill.done : fill.done + count] for fill, count in chunks])
        hidden_TD = self._forward(
            tokens.astype(np.int64),
            np.array([fill.row for fill, _ in chunks]),
            np.array([fill.done for fill, _ in chunks]),
            counts,
        )
        context = sum(fill.done + count for fill, count in chunks)
        result = StepResult(SubStage.PREFILL, len(tokens), len(chunks), context)
        prompts: list[Fill] = []
        last_rows: list[int] = []
        for (fill, count), end in zip(chunks, np.cumsum(counts), strict=True):
            fill.done += count
            if fill.done < len(fill.tokens):
                continue
            if fill.slot == FRESH:
                prompts.append(fill)
                last_rows.append(int(end) - 1)
            else:
                self._scheduler.refill_done(fill)
        if prompts:
            self._first_tokens(prompts, self._decoder.logits(hidden_TD[last_rows]), result)
        return result

    def _first_tokens(self, prompts: list[Fill], logits_UV: torch.Tensor, result: StepResult) -> None:
        """Draw the first token of every sample of each prompt from that prompt's logits."""
        slots: list[int] = []
        index: list[int] = []
        for i, fill in enumerate(prompts):
            opened = self._open_slots(fill.group)
            slots += opened
            index += [i] * len(opened)
        drawn = np.array(slots)
        self._draw(logits_UV, np.array(index), drawn, result)
        ended = self._ended(drawn)
        for fill in prompts:
            self._scheduler.prompt_done(fill, [s for s in fill.group.slots if s not in ended])
        self._complete(ended, result)

    def _open_slots(self, group: Group) -> list[int]:
        for i in range(group.request.samples):
            self._open_slot(group, i)
        return list(group.slots)

    def _open_slot(self, group: Group, sample: int) -> int:
        request = group.request
        slot = self._sequences.open(
            number=group.number + sample,
            sample=sample,
            seed=request.seeds[sample],
            prompt_len=group.prompt_len,
            limit=group.limits[sample],
            params=request.params,
            forced=request.forced_lengths is not None,
        )
        self._scheduler.adopt(group, slot)
        return slot

    def _decode(self) -> StepResult:
        self._scheduler.make_room()
        seq, slots = self._sequences, self._scheduler.running
        ones = np.ones(len(slots), np.int64)
        positions = seq.positions(slots)
        hidden_BD = self._forward(seq.last[slots], seq.row[slots], positions, ones)
        result = StepResult(SubStage.DECODE, len(slots), len(slots), int(positions.sum()) + len(slots))
        self._draw(self._decoder.logits(hidden_BD), np.arange(len(slots)), slots, result)
        self._complete(self._ended(slots), result)
        return result

    def _forward(self, tokens: np.ndarray, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        self._attend.begin(rows, starts, counts)
        return self._decoder(torch.from_numpy(tokens).to(self.model.device), self._attend)

    def _draw(self, logits_UV: torch.Tensor, index: np.ndarray, slots: np.ndarray, result: StepResult) -> None:
        seq, group_of = self._sequences, self._scheduler.group_of
        draws, logits_UV = self._drawn(logits_UV, index, slots)
        if (draws.tokens == NOT_FINITE).any():
            slot = int(slots[int(np.argmax(draws.tokens == NOT_FINITE))])
            request = group_of[slot].request
            self.lanes.scrub()
            raise ModelError(
                f"the model's logits are not finite for request {request.request_id}: its weights have diverged or are "
                "broken; resume from an earlier checkpoint with a lower learning rate"
            )
        seq.append(slots, draws.tokens, draws.logprobs)
        counts = seq.top_logprobs[slots]
        tops = top_logprobs(logits_UV, index, draws, seq.temperature[slots], counts) if counts.any() else repeat(None)
        ids = [group_of[slot].request.request_id for slot in slots.tolist()]
        drawn = zip(ids, seq.sample[slots].tolist(), draws.tokens.tolist(), draws.logprobs.tolist(), tops, strict=False)
        result.emitted += map(Emitted._make, drawn)

    def _drawn(self, logits_UV: torch.Tensor, index: np.ndarray, slots: np.ndarray) -> tuple[Draws, torch.Tensor]:
        """The draws, and the logits, which in a group become those of the whole vocabulary where they are needed."""
        seq = self._sequences
        top_k, top_p = seq.top_k[slots], seq.top_p[slots]
        noise = {
            "seeds": seq.seed[slots],
            "positions": seq.prompt_len[slots] + seq.generated[slots],
            "temperature": seq.temperature[slots],
        }
        if self._sample_sharded is not None:
            assert isinstance(self._decoder, ShardedDecoder)
            if not seq.top_logprobs[slots].any() and not filters(top_k, top_p, self.model.config.vocab_size):
                return self._sample_sharded(logits_UV, index, **noise), logits_UV
            logits_UV = self._decoder.all_logits(logits_UV)
        return self._sample(logits_UV, index, **noise, top_k=top_k, top_p=top_p), logits_UV

    # Endings

    def _ended(self, slots: np.ndarray) -> dict[int, tuple[FinishReason, str]]:
        """Slots among those that just got a token which end with it, with the reason and the text."""
        seq = self._sequences
        tokens = seq.last[slots]
        at_limit = seq.generated[slots] >= seq.limit[slots]
        at_end = (tokens[:, None] == seq.ends[slots]).any(axis=1)
        group_of = self._scheduler.group_of
        ended: dict[int, tuple[FinishReason, str]] = {}
        for i in np.flatnonzero(at_limit | at_end | seq.has_stop[slots]):
            slot = int(slots[i])
            request = group_of[slot].request
            generated = seq.tokens[slot, : seq.generated[slot]].tolist()
            if seq.has_stop[slot]:
                assert self._detokenize is not None
                kept = generated[:-1] if at_end[i] else generated
                cut = stop_position(kept, self._detokenize, request.params.stop) if kept else None
                if cut is not None:
                    ended[slot] = FinishReason.STOP, self._text(kept)[:cut]
                    continue
            if at_end[i]:
                ended[slot] = FinishReason.STOP, self._text(generated[:-1])
            elif at_limit[i]:
                forced = request.forced_lengths is not None
                ended[slot] = FinishReason.STOP if forced else FinishReason.LENGTH, self._text(generated)
        return ended

    def _text(self, tokens: list[int]) -> str:
        return self._detokenize(tokens) if self._detokenize is not None and tokens else ""

    def _complete(self, ended: dict[int, tuple[FinishReason, str]], result: StepResult) -> None:
        seq = self._sequences
        dtype = np.float64 if self.model.dtype == torch.float64 else np.float32
        for slot, (finish, text) in ended.items():
            group = self._scheduler.group_of[slot]
            count = int(seq.generated[slot])
            result.completions.append(
                Completion(
                    request_id=group.request.request_id,
                    sample=int(seq.sample[slot]),
                    tokens=seq.tokens[slot, :count].copy(),
                    logprobs=seq.logprobs[slot, :count].astype(dtype),
                    text=text,
                    finish=finish,
                    preemptions=int(seq.preemptions[slot]),
                )
            )
            self._scheduler.finish(group, slot)
            if not group.slots:
                del self._groups[group.request.request_id]

    # Changing hands

    def export(self) -> Cargo:
        """Everything in flight, as plain data; changes nothing. A prefill that is not done counts as not begun."""
        return pack(self.lanes, self._scheduler)

    def adopt(self, groups: Sequence[CargoGroup], columns: np.ndarray) -> None:
        """Go on with ``groups``, oldest first, of engines that have exported them; this one must be empty.

        Samples without lanes wait as preempted ones do, though they do not count as preempted for it.
        ``columns`` int32 ``[C, heads]`` are the blocks behind the columns that ``groups`` list, as
        :meth:`LanePool.place` takes them: free blocks replace those ``MISSING``, to be filled before the next step.
        Raises :class:`CapacityError`, changing nothing, when there are too few.
        """
        if self.has_work:
            raise RuntimeError("adopt() was called on an engine that has requests")
        rows = iter(self.lanes.place(columns, list(lanes_of(groups))))
        for cargo in groups:
            group = Group(cargo.request, self._next_number, cargo.limits)
            self._next_number += cargo.request.samples
            self._groups[cargo.request.request_id] = group
            if cargo.fresh:
                self._scheduler.submit(group)
                continue
            if cargo.prompt is not None:
                group.prompt_row = next(rows)
            for sample in cargo.samples:
                slot = self._open_slot(group, sample.sample)
                self._sequences.resume(
                    slot, tokens=sample.tokens, logprobs=sample.logprobs, preemptions=sample.preemptions
                )
                if sample.lanes is not None:
                    self._sequences.row[slot] = next(rows)
            self._scheduler.resume(group)

    def let_go(self) -> None:
        """Forget all requests, which other engines have adopted, and give up the lanes; the end of this engine."""
        for request_id in self.request_ids:
            self.abort(request_id)
        self.lanes.vacate()

    # What can be served

    def _check(self, request: Request) -> tuple[int, ...]:
        """The most tokens that each sample may generate."""
        name, prompt, config = f"request {request.request_id!r}", request.prompt, self.model.config
        if request.request_id in self._groups:
            raise RequestError(f"{name} is already in the engine: request ids must be unique")
        if prompt.ndim != 1:
            raise RequestError(f"{name}: prompt must be one-dimensional, not of shape {prompt.shape}")
        if len(prompt) == 0:
            raise RequestError(f"{name} has an empty prompt: it needs at least one token")
        if not np.issubdtype(prompt.dtype, np.integer):
            raise RequestError(f"{name}: prompt must be an integer array, not {prompt.dtype}")
        if prompt.min() < 0 or prompt.max() >= config.vocab_size:
            wrong = int(prompt[(prompt < 0) | (prompt >= config.vocab_size)][0])
            raise RequestError(f"{name}: token id {wrong} is outside the vocabulary (0 to {config.vocab_size - 1})")
        if not request.seeds:
            raise RequestError(f"{name} asks for no samples: seeds is empty")
        if any(not 0 <= seed < 2**64 for seed in request.seeds):
            raise RequestError(f"{name}: seeds must be integers of 0 to 2**64 - 1")
        check_params(request.params, name, can_match_text=self._detokenize is not None)
        forced = request.forced_lengths
        if forced is not None and (len(forced) != request.samples or min(forced) < 1):
            raise RequestError(f"{name}: forced_lengths needs one length of at least 1 for each of its samples")
        room = self._max_context - len(prompt)
        if room < 1 or (forced is not None and max(forced) > room):
            wanted = 1 if forced is None else max(forced)
            raise CapacityError(
                f"{name}: a prompt of {len(prompt)} tokens and {wanted} to generate exceed the context of "
                f"{self._max_context}"
            )
        limits = forced or (min(request.params.max_tokens, room),) * request.samples
        blocks = self.lanes.blocks_of(len(prompt) + max(limits) - 1) * self.lanes.heads
        if blocks > self.lanes.total:
            raise CapacityError(
                f"{name}: a prompt of {len(prompt)} tokens and {max(limits)} to generate take {blocks} KV blocks, and "
                f"the pool has {self.lanes.total}; give the pipeline more KV memory or lower max_tokens"
            )
        return limits


def _attention(
    model: Decoder, lanes: LanePool, comm: Communicator | None, *, rows: int
) -> LaneAttention | TorchLaneAttention:
    """Attention over the lanes, that runs all layers at once where the kernels and the communicator can."""
    if not attention.supports(lanes):
        return TorchLaneAttention(lanes, model.rope)
    if comm is None or comm.size == 1:
        return LayerProgram(model, lanes)
    if isinstance(comm, ShmCommunicator) and program.serves(model, lanes):
        return LayerProgram(model, lanes, comm=comm, rows=rows)
    return LaneAttention(lanes, model.rope)


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile what an engine of ``dtype`` runs on a CPU, or load it from the cache.

    Takes some 20 s of one core once per machine; a driver that calls it before starting workers spares each of them.
    """
    if dtype in (torch.float32, torch.float64):
        for module in (linear, program, sampling, sharded_sampling):
            module.compiled(dtype)
        shm.prepare()
        jit.note_compiled(str(dtype))


def kernels_are_compiled(dtype: torch.dtype) -> bool:
    """Whether :func:`compile_kernels` has nothing to compile on this machine."""
    return dtype not in (torch.float32, torch.float64) or jit.compiled_before(str(dtype))


def check_params(params: SamplingParams, name: str, *, can_match_text: bool) -> None:
    """Raises :class:`RequestError` for impossible sampling parameters, NaN included."""
    if params.max_tokens < 1:
        raise RequestError(f"{name}: max_tokens must be at least 1, not {params.max_tokens}")
    if not 0 <= params.temperature <= MOST_TEMPERATURE:
        raise RequestError(f"{name}: temperature must be 0 to {MOST_TEMPERATURE:g}, not {params.temperature}")
    if params.top_k < 0:
        raise RequestError(f"{name}: top_k must be 0 (off) or more, not {params.top_k}")
    if not 0 < params.top_p <= 1:
        raise RequestError(f"{name}: top_p must be above 0 and at most 1, not {params.top_p}")
    if not 0 <= params.top_logprobs <= MOST_TOP_LOGPROBS:
        raise RequestError(f"{name}: top_logprobs must be 0 to {MOST_TOP_LOGPROBS}, not {params.top_logprobs}")
    if any(not stop for stop in params.stop):
        raise RequestError(f"{name}: a stop string is empty")
    if params.stop and not can_match_text:
        raise RequestError(f"{name}: stop strings need an engine with a tokenizer")
