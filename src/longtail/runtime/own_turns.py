"""One pipeline's side of the turns: an asynchronous one is at two stages at once, and has one turn for both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from longtail.runtime.turns import By, Turns

Stage = Literal["rollout", "train"]


class OwnTurns:
    """``turns`` as pipeline ``name`` sees them. Nothing begins inside of another pipeline's call: who has asked looks
    for :meth:`grants`, and is woken by ``wake`` when it got its turn later.

    Invariant: a pipeline that is due to let go of its turn begins nothing more before it has done so.
    """

    def __init__(self, turns: Turns, name: str, *, wake: Callable[[], None]) -> None:
        self._turns, self._name, self._wake = turns, name, wake
        self._asking = False
        self._reset()

    def _reset(self) -> None:
        self._wanted: list[Stage] = []
        self._asked: set[Stage] = set()
        self._granted: set[Stage] = set()
        self._at: set[Stage] = set()
        self._due = By.NOTHING
        """What has ended since it last let go; it does so when it is at nothing."""

    def ask(self, stage: Stage) -> None:
        """``stage`` could begin; asking again changes nothing."""
        if stage not in self._asked | self._granted | self._at and stage not in self._wanted:
            self._wanted.append(stage)
            self._pass_on()

    def grants(self, stage: Stage) -> bool:
        """Whether ``stage``, which was asked for, may begin now; if so, it counts as begun."""
        self._pass_on()  # what waited to let go first need not, if there are no turns any more
        if stage not in self._granted:
            return False
        self._granted.remove(stage)
        self._at.add(stage)
        return True

    def done(self, stage: Stage, *, step_over: bool = False) -> None:
        """``stage`` has ended, and with it the step if ``step_over``."""
        self._at.discard(stage)
        if self._due is not By.STEP:
            self._due = By.STEP if step_over else By.STAGE
        if not self._at and not self._granted:
            due, self._due = self._due, By.NOTHING
            self._turns.stage_done(self._name)
            if due is By.STEP:
                self._turns.step_done(self._name)
        self._pass_on()

    def forget(self) -> None:
        """Everything that was begun or asked for is dropped."""
        self._reset()
        self._turns.forget(self._name)

    def _pass_on(self) -> None:
        if (self._due, self._turns.by) in ((By.STAGE, By.STAGE), (By.STEP, By.STAGE), (By.STEP, By.STEP)):
            return
        wanted, self._wanted = self._wanted, []
        self._asked.update(wanted)
        self._asking = True
        for stage in wanted:
            self._turns.ask(self._name, partial(self._go, stage))
        self._asking = False

    def _go(self, stage: Stage) -> None:
        self._asked.remove(stage)
        self._granted.add(stage)
        if not self._asking:
            self._wake()
