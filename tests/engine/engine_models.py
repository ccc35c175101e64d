"""Random tiny models and a dense reference for the engine's tests."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from longtail.core.types import Completion, Request, SamplingParams
from longtail.engine.config import ModelConfig
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder, apply_rope, rms_norm

HEADS = {"head_dim": 32, "kv_heads": 2, "heads": 6}


def tiny_config(**changes) -> ModelConfig:
    values = {
        "family": "qwen3",
        "vocab_size": 50,
        "hidden_size": 32,
        "layers": 2,
        "intermediate_size": 48,
        "rms_eps": 1e-6,
        "max_context": 512,
        "tied": False,
        "qk_norm": True,
        "rope_parameters": {"rope_theta": 10000.0},
        **HEADS,
        **changes,
    }
    return ModelConfig(**values)


def random_model(dtype: torch.dtype = torch.float64, *, seed: int = 0, **changes) -> Decoder:
    """A decoder with weights wide enough that samples differ clearly between contexts."""
    model = Decoder(tiny_config(**changes), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * {"embed": 1.0, "head": 0.4}.get(name, 0.15))
    return model


class DenseAttention:
    """Causal attention over one whole sequence, without lanes: the reference."""

    def __init__(self, model: Decoder, tokens: int) -> None:
        self.config = model.config
        cos, sin = model.rope.upto(tokens)
        self.cos, self.sin = cos[:tokens], sin[:tokens]

    def __call__(self, layer, qkv_TE, q_norm_H, k_norm_H):
        c = self.config
        qkv = qkv_TE.view(len(qkv_TE), c.kv_heads, c.heads_per_kv + 2, c.head_dim)
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        if q_norm_H is not None:
            q, k = rms_norm(q, q_norm_H, c.rms_eps), rms_norm(k, k_norm_H, c.rms_eps)
        q, k = apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin)
        k, v = (x.repeat_interleave(c.heads_per_kv, dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * c.head_dim**-0.5
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        weights = F.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def dense_logprobs(model: Decoder, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Teacher-forced log-probabilities of ``tokens`` after ``prompt``, by one plain forward pass."""
    everything = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        hidden = model(everything[:-1], DenseAttention(model, len(everything) - 1))
        logits = model.logits(hidden[len(prompt) - 1 :]).double() / (temperature or 1.0)
        return torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.from_numpy(tokens).long()].numpy()


def make_engine(model: Decoder, *, blocks: int = 2000, block_tokens: int = 16, **options) -> Engine:
    pool = LanePool(model.config, blocks=blocks, block_tokens=block_tokens, dtype=model.dtype, device=model.device)
    return Engine(model, pool, **options)


def prompt_of(length: int, seed: int = 0, vocab: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)


def request(
    name: str,
    prompt: np.ndarray,
    *,
    samples: int = 1,
    seed: int = 0,
    forced: tuple[int, ...] | None = None,
    **params,
) -> Request:
    return Request(
        request_id=name,
        prompt=prompt,
        seeds=tuple(seed * 1000 + i for i in range(samples)),
        params=SamplingParams(**{"max_tokens": 16, **params}),
        forced_lengths=forced,
    )


def run_all(engine: Engine, requests: list[Request], *, check: bool = True) -> dict[tuple[str, int], Completion]:
    """Add all, step until idle; asserts that each sample ends once and that no lane is left."""
    for item in requests:
        engine.add(item)
    done: dict[tuple[str, int], Completion] = {}
    streamed: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        expected = engine.next_substage()
        result = engine.step()
        assert result.substage == expected
        for emitted in result.emitted:
            streamed.setdefault((emitted.request_id, emitted.sample), []).append(emitted.token)
        for completion in result.completions:
            key = (completion.request_id, completion.sample)
            assert key not in done
            done[key] = completion
        if check:
            engine.lanes.check()
    assert engine.lanes.used == 0
    assert {(r.request_id, i) for r in requests for i in range(r.samples)} == set(done)
    assert {key: c.tokens.tolist() for key, c in done.items()} == streamed
    return done


def assert_same(a: dict[tuple[str, int], Completion], b: dict[tuple[str, int], Completion], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].tokens.tolist() == b[key].tokens.tolist(), key
        assert np.allclose(a[key].logprobs, b[key].logprobs, rtol=0, atol=tolerance), key
        assert (a[key].finish, a[key].text) == (b[key].finish, b[key].text)


class Script(Decoder):
    """A decoder whose greedy continuation of token t is t + 1 (modulo the vocabulary), whatever came before."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(tiny_config(vocab_size=vocab_size), dtype=torch.float64)

    def forward(self, tokens_T, attend):
        return tokens_T

    def logits(self, x_TD):
        return 20.0 * F.one_hot((x_TD + 1) % self.config.vocab_size, self.config.vocab_size).double()
