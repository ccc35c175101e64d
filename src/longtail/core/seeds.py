"""Every random choice of a run is a pure function of (run seed, what it is for), never of time or order."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *path: str | int) -> int:
    """A uint64 for the thing that ``path`` names, e.g. ``derive_seed(0, "sums", "sample", step, prompt, sample)``.

    Stable across processes, machines and Python's hash seed.
    """
    text = repr((int(seed), *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
