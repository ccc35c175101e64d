from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.reference import tiny_config
from longtail.engine import layout

CONFIGS = {
    "gqa": tiny_config(),
    "mha": tiny_config(num_key_value_heads=4),
    "9 / 3 heads": tiny_config(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
    "explicit head_dim": tiny_config("qwen3", hidden_size=64, head_dim=32),
    "odd mlp": tiny_config(intermediate_size=75),
    "mlp blocks of 64": tiny_config(intermediate_size=192),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def weights(*shapes, dtype=torch.float32):
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tail", [(48,), ()], ids=["weights", "biases"])
def test_fusing_and_unfusing_gives_back_the_same_bits(config, dtype, tail):
    q, k, v = weights(
        (config.heads * config.head_dim, *tail),
        (config.kv_heads * config.head_dim, *tail),
        (config.kv_heads * config.head_dim, *tail),
        dtype=dtype,
    )
    qkv = layout.fuse_qkv(q, k, v, config)
    assert qkv.shape == (config.kv_heads * config.qkv_rows_per_kv, *tail)
    assert all(torch.equal(a, b) for a, b in zip(layout.unfuse_qkv(qkv, config), (q, k, v), strict=True))
    gate, up = weights((config.intermediate_size, *tail), (config.intermediate_size, *tail), dtype=dtype)
    gate_up = layout.fuse_gate_up(gate, up, config)
    assert all(torch.equal(a, b) for a, b in zip(layout.unfuse_gate_up(gate_up, config), (gate, up), strict=True))


def test_each_kv_head_is_followed_by_its_own_queries_in_the_fused_rows():
    config = tiny_config()  # 4 query heads of dimension 12 on 2 KV heads
    name = {"q": 0, "k": 100, "v": 200}
    q = name["q"] + torch.arange(4).repeat_interleave(12)
    k, v = (name[x] + torch.arange(2).repeat_interleave(12) for x in "kv")
    heads = layout.fuse_qkv(q, k, v, config).view(-1, 12)[:, 0].tolist()
    assert heads == [0, 1, 100, 200, 2, 3, 101, 201]


@every_config
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_shards_are_views_whose_partial_results_add_up_to_the_whole(config, data):
    D, Q, F = config.hidden_size, config.heads * config.head_dim, config.intermediate_size
    blocks = F // config.mlp_block
    qkv, o, gate_up, down = weights(
        (config.kv_heads * config.qkv_rows_per_kv, D), (D, Q), (2 * F, D), (D, F), dtype=torch.float64
    )
    head_cut = data.draw(st.integers(0, config.kv_heads))
    block_cut = data.draw(st.integers(0, blocks))
    heads = ((0, head_cut), (head_cut, config.kv_heads))
    mlp = ((0, block_cut), (block_cut, blocks))

    qkv_parts = [layout.qkv_view(qkv, *cut, config) for cut in heads]
    gate_up_parts = [layout.gate_up_view(gate_up, *cut, config) for cut in mlp]
    o_parts = [layout.o_view(o, *cut, config) for cut in heads]
    down_parts = [layout.down_view(down, *cut, config) for cut in mlp]
    whole = ((qkv, qkv_parts), (o, o_parts), (gate_up, gate_up_parts), (down, down_parts))
    for weight, parts in whole:
        storage = weight.untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == storage for part in parts)
        assert sum(part.numel() for part in parts) == weight.numel()
    assert all(part.is_contiguous() for part in qkv_parts + gate_up_parts)

    q, k, v = layout.unfuse_qkv(qkv, config)
    split = [layout.unfuse_qkv(part, config) for part in qkv_parts]
    assert torch.equal(torch.cat([part[0] for part in split]), q)
    assert torch.equal(torch.cat([part[1] for part in split]), k)
    assert torch.equal(torch.cat([part[2] for part in split]), v)

    x_TQ, x_TF = weights((3, Q), (3, F), dtype=torch.float64)
    cut = head_cut * config.heads_per_kv * config.head_dim
    torch.testing.assert_close(x_TQ[:, :cut] @ o_parts[0].T + x_TQ[:, cut:] @ o_parts[1].T, x_TQ @ o.T)
    cut = block_cut * config.mlp_block
    torch.testing.assert_close(x_TF[:, :cut] @ down_parts[0].T + x_TF[:, cut:] @ down_parts[1].T, x_TF @ down.T)


def test_writing_through_a_view_changes_the_fused_weight():
    config = tiny_config()
    qkv = torch.zeros(config.kv_heads * config.qkv_rows_per_kv, config.hidden_size)
    layout.split_qkv(qkv, config).k.fill_(1)
    layout.qkv_view(qkv, 1, 2, config).mul_(3)
    _, k, _ = layout.unfuse_qkv(qkv, config)
    assert k[:12].eq(1).all()
    assert k[12:].eq(3).all()
    assert qkv.sum() == k.sum()
