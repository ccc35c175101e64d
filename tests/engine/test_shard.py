"""Which part of a model each rank of a group computes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import random_model, tiny_config
from longtail.core.errors import ModelError
from longtail.engine import layout
from longtail.engine.sampling import BLOCK
from longtail.engine.shard import CACHE_LINE, head_bounds, shard_of, shards_of

configs = st.builds(
    lambda kv, per, hidden, mlp, vocab: tiny_config(
        kv_heads=kv, heads=kv * per, hidden_size=hidden, intermediate_size=mlp, vocab_size=vocab
    ),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 700),
    st.integers(1, 5000),
)


def lengths(bounds):
    return [b - a for a, b in bounds]


def parts(config, size):
    shards = shards_of(config, size)
    return {name: [getattr(shard, name) for shard in shards] for name in ("heads", "hidden", "mlp", "vocab")}


def totals(config):
    return {
        "heads": config.kv_heads,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size // config.mlp_block,
        "vocab": config.vocab_size,
    }


@settings(max_examples=200, deadline=None)
@given(config=configs, data=st.data())
def test_the_parts_of_all_ranks_are_a_partition_as_even_as_their_units_allow(config, data):
    size = data.draw(st.integers(1, config.kv_heads))
    units = {"heads": 1, "hidden": CACHE_LINE, "mlp": 1, "vocab": BLOCK}
    for name, bounds in parts(config, size).items():
        total, unit = totals(config)[name], units[name]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == total
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert all(start % unit == 0 or start == total for start, _ in bounds)
        counts = [-(-length // unit) for length in lengths(bounds)]
        assert max(counts) - min(counts) <= 1
    assert min(lengths(parts(config, size)["heads"])) >= 1


@settings(max_examples=200, deadline=None)
@given(config=configs, data=st.data())
def test_twice_the_ranks_halve_each_part(config, data):
    size = data.draw(st.sampled_from([1, 2, 4]))
    if 2 * size > config.kv_heads:
        return
    wide = parts(config, 2 * size)
    for name, bounds in parts(config, size).items():
        merged = [(a[0], b[1]) for a, b in zip(wide[name][::2], wide[name][1::2], strict=True)]
        assert merged == bounds


def test_uneven_heads_give_the_first_half_the_larger_part():
    assert head_bounds(3, 2) == [(0, 2), (2, 3)]
    assert head_bounds(5, 3) == [(0, 2), (2, 4), (4, 5)]
    assert head_bounds(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert head_bounds(7, 4) == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_more_ranks_than_kv_heads_are_refused_with_what_is_possible():
    config = tiny_config(kv_heads=3, heads=9)
    with pytest.raises(ModelError, match=r"over 4 workers .* the model has 3: .* use a degree of 3 or less"):
        shard_of(config, 0, 4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_rows_of_a_shard_are_contiguous_views_that_follow_each_other(size):
    model = random_model(kv_heads=3, heads=9, hidden_size=80, intermediate_size=96)
    layer, shards = model.layers[0], shards_of(model.config, size)
    for name in ("qkv", "o", "gate_up", "down"):
        weight = getattr(layer, name)
        views = [weight[getattr(shard.rows(model.config), name)] for shard in shards]
        assert all(view.is_contiguous() for view in views)
        assert all(view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for view in views)
        assert torch.equal(torch.cat(views), weight)
    assert shards[-1].query_columns(model.config)[1] == model.config.heads * model.config.head_dim
    assert shards[-1].mlp_columns(model.config)[1] == model.config.intermediate_size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_projections_of_all_ranks_side_by_side_are_the_whole(size):
    config = tiny_config(kv_heads=3, heads=9, hidden_size=80, intermediate_size=96)
    generator = torch.Generator().manual_seed(0)

    def weights(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = weights(9 * 32, 80), weights(3 * 32, 80), weights(3 * 32, 80)
    gate, up = weights(96, 80), weights(96, 80)
    qkv, gate_up = layout.fuse_qkv(q, k, v, config), layout.fuse_gate_up(gate, up, config)
    rows = [shard.rows(config) for shard in shards_of(config, size)]

    def side_by_side(parts):
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    qkv_parts = side_by_side([layout.unfuse_qkv(qkv[r.qkv], config) for r in rows])
    gate_up_parts = side_by_side([layout.unfuse_gate_up(gate_up[r.gate_up], config) for r in rows])
    wholes = (q, k, v, gate, up)
    assert all(torch.equal(a, b) for a, b in zip(qkv_parts + gate_up_parts, wholes, strict=True))
