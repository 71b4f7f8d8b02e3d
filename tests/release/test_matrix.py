"""The support matrix: docs/support.md, pyproject.toml and `make check-wheel` agree."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import version

import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.support import ROOT

SUPPORT = (ROOT / "docs" / "support.md").read_text("utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.fixture(scope="module")
def check_wheel():
    path = ROOT / "release" / "check_wheel.py"
    spec = importlib.util.spec_from_file_location("check_wheel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def last_column(row: str) -> list[str]:
    """Return the versions in the last column of a row of the matrix."""
    line = re.search(rf"^\| {row} \|.*\|(.*)\|$", SUPPORT, re.MULTILINE)[1]
    return re.findall(r"\d+\.\d+", line)


def libraries() -> dict[str, tuple[str, str]]:
    """Return the least and the newest version of every library on the page."""
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \|", SUPPORT, re.MULTILINE)
    return {name.lower(): (least, newest) for name, least, newest in rows}


def by_number(versions: set[str]) -> list[str]:
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def test_the_pairs_are_those_of_the_page(check_wheel):
    torches = {torch.rpartition(".")[0] for torch, _ in check_wheel.PAIRS}
    assert by_number(torches) == last_column("torch")
    assert by_number({python for _, python in check_wheel.PAIRS}) == last_column("Python")


def test_the_least_versions_are_tested(check_wheel):
    torch = re.search(r'dependencies = \["torch>=(.+)"\]', PYPROJECT)[1]
    python = re.search(r'requires-python = ">=(.+)"', PYPROJECT)[1]
    assert torch == last_column("torch")[0]
    assert python == last_column("Python")[0]
    development = re.search(r"torch==([\d.]+)", PYPROJECT)[1]
    assert development in {pair[0] for pair in check_wheel.PAIRS}


def test_the_libraries_of_the_page_are_declared_and_pinned(check_wheel):
    files = ("requirements-dev.lock", "Makefile")  # `make test-newest` has a newer transformers
    pins = "".join((ROOT / name).read_text("utf-8") for name in files)
    assert libraries().keys() == {"transformers", "accelerate", "lm-eval", "peft"}
    for name, (least, newest) in libraries().items():
        assert f'"{name}>={least}"' in PYPROJECT
        pinned = re.findall(rf"^(?:NEWEST := )?{name}==([\d.]+)", pins, re.MULTILINE)
        assert by_number(set(pinned))[-1].startswith(f"{newest}." if name != "lm-eval" else newest)
    declared = {re.split(">=", requirement)[0] for requirement in check_wheel.least_versions()}
    assert declared == {"transformers", "accelerate", "safetensors", "tokenizers", "lm-eval"}


def test_the_pinned_transformers_loads_adapters_of_the_pinned_peft():
    assert Version(version("peft")) >= Version(MIN_PEFT_VERSION)


def test_classifiers_name_every_python(check_wheel):
    named = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert named == [f"3.{minor}" for minor in range(10, 10 + len(named))]
    assert set(last_column("Python")) <= set(named)
    assert named[-1] == last_column("Python")[-1]


def test_the_readmes_way_from_text_to_scores_is_found(check_wheel):
    assert [command[1] for command in check_wheel.readme_commands()] == [
        "train", "sample", "export", "eval",
    ]  # fmt: skip
    assert all((ROOT / "tests" / room).is_dir() for room in check_wheel.NOT_OF_THE_WHEEL)
