"""Collatz chains: halve an even number, triple an odd one and add 1, until 1. Lengths have a very long tail."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from longtail.core.seeds import derive_seed
from longtail.rl.tasks.arguments import require_range
from longtail.rl.tasks.base import Completions, Example, Prompts
from longtail.rl.tasks.scoring import completion_text, matched


@dataclass(frozen=True, kw_only=True)
class Collatz:
    """``collatz 6:`` wants `` 3 10 5 16 8 4 2 1``; n is uniform in [min_n, max_n].

    Up to 99, half of the answers have fewer than 52 characters and one in six more than 255.
    """

    seed: int
    min_n: int = 2
    max_n: int = 99

    name: ClassVar[str] = "collatz"
    size: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_range(self.name, ("min_n", self.min_n), ("max_n", self.max_n), floor=2, ceiling=10**9)

    def example(self, index: int) -> Example:
        n = random.Random(derive_seed(self.seed, self.name, index)).randint(self.min_n, self.max_n)
        return Example(prompt=f"collatz {n}:", columns={"n": n, "answer": " ".join(map(str, chain(n)))})

    def score(self, prompts: Prompts, completions: Completions, *, answer: list[str], **columns: Any) -> list[float]:
        """0.8 for the share of the chain that is right from its start, 0.2 for ending exactly at its 1."""
        scores = []
        for completion, truth in zip(completions, answer, strict=True):
            text = completion_text(completion).split()
            scores.append(0.8 * matched(text, truth.split()) + 0.2 * (text == truth.split()))
        return scores


def chain(n: int) -> list[int]:
    """The numbers after ``n``, down to 1."""
    numbers = []
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        numbers.append(n)
    return numbers
