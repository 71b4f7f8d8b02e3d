"""The import contracts in pyproject.toml hold for python/ddl, and fail for planted imports."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

LINT = "from importlinter.cli import lint_imports_command as lint; lint()"

AGAINST_AN_ARROW = {
    "plain": "from ddl.nn import Read\n",
    "lazy": "def late() -> None:\n    import ddl.lab.train.runs\n",
    "type checking": "import typing\nif typing.TYPE_CHECKING:\n    import ddl.lab.cli\n",
}


def lint(python: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the project's contracts over the package below `python`."""
    command = [sys.executable, "-c", LINT, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(python)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the package's Python files into a folder."""
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path / "python"


def test_the_arrows_hold(copied):
    done = lint(copied)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize("text", AGAINST_AN_ARROW.values(), ids=AGAINST_AN_ARROW)
def test_an_import_against_an_arrow_is_seen(copied, text):
    path = copied / "ddl" / "reference.py"
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")
    done = lint(copied)
    assert done.returncode != 0
    assert "ddl.reference is not allowed to import" in done.stdout


def through_the_front_door(python: Path) -> list[str]:
    """Imports of `from ddl import X` inside the package where X is no module: import-linter takes
    them for imports of the package itself, so that any room could be reached through it."""
    found = []
    for file in sorted((python / "ddl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "ddl":
                names = {alias.name for alias in node.names} - {"_native"}
                modules = {path.stem for path in (python / "ddl").iterdir()}
                found += [f"{file.name}: {name}" for name in sorted(names - modules)]
    return found


def test_no_module_imports_through_the_front_door(copied):
    assert through_the_front_door(copied) == []
    path = copied / "ddl" / "reference.py"
    path.write_text("from ddl import DeltaResidual, nn\n", encoding="utf-8")
    assert through_the_front_door(copied) == ["reference.py: DeltaResidual"]


def test_a_module_without_a_room_is_seen(copied):
    (copied / "ddl" / "corridor.py").write_text("", encoding="utf-8")
    done = lint(copied)
    assert done.returncode != 0
    assert "corridor" in done.stdout


def test_a_circle_inside_a_room_is_seen(copied):
    path = copied / "ddl" / "nn" / "linear.py"
    path.write_text(path.read_text(encoding="utf-8") + "import ddl.nn.stream\n", encoding="utf-8")
    done = lint(copied)
    assert done.returncode != 0
    assert "No circle inside a room BROKEN" in done.stdout
