"""The most likely tokens beside a drawn one, for the requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longtail.engine.sampling import Draws

Top = list[tuple[int, float]]
"""(token id, log-probability), most likely first."""


def top_logprobs(
    logits_UV: Tensor, index: np.ndarray, draws: Draws, temperature: np.ndarray, counts: np.ndarray
) -> list[Top | None]:
    """For draw i, from row ``index[i]``, the ``counts[i]`` most likely tokens; None where that is 0.

    The distribution is that of ``draws.logprobs`` (``sampling.py``), so the drawn token fixes its normaliser and no sum
    over the vocabulary is needed: log p(k) = log p(drawn) + (l_k - l_drawn) / T.
    """
    tops: list[Top | None] = [None] * len(index)
    asking = np.flatnonzero(counts)
    rows, row_of = np.unique(index[asking], return_inverse=True)
    logits_RV = logits_UV[torch.from_numpy(rows).to(logits_UV.device)]
    best = torch.topk(logits_RV, min(int(counts.max()), logits_RV.shape[1]))
    values_RK, ids_RK = best.values.double().cpu().numpy(), best.indices.tolist()
    drawn = torch.from_numpy(draws.tokens[asking]).to(logits_UV.device)
    own = logits_RV[torch.from_numpy(row_of).to(logits_UV.device), drawn].double().cpu().numpy()
    T = np.where(temperature[asking] > 0, temperature[asking], 1.0)
    with np.errstate(over="ignore"):
        logprobs_AK = draws.logprobs[asking, None] + (values_RK[row_of] - own[:, None]) / T[:, None]
    for i, row, logprobs in zip(asking.tolist(), row_of.tolist(), logprobs_AK.tolist(), strict=True):
        tops[i] = list(zip(ids_RK[row], logprobs, strict=True))[: counts[i]]
    return tops
