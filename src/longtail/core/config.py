"""The job file: what every key means, its default, its unit and its range.

These models are the one configuration of Longtail: read from YAML by ``runtime/jobfile.py`` (which adds file and
line to each error), passed as they are to the engine, the trainer and the runtime, and rendered into
``docs/configuration.md``. All are frozen and strict: no unknown keys, no silent conversions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic_core import PydanticCustomError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
THRESHOLD = re.compile(r"threshold:([1-9][0-9]{0,6})")


def check_name(name: str) -> str:
    """Names become folders, so only letters, digits, ``.``, ``_`` and ``-`` are allowed (1 to 64, no leading dot).

    Returns the name; raises ``ValueError``.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the name {name!r} cannot be a folder name: use 1 to 64 ASCII letters, digits, '.', '_' or '-', "
            "starting with a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]


def unit(name: str) -> dict[str, JsonValue]:
    """A number's unit, for the configuration reference."""
    return {"unit": name}


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Algorithm(Section):
    """How samples become a gradient."""

    name: Literal["grpo"] = "grpo"
    """The algorithm: GRPO (arXiv 2402.03300)."""
    group_size: int = Field(default=8, ge=1, le=4096, json_schema_extra={"minimum": 2, **unit("samples")})
    """Samples per prompt; their mean reward is the baseline, so at least 2."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio new / old probability is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0, le=10)
    """The ratio is clipped from above at 1 + clip_high."""
    beta: float = Field(default=0.0, ge=0, le=10)
    """Weight of the KL penalty against the initial model; 0 keeps no reference model."""
    loss: Literal["token", "sequence", "constant"] = "token"
    """Normalisation: over all completion tokens of the step (DAPO), per sequence and then over sequences (GRPO),
    or by a constant, samples x max_tokens (Dr. GRPO)."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide advantages by the group's standard deviation, or not."""
    iterations: int = Field(default=1, ge=1, le=64, json_schema_extra=unit("updates"))
    """Optimizer updates on each step's samples."""

    @field_validator("group_size")
    @classmethod
    def _has_baseline(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                "GRPO compares the samples of one prompt with each other, so group_size must be at least 2"
            )
        return value


class Rollout(Section):
    """How samples are generated."""

    prompts: int = Field(default=16, ge=1, le=1_000_000, json_schema_extra=unit("prompts"))
    """Prompts per step; a step generates prompts x group_size samples."""
    max_tokens: int = Field(default=256, ge=1, le=1_000_000, json_schema_extra=unit("tokens"))
    """Most tokens that one sample may have."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy. Losses and KL use log-probabilities at this temperature."""
    top_k: int = Field(default=0, ge=0, json_schema_extra=unit("tokens"))
    """Sample only among the k likeliest tokens; 0 is off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only among the likeliest tokens that together hold this probability; 1 is off."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a sample, besides the model's end tokens."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """Wrap prompts in the tokenizer's chat template, or not; auto does where the tokenizer has one."""
    long_prompts: Literal["error", "skip"] = "error"
    """What to do with prompts that leave no room for max_tokens in the model's context (or KV memory)."""
    order: Literal["fifo", "ranked", "oracle"] = "ranked"
    """Which worker gets which prompts, and in which order: fifo deals them out as they come; ranked predicts lengths
    from the prompt's text and from earlier responses, and places them for the earliest end; oracle does so with the
    true lengths, which only forced_lengths gives. Tokens and rewards are the same under all three."""
    tp: Annotated[int, Field(ge=1, le=1024)] | str = "auto"
    """Tensor-parallel degree of sampling. auto switches it in mid-rollout when measured costs say that it pays; a whole
    number holds it for the whole rollout; threshold:K merges neighbouring groups once they have at most K samples left
    together; oracle is auto with the true lengths, which only forced_lengths gives. Tokens are the same under all."""
    ranker: str | None = Field(default=None, min_length=1)
    """Folder of a ranker made by `longtail rank train` (relative to the job file); by default the built-in one."""
    forced_lengths: str | None = Field(default=None, min_length=1)
    """Fixed-length mode, for benchmarks: a column of the task's data that holds a list of lengths in tokens. In the
    e-th epoch (from 0) sample s takes entry e x group_size + s, starting over at the end of the list."""
    max_running: int = Field(default=256, ge=1, le=65536, json_schema_extra=unit("sequences"))
    """Most sequences that one worker decodes together."""
    chunk_tokens: int = Field(default=512, ge=16, le=1_000_000, json_schema_extra=unit("tokens"))
    """Most prompt tokens that one prefill quantum computes."""
    kv_gib: float | None = Field(default=None, gt=0, json_schema_extra=unit("GiB"))
    """KV cache memory on each worker, GiB; by default what the whole batch needs, capped by free memory. When it
    runs out, sequences are preempted and recomputed: slower, same tokens."""

    @field_validator("tp")
    @classmethod
    def _is_a_policy(cls, value: int | str) -> int | str:
        if isinstance(value, str) and value not in ("auto", "oracle") and not THRESHOLD.fullmatch(value):
            raise ValueError("must be auto, oracle, threshold:K (such as threshold:16), or a whole number")
        return value

    @property
    def tp_threshold(self) -> int | None:
        """K of ``tp: threshold:K``."""
        found = THRESHOLD.fullmatch(str(self.tp))
        return int(found[1]) if found else None

    @property
    def chat(self) -> bool | None:
        """``prompt_format`` as :meth:`Tokenizer.encode_prompt` takes it: None is auto."""
        return {"auto": None, "chat": True, "plain": False}[self.prompt_format]


class Train(Section):
    """How weights are updated (AdamW)."""

    lr: float = Field(default=1e-6, gt=0, le=10)
    """Peak learning rate."""
    micro_tokens: int = Field(default=4096, ge=1, json_schema_extra=unit("tokens"))
    """Tokens of one training micro-batch (prompt tokens of a group count once)."""
    warmup_steps: int = Field(default=0, ge=0, json_schema_extra=unit("steps"))
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from the end of warm-up to the pipeline's last step."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False
    )
    """AdamW's moment decay rates."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; null is off."""


class Checkpoints(Section):
    """When weights and optimizer are saved."""

    every: int = Field(default=20, ge=1, json_schema_extra=unit("steps"))
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(default=2, ge=1, json_schema_extra=unit("checkpoints"))
    """How many of the latest to keep."""


class Pipeline(Section):
    """One RL job."""

    model: str = Field(min_length=1)
    """A built-in name (tiny, smollm2-135m), a folder (relative to the job file), or a Hugging Face hub id."""
    task: str = Field(min_length=1)
    """collatz, scratchpad, reverse-text, reasoning_gym/NAME, or a .jsonl file (relative to the job file)."""
    task_args: dict[str, Any] = {}
    """Arguments of the task, such as max_n of collatz, or the column names of a JSONL file."""
    reward: str | list[str] | None = None
    """Reward functions, module:function (looked up beside the job file first), with TRL's signature
    f(prompts, completions, **columns) -> list[float]; several are added up. Default: the task's own."""
    reward_timeout_s: float = Field(default=60.0, gt=0, json_schema_extra=unit("seconds"))
    """Seconds that one call of a reward function may take."""
    algorithm: Algorithm = Algorithm()
    rollout: Rollout = Rollout()
    train: Train = Train()
    checkpoint: Checkpoints = Checkpoints()
    steps: int = Field(default=100, ge=1, json_schema_extra=unit("steps"))
    """Training steps."""
    priority: float = Field(default=1.0, gt=0, le=1000)
    """Weight against other pipelines on the same workers: one of priority 2 is worth twice as much progress."""
    max_slowdown: float | None = Field(default=None, ge=1, le=1000)
    """Most times longer that a step may take in company than it would alone; by default there is no limit."""
    max_staleness: int = Field(default=0, ge=0, le=8, json_schema_extra=unit("updates"))
    """0 samples every step with the newest weights (on-policy). More lets the rollout of a step begin while up to so
    many earlier steps still train; it takes a second copy of the weights."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of prompts and of all sampling."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of weights and computation."""

    @field_validator("reward")
    @classmethod
    def _names_a_function(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and (not value or "" in ([value] if isinstance(value, str) else value)):
            raise ValueError("a reward is named as module:function; leave the key out for the task's own reward")
        return value

    @property
    def rewards(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else list(self.reward or [])

    @model_validator(mode="after")
    def _warmup_within_steps(self) -> Pipeline:
        if self.train.warmup_steps > self.steps:
            raise PydanticCustomError(
                "warmup_steps",
                "warm-up takes more steps than the pipeline has (steps = {steps})",
                {"steps": self.steps, "key": ("train", "warmup_steps")},
            )
        return self


class SharingPolicy(Section):
    """How pipelines share the workers. None of these changes what is learned."""

    corun: Literal["auto", "greedy", "stages", "serial"] = "auto"
    """auto looks ahead: it chooses on which workers each rollout runs, and whether pipelines run side by side at all.
    greedy lets everything run everywhere, side by side; stages gives all workers to one pipeline for a whole rollout
    or training; serial for a whole step."""
    merge: Literal["auto", "off"] = "auto"
    """auto moves the tail of a rollout to fewer workers where others can use those that get free."""
    widen: Literal["auto", "off"] = "auto"
    """auto lets tensor-parallel groups form in mid-rollout (see rollout.tp); off keeps every worker on its own, unless
    rollout.tp is a number."""
    max_merges: int = Field(default=2, ge=0, le=64, json_schema_extra=unit("merges"))
    """Most times that the samples of one rollout are moved to fewer workers."""


class Jobs(Section):
    """A job file: pipelines that train together on the same workers."""

    name: Name | None = None
    """Name of the run and of its folder; by default the job file's name. Running it again resumes."""
    runs_dir: str = Field(default="runs", min_length=1)
    """Folder of run folders, relative to the working directory."""
    ray: str = Field(default="local", min_length=1)
    """local starts Ray on this machine; auto or an address (host:port, ray://host:port) joins a cluster."""
    workers: int | None = Field(default=None, ge=1, le=100_000, json_schema_extra=unit("processes"))
    """Worker processes, one per device; by default one per GPU, or per two CPU cores (at least 2 where there are 2)."""
    threads_per_worker: int = Field(default=1, ge=1, le=1024, json_schema_extra=unit("threads"))
    """CPU threads of each worker."""
    communicator: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """What carries activations and KV between the workers of a tensor-parallel group: shared memory (workers on one
    machine's CPU), gloo (any CPUs) or NCCL (GPUs); auto takes the fastest that serves."""
    costs: str | None = Field(default=None, min_length=1)
    """Folder of cost tables made by `longtail profile` (relative to the job file); by default this machine's own
    folder. Where no table fits, a run measures a coarse one in some seconds and keeps it."""
    policy: SharingPolicy = SharingPolicy()
    reward_processes: int = Field(default=2, ge=1, le=1024, json_schema_extra=unit("processes"))
    """Processes that run reward functions, beside the controller."""
    pipelines: dict[Name, Pipeline] = Field(min_length=1)
    """The pipelines by name."""

    @field_validator("ray")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value not in ("local", "auto") and not re.fullmatch(r"\S+:\d+", value):
            raise ValueError("must be local, auto, or an address such as 10.0.0.1:6379 or ray://10.0.0.1:10001")
        return value
