"""The commands and the Python of docs/inside.md run, and what it says of them is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.lab import cli
from ddl.recording import QUANTITIES
from tests.support import ROOT

TEXT = (ROOT / "docs" / "inside.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names after its commands, with fewer steps, and its Python."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("docs"))
        for kind, text in BLOCKS:
            if kind == "bash":
                for line in text.replace("\\\n", " ").splitlines():
                    program, *arguments = shlex.split(line)
                    assert program == "ddl"
                    faster = {"1200": "2", "100": "2", "128": "64", "6": "2"}
                    short = [faster.get(argument, argument) for argument in arguments]
                    assert cli.main(short) == 0
            else:
                text = text.replace("8, 128, 4", "1, 64, 1")
                exec(compile(text, "docs/inside.md", "exec"), names)
        names["written"] = sorted(path.name for path in Path("runs/deep/inspect").iterdir())
    return names


def test_what_it_writes(names: dict[str, Any]) -> None:
    for file in names["written"]:
        assert f"`{file}`" in TEXT
    assert len(names["written"]) == 3


def test_what_it_records_and_edits(names: dict[str, Any]) -> None:
    recording, depth = names["recording"], 4
    tokens = names["idx"].shape
    assert recording.sublayers == [f"trunk.residuals.{i}" for i in range(depth)]
    assert recording.tokens("beta").shape == (depth, *tokens)
    assert names["costs"].shape == (depth, 5)
    assert torch.isfinite(names["costs"]).all()
    assert names["costs"].abs().max() > 0
    assert not torch.equal(names["changed"], names["model"](names["idx"]).logits)
    assert names["read"].sublayers == ["embedding", *recording.sublayers]


def test_its_figures(names: dict[str, Any]) -> None:
    k = torch.nn.functional.normalize(torch.randn(2, 20_000, 128), dim=-1)
    said = re.search(r"which is ([\d.]+) for d = 128", TEXT)
    assert said
    assert (k[0] * k[1]).sum(-1).abs().mean().item() == pytest.approx(float(said[1]), abs=0.002)
    assert "β, |k|, the eigenvalue, the readout p" in TEXT
    assert len(QUANTITIES) == 14
