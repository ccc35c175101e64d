import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.core.events import MoveEnded, MoveMade, PipelineStarted, Rollback
from longtail.observe.live import RunView
from longtail.observe.moves import Move, MoveTotals, OpenMoves, account, count, describe
from longtail.observe.text import brief, signed, size


def made(step=0, move="widen", workers=(0, 1), pipeline="p", gain_s=1.0, **fields):
    return MoveMade(
        pipeline=pipeline, step=step, move=move, workers=list(workers), reason="r", predicted_gain_s=gain_s, **fields
    )


def ended(step=0, move="widen", workers=(0, 1), pipeline="p", gain_s=0.5, cost_s=0.1, **fields):
    return MoveEnded(
        pipeline=pipeline, step=step, move=move, workers=list(workers), cost_s=cost_s, moved_bytes=0,
        recomputed_tokens=0, gain_s=gain_s, **fields,
    )  # fmt: skip


places = st.tuples(st.sampled_from(["widen", "narrow"]), st.sampled_from([(0, 1), (2, 3), (0, 1, 2, 3)]))


@given(st.lists(places, max_size=12), st.randoms(use_true_random=False))
def test_each_outcome_finds_its_own_decision(moves, random):
    """Decisions alike are taken in their order; outcomes of others may come in between, in any order."""
    open_moves = OpenMoves()
    decided = [open_moves.made(made(move=move, workers=workers, gain_s=i)) for i, (move, workers) in enumerate(moves)]
    order = list(range(len(moves)))
    random.shuffle(order)
    alike = {move: iter([i for i, other in enumerate(moves) if other == move]) for move in moves}
    for shuffled in order:
        move, workers = moves[shuffled]
        first = next(alike[move, workers])
        outcome = ended(move=move, workers=workers[::-1])
        assert open_moves.ended(outcome) is decided[first]
        assert decided[first].ended is outcome
    assert open_moves.ended(ended()).made is None


def test_a_decision_of_another_step_or_of_a_void_one_has_no_outcome():
    open_moves = OpenMoves()
    open_moves.made(made(step=3))
    assert open_moves.ended(ended(step=4)).made is None
    open_moves.forget("p")
    assert open_moves.ended(ended(step=3)).made is None
    for restart in (
        Rollback(pipeline="p", step=0, reason=""),
        PipelineStarted(pipeline="p", step=0, steps=9, model="m", task="t", parameters=1),
    ):
        view = RunView.of([made(), restart, ended()])
        assert view.latest_move is not None
        assert view.latest_move.made is None


def test_decisions_that_never_end_do_not_pile_up():
    open_moves = OpenMoves()
    for step in range(1000):
        open_moves.made(made(step=step))
    assert sum(map(len, open_moves._open.values())) == 1


def test_a_move_counts_when_it_was_carried_out_and_others_at_once():
    """Listed by kind, in the order of what happens in a rollout; ``order`` is no news in any step."""
    decided = [made(), made(workers=(2, 3)), made(move="merge", workers=(0,)), made(move="spread"), made(move="order")]
    view = RunView.of([made(move="place"), *decided, ended(), ended(move="merge", workers=(0,)), made(move="hold")])
    assert count(view.pipelines["p"].moves) == "place 1, merge 1, widen 1, hold 1"
    assert [move.told.move for move in view.moves] == ["place", "widen", "widen", "merge", "spread"]


@given(st.lists(st.tuples(st.booleans(), st.none() | st.floats(), st.none() | st.floats(), st.booleans())))
def test_gains_are_summed_over_the_moves_of_which_both_sides_are_known(moves):
    totals = MoveTotals()
    for refused, predicted_s, gain_s, has_decision in moves:
        decision = made(gain_s=predicted_s) if has_decision else None
        totals += MoveTotals.of(Move(decision, ended(gain_s=gain_s, refused="no" if refused else None)))
    assert totals.count + totals.refused == len(moves)
    assert 0 <= totals.judged <= totals.count
    assert not math.isnan(totals.net_s)
    assert not math.isnan(totals.predicted_net_s)
    if not totals.judged:
        assert totals.net_s == totals.predicted_net_s == 0
    assert totals.cost_s == pytest.approx(0.1 * totals.count)


def test_an_account_says_only_what_is_known():
    assert account(MoveTotals.of(Move(ended=ended(gain_s=None)))) == "cost 0.10 s"
    both = MoveTotals.of(Move(made(predicted_cost_s=0.2), ended()))
    assert account(both) == "gained +0.50 s net (predicted +0.80 s), cost 0.10 s (predicted 0.20 s)"
    mixed = both + MoveTotals.of(Move(ended=ended(refused="no"))) + MoveTotals.of(Move(ended=ended(gain_s=-3.0)))
    assert account(mixed) == "gained +0.50 s net in 1 of 2 (predicted +0.80 s), cost 0.20 s, 1 refused"
    assert account(MoveTotals.of(Move(made(move="place", gain_s=None)))) == ""
    assert account(MoveTotals.of(Move(made(move="place")))) == "predicted +1.0 s net"
    merged = MoveTotals.of(Move(made(move="merge", predicted_cost_s=0.2), ended(move="merge", gain_s=None)))
    assert account(merged) == "predicted +0.80 s net, cost 0.10 s (predicted 0.20 s)"
    assert count({"widen": MoveTotals(refused=2)}) == ""


def test_a_move_is_described_on_one_line_whatever_is_missing():
    assert describe(Move(made(gain_s=None))) == "widen p on w0,w1: r"
    assert (
        describe(Move(made(gain_s=-0.3, layout="TP2 + TP1"))) == "widen p on w0,w1 to TP2 + TP1: predicted -0.30 s; r"
    )
    assert describe(Move(ended=ended(gain_s=-0.5))) == "widen p on w0,w1: gained -0.50 s net, cost 0.10 s"
    assert describe(Move(made(move="merge", workers=(1,)))) == "merge p to w1: predicted +1.0 s; r"
    assert describe(Move(made(workers=range(9)))).startswith("widen p on w0,w1,w2,w3,w4,w5,w6,w7,...: ")


def test_formats_of_short_times_gains_and_sizes():
    assert list(map(brief, [0.0, 0.0004, 0.0099, 0.00999, 0.35, 12.34])) == [
        "0.00 s", "0.4 ms", "9.9 ms", "0.01 s", "0.35 s", "12.3 s",
    ]  # fmt: skip
    assert list(map(signed, [1.8, -0.0031, 0.0, -75])) == ["+1.8 s", "-3.1 ms", "+0.00 s", "-1 min 15 s"]
    assert list(map(size, [0, 1023, 1024, 1_258_291, 2**30, 5e15])) == [
        "0 B", "1023 B", "1.0 KiB", "1.2 MiB", "1.0 GiB", "4656613 GiB",
    ]  # fmt: skip
