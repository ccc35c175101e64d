"""SmolLM2-135M-Instruct on our engine, for the scripts that make the shipped ranker's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from longtail.core.seeds import derive_seed
from longtail.core.types import Completion, Request, SamplingParams
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer

RUNNING, BLOCKS_EACH = 64, 40
"""Sequences at once, and KV blocks of 16 tokens for each (3 KV heads)."""


def sample(
    encode: Callable[[Tokenizer], Sequence[np.ndarray]],
    *,
    samples: int,
    seed: int,
    name: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
) -> list[tuple[int, Completion]]:
    """``(prompt, completion)`` of ``samples`` for each prompt of ``encode``, in order; the seed of each is derived from
    (``seed``, ``name``, prompt, sample)."""
    folder = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, dtype=torch.float32)
    lanes = LanePool(model.config, blocks=model.config.kv_heads * RUNNING * BLOCKS_EACH, dtype=torch.float32)
    engine = Engine(model, lanes, detokenize=tokenizer.decode, max_running=RUNNING)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, end_token_ids=tokenizer.end_token_ids
    )
    prompts = encode(tokenizer)
    for i, prompt in enumerate(prompts):
        seeds = tuple(derive_seed(seed, name, i, j) for j in range(samples))
        engine.add(Request(request_id=str(i), prompt=prompt, seeds=seeds, params=params))
    done: dict[tuple[int, int], Completion] = {}
    while engine.has_work:
        for completion in engine.step().completions:
            done[int(completion.request_id), completion.sample] = completion
            print(f"\r{len(done)} of {len(prompts) * samples} ", end="", flush=True)
    print()
    return [(i, done[i, j]) for i, j in sorted(done)]
