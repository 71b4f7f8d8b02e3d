"""docs/bench.md is true: its commands parse, and it names every part and section."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any, NoReturn

import pytest

from ddl.lab import cli
from ddl.lab.cli.command import parse
from ddl.lab.config import PARTS
from ddl.lab.doctor.examine import SECTIONS
from tests.support import ROOT

TEXT = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
ROWS = re.findall(r"^\| `?([\w ]+)`? \|", TEXT, flags=re.MULTILINE)


class ParsedError(Exception):
    """Stops a command after its arguments were parsed."""


@pytest.mark.parametrize("line", COMMANDS)
def test_its_commands_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse_alone(*args: Any, **options: Any) -> NoReturn:
        parse(*args, **options)
        raise ParsedError

    program, name, *words = shlex.split(line)
    assert program == "ddl"
    command = cli.COMMANDS[name]
    monkeypatch.setattr(sys.modules[command.run.__module__], "parse", parse_alone)
    with pytest.raises(ParsedError):
        command.run(words)


def test_it_names_every_part_and_section() -> None:
    assert {"ddl doctor", "ddl bench"} <= {" ".join(line.split()[:2]) for line in COMMANDS}
    assert set(PARTS) <= set(ROWS)
    assert {name.replace("_", " ") for name in SECTIONS} <= set(ROWS)
