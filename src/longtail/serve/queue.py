"""Who goes next: fair between clients, by deadline inside a client, and nobody waits beyond a bound.

Fairness is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over predicted costs that are corrected once the
true ones are known. Every client has a virtual time, what it was served divided by its weight; the client with the
least goes next. Idleness earns nothing: a client that starts to wait again starts no earlier than where the service is.

Invariants:

* Every ticket leaves the queue once: popped or removed.
* Of one client, the earliest deadline goes first; equal ones in order of arrival.
* Two clients that wait all along and are not held back by ``may_run``: served costs divided by weights never differ by
  more than the largest cost of a ticket divided by its weight.
* Of one client, whoever has waited ``max_wait_s`` goes before all who have not, in order of arrival. Between clients
  fairness bounds waits: one client's old backlog does not take another's turn.

Times ending in ``_s`` are seconds on one clock that the caller chooses; costs are tokens. No operation costs more than
O(log n), but that a pop also looks at every client that ``may_run`` holds back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

MayRun = Callable[[str, int], bool]
"""Whether a client may have a request of so many places at work now."""
_SLACK = 64
"""A heap is swept when more than half of it, and of this many, is stale."""


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A place in the queue. ``cost`` is the predicted cost, ``number`` counts arrivals, ``overdue`` says that it
    had waited ``max_wait_s`` when it was released."""

    client: str
    weight: float
    deadline_s: float
    cost: float
    places: int
    arrival_s: float
    number: int
    overdue: bool = False
    _account: _Account | None = field(default=None, repr=False)
    """While its true cost may still come in: who is charged for it."""
    _lifts: int = field(default=0, repr=False)


@dataclass(eq=False, slots=True)
class _Account:
    """A client. ``spent``: its virtual time. ``turn`` marks its one valid entry in the order of clients. ``unsettled``
    counts released tickets without a true cost. ``lifts`` counts how often idleness has moved ``spent`` forward, and
    ``forgiven`` is by how much it did the last time."""

    name: str
    spent: float
    turn: int = -1
    unsettled: int = 0
    lifts: int = 0
    forgiven: float = 0.0
    waiting: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    by_deadline: list[tuple[float, int]] = field(default_factory=list)

    def first(self, arrived_by: float) -> Ticket:
        """The oldest ticket if it came at ``arrived_by`` or before, else the one with the earliest deadline; at least
        one must wait."""
        oldest = next(iter(self.waiting.values()))
        if oldest.arrival_s <= arrived_by:
            return oldest
        while self.by_deadline[0][1] not in self.waiting:
            heappop(self.by_deadline)
        return self.waiting[self.by_deadline[0][1]]

    def add(self, ticket: Ticket) -> None:
        self.waiting[ticket.number] = ticket
        heappush(self.by_deadline, (ticket.deadline_s, ticket.number))

    def drop(self, ticket: Ticket) -> None:
        del self.waiting[ticket.number]
        if not self.waiting:
            self.by_deadline.clear()
        elif len(self.by_deadline) > 2 * len(self.waiting) + _SLACK:
            self.by_deadline = [(t.deadline_s, t.number) for t in self.waiting.values()]
            heapify(self.by_deadline)


class FairQueue:
    """At most ``limit`` tickets wait. ``max_wait_s`` of None: no bound but the deadlines; 0: order of arrival within
    a client."""

    def __init__(self, *, limit: int, max_wait_s: float | None) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        if max_wait_s is not None and not max_wait_s >= 0:
            raise ValueError(f"max_wait_s must be at least 0, got {max_wait_s}")
        self.limit, self.max_wait_s = limit, max_wait_s
        self._waiting: OrderedDict[int, Ticket] = OrderedDict()
        self._accounts: dict[str, _Account] = {}
        self._order: list[tuple[float, int, _Account]] = []  # heap of (spent, turn, account)
        self._virtual = 0.0  # where the service is: virtual time at which the last fair ticket started
        self._arrivals = self._turns = self._unsettled = 0
        self._cost = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        """The waiting tickets in order of arrival."""
        return iter(list(self._waiting.values()))

    def waiting(self, client: str) -> int:
        """How many tickets of a client wait."""
        account = self._accounts.get(client)
        return 0 if account is None else len(account.waiting)

    @property
    def cost(self) -> float:
        """Predicted cost of all waiting tickets."""
        return self._cost

    @property
    def oldest_s(self) -> float | None:
        """When the ticket that has waited longest arrived; None if none waits."""
        return next(iter(self._waiting.values())).arrival_s if self._waiting else None

    def push(self, client: str, weight: float, deadline_s: float, cost: float, places: int, now_s: float) -> Ticket:
        """A new ticket. Raises :class:`QueueFull`, or ``ValueError`` for a weight that is not positive or numbers that
        are not finite."""
        if not (0 < weight < math.inf and 0 <= cost < math.inf and math.isfinite(deadline_s) and places >= 1):
            raise ValueError(f"impossible ticket: weight {weight}, deadline {deadline_s}, cost {cost}, places {places}")
        if len(self._waiting) >= self.limit:
            raise QueueFull(f"{self.limit} requests are waiting, which is the limit")
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(client, self._virtual)
        ticket = Ticket(client, weight, deadline_s, cost, places, now_s, self._arrivals, _account=account)
        self._arrivals += 1
        self._waiting[ticket.number] = ticket
        self._cost += cost
        joins = not account.waiting
        account.add(ticket)
        if joins:
            if account.spent < self._virtual:
                account.lifts += 1
                account.forgiven = self._virtual - account.spent
                account.spent = self._virtual
            self._place(account)
        return ticket

    def pop(self, now_s: float, *, may_run: MayRun, fits: Callable[[int], bool] = lambda places: True) -> Ticket | None:
        """Release the next ticket; None if nobody may go.

        Clients that ``may_run`` holds back are passed over. ``fits`` says whether there is room for so many places now:
        if the next ticket does not fit, nobody goes, so that small ones cannot starve a large one.
        """
        arrived_by = -math.inf if self.max_wait_s is None else now_s - self.max_wait_s
        ticket = self._fairest(may_run, arrived_by)
        if ticket is None or not fits(ticket.places):
            return None
        account = self._accounts[ticket.client]
        self._leave(ticket, account)
        started = account.spent
        account.spent += ticket.cost / ticket.weight
        account.unsettled += 1
        self._unsettled += 1
        ticket.overdue, ticket._lifts = ticket.arrival_s <= arrived_by, account.lifts
        self._place(account)
        self._virtual = max(self._virtual, started)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out; False if it does not wait any more."""
        if self._waiting.get(ticket.number) is not ticket:
            return False
        account = self._accounts[ticket.client]
        self._leave(ticket, account)
        ticket._account = None
        self._tidy(account)
        return True

    def settle(self, ticket: Ticket, cost: float) -> None:
        """The true cost of a released ticket, once: its client is charged or paid back the difference.

        Raises ``ValueError`` for a ticket that still waits or is settled, and for a cost that is not a finite number of
        at least 0.
        """
        account = ticket._account
        if account is None or ticket.number in self._waiting:
            raise ValueError("only a released ticket can be settled, and only once")
        if not 0 <= cost < math.inf:
            raise ValueError(f"impossible cost {cost}")
        ticket._account = None
        change = (cost - ticket.cost) / ticket.weight
        if ticket._lifts != account.lifts:
            # The client was moved forward since. Had the true cost been known, it would have been moved by so much less
            # or more, to the same place: what it is paid back was forgiven already.
            account.forgiven -= change
            change = max(0.0, -account.forgiven)
            account.forgiven = max(0.0, account.forgiven)
        account.spent += change
        account.unsettled -= 1
        self._unsettled -= 1
        if change:
            self._place(account)
        self._tidy(account)

    # The order of clients: a heap whose entries are valid while they bear their account's ``turn``.

    def _place(self, account: _Account) -> None:
        """Put the account where its virtual time belongs; equals take turns."""
        if not account.waiting:
            return
        account.turn = self._turns
        self._turns += 1
        heappush(self._order, (account.spent, account.turn, account))
        if len(self._order) > 2 * len(self._accounts) + _SLACK:
            self._order = [entry for entry in self._order if self._valid(entry)]
            heapify(self._order)

    @staticmethod
    def _valid(entry: tuple[float, int, _Account]) -> bool:
        return entry[1] == entry[2].turn and bool(entry[2].waiting)

    def _sweep(self) -> None:
        while self._order and not self._valid(self._order[0]):
            heappop(self._order)

    def _fairest(self, may_run: MayRun, arrived_by: float) -> Ticket | None:
        passed = []
        try:
            while True:
                self._sweep()
                if not self._order:
                    return None
                ticket = self._order[0][2].first(arrived_by)
                if may_run(ticket.client, ticket.places):
                    return ticket
                passed.append(heappop(self._order))
        finally:
            for entry in passed:
                heappush(self._order, entry)

    def _leave(self, ticket: Ticket, account: _Account) -> None:
        del self._waiting[ticket.number]
        account.drop(ticket)
        self._cost = self._cost - ticket.cost if self._waiting else 0.0

    def _tidy(self, account: _Account) -> None:
        """Forget whom it makes no difference to forget: nobody is owed anything once all is quiet."""
        if not self._waiting and not self._unsettled:
            self._accounts.clear()
            self._order.clear()
        elif not account.waiting and not account.unsettled and account.spent <= self._virtual:
            del self._accounts[account.name]
