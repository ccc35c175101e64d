"""How long will the live sequences go on? Online beliefs from the ranker's prior, history and progress.

    beliefs = Beliefs(max_tokens=16384, tau=0.36)
    beliefs.add(ids, prompt_keys, quantiles)      # sequences start
    beliefs.progress(generated)                   # every so often, all live rows in the order of beliefs.ids
    left = beliefs.remaining()                    # frozen: left.interval(0.9), left.expected(), left.expected_alive(t)
    beliefs.end(ids, lengths, censored)
    beliefs.next_step()                           # learn, remember, and let the past weigh less

The model is in ``latent``, the estimate of all lengths in ``survival``, what is asked of a belief in ``remaining``;
docs/beliefs.md has the equations. This file keeps the books. Arrays in and out; no Python loop over sequences.

Invariants: a live sequence counts as cut off where it is now, never as ended; a group (the samples of one prompt that
were added in one step) is learnt from only when its last sample has ended, so stragglers do not make it look short;
live rows are sorted by id; answers depend on nothing but the calls made, in their order.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from longtail.lengths import normal
from longtail.lengths.history import History, Recalled
from longtail.lengths.latent import Evidence, Params, Posterior, outlook, posterior, prior
from longtail.lengths.learning import Folded, Learner, Statistics
from longtail.lengths.remaining import BeliefError, Remaining
from longtail.lengths.scores import Z_MAX, Scores
from longtail.lengths.survival import Curve, LengthCounts, LengthGrid

FORMAT = 1


def prompt_keys(texts: Sequence[str]) -> np.ndarray:
    """int64 [n]: stable keys of prompts by their text, the same in every process."""
    digests = (hashlib.blake2b(t.encode("utf-8", "surrogatepass"), digest_size=8).digest() for t in texts)
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


class Beliefs:
    """``max_tokens``: the cap on a response. ``tau``: Kendall's tau of the ranker, from its card; only where its trust
    starts, as it is learnt on the way. ``decay``: weight of a step's lengths one step later. ``prior_weight``: how many
    responses the prior on lengths (``survival.py``) counts for at every age. ``remember``: prompts kept in history
    (32 bytes each).
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        tau: float = 0.0,
        decay: float = 0.9,
        prior_weight: float = 1.0,
        remember: int = 1_000_000,
    ) -> None:
        if max_tokens < 1:
            raise BeliefError(f"max_tokens is {max_tokens}; it must be at least 1")
        if not -1.0 <= tau <= 1.0:
            raise BeliefError(f"tau is {tau}; Kendall's tau lies in [-1, 1]")
        if not 0.0 < decay <= 1.0:
            raise BeliefError(f"decay is {decay}; it must be in (0, 1]: the weight of a step's lengths one step later")
        if not 0.0 < prior_weight < math.inf:
            raise BeliefError(f"prior_weight is {prior_weight}; it must be positive: the first step has no other guide")
        if remember < 0:
            raise BeliefError(f"remember is {remember}; it must be 0 (no history) or more prompts")
        self.max_tokens = max_tokens
        self.decay = decay
        self.step = 0
        self._counts = LengthCounts(LengthGrid(max_tokens), prior_weight=prior_weight)
        # Kendall's tau of two jointly normal scores is 2 / pi * asin(rho) (Kruskal 1958, section 8).
        self._learner = Learner(rho=math.sin(math.pi * tau / 2))
        self._history = History(remember)
        # Live rows [N], rows of open groups that ended [M], and the open groups [G] that both point into.
        self._ids, self._group, self._generated, self._limit = (np.zeros(0, np.int64) for _ in range(4))
        self._done_group, self._done_length = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._done_censored = np.zeros(0, bool)
        self._key, self._born, self._u = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        self._whole: Remaining | None = None

    def fork(self) -> Beliefs:
        """A copy for the time until the next step, which the original knows nothing of. Both read one history, so only
        one of them may come to :meth:`next_step`."""
        fork = copy.copy(self)
        fork._counts, fork._learner = copy.deepcopy(self._counts), copy.deepcopy(self._learner)
        fork._generated = self._generated.copy()
        return fork

    # What happens.

    def add(
        self,
        ids: np.ndarray,
        prompt_keys: np.ndarray,
        quantiles: np.ndarray | None = None,
        *,
        limits: np.ndarray | None = None,
    ) -> None:
        """Sequences ``ids`` (int64 [n], not live yet) start. Those with the same prompt key in one step are a group.

        ``quantiles`` [n] in [0, 1] are the ranker's (None: not ranked), ``limits`` [n] lower caps of their own.
        """
        ids, keys = _integers("ids", ids), _integers("prompt_keys", prompt_keys)
        raw_u = _raw_scores(quantiles, len(ids))
        limit = np.full(len(ids), self.max_tokens) if limits is None else _integers("limits", limits)
        _same_length("prompt_keys", keys, ids)
        _same_length("limits", limit, ids)
        if len(limit) and not (limit.min() >= 1 and limit.max() <= self.max_tokens):
            bad = limit[(limit < 1) | (limit > self.max_tokens)][0]
            raise BeliefError(f"limits holds {bad}; a limit must be 1 to max_tokens = {self.max_tokens}")
        ordered = np.sort(ids)
        if (ordered[1:] == ordered[:-1]).any():
            raise BeliefError(f"ids holds {ordered[1:][ordered[1:] == ordered[:-1]][0]} twice")
        if len(again := np.intersect1d(ids, self._ids)):
            raise BeliefError(f"sequence {again[0]} is live already; end or forget it before it is added again")
        all_ids = np.concatenate([self._ids, ids])
        order = np.argsort(all_ids, kind="stable")
        self._ids = all_ids[order]
        self._group = np.concatenate([self._group, self._groups_of(keys, raw_u)])[order]
        self._generated = np.concatenate([self._generated, np.zeros(len(ids), np.int64)])[order]
        self._limit = np.concatenate([self._limit, limit])[order]
        self._whole = None

    def progress(self, generated: np.ndarray, ids: np.ndarray | None = None) -> None:
        """Tokens ``generated`` [n] since the start by ``ids``, or by all live sequences in the order of :attr:`ids`.

        A count may fall: a sequence that moved to another worker may have to generate some of its tokens again.
        """
        generated = _integers("generated", generated)
        if ids is None:
            _same_length("generated", generated, self._ids, "live sequences")
            rows: np.ndarray | slice = slice(None)
        else:
            rows = self._rows(ids)
            _same_length("generated", generated, self._ids[rows])
        self._check_lengths("generated", generated, rows)
        self._generated[rows] = generated
        self._whole = None

    def end(self, ids: np.ndarray, lengths: np.ndarray, censored: np.ndarray | bool = False) -> None:
        """Sequences end with ``lengths`` [n] tokens. ``censored`` [n]: cut off there (cap, abort), not at their end."""
        rows = self._rows(ids)
        lengths = _integers("lengths", lengths)
        _same_length("lengths", lengths, rows, "ids")
        cut = np.asarray(censored, dtype=bool)
        cut = np.full(len(rows), cut) if cut.ndim == 0 else cut
        _same_length("censored", cut, rows, "ids")
        self._check_lengths("lengths", lengths, rows)
        self._counts.add(lengths, cut)
        self._done_group = np.concatenate([self._done_group, self._group[rows]])
        self._done_length = np.concatenate([self._done_length, lengths])
        self._done_censored = np.concatenate([self._done_censored, cut])
        self._drop(rows)

    def forget(self, ids: np.ndarray) -> None:
        """Drop live sequences as if they had never been (a step that is repeated, a request that was withdrawn)."""
        self._drop(self._rows(ids))

    def next_step(self) -> None:
        """A training step (or, when serving, some hundreds of requests) is over: learn, remember, age."""
        alive = np.bincount(self._group, minlength=len(self._key)) > 0
        if not alive.all():
            self._fold(~alive)
        self._counts.age(self.decay)
        self._learner.age(self.decay)
        self.step += 1
        self._whole = None

    # What is believed.

    @property
    def ids(self) -> np.ndarray:
        """int64 [N], ascending: live sequences, in the order that :meth:`progress` and :meth:`remaining` use."""
        return self._ids.copy()

    @property
    def params(self) -> Params:
        """The learnt parameters of the latent model."""
        return self._learner.params

    @property
    def prompts_remembered(self) -> int:
        return len(self._history)

    def remembers(self, prompt_keys: np.ndarray) -> np.ndarray:
        """bool [n]: which prompts have had responses that history still holds."""
        return self._history.recall(_integers("prompt_keys", prompt_keys)).samples > 0

    def curve(self) -> Curve:
        """The survival function of all lengths, live sequences included as far as they are."""
        return self._counts.curve(self._generated)

    def remaining(self, ids: np.ndarray | None = None) -> Remaining:
        """Beliefs about the live sequences ``ids``, or all; frozen, later calls do not change it."""
        if self._whole is None:
            self._whole = self._believe()
        if ids is None:
            return self._whole
        return self._whole.take(self._rows(ids))

    def upcoming(self, prompt_keys: np.ndarray, quantiles: np.ndarray | None = None) -> Remaining:
        """Beliefs about whole responses to prompts (int64 [n]) that have not started: ranker and history only."""
        keys = _integers("prompt_keys", prompt_keys)
        params, recalled = self.params, self._history.recall(keys)
        u = self._learner.standardised(_raw_scores(quantiles, len(keys)))
        mean, sd = outlook(prior(u, recalled, params), params)
        scores = Scores(self.curve())
        return Remaining(
            ids=keys,
            generated=np.zeros(len(keys), np.int64),
            limits=np.full(len(keys), self.max_tokens),
            score=np.full(len(keys), -Z_MAX, np.float32),
            mean=mean,
            sd=sd,
            outlier=params.outlier,
            scores=scores,
        )

    # What survives a restart.

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers and numpy arrays; live sequences are not part of it (they start anew)."""
        s = self._learner.statistics
        return {
            "format": FORMAT,
            "max_tokens": self.max_tokens,
            "step": self.step,
            "ended": self._counts.ended_J.copy(),
            "censored": self._counts.censored_J.copy(),
            **{f"learnt_{name}": getattr(s, name).copy() for name in Statistics.__dataclass_fields__},
            "history_keys": self._history.keys.copy(),
            "history_seen": self._history.seen.copy(),
            "history_known": self._history.known.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` (lists in place of arrays will do); ``max_tokens`` may be another one."""
        if state.get("format") != FORMAT:
            raise BeliefError(f"the saved beliefs have format {state.get('format')!r}; this version reads {FORMAT}")
        if lacking := sorted(self.state_dict().keys() - state.keys()):
            raise BeliefError(f"the saved beliefs lack {', '.join(lacking)}")
        if len(self._key):
            raise BeliefError(f"sequences of {len(self._key)} groups are in the books; load saved beliefs before any")
        saved = LengthCounts(LengthGrid(int(state["max_tokens"])), prior_weight=self._counts.prior_weight)
        ended, censored = np.asarray(state["ended"], float), np.asarray(state["censored"], float)
        if not len(ended) == len(censored) == len(saved.grid):
            raise BeliefError(
                f"the saved beliefs hold {len(ended)} and {len(censored)} length counts; "
                f"max_tokens {state['max_tokens']} needs {len(saved.grid)}"
            )
        saved.ended_J, saved.censored_J = ended.copy(), censored.copy()
        self._counts = saved.moved_to(self._counts.grid)
        self._learner.statistics = Statistics(
            **{name: np.asarray(state[f"learnt_{name}"], float).copy() for name in Statistics.__dataclass_fields__}
        )
        history = History(self._history.capacity)
        history.keys = np.asarray(state["history_keys"], np.int64).copy()
        history.seen = np.asarray(state["history_seen"], np.int64).copy()
        history.known = np.asarray(state["history_known"], float).reshape(len(Recalled._fields), -1).copy()
        history.trim()
        self._history = history
        self.step = int(state["step"])
        self._whole = None

    # The books.

    def _groups_of(self, keys: np.ndarray, raw_u: np.ndarray) -> np.ndarray:
        """Groups [n] of rows that start now; opens those that this step does not have yet."""
        distinct, first, back = np.unique(keys, return_index=True, return_inverse=True)
        mine = np.flatnonzero(self._born == self.step)
        mine = mine[np.argsort(self._key[mine])]
        at = np.minimum(np.searchsorted(self._key[mine], distinct), max(len(mine) - 1, 0))
        found = self._key[mine[at]] == distinct if len(mine) else np.zeros(len(distinct), bool)
        new = ~found
        groups = np.empty(len(distinct), np.int64)
        if len(mine):
            groups[found] = mine[at[found]]
        groups[new] = len(self._key) + np.arange(new.sum())
        self._key = np.concatenate([self._key, distinct[new]])
        self._born = np.concatenate([self._born, np.full(new.sum(), self.step)])
        self._u = np.concatenate([self._u, raw_u[first[new]]])
        self._learner.saw(raw_u[first[new]])
        return groups[back]

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        ids = _integers("ids", ids)
        rows = np.minimum(np.searchsorted(self._ids, ids), max(len(self._ids) - 1, 0))
        known = self._ids[rows] == ids if len(self._ids) else np.zeros(len(ids), bool)
        if not known.all():
            raise BeliefError(f"sequence {ids[~known][0]} is not live: it was never added, or has ended")
        times = np.bincount(rows, minlength=len(self._ids))
        if times.max(initial=0) > 1:
            raise BeliefError(f"ids holds {self._ids[times > 1][0]} twice")
        return rows

    def _check_lengths(self, name: str, lengths: np.ndarray, rows: np.ndarray | slice) -> None:
        bad = (lengths < 0) | (lengths > self._limit[rows])
        if bad.any():
            at = np.flatnonzero(bad)[0]
            raise BeliefError(
                f"{name} is {lengths[at]} for sequence {self._ids[rows][at]}; "
                f"it must be 0 to its limit of {self._limit[rows][at]} tokens"
            )

    def _drop(self, rows: np.ndarray) -> None:
        rest = np.ones(len(self._ids), bool)
        rest[rows] = False
        self._ids, self._group = self._ids[rest], self._group[rest]
        self._generated, self._limit = self._generated[rest], self._limit[rest]
        self._whole = None

    def _evidence(self, scores: Scores, done: np.ndarray | slice, generated: np.ndarray, group: np.ndarray) -> Evidence:
        """Rows as the model takes them: live ones, then ended ones, the cut-off before the complete."""
        length, cut, done_group = self._done_length[done], self._done_censored[done], self._done_group[done]
        score = [scores.beyond(generated), scores.beyond(length[cut]), scores.middle(length[~cut])]
        groups = np.concatenate([group, done_group[cut], done_group[~cut]])
        return Evidence(np.concatenate(score), groups, len(generated) + int(cut.sum()))

    def _believe(self) -> Remaining:
        params, scores = self.params, Scores(self.curve())
        known = prior(self._learner.standardised(self._u), self._history.recall(self._key), params)
        rows = self._evidence(scores, slice(None), self._generated, self._group)
        live = len(self._ids)
        found = posterior(known, rows, params, wanted=live)
        return Remaining(
            ids=self._ids.copy(),
            generated=self._generated.copy(),
            limits=self._limit.copy(),
            score=rows.score[:live],
            mean=found.mean,
            sd=found.sd,
            outlier=params.outlier,
            scores=scores,
        )

    def _fold(self, closed: np.ndarray) -> None:
        """Learn from groups ``closed`` (bool [G]) and move them from the books into history."""
        renumber = np.cumsum(closed) - 1
        done = closed[self._done_group]
        keys = self._key[closed]
        recalled = self._history.recall(keys)
        rows = self._evidence(Scores(self.curve()), done, np.zeros(0, np.int64), np.zeros(0, np.int64))
        rows = rows._replace(group=renumber[rows.group])
        u = self._learner.standardised(self._u[closed])
        found, params = self._learner.learn(Folded(u, recalled, rows))
        self._remember(keys, recalled, found, params)

        keep = np.cumsum(~closed) - 1
        self._group = keep[self._group]
        self._done_group, self._done_length = keep[self._done_group[~done]], self._done_length[~done]
        self._done_censored = self._done_censored[~done]
        self._key, self._born, self._u = self._key[~closed], self._born[~closed], self._u[~closed]

    def _remember(self, keys: np.ndarray, recalled: Recalled, found: Posterior, params: Params) -> None:
        """Add what the groups' rows said to what was known of their prompts, as one Kalman step per visit."""
        # Two groups of one prompt (added in different steps) may close together: they count as one visit.
        distinct, first, back = np.unique(keys, return_index=True, return_inverse=True)

        def summed(values: np.ndarray) -> np.ndarray:
            return np.bincount(back, values, len(distinct))

        before, told_now = params.faded(recalled.samples[first]), summed(found.within * found.precision)
        samples = before + told_now
        weighted = before * recalled.average[first] + summed(found.within * found.shift)
        told = told_now > 0
        known = Recalled(samples[told], weighted[told] / samples[told])
        self._history.store(distinct[told], known, self.step)


def _integers(name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise BeliefError(f"{name} has dtype {array.dtype} and shape {array.shape}; it must be a list of integers")
    return array.astype(np.int64)


def _same_length(name: str, values: np.ndarray, other: np.ndarray, than: str = "ids") -> None:
    if len(values) != len(other):
        raise BeliefError(f"{name} has {len(values)} values for {len(other)} {than}")


def _raw_scores(quantiles: np.ndarray | None, n: int) -> np.ndarray:
    """Normal scores [n] of the ranker's quantiles, NaN where there is none."""
    if quantiles is None:
        return np.full(n, np.nan)
    q = np.asarray(quantiles, dtype=np.float64)
    if q.shape != (n,):
        raise BeliefError(f"quantiles has shape {q.shape} for {n} sequences")
    bad = ~((q >= 0.0) & (q <= 1.0))
    if bad.any():
        at = np.flatnonzero(bad)[0]
        raise BeliefError(f"quantile {at} is {q[at]}; a ranker's quantile lies in [0, 1] (leave it out if not ranked)")
    return normal.quantile(np.clip(q, 0.001, 0.999))
