"""Tokens and log-probabilities are a function of prompt, parameters and seed; everything ends exactly once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.engine_models import (
    Script,
    assert_same,
    dense_logprobs,
    make_engine,
    prompt_of,
    random_model,
    request,
    run_all,
)
from longtail.core.errors import CapacityError, ModelError, RequestError
from longtail.core.types import FinishReason, SubStage
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder

SHAPES = {
    "qwen3": {},
    "llama-uneven": {"family": "llama", "qk_norm": False, "heads": 9, "kv_heads": 3, "tied": True},
    "qwen2-biases": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "odd-head": {"head_dim": 12, "hidden_size": 24, "intermediate_size": 40},
}
DTYPES = [torch.float64, torch.float32]


@pytest.fixture(params=DTYPES, ids=str)
def model(request) -> Decoder:
    return random_model(request.param)


def mixed_requests():
    return [
        request(f"r{i}", prompt_of(3 + 13 * i, seed=i), samples=1 + i % 4, seed=i, max_tokens=20 + 9 * i, **kind)
        for i, kind in enumerate(
            [
                {},
                {"temperature": 0},
                {"temperature": 0.7, "top_k": 8},
                {"top_p": 0.8, "end_token_ids": (3,)},
                {"end_token_ids": (7, 11)},
                {"temperature": 1.4},
            ]
        )
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logprobs_equal_a_plain_forward_pass(dtype, shape):
    model = random_model(dtype, **shape)
    requests = [
        request(f"r{T}", prompt_of(40, seed=3), samples=3, max_tokens=40, temperature=T) for T in (0, 0.5, 1.0, 1.7)
    ]
    requests.append(request("long", prompt_of(300, seed=4), samples=2, max_tokens=5))
    done = run_all(make_engine(model, chunk_tokens=64), requests)
    for item in requests:
        for sample in range(item.samples):
            c = done[item.request_id, sample]
            expected = dense_logprobs(model, item.prompt, c.tokens, item.params.temperature)
            assert np.allclose(c.logprobs, expected, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-4)


VARIANTS = {
    "reversed": {},
    "chunks of 16": {"chunk_tokens": 16},
    "two at a time": {"max_running": 2},
    "small pool": {"blocks": 26},
    "smallest pool": {"blocks": 18},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_order_chunks_batch_and_pool_size_change_no_bit(model, variant):
    requests = mixed_requests()
    base = run_all(make_engine(model), requests)
    engine = make_engine(model, **VARIANTS[variant])
    assert_same(base, run_all(engine, requests[::-1] if variant == "reversed" else requests), 0)
    assert engine.preemptions == 0 or "pool" in variant


def test_block_size_changes_no_token(model):
    requests = mixed_requests()
    base = run_all(make_engine(model), requests)
    for block_tokens, tolerance in ((4, 1e-9), (64, 1e-9)):
        other = run_all(make_engine(model, block_tokens=block_tokens, blocks=500), requests)
        assert_same(base, other, tolerance if model.dtype == torch.float64 else 1e-4)


def test_requests_one_by_one_equal_all_at_once(model):
    requests = mixed_requests()
    together, engine = run_all(make_engine(model), requests), make_engine(model)
    apart = {}
    for item in requests:
        apart.update(run_all(engine, [item]))
    assert_same(together, apart, 0)


def test_a_group_equals_separate_requests_and_prefills_its_prompt_once(model):
    group = request("g", prompt_of(50), samples=5, seed=9, max_tokens=30)
    engine = make_engine(model)
    engine.add(group)
    first = engine.step()
    assert (first.substage, first.tokens) == (SubStage.PREFILL, 50)
    assert [emitted.sample for emitted in first.emitted] == [0, 1, 2, 3, 4]
    assert engine.lanes.used == 2 * engine.lanes.blocks_of(50)
    assert engine.next_substage() == SubStage.DECODE
    engine.step()
    # Three whole blocks per head are shared; the fourth, partial one has become five.
    assert engine.lanes.used == 2 * (3 + 5)
    engine.lanes.check()
    while engine.has_work:
        engine.step()
    together = run_all(make_engine(model), [group])
    for i, seed in enumerate(group.seeds):
        alone = run_all(make_engine(model), [dataclasses.replace(group, seeds=(seed,))])
        assert alone["g", 0].tokens.tolist() == together["g", i].tokens.tolist()
        assert alone["g", 0].logprobs.tolist() == together["g", i].logprobs.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sixteen_sequences_in_memory_for_six_equal_unlimited_memory(model, temperature):
    requests = [
        request(f"g{i}", prompt_of(21 + i, seed=i), samples=4, seed=i, temperature=temperature, forced=(256,) * 4)
        for i in range(4)
    ]
    unlimited = run_all(make_engine(model), requests)
    engine = make_engine(model, blocks=6 * 2 * 18)
    small = run_all(engine, requests)
    assert_same(unlimited, small, 0)
    assert engine.preemptions > 0
    assert max(c.preemptions for c in small.values()) >= 1
    assert sum(c.preemptions for c in small.values()) == engine.preemptions
    # Bounded: nobody is preempted and resumed again and again.
    assert engine.preemptions <= 2 * 16
    assert 0 < engine.recomputed_tokens < 16 * 256


def test_a_pool_for_exactly_one_sample_serves_a_whole_group(model):
    item = request("g", prompt_of(30), samples=4, max_tokens=40)
    base = run_all(make_engine(model), [item])
    exact = 2 * -(-(30 + 40 - 1) // 16)
    assert_same(base, run_all(make_engine(model, blocks=exact), [item]), 0)
    with pytest.raises(CapacityError, match=f"take {exact} KV blocks, and the pool has {exact - 1}"):
        make_engine(model, blocks=exact - 1).add(item)


@pytest.mark.parametrize("temperature", [1e30, 1e-30, 5e-324])
def test_extreme_temperatures_draw_finite_tokens(model, temperature):
    done = run_all(make_engine(model), [request("r", prompt_of(5), temperature=temperature, samples=3)])
    assert all(((c.tokens >= 0) & (c.tokens < 50)).all() for c in done.values())


def test_the_oldest_sequence_is_never_preempted():
    requests = [request(f"r{i}", prompt_of(20, seed=i), forced=(120,)) for i in range(8)]
    engine = make_engine(random_model(), blocks=2 * 20)
    done = run_all(engine, requests)
    assert engine.preemptions > 0
    assert done["r0", 0].preemptions == 0


def test_same_requests_give_the_same_schedule_and_bits():
    def trace():
        engine = make_engine(random_model(torch.float32), blocks=40)
        for item in mixed_requests():
            engine.add(item)
        steps = []
        while engine.has_work:
            engine.next_substage()
            result = engine.step()
            steps.append((result.substage, result.tokens, result.batch, tuple(result.emitted)))
        return steps

    assert trace() == trace()


def test_asking_for_the_next_substage_changes_nothing():
    def run(ask: int):
        engine, steps = make_engine(random_model(), blocks=30, chunk_tokens=16), []
        pending = mixed_requests()
        while pending or engine.has_work:
            for _ in range(ask if engine.has_work else 0):
                engine.next_substage()
            if pending:
                engine.add(pending.pop(0))
            result = engine.step()
            steps.append((result.substage, result.tokens, tuple(result.emitted)))
        return steps

    assert run(0) == run(3)


def test_a_chunk_is_shared_by_several_requests_and_never_exceeded():
    engine = make_engine(random_model(), chunk_tokens=32)
    for i in range(3):
        engine.add(request(f"r{i}", prompt_of(20, seed=i), max_tokens=2))
    sizes = []
    while engine.next_substage() == SubStage.PREFILL:
        result = engine.step()
        sizes.append((result.tokens, result.batch))
    assert sizes == [(32, 2), (28, 2)]


def test_counts_of_running_and_waiting_add_up():
    engine = make_engine(random_model(), max_running=3)
    engine.add(request("a", prompt_of(5), samples=5, max_tokens=4))
    assert (engine.waiting, engine.running) == (5, 0)
    engine.step()
    assert (engine.waiting, engine.running) == (5, 0)
    engine.step()
    assert (engine.waiting, engine.running) == (2, 3)
    assert engine.has_work


def test_the_context_cuts_a_sample_as_length():
    engine = make_engine(random_model(), max_context=24)
    done = run_all(engine, [request("r", prompt_of(20), max_tokens=100)])
    assert (len(done["r", 0].tokens), done["r", 0].finish) == (4, FinishReason.LENGTH)
    done = run_all(engine, [request("r", prompt_of(23), max_tokens=100)])
    assert len(done["r", 0].tokens) == 1
    with pytest.raises(CapacityError, match="prompt of 24 tokens and 1 to generate exceed the context of 24"):
        engine.add(request("r", prompt_of(24)))
    with pytest.raises(CapacityError, match="prompt of 20 tokens and 5 to generate exceed the context of 24"):
        engine.add(request("r", prompt_of(20), forced=(5,)))


def test_one_token_samples_end_in_the_prefill_and_hold_no_lanes():
    engine = make_engine(random_model())
    engine.add(request("r", prompt_of(9), samples=3, max_tokens=1))
    assert len(engine.step().completions) == 3
    assert not engine.has_work
    assert engine.lanes.used == 0


BAD = {
    "empty prompt": ({"prompt": np.array([], np.int32)}, "empty prompt"),
    "two-dimensional prompt": ({"prompt": np.zeros((1, 1), np.int32)}, "one-dimensional"),
    "negative token": ({"prompt": np.array([3, -1], np.int32)}, "token id -1 is outside the vocabulary .0 to 49."),
    "token beyond the vocabulary": ({"prompt": np.array([50], np.int32)}, "token id 50"),
    "float prompt": ({"prompt": np.array([1.0])}, "integer"),
    "no tokens": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "nan temperature": ({"temperature": float("nan")}, "temperature"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature"),
    "negative temperature": ({"temperature": -1.0}, "temperature"),
    "temperature without an inverse": ({"temperature": 1e31}, "temperature"),
    "negative top_k": ({"top_k": -1}, "top_k"),
    "zero top_p": ({"top_p": 0.0}, "top_p"),
    "top_p above 1": ({"top_p": 1.1}, "top_p"),
    "nan top_p": ({"top_p": float("nan")}, "top_p"),
    "empty stop": ({"stop": ("",)}, "stop string is empty"),
    "no samples": ({"samples": 0}, "no samples"),
    "wrong forced lengths": ({"forced": (3, 4)}, "forced_lengths"),
    "zero forced length": ({"forced": (0,)}, "forced_lengths"),
    "taken id": ({"name": "running0"}, "unique"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_impossible_request_is_refused_by_name_and_harms_nobody(bad):
    changes, message = BAD[bad]
    good = [request(f"running{i}", prompt_of(10, seed=i), max_tokens=12) for i in range(4)]
    engine = make_engine(random_model(), detokenize=str)
    for item in good:
        engine.add(item)
    engine.step()
    values = {"name": "bad", "prompt": prompt_of(4), **changes}
    with pytest.raises(RequestError, match=f"(?s)request '{values['name']}'.*{message}"):
        engine.add(request(values.pop("name"), values.pop("prompt"), **values))
    ended = []
    while engine.has_work:
        ended += engine.step().completions
    assert sorted(c.request_id for c in ended) == [r.request_id for r in good]


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(RequestError, match="tokenizer"):
        make_engine(random_model()).add(request("r", prompt_of(3), stop=("x",)))


def test_diverged_weights_are_an_error_that_says_so():
    model = random_model()
    with torch.no_grad():
        model.norm.fill_(float("nan"))
    engine = make_engine(model)
    engine.add(request("r7", prompt_of(3)))
    with pytest.raises(ModelError, match="not finite for request r7"):
        engine.step()


def test_step_without_work_is_a_mistake_of_the_caller():
    with pytest.raises(RuntimeError, match="has_work"):
        make_engine(random_model()).step()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8, 40])
def test_aborting_at_any_time_frees_lanes_and_changes_no_neighbour(steps):
    model = random_model()
    keep = [request(f"keep{i}", prompt_of(15, seed=i), samples=2, max_tokens=40) for i in range(3)]
    base = run_all(make_engine(model), keep)
    engine = make_engine(model, blocks=40, chunk_tokens=16, max_running=6)
    for i, item in enumerate(keep):
        engine.add(item)
        engine.add(request(f"drop{i}", prompt_of(33, seed=50 + i), samples=4, max_tokens=60))
    done = {}
    for _ in range(steps):
        done.update({(c.request_id, c.sample): c for c in engine.step().completions})
    for i in range(3):
        engine.abort(f"drop{i}")
        engine.lanes.check()
    engine.abort("never added")
    while engine.has_work:
        done.update({(c.request_id, c.sample): c for c in engine.step().completions})
        engine.lanes.check()
    assert engine.lanes.used == 0
    assert_same(base, {key: c for key, c in done.items() if key in base}, 0)


def test_new_weights_between_requests_are_used_at_once():
    model, other = random_model(seed=0), random_model(seed=1)
    item = request("r", prompt_of(12), max_tokens=20)
    engine = make_engine(model)
    before = run_all(engine, [item])
    with torch.no_grad():
        for target, source in zip(model.parameters(), other.parameters(), strict=True):
            target.copy_(source)
    after = run_all(engine, [item])
    assert before["r", 0].tokens.tolist() != after["r", 0].tokens.tolist()
    assert_same(after, run_all(make_engine(other), [item]), 0)


def test_a_bfloat16_model_generates():
    done = run_all(make_engine(random_model(torch.bfloat16), blocks=40), mixed_requests())
    assert all(np.isfinite(c.logprobs).all() for c in done.values())


class AnySchedule(RuleBasedStateMachine):
    """Random adds, aborts and steps under memory for a fraction of them, against each request alone."""

    model = random_model(layers=1)
    alone: dict[tuple, dict] = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.engine = make_engine(self.model, blocks=18, max_running=5, chunk_tokens=24)
        self.added: dict[str, tuple] = {}
        self.done: dict[tuple[str, int], list[int]] = {}
        self.aborted: set[str] = set()

    def _request(self, name, kind):
        length, samples, max_tokens, seed = kind
        return request(
            name, prompt_of(length, seed), samples=samples, seed=seed, max_tokens=max_tokens, end_token_ids=(5,)
        )

    @rule(
        length=st.sampled_from([1, 15, 16, 17, 40]),
        samples=st.sampled_from([1, 2, 5]),
        max_tokens=st.sampled_from([1, 2, 30, 90]),
        seed=st.integers(0, 2),
    )
    def add(self, length, samples, max_tokens, seed):
        name, kind = f"r{len(self.added)}", (length, samples, max_tokens, seed)
        self.engine.add(self._request(name, kind))
        self.added[name] = kind

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.added)))
        self.engine.abort(name)
        self.aborted.add(name)

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 40))
    def step(self, count):
        for _ in range(count):
            if self.engine.has_work:
                self._step()

    def _step(self):
        expected = self.engine.next_substage()
        result = self.engine.step()
        assert result.substage == expected
        self.engine.lanes.check()
        for c in result.completions:
            key = c.request_id, c.sample
            assert key not in self.done
            assert c.request_id not in self.aborted
            self.done[key] = c.tokens.tolist()

    @invariant()
    def conserved(self):
        self.engine.lanes.check()
        assert self.engine.running <= 5 + 5

    def teardown(self):
        while self.engine.has_work:
            self._step()
        assert self.engine.lanes.used == 0
        for name, kind in self.added.items():
            if kind not in self.alone:
                engine = Engine(self.model, LanePool(self.model.config, blocks=200, dtype=self.model.dtype))
                done = run_all(engine, [self._request("alone", kind)], check=False)
                self.alone[kind] = {sample: c.tokens.tolist() for (_, sample), c in done.items()}
            for sample in range(kind[1]):
                if name not in self.aborted:
                    assert self.done[name, sample] == self.alone[kind][sample]


TestAnyScheduleEndsEachSampleOnce = AnySchedule.TestCase
TestAnyScheduleEndsEachSampleOnce.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_a_model_with_another_forward_is_served_too():
    done = run_all(make_engine(Script(30)), [request("r", np.array([4], np.int32), max_tokens=6, temperature=0)])
    assert done["r", 0].tokens.tolist() == [5, 6, 7, 8, 9, 10]


def test_an_engine_works_again_when_diverged_weights_are_replaced():
    model, item = random_model(), request("r", prompt_of(30), max_tokens=20)
    engine = make_engine(model, blocks=8)
    before = run_all(engine, [item])
    good = model.norm.detach().clone()
    with torch.no_grad():
        model.layers[0].down.fill_(float("nan"))
        good_down = random_model().layers[0].down
    engine.add(request("bad", prompt_of(40)))
    with pytest.raises(ModelError):
        engine.step()
    engine.abort("bad")
    with torch.no_grad():
        model.norm.copy_(good)
        model.layers[0].down.copy_(good_down)
    assert_same(before, run_all(engine, [item]), 0)
