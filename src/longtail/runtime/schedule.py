"""Which rollout and which training of a pipeline may begin, and with which weights each rollout samples.

With a staleness of S the samples of step k are drawn with the weights as they are after k - S steps, and those of the
first S steps with the weights at the start. That is exact, not a bound: it depends on the step alone, so that the same
is learnt whatever takes how long. Two rules make it so:

* The rollout of step k begins when that of step k - 1 has ended and step k - 1 - S is trained; at this moment the
  weights after k - S steps are there to be copied.
* The update of step j waits until the rollout of step j + S has its copy. For S up to 1 there is nothing to wait for; a
  larger S lets a slow training catch up during later rollouts.

S = 0 is the synchronous pipeline: rollout, training, rollout, with the newest weights.
"""

from __future__ import annotations


class Schedule:
    """Steps ``first`` to ``steps`` - 1 of a pipeline, with a staleness of ``staleness``.

    Invariants: one rollout at a time; trainings in the order of steps; an update waits for rollouts that have begun and
    not for others, so that turns (``runtime/turns.py``) cannot stop a pipeline for good.
    """

    def __init__(self, *, first: int, steps: int, staleness: int) -> None:
        self.first, self.steps, self.staleness = first, steps, staleness
        self.trained = first
        """Steps done."""
        self.begun = first
        """Rollouts begun."""
        self.sampling = False
        """Whether one is under way."""
        self.copied = first
        """After how many steps the weights are with which is sampled."""
        self._settled = first
        """Rollouts whose weights are settled."""

    def weights_of(self, step: int) -> int:
        """After how many steps the weights are with which ``step`` is sampled."""
        return max(self.first, step - self.staleness)

    @property
    def may_settle(self) -> bool:
        """Whether the next rollout can have its weights now; with them it may begin."""
        step = self.begun
        return self._settled == step < self.steps and not self.sampling and self.trained >= step - self.staleness

    def settle(self) -> bool:
        """The next rollout samples with the weights of this moment. Returns whether there is a copy that has
        to be refreshed."""
        weights = self.weights_of(self.begun)
        stale = weights != self.copied
        assert not stale or weights == self.trained, f"step {self.begun} would be sampled with other weights"
        self._settled, self.copied = self.begun + 1, weights
        return stale and self.staleness > 0

    def begin(self) -> int:
        """The rollout that was settled begins. Returns its step."""
        step, self.begun, self.sampling = self.begun, self.begun + 1, True
        return step

    def sampled(self) -> None:
        """The rollout under way has ended."""
        self.sampling = False

    @property
    def may_train(self) -> bool:
        """Whether the next step to be trained, once it is scored, may be."""
        step = self.trained
        return step == self.first or self.begun >= min(step + self.staleness, self.steps)

    @property
    def may_update(self) -> bool:
        """Whether the weights after :attr:`trained` steps may be given up."""
        step = self.trained
        return step == self.first or self._settled >= min(step + self.staleness + 1, self.steps)

    def updated(self) -> None:
        """The next step is trained."""
        self.trained += 1
