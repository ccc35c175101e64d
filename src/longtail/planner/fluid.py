"""Pipelines that share workers, as a fluid: how far does each come if its work lies like this, and time is shared by
these weights?

Nothing is known of single quanta here. In each cell whoever has work there gets time by weight, and all of the time
goes to those who have some (processor sharing, as ``cluster/worker.py`` does in quanta). A rollout is so many solo
seconds in each of its cells; training is worker-seconds that flow to whatever cell has time for them; scores pass by
themselves; an update stops everybody while it lasts, since all workers meet in it.

Nothing happens between two ends, so time jumps from one to the next. A cell is looked at only when somebody begins or
ends there: what is left there, and when the next one ends, is known from the last time.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

SOLO, BUSY, KIND = range(3)
"""Of each part of a rollout in each cell: solo seconds, the share of the cell's workers that take part, and the kind of
work (an index into :class:`Factors`, that of the pipeline's model included)."""
(
    STAGE, STEPS, STALE, ELAPSED, LIVE,
    SCORE_NOW, TRAIN_NOW, UPDATE_NOW, SCORE, TRAIN, UPDATE,
    QUANTUM, KIND_TRAIN,
    WORTH_NOW, WORTH,
    ROLLOUT_PART_NOW, SCORE_PART_NOW, TRAIN_PART_NOW, ROLLOUT_PART, SCORE_PART, TRAIN_PART,
) = range(21)  # fmt: skip
"""Columns of ``about`` [P, 21]. STAGE: :data:`ROLLOUT` and so on. LIVE: 1 where a rollout runs beside the training of
an earlier step. QUANTUM: seconds of training that is done in one go. WORTH_NOW: seconds that the rest of the present
step takes alone, WORTH another step; the PARTs are of the worth, the update has the rest."""
COLUMNS = 21
READY, ROLLOUT, SCORING, TRAINING, UPDATING = range(5)
RING = 16
"""More than the steps of a pipeline that can be under way at once."""
MOST_EVENTS = 20_000
TINY = 1e-9
NOTHING = -1


class Factors(NamedTuple):
    """How many times longer work of kind a takes beside kind b: ``same`` [3, N, N] on one worker, with a share of 1/3,
    a half and 2/3 of its time, ``near`` [N, N] if all other workers do b. ``known``: whether one of them is not 1."""

    same: np.ndarray
    near: np.ndarray
    known: bool


class Flow(NamedTuple):
    """Of each pipeline [P]: seconds of what was ``done``, as they would take alone; when it had ``finished`` its last
    step (infinite: not within the horizon); how many times longer than alone the slowest of the next steps takes
    (``slow``), those under way included as far as they are; when the rollout under way, or
    the first, ends (``rollout_s``). ``seconds`` are those that all this took."""

    done: np.ndarray
    finished: np.ndarray
    slow: np.ndarray
    rollout_s: np.ndarray
    seconds: float


REST, PART_BUSY, PART_KIND, RATE, PULLS = range(5)
"""Columns of ``place`` [P, C, 5], of a pipeline in a cell: the solo seconds that are left of its rollout, the share of
workers and the kind of that, how fast it goes on, and how many worker-seconds a second its training takes there."""
AT, NEXT, STALE_CELL = range(3)
"""Columns of ``cell`` [C, 3]: the time at which REST is what it is, when the first rollout ends there, and whether
somebody has begun or ended since."""
PART, ROLLS, OPEN, LONGEST, BEFORE, SAMPLED, TRAINED, TRAINS, LEFT, WHOLE, PULL = range(11)
"""Columns of ``steps`` [P, 11], of a pipeline: which part of a rollout runs (NOTHING: none), for which step, in how
many cells it has not ended, its longest cell, and that of the part before; how many steps have been sampled and
trained; whether one is trained, with worker-seconds LEFT of WHOLE, of which all cells take PULL a second."""
AROUND, LOOKED_AT = 3, 4
"""Rows of ``beside`` [5, N]: by how much all other workers lengthen work of each kind in the cell that is looked at,
and whether that has been worked out. The first three: what all work on the same worker adds to it, at each share of
:class:`Factors`, times its weight."""
READY_AT, BEGAN = range(2)
"""Of ``times`` [P, RING, 2]: when the scores of a step are there, and when it began."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def flow(now, then, about, weights, sizes, factors, horizon_s, enough):
    """``now`` [P, 2, 3, C] is the rollout of the present step, ``then`` that of each other; ``about`` [P, 21];
    ``sizes`` [C]: workers of each cell. Ends at ``horizon_s``, or when all pipelines have ended ``enough`` steps, the
    present one among them, or have finished; the last pipeline that has not, of several, goes on as it would alone.
    """
    pipelines, cells = now.shape[0], now.shape[3]
    place, cell = np.zeros((pipelines, cells, 5)), np.zeros((cells, 3))
    steps, times = np.zeros((pipelines, 11)), np.zeros((pipelines, RING, 2))
    load, wants = np.zeros((cells + 1, len(factors.near))), np.zeros(pipelines)
    beside = np.zeros((5, len(factors.near)))
    done, slow = np.zeros(pipelines), np.zeros(pipelines)
    finished, rollout_s = np.full(pipelines, np.inf), np.full(pipelines, np.inf)
    time_s, unfinished = 0.0, pipelines
    known = factors.known
    same, near = factors.same - 1.0, factors.near - 1.0  # what is added to 1
    for c in range(cells):
        cell[c, NEXT], cell[c, STALE_CELL] = np.inf, 1.0
    for p in range(pipelines):
        _enter(p, now, about, place, cell, steps, times)
    for _ in range(MOST_EVENTS):
        _start(time_s, now, then, about, place, cell, steps, times)
        _share(time_s, place, cell, steps, about, weights, sizes, same, near, known, load, wants, beside)
        until_s = _next_s(time_s, horizon_s, cell, steps, times)
        trained = False
        for p in range(pipelines):
            if steps[p, TRAINS] > 0.0:
                if steps[p, LEFT] > 0.0:
                    steps[p, LEFT] -= (until_s - time_s) * steps[p, PULL]
                    if steps[p, LEFT] <= TINY * steps[p, WHOLE]:
                        steps[p, LEFT] = 0.0
                        for c in range(cells):
                            cell[c, STALE_CELL] = 1.0
                trained |= steps[p, LEFT] == 0.0
        nothing_to_do = until_s == time_s
        time_s = until_s
        if _end(time_s, place, cell, steps) or nothing_to_do:
            for p in range(pipelines):
                if (
                    steps[p, PART] != NOTHING
                    and steps[p, OPEN] == 0.0
                    and _ended(p, time_s, now, then, about, place, cell, steps, times)
                ):
                    rollout_s[p] = min(rollout_s[p], time_s)
        if time_s >= horizon_s:
            break
        if not trained:
            continue
        # Updates, one after the other; everybody waits.
        for p in range(pipelines):
            if steps[p, TRAINS] == 0.0 or steps[p, LEFT] > 0.0:
                continue
            wait_s = 0.0
            for q in range(pipelines):
                if q != p and steps[q, TRAINS] > 0.0 and steps[q, LEFT] > 0.0:
                    wait_s = max(wait_s, 0.5 * about[q, QUANTUM])
            first = steps[p, TRAINED] == 0.0
            lasts_s = wait_s + (about[p, UPDATE_NOW] if first else about[p, UPDATE])
            for c in range(cells):
                cell[c, AT] += lasts_s
                cell[c, NEXT] += lasts_s
            time_s += lasts_s
            done[p] += about[p, WORTH_NOW] if first else about[p, WORTH]
            taken_s = time_s - times[p, int(steps[p, TRAINED]) % RING, BEGAN]
            if not first:
                slow[p] = max(slow[p], taken_s / about[p, WORTH])
            steps[p, TRAINS] = 0.0
            steps[p, TRAINED] += 1.0
            if steps[p, TRAINED] >= about[p, STEPS]:
                finished[p] = time_s
                unfinished -= 1
        if unfinished == 0 or time_s >= horizon_s or (unfinished == 1 and pipelines > 1):
            break
        fewest = enough
        for p in range(pipelines):
            fewest = min(fewest, steps[p, TRAINED] if finished[p] == np.inf else enough)
        if fewest >= enough and pipelines > 1:
            break
    # What is under way counts as far as it is; who is left alone goes on alone.
    _settle(time_s, place, cell)
    end_s = time_s
    for p in range(pipelines):
        if finished[p] < np.inf:
            continue
        for step in range(int(steps[p, TRAINED]), int(min(steps[p, SAMPLED] + 1.0, about[p, STEPS]))):
            if step == steps[p, SAMPLED] and (steps[p, PART] == NOTHING or steps[p, ROLLS] != step):
                continue
            done[p] += _worth(p, step, time_s, now, then, about, place, steps, times)
            taken_s = time_s - times[p, step % RING, BEGAN]
            if step > 0:
                slow[p] = max(slow[p], taken_s / about[p, WORTH])
        if unfinished == 1 and pipelines > 1 and time_s < horizon_s and steps[p, TRAINED] < enough:
            still_s = max(0.0, about[p, WORTH_NOW] + (about[p, STEPS] - 1.0) * about[p, WORTH] - done[p])
            alone_s = min(still_s, horizon_s - time_s)
            done[p] += alone_s
            end_s = time_s + alone_s
            if alone_s == still_s:
                finished[p] = end_s
            rollout_s[p] = min(rollout_s[p], end_s)
    return Flow(done, finished, slow, rollout_s, end_s)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _enter(p, now, about, place, cell, steps, times):
    """Pipeline ``p`` is where it is now."""
    stage = int(about[p, STAGE])
    steps[p, PART] = NOTHING
    times[p, 0, BEGAN] = -about[p, ELAPSED]
    if stage >= SCORING:
        steps[p, SAMPLED] = 1.0
        times[p, 0, READY_AT] = about[p, SCORE_NOW] if stage == SCORING else 0.0
    if stage >= TRAINING:
        steps[p, TRAINS] = 1.0
        steps[p, LEFT] = steps[p, WHOLE] = about[p, TRAIN_NOW] if stage == TRAINING else 0.0
    if about[p, LIVE] > 0.0:
        steps[p, ROLLS] = 1.0
        _begin(p, now[p], 0, place, cell, steps)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _rows(p, step, now, then, about):
    """The rollout of this step."""
    return now[p] if step == 0 or (about[p, LIVE] > 0.0 and step == 1) else then[p]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _start(time_s, now, then, about, place, cell, steps, times):
    """Begin the rollouts, and the trainings, that may begin."""
    for p in range(len(steps)):
        sampled, trained = steps[p, SAMPLED], steps[p, TRAINED]
        if steps[p, PART] == NOTHING and sampled < about[p, STEPS] and sampled - trained <= about[p, STALE]:
            steps[p, ROLLS] = sampled
            if sampled > 0.0:
                times[p, int(sampled) % RING, BEGAN] = time_s
            _begin(p, _rows(p, sampled, now, then, about), 0, place, cell, steps)
        if steps[p, TRAINS] == 0.0 and trained < sampled and times[p, int(trained) % RING, READY_AT] <= time_s + TINY:
            steps[p, TRAINS] = 1.0
            steps[p, LEFT] = steps[p, WHOLE] = about[p, TRAIN_NOW] if trained == 0.0 else about[p, TRAIN]
            for c in range(len(cell)):
                cell[c, STALE_CELL] = 1.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _begin(p, rows, part, place, cell, steps):
    """A part of a rollout begins."""
    steps[p, BEFORE] = steps[p, LONGEST] if part else 0.0
    steps[p, PART], steps[p, OPEN], steps[p, LONGEST] = part, 0.0, 0.0
    for c in range(len(cell)):
        if rows[part, SOLO, c] > 0.0:
            place[p, c, REST], place[p, c, RATE] = rows[part, SOLO, c], 0.0
            place[p, c, PART_BUSY], place[p, c, PART_KIND] = rows[part, BUSY, c], rows[part, KIND, c]
            cell[c, STALE_CELL] = 1.0
            steps[p, OPEN] += 1.0
            steps[p, LONGEST] = max(steps[p, LONGEST], rows[part, SOLO, c])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _ended(p, time_s, now, then, about, place, cell, steps, times):
    """The present part of a rollout has ended; whether all of it has."""
    rows = _rows(p, steps[p, ROLLS], now, then, about)
    if steps[p, PART] == 0.0:
        _begin(p, rows, 1, place, cell, steps)
        if steps[p, OPEN] > 0.0:
            return False
        steps[p, LONGEST], steps[p, BEFORE] = steps[p, BEFORE], 0.0
    score_s = about[p, SCORE_NOW] if steps[p, ROLLS] == 0.0 else about[p, SCORE]
    times[p, int(steps[p, SAMPLED]) % RING, READY_AT] = time_s + score_s
    steps[p, PART] = NOTHING
    steps[p, SAMPLED] += 1.0
    return True


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _next_s(time_s, horizon_s, cell, steps, times):
    """When the next thing ends."""
    until_s = horizon_s
    for c in range(len(cell)):
        until_s = min(until_s, cell[c, NEXT])
    for p in range(len(steps)):
        if steps[p, TRAINS] > 0.0:
            until_s = min(until_s, time_s + (steps[p, LEFT] / steps[p, PULL] if steps[p, LEFT] > 0.0 else 0.0))
        elif steps[p, TRAINED] < steps[p, SAMPLED]:
            until_s = min(until_s, max(time_s, times[p, int(steps[p, TRAINED]) % RING, READY_AT]))
        if steps[p, PART] != NOTHING and steps[p, OPEN] == 0.0:
            until_s = time_s
    return until_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _settle(time_s, place, cell):
    """All cells as they are at ``time_s``."""
    for c in range(len(cell)):
        for p in range(len(place)):
            if place[p, c, RATE] > 0.0:
                place[p, c, REST] = max(0.0, place[p, c, REST] - (time_s - cell[c, AT]) * place[p, c, RATE])
        cell[c, AT] = time_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _end(time_s, place, cell, steps):
    """Of rollouts in cells, those that end at ``time_s``; whether one of them has ended everywhere."""
    over = False
    for c in range(len(cell)):
        if cell[c, NEXT] > time_s:
            continue
        for p in range(len(place)):
            if place[p, c, RATE] > 0.0:
                rest_s = place[p, c, REST] - (time_s - cell[c, AT]) * place[p, c, RATE]
                if rest_s <= TINY * steps[p, LONGEST]:
                    rest_s = place[p, c, RATE] = 0.0
                    steps[p, OPEN] -= 1.0
                    cell[c, STALE_CELL] = 1.0
                    over |= steps[p, OPEN] == 0.0
                place[p, c, REST] = rest_s
        cell[c, AT] = time_s
    return over


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _share(time_s, place, cell, steps, about, weights, sizes, same, near, known, load, wants, beside):
    """How fast everything goes on from now on, in cells where somebody has begun or ended."""
    if known:
        _look_around(place, cell, steps, about, weights, sizes, load)
    neighbours = max(sizes.sum() - 1.0, TINY)
    for c in range(len(cell)):
        if cell[c, STALE_CELL] == 0.0:
            continue
        total = 0.0
        for p in range(len(place)):
            if place[p, c, RATE] > 0.0:
                place[p, c, REST] = max(0.0, place[p, c, REST] - (time_s - cell[c, AT]) * place[p, c, RATE])
            wants[p] = 0.0
            if steps[p, TRAINS] > 0.0 and steps[p, LEFT] > 0.0:
                wants[p] = weights[p]
            elif place[p, c, REST] > 0.0:
                wants[p] = weights[p] * place[p, c, PART_BUSY]
            total += wants[p]
        cell[c, AT], cell[c, NEXT], cell[c, STALE_CELL] = time_s, np.inf, 0.0
        if known:
            beside[LOOKED_AT] = 0.0
        for p in range(len(place)):
            steps[p, PULL] -= place[p, c, PULLS]
            place[p, c, RATE] = place[p, c, PULLS] = 0.0
            if wants[p] == 0.0:
                continue
            others = max(total - wants[p], 0.0)
            # Where others are busy on a part of the cell's workers, it is beside them on that part of its own.
            share = weights[p] / (weights[p] + others)
            rolls, trains = place[p, c, REST] > 0.0, steps[p, TRAINS] > 0.0 and steps[p, LEFT] > 0.0
            seen = int(about[p, KIND_TRAIN] if trains else place[p, c, PART_KIND])
            if rolls:
                rate = 0.5 * share if trains else share
                if known:
                    kind = int(place[p, c, PART_KIND])
                    if beside[LOOKED_AT, kind] == 0.0:
                        _look_at(c, kind, total, load, neighbours, same, near, beside)
                    rate /= _longer(kind, seen, wants[p], others, share, same, beside)
                place[p, c, RATE] = rate
                cell[c, NEXT] = min(cell[c, NEXT], time_s + place[p, c, REST] / rate)
            if trains:
                rate = (1.0 - 0.5 * place[p, c, PART_BUSY]) * share if rolls else share
                if known:
                    if beside[LOOKED_AT, seen] == 0.0:
                        _look_at(c, seen, total, load, neighbours, same, near, beside)
                    rate /= _longer(seen, seen, wants[p], others, share, same, beside)
                place[p, c, PULLS] = sizes[c] * rate
                steps[p, PULL] += place[p, c, PULLS]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _look_around(place, cell, steps, about, weights, sizes, load):
    """``load`` [C + 1, N]: the weight of those who have work in each cell, by kind; last, the workers that are at each
    kind. A cell learns of what has changed elsewhere when somebody begins or ends there."""
    all_cells = load[len(cell)]
    for c in range(len(cell)):
        if cell[c, STALE_CELL] == 0.0:
            continue
        total = load[c].sum()
        if total > 0.0:
            for k in range(len(all_cells)):
                all_cells[k] -= sizes[c] * load[c, k] / total
        for k in range(len(all_cells)):
            load[c, k] = 0.0
        total = 0.0
        for p in range(len(place)):
            if steps[p, TRAINS] > 0.0 and steps[p, LEFT] > 0.0:
                load[c, int(about[p, KIND_TRAIN])] += weights[p]
                total += weights[p]
            elif place[p, c, REST] > 0.0:
                load[c, int(place[p, c, PART_KIND])] += weights[p] * place[p, c, PART_BUSY]
                total += weights[p] * place[p, c, PART_BUSY]
        if total > 0.0:
            for k in range(len(all_cells)):
                all_cells[k] += sizes[c] * load[c, k] / total


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _look_at(c, kind, total, load, neighbours, same, near, beside):
    """What work of a ``kind`` finds in cell ``c``, of whose time ``total`` is wanted: see :data:`AROUND`."""
    last, part = len(load) - 1, 1.0 / total if total > 0.0 else 0.0
    around, first, second, third = 0.0, 0.0, 0.0, 0.0
    for b in range(load.shape[1]):
        here = load[c, b]
        # One of the cell's workers is this one; the others are its neighbours.
        around += max(load[last, b] - here * part, 0.0) * near[kind, b]
        first += here * same[0, kind, b]
        second += here * same[1, kind, b]
        third += here * same[2, kind, b]
    beside[0, kind], beside[1, kind], beside[2, kind] = first, second, third
    beside[AROUND, kind], beside[LOOKED_AT, kind] = 1.0 + around / neighbours, 1.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _longer(kind, seen, wants, others, share, same, beside):
    """How many times longer work of a ``kind`` takes in a cell, by what is ``beside`` it. That has what the pipeline
    itself ``wants`` here, under the kind that it is ``seen`` as. Factors are linear in the share between those that are
    known, and to 1 at a share of 1."""
    if others <= TINY * wants:
        return beside[AROUND, kind]
    if share <= 0.5:
        low, part = 0, max(0.0, share - 1.0 / 3.0) * 6.0
    else:
        low, part = 1, min(share - 0.5, 1.0 / 6.0) * 6.0
    here = (1.0 - part) * (beside[low, kind] - wants * same[low, kind, seen])
    here += part * (beside[low + 1, kind] - wants * same[low + 1, kind, seen])
    if share > 2.0 / 3.0:
        here *= 3.0 * (1.0 - share)
    return (1.0 + here / others) * beside[AROUND, kind]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _worth(p, step, time_s, now, then, about, place, steps, times):
    """Seconds that what has been done of ``step`` takes alone."""
    first = step == 0
    worth = about[p, WORTH_NOW] if first else about[p, WORTH]
    rollout = about[p, ROLLOUT_PART_NOW] if first else about[p, ROLLOUT_PART]
    score = about[p, SCORE_PART_NOW] if first else about[p, SCORE_PART]
    train = about[p, TRAIN_PART_NOW] if first else about[p, TRAIN_PART]
    if step >= steps[p, SAMPLED]:
        rest_s = 0.0
        for c in range(place.shape[1]):
            rest_s = max(rest_s, place[p, c, REST])
        after_s = _rows(p, step, now, then, about)[1, SOLO].max() if steps[p, PART] == 0.0 else 0.0
        so_far_s = steps[p, BEFORE] + steps[p, LONGEST]
        return worth * rollout * (so_far_s - rest_s) / max(so_far_s + after_s, TINY)
    if step == steps[p, TRAINED] and steps[p, TRAINS] > 0.0:
        return worth * (rollout + score + train * (1.0 - steps[p, LEFT] / max(steps[p, WHOLE], TINY)))
    score_s = about[p, SCORE_NOW] if first else about[p, SCORE]
    waited = 1.0 - max(0.0, times[p, step % RING, READY_AT] - time_s) / max(score_s, TINY)
    return worth * (rollout + score * min(max(waited, 0.0), 1.0))


def warm_up() -> None:
    """Compile the kernel, or load it."""
    about = np.zeros((1, COLUMNS))
    about[0, [STEPS, WORTH_NOW, WORTH]] = 1.0
    factors = Factors(np.ones((3, 1, 1)), np.ones((1, 1)), False)
    flow(np.zeros((1, 2, 3, 1)), np.zeros((1, 2, 3, 1)), about, np.ones(1), np.ones(1), factors, 1.0, 1.0)
