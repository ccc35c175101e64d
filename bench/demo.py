"""Does `make demo` learn, and how long does it take? examples/demo.yaml with three seeds, each in a fresh process.

For each pipeline: mean reward of the first and the last 10 % of steps. Seconds are those of the whole `longtail run`
command, starting Ray included, after installation. Checkpoints are loaded in transformers at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common


def run_demo(seed: int, steps: int | None) -> dict:
    from longtail.observe.store import read_events
    from longtail.observe.summary import summarise

    jobs = yaml.safe_load((common.ROOT / "examples" / "demo.yaml").read_text())
    for pipeline in jobs["pipelines"].values():
        pipeline["seed"] = seed
        pipeline["steps"] = steps or pipeline["steps"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "demo.yaml").write_text(yaml.safe_dump(jobs))
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "longtail", "run", "demo.yaml"], cwd=folder, check=False)
        seconds = time.perf_counter() - start
        summary = summarise(read_events(Path(folder) / "runs" / "demo"))
        loads = all(loads_in_transformers(Path(folder) / p.checkpoint) for p in summary.pipelines if p.checkpoint)
    return {
        "seconds": round(seconds, 1),
        "exit_code": done.returncode,
        "loads_in_transformers": loads,
        "worker_idle": summary.idle_mean,
        "pipelines": {
            p.name: {
                "reward_first": p.reward_first,
                "reward_last": p.reward_last,
                "step_time_s": p.step_time_s,
                "tokens_per_s": p.tokens_per_s,
            }
            for p in summary.pipelines
        },
    }


def loads_in_transformers(folder: Path) -> bool:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder) is not None


def main() -> None:
    args = common.parser(__doc__ or "").parse_args()
    seeds, steps = ((0,), 8) if args.quick else ((0, 1, 2), None)
    runs = {}
    for seed in seeds:
        runs[str(seed)] = run_demo(seed, steps)
        print(f"seed {seed}: {runs[str(seed)]}", flush=True)
    rises = [p["reward_last"] - p["reward_first"] for r in runs.values() for p in r["pipelines"].values()]
    slowest = max(r["seconds"] for r in runs.values())
    whole = None if args.quick else True
    common.finish(
        "demo",
        quick=args.quick,
        seeds=seeds,
        arms=runs,
        targets=[
            common.target("least_rise_of_reward", min(rises), ">= 0.15", whole and min(rises) >= 0.15),
            common.target("slowest_seconds", slowest, "< 300", whole and slowest < 300),
            common.target(
                "all_exit_0_and_load",
                float(all(r["exit_code"] == 0 and r["loads_in_transformers"] for r in runs.values())),
                "= 1",
                all(r["exit_code"] == 0 and r["loads_in_transformers"] for r in runs.values()),
            ),
        ],
    )


if __name__ == "__main__":
    main()
