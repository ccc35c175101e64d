"""Leases: one per worker, all or nothing, first come first served."""

from hypothesis import given
from hypothesis import strategies as st

from longtail.runtime.leases import LeaseBook


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
