"""Start-up checks of one pipeline: its model, its task, its rewards, and its prompts against the model's context."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from longtail.core.config import Pipeline
from longtail.core.errors import ConfigError, DataError, LongtailError
from longtail.core.types import trains_in_slices
from longtail.engine.checkpoint import check_model, count_parameters
from longtail.engine.config import ModelConfig
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer
from longtail.rl.rewards import check_columns, load_reward
from longtail.rl.tasks import Task, load_task
from longtail.runtime.check_order import check_forced_lengths, load_ranker, why_not_oracle, why_not_tp
from longtail.runtime.jobfile import JobFile
from longtail.runtime.memory import BLOCK_TOKENS, GIB, Footprint, Shape, block_bytes, footprint
from longtail.runtime.plan import Ranks
from longtail.runtime.prompts import Encode, KeptRows, ShortPrompts, describe_long, prompt_lengths

RUN_FILES = {"config.yaml", "events.jsonl", "rewards.log", "run.lock", "tensorboard"}
"""Names in a run folder that a pipeline's folder would collide with."""
ENDLESS_MARGIN = 2
"""Room that an endless task gets over the longest of the prompts that were looked at."""


@dataclass(frozen=True)
class CheckedPipeline:
    """What a pipeline needs to start. ``task`` leaves out the prompts that are skipped for their length;
    ``longest_prompt`` is in tokens; ``memory`` and ``kv_blocks`` are for each worker."""

    model_folder: Path
    model: ModelConfig
    parameters: int
    tokenizer: Tokenizer
    task: Task
    longest_prompt: int
    memory: Footprint
    kv_blocks: int = 0
    ranker: Ranks | None = None


@dataclass
class Findings:
    """Problems (with the line by which they are sorted) and warnings, each a sentence with file, line and key."""

    job_file: JobFile
    problems: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, text: object, *keys: str | int, value: object = None) -> None:
        self.problems.append((self.job_file.line(*keys), self._sentence(text, keys, value)))

    def warn(self, text: object, *keys: str | int, value: object = None) -> None:
        self.warnings.append(self._sentence(text, keys, value))

    def _sentence(self, text: object, keys: tuple[str | int, ...], value: object) -> str:
        sentence = " ".join(str(text).split())
        shown = "" if value is None else f" = {value!r}"
        return f"{self.job_file.where(*keys)}{shown}: {sentence}{'' if sentence[-1:] in '.?!' else '.'}"


@dataclass(frozen=True)
class Room:
    """Most tokens of a prompt, what sets that limit, and the key that a message about it belongs to."""

    tokens: int
    reason: str
    key: str


def check_pipeline(
    findings: Findings, name: str, workers: int, *, device: str, submitted: bool = False
) -> CheckedPipeline | None:
    """All checks of one pipeline but memory; None if it has problems. May download or convert the model."""
    return _PipelineCheck(findings, name).run(workers, device=device, submitted=submitted)


def check_prompts(findings: Findings, name: str) -> tuple[Task, Tokenizer] | None:
    """Only the task of a pipeline, without the prompts that it skips for their length, and its tokenizer; None if
    there are problems. User code (rewards) is not loaded."""
    check = _PipelineCheck(findings, name)
    model, task = check._model(), check._task()
    if model is None or task is None:
        return None
    _, config, tokenizer = model
    fitting = check._prompts(config, partial(tokenizer.encode_prompt, chat=check.pipeline.rollout.chat), task)
    return (fitting[0], tokenizer) if fitting else None


class _PipelineCheck:
    def __init__(self, findings: Findings, name: str) -> None:
        self.findings, self.name, self.at = findings, name, ("pipelines", name)
        self.pipeline: Pipeline = findings.job_file.jobs.pipelines[name]
        self.base = findings.job_file.base

    def run(self, workers: int, *, device: str, submitted: bool = False) -> CheckedPipeline | None:
        before = len(self.findings.problems)
        if self.name in RUN_FILES:
            self._problem("this name is taken by a file of the run folder; choose another one")
        self._warn_of_sampling()
        model, task = self._model(), self._task()
        self._rewards(task, load=not submitted)
        ranker = self._order(task)
        if model is None or task is None or len(self.findings.problems) > before:
            return None
        folder, config, tokenizer = model
        if text := why_not_tp(self.pipeline.rollout, config, workers):
            self._problem(text, "rollout", "tp", value=self.pipeline.rollout.tp)
            return None
        chat = self.pipeline.rollout.chat
        fitting = self._prompts(config, partial(tokenizer.encode_prompt, chat=chat), task)
        if fitting is None:
            return None
        task, longest = fitting
        parameters = count_parameters(config)
        jobs = self.findings.job_file.jobs
        company = (submitted or len(jobs.pipelines) > 1) and jobs.policy.corun in ("auto", "greedy")
        shape = Shape(longest, workers, company, slices=trains_in_slices(device))
        memory = footprint(config, parameters, self.pipeline, shape)
        return CheckedPipeline(folder, config, parameters, tokenizer, task, longest, memory, ranker=ranker)

    def _warn_of_sampling(self) -> None:
        rollout = self.pipeline.rollout
        if rollout.temperature == 0:
            text = "greedy samples of a prompt are all alike, so their rewards do not differ and nothing is learned"
            self._warn(text, "rollout", "temperature", value=0)
        for key, value, off in (("top_k", rollout.top_k, 0), ("top_p", rollout.top_p, 1)):
            if value != off:
                text = "samples come from a cut distribution, but losses use the log-probabilities of the full one"
                self._warn(text, "rollout", key, value=value)

    def _model(self) -> tuple[Path, ModelConfig, Tokenizer] | None:
        spec, rollout = self.pipeline.model, self.pipeline.rollout
        try:
            folder = resolve_model(spec, base=self.base)
            config, tokenizer = check_model(folder), Tokenizer.load(folder)
        except LongtailError as error:
            self._problem(error, "model")
            return None
        if tokenizer.vocab_size > config.vocab_size:
            text = f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {config.vocab_size}"
            self._problem(text, "model", value=spec)
        if not tokenizer.end_token_ids and not rollout.stop:
            text = "the model declares no end token, so every sample runs to max_tokens; set rollout.stop"
            self._warn(text, "model", value=spec)
        if rollout.prompt_format == "chat" and not tokenizer.has_chat_template:
            text = "the model's tokenizer has no chat template; use plain or auto"
            self._problem(text, "rollout", "prompt_format", value="chat")
        return folder, config, tokenizer

    def _task(self) -> Task | None:
        p = self.pipeline
        try:
            return load_task(p.task, p.task_args, seed=p.seed, base=self.base)
        except (ConfigError, DataError) as error:
            self._problem(error, "task")
            return None

    def _rewards(self, task: Task | None, *, load: bool) -> None:
        """Every reward function imports, and gets the columns that it needs."""
        columns = list(task.example(0).columns) if task is not None else None
        for i, spec in enumerate(self.pipeline.rewards if load else ()):
            try:
                reward = load_reward(spec, base=self.base)
                if columns is not None:
                    check_columns(reward, columns)
            except LongtailError as error:
                self._problem(error, "reward", *([i] if isinstance(self.pipeline.reward, list) else []))
        if task is not None and task.score is None and not self.pipeline.rewards:
            text = "the task has no reward of its own; name a function with the key 'reward', as module:function"
            self._problem(text, "task", value=self.pipeline.task)

    def _order(self, task: Task | None) -> Ranks | None:
        """The ranker, if there is to be one."""
        rollout = self.pipeline.rollout
        if text := why_not_oracle(rollout):
            self._problem(text, "rollout", "order", value=rollout.order)
        try:
            if task is not None and rollout.forced_lengths is not None:
                check_forced_lengths(task, rollout.forced_lengths, rollout.max_tokens)
        except DataError as error:
            self._problem(error, "rollout", "forced_lengths", value=rollout.forced_lengths)
        if rollout.ranker is not None and rollout.order != "ranked":
            self._warn(f"it is not used with order = {rollout.order!r}", "rollout", "ranker", value=rollout.ranker)
        try:
            return load_ranker(rollout, base=self.base)
        except LongtailError as error:
            if rollout.ranker is None:  # lengths are learnt all the same
                text = f"the built-in ranker cannot be used, so only earlier steps tell how long answers are: {error}"
                self._warn(text, "rollout", "order")
            else:
                self._problem(error, "rollout", "ranker", value=rollout.ranker)
            return None

    def _prompts(self, config: ModelConfig, encode: Encode, task: Task) -> tuple[Task, int] | None:
        """The task without the prompts that are skipped, and the tokens of the longest one left."""
        rollout = self.pipeline.rollout
        if rollout.max_tokens >= config.max_context:
            text = f"must be below the model's context of {config.max_context:,} tokens, which also holds the prompt"
            self._problem(text, "rollout", "max_tokens", value=rollout.max_tokens)
            return None
        try:
            lengths = prompt_lengths(task, encode)
        except LongtailError as error:
            self._problem(error, "task", value=self.pipeline.task)
            return None
        room = self._room(config)
        kept = tuple(i for i, n in enumerate(lengths) if n <= room.tokens)
        if len(kept) < len(lengths) and not self._may_skip(task, lengths, room):
            return None
        longest = max(lengths[i] for i in kept)
        self._warn_of_micro_batches(longest + rollout.max_tokens)
        if task.size is None:
            longest = min(room.tokens, ENDLESS_MARGIN * longest)
            return (ShortPrompts(task, encode, longest) if rollout.long_prompts == "skip" else task), longest
        return (KeptRows(task, kept) if len(kept) < len(lengths) else task), longest

    def _room(self, config: ModelConfig) -> Room:
        rollout = self.pipeline.rollout
        room = Room(
            config.max_context - rollout.max_tokens, f"the context of {config.max_context:,} tokens", "max_tokens"
        )
        if rollout.kv_gib is None:
            return room
        blocks = int(rollout.kv_gib * GIB) // block_bytes(config, self.pipeline)
        tokens = blocks // config.kv_heads * BLOCK_TOKENS
        if tokens - rollout.max_tokens >= room.tokens:
            return room
        return Room(tokens - rollout.max_tokens, f"a KV cache of {rollout.kv_gib} GiB ({tokens:,} tokens)", "kv_gib")

    def _may_skip(self, task: Task, lengths: list[int], room: Room) -> bool:
        """Tell about prompts that are too long; whether the pipeline can go on without them."""
        max_tokens = self.pipeline.rollout.max_tokens
        if min(lengths) > room.tokens:
            text = (
                f"{room.reason} holds no prompt with max_tokens = {max_tokens:,} beside it: even the shortest prompt of"
            )
            self._problem(f"{text} {self.pipeline.task} has {min(lengths):,} tokens", "rollout", room.key)
            return False
        long = f"{describe_long(task, lengths, room.tokens)} of {self.pipeline.task}"
        text = f"{long} and max_tokens = {max_tokens:,} are more than {room.reason}"
        if self.pipeline.rollout.long_prompts == "skip":
            count = sum(n > room.tokens for n in lengths)
            self._warn(f"{text}: {count:,} of {len(lengths):,} prompts are skipped", "rollout", room.key)
            return True
        fit = room.tokens + max_tokens - max(lengths)
        advice = f"lower max_tokens to {fit:,}, or set long_prompts to skip" if fit > 0 else "set long_prompts to skip"
        self._problem(f"{text}; {advice}", "rollout", room.key)
        return False

    def _warn_of_micro_batches(self, longest: int) -> None:
        if self.pipeline.train.micro_tokens < longest:
            text = f"a sequence may have {longest:,} tokens, and then it makes a larger micro-batch of its own"
            self._warn(text, "train", "micro_tokens", value=self.pipeline.train.micro_tokens)

    def _problem(self, text: object, *keys: str | int, value: object = None) -> None:
        self.findings.problem(text, *self.at, *keys, value=value)

    def _warn(self, text: object, *keys: str | int, value: object = None) -> None:
        self.findings.warn(text, *self.at, *keys, value=value)
