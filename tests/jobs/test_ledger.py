"""The ledger of memory: 45 % and 45 % always run, 60 % and 60 % never do, and nobody gets less than asked for."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import CapacityError
from longtail.jobs.ledger import Ledger
from longtail.runtime.memory import USABLE, Footprint

GIB = 1 << 30
FREE = 10 * GIB
BUDGET = int(FREE * USABLE)


def part(share: float, *, peak: float = 0.0, least: float = 0.0) -> Footprint:
    """Takes ``share`` of the budget, nine tenths of it KV."""
    total = int(share * BUDGET)
    weights = total // 10
    return Footprint(
        weights=weights,
        gradients=0,
        optimizer=0,
        peak=int(peak * BUDGET),
        kv_wanted=total - weights,
        kv_least=int(least * BUDGET),
        kv=total - weights,
    )


def at_once(ledger: Ledger, wanted: dict[str, Footprint]) -> dict[str, str]:
    """Everybody asks in the same moment; what was said to whom was refused."""
    start, refused = threading.Barrier(len(wanted)), {}

    def ask(name: str) -> None:
        start.wait()
        try:
            ledger.grant({name: wanted[name]})
        except CapacityError as error:
            refused[name] = str(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return refused


def test_two_jobs_of_45_percent_that_start_in_the_same_moment_both_have_their_whole_kv():
    for _ in range(50):
        ledger = Ledger(FREE, workers=2)
        wanted = {"a": part(0.45, peak=0.05), "b": part(0.45, peak=0.1)}
        assert at_once(ledger, wanted) == {}
        assert ledger.granted == wanted


def test_of_two_jobs_of_60_percent_one_runs_and_the_other_is_told_the_sum():
    for _ in range(50):
        ledger = Ledger(FREE, workers=2)
        refused = at_once(ledger, {"a": part(0.6), "b": part(0.6)})
        ((name, text),) = refused.items()
        other = "b" if name == "a" else "a"
        assert list(ledger.granted) == [other]
        assert text == (
            f"{name} does not fit: weights 0.6 GiB + gradients 1 MiB + optimizer 1 MiB + KV 5.0 GiB + training 1 MiB on"
            f" each of 2 workers, 3.7 GiB free beside {other} (5.5 GiB). Set rollout.kv_gib to at most 3.128, or wait"
            " until another job has ended."
        )


def test_the_kv_that_a_refusal_names_does_fit():
    ledger = Ledger(FREE, workers=1)
    ledger.grant({"a": part(0.6, peak=0.02)})
    with pytest.raises(CapacityError) as refused:
        ledger.grant({"b": part(0.6, peak=0.01)})
    kv = float(str(refused.value).partition("at most ")[2].partition(",")[0])
    smaller = Footprint(part(0.6).weights, 0, 0, part(0, peak=0.01).peak, 0, 0, kv=int(kv * GIB))
    ledger.grant({"b": smaller})


def test_what_cannot_fit_with_any_kv_gets_other_advice():
    ledger = Ledger(FREE, workers=1)
    ledger.grant({"a": part(0.6)})
    with pytest.raises(CapacityError, match=r"Lower rollout.max_tokens .* or wait until another job has ended\.$"):
        ledger.grant({"b": part(0.6, least=0.5)})


def test_what_has_ended_is_free_for_the_next():
    ledger = Ledger(FREE, workers=1)
    ledger.grant({"a": part(0.6)})
    ledger.release("a")
    ledger.release("a")
    ledger.release("never was")
    ledger.grant({"b": part(0.6)})


def test_several_are_granted_together_or_not_at_all():
    ledger = Ledger(FREE, workers=1)
    with pytest.raises(CapacityError, match=r"^b does not fit"):
        ledger.grant({"a": part(0.6), "b": part(0.6)})
    assert ledger.granted == {}


def test_memory_that_other_programs_took_is_not_given_out():
    taken = 0
    ledger = Ledger(FREE, workers=1, foreign=lambda: taken)
    ledger.grant({"a": part(0.45)})
    taken = 2 * GIB
    with pytest.raises(CapacityError, match=r"2\.0 GiB taken by other programs"):
        ledger.grant({"b": part(0.45)})
    taken = 0
    ledger.grant({"b": part(0.45)})


def test_where_memory_is_not_known_everything_is_granted():
    ledger = Ledger(None, workers=4)
    ledger.grant({"a": part(5.0), "b": part(5.0)})
    assert list(ledger.granted) == ["a", "b"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.booleans(),
            st.floats(0.01, 0.7),
            st.floats(0.0, 0.3),
        ),
        max_size=25,
    )
)
def test_whatever_comes_and_goes_the_budget_is_never_exceeded_and_no_room_is_lost(steps):
    ledger, held = Ledger(FREE, workers=3), {}
    for name, ends, share, peak in steps:
        if ends or name in held:
            ledger.release(name)
            held.pop(name, None)
            continue
        wanted = {**held, name: part(share, peak=peak)}
        fits = sum(f.resident + f.kv for f in wanted.values()) + max(f.peak for f in wanted.values()) <= BUDGET
        if fits:
            ledger.grant({name: wanted[name]})
            held = wanted
        else:
            with pytest.raises(CapacityError):
                ledger.grant({name: wanted[name]})
        assert ledger.granted == held
