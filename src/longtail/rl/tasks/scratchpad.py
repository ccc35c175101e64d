"""Long-form addition with every step written out; the number of operands is log-uniform, so lengths have a tail."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from longtail.core.errors import ConfigError
from longtail.core.seeds import derive_seed
from longtail.rl.tasks.arguments import require_range
from longtail.rl.tasks.base import Completions, Example, Prompts
from longtail.rl.tasks.scoring import completion_text, matched


@dataclass(frozen=True, kw_only=True)
class Scratchpad:
    """``sum 3 14 2:`` wants `` 3+14=17 17+2=19 =19``; operands are uniform in [1, max_value]."""

    seed: int
    min_operands: int = 2
    max_operands: int = 16
    max_value: int = 20

    name: ClassVar[str] = "scratchpad"
    size: ClassVar[None] = None

    def __post_init__(self) -> None:
        low, high = ("min_operands", self.min_operands), ("max_operands", self.max_operands)
        require_range(self.name, low, high, floor=2, ceiling=10_000)
        if not 1 <= self.max_value <= 10**9:
            raise ConfigError(f"task {self.name}: max_value = {self.max_value} must be from 1 to {10**9}")

    def example(self, index: int) -> Example:
        rng = random.Random(derive_seed(self.seed, self.name, index))
        count = math.floor(math.exp(rng.uniform(math.log(self.min_operands), math.log(self.max_operands + 1))))
        operands = [rng.randint(1, self.max_value) for _ in range(min(count, self.max_operands))]
        answer = " ".join(steps(operands))
        return Example(prompt=f"sum {' '.join(map(str, operands))}:", columns={"operands": operands, "answer": answer})

    def score(self, prompts: Prompts, completions: Completions, *, answer: list[str], **columns: Any) -> list[float]:
        """0.8 for the share of steps that are right from the start, 0.2 for ending with the right sum."""
        scores = []
        for completion, truth in zip(completions, answer, strict=True):
            written, right = completion_text(completion).split(), truth.split()
            scores.append(0.8 * matched(written, right) + 0.2 * (written[-1:] == right[-1:]))
        return scores


def steps(operands: list[int]) -> list[str]:
    """``["3+14=17", "17+2=19", "=19"]`` for ``[3, 14, 2]``."""
    sums = list(accumulate(operands))
    additions = zip(sums, operands[1:], sums[1:], strict=False)
    return [f"{a}+{b}={c}" for a, b, c in additions] + [f"={sums[-1]}"]
