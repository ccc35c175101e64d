"""Profiling measures what it says, and leaves no trace: weights, gradients, random numbers, lanes."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inline_cluster import InlineCluster
from longtail.cluster import measure as measuring
from longtail.cluster import measure_interference, measure_pair, measure_switch
from longtail.cluster.measure import NOTES
from longtail.cluster.measure_key import cpu_name, table_key
from longtail.cluster.measure_rig import STEPS, Rig
from longtail.cluster.measure_sampling import Points, Room, choose_batches, choose_contexts, contradiction, decode_grid
from longtail.cluster.measure_together import Pace, Together
from longtail.core.config import Algorithm, Pipeline, Rollout
from longtail.core.errors import LongtailError
from longtail.costs.interference import CLASSES, model_of
from longtail.costs.interference_file import PairTable
from longtail.costs.interference_file import from_plain as from_pair
from longtail.costs.table_file import from_plain
from longtail.engine.blocks import BlockStore
from longtail.engine.checkpoint import check_model, load_model
from longtail.engine.comm import LocalCommunicator
from longtail.engine.models import resolve_model
from longtail.runtime.profiler import Profiler, Subject

TINY = resolve_model("tiny")
CONFIG = check_model(TINY)
ROLLOUT = Rollout(prompts=2, max_tokens=24)


def subject(*, kv_blocks: int = 4 * 32, **rollout) -> Subject:
    return Subject(
        name="rev",
        config=Pipeline(
            model="tiny",
            task="reverse-text",
            rollout=ROLLOUT.model_copy(update=rollout),
            algorithm=Algorithm(group_size=2),
        ),
        model_folder=TINY,
        kv_blocks=kv_blocks,
        kv_heads=CONFIG.kv_heads,
    )


class Opened:
    """A cluster of threads with one tenant on each worker, and their connections."""

    def __init__(self, workers: int, what: Subject, **cluster) -> None:
        self.cluster = InlineCluster(workers, **cluster)
        self.profiler = Profiler(self.cluster)
        self.found: dict[int, dict] = {}
        self.seen: dict[int, tuple] = {}
        original = measuring.measure

        def spy(tenant, connections, **options):
            before = snapshot(tenant)
            plain = original(tenant, connections, **options)
            self.seen[tenant.worker] = (before, snapshot(tenant))
            self.found[tenant.worker] = plain
            return plain

        measuring.measure = spy
        try:
            self.measured = self.profiler.profile(what, fine=False)
        finally:
            measuring.measure = original
            self.cluster.close()


def snapshot(tenant) -> list[bytes]:
    """Everything that profiling must leave as it is."""
    trainer = tenant.trainer
    state = trainer.optimizer_state()
    tensors = [trainer.flat.weights, trainer.flat.grads, *(t for t in vars(state).values() if torch.is_tensor(t))]
    plain = [tenant.store.free, tenant.group, tenant.lease_id, tenant.step, tenant.engine.has_work]
    return [
        *(t.detach().clone().view(torch.uint8).numpy().tobytes() for t in tensors),
        torch.get_rng_state().numpy().tobytes(),
        np.random.get_state()[1].tobytes(),
        repr(plain).encode(),
    ]


@pytest.fixture(scope="module")
def two_workers() -> Opened:
    """With time enough for all batches, and moves that take what is expected here, and not what they do."""
    exchange = measure_switch._exchange_s

    def exchange_s(comm, store, blocks, count):
        exchange(comm, store, blocks, count)
        return 1e-4 + 1e-6 * count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_switch, "_exchange_s", exchange_s)
        patch.setattr(measuring, "COARSE", replace(measuring.COARSE, decode_s=math.inf))
        return Opened(2, subject())


def test_two_workers_measure_all_degrees_that_they_can_have(two_workers):
    table = two_workers.measured.table
    assert table.degrees == (1, 2)
    assert table.detail == "coarse"
    assert table.kv_bytes == 2 * CONFIG.layers * CONFIG.head_dim * 4
    for degree in table.degrees:
        assert table.decode[degree].batches[:2] == (1, 2)
        assert table.decode[degree].contexts[-1] <= 16 * 32
    assert table.decode[2].batches[-1] == 4  # of 2 x 2 samples
    assert table.switch.handshake_s > 0
    assert table.switch.move_s == pytest.approx(1e-4)
    assert table.switch.move_byte_s * table.kv_bytes * 16 == pytest.approx(1e-6)  # a block of 16 tokens
    assert table.train_token_s > 0


def test_only_the_first_worker_has_the_table_and_it_is_plain_data(two_workers):
    assert two_workers.found[1] is None
    assert from_plain(two_workers.found[0]) == two_workers.measured.table
    assert NOTES not in two_workers.found[0]


def test_profiling_leaves_no_trace(two_workers):
    for before, after in two_workers.seen.values():
        assert before == after


def test_the_key_is_the_one_that_the_driver_makes(two_workers):
    key = table_key(
        CONFIG,
        dtype="float32",
        processor=cpu_name(),
        workers=2,
        threads=two_workers.measured.table.key.threads,
        communicator="shm",
    )
    assert two_workers.measured.table.fits(key)


def test_the_key_tells_apart_what_takes_another_time():
    def key(config=CONFIG, **changes):
        options = {"dtype": "float32", "processor": "p", "workers": 2, "threads": 1, "communicator": "shm"}
        return table_key(config, **(options | changes))

    others = [
        key(dtype="float64"),
        key(processor="q"),
        key(workers=3),
        key(threads=2),
        key(communicator="gloo"),
        key(replace(CONFIG, layers=CONFIG.layers + 1)),
        key(replace(CONFIG, qk_norm=True)),
    ]
    assert len({key(), *others}) == 1 + len(others)
    assert key(replace(CONFIG, hf={"anything": 1}, max_context=77)) == key()
    assert key(workers=1, communicator="gloo") == key(workers=1, communicator="shm")


def test_one_worker_measures_itself():
    table = Opened(1, subject()).measured.table
    assert table.degrees == (1,)
    assert table.key.communicator == "local"
    assert (table.switch.handshake_s, table.switch.move_byte_s) == (0.0, 0.0)


def test_over_gloo_the_same_is_measured():
    table = Opened(2, subject(), communicator="gloo").measured.table
    assert table.key.communicator == "gloo"
    assert table.degrees == (1, 2)


def test_a_fine_profile_has_interference_and_says_how_far_it_is_off(monkeypatch):
    monkeypatch.setattr(measuring, "QUANTUM_S", 0.005)
    quick = replace(measuring.FINE, pace=Pace(0.01, 1, 2), chunks=(8, 16), train_tokens=24)
    monkeypatch.setattr(measuring, "FINE", quick)
    cluster = InlineCluster(2)
    said: list[tuple[str, float]] = []
    measured = Profiler(cluster).profile(subject(chunk_tokens=32), fine=True, tell=lambda *what: said.append(what))
    cluster.close()
    table, classes = measured.table, {"prefill", "decode_small", "decode_large", "train"}
    assert table.detail == "full"
    assert set(table.neighbour_worker) == set(table.same_worker) == classes
    assert all(set(beside) == classes for beside in table.neighbour_worker.values())
    assert all(set(beside) == classes - {work} for work, beside in table.same_worker.items())
    assert {degree for degree, *_ in measured.notes["held_out"]} == {1, 2}
    for degree, batch, context, took, predicted in measured.notes["held_out"]:
        assert (batch, context) not in {
            (b, c) for b in table.decode[degree].batches for c in table.decode[degree].contexts
        }
        assert took > 0
        assert predicted == table.decode_s(degree, batch, batch * context)
    assert measured.notes["alone"]
    assert said[0] == ("loading the model", 0.0)


def test_too_few_lanes_are_one_sentence():
    with pytest.raises(LongtailError, match=r"rev.* 4 blocks of 16 tokens.*kv_gib"):
        Opened(1, subject(kv_blocks=4))


def test_more_work_than_lanes_leaves_out_what_does_not_fit():
    table = Opened(1, subject(kv_blocks=4 * 6, prompts=500, max_running=1000)).measured.table
    grid = table.decode[1]
    assert grid.batches[-1] * -(-(grid.contexts[-1] + STEPS) // 16) <= 6
    assert len(grid.batches) >= 2


# -- what is decided from sizes and times ---------------------------------------------------------------------------


@given(
    columns=st.integers(2, 5000),
    batch=st.integers(1, 300),
    max_tokens=st.integers(1, 5000),
    max_context=st.integers(32, 10_000),
    count=st.integers(2, 4),
)
def test_points_fit_and_make_a_grid(columns, batch, max_tokens, max_context, count):
    room = Room(columns, 16)
    contexts = choose_contexts(
        room, batch=batch, max_tokens=max_tokens, max_context=max_context, most=4096, count=count
    )
    if not contexts:
        assert room.longest(2) < 2 or max_context - STEPS < 2
        return
    batches = choose_batches((1, 2, 4, 8, 16, 32, 64, 128), batch, room, contexts[-1])
    assert 2 <= len(contexts) <= count
    assert len(batches) >= 2
    assert contexts == sorted(set(contexts))
    assert len(batches) == len(set(batches))
    assert min(contexts[0], *batches) >= 1
    assert max(batches) <= max(batch, 2)
    assert contexts[-1] + STEPS <= max_context
    assert all(room.holds(b, contexts[-1]) for b in batches)


class ScriptedRig:
    """A step takes what the script says."""

    def __init__(self, seconds) -> None:
        self._seconds, self._at, self.steps = seconds, (0, 0), 0

    def fill(self, batch: int, context: int) -> None:
        self._at = (batch, context)

    def step(self) -> float:
        self.steps += 1
        return self._seconds(*self._at)

    def clear(self) -> None:
        self._at = (0, 0)


def grid_of(rig, points: Points, *, budget_s: float, rounds: int = 1, again: int = 0):
    together = Together(LocalCommunicator())
    return decode_grid(
        together,
        rig,
        points,
        pace=Pace(0.1, 0, 5),
        budget_s=budget_s,
        rounds=rounds,
        again=again,
        tell=lambda batch, share: None,
    )


def test_large_batches_are_left_out_when_time_is_short():
    points = Points(choose_batches((1, 2, 4, 8, 16, 32), 32, Room(10**6, 16), 64), (16, 64))
    assert points.batches == (1, 4, 16, 2, 8, 32)
    quick = grid_of(ScriptedRig(lambda batch, context: 1e-6 * batch), points, budget_s=5.0)
    assert quick.batches == (1, 2, 4, 8, 16, 32)
    slow = ScriptedRig(lambda batch, context: 0.2 * batch)
    assert grid_of(slow, points, budget_s=10.0).batches == (1, 2, 4, 16)
    assert slow.steps == 8  # a long step is measured once
    assert grid_of(ScriptedRig(lambda batch, context: 60.0), points, budget_s=2.0).batches == (1, 4, 16)


def test_a_disturbance_in_one_round_is_not_believed():
    calls = iter(range(10**6))
    rig = ScriptedRig(lambda batch, context: 1.0 if next(calls) < 6 else 0.01)
    grid = grid_of(rig, Points((1, 2, 4), (16, 64)), budget_s=1e9, rounds=2)
    assert {s for row in grid.seconds for s in row} == {0.01}


@pytest.mark.parametrize("disturbed", [(1, 16), (2, 64), (2, 16)])
def test_what_took_longer_than_more_work_does_is_measured_again(disturbed):
    left = iter([True])

    def seconds(batch: int, context: int) -> float:
        hit = batch == disturbed[0] and abs(context - disturbed[1]) < 10 and next(left, False)
        return 5.0 if hit else 0.2 * batch + 0.001 * context

    def measured(again: int) -> bool:
        grid = grid_of(ScriptedRig(seconds), Points((1, 4, 2), (16, 64)), budget_s=1e9, again=again)
        return max(max(row) for row in grid.seconds) < 5.0

    assert measured(again=1)
    left = iter([True])
    assert not measured(again=0)


@given(st.lists(st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3), min_size=2, max_size=6))
def test_a_contradiction_is_a_point_that_took_longer_than_its_neighbour_with_more_work(rows):
    seconds = np.array(rows)
    found = contradiction(seconds)
    steps = [(seconds[:-1], seconds[1:]), (seconds[:, :-1], seconds[:, 1:])]
    if found is None:
        assert all((less <= more * 1.0301).all() for less, more in steps)
        return
    i, j = found
    more = [seconds[i + 1, j]] if i + 1 < len(seconds) else []
    more += [seconds[i, j + 1]] if j < 2 else []
    assert seconds[i, j] > 1.03 * min(more)


# -- the rig ----------------------------------------------------------------------------------------------------


def test_a_rig_fills_lanes_as_it_is_told_and_gives_them_back():
    model = load_model(TINY, dtype=torch.float32)
    store = BlockStore(model.config, blocks=4 * 40)
    rig = Rig(model, store, ROLLOUT, columns=40)
    rig.fill(5, 33)
    assert store.total - store.free == 5 * 4 * 3
    assert all(rig.step() > 0 for _ in range(STEPS))
    rig.fill(2, 20)
    assert store.total - store.free == 2 * 4 * 2
    assert rig.prefill(24) > 0
    store.check()
    rig.close()
    assert store.free == store.total
    store.check()


def test_a_rig_never_ends_a_sequence_whatever_it_draws():
    model = load_model(TINY, dtype=torch.float32)
    store = BlockStore(model.config, blocks=4 * 40)
    rig = Rig(model, store, ROLLOUT.model_copy(update={"temperature": 50.0}), columns=40)
    rig.fill(8, 2)
    for _ in range(STEPS):
        rig.step()
        assert store.total - store.free >= 8 * 4
    rig.close()


def test_workers_repeat_equally_often_whoever_is_slow():
    """A measurement is collective: a worker that decided for itself would leave the others waiting."""
    cluster_results: dict[int, int] = {}
    box, barrier = [0.0, 0.0], threading.Barrier(2)

    class Pair:
        size, kind = 2, "local"

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def barrier(self) -> None:
            barrier.wait(120)

        def all_gather_bytes(self, data: bytes) -> list[bytes]:
            box[self.rank] = data
            barrier.wait(120)
            said = list(box)
            barrier.wait(120)
            return said

    def run(rank: int) -> None:
        calls = iter(range(10**6))
        times = []

        def work() -> float:
            next(calls)
            times.append(rank)
            return (0.01, 0.05)[rank]

        assert Together(Pair(rank)).median_s(work, Pace(0.2, 1, 50)) == 0.05
        cluster_results[rank] = len(times)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert cluster_results == {0: 5, 1: 5}


# -- two models beside each other -----------------------------------------------------------------------------------


def pair_of(workers: int, monkeypatch, **other) -> tuple[PairTable, dict[str, list], list[str]]:
    """What was found, snapshots of both tenants before and after, and what was said meanwhile."""
    monkeypatch.setattr(measure_pair, "QUANTUM_S", 0.002)
    for name, value in {"LEAST_WINDOW_S": 0.002, "MOST_WINDOW_S": 0.01, "ROUNDS": 1, "ROUNDS_S": 0.01}.items():
        monkeypatch.setattr(measure_interference, name, value)
    original, seen, said = measure_pair.measure_pair, {}, []

    def spy(first, second, connections, **options):
        before = snapshot(first), snapshot(second)
        found = original(first, second, connections, **options)
        seen[first.worker] = [before, (snapshot(first), snapshot(second)), found]
        return found

    monkeypatch.setattr(measure_pair, "measure_pair", spy)
    cluster = InlineCluster(workers)
    second = replace(subject(chunk_tokens=32), name="wide")
    second = replace(second, config=second.config.model_copy(update={"dtype": "float64", **other}))
    try:
        pair = Profiler(cluster).profile_pair(subject(), second, tell=lambda what, share: said.append(what))
    finally:
        cluster.close()
    return pair, seen, said


def test_two_models_are_measured_beside_each_other_in_turns_and_as_neighbours(monkeypatch):
    pair, seen, said = pair_of(2, monkeypatch)
    one, two = pair.halves
    assert (one.key.dtype, two.key.dtype) == ("float32", "float64")
    assert one.key == table_key(
        CONFIG, dtype="float32", processor=cpu_name(), workers=2, threads=one.key.threads, communicator="shm"
    )
    for half in pair.halves:
        assert set(half.same_worker) == set(half.neighbour_worker) == set(CLASSES)
        assert all(set(row) == set(CLASSES) for row in half.same_worker.values())
        assert all(set(row) == set(CLASSES) for row in half.neighbour_worker.values())
        assert all(0 < f < math.inf for row in half.same_worker.values() for shared in row.values() for f in shared)
    work, beside = (model_of(one.key), "train"), (model_of(two.key), "decode_large")
    assert pair.interference.factor(work, beside, on="same", share=1 / 3) == one.same_worker["train"]["decode_large"][0]
    assert from_pair(seen[0][2]) == pair
    assert seen[1][2] is None
    assert said[:3] == ["loading the model", "loading the model", "measuring"]
    assert "beside neighbours: train, prefill" in said
    for before, after, _ in seen.values():
        assert before == after


def test_a_single_worker_has_no_neighbours(monkeypatch):
    pair, _, said = pair_of(1, monkeypatch)
    assert all(half.neighbour_worker == {} for half in pair.halves)
    assert all(set(half.same_worker) == set(CLASSES) for half in pair.halves)
    assert not any("neighbours" in what for what in said)


def test_a_pair_with_too_few_lanes_is_one_sentence():
    cluster = InlineCluster(1)
    small = replace(subject(kv_blocks=4), name="small")
    try:
        with pytest.raises(LongtailError, match=r"the KV memory of small holds 4 blocks of 16 tokens.*kv_gib"):
            Profiler(cluster).profile_pair(subject(), small)
    finally:
        cluster.close()


class Clock:
    """Time that goes by only when something works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("share", [1 / 3, 1 / 2, 2 / 3])
@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_work_in_turns_has_its_share_and_pays_for_cold_caches_only_when_it_returns(monkeypatch, share, drift):
    """Also on a machine that becomes slower meanwhile."""
    clock, before = Clock(), ""
    monkeypatch.setattr(measure_interference, "time", clock)
    quanta_s = {"short": 0.01, "long": 0.1}

    def work(name: str) -> float:
        nonlocal before
        seconds = (quanta_s[name] + (0.02 if before not in ("", name) else 0.0)) * (1.0 + drift * clock.now)
        before = name
        clock.now += seconds
        return seconds

    ((short, long),) = measure_interference.in_shares(
        Together(LocalCommunicator()), lambda: work("short"), lambda: work("long"), [share]
    )
    assert long == pytest.approx(1.2, rel=0.1)  # each follows a short one
    # In the time of one long quantum: n short ones, of which the first finds cold caches.
    n = (0.12 * share / (1.0 - share) - 0.02) / 0.01
    assert short == pytest.approx(1.0 + 2.0 / n, rel=0.25)


@pytest.mark.parametrize("slow", range(31))
@pytest.mark.parametrize("what", ["one model", "two models"])
def test_a_moment_in_which_the_machine_was_slow_is_no_effect_of_company(monkeypatch, what, slow):
    """Whichever measurement it hits; and without one (30: none is the 30th) the effect is as it is."""
    together = Together(LocalCommunicator())
    together.size = 2
    measured = iter(range(10**6))

    def hiccup() -> float:
        return 25.0 if next(measured) == slow else 1.0

    def beside(_, even, odd):
        factor = hiccup()
        return factor * 0.01 * (1.3 if odd() > even() else 1.0), factor * 0.01

    monkeypatch.setattr(measure_interference, "beside", beside)
    monkeypatch.setattr(measure_interference, "alone", lambda _, classes: dict.fromkeys(classes, 0.01 * hiccup()))
    monkeypatch.setattr(measure_interference, "_after", lambda *_: 0.011 * hiccup())
    light, heavy = {"light": lambda: 1.0}, {"heavy": lambda: 2.0}
    if what == "two models":
        ours, theirs = measure_interference.beside_neighbours(together, light, heavy, lambda *_: None)
        factors = ours["light"]["heavy"], theirs["heavy"]["light"]
        hit = slow < 9
    else:
        same, near = measure_interference.within_model(together, light | heavy, lambda *_: None)
        assert same["light"]["heavy"] in (1.0, pytest.approx(1.1))
        assert near["light"]["light"] == 1.0
        factors = near["light"]["heavy"], near["heavy"]["light"]
        hit = slow < 18
    assert factors[0] in ((1.0, pytest.approx(1.3)) if hit else (pytest.approx(1.3),))
    assert factors[1] == 1.0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_what_rounds_agree_on_is_believed(ratios):
    found = measure_interference.consistent(ratios)
    assert found in (1.0, *ratios)
    assert all(abs(math.log(found)) <= abs(math.log(ratio)) for ratio in ratios)
    assert found != 1.0 or min(ratios) <= 1.0 <= max(ratios)


def test_work_that_does_not_mind_company_has_a_factor_of_one(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure_interference, "time", clock)
    pause = iter([5.0] + [0.0] * 10**6)  # while nothing counts yet

    def work() -> float:
        seconds = 0.01 + next(pause)
        clock.now += seconds
        return seconds

    found = measure_interference.in_shares(Together(LocalCommunicator()), work, work, [0.3, 0.5])
    assert found == [(pytest.approx(1.0), pytest.approx(1.0))] * 2
