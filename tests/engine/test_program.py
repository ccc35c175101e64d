from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.engine_models import random_model
from engine.groups import in_group
from longtail.engine.attention import LaneAttention
from longtail.engine.lanes import LanePool
from longtail.engine.program import LayerProgram
from longtail.engine.shard import shard_of

SHAPES = [
    {},
    {"family": "llama", "qk_norm": False, "heads": 9, "kv_heads": 3, "layers": 5},
    {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
]


class Runner:
    """One way to run a model's layers over lanes of its own."""

    def __init__(self, model, attend_of, kv_heads=None):
        self.model = model
        self.pool = LanePool(model.config, blocks=300, dtype=model.dtype, kv_heads=kv_heads)
        self.attend = attend_of(self.pool)
        self.rows = np.array([self.pool.open() for _ in range(3)])
        for row in self.rows:
            self.pool.grow(int(row), 400)

    @torch.inference_mode()
    def __call__(self, starts, counts):
        tokens = (torch.arange(sum(counts)) * 7 + starts[0]) % self.model.config.vocab_size
        self.attend.begin(self.rows, np.array(starts), np.array(counts))
        return self.model(tokens, self.attend)


def pair(model):
    return (
        Runner(model, lambda pool: LayerProgram(model, pool)),
        Runner(model, lambda pool: LaneAttention(pool, model.rope)),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_layers_at_once_give_the_bits_of_one_by_one(dtype, shape, threads):
    at_once, one_by_one = pair(random_model(dtype, **shape))
    before = torch.get_num_threads()
    try:
        for starts, counts in (([0, 0, 0], [300, 1, 40]), ([300, 1, 40], [1, 1, 1]), ([301, 2, 41], [1, 30, 2])):
            torch.set_num_threads(threads)
            ours = at_once(starts, counts)
            torch.set_num_threads(1)
            assert torch.equal(ours, one_by_one(starts, counts))
    finally:
        torch.set_num_threads(before)


def test_weights_that_change_in_place_or_move_are_seen():
    model = random_model(torch.float32)
    at_once, one_by_one = pair(model)
    starts, counts = [0, 0, 0], [5, 1, 2]
    first = at_once(starts, counts)
    with torch.no_grad():
        model.layers[0].qkv.mul_(1.5)
    second = at_once(starts, counts)
    assert not torch.equal(first, second)
    assert torch.equal(second, one_by_one(starts, counts))
    model.layers[1].down.data = model.layers[1].down.data * 2
    model.layers[1].o = torch.nn.Parameter(model.layers[1].o.detach() * 2)
    third = at_once(starts, counts)
    assert not torch.equal(second, third)
    assert torch.equal(third, one_by_one(starts, counts))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "size"), [(SHAPES[0], 2), (SHAPES[1], 2), (SHAPES[1], 3), (SHAPES[2], 2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_rank_of_a_group_gets_the_bits_of_one_by_one(dtype, shape, size, threads, tmp_path):
    """Over batches that are larger than what the group was built for, too."""
    model = random_model(dtype, **shape, hidden_size=64, intermediate_size=192)
    _, one_by_one = pair(model)
    batches = [([0, 0, 0], [1, 1, 1]), ([1, 1, 1], [300, 1, 40]), ([301, 2, 41], [1, 1, 1]), ([302, 3, 42], [1, 30, 2])]
    expected = [one_by_one(*batch) for batch in batches]

    def work(comm):
        torch.set_num_threads(threads)
        heads = range(*shard_of(model.config, comm.rank, size).heads)
        runner = Runner(model, lambda pool: LayerProgram(model, pool, comm=comm, rows=2), heads)
        return [runner(*batch) for batch in batches]

    before = torch.get_num_threads()
    try:
        for results in in_group(work, size, tmp_path):
            assert all(torch.equal(ours, whole) for ours, whole in zip(results, expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_programs_of_two_models_take_turns_in_the_same_memory(tmp_path):
    """Their buffers lie at different places of it, and a rank that is ahead overwrites nothing that is still read."""
    models = [random_model(seed=0), random_model(seed=1, hidden_size=96, intermediate_size=64, kv_heads=3, heads=3)]
    batches = [([at, at, at], [1, 1, 1]) for at in range(40)]
    alone = [pair(model)[1] for model in models]
    expected = [[one_by_one(*batch) for one_by_one in alone] for batch in batches]

    def work(comm):
        runners = []
        for model in models:
            heads = range(*shard_of(model.config, comm.rank, 2).heads)
            runners.append(Runner(model, lambda pool, model=model: LayerProgram(model, pool, comm=comm, rows=3), heads))
        return [[runner(*batch) for runner in runners] for batch in batches]

    for results in in_group(work, 2, tmp_path):
        for ours, whole in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))
