"""What the work of one pipeline costs here: a table that was measured, corrected by what its own spans say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longtail.core.events import Span
from longtail.costs.corrections import Corrections
from longtail.costs.interference import UNKNOWN, Interference
from longtail.costs.table import CostTable, TableKey
from longtail.runtime.plan import Tables


class KnownCosts:
    """``tables`` may have the table already, or come to have it from another pipeline; None: only :meth:`keep` has."""

    def __init__(self, tables: Tables | None) -> None:
        self._tables = tables
        self._table = tables.find() if tables is not None else None
        self._corrections = Corrections()
        self._corrected: CostTable | None = None
        """The table as it is now, as long as nothing more is known."""

    def look_again(self) -> bool:
        """Whether there is a table by now."""
        if self._table is None and self._tables is not None:
            self._table = self._tables.find()
        return self._table is not None

    def keep(self, table: CostTable) -> None:
        """One that was just measured."""
        self._table, self._corrected = table, None
        if self._tables is not None:
            self._tables.keep(table)

    def pairs(self, keys: Iterable[TableKey]) -> Interference:
        """What was measured of pairs of the models of ``keys``."""
        return self._tables.pairs(keys) if self._tables is not None else UNKNOWN

    def observe(self, span: Span) -> None:
        """A span of this pipeline's work that had its worker to itself."""
        if self._table is not None:
            self._corrections.observe(span, self._table)
            self._corrected = None

    def predicted_s(self, span: Span) -> float | None:
        """Busy seconds that the span should have had, as costs seem to be by now; None: not known."""
        return None if self._table is None else self._corrections.predicted_s(span, self._table)

    @property
    def table(self) -> CostTable | None:
        """As it was measured."""
        return self._table

    @property
    def corrected(self) -> CostTable | None:
        """None as long as nothing was measured. The same object until something is observed."""
        if self._corrected is None and self._table is not None:
            self._corrected = self._corrections.apply(self._table)
        return self._corrected

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores, as plain data."""
        return {"corrections": self._corrections.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> str | None:
        """Know what was known when :meth:`state_dict` was called; None: nothing yet. Returns why that cannot be, with
        nothing known then: a state of another version, or one that was edited by hand, is no reason to lose a run."""
        self._corrections, self._corrected = Corrections(), None
        try:
            if state is not None:
                self._corrections.load_state_dict(state["corrections"])
        except Exception as error:
            self._corrections = Corrections()
            return str(error)
        return None
