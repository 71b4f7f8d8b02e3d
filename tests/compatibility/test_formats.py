"""The recorded formats are as they were written, and a next one can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.compatibility import cases
from tests.compatibility.write import write
from tests.support import ROOT


def test_the_first_format_is_there() -> None:
    assert cases.FOLDER / "0.1" in cases.FORMATS


@pytest.mark.parametrize("path", cases.FORMATS, ids=lambda path: path.name)
def test_a_recorded_format_never_changes(path: Path) -> None:
    assert cases.sums(path) == (path / cases.SUMS).read_text(encoding="utf-8")


def test_an_existing_format_is_not_overwritten() -> None:
    with pytest.raises(SystemExit, match="exists: a recorded format never changes"):
        write("0.1")


def test_a_next_format_has_every_file_and_no_path_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    folder = write("9.9")
    last, files = (
        {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
        for top in (cases.FORMATS[-1], folder)
    )
    # After 0.1 the weights of a run moved into its checkpoints.
    moved = {f"{name}/model.safetensors" for name in cases.RUNS}
    assert files >= last - moved
    for name in cases.RUNS:
        assert any(file.startswith(f"{name}/checkpoints/step-") for file in files)
    for file in files:
        content = (folder / file).read_bytes()
        for path in (ROOT, Path(torch.__file__).parent, tempfile.gettempdir()):
            assert os.fsencode(path) not in content, f"{file} has {path}"
