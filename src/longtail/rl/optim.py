"""Weights and the sum of gradients in one flat buffer each, and AdamW on this rank's slice of them.

Layout: first the parameters that decay (two dimensions), then the others (norms and biases), each in model order
and aligned. It is a pure function of the model, so shards written by any number of ranks fit together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from longtail.core.config import Train
from longtail.core.errors import CheckpointError
from longtail.rl import exact

ALIGN = 32
"""Elements: at least 64 bytes in every dtype, so that the layout does not depend on the dtype."""


class FlatModel:
    """Re-points all parameters of ``model`` into ``weights`` and sums their gradients up in ``grads``.

    Both are 1-D of ``total`` elements. Parameters keep their shapes and identity, but tensors that viewed their
    old storage are stale afterwards. ``grads`` is float64 and an exact sum (``rl/exact.py``): a backward pass adds each
    parameter's gradient to it as soon as it is known, and leaves no ``grad`` behind. ``wide_dtype``, that of losses and
    of the optimizer, is float64 for float64 weights, else float32. ``decayed`` is where the parameters without weight
    decay begin.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        order = sorted(named.items(), key=lambda item: item[1].ndim < 2)
        first = order[0][1]
        self.wide_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        places: dict[str, int] = {}
        self.decayed = self.total = 0
        for name, p in order:
            places[name] = self.total
            self.total += -(-p.numel() // ALIGN) * ALIGN
            if p.ndim >= 2:
                self.decayed = self.total
        text = repr([(name, tuple(p.shape)) for name, p in order])
        self.layout = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.weights = torch.zeros(self.total, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.total, dtype=torch.float64, device=first.device)
        self._grad_views: dict[nn.Parameter, Tensor] = {}
        for name, p in order:
            part = slice(places[name], places[name] + p.numel())
            self.weights[part].view_as(p).copy_(p.data)
            p.data = self.weights[part].view_as(p)
            p.requires_grad_(True)
            self._grad_views[p] = self.grads[part].view_as(p)
            # Not a method: through a hook that knows this object neither would ever be freed.
            p.register_post_accumulate_grad_hook(partial(_take, self._grad_views[p]))

    def grad(self, p: nn.Parameter) -> Tensor:
        """The sum of the gradients of ``p``, a view of ``grads``."""
        return self._grad_views[p]

    def add_grad(self, p: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of ``p`` what autograd does not know of."""
        exact.add(self._grad_views[p], gradient)


def _take(total: Tensor, p: nn.Parameter) -> None:
    """Move the gradient of ``p``, which a backward pass has left there, to ``total``."""
    assert p.grad is not None
    exact.add(total, p.grad)
    p.grad = None


def shard_bounds(total: int, world: int) -> list[tuple[int, int]]:
    """Consecutive, nearly equal slices of ``range(total)``, one per rank; the last ones may be shorter or empty.

    All but the last are whole blocks (``exact.BLOCK``), so that the gradient's norm does not depend on ``world``.
    """
    size = -(-total // (world * exact.BLOCK)) * exact.BLOCK
    return [(min(total, r * size), min(total, (r + 1) * size)) for r in range(world)]


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """AdamW's state of elements ``start .. end`` of a flat model of ``total`` elements.

    ``tensors``: ``exp_avg``, ``exp_avg_sq`` and, where weights are narrower than float32, ``master``; each 1-D of
    ``end - start`` elements. ``updates`` counts the optimizer steps done; ``layout`` names the flat layout.
    """

    start: int
    end: int
    total: int
    updates: int
    layout: str
    tensors: dict[str, Tensor]


class ShardedAdamW:
    """``torch.optim.AdamW`` on elements ``start .. end`` of a :class:`FlatModel`, decoupled weight decay included."""

    def __init__(self, flat: FlatModel, train: Train, *, start: int, end: int) -> None:
        self._flat, self.start, self.end = flat, start, end
        weights, dtype = flat.weights[start:end], flat.wide_dtype
        self.master = weights if weights.dtype == dtype else weights.to(dtype)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.updates = 0
        self._steps: list[Tensor] = []
        self._parts: list[slice] = []
        groups = []
        cut = min(max(flat.decayed - start, 0), end - start)
        for part, decay in ((slice(0, cut), train.weight_decay), (slice(cut, end - start), 0.0)):
            if part.start < part.stop:
                groups.append({"params": [nn.Parameter(self.master[part])], "weight_decay": decay})
                self._parts.append(part)
        self._adamw: torch.optim.AdamW | None = None
        if groups:
            self._adamw = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)
            for group, part in zip(self._adamw.param_groups, self._parts, strict=True):
                step = torch.zeros((), dtype=torch.float32, device=self.master.device)
                self._steps.append(step)
                self._adamw.state[group["params"][0]] = {
                    "step": step,
                    "exp_avg": self.exp_avg[part],
                    "exp_avg_sq": self.exp_avg_sq[part],
                }

    @torch.no_grad()
    def step(self, lr: float, *, scale: float = 1.0) -> None:
        """Update this slice of the weights from ``scale`` times the same slice of the gradients, which is used up: what
        is left in it means nothing."""
        if self._adamw is not None:
            gradient = exact.narrow(self._flat.grads[self.start : self.end], scale, self.master.dtype)
            for group, part in zip(self._adamw.param_groups, self._parts, strict=True):
                group["lr"] = lr
                group["params"][0].grad = gradient[part]
            self._adamw.step()
            self._adamw.zero_grad(set_to_none=True)
            self._publish()
        self.updates += 1

    def state(self) -> OptimizerState:
        """The live tensors, not copies."""
        tensors = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self._has_master:
            tensors["master"] = self.master
        return OptimizerState(
            start=self.start,
            end=self.end,
            total=self._flat.total,
            updates=self.updates,
            layout=self._flat.layout,
            tensors=tensors,
        )

    @torch.no_grad()
    def load(self, state: OptimizerState) -> None:
        """Take over ``state``, which must cover exactly this slice. Raises :class:`CheckpointError` if it does not."""
        mine = (self.start, self.end, self._flat.total, self._flat.layout)
        theirs = (state.start, state.end, state.total, state.layout)
        if mine != theirs:
            raise CheckpointError(
                f"the optimizer state is of elements {state.start} to {state.end} of {state.total}, layout "
                f"{state.layout}, but this model needs {self.start} to {self.end} of {self._flat.total}, layout "
                f"{self._flat.layout}"
            )
        self.exp_avg.copy_(state.tensors["exp_avg"])
        self.exp_avg_sq.copy_(state.tensors["exp_avg_sq"])
        if self._has_master:
            self.master.copy_(state.tensors.get("master", self._flat.weights[self.start : self.end]))
        self.updates = state.updates
        for step in self._steps:
            step.fill_(state.updates)

    @property
    def _has_master(self) -> bool:
        return self.master.dtype != self._flat.weights.dtype

    def _publish(self) -> None:
        if self._has_master:
            self._flat.weights[self.start : self.end].copy_(self.master)
