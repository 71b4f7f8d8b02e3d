"""A folder like nanoGPT's: model.py, train.py, sample.py and data with characters."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.support import ROOT

SUPPORT = ROOT / "tests" / "support"
TABLE = ["\n", *map(chr, range(32, 127))]
TEXT = "the cat sat on the mat. the dog ran to the cat.\n" * 40


def write_folder(folder: Path, last_line: str = "") -> Path:
    """Write the scripts, model.py with `last_line` at its end, and data/letters."""
    data = folder / "data" / "letters"
    data.mkdir(parents=True)
    model = (SUPPORT / "nanogpt_standin.py").read_text(encoding="utf-8")
    (folder / "model.py").write_text(f"{model}\n\n{last_line}\n", encoding="utf-8")
    for name in ("train", "sample"):
        text = (SUPPORT / f"nanogpt_{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    write_meta(data, TABLE)
    stoi = {character: token for token, character in enumerate(TABLE)}
    np.array([stoi[character] for character in TEXT], dtype=np.uint16).tofile(data / "train.bin")
    return folder


def write_meta(directory: Path, table: Sequence[str]) -> None:
    """Write nanoGPT's meta.pkl with these characters."""
    itos = dict(enumerate(table))
    stoi = {character: token for token, character in itos.items()}
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    (directory / "meta.pkl").write_bytes(pickle.dumps(meta))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Be in the folder, whose model.py is the module `model`."""
    before, arguments = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules.pop("model", None)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        sys.modules.pop("model", None)
        sys.argv = arguments


def run_script(folder: Path, name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run a script in the folder; return what it printed, and its names."""
    out = io.StringIO()
    with inside(folder), contextlib.redirect_stdout(out):
        sys.argv = [name, *arguments]
        names = runpy.run_path(str(folder / name), run_name="__main__")
    return out.getvalue(), names


@contextlib.contextmanager
def model_module(folder: Path) -> Iterator[ModuleType]:
    """The folder's model.py as the imported module `model`."""
    with inside(folder):
        yield importlib.import_module("model")
