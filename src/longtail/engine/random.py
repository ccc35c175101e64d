"""A model with random weights: what tests and benches run when no trained one is needed."""

from __future__ import annotations

import torch

from longtail.engine.config import ModelConfig
from longtail.engine.model import Decoder


@torch.no_grad()
def random_model(config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32, std: float = 0.05) -> Decoder:
    """Normal weights and biases of deviation ``std``, norm weights near 1; the same values in every ``dtype``
    (drawn in float32, then cast)."""
    model = Decoder(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(1 + values if name.endswith("norm") else values)
    return model
