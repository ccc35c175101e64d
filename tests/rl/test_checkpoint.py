"""Checkpoints: resuming changes nothing that is learned, and nothing half-written is ever taken for one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from dense_training import random_groups, tiny_config, totals_of
from longtail.core.config import Algorithm, Train
from longtail.core.errors import CheckpointError
from longtail.engine.checkpoint import export_model, load_model
from longtail.engine.comm import ProcessGroupCommunicator
from longtail.engine.model import Decoder
from longtail.engine.random import random_model
from longtail.rl import checkpoint
from longtail.rl.packing import plan_micro_batches
from longtail.rl.trainer import MicroStats, Trainer

STEPS = 12
CONFIG = tiny_config()
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "longtail.rl.checkpoint"])


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model folder with config, weights and a file that exports take over."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(hf=HF)
    export_model(random_model(config, seed=0), folder, source=folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


HF = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def make_trainer(model: Decoder, *, rank: int = 0, world: int = 1) -> Trainer:
    train = Train(lr=1e-2, warmup_steps=4, schedule="cosine", weight_decay=0.01)
    return Trainer(model, algorithm=Algorithm(), train=train, temperature=1.0, steps=STEPS, rank=rank, world=world)


def together(world: int, work) -> list:
    """``work(rank, comm)`` on ``world`` threads that share a communicator; what each returned."""
    store, results, errors = HashStore(), [None] * world, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, ProcessGroupCommunicator(store, rank=rank, size=world))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return results


def train(root: Path, source: Path, *, until: int, world: int = 1, save: bool = True):
    """Continue from the newest checkpoint up to ``until`` steps; returns (trainers, log of (step, loss, lr))."""
    found = checkpoint.latest(root)
    folder = checkpoint.begin(root, until) if save else None

    def work(rank: int, comm) -> tuple[Trainer, list]:
        model = load_model(found.path or source, dtype=torch.float32)
        trainer = make_trainer(model, rank=rank, world=world)
        if found.path:
            checkpoint.load_optimizer(trainer, found.path)
        log = []
        for step in range(found.step, until):
            groups = random_groups(CONFIG, [[3, 9, 20], [7, 7]], seed=step)
            plan = dict(enumerate(plan_micro_batches(groups, workers=world, micro_tokens=30)))
            mine = {n: trainer.micro_batch(batch, totals_of(groups)) for n, batch in plan.items() if n % world == rank}
            update = trainer.update(comm, step=step)
            log.append((step, MicroStats.total(mine).loss, update.lr))
        if folder:
            checkpoint.write_optimizer_shard(folder, trainer)
            if rank == 0:
                checkpoint.write_weights(folder, model, source=source)
        return trainer, log

    results = together(world, work)
    if folder:
        checkpoint.publish(folder, {"step": until, "cursor": until * 5}, keep=2)
    return [t for t, _ in results], results[0][1]


@pytest.fixture(scope="module")
def uninterrupted(source, tmp_path_factory):
    (trainer,), log = train(tmp_path_factory.mktemp("none"), source, until=STEPS, save=False)
    return trainer, log


@pytest.mark.parametrize("stop", [1, 4, 7, 11])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(stop, source, tmp_path, uninterrupted):
    whole, whole_log = uninterrupted
    _, first = train(tmp_path, source, until=stop)
    (resumed,), second = train(tmp_path, source, until=STEPS)
    assert first + second == whole_log
    assert torch.equal(resumed.flat.weights, whole.flat.weights)
    assert resumed.optimizer.updates == whole.optimizer.updates == STEPS
    for name, tensor in whole.optimizer_state().tensors.items():
        assert torch.equal(resumed.optimizer_state().tensors[name], tensor)


def test_resuming_twice_without_a_step_changes_nothing(source, tmp_path, uninterrupted):
    train(tmp_path, source, until=4)
    train(tmp_path, source, until=4)
    train(tmp_path, source, until=4)
    (resumed,), _ = train(tmp_path, source, until=STEPS)
    assert torch.equal(resumed.flat.weights, uninterrupted[0].flat.weights)


def test_two_workers_then_one_then_three_learn_what_one_learns(source, tmp_path, uninterrupted):
    whole, whole_log = uninterrupted
    for until, world in ((4, 2), (8, 1), (STEPS, 3)):
        trainers, log = train(tmp_path, source, until=until, world=world)
        assert [lr for _, _, lr in log] == [lr for _, _, lr in whole_log[until - 4 : until]]
    for trainer in trainers:
        torch.testing.assert_close(trainer.flat.weights, whole.flat.weights, rtol=0, atol=1e-5)
        assert torch.equal(trainer.flat.weights, trainers[0].flat.weights)


@pytest.mark.parametrize(("written_by", "read_by"), [(2, 1), (1, 3), (3, 2), (2, 2)])
def test_optimizer_state_moves_exactly_between_any_numbers_of_workers(written_by, read_by, source, tmp_path):
    trainers, _ = train(tmp_path, source, until=2, world=written_by)
    path = checkpoint.latest(tmp_path).path
    for name in ("exp_avg", "exp_avg_sq"):
        whole = torch.cat([t.optimizer_state().tensors[name] for t in trainers])
        parts = []
        for rank in range(read_by):
            trainer = make_trainer(load_model(path, dtype=torch.float32), rank=rank, world=read_by)
            checkpoint.load_optimizer(trainer, path)
            assert trainer.optimizer.updates == 2
            parts.append(trainer.optimizer_state().tensors[name])
        assert torch.equal(torch.cat(parts), whole)


def test_bfloat16_resumes_from_its_float32_master_weights(source, tmp_path):
    trainer = make_trainer(load_model(source, dtype=torch.bfloat16))
    trainer.optimizer.master.add_(1e-6)
    folder = checkpoint.begin(tmp_path, 1)
    checkpoint.write_optimizer_shard(folder, trainer)
    checkpoint.write_weights(folder, trainer.model, source=source)
    path = checkpoint.publish(folder, {}, keep=1)
    again = make_trainer(load_model(path, dtype=torch.bfloat16))
    checkpoint.load_optimizer(again, path)
    assert torch.equal(again.optimizer.master, trainer.optimizer.master)


def test_a_checkpoint_is_a_model_folder_with_tokenizer_and_state(source, tmp_path):
    (trainer,), _ = train(tmp_path, source, until=1)
    found = checkpoint.latest(tmp_path)
    assert found.path == tmp_path / "step-000001"
    assert (found.step, found.state, found.skipped) == (1, {"step": 1, "cursor": 5}, ())
    assert (found.path / "tokenizer_config.json").exists()
    loaded = load_model(found.path, dtype=torch.float32)
    for p, q in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(p, q)


def save(root: Path, source: Path, step: int, *, keep: int = 10) -> Path:
    """A complete checkpoint of two workers."""
    folder = checkpoint.begin(root, step)
    for rank in range(2):
        trainer = make_trainer(load_model(source, dtype=torch.float32), rank=rank, world=2)
        checkpoint.write_optimizer_shard(folder, trainer)
    checkpoint.write_weights(folder, trainer.model, source=source)
    return checkpoint.publish(folder, {"step": step}, keep=keep)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {
    "zero-length optimizer": (
        lambda p: os.truncate(p / "optimizer-0-of-2.safetensors", 0),
        r"optimizer-0-of-2.* 0 bytes",
    ),
    "truncated weights": (lambda p: truncate(p / "model.safetensors"), "model.safetensors has"),
    "missing shard": (lambda p: (p / "optimizer-1-of-2.safetensors").unlink(), "lacks the file optimizer-1-of-2"),
    "missing config": (lambda p: (p / "config.json").unlink(), "lacks the file config.json"),
    "missing tokenizer": (lambda p: (p / "tokenizer_config.json").unlink(), "lacks the file tokenizer_config.json"),
    "no state": (lambda p: (p / "state.json").unlink(), "no state.json"),
    "empty state": (lambda p: os.truncate(p / "state.json", 0), "state.json"),
    "truncated state": (lambda p: os.truncate(p / "state.json", 40), "state.json"),
    "state of another version": (lambda p: (p / "state.json").write_text('{"schema": 99}'), "state.json"),
    "a folder where a file was": (
        lambda p: ((p / "config.json").unlink(), (p / "config.json").mkdir()),
        "config.json has",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(damage, source, tmp_path):
    harm, reason = DAMAGES[damage]
    good = save(tmp_path, source, 9)
    harm(save(tmp_path, source, 10))
    found = checkpoint.latest(tmp_path)
    assert (found.path, found.step) == (good, 9)
    (skipped,) = found.skipped
    assert skipped.startswith("step-000010")
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.read_state(tmp_path / "step-000010")


def test_links_partial_folders_and_other_files_are_no_checkpoints(source, tmp_path):
    good = save(tmp_path, source, 3)
    (tmp_path / "step-000011").symlink_to(tmp_path / "gone")
    (tmp_path / "step-000012").symlink_to(good)
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    (tmp_path / ".step-000013.partial").mkdir()
    (tmp_path / "step-000014").mkdir()
    (tmp_path / "step-000015").write_text("")
    (tmp_path / "notes").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found.path == good
    assert [s.split()[0] for s in found.skipped] == ["step-000015", "step-000014", "step-000012", "step-000011"]


def test_a_folder_without_checkpoints_or_no_folder_gives_none(tmp_path):
    for root in (tmp_path, tmp_path / "missing"):
        assert checkpoint.latest(root) == checkpoint.Found(None, 0, {})


def test_the_newest_two_are_kept_and_leftovers_removed(source, tmp_path):
    (tmp_path / ".step-000001.partial").mkdir(parents=True)
    (tmp_path / ".step-000001.partial" / "model.safetensors").write_text("half")
    for step in (2, 4, 6, 8):
        save(tmp_path, source, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000008"]


def test_keeping_counts_complete_checkpoints_only(source, tmp_path):
    save(tmp_path, source, 1, keep=2)
    broken = save(tmp_path, source, 2, keep=2)
    (broken / "config.json").unlink()
    save(tmp_path, source, 3, keep=2)
    assert (tmp_path / "step-000001").exists()
    assert checkpoint.latest(tmp_path).step == 3
    save(tmp_path, source, 4, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_the_last_complete_one_survives_though_newer_ones_break(source, tmp_path):
    save(tmp_path, source, 1, keep=1)
    folder = checkpoint.begin(tmp_path, 2)
    with pytest.raises(CheckpointError, match="lacks"):
        checkpoint.publish(folder, {}, keep=1)
    assert checkpoint.latest(tmp_path).step == 1


def test_the_same_step_can_be_saved_again(source, tmp_path):
    save(tmp_path, source, 5)
    (tmp_path / "step-000005" / "config.json").unlink()
    save(tmp_path, source, 5)
    assert checkpoint.latest(tmp_path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_optimizer_files_of_different_states_are_refused(source, tmp_path):
    path = save(tmp_path, source, 1)
    trainer = make_trainer(load_model(source, dtype=torch.float32), rank=1, world=2)
    trainer.optimizer.updates = 7
    checkpoint.write_optimizer_shard(path, trainer)
    with pytest.raises(CheckpointError, match="2 different states"):
        checkpoint.read_optimizer(path, start=0, end=10)


def _save_forever(root: str, source: str, started) -> None:
    torch.set_num_threads(1)
    step = checkpoint.latest(Path(root)).step
    started.set()
    while True:
        step += 1
        save(Path(root), Path(source), step, keep=2)


def test_kill_9_while_saving_leaves_the_newest_complete_one(source, tmp_path):
    steps = []
    for delay in (0.05, 0.13, 0.02, 0.31, 0.21):
        started = PROCESSES.Event()
        process = PROCESSES.Process(target=_save_forever, args=(str(tmp_path), str(source), started))
        process.start()
        assert started.wait(240)
        process.join(delay)  # a random moment of its endless saving
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = checkpoint.latest(tmp_path)
        assert found.skipped == ()
        assert found.step == found.state.get("step", 0)
        if found.path:
            load_model(found.path, dtype=torch.float32)
            assert checkpoint.read_optimizer(found.path, start=0, end=100).updates == 0
        steps.append(found.step)
    assert steps == sorted(steps)
    save(tmp_path, source, steps[-1] + 1, keep=2)
    assert not list(tmp_path.glob(".step-*"))


def _save_with_little_room(root: str, source: str, bytes_allowed: int, answer) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, bytes_allowed))
    try:
        save(Path(root), Path(source), 2)
        answer.put("saved")
    except CheckpointError as error:
        answer.put(str(error))


@pytest.mark.parametrize("bytes_allowed", [0, 20_000])
def test_a_full_disk_is_one_sentence_and_publishes_nothing(bytes_allowed, source, tmp_path):
    save(tmp_path, source, 1)
    answer = PROCESSES.SimpleQueue()
    process = PROCESSES.Process(target=_save_with_little_room, args=(str(tmp_path), str(source), bytes_allowed, answer))
    process.start()
    process.join(60)
    message = answer.get()
    assert message.startswith("cannot write")
    assert os.strerror(errno.EFBIG) in message
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.skipped) == (1, ())
    save(tmp_path, source, 2)
    assert checkpoint.latest(tmp_path).step == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*file"):
        checkpoint.begin(tmp_path / "file" / "checkpoints", 1)


def test_the_state_is_plain_json(source, tmp_path):
    path = save(tmp_path, source, 1)
    record = json.loads((path / "state.json").read_text())
    assert record["state"] == {"step": 1}
    assert record["files"]["optimizer-1-of-2.safetensors"] == (path / "optimizer-1-of-2.safetensors").stat().st_size
