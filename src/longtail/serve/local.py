"""The backend of ``longtail serve``: the engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from longtail.core.errors import CapacityError
from longtail.core.seeds import derive_seed
from longtail.core.types import Request, SamplingParams
from longtail.engine.checkpoint import load_model, read_config
from longtail.engine.config import ModelConfig
from longtail.engine.engine import Engine, compile_kernels
from longtail.engine.lanes import LanePool
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer
from longtail.runtime.memory import BLOCK_TOKENS
from longtail.serve.calls import Call, Outcome, Reply, once
from longtail.serve.choices import Choice
from longtail.serve.encode import PromptEncoder
from longtail.serve.engine_thread import EngineThread, Load
from longtail.serve.errors import ApiError
from longtail.serve.generation import EventChunks, Generation
from longtail.serve.openai_answers import Answer, ChatAnswer, CompletionAnswer
from longtail.serve.openai_schema import BODIES, ChatBody, CompletionBody, parse_body
from longtail.serve.text import TextStream
from longtail.serve.token_text import TokenTexts

MODELS = "/v1/models"
QUICK_CHARACTERS = 8192
"""Up to so much work, prompts are cut into tokens at once (milliseconds); more is done in another thread."""
GREEDY_TOP_P = 1e-9
"""For a client's top_p of 0: the most likely token."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """What :meth:`LocalBackend.check` found out; ``prompts`` is None if they are still to be encoded."""

    body: CompletionBody | ChatBody
    prompts: list[np.ndarray] | None


class LocalBackend:
    """Serves the model of ``folder`` under ``name``; the folder's name is accepted too.

    ``slots`` samples run at once. ``kv_bytes`` is for their KV cache: where there is more to do than fits, samples wait
    or are preempted. ``max_context`` counts the tokens of a prompt and its answer; by default it is the model's, or
    less if the KV cache holds less.
    """

    @classmethod
    def load(cls, model: str, **options: Any) -> LocalBackend:
        """By what ``longtail serve`` is given: a built-in name, a folder, or a hub id. Raises ``ModelError``."""
        return cls(resolve_model(model), **{"name": model, **options})

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        slots: int = 16,
        kv_bytes: int = 1 << 30,
        max_context: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """Reads the model's configuration only. Raises ``ModelError``, and :class:`CapacityError` if ``kv_bytes`` is
        too little for one sample of ``max_context``."""
        self.name, self.slots = name, slots
        self._folder, self._dtype, self._device = folder, dtype, device
        config = read_config(folder)
        self._blocks = kv_bytes // LanePool.block_bytes(config, BLOCK_TOKENS, dtype)
        self.max_context = _context(config, self._blocks, max_context)
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._thread: EngineThread | None = None

    async def start(self) -> None:
        """Loads the weights. On a machine's first time also compiles kernels, half a minute."""
        model = await asyncio.to_thread(load_model, self._folder, dtype=self._dtype, device=self._device)
        self._tokenizer = await asyncio.to_thread(Tokenizer.load, self._folder)
        if self._device == "cpu":
            await asyncio.to_thread(compile_kernels, self._dtype)
        self._encode = PromptEncoder(self._tokenizer, vocab_size=model.config.vocab_size, max_context=self.max_context)
        self._names = TokenTexts(self._tokenizer)
        self._vocab_size = model.config.vocab_size

        def make_engine() -> Engine:
            lanes = LanePool(
                model.config, blocks=self._blocks, block_tokens=BLOCK_TOKENS, dtype=self._dtype, device=self._device
            )
            return Engine(
                model,
                lanes,
                detokenize=self._tokenizer.decode,
                max_running=self.slots,
                max_context=self.max_context,
            )

        thread = EngineThread(make_engine)
        await thread.start()
        self._thread = thread

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.close()
        self._long_prompts.shutdown(wait=False, cancel_futures=True)

    @property
    def window(self) -> int:
        return self.slots if self._thread is not None and self._thread.alive else 0

    def status(self) -> dict[str, Any]:
        thread = self._thread
        load = Load() if thread is None else thread.load
        return {
            "ok": thread is not None and thread.healthy,
            "model": self.name,
            "max_context": self.max_context,
            "slots": self.slots,
            **load._asdict(),
        }

    async def get(self, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> Reply:
        shown = {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "longtail",
            "max_model_len": self.max_context,
        }
        if path == MODELS:
            return _whole(json.dumps({"object": "list", "data": [shown]}).encode(), Outcome())
        self._check_model(unquote(path.removeprefix(f"{MODELS}/")), param=None)
        return _whole(json.dumps(shown).encode(), Outcome())

    async def answer(self, call: Call) -> Reply:
        checked: _Checked = call.checked or self.check(call)
        body, prompts = checked.body, checked.prompts
        if prompts is None:
            loop = asyncio.get_running_loop()
            prompts = await loop.run_in_executor(self._long_prompts, self._encode, body)
        generation = self._generate(body, prompts)
        if not body.stream:
            return _whole(await generation.whole(), generation.outcome)
        first = await generation.events()
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        return Reply(200, kind, EventChunks(first, generation), generation.outcome)

    def check(self, call: Call) -> _Checked:
        if call.path not in BODIES:
            raise ApiError(404, f"This server does not answer {call.path[:80]!r}.", code="not_found")
        body = parse_body(call.path, call.fields)
        self._check_model(body.model, param="model")
        quick = self._encode.work(body) <= QUICK_CHARACTERS
        return _Checked(body, self._encode(body) if quick else None)

    def _check_model(self, model: str, *, param: str | None) -> None:
        if model not in (self.name, self._folder.name):
            raise ApiError(
                404,
                f"There is no model {model[:80]!r} here, only {self.name!r}.",
                code="model_not_found",
                param=param,
            )

    def _generate(self, body: CompletionBody | ChatBody, prompts: list[np.ndarray]) -> Generation:
        assert self._thread is not None, "start() comes first"
        number = next(self._numbers)
        ends = () if body.ignore_eos else self._tokenizer.end_token_ids
        seed = secrets.randbits(64) if body.seed is None else body.seed
        seeds = tuple(derive_seed(seed, i) for i in range(body.samples))
        requests = [
            Request(
                request_id=f"{number}.{i}", prompt=prompt, seeds=seeds, params=self._params(body, len(prompt), ends)
            )
            for i, prompt in enumerate(prompts)
        ]
        choices = [
            [self._choice(i * body.samples + j, body, ends) for j in range(body.samples)] for i in range(len(prompts))
        ]
        kind = ChatAnswer if isinstance(body, ChatBody) else CompletionAnswer
        answer: Answer = kind(self.name, with_usage=body.include_usage)
        return Generation(
            self._thread.submit(requests),
            answer,
            choices,
            prompt_tokens=sum(map(len, prompts)),
            echoes=self._echoes(body, len(prompts)),
        )

    def _params(self, body: CompletionBody | ChatBody, prompt_tokens: int, ends: tuple[int, ...]) -> SamplingParams:
        room = self.max_context - prompt_tokens
        return SamplingParams(
            max_tokens=room if body.limit is None else min(body.limit, room),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=min(max(body.top_k or 0, 0), self._vocab_size),
            top_p=1.0 if body.top_p is None else max(body.top_p, GREEDY_TOP_P),
            end_token_ids=ends,
            stop=body.stops,
            top_logprobs=body.top or 0,
        )

    def _choice(self, index: int, body: CompletionBody | ChatBody, ends: tuple[int, ...]) -> Choice:
        """Text is followed token by token only where somebody wants to know."""
        names = None if body.top is None else self._names
        followed = body.stream or names is not None
        stream = TextStream(self._tokenizer.decode, body.stops) if followed else None
        return Choice(index, stream, names, ends)

    def _echoes(self, body: CompletionBody | ChatBody, prompts: int) -> list[str]:
        """The text before that of each choice."""
        texts = [""] * prompts
        if isinstance(body, CompletionBody) and body.echo:
            texts = [p if isinstance(p, str) else self._tokenizer.decode(p) for p in body.prompts]
        return [text for text in texts for _ in range(body.samples)]


def _context(config: ModelConfig, blocks: int, wanted: int | None) -> int:
    """Tokens that a sample may reach: as wanted, else as many as the model and the KV cache allow."""
    most = min(wanted or config.max_context, config.max_context)
    held = blocks // config.kv_heads * BLOCK_TOKENS + 1  # the last token of a sample is never written
    if held < BLOCK_TOKENS or (wanted is not None and held < most):
        raise CapacityError(
            f"the KV cache holds {max(0, held)} tokens, which is less than one sample of {most}: raise --kv-memory or "
            "lower --max-context"
        )
    return min(most, held)


def _whole(body: bytes, outcome: Outcome) -> Reply:
    length = (b"content-length", str(len(body)).encode())
    return Reply(200, [(b"content-type", b"application/json"), length], once(body), outcome)
