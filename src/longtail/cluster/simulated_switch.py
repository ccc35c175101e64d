"""A change of layout on simulated workers: real planning (``engine/switch_plan.py``), at the costs of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from longtail.cluster.messages import Switch, Switched
from longtail.cluster.simulated_engine import BLOCK_TOKENS
from longtail.cluster.simulated_tenant import Group, SimulatedTenant
from longtail.costs.worker import WorkerCosts, slowest
from longtail.engine.cargo import Cargo, CargoGroup
from longtail.engine.shard import head_bounds
from longtail.engine.switch_plan import How, SwitchCosts, SwitchPlan, plan_switch

ENDLESS = 1 << 40
"""Blocks of a simulated worker: no switch is refused for want of memory."""


class Handover:
    """What ``command`` does to ``tenants``, by worker, all that its lease has: it takes ``seconds``, then
    :meth:`carry_out`. If it is ``refused`` (why, in words) that changes nothing.

    Raises ``ValueError`` if a group has a worker that is not of the lease, or one that another group has.
    """

    def __init__(self, command: Switch, tenants: Mapping[int, SimulatedTenant]) -> None:
        members = [worker for group in command.groups for worker in group]
        if len(set(members)) < len(members) or not set(members) <= set(command.lease.workers):
            raise ValueError(f"{command.groups} are not groups of different workers of {command.lease.workers}")
        self._command, self._tenants = command, tenants
        self.before = tuple(
            tenant.group.workers if tenant.group is not None else (worker,)
            for worker, tenant in sorted(tenants.items())
            if not tenant.follows
        )
        exported = {group: tenants[group[0]].engine.export() for group in self.before}
        self._sequences = sum(len(cargo.samples) for groups, _ in exported.values() for cargo in groups)
        self._costs = tenants[command.lease.workers[0]].costs
        self.refused = _unknown_degree(command.groups, [tenant.costs for tenant in tenants.values()])
        self._plan: SwitchPlan | None = None
        if self.refused is None:
            cargos = {worker: self._cargo(worker, group, *exported[group]) for group in self.before for worker in group}
            self._decide(cargos)
        switch = self._costs.switch
        self.seconds = switch.handshake_s
        if self._plan is not None and self._plan.moved_bytes:
            busiest = max(*self._plan.sent_bytes, *self._plan.received_bytes)
            self.seconds += switch.move_s + switch.move_byte_s * busiest

    def _cargo(self, worker: int, team: tuple[int, ...], groups: tuple[CargoGroup, ...], columns: int) -> Cargo:
        heads = range(*head_bounds(self._costs.kv_heads, len(team))[team.index(worker)])
        return Cargo(
            kv_heads=self._costs.kv_heads,
            heads=tuple(heads),
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS * self._costs.kv_bytes,
            free=ENDLESS,
            room=ENDLESS * len(heads),
            max_running=self._tenants[worker].engine.max_running,
            groups=groups,
            columns=np.broadcast_to(np.int32(0), (columns, len(heads))),
        )

    def _decide(self, cargos: Mapping[int, Cargo]) -> None:
        command, workers = self._command, self._command.lease.workers
        plan = plan_switch(
            [cargos[worker] for worker in workers],
            [[workers.index(w) for w in group] for group in sorted(self.before)],
            [[workers.index(w) for w in group] for group in command.groups],
            costs=SwitchCosts(per_byte_s=command.per_byte_s, per_token_s=command.per_token_s),
            how=How(command.how),
            rebalance=command.rebalance,
        )
        if isinstance(plan, SwitchPlan):
            self._plan = plan
        else:
            self.refused = plan.reason

    def carry_out(self) -> None:
        """The sequences are where they are to be, and every worker is in its group, or on its own and empty."""
        command = self._command
        for tenant in self._tenants.values():
            tenant.step = command.step
        if self._plan is None:
            return
        responses = {
            name: response
            for group in self.before
            for name, response in self._tenants[group[0]].engine.responses.items()
        }
        for tenant in self._tenants.values():
            tenant.group = None
            tenant.engine = tenant.make_engine(tenant.costs.decode)
        for group, berth in zip(command.groups, self._plan.berths, strict=True):
            members = [self._tenants[worker] for worker in group]
            for tenant in members:
                tenant.group = Group(group, command.lease.lease_id) if len(group) > 1 else None
            leader = members[0]
            leader.engine = leader.make_engine(slowest([t.costs.sampling(len(group)) for t in members]))
            leader.engine.adopt(berth.groups, responses)

    def report(self, worker: int) -> Switched:
        """What ``worker`` says of it, then."""
        command, tenant = self._command, self._tenants[worker]
        return Switched(
            worker=worker,
            pipeline=tenant.name,
            attempt=tenant.attempt,
            step=command.step,
            lease_id=command.lease.lease_id,
            groups=command.groups if self._plan is not None else self.before,
            duration_s=self.seconds,
            sequences=self._sequences,
            moved_bytes=self._plan.received_bytes[command.lease.workers.index(worker)] if self._plan else 0,
            recomputed_tokens=self._plan.recomputed_tokens if self._plan else 0,
            refused=self.refused,
        )


def _unknown_degree(groups: tuple[tuple[int, ...], ...], costs: Sequence[WorkerCosts]) -> str | None:
    widest, kv_heads = max(len(group) for group in groups), min(c.kv_heads for c in costs)
    if widest > kv_heads:
        return f"{widest} ranks cannot share {kv_heads} KV heads: each needs one at least"
    unknown = {len(group) for group in groups if any(len(group) not in c.degrees for c in costs)}
    return f"the costs of a tensor-parallel degree of {max(unknown)} are not known" if unknown else None
