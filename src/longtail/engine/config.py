"""The architecture of a decoder, as the Llama, Qwen2 and Qwen3 families vary it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    ``heads`` query heads share ``kv_heads`` KV heads, ``heads_per_kv`` each. ``head_dim`` is independent of
    ``hidden_size / heads`` (Qwen3). ``rope_parameters`` is the dict of the same name in a transformers config
    (``rope_type``, ``rope_theta``, scaling factors). ``hf`` is the whole original config, written back on export.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    max_context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def qkv_rows_per_kv(self) -> int:
        """Rows of the fused QKV weight that belong to one KV head: its query heads, then K, then V."""
        return (self.heads_per_kv + 2) * self.head_dim

    @property
    def mlp_block(self) -> int:
        """Rows of one gate (or up) block in the fused gate/up weight: the largest power of two, at most 64,
        that divides ``intermediate_size``."""
        return min(64, self.intermediate_size & -self.intermediate_size)
