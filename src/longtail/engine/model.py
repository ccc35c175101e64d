"""One decoder for the Llama, Qwen2 and Qwen3 families; the same module samples and trains.

Shape suffixes: T tokens of a flat (unpadded) batch, D hidden size, V vocabulary, G KV heads, R query heads per KV
head, H head dimension, E = G * (R + 2) * H rows of the fused QKV projection, F MLP intermediate size.

Weights are fused so that a tensor-parallel shard of any run of KV heads is a *view*, and widening moves no weights: QKV
rows come per KV head as ``[R query heads | k | v]``, gate and up rows in matching blocks of ``config.mlp_block`` as
``[gate block 0 | up block 0 | gate block 1 | ...]``; every projection shards by its rows (``engine/shard.py``).

What attention *is* belongs to the caller: the sampler passes one that reads and writes KV lanes, the trainer one
that runs over whole groups with gradients. Both apply QK-norm and RoPE themselves, from :class:`RopeTable`. In
inference mode on a CPU the projections go through the fused kernels of ``engine/linear.py``; elsewhere they are torch
operations.
"""

from __future__ import annotations

import copy
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.engine import linear as fused
from longtail.engine.config import ModelConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
"""The number types of a job file."""


class Attend(Protocol):
    """Attention of one layer over a flat batch whose layout only the implementation knows.

    ``qkv_TE`` holds the raw projections (before QK-norm and RoPE); ``q_norm_H`` and ``k_norm_H`` are the norm
    weights of Qwen3, else None. Returns ``[T, G * R * H]``, heads in their natural order.
    """

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor: ...


@runtime_checkable
class RunsLayers(Protocol):
    """An :class:`Attend` that can take over all layers where the fused kernels serve (``engine/program.py``)."""

    def run_layers(self, x_TD: Tensor) -> Tensor:
        """The residual stream after the last layer, from that before the first, which may be overwritten."""


class Layer(nn.Module):
    """Weights of one decoder block; no forward of its own (see :meth:`Decoder.forward`)."""

    def __init__(self, c: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        E, Q = c.kv_heads * c.qkv_rows_per_kv, c.heads * c.head_dim
        self.attn_norm = parameter(c.hidden_size)
        self.qkv = parameter(E, c.hidden_size)
        self.qkv_bias = parameter(E) if c.qkv_bias else None
        self.q_norm = parameter(c.head_dim) if c.qk_norm else None
        self.k_norm = parameter(c.head_dim) if c.qk_norm else None
        self.o = parameter(c.hidden_size, Q)
        self.o_bias = parameter(c.hidden_size) if c.o_bias else None
        self.mlp_norm = parameter(c.hidden_size)
        self.gate_up = parameter(2 * c.intermediate_size, c.hidden_size)
        self.gate_up_bias = parameter(2 * c.intermediate_size) if c.mlp_bias else None
        self.down = parameter(c.hidden_size, c.intermediate_size)
        self.down_bias = parameter(c.hidden_size) if c.mlp_bias else None


class Decoder(nn.Module):
    """The decoder. Parameters are uninitialised until a loader (``engine/checkpoint.py``) fills them."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))
        self.layers = nn.ModuleList(Layer(config, dtype, device) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
        self.head = (
            self.embed
            if config.tied
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))
        )
        self.rope = RopeTable(config, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def forward(self, tokens_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states ``[T, D]``, normed, ready for :meth:`logits`."""
        c = self.config
        x_TD = F.embedding(tokens_T, self.embed)
        fast = fused.serves(x_TD, c.heads * c.head_dim, c.intermediate_size)
        if fast and isinstance(attend, RunsLayers):
            return fused.rms_norm(attend.run_layers(x_TD), self.norm, c.rms_eps)
        project, norm = (fused.linear, fused.rms_norm) if fast else (linear, rms_norm)
        for i, layer in enumerate(cast("list[Layer]", self.layers)):
            qkv_TE = project(x_TD, layer.qkv, layer.qkv_bias, norm_K=layer.attn_norm, eps=c.rms_eps)
            o_TQ = attend(i, qkv_TE, layer.q_norm, layer.k_norm)
            x_TD = project(o_TQ, layer.o, layer.o_bias, residual_MN=x_TD)
            h_TF = project(
                x_TD, layer.gate_up, layer.gate_up_bias, norm_K=layer.mlp_norm, eps=c.rms_eps, swiglu_block=c.mlp_block
            )
            x_TD = project(h_TF, layer.down, layer.down_bias, residual_MN=x_TD)
        return norm(x_TD, self.norm, c.rms_eps)

    def logits(self, x_TD: Tensor) -> Tensor:
        """``[T, V]`` from final hidden states."""
        return fused.linear(x_TD, self.head) if fused.serves(x_TD) else F.linear(x_TD, self.head)


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    swiglu_block: int = 0,
) -> Tensor:
    """What :func:`longtail.engine.linear.linear` computes, in differentiable torch operations."""
    if norm_K is not None:
        x_TK = rms_norm(x_TK, norm_K, eps)
    y_TN = F.linear(x_TK, weight_NK, bias_N)
    if swiglu_block:
        y_TN = swiglu(y_TN, swiglu_block)
    return y_TN if residual_MN is None else residual_MN + y_TN


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def swiglu(gu_T2F: Tensor, block: int) -> Tensor:
    """``silu(gate) * up`` for gate and up rows interleaved in blocks; returns ``[T, F]`` in natural order."""
    gate_TNB, up_TNB = gu_T2F.unflatten(-1, (-1, 2, block)).unbind(-2)
    return (F.silu(gate_TNB) * up_TNB).flatten(-2)


class RopeTable:
    """Cosines and sines by position, grown on demand, in the model's dtype.

    Both are ``[positions, head_dim / 2]`` with the attention scaling factor (YaRN) already applied; the rotation pairs
    dimension i with i + head_dim / 2, as Hugging Face checkpoints expect. Threads may share a table.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inv_freq, self._scale = inverse_frequencies(config)
        self._dtype, self._device = dtype, device
        empty = torch.empty(0, config.head_dim // 2, dtype=dtype, device=device)
        self._tables = empty, empty

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables that cover positions ``0 .. positions - 1`` (possibly more rows)."""
        tables = self._tables
        if positions > len(tables[0]):
            rows = max(256, 1 << (positions - 1).bit_length())
            # Positions and angles as transformers computes them: float32 products, whatever the model's dtype.
            with torch.inference_mode(False):  # the sampler may be first to ask, and the trainer differentiates
                angles = torch.outer(torch.arange(rows, dtype=torch.float32), self._inv_freq)
                cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
                tables = cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)
            self._tables = tables
        return tables


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """RoPE inverse frequencies ``[head_dim / 2]`` and the attention scaling, by transformers' own rules.

    Supports ``default``, ``linear``, ``llama3`` and ``yarn``; the loader refuses other types.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        theta = config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        return 1.0 / (theta**exponents), 1.0
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**copy.deepcopy(config.hf))  # reads RoPE dicts in place
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return inv_freq.float(), float(scale)


def apply_rope(x_TNH: Tensor, cos_TH2: Tensor, sin_TH2: Tensor) -> Tensor:
    """Rotate the last dimension of ``[T, heads, H]`` by each token's angles (differentiable; for training)."""
    a, b = x_TNH.chunk(2, dim=-1)
    cos, sin = cos_TH2.unsqueeze(1), sin_TH2.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
