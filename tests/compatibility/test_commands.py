"""The command line understands what an earlier version understood."""

from __future__ import annotations

import shlex
import sys
from typing import Any, NoReturn

import pytest

from ddl.lab.cli import COMMANDS
from ddl.lab.cli.command import parse
from tests.compatibility.cases import FORMATS
from tests.compatibility.options import choices


def recorded(name: str) -> list[str]:
    return [
        line for path in FORMATS for line in (path / name).read_text(encoding="utf-8").splitlines()
    ]


class ParsedError(Exception):
    """Stops a command after its arguments were parsed."""


@pytest.mark.parametrize("line", recorded("commands.txt"), ids=lambda line: line[:12])
def test_every_option_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse_alone(*args: Any, **options: Any) -> NoReturn:
        parse(*args, **options)
        raise ParsedError

    name, *words = shlex.split(line)
    command = COMMANDS[name]
    monkeypatch.setattr(sys.modules[command.run.__module__], "parse", parse_alone)
    with pytest.raises(ParsedError):
        command.run(words)


def test_every_choice_is_there() -> None:
    lines = recorded("choices.txt")
    assert len(lines) > 30
    assert set(lines) - set(choices()) == set()
