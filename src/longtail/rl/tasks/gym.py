"""Any generator of the reasoning-gym package as a task."""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from typing import Any

from longtail.core.errors import ConfigError
from longtail.core.seeds import derive_seed
from longtail.rl.tasks.arguments import nearest
from longtail.rl.tasks.base import Completions, Example, Prompts
from longtail.rl.tasks.scoring import completion_text, last_number

WINDOW = 500
"""Examples of one generator instance; some generators prepare all of theirs at once."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")


class GymTask:
    """Examples of one reasoning-gym generator, endless unless the job sets ``size``.

    ``args`` go to the generator's own configuration. Without ``size``, example i belongs to window i // 500, and each
    window is a fresh generator with a seed of its own. A few generators (knight_swap, ransom_note and others that
    iterate over sets of strings) give other examples in each process; rewards are right all the same, because the
    answer travels with the prompt.
    """

    def __init__(self, name: str, args: dict[str, Any], seed: int) -> None:
        self.name = name
        self.size: int | None = args.get("size")
        self._generator = name.removeprefix("reasoning_gym/")
        self._args, self._seed = args, seed
        self._window = lru_cache(maxsize=4)(self._make_window)
        self._window(0)

    def example(self, index: int) -> Example:
        window, offset = (0, index) if self.size is not None else divmod(index, WINDOW)
        entry = self._window(window)[offset]
        return Example(prompt=entry["question"], columns={k: entry.get(k) for k in ("question", "answer", "metadata")})

    def score(
        self,
        prompts: Prompts,
        completions: Completions,
        *,
        question: list[str],
        answer: list[Any],
        metadata: list[dict[str, Any]],
        **columns: Any,
    ) -> list[float]:
        """The generator's own score, from 0 to 1, of the answer that :func:`final_answer` finds."""
        scores = []
        for completion, q, a, m in zip(completions, question, answer, metadata, strict=True):
            entry = {"question": q, "answer": a, "metadata": m}
            said = final_answer(completion_text(completion), a)
            scores.append(float(self._window(0).score_answer(said, entry)))
        return scores

    def _make_window(self, window: int) -> Any:
        import reasoning_gym

        seed = derive_seed(self._seed, self.name, window) % 2**31
        try:
            return reasoning_gym.create_dataset(self._generator, **{"seed": seed, "size": WINDOW, **self._args})
        except Exception as error:
            raise ConfigError(f"task {self.name}: {_sentence(error)} (task_args: {self._args})") from error


def load_gym(spec: str, args: dict[str, Any], seed: int) -> GymTask:
    """Raises :class:`ConfigError` for unknown generators and arguments, and for values the generator refuses."""
    from reasoning_gym.factory import DATASETS

    name = spec.removeprefix("reasoning_gym/")
    if name not in DATASETS:
        raise ConfigError(f"unknown task {spec!r}: reasoning-gym has no generator {name!r}{nearest(name, DATASETS)}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for key in args:
        if key not in known:
            raise ConfigError(f"task {spec} has no argument {key!r}{nearest(str(key), known)}")
    size = args.get("size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"task {spec}: size must be a whole number from 1, not {size!r}")
    return GymTask(spec, args, seed)


def final_answer(text: str, expected: Any) -> str:
    """What a completion answers: the text in its last ``<answer>...</answer>``; else, where a number is expected,
    its last number; else its last line that is not empty."""
    if tagged := _TAGGED.findall(text):
        return tagged[-1].strip()
    if isinstance(expected, str) and _NUMBER.fullmatch(expected):
        return last_number(text) or ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _sentence(error: Exception) -> str:
    """The first line of what a generator says about its arguments."""
    text = str(error).strip().split("\n")[0]
    return text or f"{type(error).__name__} in the generator"
