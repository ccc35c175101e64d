"""What the serve bench asks for: real prompts, how long the answer to each is, and a ranker trained on other prompts.

SmolLM2-135M answers, but not at its own length: a request's length is forced to that of a better model's answer to the
same prompt, times a factor that brings the longest to a cap which two cores can serve.

larger model  AlpacaEval prompts with the words of GPT-4o's answer; the 99th percentile comes to lie at the cap. The
              ranker knows the other half of the prompts, with the words of Llama-3-8B's answers, and Arena-Hard.
mix           Four kinds on one scale, in tokens, as if a server with a limit of 4,096 were shared: chat (AlpacaEval,
              GPT-4o), math (GSM8K, the worked answer), code (Arena-Hard prompts that look like code, GPT-4) and
              reasoning (the other Arena-Hard prompts, with the lengths of DeepSeek-R1's production traffic). The ranker
              knows other prompts of the same kinds and another model's lengths, except for math, which has only one.
hard          SmolLM2's own sampled lengths, which follow chance more than the prompt; the ranker knows the other half
              of the prompts. Answers cut off at 768 tokens count as 768, and as cut off when the ranker learns.

All rankers also learn from the project's everyday requests (scripts/ranker_data). None knows a prompt that is asked.

How R1's lengths are joined to prompts: nobody has published which prompt got which length, only their quantiles. A
reasoning prompt whose GPT-4 answer has rank q among all reasoning prompts gets the q-th quantile (for training, by the
rank of GPT-3.5's answer). So the spread is R1's, and how well a prompt tells its length is as among GPT's answers. The
prompts are everyday ones of Arena-Hard, not competition problems. 2 in 10 requests of the mix are of this kind.

Prompts over 600 characters (about 200 tokens with the chat template) are left out of what is asked, because reading a
prompt costs this machine more than it costs any GPU; the ranker may learn from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

DATA = Path(os.environ.get("LONGTAIL_DATA", common.ROOT.parent / "shared" / "data"))
BURST = 200
MOST_CHARS = 600
MOST_LEARNED = 600
"""Prompts of one kind of the mix; GSM8K would outweigh the others."""
SERVED, LEARNED = "gpt-4o-2024-05-13", "Meta-Llama-3-8B-Instruct"
ARENA_SERVED, ARENA_LEARNED = "gpt-4-0314", "gpt-3.5-turbo-0125"
TOKENS_PER_WORD = 4 / 3
"""Ordinary for English; used only where the mix puts words and tokens on one scale."""
MIX_LIMIT = 4096
"""Tokens at which a server would cut off R1's answers; comes to lie at the cap of the mix."""
MIX_SHARES = {"chat": 0.4, "math": 0.2, "code": 0.2, "reasoning": 0.2}
CAPS = {"larger model": 112, "mix": 256, "hard": 72}
"""Tokens; chosen so that a mean answer has 30 to 50, and a burst of 200 takes about a minute."""
CODE = re.compile(
    r"```|\b(python|java|javascript|typescript|c\+\+|c#|rust|golang|sql|html|css|bash|regex|code|script|function|class"
    r"|api|react|django|flask|kubernetes|docker|linux|git|algorithm|query|program|compile|pytorch|pandas|numpy)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Prompts:
    """n prompts with lengths [n]; ``censored`` [n] bool: at least that long. ``kinds`` names the kind of each."""

    prompts: list[str]
    lengths: np.ndarray
    kinds: list[str]
    censored: np.ndarray

    def take(self, rows: np.ndarray) -> Prompts:
        return Prompts(
            [self.prompts[i] for i in rows], self.lengths[rows], [self.kinds[i] for i in rows], self.censored[rows]
        )


@dataclass(frozen=True)
class Work:
    """``asked`` in the order of a burst, its lengths in tokens as forced. ``learned`` is what the ranker knows, by
    source; lengths of different sources are not compared."""

    name: str
    asked: Prompts
    learned: dict[str, Prompts]
    cap: int

    def draw(self, count: int) -> np.ndarray:
        """Rows of ``asked`` for ``count`` requests: all in turn, and again from the first if they are too few."""
        return np.arange(count) % len(self.asked.prompts)

    def quantiles(self, by: str, seed: int) -> np.ndarray:
        """[n] in (0, 1): the place of each asked prompt by true length (``oracle``), ``prompt length`` or chance."""
        values = {
            "oracle": self.asked.lengths,
            "prompt length": np.array([len(p) for p in self.asked.prompts]),
            "random": np.random.default_rng(seed + 1).permutation(len(self.asked.prompts)),
        }[by]
        return places(values)


def places(values: np.ndarray) -> np.ndarray:
    """Ranks in (0, 1); equal values share the middle of theirs."""
    ordered = np.sort(values)
    low, high = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (low + high) / 2 / len(values)


def load_work(name: str, *, seed: int = 0) -> Work:
    """Deterministic for a seed, which splits the prompts and shuffles what is asked."""
    if not DATA.is_dir():
        raise SystemExit(f"bench/serve.py: no data in {DATA}; set LONGTAIL_DATA (see bench/README.md)")
    work = {"larger model": larger_model, "mix": mix, "hard": hard}[name](np.random.default_rng(seed))
    work.learned["everyday"] = everyday()
    assert not set(work.asked.prompts) & {p for known in work.learned.values() for p in known.prompts}
    return work


# -- the three works -------------------------------------------------------------------------------------------------


def larger_model(rng: np.random.Generator) -> Work:
    served, learned = alpaca(SERVED), alpaca(LEARNED)
    test, train = halves(served.prompts, rng)
    cap = CAPS["larger model"]
    asked = scaled(served, cap / np.percentile(served.lengths, 99), cap)
    known = {"AlpacaEval": learned.take(train), "Arena-Hard": together(arena(ARENA_LEARNED, r1=False).values())}
    return Work("larger model", asked.take(short(asked, test)), known, cap)


def mix(rng: np.random.Generator) -> Work:
    served = {"chat": alpaca(SERVED, TOKENS_PER_WORD), "math": gsm8k(), **arena(ARENA_SERVED)}
    learned = {"chat": alpaca(LEARNED, TOKENS_PER_WORD), "math": gsm8k(), **arena(ARENA_LEARNED)}
    cap, asked, known = CAPS["mix"], [], []
    for kind, share in MIX_SHARES.items():
        order = rng.permutation(len(served[kind].prompts))
        test = short(served[kind], order)[: round(share * BURST)]
        assert len(test) == round(share * BURST), f"only {len(test)} prompts of the kind {kind} are short enough"
        asked.append(scaled(served[kind], cap / MIX_LIMIT, cap).take(test))
        known.append(learned[kind].take(np.setdiff1d(order, test)[:MOST_LEARNED]))
    return Work("mix", together(asked).take(rng.permutation(BURST)), {"mix": together(known)}, cap)


def hard(rng: np.random.Generator) -> Work:
    own = sampled(DATA / "smollm2_lengths.jsonl")
    test, train = halves(own.prompts, rng)
    cap = CAPS["hard"]
    asked = scaled(own, cap / own.lengths.max(), cap)
    return Work("hard", asked.take(short(asked, test)), {"SmolLM2": own.take(train)}, cap)


# -- prompts and lengths ---------------------------------------------------------------------------------------------


@cache
def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    text = "question" if "question" in rows[0] else "prompt"
    return list({row[text]: row for row in rows}.values())


def alpaca(model: str, factor: float = 1.0) -> Prompts:
    rows = rows_of(DATA / "alpaca_eval_lengths.jsonl")
    return of_kind("chat", [r["prompt"] for r in rows], [factor * r["words"][model] for r in rows])


def gsm8k() -> Prompts:
    rows = rows_of(DATA / "gsm8k" / "test.jsonl")
    words = [len(r["answer"].split()) for r in rows]
    return of_kind("math", [r["question"] for r in rows], [TOKENS_PER_WORD * w for w in words])


def everyday() -> Prompts:
    return sampled(common.ROOT / "scripts" / "ranker_data" / "everyday.jsonl")


def sampled(path: Path) -> Prompts:
    rows = rows_of(path)
    found = of_kind("sampled", [r["prompt"] for r in rows], [r["output_tokens"] for r in rows])
    return replace(found, censored=np.array([r["censored"] for r in rows]))


def arena(model: str, *, r1: bool = True) -> dict[str, Prompts]:
    """``code`` with the model's lengths, and ``reasoning`` with them too, or with those of R1 at the same ranks."""
    rows = rows_of(DATA / "arena_hard_lengths.jsonl")
    code = [r for r in rows if CODE.search(r["prompt"])]
    other = [r for r in rows if not CODE.search(r["prompt"])]
    trace = json.loads((DATA / "traces" / "deepseek_r1_output_quantiles.json").read_text())
    quantiles = np.array(trace["output_tokens_quantiles"], float)
    lengths = np.array([r["tokens"][model] for r in other], float)
    if r1:
        lengths = np.interp(places(lengths), np.linspace(0, 1, len(quantiles)), quantiles).clip(max=MIX_LIMIT)
    return {
        "code": of_kind("code", [r["prompt"] for r in code], [r["tokens"][model] for r in code]),
        "reasoning": of_kind("reasoning", [r["prompt"] for r in other], lengths),
    }


def of_kind(kind: str, prompts: list[str], lengths: Any) -> Prompts:
    return Prompts(prompts, np.array(lengths, float), [kind] * len(prompts), np.zeros(len(prompts), bool))


def together(parts: Iterable[Prompts]) -> Prompts:
    parts = list(parts)
    return Prompts(
        [prompt for part in parts for prompt in part.prompts],
        np.concatenate([part.lengths for part in parts]),
        [kind for part in parts for kind in part.kinds],
        np.concatenate([part.censored for part in parts]),
    )


def halves(prompts: list[str], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    order = rng.permutation(len(prompts))
    return order[: len(order) // 2], order[len(order) // 2 :]


def short(prompts: Prompts, rows: np.ndarray) -> np.ndarray:
    return np.array([i for i in rows if len(prompts.prompts[i]) <= MOST_CHARS])


def scaled(prompts: Prompts, factor: float, cap: int) -> Prompts:
    tokens = np.clip(np.round(factor * prompts.lengths), 1, cap).astype(int)
    return Prompts(prompts.prompts, tokens, prompts.kinds, prompts.censored)


# -- its ranker ------------------------------------------------------------------------------------------------------


def ranker_for(work: Work) -> Path:
    """The folder of a light ranker trained on what ``work`` lets it know; made once for the same data."""
    from longtail.lengths.data import LengthData, join
    from longtail.lengths.ranker import RANKER_FILE
    from longtail.lengths.train import TrainConfig, train

    def source(name: str, known: Prompts) -> LengthData:
        return LengthData(
            known.prompts, known.lengths, np.zeros(len(known.prompts), np.int32), [name], "tokens", known.censored
        )

    digest = hashlib.sha256()
    for name, known in work.learned.items():
        digest.update(json.dumps([name, known.prompts, known.lengths.tolist(), known.censored.tolist()]).encode())
    folder = Path(tempfile.gettempdir()) / "longtail-bench-rankers" / digest.hexdigest()[:16]
    if not (folder / RANKER_FILE).exists():
        train(join([source(name, known) for name, known in work.learned.items()]), TrainConfig()).save(folder)
    return folder


def about(work: Work, score: Callable[[list[str]], np.ndarray]) -> dict[str, Any]:
    """Of the burst: how long answers are, and how well ``score`` and prompt length order them (Kendall's tau)."""
    from scipy.stats import kendalltau

    asked = work.asked.take(work.draw(min(BURST, len(work.asked.prompts))))
    tokens, chars = asked.lengths, np.array([len(p) for p in asked.prompts])
    kinds = np.array(asked.kinds)
    return {
        "requests": len(tokens),
        "cap": work.cap,
        "mean_tokens": round(float(tokens.mean()), 1),
        "mean_tokens_by_kind": {k: round(float(tokens[kinds == k].mean()), 1) for k in dict.fromkeys(asked.kinds)},
        "tokens_p10_p50_p90": [int(q) for q in np.percentile(tokens, [10, 50, 90])],
        "share_at_cap": round(float((tokens >= work.cap).mean()), 3),
        "mean_prompt_chars": round(float(chars.mean())),
        "trained_on": {name: len(known.prompts) for name, known in work.learned.items()},
        "tau": round(float(kendalltau(score(asked.prompts), tokens)[0]), 3),
        "tau_of_prompt_length": round(float(kendalltau(chars, tokens)[0]), 3),
    }
