"""One GRPO step: ours on two workers against TRL's GRPOTrainer, same model, prompts, group size and token limit.

Both train SmolLM2-135M-Instruct in float32 on the questions of examples/gsm8k_sample.jsonl with the same reward
(bench/rewards.py: different for every sample, so that no group is without gradient): 4 prompts x 8 samples x 64 tokens
a step, temperature 1, no KL, one update a step.
Ours is the real `longtail run` (Ray, controller, reward processes); TRL has one process with all cores, its
transformers generation, no evaluation and no checkpoints, which was its fastest setting here. Runs alternate; the
first step of each run (compilation, allocation) is left out; figures are medians over all other steps.

TRL lives in an environment of its own (see bench/README.md): --trl-python PATH, or .venv-trl.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

PROMPTS, GROUP, LR = 4, 8, 1e-6
TRL_ROWS = PROMPTS * GROUP
"""Samples that TRL computes at once: all, or a part with gradient accumulation."""
DATA = common.ROOT / "examples" / "gsm8k_sample.jsonl"


def run_longtail_arm(model: str) -> None:
    import longtail
    from longtail.core.events import StepEnded
    from longtail.observe.store import read_events

    def answer(steps: int, tokens: int, seed: int) -> dict:
        with tempfile.TemporaryDirectory() as runs:
            job = longtail.Pipeline.model_validate(
                {
                    "model": model,
                    "task": str(DATA),
                    "task_args": {"prompt": "question"},
                    "reward": "rewards:letters",
                    "algorithm": {"group_size": GROUP},
                    "rollout": {"prompts": PROMPTS, "max_tokens": tokens},
                    "train": {"lr": LR},
                    "checkpoint": {"every": 10_000},
                    "steps": steps,
                    "seed": seed,
                }
            )
            jobs = longtail.Jobs(pipelines={"job": job}, workers=len(os.sched_getaffinity(0)), runs_dir=runs)
            result = longtail.run(jobs, quiet=True)
            ended = [e.metrics for e in read_events(result.folder) if isinstance(e, StepEnded)]
        return {
            "seconds": [m["time_s"] for m in ended],
            "rollout": [m["rollout_s"] for m in ended],
            "train": [m["train_s"] + m["update_s"] for m in ended],
            "tokens": [m["tokens"] for m in ended],
        }

    common.answer_questions({}, answer)


def run_trl_arm(model: str, rows: int) -> None:
    import json

    import torch
    import transformers
    import trl
    from datasets import Dataset

    import rewards

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    questions = [json.loads(line) for line in DATA.read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]} for r in questions]
    )

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.times = [time.perf_counter()]

        def on_step_begin(self, *_, **__) -> None:
            self.times = self.times or [time.perf_counter()]

        def on_step_end(self, *_, **__) -> None:
            self.times.append(time.perf_counter())

    def answer(steps: int, tokens: int, seed: int) -> dict:
        clock = Clock()
        config = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=PROMPTS * GROUP // rows,
            num_generations=GROUP,
            max_completion_length=tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_steps=steps,
            seed=seed,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            logging_steps=1000,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=rewards.letters, args=config, train_dataset=data, callbacks=[clock]
        )
        clock.times = [time.perf_counter()]
        trainer.train()
        seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
        return {"seconds": seconds}

    common.answer_questions({"version": trl.__version__}, answer)


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--arm", choices=["longtail", "trl"], help="(internal) be this arm")
    p.add_argument("--model", help="model folder; default: the built-in smollm2-135m")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--steps", type=int, default=5, help="steps of each run; the first is not counted")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--trl-python", default=str(common.ROOT / ".venv-trl" / "bin" / "python"))
    p.add_argument("--trl-rows", type=int, default=TRL_ROWS, help="samples that TRL computes at once")
    args = p.parse_args()
    if args.arm:
        run_longtail_arm(args.model) if args.arm == "longtail" else run_trl_arm(args.model, args.trl_rows)
        return
    from longtail.engine.models import resolve_model

    model = args.model or str(resolve_model("smollm2-135m"))
    steps, rounds, tokens = (2, 1, 32) if args.quick else (args.steps, args.rounds, args.tokens)
    cores = str(len(os.sched_getaffinity(0)))
    arms = [common.Arm("longtail", [sys.executable, __file__, "--arm", "longtail", "--model", model])]
    if Path(args.trl_python).exists():
        env = {"OMP_NUM_THREADS": cores, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        command = [args.trl_python, __file__, "--arm", "trl", "--model", model, "--trl-rows", str(args.trl_rows)]
        arms.append(common.Arm("trl", command, env))
    else:
        print(f"no {args.trl_python}: the TRL arm is left out (see bench/README.md)", flush=True)
    measured: dict[str, dict[str, list[float]]] = {arm.name: {} for arm in arms}
    for round_ in range(rounds):
        for arm in arms:
            got = arm.ask(steps=steps, tokens=tokens, seed=round_)
            for key, values in got.items():
                measured[arm.name].setdefault(key, []).extend(values[1:])
            print(f"round {round_}  {arm.name:9s} {[round(s, 2) for s in got['seconds']]} s", flush=True)
    for arm in arms:
        arm.close()
    medians = {
        name: {key: round(statistics.median(values), 3) for key, values in by.items()} for name, by in measured.items()
    }
    ratio = medians["trl"]["seconds"] / medians["longtail"]["seconds"] if "trl" in medians else None
    common.finish(
        "train_step",
        quick=args.quick,
        seeds=range(rounds),
        arms={name: {"median": medians[name], "all_seconds": measured[name]["seconds"]} for name in medians},
        targets=[common.target("trl_over_longtail", ratio, ">= 2.0", None if ratio is None else ratio >= 2.0)],
        work={"prompts": PROMPTS, "group_size": GROUP, "max_tokens": tokens},
        about={arm.name: arm.about for arm in arms},
    )


if __name__ == "__main__":
    main()
