"""The trainer against the ordinary dense computation, in float64 unless the test is about float32."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from dense_training import random_groups, sequence_logprobs, tiny_config, totals_of, trl_loss
from engine.thread_ranks import World
from longtail.core.config import Algorithm, Train
from longtail.core.errors import TrainingError
from longtail.core.types import TrainGroup, TrainSample
from longtail.engine.checkpoint import export_model, hf_slots
from longtail.engine.comm import LocalCommunicator, ProcessGroupCommunicator
from longtail.engine.config import parse_hf_config
from longtail.engine.model import Decoder
from longtail.engine.random import random_model
from longtail.rl.attention_padded import PaddedAttend
from longtail.rl.packing import MicroBatch, plan_micro_batches
from longtail.rl.trainer import MicroStats, Trainer, UpdateStats

LENGTHS = [[3, 1, 9, 40], [7, 7], [1, 1, 1], [60], [2, 33, 5]]
TRL_NAME = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def make_trainer(
    model: Decoder, *, rank=0, world=1, temperature=1.0, steps=10, reference=None, train=None, **algorithm
):
    return Trainer(
        model,
        algorithm=Algorithm(**algorithm),
        train=train or Train(lr=1e-2),
        temperature=temperature,
        steps=steps,
        rank=rank,
        world=world,
        reference=reference,
    )


def run(trainer: Trainer, groups: list[TrainGroup], *, micro_tokens: int = 10_000) -> MicroStats:
    plan = plan_micro_batches(groups, workers=trainer.world, micro_tokens=micro_tokens)
    return compute(trainer, groups, dict(list(enumerate(plan))[trainer.rank :: trainer.world]))


def compute(trainer: Trainer, groups: list[TrainGroup], batches: dict[int, MicroBatch]) -> MicroStats:
    """Numbered micro-batches of the step, in the order of the dictionary."""
    totals = totals_of(groups)
    return MicroStats.total({number: trainer.micro_batch(batch, totals) for number, batch in batches.items()})


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: trainer.flat.grad(p).clone() for name, p in trainer.model.named_parameters()}


def dense_gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def dense_loss(model, reference, groups, *, loss="token", low=0.2, high=0.2, beta=0.0, temperature=1.0) -> torch.Tensor:
    def logprobs(of: Decoder) -> list[torch.Tensor]:
        return [sequence_logprobs(of, g.prompt, s.tokens, temperature) for g in groups for s in g.samples]

    with torch.no_grad():
        reference_logprobs = logprobs(reference) if beta else None
    return trl_loss(
        logprobs(model),
        [s for g in groups for s in g.samples],
        loss_type=TRL_NAME[loss],
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        ref_logprobs=reference_logprobs,
        max_completion_length=totals_of(groups).max_tokens,
    )


def on_policy(model: Decoder, groups: list[TrainGroup], temperature: float) -> list[TrainGroup]:
    """The same groups with the log-probs that an exact sampler would have reported."""

    def exact(group: TrainGroup, s: TrainSample) -> TrainSample:
        with torch.no_grad():
            logprobs = sequence_logprobs(model, group.prompt, s.tokens, temperature).numpy()
        return TrainSample(tokens=s.tokens, logprobs=logprobs.astype(np.float32), advantage=s.advantage)

    return [TrainGroup(prompt=g.prompt, samples=tuple(exact(g, s) for s in g.samples)) for g in groups]


@pytest.mark.parametrize(
    ("loss", "beta", "low", "high", "changes"),
    [
        ("token", 0.0, 0.2, 0.2, {}),
        ("token", 0.05, 0.1, 0.3, {"tied": False, "heads": 4, "kv_heads": 4}),
        ("sequence", 0.0, 0.2, 0.28, {"qk_norm": True, "head_dim": 16}),
        ("sequence", 0.05, 0.2, 0.2, {"qkv_bias": True, "heads": 5, "kv_heads": 1}),
        ("constant", 0.0, 0.2, 0.2, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        ("constant", 0.05, 0.0, 0.1, {"tied": False}),
    ],
)
def test_loss_and_gradients_equal_those_of_a_dense_model_with_trls_formulas(loss, beta, low, high, changes):
    config = tiny_config(**changes)
    model, dense, reference = (random_model(config, seed=s, dtype=torch.float64, std=0.3) for s in (0, 0, 1))
    groups = random_groups(config, LENGTHS)
    trainer = make_trainer(
        model, reference=reference, loss=loss, beta=beta, clip_low=low, clip_high=high, temperature=0.7
    )
    stats = run(trainer, groups, micro_tokens=100)
    theirs = dense_loss(dense, reference, groups, loss=loss, beta=beta, low=low, high=high, temperature=0.7)
    theirs.backward()
    assert stats.loss == pytest.approx(theirs.item(), rel=1e-9)
    expected = dense_gradients(dense)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name], **EXACT, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "heads": 4, "kv_heads": 4}, {"heads": 4, "kv_heads": 1}])
def test_the_attention_of_other_devices_gives_the_same_loss_and_gradients(changes, monkeypatch):
    config = tiny_config(**changes)
    groups = random_groups(config, LENGTHS)
    fused, padded = (make_trainer(random_model(config, seed=0, dtype=torch.float64, std=0.3)) for _ in range(2))
    ours = run(fused, groups)
    monkeypatch.setattr("longtail.rl.trainer.GroupAttend", PaddedAttend)
    theirs = run(padded, groups)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
    torch.testing.assert_close(fused.flat.grads, padded.flat.grads, **EXACT)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_equal_those_of_a_padded_batch_in_transformers(family, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model(
        family,
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6 if family != "qwen3" else 8,
        intermediate_size=40,
        max_position_embeddings=256,
        tie_word_embeddings=family == "qwen2",
    )
    config = parse_hf_config(
        {**hf_config.to_dict(), "architectures": [f"{family.capitalize()}ForCausalLM"]}, where="test"
    )
    model = random_model(config, seed=0, dtype=torch.float64, std=0.3)
    export_model(model, tmp_path / "hf", source=tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64, attn_implementation="eager")
    groups = random_groups(config, [[3, 1, 9], [20, 2]])
    rows = [(g, s) for g in groups for s in g.samples]
    width = max(len(g.prompt) + len(s.tokens) for g, s in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, (g, s) in enumerate(rows):
        n = len(g.prompt) + len(s.tokens)
        ids[i, :n] = torch.from_numpy(np.concatenate([g.prompt, s.tokens]).astype(np.int64))
        mask[i, :n] = 1
    all_logprobs = hf(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    taken = all_logprobs.gather(2, ids[:, 1:, None])[..., 0]
    logprobs = [taken[i, len(g.prompt) - 1 : len(g.prompt) + len(s.tokens) - 1] for i, (g, s) in enumerate(rows)]
    loss = trl_loss(
        logprobs,
        [s for _, s in rows],
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        ref_logprobs=None,
        max_completion_length=64,
    )
    loss.backward()
    trainer = make_trainer(model)
    stats = run(trainer, groups)
    # transformers computes norms and softmax in float32 even in a float64 model.
    assert stats.loss == pytest.approx(loss.item(), rel=1e-6)
    ours = Decoder(config, dtype=torch.float64)
    with torch.no_grad():
        for p, trained in zip(ours.parameters(), model.parameters(), strict=True):
            p.copy_(trainer.flat.grad(trained))
    slots = hf_slots(ours)
    for name, parameter in hf.named_parameters():
        torch.testing.assert_close(slots[name].view.reshape(parameter.shape), parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_tokens", [1, 20, 64, 100])
def test_gradients_do_not_depend_on_the_size_of_micro_batches(micro_tokens):
    config = tiny_config()
    groups = random_groups(config, LENGTHS)
    whole, parts = (make_trainer(random_model(config, seed=0, dtype=torch.float64)) for _ in range(2))
    one, many = run(whole, groups), run(parts, groups, micro_tokens=micro_tokens)
    torch.testing.assert_close(parts.flat.grads, whole.flat.grads, **EXACT)
    assert (many.samples, many.tokens) == (one.samples, one.tokens) == (13, 170)
    for name in ("loss", "entropy", "gap_sum", "gap_max", "clipped_low", "clipped_high"):
        assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-9)


def test_gradients_do_not_depend_on_which_samples_share_a_prompt_pass():
    config = tiny_config()
    groups = random_groups(config, LENGTHS)
    single = [TrainGroup(prompt=g.prompt, samples=(s,)) for g in groups for s in g.samples]
    together, apart = (make_trainer(random_model(config, seed=0, dtype=torch.float64)) for _ in range(2))
    run(together, groups)
    run(apart, single)
    torch.testing.assert_close(apart.flat.grads, together.flat.grads, **EXACT)


@pytest.mark.parametrize("chunk", [61 * 16, 61 * 40])
def test_chunks_and_tiles_of_the_vocabulary_head_change_nothing(chunk, monkeypatch):
    config = tiny_config()
    groups = random_groups(config, LENGTHS)
    whole, chunked = (make_trainer(random_model(config, seed=0, dtype=torch.float64)) for _ in range(2))
    one = run(whole, groups)
    monkeypatch.setattr("longtail.rl.logprobs.CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr("longtail.rl.logprobs.TILE_ELEMENTS", 61 * 7)
    many = run(chunked, groups)
    torch.testing.assert_close(chunked.flat.grads, whole.flat.grads, **EXACT)
    assert many.entropy == pytest.approx(one.entropy, rel=1e-12)


def train_in_threads(world: int, model_seed: int, groups: list[TrainGroup], *, steps: int, **kwargs) -> list[Trainer]:
    """``world`` ranks as threads of this process, each with a model and a process group of its own."""
    store, config = HashStore(), tiny_config()
    trainers: list[Trainer | None] = [None] * world
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            comm = ProcessGroupCommunicator(store, rank=rank, size=world)
            trainer = make_trainer(
                random_model(config, seed=model_seed, dtype=torch.float64), rank=rank, world=world, **kwargs
            )
            for step in range(steps):
                run(trainer, groups, micro_tokens=80)
                trainer.update(comm, step=step)
            trainers[rank] = trainer
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return [t for t in trainers if t is not None]


Dealt = tuple[torch.Tensor, list[MicroStats], list[UpdateStats]]
"""Weights, and the statistics of each step."""


def train_dealt(deal: list[list[list[int]]], groups: list[TrainGroup], **kwargs) -> Dealt:
    """Some steps in float32, in which rank r computes the micro-batches ``deal[step][r]``, in this order."""
    world = len(deal[0])
    ranks, config = World(world), tiny_config(head_dim=16)
    plan = plan_micro_batches(groups, workers=2, micro_tokens=40)

    def work(rank: int) -> tuple[Trainer, list[dict[int, MicroStats]], list[UpdateStats]]:
        trainer = make_trainer(random_model(config, seed=0, std=0.3), rank=rank, world=world, **kwargs)
        stats, updates = [], []
        for step, dealt in enumerate(deal):
            stats.append({n: trainer.micro_batch(plan[n], totals_of(groups)) for n in dealt[rank]})
            updates.append(trainer.update(ranks.comm(range(world), rank), step=step))
        return trainer, stats, updates

    done = ranks.run(work)
    assert all(torch.equal(trainer.flat.weights, done[0][0].flat.weights) for trainer, _, _ in done)
    by_number = [{n: s for _, stats, _ in done for n, s in stats[step].items()} for step in range(len(deal))]
    return done[0][0].flat.weights, [MicroStats.total(stats) for stats in by_number], done[0][2]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_whoever_computes_a_micro_batch_and_when_the_same_bits_are_learned(world, seed):
    groups = random_groups(tiny_config(), LENGTHS)
    count = len(plan_micro_batches(groups, workers=2, micro_tokens=40))
    assert count >= 5
    train = Train(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)
    in_order = [[list(range(count))]] * 3
    weights, stats, updates = train_dealt(in_order, groups, train=train)
    draw, deal = random.Random(seed), []
    for _ in range(3):
        dealt: list[list[int]] = [[] for _ in range(world)]
        for number in draw.sample(range(count), count):
            draw.choice(dealt).append(number)
        deal.append(dealt)
    other_weights, other_stats, other_updates = train_dealt(deal, groups, train=train)
    assert torch.equal(other_weights, weights)
    assert (other_stats, other_updates) == (stats, updates)
    assert updates[0].grad_norm > 0.05


def test_a_pause_after_every_layer_changes_no_bit_and_tells_how_far_the_work_is():
    groups = random_groups(tiny_config(), LENGTHS)
    batch, totals = plan_micro_batches(groups, workers=1, micro_tokens=10_000)[0], totals_of(groups)
    plain, paused = (make_trainer(random_model(tiny_config(), seed=1, std=0.3)) for _ in range(2))
    shares: list[float] = []
    stats = paused.micro_batch(batch, totals, pause=shares.append)
    assert stats == plain.micro_batch(batch, totals)
    assert torch.equal(paused.flat.grads, plain.flat.grads)
    assert shares == sorted(shares)
    assert len(shares) == 2 * paused.model.config.layers + 1, "and one after the head"
    assert shares[-1] == pytest.approx(1.0)


def test_a_micro_batch_that_is_given_up_half_way_leaves_only_gradients_to_forget():
    groups = random_groups(tiny_config(), LENGTHS)
    batch, totals = plan_micro_batches(groups, workers=1, micro_tokens=10_000)[0], totals_of(groups)
    plain, given_up = (make_trainer(random_model(tiny_config(), seed=1, std=0.3)) for _ in range(2))

    def pause(share):
        if share > 0.7:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        given_up.micro_batch(batch, totals, pause=pause)
    given_up.zero_gradients()
    given_up.micro_batch(batch, totals)
    plain.micro_batch(batch, totals)
    assert torch.equal(given_up.flat.grads, plain.flat.grads)


def test_statistics_are_added_in_the_order_of_micro_batches():
    parts = {n: MicroStats(samples=1, tokens=2, loss=loss, gap_max=loss) for n, loss in enumerate([1e16, 1.0, -1e16])}
    shuffled = {n: parts[n] for n in (2, 0, 1)}
    assert MicroStats.total(shuffled) == MicroStats.total(parts)
    assert MicroStats.total(parts) == MicroStats(samples=3, tokens=6, loss=1e16 + 1.0 - 1e16, gap_max=1e16)
    assert MicroStats.total({}) == MicroStats()


@pytest.mark.parametrize("world", [2, 3])
def test_weights_after_three_steps_do_not_depend_on_the_number_of_workers(world):
    groups = random_groups(tiny_config(), LENGTHS)
    train = Train(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)
    (alone,) = train_in_threads(1, 0, groups, steps=3, train=train)
    many = train_in_threads(world, 0, groups, steps=3, train=train)
    for trainer in many:
        assert torch.equal(trainer.flat.weights, many[0].flat.weights)
        # Other micro-batches are rounded to the grid elsewhere; AdamW enlarges that by lr / eps in tiny gradients.
        torch.testing.assert_close(trainer.flat.weights, alone.flat.weights, rtol=1e-6, atol=1e-7)


def test_workers_without_samples_take_part_in_the_update():
    groups = random_groups(tiny_config(), [[12]])
    (alone,) = train_in_threads(1, 0, groups, steps=2)
    for trainer in train_in_threads(3, 0, groups, steps=2):
        assert torch.equal(trainer.flat.weights, alone.flat.weights)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7, 0.0])
def test_before_the_first_update_ratios_are_one_and_the_reference_kl_is_zero(temperature):
    config = tiny_config()
    model, reference = (random_model(config, seed=0, dtype=torch.float64, std=0.3) for _ in range(2))
    groups = on_policy(model, random_groups(config, LENGTHS), temperature)
    trainer = make_trainer(
        model, temperature=temperature, reference=reference, beta=0.05, clip_low=1e-4, clip_high=1e-4
    )
    stats = run(trainer, groups)
    assert stats.gap_max < 1e-6  # float32 storage of the sampler's log-probs
    assert stats.clipped_low == stats.clipped_high == 0
    assert abs(stats.kl) < 1e-12


def test_float32_training_agrees_with_float64_to_single_precision():
    config = tiny_config(head_dim=16)
    groups = random_groups(config, LENGTHS)
    single = make_trainer(random_model(config, seed=0, dtype=torch.float32))
    double = make_trainer(random_model(config, seed=0, dtype=torch.float64))
    assert run(single, groups).loss == pytest.approx(run(double, groups).loss, rel=1e-4)
    error = torch.linalg.vector_norm(single.flat.grads - double.flat.grads)
    assert error / torch.linalg.vector_norm(double.flat.grads) < 1e-4


def test_bfloat16_weights_train_on_float32_gradients_and_master_weights():
    config = tiny_config(head_dim=16)
    groups = random_groups(config, LENGTHS)
    wide = {"clip_low": 0.9, "clip_high": 9.0}  # no token may fall on the other side of a clip
    half = make_trainer(random_model(config, seed=0, dtype=torch.bfloat16), train=Train(lr=1e-5), **wide)
    exact = make_trainer(random_model(config, seed=0, dtype=torch.bfloat16).double(), **wide)
    run(half, groups)
    run(exact, groups)
    assert half.flat.grads.dtype == torch.float64
    error = torch.linalg.vector_norm(half.flat.grads - exact.flat.grads)
    assert error / torch.linalg.vector_norm(exact.flat.grads) < 0.05
    before = half.optimizer.master.clone()
    half.update(LocalCommunicator(), step=0)
    assert not torch.equal(half.optimizer.master, before)  # too small a step to see in bfloat16, kept here
    assert torch.equal(half.flat.weights, half.optimizer.master.bfloat16())


def test_equal_rewards_leave_the_weights_exactly_as_they_were():
    config = tiny_config()
    groups = [
        TrainGroup(
            prompt=g.prompt,
            samples=tuple(TrainSample(tokens=s.tokens, logprobs=s.logprobs, advantage=0.0) for s in g.samples),
        )
        for g in random_groups(config, LENGTHS)
    ]
    trainer = make_trainer(random_model(config, seed=0))
    before = trainer.flat.weights.clone()
    assert run(trainer, groups).loss == 0.0
    assert trainer.update(LocalCommunicator(), step=0).grad_norm == 0.0
    assert torch.equal(trainer.flat.weights, before)


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_changes_no_weight_on_any_rank(world):
    store, config = HashStore(), tiny_config()
    outcomes: list[bool] = []

    def work(rank: int) -> None:
        comm = ProcessGroupCommunicator(store, rank=rank, size=world)
        trainer = make_trainer(random_model(config, seed=0), rank=rank, world=world)
        before = trainer.flat.weights.clone()
        if rank == world - 1:
            trainer.flat.grads[5] = float("nan")
        with pytest.raises(TrainingError, match="step 7"):
            trainer.update(comm, step=7)
        outcomes.append(torch.equal(trainer.flat.weights, before) and not trainer.flat.grads.any())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * world


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_broken_log_probability_stops_the_update(dtype):
    config = tiny_config()
    groups = random_groups(config, LENGTHS)
    groups[1].samples[0].logprobs[3] = np.nan
    trainer = make_trainer(random_model(config, seed=0, dtype=dtype))
    before = trainer.flat.weights.clone()
    run(trainer, groups, micro_tokens=40)
    with pytest.raises(TrainingError, match="not finite"):
        trainer.update(LocalCommunicator(), step=0)
    assert torch.equal(trainer.flat.weights, before)


def test_long_contexts_that_span_many_kernel_blocks_are_exact():
    config = tiny_config(layers=1, max_context=2048)
    groups = random_groups(config, [[700, 520, 3, 690], [5]], prompts=[600, 530])
    model, dense = (random_model(config, seed=0, dtype=torch.float64, std=0.3) for _ in range(2))
    trainer = make_trainer(model)
    stats = run(trainer, groups)
    theirs = dense_loss(dense, None, groups)
    theirs.backward()
    assert stats.loss == pytest.approx(theirs.item(), rel=1e-9)
    torch.testing.assert_close(trainer.flat.grad(model.layers[0].qkv), dense.layers[0].qkv.grad, **EXACT)


def test_completions_of_one_token_train_on_the_prompt_pass_alone():
    config = tiny_config()
    groups = random_groups(config, [[1, 1, 1, 1], [1, 1]])
    model, dense = (random_model(config, seed=0, dtype=torch.float64) for _ in range(2))
    trainer = make_trainer(model)
    stats = run(trainer, groups)
    theirs = dense_loss(dense, None, groups)
    theirs.backward()
    assert stats.loss == pytest.approx(theirs.item(), rel=1e-9)
    expected = dense_gradients(dense)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


def test_the_sampler_sees_an_update_in_the_module_it_holds():
    config = tiny_config()
    model = random_model(config, seed=0)
    embed, weights = model.embed, model.layers[0].qkv
    trainer = make_trainer(model)
    assert model.head is model.embed is embed
    before = weights.detach().clone()
    run(trainer, random_groups(config, LENGTHS))
    trainer.update(LocalCommunicator(), step=0)
    assert model.layers[0].qkv is weights
    assert not torch.equal(weights, before)


def test_an_empty_micro_batch_is_nothing():
    trainer = make_trainer(random_model(tiny_config(), seed=0))
    assert trainer.micro_batch(MicroBatch(()), totals_of(random_groups(tiny_config(), [[2]]))) == MicroStats()
    assert not trainer.flat.grads.any()


def test_learning_lowers_the_loss_of_repeated_samples():
    config = tiny_config()
    model = random_model(config, seed=0)
    groups = on_policy(model, random_groups(config, LENGTHS), 1.0)
    trainer = make_trainer(model, train=Train(lr=3e-3), clip_low=0.9, clip_high=5.0)
    losses = []
    for step in range(8):
        losses.append(run(trainer, groups).loss)
        trainer.update(LocalCommunicator(), step=step)
    assert losses[-1] < losses[0] - 0.1
