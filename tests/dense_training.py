"""The ordinary way to compute what the trainer computes: each sequence alone, dense attention, all logits, autograd.

Slow and plain on purpose: the yardstick of ``tests/rl``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from longtail.core.types import StepTotals, TrainGroup, TrainSample
from longtail.engine.config import ModelConfig
from longtail.engine.model import Decoder, apply_rope, rms_norm


def tiny_config(**changes: object) -> ModelConfig:
    """Three KV heads with two query heads each, so that nothing divides by accident."""
    values = {
        "family": "llama",
        "vocab_size": 61,
        "hidden_size": 24,
        "layers": 2,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 8,
        "intermediate_size": 40,
        "rms_eps": 1e-5,
        "max_context": 512,
        "tied": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def sequence_logprobs(model: Decoder, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of ``tokens`` after ``prompt`` at ``temperature``, with gradients."""
    c = model.config
    ids = torch.from_numpy(np.concatenate([prompt, tokens[:-1]]).astype(np.int64))
    cos, sin = (table[: len(ids)] for table in model.rope.upto(len(ids)))

    def attend(layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        qkv = qkv_TE.view(len(ids), c.kv_heads, c.heads_per_kv + 2, c.head_dim)
        q = qkv[:, :, :-2].flatten(1, 2)
        k, v = (qkv[:, :, i].repeat_interleave(c.heads_per_kv, dim=1) for i in (-2, -1))
        if q_norm_H is not None and k_norm_H is not None:
            q, k = rms_norm(q, q_norm_H, c.rms_eps), rms_norm(k, k_norm_H, c.rms_eps)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    logits = model.logits(model(ids, attend))[len(prompt) - 1 :] / (temperature or 1.0)
    targets = torch.from_numpy(tokens.astype(np.int64))
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def random_groups(
    config: ModelConfig, lengths: list[list[int]], *, seed: int = 0, prompts: list[int] | None = None
) -> list[TrainGroup]:
    """Groups of random tokens, one list of completion lengths each, with plausible old log-probs and advantages."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, config.vocab_size, n).astype(np.int32)

    def sample(n: int) -> TrainSample:
        logprobs = (-np.log(config.vocab_size) + 0.3 * rng.normal(size=n)).astype(np.float32)
        return TrainSample(tokens=ids(n), logprobs=logprobs, advantage=float(rng.normal()))

    sizes = prompts or [int(rng.integers(1, 9)) for _ in lengths]
    return [
        TrainGroup(prompt=ids(size), samples=tuple(sample(n) for n in group))
        for size, group in zip(sizes, lengths, strict=True)
    ]


def totals_of(groups: list[TrainGroup], max_tokens: int = 64) -> StepTotals:
    lengths = [len(s.tokens) for g in groups for s in g.samples]
    return StepTotals(samples=len(lengths), tokens=sum(lengths), max_tokens=max_tokens)


def trl_loss(
    logprobs: list[Tensor],
    samples: list[TrainSample],
    *,
    loss_type: str,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    ref_logprobs: list[Tensor] | None,
    max_completion_length: int,
) -> Tensor:
    """The loss of ``trl.GRPOTrainer._compute_loss`` (TRL 0.23) on a padded batch [B, C]: one process, token ratios.

    ``loss_type`` is ``dapo`` (with one process, tokens in the batch are the normaliser, as in ``bnpo``), ``grpo`` or
    ``dr_grpo``.
    """
    size = (len(samples), max(len(s.tokens) for s in samples))
    per_token_logps = torch.zeros(size, dtype=torch.float64)
    old_per_token_logps, ref_per_token_logps, mask = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    for i, s in enumerate(samples):
        n = len(s.tokens)
        per_token_logps[i, :n] = logprobs[i]
        old_per_token_logps[i, :n] = torch.from_numpy(s.logprobs).double()
        mask[i, :n] = 1
        if ref_logprobs is not None:
            ref_per_token_logps[i, :n] = ref_logprobs[i]
    advantages = torch.tensor([s.advantage for s in samples], dtype=torch.float64)

    coef_1 = torch.exp(per_token_logps - old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    if beta != 0.0:
        d = ref_per_token_logps - per_token_logps
        per_token_loss = per_token_loss + beta * (torch.exp(d) - d - 1)
    if loss_type == "grpo":
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "dr_grpo":
        return (per_token_loss * mask).sum() / (per_token_loss.size(0) * max_completion_length)
    return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
