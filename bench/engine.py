"""Decoding speed: our engine, vLLM's CPU build and transformers' generate, same model, prompts and lengths.

Every arm keeps SmolLM2-135M-Instruct in float32 in a process of its own with two threads; rounds of all arms are
interleaved, and each answers N prompts with exactly --tokens sampled tokens at temperature 1. Figures are generated
tokens per second of wall time, prefill included; the median over rounds.

vLLM and its torch live in an environment of their own (see bench/README.md): --vllm-python PATH, or .venv-vllm.
Without it that arm is left out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

BATCHES = (1, 4, 16, 32)


def prompts_from_examples(count: int, seed: int) -> list[str]:
    """Other prompts in every round, so that no arm's prefix cache has seen them."""
    rows = (common.ROOT / "examples" / "gsm8k_sample.jsonl").read_text().splitlines()
    questions = [json.loads(row)["question"] for row in rows]
    return [f"Puzzle {seed}. {questions[(i + 7 * seed) % len(questions)]}" for i in range(count)]


def run_longtail_arm(model: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    from longtail.core.types import Request, SamplingParams
    from longtail.engine.checkpoint import load_model
    from longtail.engine.engine import Engine
    from longtail.engine.lanes import LanePool
    from longtail.engine.tokenizer import Tokenizer

    decoder = load_model(Path(model), dtype=torch.float32)
    tokenizer = Tokenizer.load(Path(model))
    lanes = LanePool(decoder.config, blocks=3 * 32 * 64, dtype=torch.float32, device="cpu")
    engine = Engine(decoder, lanes, detokenize=tokenizer.decode)

    def answer(batch: int, tokens: int, seed: int) -> dict:
        prompts = prompts_from_examples(batch, seed)
        start = time.perf_counter()
        for i, prompt in enumerate(tokenizer.encode_prompt(p) for p in prompts):
            params = SamplingParams(max_tokens=tokens)
            engine.add(
                Request(
                    request_id=str(i), prompt=prompt, seeds=(seed * 1000 + i,), params=params, forced_lengths=(tokens,)
                )
            )
        done = 0
        while engine.has_work:
            done += sum(len(c.tokens) for c in engine.step().completions)
        return {"tokens": done, "seconds": time.perf_counter() - start}

    common.answer_questions({}, answer)


def run_transformers_arm(model: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def answer(batch: int, tokens: int, seed: int) -> dict:
        torch.manual_seed(seed)
        chats = [[{"role": "user", "content": p}] for p in prompts_from_examples(batch, seed)]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        start = time.perf_counter()
        out = hf.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, min_new_tokens=tokens, max_new_tokens=tokens
        )
        done = (out.shape[1] - inputs["input_ids"].shape[1]) * batch
        return {"tokens": done, "seconds": time.perf_counter() - start}

    common.answer_questions({}, answer)


def run_vllm_arm(model: str, threads: int) -> None:
    import vllm

    # Compiled (not eager) was its faster setting here. Prompts never repeat, so a prefix cache would only cost.
    llm = vllm.LLM(model, dtype="float32", max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False)

    def answer(batch: int, tokens: int, seed: int) -> dict:
        chats = [[{"role": "user", "content": p}] for p in prompts_from_examples(batch, seed)]
        params = vllm.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=False)
        done = sum(len(o.outputs[0].token_ids) for o in outputs)
        return {"tokens": done, "seconds": time.perf_counter() - start}

    common.answer_questions({"version": vllm.__version__}, answer)


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--arm", choices=["longtail", "transformers", "vllm"], help="(internal) be this arm")
    p.add_argument("--model", help="model folder; default: the built-in smollm2-135m")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--tokens", type=int, default=128, help="tokens to generate for each prompt")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--vllm-python", default=str(common.ROOT / ".venv-vllm" / "bin" / "python"))
    p.add_argument("--only", nargs="*", default=None, help="only these arms")
    args = p.parse_args()
    if args.arm:
        {"longtail": run_longtail_arm, "transformers": run_transformers_arm, "vllm": run_vllm_arm}[args.arm](
            args.model, args.threads
        )
        return
    from longtail.engine.models import resolve_model

    model = args.model or str(resolve_model("smollm2-135m"))
    batches, rounds, tokens = ((1, 16), 2, 32) if args.quick else (BATCHES, args.rounds, args.tokens)
    arms = start_arms(model, args)
    try:
        speeds = measure(arms, batches, rounds, tokens)
    finally:
        for arm in arms:
            arm.close()
    report(speeds, quick=args.quick, rounds=rounds, tokens=tokens, about={a.name: a.about for a in arms})


def start_arms(model: str, args) -> list[common.Arm]:
    env = {
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
    }
    pythons = {"longtail": sys.executable, "vllm": args.vllm_python, "transformers": sys.executable}
    arms = []
    for name, python in pythons.items():
        if args.only and name not in args.only:
            continue
        if not Path(python).exists():
            print(f"no {python}: the {name} arm is left out (see bench/README.md)", flush=True)
            continue
        command = [python, __file__, "--arm", name, "--model", model, "--threads", str(args.threads)]
        arms.append(common.Arm(name, command, env))
        print(f"{name} is ready", flush=True)
    return arms


def measure(arms: list[common.Arm], batches, rounds: int, tokens: int) -> dict[str, dict[int, list[float]]]:
    speeds: dict[str, dict[int, list[float]]] = {a.name: {b: [] for b in batches} for a in arms}
    for arm in arms:
        arm.ask(batch=2, tokens=8, seed=0)  # warm up: compilation, first allocations
    for batch in batches:
        for round_ in range(rounds):
            for arm in arms:
                got = arm.ask(batch=batch, tokens=tokens, seed=round_)
                assert got["tokens"] == batch * tokens, f"{arm.name} gave {got['tokens']} tokens"
                speeds[arm.name][batch].append(got["tokens"] / got["seconds"])
                print(f"batch {batch:2d}  round {round_}  {arm.name:12s} {speeds[arm.name][batch][-1]:7.1f} tok/s")
    return speeds


def report(speeds, *, quick: bool, rounds: int, tokens: int, about: dict) -> None:
    medians = {name: {b: statistics.median(v) for b, v in by.items()} for name, by in speeds.items()}
    targets = []
    for batch in (16, 32):
        ours, theirs = medians.get("longtail", {}).get(batch), medians.get("vllm", {}).get(batch)
        ratio = ours / theirs if ours and theirs else None
        targets.append(
            common.target(f"over_vllm_at_batch_{batch}", ratio, ">= 1.0", None if ratio is None else ratio >= 1.0)
        )
    common.finish(
        "engine",
        quick=quick,
        seeds=range(rounds),
        arms={
            name: {
                "tokens_per_s": {str(b): round(m, 1) for b, m in by.items()},
                "all": {str(b): [round(x, 1) for x in speeds[name][b]] for b in by},
            }
            for name, by in medians.items()
        },
        targets=targets,
        tokens_per_prompt=tokens,
        about=about,
    )


if __name__ == "__main__":
    main()
