"""The GRPO objective on flat tensors (arXiv 2402.03300 eq. 3, with the asymmetric clip of DAPO, arXiv 2503.14476).

N is the number of completion tokens of a micro-batch. Every function is pure; losses are normalised by
:class:`StepTotals` of the whole step, so that plain sums over micro-batches and workers give the step's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longtail.core.types import StepTotals


class GrpoTerms(NamedTuple):
    """Per token: the loss before normalisation, the ratio new / old probability, the KL estimate (None without)."""

    loss_N: Tensor
    ratio_N: Tensor
    kl_N: Tensor | None


def grpo_terms(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float = 0.0,
    reference_logprobs_N: Tensor | None = None,
) -> GrpoTerms:
    """``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + beta KL`` for each token.

    KL(policy || reference) is the estimator ``exp(d) - d - 1`` with ``d = reference - policy`` log-probability
    (k3; Schulman, "Approximating KL divergence"). It is unbiased under the policy and never negative.
    """
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if beta == 0.0:
        return GrpoTerms(loss_N, ratio_N, None)
    if reference_logprobs_N is None:
        raise ValueError("a KL penalty (beta > 0) needs the reference model's log-probabilities")
    gap_N = reference_logprobs_N - logprobs_N
    kl_N = torch.exp(gap_N) - gap_N - 1.0
    return GrpoTerms(loss_N + beta * kl_N, ratio_N, kl_N)


def sample_weights(
    lengths: Sequence[int], totals: StepTotals, loss: Literal["token", "sequence", "constant"]
) -> list[float]:
    """The weight of each token of a sample in the step's loss, per sample of the given length in tokens.

    ``token``: 1 / tokens of the step (DAPO). ``sequence``: mean over the sample's tokens, then over the step's
    samples (GRPO). ``constant``: 1 / (samples x max_tokens) (Dr. GRPO, arXiv 2503.20783).
    """
    if loss == "token":
        return [1.0 / totals.tokens for _ in lengths]
    if loss == "sequence":
        return [1.0 / (max(1, length) * totals.samples) for length in lengths]
    return [1.0 / (totals.samples * totals.max_tokens) for _ in lengths]
