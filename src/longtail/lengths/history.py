"""What is remembered of each prompt: how its earlier responses compared with all others of their time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Recalled(NamedTuple):
    """Of n prompts: how many responses the memory is worth (``samples``, 0: none), and their mean normal score."""

    samples: np.ndarray
    average: np.ndarray


class History:
    """Bounded memory, 32 bytes a prompt; when full, the prompts that were seen longest ago are dropped.

    Normal scores are relative to the lengths of their own step, so a policy whose responses all grow does not make the
    memory wrong. Invariant: keys are distinct and sorted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = np.zeros(0, np.int64)
        self.seen = np.zeros(0, np.int64)
        """The step of a prompt's last visit."""
        self.known = np.zeros((len(Recalled._fields), 0))
        """The fields of :class:`Recalled`, one row each."""

    def __len__(self) -> int:
        return len(self.keys)

    def recall(self, keys: np.ndarray) -> Recalled:
        if len(self.keys) == 0:
            return Recalled(*np.zeros((len(self.known), len(keys))))
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return Recalled(*np.where(self.keys[at] == keys, self.known[:, at], 0.0))

    def store(self, keys: np.ndarray, known: Recalled, step: int) -> None:
        """Replace what is known of ``keys`` (distinct)."""
        rest = ~np.isin(self.keys, keys, assume_unique=True)
        self.keys = np.concatenate([self.keys[rest], keys])
        self.seen = np.concatenate([self.seen[rest], np.full(len(keys), step, np.int64)])
        self.known = np.concatenate([self.known[:, rest], np.stack(known)], axis=1)
        self.trim()

    def trim(self) -> None:
        """Restore the invariant: at most ``capacity`` prompts, sorted by key."""
        order = np.argsort(self.keys)
        if len(order) > self.capacity:
            # By age, then by key, so that what is dropped does not depend on anything else.
            newest = np.lexsort((self.keys, -self.seen))[: self.capacity]
            order = newest[np.argsort(self.keys[newest])]
        self.keys, self.seen, self.known = self.keys[order], self.seen[order], self.known[:, order]
