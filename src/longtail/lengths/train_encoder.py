"""Fine-tuning an encoder as a ranker: AdamW with warm-up and linear decay over an objective's batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longtail.core.errors import RankerError
from longtail.lengths.encoder import EncoderBackend, Pooling
from longtail.lengths.objectives import Pairing, objective

if TYPE_CHECKING:
    from longtail.lengths.data import LengthData
    from longtail.lengths.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the optimiser runs. ``batch_size`` is in prompts, with ``pairing="paper"`` in pairs; ``warmup`` is a share of
    all batches; ``pooling`` None is what suits the encoder. The defaults are those that ranked best on a few hundred
    prompts with MiniLM."""

    lr: float = 1e-4
    head_lr: float = 1e-3
    epochs: int = 3
    batch_size: int = 16
    pairing: Pairing = "in-batch"
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    pooling: Pooling | None = None


PARS = Recipe(lr=2e-5, head_lr=2e-5, epochs=3, batch_size=128, pairing="paper")
"""The recipe of the paper; it encodes a prompt about once for each of its pairs, so an epoch costs many times more."""


def train_encoder(
    data: LengthData,
    config: TrainConfig,
    *,
    recipe: Recipe | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> EncoderBackend:
    """Train on all of ``data``. ``progress(batches done, batches in all, loss)`` is called after every batch.

    The result is a function of data, config and recipe on the CPU; on CUDA it varies by rounding. Raises
    :class:`RankerError` if the encoder cannot be had, the data holds no order, or the loss stops being finite.
    """
    import torch

    recipe = recipe or Recipe()
    goal = objective(
        config.objective,
        delta=config.delta,
        margin=config.margin,
        partners=config.partners,
        batch_size=recipe.batch_size,
        pairing=recipe.pairing,
    )
    rng = np.random.default_rng(config.seed)
    epochs = recipe.epochs if config.epochs is None else config.epochs
    batches = [batch for _ in range(epochs) for batch in goal.epoch(data.lengths, data.sources, data.censored, rng)]
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        backend = EncoderBackend.start(
            config.encoder or "minilm", outputs=goal.outputs, max_length=config.max_length, pooling=recipe.pooling
        )
        tokens = backend.tokenize(data.prompts)
        decayed = [p for p in backend.encoder.parameters() if p.ndim > 1]
        others = [p for p in backend.encoder.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "lr": recipe.lr, "weight_decay": recipe.weight_decay},
                {"params": others, "lr": recipe.lr, "weight_decay": 0.0},
                {"params": list(backend.head.parameters()), "lr": recipe.head_lr, "weight_decay": 0.0},
            ],
            fused=True,
        )
        warmup = max(1, round(recipe.warmup * len(batches)))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (len(batches) - step) / max(1, len(batches) - warmup))
        )
        backend.encoder.train()
        for done, batch in enumerate(batches, start=1):
            loss = goal.loss(backend.outputs([tokens[row] for row in batch.rows]), batch)
            if not torch.isfinite(loss):
                raise RankerError(f"the loss is not finite in batch {done} of {len(batches)}: lower the learning rate")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(backend.parameters()), recipe.clip)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(done, len(batches), float(loss.detach()))
        backend.encoder.eval()
    return backend
