import pytest
import torch

from dense_training import random_groups, tiny_config, totals_of, trl_loss
from longtail.core.types import StepTotals
from longtail.rl.losses import grpo_terms, sample_weights

TRL_NAME = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}


def flat_loss(logprobs, samples, totals, *, loss, low, high, beta, reference):
    lengths = [len(s.tokens) for s in samples]
    repeats = torch.tensor(lengths)
    terms = grpo_terms(
        torch.cat(logprobs),
        torch.cat([torch.from_numpy(s.logprobs).double() for s in samples]),
        torch.tensor([s.advantage for s in samples], dtype=torch.float64).repeat_interleave(repeats),
        clip_low=low,
        clip_high=high,
        beta=beta,
        reference_logprobs_N=torch.cat(reference) if reference else None,
    )
    weights = torch.tensor(sample_weights(lengths, totals, loss), dtype=torch.float64)
    return (terms.loss_N * weights.repeat_interleave(repeats)).sum()


@pytest.mark.parametrize("loss", ["token", "sequence", "constant"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.28), (0.0, 0.0)])
def test_loss_and_gradients_equal_trls_formulas_on_the_same_tensors(loss, beta, low, high):
    (group,) = random_groups(tiny_config(), [[5, 1, 17, 9, 30]], seed=3)
    totals = totals_of([group])
    generator = torch.Generator().manual_seed(0)

    def around_old() -> list[torch.Tensor]:
        return [
            torch.from_numpy(s.logprobs).double()
            + 0.4 * torch.randn(len(s.tokens), generator=generator, dtype=torch.float64)
            for s in group.samples
        ]

    logprobs = [x.requires_grad_() for x in around_old()]
    reference = around_old() if beta else None
    ours = flat_loss(logprobs, group.samples, totals, loss=loss, low=low, high=high, beta=beta, reference=reference)
    theirs = trl_loss(
        logprobs,
        list(group.samples),
        loss_type=TRL_NAME[loss],
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        ref_logprobs=reference,
        max_completion_length=totals.max_tokens,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for mine, trl in zip(torch.autograd.grad(ours, logprobs), torch.autograd.grad(theirs, logprobs), strict=True):
        torch.testing.assert_close(mine, trl, rtol=1e-12, atol=1e-14)


def test_the_clip_stops_the_gradient_only_where_it_would_push_further_out():
    ratios = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    terms = grpo_terms(logprobs, torch.zeros(5, dtype=torch.float64), advantages, clip_low=0.2, clip_high=0.2)
    terms.loss_N.sum().backward()
    assert (logprobs.grad != 0).tolist() == [True, False, True, False, True]


def test_kl_is_zero_and_flat_where_policy_and_reference_agree():
    logprobs = torch.tensor([-1.0, -5.0], dtype=torch.float64, requires_grad=True)
    same = logprobs.detach()
    terms = grpo_terms(
        logprobs, same, torch.zeros_like(same), clip_low=0.2, clip_high=0.2, beta=0.5, reference_logprobs_N=same
    )
    assert terms.kl_N is not None
    assert torch.equal(terms.kl_N.detach(), torch.zeros_like(same))
    terms.loss_N.sum().backward()
    assert torch.equal(logprobs.grad, torch.zeros_like(same))


def test_a_penalty_without_reference_is_refused():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="reference"):
        grpo_terms(x, x, x, clip_low=0.2, clip_high=0.2, beta=0.1)


def test_weights_of_a_step_sum_to_one_for_token_and_sequence_losses():
    lengths = [3, 1, 8]
    totals = StepTotals(samples=3, tokens=12, max_tokens=10)
    for loss, total in (("token", 1.0), ("sequence", 1.0), ("constant", 12 / 30)):
        weights = sample_weights(lengths, totals, loss)
        assert sum(n * w for n, w in zip(lengths, weights, strict=True)) == pytest.approx(total)
