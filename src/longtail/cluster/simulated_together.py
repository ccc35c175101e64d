"""What the members of a lease do together once they are all there: updates, profiles, changes of layout.

All go on at one moment. Nobody does anything before all have heard of the end, so that whatever one does next finds the
others where they are to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from longtail.cluster.messages import Profile, Profiled, Report, Switch, Update, Updated
from longtail.cluster.simulated_switch import Handover
from longtail.cluster.simulated_tenant import SimulatedTenant
from longtail.core.types import SubStage
from longtail.costs.table import TableKey
from longtail.costs.table_file import to_plain
from longtail.rl.trainer import UpdateStats

if TYPE_CHECKING:
    from longtail.cluster.simulated import SimulatedCluster
    from longtail.cluster.simulated_worker import SimulatedWorker


class Joint(NamedTuple):
    """Takes ``seconds``, and then ``end`` is to be called."""

    seconds: float
    end: Callable[[], None]


class Visit(NamedTuple):
    """A worker has come for ``command``, at the time ``since``, and with it the ``team`` that it leads."""

    tenant: SimulatedTenant
    command: Update | Switch | Profile
    since: float
    team: tuple[int, ...]


def begin(there: Sequence[SimulatedWorker], cluster: SimulatedCluster) -> Joint:
    """All members of a lease are ``there``."""
    visits = {worker: worker.visit for worker in there if worker.visit is not None}
    command = visits[there[0]].command
    match command:
        case Update():
            seconds = max(visit.tenant.costs.update_s for visit in visits.values())
            return Joint(seconds, lambda: _end(visits, SubStage.REDUCE, command.step, _updated))
        case Profile():
            seconds = max(visit.tenant.costs.profile_s for visit in visits.values())
            now = cluster.clock.now + seconds
            return Joint(seconds, lambda: _end(visits, SubStage.PROFILE, None, lambda w, v: _profiled(w, v, now)))
        case Switch():
            return _switch(visits, command, cluster)


def _end(
    visits: dict[SimulatedWorker, Visit],
    substage: SubStage,
    step: int | None,
    report: Callable[[SimulatedWorker, Visit], Report],
) -> None:
    for worker, visit in visits.items():
        worker.leave(visit, substage, visit.tenant.step if step is None else step, report(worker, visit))
    for worker in visits:
        worker.free()


def _updated(worker: SimulatedWorker, visit: Visit) -> Updated:
    tenant, command = visit.tenant, visit.command
    assert isinstance(command, Update)
    return Updated(
        worker=worker.index,
        pipeline=tenant.name,
        attempt=tenant.attempt,
        step=command.step,
        lease_id=command.lease.lease_id,
        stats=UpdateStats(grad_norm=0.0, lr=tenant.config.train.lr),
    )


def _profiled(worker: SimulatedWorker, visit: Visit, now: float) -> Profiled:
    tenant, command = visit.tenant, visit.command
    assert isinstance(command, Profile)
    table = None
    if worker.index == command.lease.workers[0]:
        config = tenant.config
        found = tenant.costs.table(
            TableKey("simulated", config.model, config.dtype, "simulated", 1),
            measured=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            degrees=command.degrees,
            fine=command.fine,
        )
        table = to_plain(found)
    return Profiled(
        worker=worker.index,
        pipeline=tenant.name,
        attempt=tenant.attempt,
        lease_id=command.lease.lease_id,
        table=table,
    )


def _switch(visits: dict[SimulatedWorker, Visit], command: Switch, cluster: SimulatedCluster) -> Joint:
    came = {cluster.worker(index): visit for visit in visits.values() for index in visit.team}
    tenants = {worker.index: worker.tenant(command.pipeline) for worker in came}
    handover = Handover(command, tenants)

    def end() -> None:
        handover.carry_out()
        _end(came, SubStage.SWITCH, command.step, lambda worker, visit: handover.report(worker.index))

    return Joint(handover.seconds, end)
