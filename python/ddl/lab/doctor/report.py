"""The report: facts by section, and problems, each with a way to fix it."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ddl.errors import first_line

Facts = dict[str, Any]
LONGEST = 400  # characters of another library's message


@dataclass(frozen=True)
class Problem:
    """Something wrong. error: what is needed does not work; warning: it works, but not well."""

    level: Literal["error", "warning"]
    what: str
    fix: str

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.fix}"


@dataclass
class Report:
    """Facts as JSON types, by section, and the problems in the order in which they were found."""

    sections: dict[str, Facts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything that is needed works."""
        return not any(problem.level == "error" for problem in self.problems)

    def error(self, what: str, fix: str) -> None:
        self.problems.append(Problem("error", what, fix))

    def warning(self, what: str, fix: str) -> None:
        self.problems.append(Problem("warning", what, fix))

    def examine(self, section: str, probe: Callable[[Report], Facts]) -> None:
        """Add a section. A probe that raises costs its section alone, and is a problem itself."""
        try:
            self.sections[section] = probe(self)
        except Exception as error:  # whatever is broken
            reason = text_of(error)
            self.sections[section] = {"failed": reason}
            self.error(
                f"`{section}` could not be examined ({type(error).__name__}: {reason})",
                "fix what it names, or open an issue with this report",
            )

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "ok": self.ok,
            "problems": [vars(problem) for problem in self.problems],
            **self.sections,
        }


def text_of(error: BaseException) -> str:
    """The first line of an error, shortened, and without the user's name in a path."""
    return tilde(first_line(error))[:LONGEST]


def tilde(path: object) -> str:
    """A path, or a text with paths, with ~ for the home directory: reports are made public."""
    text = str(path)
    try:
        home = str(Path.home())
    except RuntimeError:  # no home directory is known
        return text
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?=/|$|[\s:,;'\"])", "~", text)


def is_linux() -> bool:
    return platform.system() == "Linux"
