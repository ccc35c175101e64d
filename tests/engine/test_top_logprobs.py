"""The most likely tokens beside each drawn one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.engine_models import DenseAttention, assert_same, make_engine, prompt_of, random_model, request, run_all
from longtail.core.errors import RequestError
from longtail.core.types import Emitted, Request
from longtail.engine import engine as engine_module
from longtail.engine.engine import Engine
from longtail.engine.model import Decoder

KINDS = [
    {"temperature": 0},
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.7, "top_p": 0.6},
]


def emitted_by(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[Emitted]]:
    for item in requests:
        engine.add(item)
    found: dict[tuple[str, int], list[Emitted]] = {}
    while engine.has_work:
        for emitted in engine.step().emitted:
            found.setdefault((emitted.request_id, emitted.sample), []).append(emitted)
    return found


def reference(model: Decoder, item: Request, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the whole vocabulary at each generated position, [tokens, V]."""
    everything = torch.from_numpy(np.concatenate([item.prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        hidden = model(everything[:-1], DenseAttention(model, len(everything) - 1))
        logits = model.logits(hidden[len(item.prompt) - 1 :]).double()
    return torch.log_softmax(logits / (item.params.temperature or 1.0), -1).numpy()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_they_are_the_largest_of_the_whole_distribution_before_any_filter(dtype):
    model, tolerance = random_model(dtype), 1e-9 if dtype == torch.float64 else 1e-4
    requests = [
        request(f"r{i}", prompt_of(9 + i, seed=i), samples=2, max_tokens=6, top_logprobs=7, **kind)
        for i, kind in enumerate(KINDS)
    ]
    found = emitted_by(make_engine(model), requests)
    for item in requests:
        for sample in range(2):
            emitted = found[item.request_id, sample]
            expected = reference(model, item, [e.token for e in emitted])
            for e, row in zip(emitted, expected, strict=True):
                ids, values = [t for t, _ in e.top], np.array([v for _, v in e.top])
                assert np.allclose(values, np.sort(row)[::-1][:7], rtol=0, atol=tolerance)
                assert np.allclose(row[ids], values, rtol=0, atol=tolerance)
                assert len(set(ids)) == 7
                assert e.logprob == pytest.approx(row[e.token], abs=tolerance)
                assert dict(e.top).get(e.token, e.logprob) == e.logprob


def test_each_request_gets_as_many_as_it_asked_for_and_others_none():
    requests = [request(f"r{k}", prompt_of(5), max_tokens=3, top_logprobs=k) for k in (0, 1, 20)]
    found = emitted_by(make_engine(random_model()), requests)
    assert all(e.top is None for e in found["r0", 0])
    assert [len(e.top) for e in found["r1", 0]] == [1] * 3
    assert [len(e.top) for e in found["r20", 0]] == [20] * 3


def test_a_vocabulary_of_fewer_tokens_gives_all_of_them():
    found = emitted_by(make_engine(random_model(vocab_size=6)), [request("r", np.array([1]), top_logprobs=20)])
    assert all(sorted(t for t, _ in e.top) == list(range(6)) for e in found["r", 0])


def test_asking_changes_neither_tokens_nor_log_probabilities():
    plain = [request(f"r{i}", prompt_of(30, seed=i), samples=3, seed=i, max_tokens=20) for i in range(4)]
    asking = [dataclasses.replace(r, params=dataclasses.replace(r.params, top_logprobs=5)) for r in plain]
    model = random_model(torch.float32)
    assert_same(run_all(make_engine(model), plain), run_all(make_engine(model, blocks=30), asking), 0)


def test_emitted_log_probabilities_are_those_of_the_completion():
    engine, streamed, done = make_engine(random_model()), {}, {}
    engine.add(request("r", prompt_of(8), samples=3))
    while engine.has_work:
        result = engine.step()
        for e in result.emitted:
            streamed.setdefault(e.sample, []).append((e.token, e.logprob))
        done |= {c.sample: list(zip(c.tokens.tolist(), c.logprobs.tolist(), strict=True)) for c in result.completions}
    assert streamed == done


def test_a_batch_in_which_nobody_asks_never_looks_for_them(monkeypatch):
    def search(*_):
        raise AssertionError("somebody pays for what nobody asked for")

    monkeypatch.setattr(engine_module, "top_logprobs", search)
    assert run_all(make_engine(random_model()), [request("r", prompt_of(8), samples=2)])
    with pytest.raises(AssertionError, match="pays"):
        run_all(make_engine(random_model()), [request("r", prompt_of(8), top_logprobs=1)])


@pytest.mark.parametrize("count", [-1, 21])
def test_a_number_that_is_not_served_is_refused(count):
    with pytest.raises(RequestError, match=f"request 'r': top_logprobs must be 0 to 20, not {count}"):
        make_engine(random_model()).add(request("r", prompt_of(4), top_logprobs=count))
