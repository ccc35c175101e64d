"""What a cost table is found by: the machine with its engine, the architecture, and how the workers are set up.

Weights do not matter for time, so all checkpoints of an architecture share a table. The number of workers does, since
they share the memory's bandwidth; and so do the compiled kernels, whose sources are part of the machine here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
from pathlib import Path

import torch

from longtail.costs.table import TableKey
from longtail.engine import jit
from longtail.engine.checkpoint import count_parameters
from longtail.engine.config import ModelConfig

LOCAL = "local"
"""The communicator of a single worker."""
_NOT_OF_TIME = ("hf", "max_context", "rms_eps", "rope_parameters")
"""Of a :class:`ModelConfig`: what a step does not take longer for."""


def table_key(
    config: ModelConfig, *, dtype: str, processor: str, workers: int, threads: int, communicator: str
) -> TableKey:
    """The key of ``workers`` workers of ``threads`` threads each.

    ``processor`` is the GPU's name, or :func:`cpu_name`; ``communicator`` what carries activations between the workers
    (``shm``, ``gloo`` or ``nccl``), of no meaning for a single one. The same on the driver and on every worker.
    """
    return TableKey(
        machine=f"{processor}, {workers} worker{'s' * (workers > 1)}, kernels {_kernels()}",
        model=model_name(config),
        dtype=dtype,
        communicator=communicator if workers > 1 else LOCAL,
        threads=threads,
    )


def model_name(config: ModelConfig) -> str:
    """``llama 134.5M 5f2e90aa``: family, parameters, and a digest of all sizes."""
    sizes = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_OF_TIME}
    digest = hashlib.blake2b(json.dumps(sizes, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.family} {count_parameters(config) / 1e6:.1f}M {digest}"


@functools.cache
def cpu_name() -> str:
    """``AMD EPYC, 2 cores``: the processor's name, and how many cores the machine (not this process) has."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
        name = fields.get("model name", name)
    except OSError:
        pass
    return f"{' '.join(name.split())}, {os.cpu_count() or 1} cores"


def processor_of(device: torch.device) -> str:
    """What a worker on ``device`` computes with."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@functools.cache
def _kernels() -> str:
    digest = hashlib.blake2b(digest_size=4)
    for name in jit.SOURCES:
        digest.update(Path(jit.__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()
