"""Failures: the errors that end training later than they happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """The first error of each kind; it is raised after the checkpoint that it leads to.

    alone: whether there is a single process. output: of a tracker or of the terminal. It stops
    training after the step, as a signal does. own: of this process alone. If it is one of several,
    all of them end together; a single process raises it at once.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.output: Exception | None = None
        self.own: Exception | None = None

    @contextmanager
    def of_output(self) -> Iterator[None]:
        """Keep an error of the block, in which a tracker or the terminal gets something."""
        try:
            yield
        except Exception as error:
            self.output = self.output or error

    @contextmanager
    def of_this_process(self) -> Iterator[None]:
        """Keep an error of the block, which one of several processes runs without the others."""
        try:
            yield
        except Exception as error:
            if self.alone:
                raise
            self.own = self.own or error

    def raise_own(self) -> None:
        if self.own is not None:
            raise self.own

    def raise_any(self) -> None:
        self.raise_own()
        if self.output is not None:
            raise self.output
