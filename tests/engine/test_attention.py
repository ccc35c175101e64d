from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.engine_models import tiny_config
from longtail.engine.attention import LaneAttention, supports
from longtail.engine.attention_torch import TorchLaneAttention
from longtail.engine.lanes import LanePool
from longtail.engine.model import RopeTable

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


class Side:
    """One implementation over a pool of its own."""

    def __init__(self, kind, config, dtype, *, rows=3, reach=700, block_tokens=16, kv_heads=None):
        heads = config.kv_heads if kv_heads is None else len(kv_heads)
        blocks = rows * heads * -(-reach // block_tokens)
        self.pool = LanePool(config, blocks=blocks, block_tokens=block_tokens, kv_heads=kv_heads, dtype=dtype)
        store = self.pool.store
        store.free_list = np.random.default_rng(1).permutation(store.free_list)
        self.attend = kind(self.pool, RopeTable(config, dtype=dtype, device=torch.device("cpu")))
        self.rows = np.array([self.pool.open() for _ in range(rows)])
        for row in self.rows:
            self.pool.grow(int(row), reach)

    def __call__(self, starts, counts, qkv, norms=(None, None), layer=1):
        used = np.asarray(counts) > 0
        self.attend.begin(self.rows[used], np.asarray(starts)[used], np.asarray(counts)[used])
        return self.attend(layer, qkv, *norms)


def shapes(**changes):
    return tiny_config(rope_parameters={"rope_theta": 10000.0}, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens"),
    [(6, 2, 32, 16), (7, 1, 64, 32), (4, 4, 96, 16), (16, 2, 128, 64)],
)
def test_kernels_equal_torch_on_ragged_prefills_and_decodes(dtype, heads, kv_heads, head_dim, block_tokens):
    config = shapes(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    ours = Side(LaneAttention, config, dtype, block_tokens=block_tokens)
    plain = Side(TorchLaneAttention, config, dtype, block_tokens=block_tokens)
    assert supports(ours.pool)
    generator = torch.Generator().manual_seed(0)
    norms = tuple(torch.rand(head_dim, generator=generator, dtype=dtype) + 0.5 for _ in range(2))
    starts = np.zeros(3, np.int64)
    for counts in ([290, 1, 33], [1, 1, 1], [0, 40, 1], [1, 0, 1], [270, 256, 5]):
        width = config.kv_heads * config.qkv_rows_per_kv
        qkv = torch.randn(sum(counts), width, generator=generator, dtype=dtype)
        a, b = ours(starts, counts, qkv, norms), plain(starts, counts, qkv, norms)
        assert torch.allclose(a, b, rtol=0, atol=TOLERANCE[dtype])
        starts = starts + counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_gets_the_same_bits_however_its_context_was_computed(dtype):
    config = shapes(heads=6, kv_heads=2, head_dim=32)
    total = 530
    qkv = torch.randn(total, config.kv_heads * config.qkv_rows_per_kv, dtype=dtype)
    whole = Side(LaneAttention, config, dtype, rows=1)([0], [total], qkv)
    for step in (1, 7, 64):
        side = Side(LaneAttention, config, dtype, rows=1)
        parts = [side([at], [min(step, total - at)], qkv[at : at + step]) for at in range(0, total, step)]
        assert torch.equal(torch.cat(parts), whole)


def test_the_number_of_threads_changes_no_bit():
    config = shapes(heads=12, kv_heads=4, head_dim=64)
    qkv = torch.randn(600, config.kv_heads * config.qkv_rows_per_kv)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(Side(LaneAttention, config, torch.float32)([0, 0, 0], [500, 1, 99], qkv))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", [LaneAttention, TorchLaneAttention])
def test_any_subset_of_kv_heads_computes_its_share(kind):
    config = shapes(heads=9, kv_heads=3, head_dim=32)
    qkv = torch.randn(40, 3 * config.qkv_rows_per_kv, dtype=torch.float64)
    counts = [25, 14, 1]
    whole = Side(kind, config, torch.float64)([0, 0, 0], counts, qkv).view(40, 3, -1)
    for kv_heads in ([0, 2], [1]):
        part = qkv.view(40, 3, -1)[:, kv_heads].flatten(1)
        share = Side(kind, config, torch.float64, kv_heads=kv_heads)([0, 0, 0], counts, part)
        assert torch.allclose(share.view(40, len(kv_heads), -1), whole[:, kv_heads], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [LaneAttention, TorchLaneAttention])
def test_writing_beyond_a_lane_is_refused(kind):
    config = shapes(heads=6, kv_heads=2, head_dim=32)
    side = Side(kind, config, torch.float32, reach=64)
    qkv = torch.randn(3, config.kv_heads * config.qkv_rows_per_kv)
    side([63, 0, 0], [1, 1, 1], qkv)
    for start in (64, 5000):
        with pytest.raises(ValueError, match="does not reach"):
            side([start, 0, 0], [1, 1, 1], qkv)
    side.pool.release(int(side.rows[2]), 1)
    with pytest.raises(ValueError, match="does not reach"):
        side([0, 0, 0], [1, 1, 1], qkv)


def test_bfloat16_and_odd_shapes_are_left_to_torch():
    def pool(dtype=torch.float32, block_tokens=16, **changes):
        return LanePool(shapes(**changes), blocks=4, block_tokens=block_tokens, dtype=dtype)

    assert supports(pool())
    assert not supports(pool(torch.bfloat16))
    assert not supports(pool(head_dim=24))
    assert not supports(pool(block_tokens=8))


def test_bfloat16_is_close_to_float32():
    config = shapes(heads=6, kv_heads=2, head_dim=32)
    qkv = torch.randn(60, config.kv_heads * config.qkv_rows_per_kv)
    exact = Side(LaneAttention, config, torch.float32)([0, 0, 0], [30, 29, 1], qkv)
    rough = Side(TorchLaneAttention, config, torch.bfloat16)([0, 0, 0], [30, 29, 1], qkv.bfloat16())
    assert torch.allclose(rough.float(), exact, rtol=0, atol=0.1)
