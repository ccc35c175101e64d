"""When will the groups of a block have ended their sequences, if lengths come out like this, and groups change then?

A simulation of decode steps for each of K outcomes. Groups decode on their own; nothing happens between two ends, so
time jumps from end to end. A sequence that ends makes room for the next one that waits: of its own group, then of the
group with the longest queue. At a *trigger* (so many seconds from now, or so many sequences left) all groups stop at
their next step boundary, and their sequences go on in other groups after what the switch takes. All triggers are tried
in one pass over the time before them; what follows a switch is simulated from there.

Same rules as ``engine/scheduler.py``, without a limit of KV memory: who waits is computed when its turn comes (which
draws its next token), and sequences that run when a switch leaves no place for them wait with their lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

NOBODY = -1
EVERYONE = -2
SLACK = 1.0 - 1e-9
"""A step that ends within rounding of a trigger has ended."""


class Prices(NamedTuple):
    """By degree (D of them): ``step_s`` and ``context_s`` [D, B + 1] as in :class:`~longtail.costs.table.StepCosts`,
    ``admit_s`` [D, m] for computing each sequence that waits, ``recompute_s`` [D] for each token of a sequence that
    gives up its lanes."""

    step_s: np.ndarray
    context_s: np.ndarray
    admit_s: np.ndarray
    recompute_s: np.ndarray


class Sequences(NamedTuple):
    """Of m sequences: ``context`` tokens [m] that a step reads, ``lanes`` [m] tokens that a switch would have to move
    (0 for those that wait); ``arrived`` [m] has the sequences in the order in which they came."""

    context: np.ndarray
    lanes: np.ndarray
    arrived: np.ndarray


class Groups(NamedTuple):
    """G groups: ``of`` [m] is the group of each sequence, ``degree`` [G] a row of :class:`Prices`, ``slots`` [G] how
    many sequences run at once, ``ready_s`` [G] when they can begin."""

    of: np.ndarray
    degree: np.ndarray
    slots: np.ndarray
    ready_s: np.ndarray


class Switch(NamedTuple):
    """``handshake_s``, and ``move_s`` once if any lane moves; ``traffic_s`` [G, H, W, 2]: seconds that worker w sends
    (0) and takes in (1) for each token in lanes that go from group g to group h."""

    handshake_s: float
    move_s: float
    traffic_s: np.ndarray


class Outcome(NamedTuple):
    """For T triggers and K outcomes of lengths: seconds from now until the last sequence has ended, until the switch
    begins (the end, if there is none), and what it takes, float64 [T, K] each. ``stay_s`` [K]: without a switch."""

    end_s: np.ndarray
    begin_s: np.ndarray
    switch_s: np.ndarray
    stay_s: np.ndarray


DEGREE, SLOTS, STEP, RUNNING, CONTEXT, FIRST, QUEUE, TAIL, WAITING = range(9)
"""Columns of ``group`` int64 [G, 9]: FIRST is the running sequence that ends first and AFTER leads on in the order of
ends; QUEUE is the sequence whose turn is next and AFTER leads on to the one at TAIL."""
PLACE, AFTER, ENDS, BASE, LEFT, TOKENS, HELD = range(7)
"""Columns of ``seq`` int64 [m, 7]: the group in which a sequence runs (NOBODY where it has ended or waits), the step in
which it ends there and its context at step 0; while it waits its tokens to come (else 0), its context, and whether it
has its lanes."""
CLOCK, NEXT = range(2)
"""Columns of ``time`` float64 [G, 2], seconds: how far a group has come, and its next end (infinite: nobody runs)."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def switch_times(
    remaining: np.ndarray,
    order: np.ndarray,
    sequences: Sequences,
    prices: Prices,
    groups: Groups,
    others: Groups,
    switch: Switch,
    after_s: np.ndarray,
    left: np.ndarray,
) -> Outcome:
    """A switch from ``groups`` to ``others`` at each trigger: at ``after_s`` seconds (ascending), then when at most
    ``left`` sequences (descending, fewer than now) have not ended.

    ``remaining`` int64 [K, m]: tokens still to come, at least 1; ``order`` sorts its rows. A switch at 0 s comes before
    anyone who waits is begun.
    """
    step_s, context_s, admit_s = prices.step_s, prices.context_s, prices.admit_s
    outcomes, m = remaining.shape
    n, timed, counted = len(groups.degree), len(after_s), len(left)
    end_s = np.zeros((timed + counted, outcomes))
    begin_s, switch_s = np.zeros_like(end_s), np.zeros_like(end_s)
    stay_s = np.zeros(outcomes)
    time, group, seq = _empty(m, groups)
    scratch = _scratch(m, n, others)
    for k in range(outcomes):
        _clear(group, seq)
        for g in range(n):
            time[g, CLOCK] = groups.ready_s[g]
        for p in range(m - 1, -1, -1):
            i = order[k, p]
            if sequences.lanes[i] > 0:
                _start(group, seq, groups.of[i], i, remaining[k, i], sequences.context[i])
        for i in sequences.arrived:
            if sequences.lanes[i] == 0:
                _wait(group, seq, groups.of[i], i, remaining[k, i], sequences.context[i], 0)
        alive, time_s, t, c, entered = m, 0.0, 0, 0, EVERYONE
        while alive > 0:
            g = entered if entered != NOBODY else _next(time)
            soon_s = time_s if entered != NOBODY else time[g, NEXT]
            row, at_s = NOBODY, soon_s
            if t < timed and after_s[t] <= soon_s:
                row, at_s = t, after_s[t]
                t += 1
            elif entered != NOBODY and c < counted and alive <= left[c]:
                row = timed + c
                c += 1
            if row != NOBODY:
                end_s[row, k], begin_s[row, k], switch_s[row, k] = _fork(
                    at_s, time, group, seq, scratch, order[k], sequences, prices, others, switch
                )
                end_s[row, k] = max(end_s[row, k], stay_s[k])  # of those that have ended
            elif entered == NOBODY:
                alive -= _pass(time, group, seq, g)
                time_s = soon_s
                stay_s[k] = max(stay_s[k], time_s)
                entered = g
            else:
                ended, last_s = _admit(time, group, seq, step_s, context_s, admit_s, entered)
                alive -= ended
                stay_s[k] = max(stay_s[k], last_s)
                entered = NOBODY
        for row in range(timed + counted):
            if (t <= row < timed) or row >= timed + c:  # all had ended before
                end_s[row, k] = begin_s[row, k] = stay_s[k]
    return Outcome(end_s, begin_s, switch_s, stay_s)


def warm_up() -> None:
    """Compile :func:`switch_times`, which takes seconds the first time on a machine, or load it."""
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    costs, groups = np.ones((1, 2)), Groups(zero, zero, one, np.zeros(1))
    prices = Prices(costs, costs, np.zeros((1, 1)), np.zeros(1))
    switch = Switch(0.0, 0.0, np.zeros((1, 1, 1, 2)))
    switch_times(
        one[None, :], zero[None, :], Sequences(one, one, zero), prices, groups, groups, switch, np.zeros(1), one[:0]
    )


class _Scratch(NamedTuple):
    """Of a switch: the step [G] ``at`` which it comes, ``tokens`` [G, H] in lanes that go from group to group and what
    would be ``recomputed`` [H] instead. Of each group behind it: the ``counts`` [H] of sequences that run on, ``who``
    [H, m] they are, and the ``rest`` [H, m, 2]: their tokens to come, descending, and their context; and room for its
    state."""

    at: np.ndarray
    tokens: np.ndarray
    recomputed: np.ndarray
    counts: np.ndarray
    who: np.ndarray
    rest: np.ndarray
    time: np.ndarray
    group: np.ndarray
    seq: np.ndarray


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _fork(at_s, time, group, seq, scratch, order, sequences, prices, others, switch):
    """The end, the begin and the cost of a switch to ``others`` at the first step boundaries from ``at_s`` on. Only
    ``scratch`` is written to."""
    step_s, context_s = prices.step_s, prices.context_s
    at, tokens, recomputed = scratch.at, scratch.tokens, scratch.recomputed
    count, who, rest = scratch.counts, scratch.who, scratch.rest
    before, behind = tokens.shape
    begin_s, alive, fits = 0.0, 0, True
    for g in range(before):
        steps = _steps_until(time, group, seq, step_s, context_s, g, at_s) if group[g, RUNNING] else 0
        at[g] = group[g, STEP] + steps
        begin_s = max(begin_s, _time_s(time, group, step_s, context_s, g, steps))
        if group[g, WAITING]:
            alive += group[g, WAITING]
            fits = False
    for h in range(behind):
        count[h] = recomputed[h] = 0
        for g in range(before):
            tokens[g, h] = 0
    for p in range(len(order) - 1, -1, -1):
        i = order[p]
        g = seq[i, PLACE]
        if g == NOBODY:
            continue
        left = seq[i, ENDS] - at[g]
        if left > 0:
            h, context = others.of[i], seq[i, BASE] + at[g]
            recomputed[h] += context
            # What it shared with others when it was looked at, it still shares.
            tokens[g, h] += context - (sequences.context[i] - sequences.lanes[i] if sequences.lanes[i] > 0 else 0)
            # Those of one group come in the order of their ends, so little has to be sorted.
            n = count[h]
            while n > 0 and rest[h, n - 1, 0] < left:
                who[h, n] = who[h, n - 1]
                rest[h, n, 0], rest[h, n, 1] = rest[h, n - 1, 0], rest[h, n - 1, 1]
                n -= 1
            who[h, n], rest[h, n, 0], rest[h, n, 1] = i, left, context
            count[h] += 1
            alive += 1
    if alive == 0:
        return begin_s, begin_s, 0.0
    cost_s = switch.handshake_s + _carry_s(tokens, recomputed, prices.recompute_s, others.degree, switch)
    for h in range(behind):
        fits &= count[h] <= others.slots[h]
    if not fits:
        _enter(scratch, seq, sequences.arrived, others)
        for h in range(behind):
            scratch.time[h, CLOCK] = begin_s + cost_s
        return _finish(scratch.time, scratch.group, scratch.seq, prices), begin_s, cost_s
    rest_s = 0.0
    for h in range(behind):
        rest_s = max(rest_s, _sweep_s(rest[h], count[h], step_s[others.degree[h]], context_s[others.degree[h]]))
    return begin_s + cost_s + rest_s, begin_s, cost_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _carry_s(tokens, recomputed, recompute_s, degree, switch):
    """Seconds for moving lanes, or for computing them anew, whichever takes less."""
    before, behind = tokens.shape
    moved_s = 0.0
    for w in range(switch.traffic_s.shape[2]):
        for way in range(2):
            worker_s = 0.0
            for g in range(before):
                for h in range(behind):
                    worker_s += tokens[g, h] * switch.traffic_s[g, h, w, way]
            moved_s = max(moved_s, worker_s)
    if moved_s == 0.0:
        return 0.0
    anew_s = 0.0
    for h in range(behind):
        anew_s = max(anew_s, recomputed[h] * recompute_s[degree[h]])
    return min(switch.move_s + moved_s, anew_s)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sweep_s(rest, n, step_s, context_s):
    """Seconds until the last of ``n`` sequences ends that all run: ``rest`` has their tokens to come, descending, and
    their context."""
    time_s, step, context = 0.0, 0, 0
    for i in range(n):
        context += rest[i, 1]
    while n > 0:
        steps = rest[n - 1, 0] - step
        if steps:
            time_s += steps * step_s[n] + context_s[n] * (steps * context + n * (steps * (steps - 1) // 2))
            context += n * steps
            step += steps
        n -= 1
        context -= rest[n, 1] + step
    return time_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _enter(scratch, before, arrived, others):
    """All sequences of a switch get their places in ``scratch``: first those that run, in the order in which they
    came; who finds no place waits with its lanes, and behind them who has waited ``before``."""
    group, seq = scratch.group, scratch.seq
    _clear(group, seq)
    for h in range(len(group)):
        for p in range(scratch.counts[h]):
            i = scratch.who[h, p]
            seq[i, PLACE], seq[i, ENDS], seq[i, BASE] = h, scratch.rest[h, p, 0], scratch.rest[h, p, 1]
    for i in arrived:
        h = seq[i, PLACE]
        if h != NOBODY:
            if group[h, RUNNING] < group[h, SLOTS]:
                _start(group, seq, h, i, seq[i, ENDS], seq[i, BASE])
            else:
                seq[i, PLACE] = NOBODY
                _wait(group, seq, h, i, seq[i, ENDS], seq[i, BASE], 1)
    for i in arrived:
        if before[i, LEFT] > 0:
            _wait(group, seq, others.of[i], i, before[i, LEFT], before[i, TOKENS], before[i, HELD])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _finish(time, group, seq, prices):
    """When the last of all sequences ends; there is at least one."""
    last_s, alive, entered = 0.0, 0, EVERYONE
    for g in range(len(group)):
        alive += group[g, RUNNING] + group[g, WAITING]
    while alive > 0:
        if entered == NOBODY:
            entered = _next(time)
            last_s = max(last_s, time[entered, NEXT])
            alive -= _pass(time, group, seq, entered)
        ended, end_s = _admit(time, group, seq, prices.step_s, prices.context_s, prices.admit_s, entered)
        alive -= ended
        last_s = max(last_s, end_s)
        entered = NOBODY
    return last_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _next(time):
    """The group in which a sequence ends first."""
    best = 0
    for g in range(1, len(time)):
        if time[g, NEXT] < time[best, NEXT]:
            best = g
    return best


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _time_s(time, group, step_s, context_s, g, steps):
    """The time after ``steps`` more steps of group ``g``, in which nobody ends before the last of them."""
    n, row = group[g, RUNNING], group[g, DEGREE]
    read = steps * group[g, CONTEXT] + n * (steps * (steps - 1) // 2)
    return time[g, CLOCK] + steps * step_s[row, n] + context_s[row, n] * read


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _steps_until(time, group, seq, step_s, context_s, g, at_s):
    """The first step boundary of group ``g`` from ``at_s`` on, in steps; at most the next end."""
    if time[g, CLOCK] >= at_s * SLACK:
        return 0
    most = seq[group[g, FIRST], ENDS] - group[g, STEP]
    n, row = group[g, RUNNING], group[g, DEGREE]
    # a s^2 + b s = time: the positive root, then the step that it lies in.
    a = context_s[row, n] * n / 2.0
    b = step_s[row, n] + context_s[row, n] * group[g, CONTEXT] - a
    wanted_s = at_s - time[g, CLOCK]
    root = 2.0 * wanted_s / (b + np.sqrt(b * b + 4.0 * a * wanted_s))
    steps = np.int64(min(max(np.ceil(root), 1.0), float(most)))
    while steps > 1 and _time_s(time, group, step_s, context_s, g, steps - 1) >= at_s * SLACK:
        steps -= 1
    while steps < most and _time_s(time, group, step_s, context_s, g, steps) < at_s * SLACK:
        steps += 1
    return steps


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _pass(time, group, seq, g):
    """Let time pass to the next end in group ``g``; returns how many sequences end. :func:`_admit` must follow."""
    i = group[g, FIRST]
    step, n, ended = seq[i, ENDS], group[g, RUNNING], 0
    context = group[g, CONTEXT] + n * (step - group[g, STEP])
    while i != NOBODY and seq[i, ENDS] == step:
        seq[i, PLACE] = NOBODY
        context -= seq[i, BASE] + step
        i = seq[i, AFTER]
        ended += 1
    time[g, CLOCK] = time[g, NEXT]
    group[g, STEP], group[g, RUNNING], group[g, CONTEXT], group[g, FIRST] = step, n - ended, context, i
    return ended


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _admit(time, group, seq, step_s, context_s, admit_s, entered):
    """Begin sequences that wait while there is room in group ``entered``, or in those of EVERYONE, each its own first.

    Returns how many of them ended with their first token, and when the last of these did.
    """
    ended, last_s = 0, 0.0
    first, last, rounds = entered, entered + 1, 1
    if entered == EVERYONE:
        first, last, rounds = 0, len(group), 2
    for turn in range(rounds):
        for g in range(first, last):
            while group[g, RUNNING] < group[g, SLOTS]:
                q = g
                if group[q, WAITING] == 0 and turn == rounds - 1:
                    for other in range(len(group)):
                        if group[other, WAITING] > group[q, WAITING]:
                            q = other
                if group[q, WAITING] == 0:
                    break
                i = group[q, QUEUE]
                group[q, QUEUE] = seq[i, AFTER]
                group[q, WAITING] -= 1
                left, tokens = seq[i, LEFT], seq[i, TOKENS]
                seq[i, LEFT] = 0
                if not seq[i, HELD]:
                    time[g, CLOCK] += admit_s[group[g, DEGREE], i]
                    left -= 1
                    tokens += 1
                if left:
                    _start(group, seq, g, i, left, tokens)
                else:
                    ended += 1
                    last_s = max(last_s, time[g, CLOCK])
            time[g, NEXT] = np.inf
            if group[g, RUNNING]:
                steps = seq[group[g, FIRST], ENDS] - group[g, STEP]
                time[g, NEXT] = _time_s(time, group, step_s, context_s, g, steps)
    return ended, last_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _start(group, seq, g, i, left, tokens):
    """Sequence ``i`` runs in group ``g`` from now on, with ``left`` tokens to come and ``tokens`` of context."""
    ends = group[g, STEP] + left
    seq[i, PLACE], seq[i, ENDS], seq[i, BASE] = g, ends, tokens - group[g, STEP]
    group[g, RUNNING] += 1
    group[g, CONTEXT] += tokens
    before, behind = NOBODY, group[g, FIRST]
    while behind != NOBODY and seq[behind, ENDS] < ends:
        before, behind = behind, seq[behind, AFTER]
    seq[i, AFTER] = behind
    if before == NOBODY:
        group[g, FIRST] = i
    else:
        seq[before, AFTER] = i


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _wait(group, seq, g, i, left, tokens, held):
    """Sequence ``i`` is the last one in the queue of group ``g``."""
    seq[i, LEFT], seq[i, TOKENS], seq[i, HELD] = left, tokens, held
    if group[g, WAITING] == 0:
        group[g, QUEUE] = i
    else:
        seq[group[g, TAIL], AFTER] = i
    group[g, TAIL] = i
    group[g, WAITING] += 1


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _clear(group, seq):
    """Nobody runs, nobody waits."""
    for g in range(len(group)):
        group[g, STEP] = group[g, RUNNING] = group[g, CONTEXT] = group[g, WAITING] = 0
        group[g, FIRST] = NOBODY
    for i in range(len(seq)):
        seq[i, PLACE], seq[i, LEFT] = NOBODY, 0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _empty(m, groups):
    group = np.zeros((len(groups.degree), 9), np.int64)
    for g in range(len(group)):
        group[g, DEGREE], group[g, SLOTS] = groups.degree[g], groups.slots[g]
    return np.zeros((len(group), 2)), group, np.zeros((m, 7), np.int64)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _scratch(m, before, others):
    behind = len(others.degree)
    time, group, seq = _empty(m, others)
    sums, tokens = np.zeros((3, max(before, behind)), np.int64), np.zeros((before, behind), np.int64)
    who, rest = np.zeros((behind, m), np.int64), np.zeros((behind, m, 2), np.int64)
    return _Scratch(sums[0], tokens, sums[1], sums[2], who, rest, time, group, seq)
