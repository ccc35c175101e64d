"""Beliefs as their users meet them: what is believed before, during and after steps, and what is refused."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.lengths.beliefs import Beliefs, prompt_keys
from longtail.lengths.remaining import BeliefError, Remaining

CAP = 2000


class World:
    """Prompts with a mean length of their own; responses that scatter about it."""

    def __init__(self, seed: int, *, prompts: int = 200, within: float = 0.35) -> None:
        self.rng = np.random.default_rng(seed)
        self.within = within
        self.mean = np.sqrt(1 - within) * self.rng.standard_normal(prompts)
        self.quantile = np.argsort(np.argsort(self.mean + 0.8 * self.rng.standard_normal(prompts))) / prompts
        self.next_id = 0

    def step(self, beliefs: Beliefs, prompts: np.ndarray, samples: int, *, ranked: bool = False, keyed: bool = True):
        keys = np.repeat(prompts, samples)
        ids = self.next_id + np.arange(len(keys))
        self.next_id += len(keys)
        z = self.mean[keys] + np.sqrt(self.within) * self.rng.standard_normal(len(keys))
        quantiles = self.quantile[keys] if ranked else None
        beliefs.add(ids, keys if keyed else ids + 10**6, quantiles)
        return ids, np.maximum(np.exp(5.5 + z), 1).astype(np.int64)

    def finish(self, beliefs: Beliefs, ids: np.ndarray, lengths: np.ndarray) -> None:
        beliefs.end(ids, np.minimum(lengths, CAP), lengths > CAP)
        beliefs.next_step()


def pit(belief: Remaining, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Randomised probability integral transform: uniform if and only if the belief is right."""
    below, here = 1.0 - belief.survives(truth - 1), 1.0 - belief.survives(truth)
    return below + rng.random(len(truth)) * (here - below)


def crps(belief: Remaining, truth: np.ndarray) -> float:
    levels = np.arange(1, 20) / 20
    return 2 * float(np.mean([np.maximum(p * d, (p - 1) * d) for p in levels for d in [truth - belief.quantile(p)]]))


@pytest.mark.parametrize("keyed", [True, False])
def test_intervals_cover_what_they_promise_at_the_start_and_at_half_the_cap(keyed):
    world, beliefs = World(0), Beliefs(CAP)
    values: dict[str, list[np.ndarray]] = {"start": [], "half": []}
    for step in range(30):
        prompts = world.rng.permutation(200)[:60]
        ids, lengths = world.step(beliefs, prompts, 8, keyed=keyed)
        ends = np.minimum(lengths, CAP)
        if step >= 3:
            values["start"].append(pit(beliefs.remaining(), ends, world.rng))
        early = lengths <= 300
        beliefs.end(ids[early], ends[early])
        beliefs.progress(np.full((~early).sum(), 300))
        if step >= 3:
            values["half"].append(pit(beliefs.remaining(), ends[~early] - 300, world.rng))
        world.finish(beliefs, ids[~early], lengths[~early])
    for u in map(np.concatenate, values.values()):
        assert np.mean(np.abs(u - 0.5) < 0.25) == pytest.approx(0.5, abs=0.04)
        assert np.mean(np.abs(u - 0.5) < 0.45) == pytest.approx(0.9, abs=0.03)


def test_the_ranker_then_mates_then_history_sharpen_what_is_believed():
    def run(*, ranked: bool, keyed: bool, fresh: bool) -> float:
        world, beliefs, losses = World(1), Beliefs(CAP, tau=0.4 if ranked else 0.0), []
        for step in range(16):
            ids, lengths = world.step(beliefs, world.rng.permutation(200)[:60], 8, ranked=ranked, keyed=keyed)
            ends = np.minimum(lengths, CAP)
            early = lengths <= 250
            if fresh:
                losses.append(crps(beliefs.remaining(), ends))
            beliefs.end(ids[early], ends[early])
            beliefs.progress(np.full((~early).sum(), 250))
            if not fresh and step >= 4:
                losses.append(crps(beliefs.remaining(), ends[~early] - 250))
            world.finish(beliefs, ids[~early], lengths[~early])
        return float(np.mean(losses[4:]))

    nothing = run(ranked=False, keyed=False, fresh=True)
    ranker = run(ranked=True, keyed=False, fresh=True)
    history = run(ranked=False, keyed=True, fresh=True)
    assert ranker < 0.93 * nothing
    assert history < 0.8 * nothing
    assert run(ranked=False, keyed=True, fresh=False) < 0.95 * run(ranked=False, keyed=False, fresh=False)


def test_mates_that_ended_early_and_mates_that_run_on_pull_in_opposite_directions():
    world, beliefs = World(2), Beliefs(CAP)
    for _ in range(6):
        world.finish(beliefs, *world.step(beliefs, np.arange(100), 8))
    beliefs.add(np.arange(10**6, 10**6 + 24), np.repeat([1001, 1002, 1003], 8))
    alone = beliefs.remaining(np.array([10**6])).expected()[0]
    beliefs.end(10**6 + np.arange(1, 8), np.full(7, 40))
    beliefs.progress(np.full(7, 900), 10**6 + np.arange(9, 16))
    short, long, none = beliefs.remaining(10**6 + np.array([0, 8, 16])).expected()
    assert short < 0.5 * none < none < 0.7 * long
    assert none == pytest.approx(alone, rel=0.2)


def test_a_group_is_learnt_from_only_when_its_last_sample_has_ended():
    beliefs = Beliefs(CAP)
    beliefs.add(np.arange(16), np.repeat([1, 2], 8))
    beliefs.end(np.arange(15), np.full(15, 30))
    beliefs.next_step()
    assert beliefs.remembers(np.array([1, 2])).tolist() == [True, False]
    assert beliefs.ids.tolist() == [15]
    # The short mates of the straggler are not forgotten meanwhile.
    beliefs.progress(np.array([40]))
    assert beliefs.remaining().mean[0] < 0
    beliefs.end(np.array([15]), np.array([CAP]), True)
    beliefs.next_step()
    assert beliefs.remembers(np.array([1, 2])).tolist() == [True, True]


def test_upcoming_prompts_are_ordered_by_history_and_by_the_ranker_where_there_is_none():
    world, beliefs = World(3), Beliefs(CAP, tau=0.5)
    for _ in range(8):
        world.finish(beliefs, *world.step(beliefs, np.arange(100), 8, ranked=True))
    seen = beliefs.upcoming(np.arange(100)).expected()
    assert np.corrcoef(np.argsort(np.argsort(seen)), np.argsort(np.argsort(world.mean[:100])))[0, 1] > 0.9
    unseen = beliefs.upcoming(np.arange(100, 200), world.quantile[100:]).expected()
    assert np.corrcoef(np.argsort(np.argsort(unseen)), np.argsort(np.argsort(world.mean[100:])))[0, 1] > 0.5
    assert np.ptp(beliefs.upcoming(np.arange(100, 200)).expected()) < 1e-3


def test_a_policy_whose_responses_grow_is_followed():
    rng, beliefs = np.random.default_rng(4), Beliefs(4 * CAP)
    medians = []
    for step in range(30):
        lengths = (rng.lognormal(5.0, 0.5, 200) * (1 if step < 10 else 3)).astype(np.int64)
        ids = np.arange(200) + 200 * step
        beliefs.add(ids, ids)
        medians.append(float(np.median(beliefs.remaining().quantile(0.5))))
        beliefs.end(ids, np.minimum(lengths, 4 * CAP))
        beliefs.next_step()
    assert medians[9] == pytest.approx(148, rel=0.15)
    assert medians[29] == pytest.approx(3 * 148, rel=0.15)


def test_within_a_step_the_living_move_the_belief_before_any_of_them_ends():
    beliefs = Beliefs(CAP)
    beliefs.add(np.arange(200), np.arange(200))
    beliefs.end(np.arange(200), np.full(200, 50) + np.arange(200) % 20)
    beliefs.next_step()
    beliefs.add(np.arange(1000, 1400), np.arange(400))
    beliefs.progress(np.full(400, 100))
    assert beliefs.curve().survival(np.array([100]))[0] > 0.6


def test_a_sequence_can_have_a_limit_of_its_own():
    beliefs = Beliefs(CAP)
    beliefs.add(np.arange(2), np.array([1, 2]), limits=np.array([100, CAP]))
    left = beliefs.remaining()
    assert left.quantile(0.99)[0] <= 100
    assert left.expected()[0] <= 100 < left.expected()[1]
    beliefs.end(np.array([0]), np.array([100]), True)
    beliefs.next_step()
    # It was cut off, not short.
    assert beliefs.curve().survival(np.array([99]))[0] > 0.5


def test_a_frozen_belief_does_not_change():
    beliefs = Beliefs(CAP)
    beliefs.add(np.arange(8), np.repeat([1, 2], 4))
    left = beliefs.remaining()
    before = left.expected().copy(), left.quantile(0.9).copy()
    beliefs.progress(np.full(8, 500))
    beliefs.end(np.arange(4), np.full(4, 600))
    beliefs.next_step()
    np.testing.assert_array_equal(left.expected(), before[0])
    np.testing.assert_array_equal(left.quantile(0.9), before[1])
    assert left.ids.tolist() == list(range(8))


def test_a_frozen_belief_can_be_sent_to_another_process():
    beliefs = Beliefs(CAP)
    beliefs.add(np.arange(8), np.repeat([1, 2], 4))
    left = beliefs.remaining()
    sent = pickle.loads(pickle.dumps(left))
    np.testing.assert_array_equal(sent.quantile(0.9), left.quantile(0.9))
    with pytest.raises(AttributeError):
        sent.mean = left.mean


def test_some_rows_are_the_same_rows_of_all():
    world, beliefs = World(5), Beliefs(CAP)
    world.step(beliefs, np.arange(20), 4)
    beliefs.progress(np.arange(80) * 3)
    some = np.array([70, 3, 41])
    np.testing.assert_array_equal(beliefs.remaining(some).quantile(0.5), beliefs.remaining().quantile(0.5)[some])
    assert beliefs.remaining(some).ids.tolist() == some.tolist()


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_the_order_in_which_sequences_are_named_does_not_matter(random):
    def run(shuffled: bool) -> np.ndarray:
        beliefs = Beliefs(CAP)
        for step in range(2):
            ids, keys = np.arange(12) + 12 * step, np.repeat([5, 6, 7], 4)
            lengths = 20 + 37 * (np.arange(12) % 7) + 5 * step
            order = np.array(random.sample(range(12), 12)) if shuffled else np.arange(12)
            beliefs.add(ids[order], keys[order])
            beliefs.progress((lengths // 2)[order], ids[order])
            if step == 0:
                beliefs.end(ids[order], lengths[order])
                beliefs.next_step()
        return beliefs.remaining().expected()

    np.testing.assert_allclose(run(shuffled=True), run(shuffled=False), rtol=1e-4)


def test_what_is_forgotten_leaves_no_trace():
    def run(*, forget: bool) -> Beliefs:
        beliefs = Beliefs(CAP)
        beliefs.add(np.arange(8), np.repeat([1, 2], 4))
        if forget:
            beliefs.add(np.arange(100, 140), np.repeat([1, 2, 3, 4, 5], 8))
            beliefs.progress(np.full(40, 900), np.arange(100, 140))
            beliefs.forget(np.arange(100, 140))
        beliefs.end(np.arange(8), np.arange(10, 18))
        beliefs.next_step()
        return beliefs

    with_, without = run(forget=True).state_dict(), run(forget=False).state_dict()
    assert with_.keys() == without.keys()
    for name, value in with_.items():
        np.testing.assert_array_equal(value, without[name], err_msg=name)


def test_history_is_bounded_and_drops_what_was_seen_longest_ago():
    beliefs = Beliefs(CAP, remember=50)
    for step in range(6):
        keys = np.arange(20) + 20 * step
        beliefs.add(keys, keys)
        beliefs.end(keys, np.full(20, 100) + keys)
        beliefs.next_step()
    assert beliefs.prompts_remembered == 50
    assert beliefs.remembers(np.arange(80, 120)).all()
    assert not beliefs.remembers(np.arange(60)).any()


def test_without_history_nothing_is_remembered():
    world, beliefs = World(6), Beliefs(CAP, remember=0)
    world.finish(beliefs, *world.step(beliefs, np.arange(20), 4))
    assert beliefs.prompts_remembered == 0
    assert np.ptp(beliefs.upcoming(np.arange(20)).expected()) == 0.0


# Degenerate runs.


def answers(left: Remaining) -> list[np.ndarray]:
    return [left.expected(), *left.interval(0.5), *left.interval(0.9), left.survival(np.array([0, 1, 10, 10**6]))]


@pytest.mark.parametrize(
    ("cap", "lengths", "censored"),
    [
        (CAP, [], []),
        (CAP, [100] * 64, [False] * 64),
        (CAP, [CAP] * 64, [True] * 64),
        (CAP, [16, 512] * 32, [False] * 64),
        (CAP, [3, 900], [False, False]),
        (CAP, [0] * 16, [False] * 16),
        (1, [1] * 16, [True, False] * 8),
        (CAP, [700] * 16, [True] * 16),
    ],
    ids=["nothing", "equal", "all_cut_off", "two_atoms", "two_rows", "empty", "cap_of_one", "aborted"],
)
def test_degenerate_runs_have_defined_answers(cap, lengths, censored):
    beliefs = Beliefs(cap)
    for step in range(3):
        ids = np.arange(len(lengths)) + 1000 * step
        beliefs.add(ids, ids // 2, None if step else np.full(len(ids), 0.5))
        beliefs.end(ids, np.array(lengths, np.int64), np.array(censored, bool))
        beliefs.next_step()
    beliefs.add(np.arange(10**6, 10**6 + 8), np.repeat([0, 7], 4))
    for generated in (0, cap // 2, cap):
        beliefs.progress(np.full(8, generated))
        left = beliefs.remaining()
        for answer in answers(left):
            assert np.isfinite(answer).all()
        assert (left.interval(0.9)[1] <= cap - generated).all()
        assert (left.expected() <= cap - generated).all()
        assert (left.quantile(0.05) >= (generated < cap)).all()


def test_equal_lengths_are_believed_to_repeat():
    beliefs = Beliefs(CAP)
    for step in range(4):
        ids = np.arange(64) + 64 * step
        beliefs.add(ids, ids % 8)
        beliefs.end(ids, np.full(64, 512))
        beliefs.next_step()
    beliefs.add(np.arange(8) + 10**6, np.arange(8))
    beliefs.progress(np.full(8, 500))
    assert beliefs.remaining().quantile(0.5).tolist() == [12] * 8
    assert beliefs.remaining().expected() == pytest.approx(12, abs=0.5)


def test_before_the_first_response_a_quarter_is_believed_to_reach_the_cap():
    beliefs = Beliefs(10_000)
    beliefs.add(np.arange(1), np.arange(1))
    assert beliefs.remaining().survives(9_999)[0] == pytest.approx(0.25, abs=0.01)
    assert beliefs.remaining().quantile(0.5)[0] == pytest.approx(99, abs=3)


# What is refused.


def live() -> Beliefs:
    beliefs = Beliefs(100)
    beliefs.add(np.array([1, 2, 3]), np.array([7, 7, 8]))
    beliefs.progress(np.array([10, 20, 30]))
    return beliefs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.add(np.array([2]), np.array([9])), "sequence 2 is live already"),
        (lambda b: b.add(np.array([5, 5]), np.array([9, 9])), "ids holds 5 twice"),
        (lambda b: b.add(np.array([5]), np.array([9, 9])), "prompt_keys has 2 values for 1 ids"),
        (lambda b: b.add(np.array([5]), np.array([9]), np.array([np.nan])), "quantile 0 is nan"),
        (lambda b: b.add(np.array([5]), np.array([9]), np.array([1.5])), "quantile 0 is 1.5"),
        (lambda b: b.add(np.array([5]), np.array([9]), np.array([0.5, 0.5])), r"quantiles has shape \(2,\)"),
        (lambda b: b.add(np.array([5]), np.array([9]), limits=np.array([101])), "limits holds 101"),
        (lambda b: b.add(np.array([5.5]), np.array([9])), "ids has dtype float64"),
        (lambda b: b.progress(np.array([1, 2])), "generated has 2 values for 3 live sequences"),
        (lambda b: b.progress(np.array([101]), np.array([2])), "generated is 101 for sequence 2.*limit of 100"),
        (lambda b: b.progress(np.array([-1]), np.array([2])), "generated is -1 for sequence 2"),
        (lambda b: b.progress(np.array([5]), np.array([99])), "sequence 99 is not live"),
        (lambda b: b.progress(np.array([50, 50]), np.array([2, 2])), "ids holds 2 twice"),
        (lambda b: b.end(np.array([99]), np.array([5])), "sequence 99 is not live"),
        (lambda b: b.end(np.array([1]), np.array([101])), "lengths is 101 for sequence 1"),
        (lambda b: b.end(np.array([1, 2]), np.array([50])), "lengths has 1 values for 2 ids"),
        (lambda b: b.end(np.array([1]), np.array([50]), np.array([True, False])), "censored has 2 values for 1 ids"),
        (lambda b: b.forget(np.array([0])), "sequence 0 is not live"),
        (lambda b: b.remaining(np.array([4])), "sequence 4 is not live"),
        (lambda b: b.upcoming(np.array([4]), np.array([np.nan])), "quantile 0 is nan"),
        (lambda b: b.load_state_dict(Beliefs(100).state_dict()), "2 groups are in the books"),
    ],
)
def test_a_call_that_cannot_be_right_is_refused_and_changes_nothing(call, message):
    beliefs = live()
    before = beliefs.remaining().expected()
    with pytest.raises(BeliefError, match=message):
        call(beliefs)
    np.testing.assert_array_equal(beliefs.remaining().expected(), before)
    assert beliefs.ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "arguments",
    [{"max_tokens": 0}, {"tau": 1.5}, {"tau": float("nan")}, {"decay": 0.0}, {"prior_weight": 0.0}, {"remember": -1}],
)
def test_settings_that_cannot_work_are_refused(arguments):
    name = next(iter(arguments))
    with pytest.raises(BeliefError, match=name):
        Beliefs(**{"max_tokens": 100, **arguments})


def test_a_count_may_fall_when_tokens_are_generated_again():
    beliefs = live()
    beliefs.progress(np.array([5]), np.array([3]))
    assert beliefs.remaining(np.array([3])).generated.tolist() == [5]


def test_nobody_is_live_and_nothing_breaks():
    beliefs = Beliefs(100)
    assert len(beliefs.remaining()) == 0
    beliefs.next_step()
    beliefs.progress(np.zeros(0, np.int64))
    with pytest.raises(BeliefError, match="not live"):
        beliefs.end(np.array([1]), np.array([1]))


# What survives a restart.


def test_what_was_learnt_survives_a_restart_through_json():
    world, beliefs = World(7), Beliefs(CAP, tau=0.3)
    for _ in range(5):
        world.finish(beliefs, *world.step(beliefs, world.rng.permutation(200)[:50], 8, ranked=True))
    text = json.dumps(beliefs.state_dict(), default=lambda array: array.tolist())
    again = Beliefs(CAP, tau=0.3)
    again.load_state_dict(json.loads(text))
    assert again.params == beliefs.params
    for _ in range(2):
        keys = world.rng.permutation(200)[:50]
        for mine, theirs in zip(
            answers(beliefs.upcoming(keys, world.quantile[keys])),
            answers(again.upcoming(keys, world.quantile[keys])),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
        ids, lengths = world.step(beliefs, keys, 4)
        again.add(ids, np.repeat(keys, 4))
        world.finish(beliefs, ids, lengths)
        world.finish(again, ids, lengths)


@pytest.mark.parametrize("cap", [500, 8000])
def test_a_resumed_run_may_have_another_cap(cap):
    world, beliefs = World(8), Beliefs(CAP)
    for _ in range(4):
        world.finish(beliefs, *world.step(beliefs, np.arange(100), 4))
    again = Beliefs(cap)
    again.load_state_dict(beliefs.state_dict())
    t = np.array([50, 200, 450])
    np.testing.assert_allclose(again.curve().survival(t), beliefs.curve().survival(t), atol=0.01)
    assert (again.upcoming(np.arange(100)).quantile(0.99) <= cap).all()


def test_saved_beliefs_of_another_kind_are_refused():
    state = Beliefs(100).state_dict()
    with pytest.raises(BeliefError, match="format 99"):
        Beliefs(100).load_state_dict({**state, "format": 99})
    with pytest.raises(BeliefError, match="lack ended"):
        Beliefs(100).load_state_dict({k: v for k, v in state.items() if k != "ended"})
    with pytest.raises(BeliefError, match="101 length counts"):
        Beliefs(100).load_state_dict({**state, "ended": state["ended"][:5], "max_tokens": 100})


def test_the_same_calls_give_the_same_bits():
    def run() -> list[np.ndarray]:
        world, beliefs = World(9), Beliefs(CAP)
        for _ in range(3):
            world.finish(beliefs, *world.step(beliefs, np.arange(40), 4, ranked=True))
        world.step(beliefs, np.arange(40), 4)
        return answers(beliefs.remaining())

    for one, other in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_prompt_keys_depend_on_the_text_alone():
    keys = prompt_keys(["", "a", "b", "\x00", "\ud800", "東京" * 100_000, "a"])
    assert keys.dtype == np.int64
    assert keys[1] == keys[6]
    assert len(set(keys.tolist())) == 6
    # Saved histories hold these keys: they must never change.
    assert keys[1] == 3405396810240292928
    assert prompt_keys([]).shape == (0,)


def test_beliefs_need_numpy_alone():
    heavy = ("torch", "ray", "scipy", "numba")
    code = f"import sys, longtail.lengths.beliefs; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
