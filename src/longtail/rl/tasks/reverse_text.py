"""Write a text backwards; answers are as long as the text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from longtail.core.seeds import derive_seed
from longtail.rl.tasks.arguments import require_range
from longtail.rl.tasks.base import Completions, Example, Prompts
from longtail.rl.tasks.scoring import completion_text, matched

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


@dataclass(frozen=True, kw_only=True)
class ReverseText:
    """``reverse kumo rafe:`` wants `` efar omuk``; words are made of consonant-vowel syllables."""

    seed: int
    min_words: int = 1
    max_words: int = 4
    max_syllables: int = 3

    name: ClassVar[str] = "reverse-text"
    size: ClassVar[None] = None

    def __post_init__(self) -> None:
        low, high = ("min_words", self.min_words), ("max_words", self.max_words)
        require_range(self.name, low, high, floor=1, ceiling=10_000)
        require_range(self.name, ("1", 1), ("max_syllables", self.max_syllables), floor=1, ceiling=100)

    def example(self, index: int) -> Example:
        rng = random.Random(derive_seed(self.seed, self.name, index))
        words = rng.randint(self.min_words, self.max_words)
        text = " ".join(word(rng, rng.randint(1, self.max_syllables)) for _ in range(words))
        return Example(prompt=f"reverse {text}:", columns={"text": text, "answer": text[::-1]})

    def score(self, prompts: Prompts, completions: Completions, *, answer: list[str], **columns: Any) -> list[float]:
        """0.8 for the share of characters that are right from the start, 0.2 for all of them and no more."""
        scores = []
        for completion, truth in zip(completions, answer, strict=True):
            text = completion_text(completion).strip()
            scores.append(0.8 * matched(text, truth) + 0.2 * (text == truth))
        return scores


def word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
