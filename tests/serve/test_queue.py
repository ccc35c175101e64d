"""The fair queue: nothing lost, deadlines inside a client, shares between clients, a bound on waiting."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.planner.deadline import virtual_deadline
from longtail.serve.queue import FairQueue, QueueFull, Ticket


def anyone(client: str, places: int) -> bool:
    return True


def make(limit: int = 100_000, max_wait_s: float | None = None) -> FairQueue:
    return FairQueue(limit=limit, max_wait_s=max_wait_s)


def push(queue: FairQueue, client: str = "a", *, deadline_s=0.0, cost=1.0, weight=1.0, places=1, now_s=0.0) -> Ticket:
    return queue.push(client, weight, deadline_s, cost, places, now_s)


def pop(queue: FairQueue, now_s: float = 0.0, blocked: frozenset[str] = frozenset()) -> Ticket:
    ticket = queue.pop(now_s, may_run=lambda client, places: client not in blocked)
    assert ticket is not None
    return ticket


def drain(queue: FairQueue, now_s: float = 0.0) -> list[Ticket]:
    return [pop(queue, now_s) for _ in range(len(queue))]


clients = st.sampled_from("abcde")
costs = st.floats(0, 1000)
steps = st.one_of(
    st.tuples(st.just("push"), clients, st.floats(-50, 50), costs, st.sampled_from([0.5, 1.0, 4.0])),
    st.tuples(st.just("pop"), st.frozensets(clients)),
    st.tuples(st.just("remove"), st.integers(0, 10_000)),
    st.tuples(st.just("settle"), st.integers(0, 10_000), costs),
    st.tuples(st.just("wait"), st.floats(0, 3)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=120), st.sampled_from([None, 0.0, 2.0]))
def test_every_ticket_is_popped_or_removed_exactly_once_and_the_sums_agree(script, max_wait_s):
    queue = make(max_wait_s=max_wait_s)
    now_s = 0.0
    waiting: dict[int, Ticket] = {}
    left: list[Ticket] = []
    unsettled: list[Ticket] = []
    for kind, *rest in script:
        if kind == "push":
            client, deadline_s, cost, weight = rest
            ticket = push(queue, client, deadline_s=deadline_s, cost=cost, weight=weight, now_s=now_s)
            waiting[ticket.number] = ticket
        elif kind == "pop":
            blocked = rest[0]
            ticket = queue.pop(now_s, may_run=lambda client, places, blocked=blocked: client not in blocked)
            if ticket is None:
                assert all(t.client in blocked for t in waiting.values())
            else:
                assert ticket.client not in blocked
                left.append(waiting.pop(ticket.number))
                unsettled.append(ticket)
        elif kind == "remove" and waiting:
            ticket = list(waiting.values())[rest[0] % len(waiting)]
            assert queue.remove(ticket)
            assert not queue.remove(ticket)
            left.append(waiting.pop(ticket.number))
        elif kind == "settle" and unsettled:
            queue.settle(unsettled.pop(rest[0] % len(unsettled)), rest[1])
        elif kind == "wait":
            now_s += rest[0]
        assert list(queue) == list(waiting.values())
        assert len(queue) == len(waiting)
        assert queue.cost == pytest.approx(math.fsum(t.cost for t in waiting.values()), abs=1e-6)
        assert queue.oldest_s == min((t.arrival_s for t in waiting.values()), default=None)
        count = Counter(t.client for t in waiting.values())
        assert all(queue.waiting(client) == count[client] for client in "abcde")
    for _ in range(len(waiting)):
        left.append(waiting.pop(pop(queue, now_s).number))
    assert queue.pop(now_s, may_run=anyone) is None
    assert len({t.number for t in left}) == len(left)
    assert not any(queue.remove(t) for t in left)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 100)), min_size=1, max_size=60))
def test_one_client_is_served_by_deadline_and_equal_ones_by_arrival(given_):
    queue = make()
    for deadline_s, cost in given_:
        push(queue, deadline_s=deadline_s, cost=cost)
    served = [(t.deadline_s, t.number) for t in drain(queue)]
    assert served == sorted(served)


@given(
    st.lists(st.tuples(st.floats(0, 4), st.one_of(st.none(), st.floats(0, 1)), st.booleans()), max_size=80),
    st.sampled_from([0.0, 1.0, 10.0]),
)
def test_nobody_is_overtaken_by_who_arrives_more_than_the_head_start_later(script, head_start_s):
    queue = make()
    now_s, served = 0.0, []
    for gap_s, quantile, one_goes in script:
        now_s += gap_s
        push(queue, deadline_s=virtual_deadline(now_s, quantile, head_start_s=head_start_s), now_s=now_s)
        if one_goes:
            served.append(pop(queue, now_s))
    served += drain(queue, now_s)
    for i, later in enumerate(served):
        assert all(earlier.arrival_s <= later.arrival_s + head_start_s + 1e-9 for earlier in served[:i])


def test_without_a_head_start_it_is_first_come_first_served():
    queue = make()
    tickets = [push(queue, deadline_s=virtual_deadline(t, 1 - t / 9, head_start_s=0.0), now_s=t) for t in range(9)]
    assert drain(queue) == tickets


def test_who_waited_too_long_goes_first_of_its_client_in_order_of_arrival():
    queue = make(max_wait_s=10.0)
    late = [push(queue, deadline_s=1000.0 - i, now_s=float(i)) for i in range(3)]
    early = push(queue, deadline_s=0.0, now_s=9.0)
    assert [pop(queue, 11.0) for _ in range(3)] == [late[0], late[1], early]
    assert (late[0].overdue, early.overdue) == (True, False)
    assert pop(queue, 12.0) is late[2]


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 50), st.booleans()), max_size=80))
def test_the_bound_on_waiting_is_hard(script):
    queue = make(max_wait_s=5.0)
    now_s = 0.0
    for gap_s, deadline_s, one_goes in script:
        now_s += gap_s
        push(queue, deadline_s=deadline_s, now_s=now_s)
        if one_goes:
            oldest = next(iter(queue))
            ticket = pop(queue, now_s)
            assert ticket is oldest or oldest.arrival_s > now_s - 5.0


def test_a_bound_of_zero_is_the_order_of_arrival():
    queue = make(max_wait_s=0.0)
    tickets = [push(queue, deadline_s=-i, cost=i, now_s=i) for i in range(6)]
    assert drain(queue, 5.0) == tickets


def test_an_old_backlog_of_one_client_does_not_take_another_clients_turn():
    queue = make(max_wait_s=1.0)
    for _ in range(10):
        push(queue, "flood", now_s=0.0)
    assert pop(queue, 100.0).overdue
    mine = push(queue, "b", now_s=99.9)
    assert pop(queue, 100.0) is mine


@settings(deadline=None)
@given(
    st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 7.0])] * 2),
    st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=20, max_size=60),
    st.data(),
)
def test_two_backlogged_clients_share_by_weight_within_one_ticket(weights, cost_pairs, data):
    queue = make()
    for pair in cost_pairs:
        for client, weight, cost in zip("ab", weights, pair, strict=True):
            push(queue, client, weight=weight, cost=cost, deadline_s=data.draw(st.floats(0, 1)))
    most = max(cost / weight for pair in cost_pairs for cost, weight in zip(pair, weights, strict=True))
    served = {"a": 0.0, "b": 0.0}
    while queue.waiting("a") and queue.waiting("b"):
        ticket = pop(queue)
        served[ticket.client] += ticket.cost / ticket.weight
        assert abs(served["a"] - served["b"]) <= most + 1e-6


def test_true_costs_decide_in_the_end():
    """Client a says that it wants 1 token each time and takes 10; b takes what it says."""
    queue = make()
    served = {"a": 0, "b": 0}
    for client, cost in (("a", 1), ("b", 10)):
        for _ in range(200):
            push(queue, client, cost=cost)
    for _ in range(200):
        ticket = pop(queue)
        queue.settle(ticket, 10)
        served[ticket.client] += 10
    assert abs(served["a"] - served["b"]) <= 20


def test_a_true_cost_moves_a_client_that_waits():
    queue = make()
    for client in "aab" + "b" * 9:
        push(queue, client, cost=1)
    queue.settle(pop(queue), 6.0)
    assert "".join(t.client for t in drain(queue)) == "bbbbbbabbbb"


def test_a_client_that_comes_back_from_idleness_does_not_starve_the_others():
    queue = make()
    push(queue, "sleeper")
    queue.settle(pop(queue), 1.0)
    for _ in range(1000):
        push(queue, "busy", cost=10)
    for _ in range(500):
        queue.settle(pop(queue), 10)
    for _ in range(100):
        push(queue, "sleeper", cost=10)
    turns = [pop(queue).client for _ in range(40)]
    assert 19 <= turns.count("busy") <= 21
    assert "busy" in turns[:3]


def test_a_long_request_in_flight_earns_a_newcomer_nothing():
    """The virtual time of a client that only has something in flight must not be where others start."""
    queue = make()
    for _ in range(50):
        push(queue, "busy", cost=10)
    push(queue, "long", cost=1)
    while queue.waiting("long"):
        pop(queue)
    for _ in range(30):
        queue.settle(pop(queue), 10)
    for _ in range(30):
        push(queue, "new", cost=10)
    turns = [pop(queue).client for _ in range(20)]
    assert turns.count("busy") >= 9


def test_a_client_pays_for_what_it_took_before_it_paused():
    queue = make()
    for client in "ab":
        for _ in range(10):
            push(queue, client, cost=1)
    first = pop(queue)
    assert first.client == "a"
    queue.settle(first, 6.0)  # five more than was charged
    for ticket in [t for t in queue if t.client == "a"]:
        queue.remove(ticket)
    push(queue, "a", cost=1)
    assert [pop(queue).client for _ in range(6)] == ["b"] * 6
    assert pop(queue).client == "a"


def test_what_idleness_has_forgiven_is_not_paid_back_again():
    queue = make()
    for _ in range(100):
        push(queue, "b", cost=10)
    ticket = push(queue, "a", cost=50)
    while queue.waiting("a"):
        pop(queue)
    for _ in range(40):
        pop(queue)
    for _ in range(30):
        push(queue, "a", cost=10)  # moved forward to where b is
    queue.settle(ticket, 0.0)  # it cost nothing after all, but b has had all its turns by now
    turns = [pop(queue).client for _ in range(20)]
    assert 9 <= turns.count("b") <= 11


def test_a_client_that_is_held_back_stops_nobody_else():
    queue = make()
    for client in "aabb":
        push(queue, client)
    blocked = frozenset("a")
    assert [pop(queue, 0.0, blocked).client for _ in range(2)] == ["b", "b"]
    assert queue.pop(0.0, may_run=lambda client, places: client != "a") is None
    assert [t.client for t in drain(queue)] == ["a", "a"]


def test_the_cap_of_a_client_is_asked_with_the_places_of_its_next_ticket():
    queue = make()
    push(queue, "a", places=4, deadline_s=1.0)
    push(queue, "a", places=1, deadline_s=2.0)
    asked = []
    assert queue.pop(0.0, may_run=lambda client, places: bool(asked.append((client, places)))) is None
    assert asked == [("a", 4)]


def test_a_large_ticket_whose_turn_it_is_is_not_overtaken_by_small_ones_that_fit():
    queue = make()
    large = push(queue, "a", places=4, deadline_s=0.0)
    push(queue, "b", places=1, deadline_s=1.0)
    assert queue.pop(0.0, may_run=anyone, fits=lambda places: places <= 2) is None
    assert len(queue) == 2
    assert queue.pop(0.0, may_run=anyone, fits=lambda places: places <= 4) is large


def test_no_more_tickets_wait_than_the_limit():
    queue = make(limit=3)
    tickets = [push(queue, client) for client in "abc"]
    with pytest.raises(QueueFull, match="3 requests"):
        push(queue, "d")
    assert queue.waiting("d") == 0
    queue.remove(tickets[1])
    push(queue, "d")
    pop(queue)
    push(queue, "e")
    with pytest.raises(QueueFull):
        push(queue, "a")


def test_a_ticket_is_settled_once_and_only_after_its_release():
    queue = make()
    ticket, removed = push(queue), push(queue)
    queue.remove(removed)
    for wrong in (ticket, removed):
        with pytest.raises(ValueError, match="only a released ticket"):
            queue.settle(wrong, 1.0)
    pop(queue)
    for cost in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="impossible cost"):
            queue.settle(ticket, cost)
    queue.settle(ticket, 1.0)
    with pytest.raises(ValueError, match="only once"):
        queue.settle(ticket, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"weight": math.nan},
        {"cost": -1.0},
        {"cost": math.inf},
        {"deadline_s": math.nan},
        {"places": 0},
    ],
)
def test_tickets_that_would_break_the_order_are_refused(wrong):
    queue = make()
    with pytest.raises(ValueError, match="impossible ticket"):
        push(queue, **wrong)
    assert len(queue) == 0


def test_free_tickets_let_clients_take_turns():
    queue = make()
    for client in "aaabbb":
        push(queue, client, cost=0.0)
    assert "".join(t.client for t in drain(queue)) == "ababab"


def test_memory_stays_with_what_waits_however_much_comes_and_goes():
    queue = make()
    stays = push(queue, "stays", deadline_s=-1.0)
    for i in range(5_000):
        ticket = push(queue, f"client-{i % 300}", deadline_s=float(-i))
        if i % 2:
            queue.remove(ticket)
        else:
            queue.settle(pop(queue, 0.0, frozenset(["stays"])), 1.0)
    assert list(queue) == [stays]
    assert len(queue._order) + sum(len(a.by_deadline) for a in queue._accounts.values()) < 1_000
    assert len(queue._accounts) <= 301
    queue.remove(stays)
    assert not queue._accounts


def test_ten_thousand_waiting_of_three_hundred_clients_are_handled_in_moments():
    """Each of 30,000 operations scanning what waits would take minutes."""
    queue = make(max_wait_s=0.5)
    tickets = [
        push(queue, f"c{i % 300}", deadline_s=float(-i), cost=float(i % 97), now_s=i * 1e-4) for i in range(10_000)
    ]
    for ticket in tickets[::4]:
        assert queue.remove(ticket)
    for i in range(len(queue)):
        queue.settle(pop(queue, 1.0 + i * 1e-4), 5.0)
    assert len(queue) == 0
