"""What is expected of the lengths of a step's responses: the ranker's quantiles at first, history as epochs pass.

Beliefs (``lengths/beliefs.py``) turn both into distributions; the planner gets them as moments to order by and as
drawn outcomes to judge placements by. Nothing here may end a pipeline: a ranker that fails is left out from then on.

Invariant: a forecast is a function of the steps learnt from and of the prompts, so a resumed run makes the same ones.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail.core.seeds import derive_seed
from longtail.lengths.beliefs import Beliefs, prompt_keys
from longtail.lengths.messages import prompt_text
from longtail.lengths.remaining import Remaining
from longtail.planner.order import Work
from longtail.rl.tasks import Example
from longtail.runtime.live import BelievedLengths
from longtail.runtime.plan import Ranks

MOST_SCORES = 1_000_000
"""Quantiles kept of prompts that were ranked, so that an epoch ranks them once."""
MOST_REMEMBERED = 1_000_000
LEVELS = 32
"""Points at which the distribution of a sample's length is read."""
OUTCOME_SAMPLES = 16384
"""Outcomes are drawn until they hold about so many samples: 16 for small steps, 2 for the largest."""
START_TAU = 0.3
"""Trust in a ranker before the first step, as Kendall's tau of its order with that of lengths; learnt from then on."""


@dataclass(frozen=True)
class Forecast:
    """Of N prompts, in the order of the step: ``keys`` and ranker's ``quantiles`` [N] (None: not ranked), how many were
    ``remembered`` from earlier steps, and ``expected`` tokens [N] of one sample. ``levels`` [N, L]: equally likely
    lengths of one sample; ``outcomes`` int64 [K, N, G]: equally likely lengths of all samples.
    """

    keys: np.ndarray
    quantiles: np.ndarray | None
    remembered: int
    expected: np.ndarray
    levels: np.ndarray
    outcomes: np.ndarray

    def work(self, samples: np.ndarray, prompt_tokens: np.ndarray) -> Work:
        """The work of requests that hold ``samples`` [R] each: all samples of the prompts, in their order."""
        lengths = self.outcomes.reshape(len(self.outcomes), -1)
        prompt_of = (np.cumsum(samples) - 1) // self.outcomes.shape[2]
        return Work.uncertain(samples, prompt_tokens, lengths, self.levels[prompt_of])


class Forecaster:
    """The knowledge of one pipeline. ``note`` gets a sentence when the ranker has failed."""

    def __init__(self, *, max_tokens: int, seed: int, ranker: Ranks | None, note: Callable[[str], None]) -> None:
        self._max_tokens, self._seed = max_tokens, seed
        self._ranker, self._note = ranker, note
        self._scores: dict[int, float] = {}
        self._scoring: Future[None] | None = None
        self._failure: Exception | None = None
        self.remember = MOST_REMEMBERED
        """How many prompts' history is kept; holds from the next :meth:`forget` on."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank") if ranker is not None else None
        self.forget()

    @property
    def ranks(self) -> bool:
        """Whether there is a ranker, and it works."""
        return self._ranker is not None

    def forget(self) -> None:
        """Back to where a new pipeline starts."""
        tau = START_TAU if self._ranker is not None else 0.0
        self._beliefs = Beliefs(self._max_tokens, tau=tau, remember=self.remember)
        self._next_id = 0

    def look_ahead(self, examples: Sequence[Example]) -> None:
        """Rank prompts that will come next, in a thread of its own: a large ranker takes its time."""
        if self._thread is not None and self._ranker is not None:
            self._await_scores()
            self._scoring = self._thread.submit(self._rank, _texts(examples))

    def forecast(self, examples: Sequence[Example], *, group_size: int, step: int) -> Forecast:
        """Of ``group_size`` responses to each prompt of ``step``."""
        texts = _texts(examples)
        keys = prompt_keys(texts)
        quantiles = self._quantiles(keys, texts)
        belief = self._beliefs.upcoming(keys, quantiles)
        levels = np.ascontiguousarray(belief.quantiles((np.arange(LEVELS) + 0.5) / LEVELS).T)
        rng = np.random.default_rng(derive_seed(self._seed, "outcomes", step))
        draws = int(np.clip(OUTCOME_SAMPLES // (len(keys) * group_size), 2, 16))
        return Forecast(
            keys=keys,
            quantiles=quantiles,
            remembered=int(self._beliefs.remembers(keys).sum()),
            expected=belief.expected(),
            levels=np.maximum(levels, 1),
            outcomes=draw(
                belief, self._beliefs.params.within_at(belief.mean), samples=group_size, draws=draws, rng=rng
            ),
        )

    def follow(self, forecast: Forecast, *, group_size: int, step: int) -> BelievedLengths:
        """What is believed of the step's samples while they run; nothing of it is learnt here."""
        seed = derive_seed(self._seed, "follow", step)
        return BelievedLengths(self._beliefs.fork(), forecast.keys, forecast.quantiles, group_size, seed=seed)

    def learn(self, forecast: Forecast, lengths: np.ndarray, censored: np.ndarray) -> None:
        """A step is over: ``lengths`` and ``censored`` (cut off at the cap) [N, G] of the forecast's prompts."""
        samples, group_size = lengths.size, lengths.shape[1]
        ids = np.arange(self._next_id, self._next_id + samples)
        quantiles = None if forecast.quantiles is None else np.repeat(forecast.quantiles, group_size)
        self._beliefs.add(ids, np.repeat(forecast.keys, group_size), quantiles)
        self._beliefs.end(ids, np.minimum(lengths, self._max_tokens).ravel(), censored.ravel())
        self._beliefs.next_step()
        self._next_id += samples

    # What survives a restart.

    def state_dict(self) -> str:
        """All that was learnt, as text for JSON."""
        return pack(self._beliefs.state_dict())

    def load_state_dict(self, state: str) -> None:
        self.forget()
        self._beliefs.load_state_dict(unpack(state))

    # The ranker.

    def _quantiles(self, keys: np.ndarray, texts: Sequence[str]) -> np.ndarray | None:
        self._await_scores()
        if self._ranker is not None and self._failure is None:
            self._rank(texts)
        if self._ranker is not None and (error := self._failure) is not None:
            self._ranker = None
            self._note(f"the ranker failed ({type(error).__name__}: {error}); prompts are ordered by history alone.")
        return np.array([self._scores[key] for key in keys.tolist()]) if self._ranker is not None else None

    def _await_scores(self) -> None:
        if self._scoring is not None:
            self._scoring.result()
            self._scoring = None

    def _rank(self, texts: Sequence[str]) -> None:
        """Add the quantiles of prompts that have none yet. User-supplied weights may do anything: nothing is raised."""
        assert self._ranker is not None
        keys = prompt_keys(texts).tolist()
        if len(self._scores) > MOST_SCORES:
            self._scores.clear()
        fresh = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._scores}
        if not fresh:
            return
        try:
            quantiles = np.asarray(self._ranker.quantile(list(fresh.values())), float)
            if quantiles.shape != (len(fresh),) or not ((quantiles >= 0) & (quantiles <= 1)).all():
                raise ValueError(f"its quantiles are not {len(fresh)} numbers from 0 to 1")
        except Exception as error:
            self._failure = error
            return
        self._scores.update(zip(fresh, quantiles.tolist(), strict=True))


def draw(belief: Remaining, within: np.ndarray, *, samples: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths int64 [draws, N, samples] of whole responses, from beliefs about N prompts that have not started.

    Samples of a prompt share what is not known of it: a normal score is its prompt's mean, drawn once, plus noise of
    variance ``within`` [N]; an outlier has nothing to do with its prompt (``lengths/latent.py``).
    """
    shape = (draws, len(belief), samples)
    within = np.minimum(within, belief.sd**2)
    mean = belief.mean + np.sqrt(belief.sd**2 - within) * rng.standard_normal((draws, len(belief)))
    score = mean[:, :, None] + np.sqrt(within)[:, None] * rng.standard_normal(shape)
    score = np.where(rng.random(shape) < belief.outlier, rng.standard_normal(shape), score)
    lengths = np.ceil(belief.scores.length(score)).astype(np.int64)
    return np.clip(lengths, 1, belief.limits[:, None])


def _texts(examples: Sequence[Example]) -> list[str]:
    return [prompt_text(example.prompt) for example in examples]


def pack(values: dict[str, Any]) -> str:
    """A dict of numbers and numpy arrays as text: JSON, compressed, in base 64."""
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
    return base64.b64encode(zlib.compress(json.dumps(plain).encode(), level=1)).decode("ascii")


def unpack(text: str) -> dict[str, Any]:
    """The inverse of :func:`pack`, with lists for arrays."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
