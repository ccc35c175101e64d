import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_training import tiny_config
from longtail.core.config import Train
from longtail.core.errors import CheckpointError
from longtail.engine.random import random_model
from longtail.rl.exact import BLOCK
from longtail.rl.lr import learning_rate
from longtail.rl.optim import ALIGN, FlatModel, ShardedAdamW, shard_bounds

TRAIN = Train(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def grown(model: FlatModel, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model.grads.copy_(torch.randn(model.total, generator=generator))


def test_the_flat_model_keeps_values_shapes_and_ties():
    config = tiny_config(qkv_bias=True)
    model, untouched = random_model(config, seed=0), random_model(config, seed=0)
    flat = FlatModel(model)
    assert model.head is model.embed
    start = flat.weights.data_ptr()
    for p, original in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(p, original)
        assert start <= p.data_ptr() < start + flat.weights.nbytes
        assert (p.data_ptr() - start) % (ALIGN * p.element_size()) == 0
        assert flat.grad(p).shape == p.shape
    assert sum(p.numel() for p in model.parameters()) <= flat.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_backward_passes_add_to_the_sum_and_leave_no_gradient_behind(dtype):
    layer = torch.nn.Linear(7, 5, dtype=dtype)
    flat = FlatModel(layer)
    x = torch.randint(-3, 4, (3, 7)).to(dtype)
    for factor in (1, 2):
        (factor * layer(x)).sum().backward()
        assert layer.weight.grad is None
        assert layer.bias.grad is None
    flat.add_grad(layer.bias, torch.full((5,), 0.5))
    assert torch.equal(flat.grad(layer.weight), 3 * x.double().sum(0).expand(5, 7))
    assert torch.equal(flat.grad(layer.bias), torch.full((5,), 9.5, dtype=torch.float64))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shards_together_equal_torch_adamw_on_the_whole_model(world):
    config = tiny_config(qkv_bias=True, tied=False)
    plain, sharded = (
        random_model(config, seed=0, dtype=torch.float64),
        random_model(config, seed=0, dtype=torch.float64),
    )
    flat = FlatModel(sharded)
    shards = [ShardedAdamW(flat, TRAIN, start=a, end=b) for a, b in shard_bounds(flat.total, world)]
    named = list(plain.named_parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": TRAIN.weight_decay},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=TRAIN.betas,
        eps=TRAIN.eps,
    )
    for step in range(5):
        lr = 10.0 ** -(2 + step / 4)
        grown(flat, step)
        for p, mine in zip(plain.parameters(), sharded.parameters(), strict=True):
            p.grad = flat.grad(mine).clone()
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for shard in shards:
            shard.step(lr)
    for (name, p), mine in zip(named, sharded.parameters(), strict=True):
        torch.testing.assert_close(mine, p, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")


def test_one_float32_shard_is_bit_for_bit_torchs_fused_adamw():
    flat = FlatModel(random_model(tiny_config(), seed=0))
    weight = torch.nn.Parameter(flat.weights[: flat.decayed].clone())
    adamw = torch.optim.AdamW([weight], betas=TRAIN.betas, eps=TRAIN.eps, weight_decay=TRAIN.weight_decay, fused=True)
    shard = ShardedAdamW(flat, TRAIN, start=0, end=flat.total)
    for step in range(3):
        grown(flat, step)
        weight.grad = flat.grads[: flat.decayed].float()
        adamw.param_groups[0]["lr"] = 3e-3
        adamw.step()
        shard.step(3e-3)
    assert torch.equal(flat.weights[: flat.decayed], weight.detach())


@settings(deadline=None)
@given(st.integers(1, 100_000), st.integers(1, 17))
def test_shard_bounds_cover_every_element_once(total, world):
    bounds = shard_bounds(total, world)
    assert len(bounds) == world
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert all(start % BLOCK == 0 or start == total for start, _ in bounds)


def test_state_of_another_slice_or_model_is_refused():
    flat = FlatModel(random_model(tiny_config(), seed=0))
    other = FlatModel(random_model(tiny_config(layers=3), seed=0))
    first, second = shard_bounds(flat.total, 2)
    shard = ShardedAdamW(flat, TRAIN, start=first[0], end=first[1])
    with pytest.raises(CheckpointError, match="needs"):
        shard.load(ShardedAdamW(flat, TRAIN, start=second[0], end=second[1]).state())
    with pytest.raises(CheckpointError, match="layout"):
        shard.load(ShardedAdamW(other, TRAIN, start=first[0], end=first[1]).state())


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_rises_over_warm_up_and_never_reaches_zero(schedule):
    train = Train(lr=2e-3, warmup_steps=4, schedule=schedule)
    rates = [learning_rate(train, step=step, steps=12) for step in range(12)]
    assert rates[:4] == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3])
    assert rates[4] == pytest.approx(2e-3)
    assert min(rates) > 0
    if schedule == "constant":
        assert rates[11] == 2e-3
    elif schedule == "linear":
        assert rates[11] == pytest.approx(2e-3 / 8)
    else:
        assert rates[11] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 7 / 8)))


def test_warm_up_may_last_the_whole_run():
    assert learning_rate(Train(lr=1.0, warmup_steps=5, schedule="cosine"), step=4, steps=5) == 1.0
