"""Numbers of a run's records as arrays, which grow with the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddl.lab.train.json_lines import Record, number
from ddl.lab.train.plots import smooth

Array = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """A quantity over training: steps (n,), or places on another axis, and finite values (n,),
    float64."""

    steps: Array
    values: Array

    def at(self, axis: Callable[[Array], Array]) -> Curve:
        """The curve with its steps moved to their places on another axis."""
        return Curve(axis(self.steps), self.values)

    def smoothed(self) -> Curve:
        """The running mean, as in loss.png."""
        return Curve(self.steps, smooth(self.values))


EMPTY = Curve(np.zeros(0), np.zeros(0))


class Series(dict[str, Curve]):
    """The curve of every quantity that a run has recorded, by its name in metrics.jsonl."""

    def of(self, name: str) -> Curve:
        return self.get(name, EMPTY)


class Columns:
    """Steps and values by name, to which new records are appended."""

    def __init__(self) -> None:
        self._records: Sequence[Record] = ()
        self._read = 0
        self._columns: dict[str, tuple[list[int], list[float]]] = {}

    def update(self, records: Sequence[Record]) -> Series:
        """Read the records that are new in a list that grows; another list begins again."""
        if records is not self._records:
            self._records, self._read, self._columns = records, 0, {}
        for record in records[self._read :]:
            for name in record:
                value = number(record, name) if name != "step" else None
                if value is not None:
                    steps, values = self._columns.setdefault(name, ([], []))
                    steps.append(record["step"])
                    values.append(value)
        self._read = len(records)
        return Series({name: self._curve(*column) for name, column in self._columns.items()})

    @staticmethod
    def _curve(steps: list[int], values: list[float]) -> Curve:
        at = np.array(steps, dtype=np.float64)
        order = np.argsort(at, kind="stable")
        return Curve(at[order], np.array(values, dtype=np.float64)[order])
