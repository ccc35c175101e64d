"""One worker's part of a pipeline's training: micro-batches accumulate gradients, an update applies their sum.

Invariants: the weights change only in :meth:`Trainer.update`, on every rank by the same bits; which rank computes which
micro-batch, in which order and beside how many others, changes no bit of them (``exact.py``); another packing changes
them by rounding only, since the sum is the gradient of the step's loss whatever the packing; the model's modules and
parameters keep their identity, so a sampler that holds the same :class:`Decoder` sees each update at once.

Shape suffixes: T tokens of the flat batch, N predicted (completion) tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from longtail.core.comm import Communicator
from longtail.core.config import Algorithm, Train
from longtail.core.errors import TrainingError
from longtail.core.types import StepTotals
from longtail.engine.model import Attend, Decoder
from longtail.rl import exact
from longtail.rl.attention import GroupAttend, Layout, lay_out
from longtail.rl.attention_padded import PaddedAttend
from longtail.rl.logprobs import TokenLogprobs, token_logprobs, token_logprobs_backward
from longtail.rl.losses import GrpoTerms, grpo_terms, sample_weights
from longtail.rl.lr import learning_rate
from longtail.rl.optim import FlatModel, OptimizerState, ShardedAdamW, shard_bounds
from longtail.rl.packing import MicroBatch


@dataclass(frozen=True, kw_only=True)
class MicroStats:
    """Sums over the completion tokens of micro-batches (``gap_max`` is a maximum); add them up with :meth:`total`.

    ``loss`` is already normalised by the step's totals: its sum over all micro-batches of all workers is the step's
    loss. ``kl`` is against the reference model, in nats. ``clipped_low`` and ``clipped_high`` count tokens whose
    gradient the clip removed. ``gap_sum`` and ``gap_max`` are of |trainer - sampler log-probability|. ``entropy`` is
    of the policy at the rollout temperature, in nats.
    """

    samples: int = 0
    tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    gap_sum: float = 0.0
    gap_max: float = 0.0

    def __add__(self, other: MicroStats) -> MicroStats:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return MicroStats(**{**sums, "gap_max": max(self.gap_max, other.gap_max)})

    @classmethod
    def total(cls, by_number: Mapping[int, MicroStats]) -> MicroStats:
        """The sum over micro-batches, in the order of their numbers: the same bits whoever computed which, and when."""
        return sum((by_number[number] for number in sorted(by_number)), start=cls())


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """``grad_norm`` is the global norm before clipping; ``lr`` the learning rate that was used."""

    grad_norm: float
    lr: float


class Trainer:
    """Trains ``model`` as rank ``rank`` of ``world``; ``steps`` is the pipeline's goal (for the schedule).

    Re-points the model's parameters into one flat buffer on construction: make views of weights afterwards.
    ``reference`` is the frozen model of the KL penalty, needed if ``algorithm.beta > 0``.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        algorithm: Algorithm,
        train: Train,
        temperature: float,
        steps: int,
        rank: int,
        world: int,
        reference: Decoder | None = None,
    ) -> None:
        if algorithm.beta > 0 and reference is None:
            raise ValueError("algorithm.beta > 0 needs a reference model")
        self.model, self.reference = model, reference if algorithm.beta > 0 else None
        self.algorithm, self.train, self.temperature, self.steps = algorithm, train, temperature, steps
        self.rank, self.world = rank, world
        self.flat = FlatModel(model)
        self.bounds = shard_bounds(self.flat.total, world)
        start, end = self.bounds[rank]
        self.optimizer = ShardedAdamW(self.flat, train, start=start, end=end)

    def micro_batch(
        self, batch: MicroBatch, totals: StepTotals, *, pause: Callable[[float], None] | None = None
    ) -> MicroStats:
        """Forward and backward of one micro-batch; adds its part of the step's gradient to ``flat.grads``, exactly.

        ``pause`` is called after every layer and after the head, with the share of the work that is done, and may do
        anything meanwhile but change the weights or forget the gradients. It may raise: the gradients are then those of
        a part.
        """
        if batch.completion_tokens == 0:
            return MicroStats()
        packed = pack(batch, totals, self.algorithm.loss, dtype=self.flat.wide_dtype, device=self.model.device)
        pauses = _Pauses(self.model, pause, passes=3 if self.reference is None else 4)
        reference_N = self._reference_logprobs(packed, pauses)
        attend = pauses.after_layers(group_attend(self.model, packed.layout))
        with torch.enable_grad():
            hidden_ND = self.model(packed.tokens_T, attend).index_select(0, packed.predict_N)
        terms: list[GrpoTerms] = []

        def grad_of(rows: slice, logprobs_C: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf_C = logprobs_C.clone().requires_grad_()
                t = grpo_terms(
                    leaf_C,
                    packed.old_logprobs_N[rows],
                    packed.advantages_N[rows],
                    clip_low=self.algorithm.clip_low,
                    clip_high=self.algorithm.clip_high,
                    beta=self.algorithm.beta,
                    reference_logprobs_N=None if reference_N is None else reference_N[rows],
                )
                (grad_C,) = torch.autograd.grad((t.loss_N * packed.weights_N[rows]).sum(), leaf_C)
            terms.append(t)
            return grad_C

        head = self.model.head
        head_grad_VD = torch.zeros_like(head, dtype=self.flat.wide_dtype)
        policy, hidden_grad_ND = token_logprobs_backward(
            hidden_ND.detach(),
            head.detach(),
            packed.targets_N,
            self.temperature,
            grad_of=grad_of,
            head_grad_VD=head_grad_VD,
        )
        self.flat.add_grad(head, head_grad_VD)
        del head_grad_VD
        pauses.passed(3 * pauses.head)
        hidden_ND.backward(hidden_grad_ND)
        return self._stats(packed, terms, policy)

    def update(self, comm: Communicator, *, step: int) -> UpdateStats:
        """Add up the gradients of all ranks, clip, step AdamW on this rank's shard, gather the weights, zero gradients.

        ``step`` is the 0-based training step. Raises :class:`TrainingError` on every rank alike, before any weight is
        touched, if the gradient is not finite; gradients are zeroed then too. After :class:`PeerLost` the weights
        may be a mixture: reload a checkpoint.
        """
        if (comm.rank, comm.size) != (self.rank, self.world):
            raise ValueError(
                f"the trainer is rank {self.rank} of {self.world}, but the communicator {comm.rank} of {comm.size}"
            )
        exact.reduce_shards(comm, self.flat.grads, self.bounds)
        norm = exact.global_norm(comm, self.flat.grads[self.optimizer.start : self.optimizer.end])
        if not math.isfinite(norm):
            self.zero_gradients()
            raise TrainingError(
                f"the gradient of step {step} is not finite, so the weights were left as they were; "
                "lower train.lr or look for broken rewards"
            )
        limit = self.train.max_grad_norm
        scale = limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
        lr = learning_rate(self.train, step=step, steps=self.steps)
        self.optimizer.step(lr, scale=scale)
        comm.all_gather_shards(self.flat.weights, self.bounds)
        self.zero_gradients()
        return UpdateStats(grad_norm=norm, lr=lr)

    def zero_gradients(self) -> None:
        """Forget the micro-batches since the last update."""
        self.flat.grads.zero_()

    def optimizer_state(self) -> OptimizerState:
        """This rank's shard: live tensors, to be written before the next update."""
        return self.optimizer.state()

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Take over a shard with this rank's bounds (see ``rl/checkpoint.py`` for any number of workers).

        Load the weights first. Raises :class:`CheckpointError` if it does not fit.
        """
        self.optimizer.load(state)

    @torch.no_grad()
    def _reference_logprobs(self, packed: Packed, pauses: _Pauses) -> Tensor | None:
        if self.reference is None:
            return None
        attend = pauses.after_layers(group_attend(self.reference, packed.layout))
        hidden_ND = self.reference(packed.tokens_T, attend).index_select(0, packed.predict_N)
        logprobs_N = token_logprobs(hidden_ND, self.reference.head, packed.targets_N, self.temperature).logprobs_N
        pauses.passed(pauses.head)
        return logprobs_N

    def _stats(self, packed: Packed, terms: list[GrpoTerms], policy: TokenLogprobs) -> MicroStats:
        loss_N = torch.cat([t.loss_N.detach() for t in terms])
        ratio_N = torch.cat([t.ratio_N.detach() for t in terms])
        kls = [t.kl_N.detach() for t in terms if t.kl_N is not None]
        gap_N = (policy.logprobs_N - packed.old_logprobs_N).abs()
        low_N = (ratio_N < 1 - self.algorithm.clip_low) & (packed.advantages_N < 0)
        high_N = (ratio_N > 1 + self.algorithm.clip_high) & (packed.advantages_N > 0)
        zero = loss_N.new_zeros(())
        sums = torch.stack(
            [
                (loss_N * packed.weights_N).sum(),
                torch.cat(kls).sum() if kls else zero,
                policy.entropy_N.sum(),
                low_N.sum(dtype=loss_N.dtype),
                high_N.sum(dtype=loss_N.dtype),
                gap_N.sum(),
                gap_N.max(),
            ]
        ).tolist()
        names = ("loss", "kl", "entropy", "clipped_low", "clipped_high", "gap_sum", "gap_max")
        return MicroStats(samples=packed.samples, tokens=len(loss_N), **dict(zip(names, sums, strict=True)))


def group_attend(model: Decoder, layout: Layout) -> Attend:
    """The fastest training attention for the model's device."""
    kind = GroupAttend if model.device.type == "cpu" else PaddedAttend
    return kind(layout, model.config, model.rope)


class _Pauses:
    """Calls ``pause`` with the share that is done of so many ``passes`` through ``model``, of which a backward pass
    counts as two. Work is in multiplications for each token: that of a ``layer``, and that of the ``head``."""

    def __init__(self, model: Decoder, pause: Callable[[float], None] | None, *, passes: int) -> None:
        self._pause = pause
        self.layer = sum(p.numel() for p in model.layers[0].parameters())
        self.head = model.head.numel()
        self._done, self._whole = 0, passes * (model.config.layers * self.layer + self.head)

    def passed(self, work: int) -> None:
        self._done += work
        if self._pause is not None:
            self._pause(self._done / self._whole)

    def after_layers(self, attend: Attend) -> Attend:
        """``attend`` with a pause after it, in the forward pass and in the backward pass if there is one."""
        if self._pause is None:
            return attend

        def paused(layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
            o_TQ = attend(layer, qkv_TE, q_norm_H, k_norm_H)
            if o_TQ.requires_grad:
                o_TQ.register_hook(lambda grad: self.passed(2 * self.layer))
            self.passed(self.layer)
            return o_TQ

        return paused


@dataclass(frozen=True)
class Packed:
    """A micro-batch as flat tensors.

    The last token of a completion predicts nothing and is not computed. ``predict_N`` are the places in the flat batch
    whose hidden states predict ``targets_N``; a prompt's last token predicts the first token of each of its samples.
    ``weights_N`` normalise the loss.
    """

    layout: Layout
    samples: int
    tokens_T: Tensor
    predict_N: Tensor
    targets_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


def pack(
    batch: MicroBatch,
    totals: StepTotals,
    loss: Literal["token", "sequence", "constant"],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Packed:
    """Lay a micro-batch out flat: ``[prompt | c1 | c2 | ...]`` for each group, no padding."""
    tokens: list[np.ndarray] = []
    predict: list[np.ndarray] = []
    at = 0
    for group in batch.groups:
        tokens.append(group.prompt)
        at += len(group.prompt)
        last = at - 1
        for s in group.samples:
            tokens.append(s.tokens[:-1])
            predict.append(np.append(last, np.arange(at, at + len(s.tokens) - 1)))
            at += len(s.tokens) - 1
    samples = [s for g in batch.groups for s in g.samples]
    lengths = [len(s.tokens) for s in samples]

    def tensor(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

    def per_sample(values: Sequence[float]) -> Tensor:
        return tensor([np.repeat(np.asarray(values, dtype=np.float64), lengths)], dtype)

    return Packed(
        layout=lay_out([(len(g.prompt), [len(s.tokens) - 1 for s in g.samples]) for g in batch.groups], device),
        samples=len(samples),
        tokens_T=tensor(tokens, torch.int64),
        predict_N=tensor(predict, torch.int64),
        targets_N=tensor([s.tokens for s in samples], torch.int64),
        old_logprobs_N=tensor([s.logprobs for s in samples], dtype),
        advantages_N=per_sample([s.advantage for s in samples]),
        weights_N=per_sample(sample_weights(lengths, totals, loss)),
    )
