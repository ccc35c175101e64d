from __future__ import annotations

import pytest
import torch

from engine.reference import tiny_config
from longtail.engine import layout
from longtail.engine.shard import shard_of

CONFIGS = {
    "gqa": tiny_config(),
    "mha": tiny_config(num_key_value_heads=4),
    "9 / 3 heads": tiny_config(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
    "explicit head_dim": tiny_config("qwen3", hidden_size=64, head_dim=32),
    "odd mlp": tiny_config(intermediate_size=75),
    "mlp blocks of 64": tiny_config(intermediate_size=192),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


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


def test_writing_through_the_rows_of_a_rank_changes_the_fused_weight():
    config = tiny_config()
    qkv = torch.zeros(config.kv_heads * config.qkv_rows_per_kv, config.hidden_size)
    layout.split_qkv(qkv, config).k.fill_(1)
    qkv[shard_of(config, 1, 2).rows(config).qkv].mul_(3)
    _, k, _ = layout.unfuse_qkv(qkv, config)
    assert k[:12].eq(1).all()
    assert k[12:].eq(3).all()
    assert qkv.sum() == k.sum()
