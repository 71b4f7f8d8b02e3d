"""docs/exploring.md is true: its commands parse, its keys and states exist, its screen is shown."""

from __future__ import annotations

import re
import shlex
from typing import get_args

import tyro

from ddl.lab.config import ExploreConfig
from ddl.lab.explore.curves import QUANTITIES
from ddl.lab.explore.pages import PAGES
from ddl.lab.explore.screen import Explorer
from ddl.lab.explore.watching import State
from tests.support import ROOT

PAGE = (ROOT / "docs" / "exploring.md").read_text(encoding="utf-8")


def table(heading: str) -> dict[str, str]:
    """The rows of the table whose first column has this heading."""
    rows = PAGE.split(f"| {heading} | |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    return {row.split("|")[1].strip(): row.split("|")[2].strip() for row in rows}


def test_its_commands_parse() -> None:
    commands = re.findall(r"^ddl explore (.+)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        arguments = shlex.split(command)
        positional = (tyro.conf.PositionalRequiredArgs,)
        assert tyro.cli(ExploreConfig, args=arguments, config=positional).runs


def test_its_tables_are_complete() -> None:
    assert list(table("tab")) == ["Runs", *(page.title for page in PAGES)]
    assert set(table("state")) == set(get_args(State))
    named = set(re.findall(r"`([^`]+)`", " ".join(table("key"))))
    keys = {key for b in Explorer.BINDINGS for key in b.key.split(",")}  # type: ignore[union-attr]
    keys = {"?" if key == "question_mark" else key for key in keys}
    assert keys - named == {"2", "3", "4", "5", "ctrl+c"}
    assert named <= keys


def test_its_screen_has_the_lines_of_the_program() -> None:
    screen = PAGE.split("```text\n")[1].split("\n```")[0].split("\n")
    assert len(screen) == 24
    tabs = "  ".join(f"{i} {name}" for i, name in enumerate(["Runs", *table("tab")][1:], start=1))
    assert screen[0].strip() == tabs
    views = "  ".join(quantity.title for quantity in QUANTITIES)
    assert screen[2].replace("[", " ").replace("]", " ").strip() == views
    assert screen[-1].strip().endswith("l Log  s Smooth  ? Help  q Quit")
