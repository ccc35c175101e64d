"""Log-probabilities of given tokens from hidden states, without ever holding all logits.

Vocabularies are large: 4,096 tokens x 49,152 entries are 800 MB of logits. Rows are therefore processed in chunks whose
logits turn into probabilities, and those into the logits' gradient, in place; nothing is computed twice.

Shape suffixes: N rows (one per predicted token), C rows of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once (64 MiB in float32): enough rows for an efficient matrix product."""

TILE_ELEMENTS = 1 << 18
"""Logits turned into probabilities at once: they stay in cache between the passes."""


@dataclass(frozen=True)
class TokenLogprobs:
    """``logprobs_N`` of the targets, and the entropy ``entropy_N`` of each distribution, in nats; no gradient."""

    logprobs_N: Tensor
    entropy_N: Tensor


@torch.no_grad()
def token_logprobs(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float) -> TokenLogprobs:
    """Log-softmax of ``hidden @ head.T / temperature`` at the targets; temperature 0 (greedy) counts as 1."""
    return _by_chunks(hidden_ND, head_VD, targets_N, temperature, lambda *_: None)


@torch.no_grad()
def token_logprobs_backward(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    *,
    grad_of: Callable[[slice, Tensor], Tensor],
    head_grad_VD: Tensor,
) -> tuple[TokenLogprobs, Tensor]:
    """As :func:`token_logprobs`, and the gradients of a loss that is a sum of functions of one log-probability each.

    ``grad_of(rows, logprobs_C)`` returns the loss's derivative by each of ``logprobs_N[rows]``. The head's gradient
    is added to ``head_grad_VD``; the gradient ``[N, D]`` of the hidden states is returned.
    """
    scale = 1.0 / (temperature or 1.0)
    hidden_grad_ND = torch.empty_like(hidden_ND)

    def backward(rows: slice, probs_CV: Tensor, logprobs_C: Tensor) -> None:
        # d logprob / d logits = onehot(target) - probs
        grad_C = grad_of(rows, logprobs_C).to(probs_CV.dtype) * scale
        probs_CV.mul_(grad_C.neg().unsqueeze(1))
        probs_CV[torch.arange(len(grad_C), device=grad_C.device), targets_N[rows]] += grad_C
        grad_CV = probs_CV.to(head_VD.dtype)
        torch.mm(grad_CV, head_VD, out=hidden_grad_ND[rows])
        if head_grad_VD.dtype == grad_CV.dtype:
            head_grad_VD.addmm_(grad_CV.t(), hidden_ND[rows])
        else:
            head_grad_VD.add_(grad_CV.t() @ hidden_ND[rows])

    return _by_chunks(hidden_ND, head_VD, targets_N, temperature, backward), hidden_grad_ND


def _by_chunks(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    use: Callable[[slice, Tensor, Tensor], None],
) -> TokenLogprobs:
    """Calls ``use(rows, probs_CV, logprobs_C)`` for each chunk; it may overwrite ``probs_CV``."""
    N, V = len(hidden_ND), len(head_VD)
    dtype = torch.float64 if head_VD.dtype == torch.float64 else torch.float32
    logprobs_N = torch.empty(N, dtype=dtype, device=hidden_ND.device)
    entropy_N = torch.empty_like(logprobs_N)
    step = max(16, CHUNK_ELEMENTS // V)
    for start in range(0, N, step):
        rows = slice(start, min(N, start + step))
        logits_CV = F.linear(hidden_ND[rows], head_VD).to(dtype)
        if temperature not in (0.0, 1.0):
            logits_CV.mul_(1.0 / temperature)
        logprobs_N[rows], entropy_N[rows] = _softmax_(logits_CV, targets_N[rows])
        use(rows, logits_CV, logprobs_N[rows])
    return TokenLogprobs(logprobs_N, entropy_N)


def _softmax_(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces logits by probabilities; returns the targets' log-probabilities and the entropies."""
    step = max(1, TILE_ELEMENTS // logits_CV.shape[1])
    logprobs, entropies = [], []
    for z_KV, targets_K in zip(logits_CV.split(step), targets_C.split(step), strict=True):
        z_KV.sub_(z_KV.amax(1, keepdim=True))
        target_K = z_KV.gather(1, targets_K.unsqueeze(1)).squeeze(1)
        p_KV = z_KV.exp()
        sum_K = p_KV.sum(1)
        log_K = sum_K.log()
        logprobs.append(target_K - log_K)
        entropies.append(log_K - torch.linalg.vecdot(p_KV, z_KV) / sum_K)
        torch.div(p_KV, sum_K.unsqueeze(1), out=z_KV)
    return torch.cat(logprobs), torch.cat(entropies)
