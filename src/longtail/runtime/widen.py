"""Where the samples of a step are drawn, and in which layout, from the start of its rollout to the end of it.

The decisions are planners': ``planner/widen.py`` is told here how far the samples are and how long they may still run,
and says which tensor-parallel groups there should be; which workers a rollout has at all comes from outside, from
whoever weighs pipelines against each other. What is decided is carried out: ask for a lease of the workers concerned,
send the switch, wait until every member has reported it. None of it changes a token.

Invariants: at most one switch of a pipeline is under way; a switch is sent only under a lease of all its workers, which
is held until they are all on their own again; when the rollout is over, the workers go back to being on their own, so
that training and everything else finds them so. What is learnt here is costs, and only from work that was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longtail.cluster.messages import Alive, Command, Profiled, Switch, Switched
from longtail.core.clock import Clock
from longtail.core.events import Event, MoveMade, Note
from longtail.core.types import Layout, Lease, Request
from longtail.costs import table_file
from longtail.costs.decode import DecodeCosts
from longtail.costs.table import CostTable
from longtail.planner.order import Work
from longtail.planner.state import Live, Relocation
from longtail.planner.tree import Group, possible_degrees
from longtail.runtime.known_costs import KnownCosts
from longtail.runtime.leases import Leases
from longtail.runtime.live import LiveLengths
from longtail.runtime.moves import Move
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.samples import NOBODY, StepSamples
from longtail.runtime.step import StepBatch
from longtail.runtime.widen_moves import Rules, fixed_start, next_move, planned_start, release

THINKING_SHARE = 50.0
"""The controller lets so many times as long pass as a decision took: it may share its cores with the workers."""


class StepWiden:
    """For one pipeline over ``workers`` workers; ``send``, ``emit`` and ``leases`` are the controller's."""

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        workers: int,
        send: Callable[[int, Command], None],
        emit: Callable[[Event], None],
        leases: Leases,
        clock: Clock = time,
    ) -> None:
        self._plan, self._send, self._emit = plan, send, emit
        self._leases, self._time = leases, clock
        self._rollout = plan.config.rollout
        self._everyone = tuple(range(workers))
        self.degrees = possible_degrees(workers, min(workers, plan.kv_heads))
        """Tensor-parallel degrees that groups may have."""
        self._rules = Rules.of(self._rollout, self.degrees)
        self._known = KnownCosts(plan.tables)
        self._attempt = self._step = 0
        self._reset(self._everyone)

    def _reset(self, on: tuple[int, ...]) -> None:
        self.layout = Layout.singles(on)
        """The groups in which the workers sample, or will as soon as they have taken the switch that was sent."""
        self._samples: StepSamples | None = None
        self._lengths: LiveLengths | None = None
        self._alive: dict[int, Alive] = {}
        self._dispatched = False
        self._asked: Move | None = None
        self._under_way: Move | None = None
        self._held: list[Lease] = []
        self._moves: list[Move] = []
        self._merges = 0
        self._over = False
        self._refused: set[tuple[Group, ...]] = set()
        self._why_not: str | None = None
        """The last reason for which nothing was switched."""
        self._waits_to_dispatch = False
        self._look_at = 0.0
        """When to decide again, at the earliest."""

    # -- costs ------------------------------------------------------------------------------------------------

    @property
    def widens(self) -> bool:
        """Whether the planner is asked for tensor-parallel groups; a fixed degree needs no planner."""
        return self._plan.may_widen and isinstance(self._rollout.tp, str) and len(self.degrees) > 1

    @property
    def fixed_degree(self) -> int:
        """The degree of all groups, where the job fixes one; 1 where it leaves a choice."""
        return self._rollout.tp if isinstance(self._rollout.tp, int) else 1

    @property
    def wants_profile(self) -> bool:
        """Whether costs must be measured before anything can be decided; another pipeline may have done that since."""
        return (self.widens or self._plan.company) and not self._known.look_again()

    def profiled(self, report: Profiled) -> None:
        if report.table is not None:
            self._known.keep(table_file.from_plain(report.table))

    @property
    def known(self) -> KnownCosts:
        """For whoever knows which spans had a worker to themselves."""
        return self._known

    @property
    def costs(self) -> CostTable | None:
        """What work costs here, as far as it is known by now; None: nothing was measured."""
        return self._known.corrected

    def group_costs(self) -> list[DecodeCosts] | None:
        """Of the groups of the present layout, for placing requests on them; None where nothing is known."""
        costs = self.costs
        if costs is None or any(len(group) not in costs.degrees for group in self.layout.groups):
            return None
        most = max(1, min(self._rollout.max_running, len(self._samples.tokens) if self._samples else 1))
        return [costs.affine(len(group), range(1, most + 1)) for group in self.layout.groups]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores, as plain data."""
        return self._known.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Know what was known when :meth:`state_dict` was called; None: nothing yet."""
        error = self._known.load_state_dict(state)
        if error is not None:
            self._warn(f"what the checkpoint knows of costs cannot be used ({error}); they are learnt anew.")

    # -- what others may know ---------------------------------------------------------------------------------

    @property
    def degree(self) -> int:
        """The largest tensor-parallel degree of the present layout."""
        return self.layout.degree

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that have live samples; where that is not known, or nobody has any, those of the layout."""
        holders = self._samples.holders(self.layout, self._alive) if self._samples is not None else None
        return holders or self.layout.workers

    @property
    def merges_left(self) -> int:
        """How often the samples of this rollout may still be moved to fewer workers."""
        return max(0, self._plan.max_merges - self._merges)

    def live_samples(self) -> Live | None:
        """The samples that have not ended; None when some of them have not been heard of (yet)."""
        if self._samples is None or self._over:
            return NOBODY
        if self._under_way is not None:  # who gives a sample and who gets it may both have told of it
            return None
        return self._samples.expected(self.layout, self._alive, self._expected, dispatched=self._dispatched)

    # -- a rollout --------------------------------------------------------------------------------------------

    def begin(
        self,
        batch: StepBatch,
        requests: Sequence[Request],
        work: Work | None,
        lengths: LiveLengths | None,
        *,
        on: tuple[int, ...] | None = None,
    ) -> bool:
        """A rollout begins, on the workers ``on`` (None: on all; groups of a fixed degree always are). Returns whether
        requests can be handed out now, to the leaders of :attr:`layout`; if not, :meth:`granted` will say so."""
        placed = self._workers_in(self._everyone if on is None or self.fixed_degree > 1 else on)
        self._reset(placed)
        self._step = batch.step
        self._samples = StepSamples(batch, requests, self._plan.config.algorithm.group_size)
        self._lengths = lengths
        if placed != self._everyone:
            self._tell_place()
            return True
        move = self._first_move(work)
        if move is None:
            return True
        self._waits_to_dispatch = True
        self._ask(move)
        return False

    def ended(self, prompt: int, sample: int, *, tokens: int, cut_off: bool) -> None:
        assert self._samples is not None
        number = self._samples.number(prompt, sample)
        self._samples.tokens[number] = tokens
        self._samples.ended[number] = self._time.time()
        if self._lengths is not None:
            self._lengths.ended(number, tokens, censored=cut_off)

    def alive(self, report: Alive, *, dispatched: bool) -> None:
        """How far samples are; ``dispatched``: every request is with a worker. Decides what to do, if anything."""
        if self._over or self._samples is None:
            return
        self._alive[report.worker] = report
        self._dispatched = dispatched
        now = self._time.monotonic()
        whole = self.layout.workers == self._everyone
        if self.widens and whole and self._idle and dispatched and now >= self._look_at:
            move = self._next_move()
            self._look_at = now + THINKING_SHARE * (self._time.monotonic() - now)
            if move is not None:
                self._ask(move)

    def relocate(self, relocation: Relocation) -> bool:
        """Move the samples to other workers, if all that is known allows it now: every request is with a worker, every
        worker is on its own, nothing else is under way, and this was not refused before in this rollout. Returns
        whether it was asked for."""
        to = self._workers_in(relocation.to)
        if self._over or self._samples is None or not self._idle or not self._dispatched or self.degree > 1:
            return False
        holders = self._samples.holders(self.layout, self._alive)
        if not holders or holders == to or tuple((worker,) for worker in to) in self._refused:
            return False
        if relocation.kind == "merge" and self.merges_left == 0:
            return False
        self._ask(Move.of(relocation, holders, now=self._time.time()))
        return True

    def granted(self, lease: Lease, *, attempt: int) -> bool:
        """The lease that was asked for is here: send the switch. Returns whether to hand out requests now."""
        self._attempt = attempt
        move, self._asked = self._asked, None
        assert move is not None, "a lease was granted that is not asked for any more"
        self._held = [held for held in self._held if set(held.workers).isdisjoint(lease.workers)] + [lease]
        move.lease, move.asked = lease, move.groups
        move.groups = tuple(g for g in move.after(self.layout).groups if set(g) <= set(lease.workers))
        self._moves.append(move)
        self._merges += move.name == "merge"
        self._tell(move)
        self._start(move)
        first, self._waits_to_dispatch = self._waits_to_dispatch, False
        return first

    def switched(self, report: Switched) -> None:
        """A member of the switch that is under way is in its new group, or the switch was refused."""
        move = self._under_way
        if move is None or move.lease is None or report.lease_id != move.lease.lease_id:
            return
        move.reports.append(report)
        if {r.worker for r in move.reports} != set(move.lease.workers):
            return
        self._under_way = None
        if all(len(group) == 1 for group in report.groups):
            self._held.remove(move.lease)
        self._alive.clear()
        if report.refused:
            assert move.before is not None
            self.layout = move.before
            self._refused.add(move.asked)
            self._warn(f"step {self._step + 1}: the workers stay as they are: {report.refused.rstrip('.')}.")
        if self._over:
            self._dissolve()

    def rollout_over(self) -> None:
        """Every sample has ended: back to single workers."""
        self._over = True
        self._leases.withdraw()
        self._asked = None
        if self._under_way is None:
            self._dissolve()

    @property
    def at_rest(self) -> bool:
        """Whether every worker is on its own, and no switch is under way."""
        return self._under_way is None and not self._held

    def finish(self) -> dict[str, float]:
        """The rollout is over. Returns its metrics (see docs/metrics), and tells what became of the moves."""
        moves, self._moves = self._moves, []
        if not moves and self._why_not is not None:
            self._tell(Move("hold", self.layout.groups, reason=self._why_not))
        costs = self.costs
        for move in moves:
            assert self._samples is not None
            self._emit(move.ended(self._plan.name, self._step, self._samples, costs))
        has_choice = self.fixed_degree > 1 or self.widens or self._plan.company
        return {"switches": float(len(moves))} if has_choice else {}

    def abandon(self) -> None:
        """The step will not be finished, and groups are dissolved by whatever ends it."""
        self._leases.forget()
        self._reset(self._everyone)

    # -- carrying out -----------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        """Whether no move is asked for or under way."""
        return self._asked is None and self._under_way is None

    def _ask(self, move: Move) -> None:
        self._asked = move
        self._leases.ask(move.workers, "switch")

    def _start(self, move: Move) -> None:
        """Send a switch to the leaders of the groups that there are; ``move`` has its lease."""
        lease = move.lease
        assert lease is not None
        per_byte_s, per_token_s = self._prices(move)
        command = Switch(
            pipeline=self._plan.name,
            attempt=self._attempt,
            step=self._step,
            lease=lease,
            groups=move.groups,
            rebalance=move.rebalance,
            per_byte_s=per_byte_s,
            per_token_s=per_token_s,
        )
        self._under_way, move.before = move, self.layout
        self._alive.clear()
        for leader in sorted({self.layout.group_of(worker)[0] for worker in lease.workers}):
            self._send(leader, command)
        self.layout = move.after(self.layout)

    def _prices(self, move: Move) -> tuple[float, float]:
        """Seconds of a byte moved, and of a token recomputed; of what is not measured, moving is the cheaper way."""
        costs, degree = self.costs, max(len(group) for group in move.groups)
        if costs is None or degree not in costs.degrees:
            return 0.0, 1.0
        return costs.switch.move_byte_s, costs.prefill[degree].token_s

    def _dissolve(self) -> None:
        """Nothing is left to sample: every worker on its own again."""
        if self._held:
            lease = self._held[0]
            self._start(Move("narrow", tuple((w,) for w in lease.workers), lease=lease))

    def _workers_in(self, workers: Sequence[int]) -> tuple[int, ...]:
        """``workers`` in order. Raises ``ValueError`` if there is none, or one that there is not."""
        found = tuple(sorted(set(workers)))
        if not found or not set(found) <= set(self._everyone):
            raise ValueError(f"a rollout needs workers among 0 to {self._everyone[-1]}, not {tuple(workers)}")
        return found

    # -- deciding ---------------------------------------------------------------------------------------------

    def _first_move(self, work: Work | None) -> Move | None:
        """To the layout in which the rollout should begin; None: every worker on its own."""
        tp, costs, workers, now = self._rollout.tp, self.costs, len(self._everyone), self._time.time()
        if isinstance(tp, int):
            return fixed_start(tp, workers, now=now)
        if work is None or costs is None or not self.widens or self._leases.contended():
            return None
        assert self._samples is not None
        return planned_start(work, self._samples, workers, costs, self._rules, now=now)

    def _next_move(self) -> Move | None:
        """What the planner would do now; None: nothing, or not all samples have been heard of."""
        assert self._samples is not None
        costs, now = self.costs, self._time.time()
        found = self._samples.in_flight(self.layout, self._alive, self._remaining, self._rules.slots)
        if costs is None or found is None:
            return None
        rollout, numbers = found
        if self._leases.contended():
            return release(rollout, numbers, costs, self._refused, now=now)
        move = next_move(rollout, numbers, self._samples, costs, self._rules, self._refused, now=now)
        if isinstance(move, Move):
            return move
        self._why_not = move
        return None

    def _remaining(self, numbers: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Tokens still to come of live samples, int64 [K, n]; where nothing is known, as many as there may be."""
        if self._lengths is not None:
            return self._lengths.remaining(numbers, generated)
        return np.maximum(self._rollout.max_tokens - generated, 1)[None, :]

    def _expected(self, numbers: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Their mean, float64 [n]."""
        if self._lengths is not None:
            return self._lengths.expected(numbers, generated)
        return np.maximum(self._rollout.max_tokens - generated, 1).astype(float)

    # -- words ------------------------------------------------------------------------------------------------

    def _tell(self, move: Move) -> None:
        self._emit(move.made(self._plan.name, self._step, self.layout))

    def _tell_place(self) -> None:
        self._emit(
            MoveMade(
                pipeline=self._plan.name,
                step=self._step,
                move="place",
                workers=list(self.layout.workers),
                reason="the others are left to other pipelines",
            )
        )

    def _warn(self, message: str) -> None:
        self._emit(Note(level="warning", message=f"{self._plan.name}: {message}", pipeline=self._plan.name))
