"""One pipeline on one worker: its model, engine, trainer, and the work that waits for quanta."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from longtail.cluster.messages import (
    Generate,
    OpenPipeline,
    Report,
    Sampled,
    Save,
    Saved,
    TrainBatches,
    Trained,
    Update,
    Updated,
)
from longtail.core.comm import Communicator
from longtail.core.types import SubStage
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.model import DTYPES
from longtail.engine.tokenizer import Tokenizer
from longtail.rl import checkpoint
from longtail.rl.trainer import MicroStats, Trainer


@dataclass(frozen=True)
class Quantum:
    """What one quantum was and what came of it."""

    substage: SubStage
    step: int
    tokens: int
    batch: int
    reports: list[Report]


class Tenant:
    """A pipeline's state on one worker; every method runs in the worker's loop, between or as quanta.

    ``used_s`` is the compute time that the pipeline has had here, by which the loop shares the worker fairly.
    """

    def __init__(self, command: OpenPipeline, *, worker: int, world: int, device: torch.device) -> None:
        config, dtype = command.config, DTYPES[command.config.dtype]
        self.name, self.attempt, self.worker = command.pipeline, command.attempt, worker
        self.used_s = 0.0
        self.step = 0
        model = load_model(Path(command.weights), dtype=dtype, device=device)
        reference = load_model(Path(command.reference), dtype=dtype, device=device) if command.reference else None
        self.tokenizer = Tokenizer.load(Path(command.weights))
        self.trainer = Trainer(
            model,
            algorithm=config.algorithm,
            train=config.train,
            temperature=config.rollout.temperature,
            steps=config.steps,
            rank=worker,
            world=world,
            reference=reference,
        )
        if command.optimizer:
            checkpoint.load_optimizer(self.trainer, Path(command.optimizer))
        self.model = model
        self.lanes = LanePool(model.config, blocks=command.kv_blocks, dtype=dtype, device=device)
        self._rollout = config.rollout
        self._started: dict[str, float] = {}
        self._batches: deque = deque()
        self._training: TrainBatches | None = None
        self._stats = MicroStats()
        self._make_engine()

    def _make_engine(self) -> None:
        self.engine = Engine(
            self.model,
            self.lanes,
            detokenize=self.tokenizer.decode,
            max_running=self._rollout.max_running,
            chunk_tokens=self._rollout.chunk_tokens,
        )

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def runnable(self) -> bool:
        return self.engine.has_work or self._training is not None

    @property
    def next_substage(self) -> SubStage:
        return self.engine.next_substage() if self.engine.has_work else SubStage.TRAIN

    def generate(self, command: Generate) -> None:
        self.step = command.step
        now = time.time()
        for request in command.requests:
            self._started[request.request_id] = now
            self.engine.add(request)

    def train(self, command: TrainBatches) -> None:
        self.step = command.step
        self._training = command
        self._batches.extend(command.batches)
        self._stats = MicroStats()

    def drop_work(self, attempt: int) -> None:
        """Back to idle with the same weights; gradients of a half-done step are forgotten."""
        self.attempt = attempt
        for request_id in self._started:
            self.engine.abort(request_id)
        self._started.clear()
        self._batches.clear()
        self._training = None
        self.trainer.zero_gradients()

    def run_quantum(self) -> Quantum:
        """One decode step, one prefill chunk or one training micro-batch."""
        return self._sample() if self.engine.has_work else self._train()

    def _sample(self) -> Quantum:
        result = self.engine.step()
        reports: list[Report] = []
        if result.completions:
            reports.append(
                Sampled(
                    worker=self.worker,
                    pipeline=self.name,
                    attempt=self.attempt,
                    step=self.step,
                    completions=tuple(result.completions),
                    started=tuple(self._started[c.request_id] for c in result.completions),
                    ended=time.time(),
                )
            )
        if not self.engine.has_work:
            self._started.clear()
        return Quantum(result.substage, self.step, result.tokens, result.batch, reports)

    def _train(self) -> Quantum:
        assert self._training is not None
        tokens = batch = 0
        if self._batches:
            micro = self._batches.popleft()
            stats = self.trainer.micro_batch(micro, self._training.totals)
            self._stats += stats
            tokens, batch = micro.tokens, micro.samples
        reports: list[Report] = []
        if not self._batches:
            reports.append(
                Trained(
                    worker=self.worker,
                    pipeline=self.name,
                    attempt=self.attempt,
                    step=self.step,
                    stats=self._stats,
                )
            )
            self._training = None
        return Quantum(SubStage.TRAIN, self.step, tokens, batch, reports)

    def update(self, command: Update, comm: Communicator) -> Quantum:
        """Reduce gradients with the other members of the lease and apply the optimizer. Raises ``PeerLost``."""
        stats = self.trainer.update(comm, step=command.step)
        report = Updated(
            worker=self.worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=command.step,
            lease_id=command.lease.lease_id,
            stats=stats,
        )
        return Quantum(SubStage.REDUCE, command.step, 0, 0, [report])

    def save(self, command: Save) -> Quantum:
        """Write this worker's files of a checkpoint. Raises ``CheckpointError``."""
        folder = Path(command.folder)
        written = checkpoint.write_optimizer_shard(folder, self.trainer)
        if self.worker == 0:
            written += checkpoint.write_weights(folder, self.model, source=Path(command.source))
        report = Saved(worker=self.worker, pipeline=self.name, attempt=self.attempt, step=command.step, bytes=written)
        return Quantum(SubStage.CHECKPOINT, command.step, 0, 0, [report])
