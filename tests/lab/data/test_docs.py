"""The commands and the Python of docs/data.md run in order, or are at least understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddl.lab import cli
from ddl.lab.cli.command import parse
from ddl.lab.config import PRESETS
from ddl.lab.data.shards import read_index
from tests.support import ROOT
from tests.support.prepare_cases import WORDS

PAGE = ROOT / "docs" / "data.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
SHORT = ["--steps", "2", "--device", "cpu"]  # options that the test adds to `ddl train`


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run the page; return the directory with its files, and its Python variables."""
    directory, left = tmp_path_factory.mktemp("page"), dict[str, Any]()
    texts = "\n\n".join(" ".join(WORDS[i : i + 9]) for i in range(0, 900, 9))
    (directory / "notes.txt").write_text(texts, encoding="utf-8")
    (directory / "more").mkdir()
    (directory / "more" / "a.txt").write_text(texts[::-1], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for number, (kind, text) in enumerate(BLOCKS):
            if kind == "json":
                assert "`notes.jsonl`" in TEXT
                (directory / "notes.jsonl").write_text(text, encoding="utf-8")
            elif kind == "python":
                exec(compile(text, f"{PAGE.name}, block {number}", "exec"), left)
            else:
                shell(text)
    return directory, left


def shell(block: str) -> None:
    """Run our commands; only parse the arguments of those that need a network."""
    first, *rest = block.splitlines()
    online = first.startswith("# network")
    for line in rest if online else [first, *rest]:
        program, *arguments = shlex.split(line)
        if program != "ddl":
            assert online
            assert program in ("pip", "hf")
        elif online:
            name, *options = arguments
            if name == "train":
                assert options[0] in PRESETS
                parse(cli.COMMANDS[name].options, options[1:])
            else:
                parse(cli.COMMANDS[name].options, options, positional=True)
        else:
            assert cli.main(arguments + (SHORT if arguments[0] == "train" else [])) == 0, line


def test_the_page(page: tuple[Path, dict[str, Any]]) -> None:
    directory, left = page
    assert {kind for kind, _ in BLOCKS} == {"bash", "json", "python"}
    for name in ("notes", "all"):
        index = read_index(directory / "data" / name)
        assert index.next is None
        assert index.documents("validation") > 0
    assert list((directory / "runs" / "notes" / "checkpoints").iterdir())
    assert (left["window"].dtype, left["begins"].dtype) == (np.uint8, np.bool_)
    assert left["window"].shape == left["begins"].shape == (32,)
    assert left["text"] in (directory / "notes.jsonl").read_text("utf-8")


def test_every_file_is_named(page: tuple[Path, dict[str, Any]]) -> None:
    for file in (page[0] / "data" / "notes").iterdir():
        assert f"`{file.name}`" in TEXT or file.suffix == ".starts"


def test_numbers_are_the_presets() -> None:
    for name in ("small", "medium"):
        config = PRESETS[name]
        sequences = config.batch_size * config.accumulation
        assert f"{config.steps:,} steps of {sequences} sequences" in TEXT
        assert f"{config.model.block_size:,} tokens" in TEXT
        assert f"{config.model.vocab_size:,}" in TEXT
        billions = config.steps * sequences * config.model.block_size / 1e9
        assert f"{billions:.0f} billion tokens" in TEXT
