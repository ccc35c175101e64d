"""Tensor parallelism changes no bit: whatever the number of ranks, the split of heads and the communicator."""

from __future__ import annotations

import os
import queue
import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.engine_models import prompt_of, random_model, request
from engine.groups import PROCESSES, communicator, engine_of, in_group, plain, run_group, trace
from engine.reference import save_hf_model, tiny_hf_config
from longtail.core.errors import ModelError, PeerLost
from longtail.engine.attention import LaneAttention
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder
from longtail.engine.models import resolve_model
from longtail.engine.program import LayerProgram

DTYPES = [torch.float64, torch.float32]
SHAPES = {
    "llama, 3 heads, tied": {"family": "llama", "qk_norm": False, "heads": 9, "kv_heads": 3, "tied": True},
    "qwen2, 4 heads, large biases": {"family": "qwen2", "qk_norm": False, "kv_heads": 4, "heads": 8, "qkv_bias": True},
    "qwen3, 5 heads, a large vocabulary": {"kv_heads": 5, "heads": 10, "vocab_size": 1100, "hidden_size": 80},
    "all biases, tied": {"kv_heads": 2, "o_bias": True, "mlp_bias": True, "qkv_bias": True, "tied": True},
}


def model_of(shape: str, dtype: torch.dtype = torch.float32) -> Decoder:
    model = random_model(dtype, **SHAPES[shape])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("qkv_bias"):
                parameter.mul_(20)
    return model


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def requests_of(model: Decoder, max_tokens: int = 14):
    """Prompts of several lengths; every way to sample and to end."""
    ways = [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "end_token_ids": (3, 9)},
        {"stop": ("a", "qx")},
        {"temperature": 1.4},
    ]
    prompts = [prompt_of(2 + 17 * i, seed=i, vocab=model.config.vocab_size) for i in range(len(ways))]
    return [
        request(f"r{i}", prompts[i], samples=1 + i % 3, seed=i, max_tokens=max_tokens, **way)
        for i, way in enumerate(ways)
    ]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_of_ranks_changes_a_bit(shape, dtype, kind, tmp_path):
    model = model_of(shape, dtype)
    requests, options = requests_of(model), {"chunk_tokens": 16, "detokenize": letters}
    base = trace(engine_of(model, None, **options), requests)
    for size in range(2, min(model.config.kv_heads, 4) + 1):
        assert run_group(model, size, requests, tmp_path, kind=kind, **options) == base


FILTERS = [{"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.5, "top_k": 9, "top_p": 0.9}, {"top_logprobs": 4}]


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("way", FILTERS, ids=str)
def test_filters_and_top_logprobs_change_no_bit_beside_plain_draws(way, kind, tmp_path):
    model = model_of("qwen3, 5 heads, a large vocabulary")
    requests = [
        request("plain", prompt_of(30), samples=2, max_tokens=9),
        request("special", prompt_of(9, seed=1), samples=2, max_tokens=5, **way),
    ]
    base = trace(engine_of(model, None), requests)
    assert run_group(model, 3, requests, tmp_path, kind=kind) == base


@pytest.mark.parametrize("options", [{"columns": 14}, {"columns": 16, "chunk_tokens": 24}, {"max_running": 4}], ids=str)
def test_preemption_and_small_batches_go_the_same_way_on_every_rank(options, tmp_path):
    model = model_of("llama, 3 heads, tied")
    requests = [request(f"r{i}", prompt_of(20 + i, seed=i), seed=i, forced=(120,)) for i in range(6)]
    engine = engine_of(model, None, **options)
    base = trace(engine, requests)
    assert engine.preemptions > 0 or "max_running" in options
    for size in (2, 3):
        assert run_group(model, size, requests, tmp_path, **options) == base


@pytest.mark.parametrize("head_dim", [12, 32])
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_what_the_kernels_do_not_serve_runs_layer_by_layer(head_dim, kind, tmp_path):
    """Torch's matrix products may round differently in another shape, so tokens are equal and log-probs close."""
    model = random_model(head_dim=head_dim, hidden_size=36, intermediate_size=20, kv_heads=3, heads=6, vocab_size=600)
    requests = requests_of(model)
    base = trace(engine_of(model, None, detokenize=letters), requests)
    for size in (2, 3):
        steps = run_group(model, size, requests, tmp_path, kind=kind, detokenize=letters)
        for ours, theirs in zip(steps, base, strict=True):
            assert [(e.request_id, e.sample, e.token) for e in ours[4]] == [
                (e.request_id, e.sample, e.token) for e in theirs[4]
            ]
            assert np.allclose([e.logprob for e in ours[4]], [e.logprob for e in theirs[4]], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_the_ranks_of_a_bfloat16_model_agree(kind, tmp_path):
    model = random_model(torch.bfloat16, kv_heads=3, heads=6, vocab_size=600)
    steps = run_group(model, 2, requests_of(model), tmp_path, kind=kind, detokenize=letters)
    assert all(np.isfinite([e.logprob for e in step[4]]).all() for step in steps)


def test_only_shared_memory_and_what_the_kernels_serve_run_all_layers_at_once(tmp_path):
    def kind_of(model):
        return lambda comm: type(engine_of(model, comm)._attend)

    model, narrow = random_model(), random_model(hidden_size=36)
    assert in_group(kind_of(model), 2, tmp_path) == [LayerProgram] * 2
    assert in_group(kind_of(model), 2, tmp_path, kind="gloo") == [LaneAttention] * 2
    assert in_group(kind_of(narrow), 2, tmp_path) == [LaneAttention] * 2


def test_new_weights_between_steps_are_seen_by_every_rank(tmp_path):
    model, other = random_model(seed=0), random_model(seed=1)
    item = request("r", prompt_of(12), max_tokens=8)
    base = trace(engine_of(other, None), [item])
    met = threading.Barrier(2)

    def work(comm):
        engine = engine_of(model, comm)
        before = trace(engine, [item])
        met.wait()
        if comm.rank == 0:
            with torch.no_grad():
                for target, source in zip(model.parameters(), other.parameters(), strict=True):
                    target.copy_(source)
        met.wait()
        return before, trace(engine, [item])

    for before, after in in_group(work, 2, tmp_path):
        assert before != base
        assert after == base


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rank_that_is_late_is_waited_for_and_changes_no_bit(threads, tmp_path):
    """Rank 1 starts each step only when rank 0 has given up its first wait in the compiled program."""
    model = random_model(torch.float32, hidden_size=256, intermediate_size=512)  # enough work for a team
    requests = [request("r", prompt_of(70), samples=2, max_tokens=4)]
    base = trace(engine_of(model, None), requests)
    gave_up = threading.Semaphore(0)
    waits = [0]

    def work(comm):
        torch.set_num_threads(threads)
        engine = engine_of(model, comm)
        if comm.rank == 0:
            check = comm.check

            def note():
                waits[0] += 1
                gave_up.release()
                check()

            comm.check = note
        else:
            begin = engine._attend.begin

            def late(*args):
                gave_up.acquire()
                begin(*args)

            engine._attend.begin = late
        return trace(engine, requests)

    assert in_group(work, 2, tmp_path) == [base, base]
    assert waits[0] >= len(base)


def test_logits_that_are_not_finite_on_one_rank_are_an_error_on_every_rank(tmp_path):
    model = random_model(vocab_size=600)
    with torch.no_grad():
        model.head[580, 3] = float("nan")  # in the last block, which belongs to rank 1

    def work(comm):
        engine = engine_of(model, comm)
        engine.add(request("r7", prompt_of(3)))
        with pytest.raises(ModelError, match="not finite for request r7") as raised:
            engine.step()
        return str(raised.value)

    first, second = in_group(work, 2, tmp_path)
    assert first == second


def test_lanes_of_other_heads_are_refused(tmp_path):
    model = random_model(kv_heads=3, heads=6)

    def work(comm):
        pool = LanePool(model.config, blocks=30, kv_heads=[0, 1], dtype=model.dtype)
        if comm.rank == 0:
            return None
        with pytest.raises(ModelError, match=r"rank 1 of 2 computes the KV heads \[2\], but its lanes hold \[0, 1\]"):
            Engine(model, pool, comm=comm)

    in_group(work, 2, tmp_path)


def test_teacher_forced_log_probabilities_equal_transformers(tmp_path):
    hf_model = save_hf_model(tmp_path / "model", tiny_hf_config("qwen2", vocab_size=700, hidden_size=64, head_dim=32))
    model = load_model(tmp_path / "model", dtype=torch.float32)
    prompt = prompt_of(40, vocab=700)
    steps = run_group(model, 2, [request("r", prompt, max_tokens=50)], tmp_path)
    emitted = [e for step in steps for e in step[4]]
    everything = torch.from_numpy(np.concatenate([prompt, [e.token for e in emitted]]).astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(hf_model(everything[None, :-1]).logits[0, len(prompt) - 1 :], -1)
    expected = logprobs[torch.arange(len(emitted)), everything[len(prompt) :]].numpy()
    assert np.allclose([e.logprob for e in emitted], expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_smollm2_draws_the_same_bits_on_two_ranks(tmp_path):
    model = load_model(resolve_model("smollm2-135m"), dtype=torch.float32)
    requests = [
        request(f"r{i}", prompt_of(5 + 9 * i, seed=i, vocab=40_000), seed=i, forced=(32,), temperature=i % 3 / 2)
        for i in range(8)
    ]
    base = trace(engine_of(model, None, columns=60), requests)
    assert run_group(model, 2, requests, tmp_path, columns=60) == base


# Processes


def process(target, rank: int, size: int, path, kind: str, results, *args) -> None:
    torch.set_num_threads(1)
    comm = communicator(kind, path, rank=rank, size=size)
    try:
        results.put((rank, target(comm, *args)))
    except Exception as error:
        results.put((rank, error))
    comm.close()


def in_processes(target, size: int, path, kind: str, *args) -> list:
    """What ``target(comm, *args)`` returned, or raised, in each of ``size`` new processes; None where it was killed."""
    results = PROCESSES.SimpleQueue()
    processes = [
        PROCESSES.Process(target=process, args=(target, rank, size, path, kind, results, *args)) for rank in range(size)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(240)
    found = {}
    while not results.empty():
        rank, value = results.get()
        found[rank] = value
    return [found.get(rank) for rank in range(size)]


def trace_in_process(comm, shape: str) -> list[tuple]:
    model = model_of(shape)
    return trace(engine_of(model, comm, detokenize=letters), requests_of(model))


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_processes_give_the_bits_of_one(kind, tmp_path):
    shape = "llama, 3 heads, tied"
    model = model_of(shape)
    base = trace(engine_of(model, None, detokenize=letters), requests_of(model))
    assert in_processes(trace_in_process, 2, tmp_path / "meet", kind, shape) == [base, base]


def lose_a_peer(comm, where: str) -> str:
    model = random_model()
    engine = engine_of(model, comm)
    engine.add(request("r", prompt_of(10), max_tokens=20))
    for _ in range(3):
        engine.step()

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == 1:
        if where == "layers":
            engine._attend.begin = die
        else:
            engine._sample_sharded = die
    with pytest.raises(PeerLost) as raised:
        engine.step()
    return str(raised.value)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("where", ["layers", "sampling"])
def test_a_peer_that_is_killed_inside_a_step_is_an_error_on_the_others_long_before_the_time_out(where, kind, tmp_path):
    survivor, killed = in_processes(lose_a_peer, 2, tmp_path / "meet", kind, where)
    assert killed is None
    before, _, why = survivor.partition("rank 0 of 2 lost a peer")
    assert before == ""
    assert why
    assert not any(word in why.lower() for word in ("time", "within"))


# Any schedule


class AnySchedule(RuleBasedStateMachine):
    """Random adds, aborts and steps in a group of two, against an engine alone."""

    model = random_model(layers=1, kv_heads=3, heads=6)
    folder = None

    def __init__(self):
        super().__init__()
        self.options = {"columns": 6, "max_running": 5, "chunk_tokens": 24}
        self.alone = engine_of(self.model, None, **self.options)
        self.calls = [queue.SimpleQueue() for _ in range(2)]
        self.answers = [queue.SimpleQueue() for _ in range(2)]
        self.names = []
        self.group = threading.Thread(target=in_group, args=(self._rank, 2, self.folder))
        self.group.start()

    def _rank(self, comm):
        engine = engine_of(self.model, comm, **self.options)
        for name, *args in iter(self.calls[comm.rank].get, None):
            answer = getattr(engine, name)(*args)
            engine.lanes.check()
            self.answers[comm.rank].put(plain(answer) if name == "step" else answer)

    def _call(self, name, *args):
        for calls in self.calls:
            calls.put((name, *args))
        answer = getattr(self.alone, name)(*args)
        answer = plain(answer) if name == "step" else answer
        assert [answers.get(timeout=240) for answers in self.answers] == [answer, answer]

    @rule(
        length=st.sampled_from([1, 15, 16, 17, 40]),
        samples=st.sampled_from([1, 2, 5]),
        max_tokens=st.sampled_from([1, 2, 30]),
        top_k=st.sampled_from([0, 0, 3]),
    )
    def add(self, length, samples, max_tokens, top_k):
        seed = len(self.names)
        self.names.append(f"r{seed}")
        self._call(
            "add",
            request(
                self.names[-1],
                prompt_of(length, seed),
                samples=samples,
                seed=seed,
                max_tokens=max_tokens,
                top_k=top_k,
                end_token_ids=(5,),
            ),
        )

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data):
        self._call("abort", data.draw(st.sampled_from(self.names)))

    @precondition(lambda self: self.alone.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.alone.has_work:
                self._call("step")

    @invariant()
    def lanes_are_conserved(self):
        self.alone.lanes.check()

    def teardown(self):
        for calls in self.calls:
            calls.put(None)
        self.group.join()


def test_any_schedule_is_the_same_in_a_group(tmp_path):
    AnySchedule.folder = tmp_path
    AnySchedule.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
    AnySchedule.TestCase("runTest").runTest()
