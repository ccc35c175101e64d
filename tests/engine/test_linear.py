from __future__ import annotations

import pytest
import torch

from longtail.engine import linear as fused
from longtail.engine import model as plain

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 700])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 49), (192, 96), (576, 200)])
def test_a_linear_layer_with_norm_bias_and_residual_equals_torch(dtype, rows, inputs, outputs):
    x, w = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    options = {
        "norm_K": 1 + 0.1 * random(inputs, dtype=dtype, seed=2),
        "eps": 1e-5,
        "residual_MN": random(rows, outputs, dtype=dtype, seed=3),
    }
    bias = random(outputs, dtype=dtype, seed=4)
    for b in (None, bias):
        assert torch.allclose(fused.linear(x, w), plain.linear(x, w), rtol=0, atol=TOLERANCE[dtype])
        ours, theirs = fused.linear(x, w, b, **options), plain.linear(x, w, b, **options)
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("block", "pairs"), [(64, 3), (16, 5), (4, 3)])
def test_gated_activation_equals_torch_for_every_block_size(dtype, block, pairs):
    x, w = random(11, 64, dtype=dtype), random(2 * block * pairs, 64, dtype=dtype, seed=1) / 8
    bias = random(2 * block * pairs, dtype=dtype, seed=2)
    for b in (None, bias):
        ours = fused.linear(x, w, b, norm_K=torch.ones(64, dtype=dtype), eps=1e-6, swiglu_block=block)
        theirs = plain.linear(x, w, b, norm_K=torch.ones(64, dtype=dtype), eps=1e-6, swiglu_block=block)
        assert torch.allclose(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=TOLERANCE[dtype])


def test_extreme_gates_saturate_without_nan():
    gate = torch.tensor([-1e6, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30] + [1.0] * 9)
    w = torch.zeros(32, 16)
    w[:16] = torch.diag(gate)
    w[16:] = torch.eye(16)
    ours = fused.linear(torch.ones(1, 16), w, swiglu_block=16)
    assert torch.allclose(ours[0], torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_gets_the_same_bits_alone_in_any_batch_and_on_any_threads(dtype):
    x, w = random(300, 576, dtype=dtype), random(500, 576, dtype=dtype, seed=1)
    norm = random(576, dtype=dtype, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = fused.linear(x, w, norm_K=norm, eps=1e-5)
        torch.set_num_threads(2)
        assert torch.equal(fused.linear(x, w, norm_K=norm, eps=1e-5), whole)
        for rows in (slice(0, 1), slice(7, 9), slice(100, 103), slice(13, 100)):
            assert torch.equal(fused.linear(x[rows], w, norm_K=norm, eps=1e-5), whole[rows])
    finally:
        torch.set_num_threads(before)


def test_a_column_view_of_the_weights_needs_no_copy():
    x, w = random(5, 64, dtype=torch.float64), random(30, 192, dtype=torch.float64, seed=1)
    view = w[:, 64:128]
    assert not view.is_contiguous()
    assert torch.allclose(fused.linear(x, view), x @ view.T, rtol=0, atol=1e-12)


def test_norm_alone_equals_torch():
    x, w = random(9, 96, dtype=torch.float64), random(96, dtype=torch.float64, seed=1)
    assert torch.allclose(fused.rms_norm(x, w, 1e-6), plain.rms_norm(x, w, 1e-6), rtol=0, atol=1e-13)


def test_kernels_serve_inference_on_whole_vectors_only():
    assert fused.serves(torch.zeros(1, 16), 32)
    assert not fused.serves(torch.zeros(1, 24))
    assert fused.serves(torch.zeros(1, 24, dtype=torch.float64))
    assert not fused.serves(torch.zeros(1, 16), 24)
    assert not fused.serves(torch.zeros(1, 32, dtype=torch.bfloat16))
    with torch.inference_mode(False):
        assert not fused.serves(torch.zeros(1, 16))
