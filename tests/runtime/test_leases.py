"""Leases: one per worker, all or nothing, first come first served."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.runtime.leases import LeaseBook, Leases


def test_a_lease_waits_until_every_member_of_the_earlier_one_is_done():
    book = LeaseBook()
    book.ask("a", (0, 1))
    book.ask("b", (0, 1))
    (first,) = book.grant()
    assert first.pipeline == "a"
    book.member_done("a", 0)
    assert book.grant() == []
    book.member_done("a", 1)
    assert [lease.pipeline for lease in book.grant()] == ["b"]


def test_leases_on_different_workers_are_granted_together():
    book = LeaseBook()
    book.ask("a", (0, 1))
    book.ask("b", (2, 3))
    assert {lease.pipeline for lease in book.grant()} == {"a", "b"}


def test_a_small_lease_does_not_overtake_a_waiting_big_one():
    book = LeaseBook()
    book.ask("running", (0,))
    book.grant()
    book.ask("big", (0, 1))
    book.ask("small", (1,))
    assert book.grant() == []
    book.member_done("running", 0)
    assert [lease.pipeline for lease in book.grant()] == ["big"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sets(st.integers(0, 4), min_size=1).map(lambda s: tuple(sorted(s)))),
            st.tuples(st.just("done"), st.integers(0, 100)),
        ),
        max_size=60,
    )
)
def test_no_worker_is_ever_in_two_leases_and_every_request_is_served(actions):
    book, held, asked, served = LeaseBook(), {}, 0, 0
    for action, value in actions:
        if action == "ask":
            book.ask(f"p{asked}", value)
            asked += 1
        elif held:
            lease = held.pop(sorted(held)[value % len(held)])
            for worker in lease.workers:
                book.member_done(lease.pipeline, worker)
        for lease in book.grant():
            held[lease.lease_id] = lease
            served += 1
        members = [worker for lease in held.values() for worker in lease.workers]
        assert len(members) == len(set(members))
    while held:
        for lease in held.values():
            for worker in lease.workers:
                book.member_done(lease.pipeline, worker)
        held = {lease.lease_id: lease for lease in book.grant()}
        served += len(held)
    assert served == asked


def test_switch_leases_of_a_pipeline_grow_into_one_and_only_the_new_one_counts():
    book = LeaseBook()
    book.ask("a", (0, 1), "switch")
    book.ask("a", (2, 3), "switch")
    pairs = book.grant()
    book.ask("a", (1, 2), "switch")
    (whole,) = book.grant()
    assert whole.workers == (0, 1, 2, 3)
    for lease in pairs:  # late words about what has ended
        for worker in lease.workers:
            book.member_done("a", worker, lease.lease_id)
    book.ask("b", (3,))
    assert book.grant() == []
    for worker in whole.workers:
        book.member_done("a", worker, whole.lease_id)
    assert [lease.pipeline for lease in book.grant()] == ["b"]


def test_a_switch_does_not_grow_past_somebody_who_asked_before():
    book = LeaseBook()
    book.ask("a", (0, 1), "switch")
    book.grant()
    book.ask("b", (1, 2))
    book.ask("a", (0, 1, 2, 3), "switch")
    assert book.grant() == []


def test_what_is_withdrawn_or_forgotten_stands_in_nobodys_way():
    book = LeaseBook()
    book.ask("a", (0, 1), "switch")
    book.grant()
    book.ask("b", (0, 1))
    book.ask("a", (0, 1, 2), "switch")
    book.withdraw("a")
    assert book.grant() == []
    book.forget("a")
    assert [lease.pipeline for lease in book.grant()] == ["b"]


def test_the_update_of_a_pipeline_waits_until_its_groups_are_dissolved():
    book = LeaseBook()
    book.ask("a", (0, 1), "switch")
    (switch,) = book.grant()
    book.ask("a", (0, 1), "update")
    assert book.grant() == []
    book.member_done("a", 0, switch.lease_id)
    book.member_done("a", 1, switch.lease_id)
    assert [lease.purpose for lease in book.grant()] == ["update"]


def test_who_holds_workers_may_change_what_it_does_with_them_while_others_wait():
    book = LeaseBook()
    book.ask("a", (0, 1, 2, 3), "switch")
    book.grant()
    book.ask("b", (0, 1, 2, 3))
    book.ask("a", (0, 1), "switch")
    (narrowing,) = book.grant()
    assert (narrowing.pipeline, narrowing.workers) == ("a", (0, 1, 2, 3))
    for worker in narrowing.workers:
        book.member_done("a", worker, narrowing.lease_id)
    assert [lease.pipeline for lease in book.grant()] == ["b"]


def test_short_switches_without_end_do_not_hold_up_an_update_nor_updates_a_switch():
    book = LeaseBook()
    served = Counter()
    for purpose, name in (("switch", "merging"), ("update", "training"), ("switch", "merging"), ("update", "other")):
        book.ask(name, (0, 1), purpose)
    for _ in range(30):
        (lease,) = book.grant()
        served[lease.pipeline] += 1
        for worker in lease.workers:
            book.member_done(lease.pipeline, worker, lease.lease_id)
        book.ask(lease.pipeline, lease.workers, lease.purpose)  # at once again
    assert served == {"merging": 15, "training": 8, "other": 7}


def test_who_holds_and_asks_for_more_waits_its_turn_and_keeps_what_it_has():
    book = LeaseBook()
    book.ask("a", (0, 1), "switch")
    (first,) = book.grant()
    book.ask("b", (1, 2), "update")
    book.ask("a", (0, 1, 2), "switch")
    assert book.grant() == []
    assert book.holds("a")
    for worker in (0, 1):
        book.member_done("a", worker, first.lease_id)
    assert [lease.pipeline for lease in book.grant()] == ["b"]
    for worker in (1, 2):
        book.member_done("b", worker)
    assert [lease.workers for lease in book.grant()] == [(0, 1, 2)]


def test_a_book_without_leases_is_idle():
    book = LeaseBook()
    book.ask("a", (0,))
    assert book.idle
    (lease,) = book.grant()
    assert (book.idle, book.holds("a"), book.holds("b")) == (False, True, False)
    book.release(lease.lease_id)
    assert book.idle


WORKERS = 4
SETS = st.sets(st.integers(0, WORKERS - 1), min_size=1).map(lambda s: tuple(sorted(s)))
NAMES = st.sampled_from("abcde")


class Life:
    """Pipelines as they are: at most one lease asked for at a time; one that holds for switches may ask for more.

    Whoever holds lets go after at most ``PATIENCE`` rounds, and of what it grows to after as many more.
    """

    PATIENCE = 3

    def __init__(self) -> None:
        self.book = LeaseBook()
        self.asked: dict[str, int] = {}
        self.held: dict[int, tuple[str, tuple[int, ...], str, int]] = {}
        self.round = 0

    def ask(self, name: str, workers: tuple[int, ...], purpose: str) -> None:
        others = {p for n, _, p, _ in self.held.values() if n == name and p != purpose}
        if name not in self.asked and not others and (purpose == "switch" or not self.book.holds(name)):
            self.asked[name] = self.round
            self.book.ask(name, workers, purpose)

    def die(self, name: str) -> None:
        """It forgets its switches; the update that it is in ends by itself."""
        self.book.forget(name)
        self.asked.pop(name, None)
        self.held = {i: held for i, held in self.held.items() if held[0] != name or held[2] != "switch"}

    def let_go(self, lease_id: int) -> None:
        name, workers, _, _ = self.held.pop(lease_id)
        for worker in workers:
            self.book.member_done(name, worker, lease_id)

    def pass_on(self) -> None:
        """Grant, and let go of what was held for long."""
        for lease in self.book.grant():
            own = [i for i, (n, w, p, _) in self.held.items() if n == lease.pipeline and {*w} & {*lease.workers}]
            assert all(self.held.pop(i)[2] == lease.purpose == "switch" for i in own)
            waited = self.round - self.asked.pop(lease.pipeline)
            # All others may be before it, each with what it holds and what it grows to.
            assert waited <= 2 * 5 * (self.PATIENCE + 1)
            self.held[lease.lease_id] = (lease.pipeline, lease.workers, lease.purpose, self.round)
        members = Counter(worker for _, workers, _, _ in self.held.values() for worker in workers)
        assert max(members.values(), default=0) <= 1
        self.round += 1
        for lease_id, (_, _, _, since) in list(self.held.items()):
            if self.round - since > self.PATIENCE:
                self.let_go(lease_id)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), NAMES, SETS, st.sampled_from(["update", "switch", "switch", "profile"])),
            st.tuples(st.just("die"), NAMES),
            st.just(("pass_on",)),
            st.just(("pass_on",)),
        ),
        max_size=120,
    )
)
def test_whoever_asks_is_served_in_bounded_time_whatever_others_ask_extend_and_drop(actions):
    life = Life()
    for action, *arguments in actions:
        getattr(life, action)(*arguments)
    for _ in range(2 * 5 * (life.PATIENCE + 1)):
        life.pass_on()
    assert not life.asked
    for _ in range(life.PATIENCE + 1):
        life.pass_on()
    assert life.book.idle


def test_a_pipeline_that_wants_no_switch_any_more_still_gets_its_update():
    book = LeaseBook()
    book.ask("a", (0, 1), "switch")
    book.ask("a", (0, 1), "update")
    Leases(book, "a", contended=lambda: False).withdraw()
    assert [lease.purpose for lease in book.grant()] == ["update"]


def test_what_a_pipeline_does_itself_beside_its_rollout_contends_for_the_workers_too():
    trains = []
    leases = Leases(LeaseBook(), "a", contended=lambda: False)
    rollout = leases.beside(lambda: bool(trains))
    assert not rollout.contended()
    trains.append("a micro-batch")
    assert rollout.contended()
    assert not leases.contended()
