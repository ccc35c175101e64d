"""In which layout the samples of a step are drawn, from the start of its rollout to the end of it.

The decisions are the planner's (``planner/widen.py``); here it is told how far the samples are and how long they may
still run, and what it decides is carried out: ask for a lease of the workers concerned, send the switch, wait until
every member has reported it. A layout changes no token.

Invariants: at most one switch of a pipeline is under way; a switch is sent only under a lease of all its workers, which
is held until they are all on their own again; when the rollout is over, the workers go back to being on their own, so
that training and everything else finds them so. What is learnt here is costs, and only from work that was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longtail.cluster.messages import Alive, Command, Profiled, Switch, Switched
from longtail.core.clock import Clock
from longtail.core.events import Event, MoveEnded, MoveMade, Note, Span
from longtail.core.types import Layout, Lease, Request
from longtail.costs import table_file
from longtail.costs.corrections import Corrections
from longtail.costs.decode import DecodeCosts
from longtail.costs.table import CostTable
from longtail.planner.order import Work
from longtail.planner.release import worth_keeping
from longtail.planner.rollout import Rollout
from longtail.planner.start import start_layout
from longtail.planner.tree import Group, possible_degrees
from longtail.planner.widen import Action, Auto, Policy, Threshold, decide, predicted_end_s
from longtail.runtime.leases import Leases
from longtail.runtime.live import LiveLengths
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.samples import StepSamples, inside
from longtail.runtime.step import StepBatch

THINKING_SHARE = 50.0
"""The controller lets so many times as long pass as a decision took: it may share its cores with the workers."""


@dataclass
class _Move:
    """A change of layout to ``groups``: why, under which lease, what it took, and what came of it."""

    name: str
    groups: tuple[Group, ...]
    reason: str = ""
    gain_s: float | None = None
    cost_s: float | None = None
    rest_s: float | None = None
    """All as predicted; ``rest_s`` with the move."""
    without_s: Callable[[CostTable], float] | None = None
    """How long the samples concerned would have taken without it, by a cost table, once their lengths are known."""
    samples: np.ndarray | None = None
    """Those concerned; None: all."""
    decided: float = 0.0
    asked: tuple[Group, ...] = ()
    """``groups`` as decided; a lease may come to have more workers, whose groups stay as they are."""
    lease: Lease | None = None
    reports: list[Switched] = field(default_factory=list)

    @property
    def workers(self) -> Group:
        return tuple(sorted(w for group in self.groups for w in group))


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
        self._plan, self._workers, self._send, self._emit = plan, workers, send, emit
        self._leases, self._time = leases, clock
        self._rollout = plan.config.rollout
        self.degrees = possible_degrees(workers, min(workers, plan.kv_heads))
        """Tensor-parallel degrees that groups may have."""
        self._table: CostTable | None = plan.tables.find() if plan.tables is not None else None
        self._corrections = Corrections()
        self._attempt = self._step = 0
        self._reset()

    def _reset(self) -> None:
        self.layout = Layout.narrow(self._workers)
        """The groups in which the workers sample, or will as soon as they have taken the switch that was sent."""
        self._samples: StepSamples | None = None
        self._lengths: LiveLengths | None = None
        self._alive: dict[int, Alive] = {}
        self._asked: _Move | None = None
        self._under_way: _Move | None = None
        self._held: list[Lease] = []
        self._moves: list[_Move] = []
        self._over = False
        self._refused: set[tuple[Group, ...]] = set()
        self._why_not: str | None = None
        """The last reason for which nothing was switched."""
        self._waits_to_dispatch = False
        self._look_at = 0.0
        """When to decide again, at the earliest."""

    # -- costs ------------------------------------------------------------------------------------------------

    @property
    def _by_costs(self) -> bool:
        """Whether the planner is asked, and needs to know what work costs; a fixed degree needs no planner."""
        return isinstance(self._rollout.tp, str) and len(self.degrees) > 1

    @property
    def wants_profile(self) -> bool:
        """Whether costs must be measured before anything can be decided; another pipeline may have done that since."""
        if self._table is None and self._by_costs and self._plan.tables is not None:
            self._table = self._plan.tables.find()
        return self._by_costs and self._table is None

    def profiled(self, report: Profiled) -> None:
        if report.table is not None:
            self._table = table_file.from_plain(report.table)
            if self._plan.tables is not None:
                self._plan.tables.keep(self._table)

    def observe(self, span: Span) -> None:
        """A span of this pipeline's work."""
        if self._table is not None:
            self._corrections.observe(span, self._table)

    @property
    def _costs(self) -> CostTable | None:
        return None if self._table is None else self._corrections.apply(self._table)

    def group_costs(self) -> list[DecodeCosts] | None:
        """Of the groups of the present layout, for placing requests on them; None where nothing is known."""
        costs = self._costs
        if costs is None or any(len(group) not in costs.degrees for group in self.layout.groups):
            return None
        most = max(1, min(self._rollout.max_running, len(self._samples.tokens) if self._samples else 1))
        return [costs.affine(len(group), range(1, most + 1)) for group in self.layout.groups]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores, as plain data."""
        return {"corrections": self._corrections.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Know what was known when :meth:`state_dict` was called; None: nothing yet."""
        self._corrections = Corrections()
        try:
            if state is not None:
                self._corrections.load_state_dict(state["corrections"])
        except Exception as error:  # of another version, or edited by hand: no reason to lose a run
            self._corrections = Corrections()
            self._warn(f"what the checkpoint knows of costs cannot be used ({error}); they are learnt anew.")

    # -- a rollout --------------------------------------------------------------------------------------------

    def begin(
        self, batch: StepBatch, requests: Sequence[Request], work: Work | None, lengths: LiveLengths | None
    ) -> bool:
        """A rollout begins. Returns whether requests can be handed out now, to the leaders of :attr:`layout`; if not,
        :meth:`granted` will say so."""
        self._reset()
        self._step = batch.step
        self._samples = StepSamples(batch, requests, self._plan.config.algorithm.group_size)
        self._lengths = lengths
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
        now = self._time.monotonic()
        if self._by_costs and self._asked is None and self._under_way is None and dispatched and now >= self._look_at:
            move = self._next_move()
            self._look_at = now + THINKING_SHARE * (self._time.monotonic() - now)
            if move is not None:
                self._ask(move)

    def granted(self, lease: Lease, *, attempt: int) -> bool:
        """The lease that was asked for is here: send the switch. Returns whether to hand out requests now."""
        self._attempt = attempt
        move, self._asked = self._asked, None
        assert move is not None, "a lease was granted that is not asked for any more"
        self._held = [held for held in self._held if set(held.workers).isdisjoint(lease.workers)] + [lease]
        move.lease, move.asked = lease, move.groups
        move.groups = tuple(g for g in self.layout.replaced(move.groups).groups if set(g) <= set(lease.workers))
        self._moves.append(move)
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
        self.layout = self.layout.replaced(report.groups)
        if all(len(group) == 1 for group in report.groups):
            self._held.remove(move.lease)
        self._alive.clear()
        if report.refused:
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
        """The step is over. Returns its metrics (see docs/metrics), and tells what became of the moves."""
        moves, self._moves = self._moves, []
        if not moves and self._why_not is not None:
            self._tell(_Move("hold", self.layout.groups, reason=self._why_not))
        costs = self._costs
        for move in moves:
            self._emit(self._outcome(move, costs))
        return {"switches": float(len(moves))} if len(self.degrees) > 1 and self._rollout.tp != 1 else {}

    def abandon(self) -> None:
        """The step will not be finished, and groups are dissolved by whatever ends it."""
        self._leases.forget()
        self._reset()

    # -- carrying out -----------------------------------------------------------------------------------------

    def _ask(self, move: _Move) -> None:
        self._asked = move
        self._leases.ask(move.workers, "switch")

    def _start(self, move: _Move) -> None:
        """Send a switch to the leaders of the groups that there are; ``move`` has its lease."""
        lease = move.lease
        assert lease is not None
        leaders = [group[0] for group in self.layout.groups if set(group) <= set(lease.workers)]
        per_byte_s, per_token_s = self._prices(move)
        command = Switch(
            pipeline=self._plan.name,
            attempt=self._attempt,
            step=self._step,
            lease=lease,
            groups=move.groups,
            per_byte_s=per_byte_s,
            per_token_s=per_token_s,
        )
        self._under_way = move
        self._alive.clear()
        for leader in leaders:
            self._send(leader, command)
        self.layout = self.layout.replaced(move.groups)

    def _prices(self, move: _Move) -> tuple[float, float]:
        """Seconds of a byte moved, and of a token recomputed; of what is not measured, moving is the cheaper way."""
        costs, degree = self._costs, max(len(group) for group in move.groups)
        if costs is None or degree not in costs.degrees:
            return 0.0, 1.0
        return costs.switch.move_byte_s, costs.prefill[degree].token_s

    def _dissolve(self) -> None:
        """Nothing is left to sample: every worker on its own again."""
        if self._held:
            lease = self._held[0]
            self._start(_Move("narrow", tuple((w,) for w in lease.workers), lease=lease))

    # -- deciding ---------------------------------------------------------------------------------------------

    def _first_move(self, work: Work | None) -> _Move | None:
        """To the layout in which the rollout should begin; None: every worker on its own."""
        tp, costs = self._rollout.tp, self._costs
        if isinstance(tp, int):
            layout = Layout.uniform(self._workers, tp)
            return None if layout.degree == 1 else self._to_begin(layout, reason=f"tp: {tp}")
        if work is None or costs is None or self._leases.contended():
            return None
        start = start_layout(work, self._workers, self._slots, costs, self._policy)
        if start.degree == 1:
            return None
        times = ", ".join(f"TP{degree} {seconds:.3g} s" for degree, seconds in start.predicted_s.items())
        move = self._to_begin(start.layout, reason=f"predicted for the whole rollout: {times}")
        move.rest_s, move.cost_s = start.predicted_s[start.degree], costs.switch.handshake_s
        move.gain_s = start.predicted_s[1] - move.rest_s + move.cost_s
        samples, prompt_tokens = work.samples, work.prompt_tokens
        numbers = self._samples.in_order if self._samples is not None else np.empty(0, np.int64)

        def without_s(table: CostTable) -> float:
            assert self._samples is not None
            known = Work.known(samples, prompt_tokens, self._samples.tokens[numbers])
            return start_layout(known, self._workers, self._slots, table, self._policy).predicted_s[1]

        move.without_s = without_s
        return move

    def _to_begin(self, layout: Layout, *, reason: str) -> _Move:
        groups = tuple(group for group in layout.groups if len(group) > 1)
        return _Move("widen", groups, reason=reason, decided=self._time.time())

    def _next_move(self) -> _Move | None:
        """What the planner would do now; None: nothing, or not all samples have been heard of."""
        costs = self._costs
        found = self._look()
        if costs is None or found is None:
            return None
        rollout, numbers = found
        if self._leases.contended():
            return self._release(rollout, numbers, costs)
        held = None
        for decision in decide(rollout, costs, self._policy):
            if decision.action == Action.HOLD:
                held = decision.reason
            elif decision.after not in self._refused:
                return _Move(
                    decision.action.value,
                    decision.after,
                    reason=decision.reason,
                    gain_s=decision.predicted_gain_s,
                    cost_s=decision.predicted_cost_s,
                    rest_s=decision.finish_then_s,
                    without_s=self._hindsight(rollout, numbers, decision.before),
                    samples=numbers[inside(rollout, decision.before)],
                    decided=self._time.time(),
                )
        self._why_not = held
        return None

    def _release(self, rollout: Rollout, numbers: np.ndarray, costs: CostTable) -> _Move | None:
        """Others have work for the workers of wide groups: let one go whose tail is not worth their waiting."""
        for group in self.layout.groups:
            if len(group) == 1:
                continue
            singles = tuple((worker,) for worker in group)
            own = inside(rollout, (group,))
            if not own.any():
                why = "its samples have ended, and others wait"
                return _Move("narrow", singles, reason=why, samples=numbers[own], decided=self._time.time())
            if singles not in self._refused:
                release = worth_keeping(rollout, group, costs, waiting=1.0)
                if not release.keep:
                    return _Move(
                        "narrow",
                        singles,
                        reason=f"others wait for these workers: {release.reason}",
                        cost_s=release.switch_s,
                        rest_s=release.narrow_s + release.switch_s,
                        samples=numbers[own],
                        decided=self._time.time(),
                    )
        return None

    def _look(self) -> tuple[Rollout, np.ndarray] | None:
        """The rollout as it is, and the numbers of the samples in it; None if some have not been heard of."""
        assert self._samples is not None
        return self._samples.in_flight(self.layout, self._alive, self._remaining, self._slots)

    def _remaining(self, numbers: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Tokens still to come of live samples, int64 [K, n]; where nothing is known, as many as there may be."""
        if self._lengths is not None:
            return self._lengths.remaining(numbers, generated)
        return np.maximum(self._rollout.max_tokens - generated, 1)[None, :]

    def _hindsight(
        self, rollout: Rollout, numbers: np.ndarray, groups: tuple[Group, ...]
    ) -> Callable[[CostTable], float]:
        """The seconds that ``groups`` would have taken from here on as they were, with the lengths that came out."""
        samples = self._samples
        assert samples is not None
        return lambda table: predicted_end_s(samples.as_it_came(rollout, numbers, groups), table)

    def _outcome(self, move: _Move, costs: CostTable | None) -> MoveEnded:
        reports, refused = move.reports, move.reports[0].refused if move.reports else None
        rest_s = gain_s = None
        if refused is None:
            samples = self._samples
            assert samples is not None
            ended = samples.ended if move.samples is None else samples.ended[move.samples]
            rest_s = float(ended.max()) - move.decided if len(ended) else 0.0
            if move.without_s is not None and costs is not None:
                gain_s = move.without_s(costs) - rest_s
        return MoveEnded(
            pipeline=self._plan.name,
            step=self._step,
            move=move.name,
            workers=list(move.workers),
            cost_s=max((report.duration_s for report in reports), default=0.0),
            moved_bytes=sum(report.moved_bytes for report in reports),
            recomputed_tokens=max((report.recomputed_tokens for report in reports), default=0),
            predicted_cost_s=move.cost_s,
            predicted_rest_s=move.rest_s,
            rest_s=rest_s,
            gain_s=gain_s,
            refused=refused,
        )

    @property
    def _slots(self) -> dict[int, int]:
        return dict.fromkeys(self.degrees, self._rollout.max_running)

    @property
    def _policy(self) -> Policy:
        threshold = self._rollout.tp_threshold
        return Auto() if threshold is None else Threshold(threshold)

    # -- words ------------------------------------------------------------------------------------------------

    def _tell(self, move: _Move) -> None:
        self._emit(
            MoveMade(
                pipeline=self._plan.name,
                step=self._step,
                move=move.name,
                workers=list(move.workers),
                reason=move.reason,
                predicted_gain_s=move.gain_s,
                predicted_cost_s=move.cost_s,
                layout=str(self.layout.replaced(move.groups)),
            )
        )

    def _warn(self, message: str) -> None:
        self._emit(Note(level="warning", message=f"{self._plan.name}: {message}", pipeline=self._plan.name))
