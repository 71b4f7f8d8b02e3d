"""kernels/README.md names the macros, functions and plans that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from op_cases import BF16, F32
from test_cuda_compile import _own_cache as _own_cache
from test_cuda_compile import compiled, macros, pytestmark, tensors, zeros

__all__ = ["pytestmark"]

FOLDER = Path(__file__).resolve().parents[1] / "kernels"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
KERNELS = "\n".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.cu*")))
ROWS = re.findall(r"^\| (`[A-Z][^|]*) \| ([^|]+) \|", README, flags=re.MULTILINE)
DECIDED = {name: by for names, by in ROWS for name in re.findall(r"`(\w+)`", names)}


@pytest.fixture
def case():
    """The worked case."""
    given = tensors(768, 4, "channel", BF16, F32)
    return {k.name: k for k in compiled("sm_90", "rewrite_read", **given, eps_k=0.1)}


def test_every_macro_of_a_compiled_kernel_is_listed(case):
    expansion = {"x": zeros(1, 1, 64, dtype=BF16), "weight": zeros(64, 2, 3, dtype=F32)}
    kernels = [*case.values(), *compiled("sm_90", "expand", **expansion, value_channels=2)]
    passed = {name for kernel in kernels for name in macros(kernel)}
    assert passed == {name for name, by in DECIDED.items() if by in ("specialisation", "plan")}


def test_the_plan_decides_the_last_macros(case):
    names = list(macros(case["rewrite_read_fwd"]))
    plan = [name for name, by in DECIDED.items() if by == "plan"]
    assert names[-len(plan) :] == plan


def test_the_other_macros_are_in_the_kernels():
    here = [name for name, by in DECIDED.items() if by not in ("specialisation", "plan")]
    values = re.findall(r"\d `([A-Z_]+)`", README)  # of READ, WINDOW and SUMS
    assert set(re.findall(r"#define (\w+)", KERNELS)) <= {*here, *values}
    assert all(re.search(rf"\b{name}\b", KERNELS) for name in here)


def test_the_worked_cases_plans_are_the_planners(case):
    shown = re.findall(r"^compiled (\w+) for sm_90: .*\n  (.*)$", README, flags=re.MULTILINE)
    assert len(shown) == 3
    for name, line in shown:
        assert case[name].macros.endswith(f" {line}"), name


def test_functions_of_the_pseudocode_exist():
    called = {
        name
        for text in re.findall(r"^```cuda\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
        for line in text.splitlines()
        for name in re.findall(r"(\w+)\(", line.partition("//")[0])
    }
    assert len(called) > 25
    assert {name for name in called if not re.search(rf"\b{name}\(", KERNELS)} == set()


def test_files_of_the_readme_exist():
    names = set(re.findall(r"`(\w+\.cuh?)`", README))
    assert names == {path.name for path in FOLDER.glob("*.cu*")}
    for path in re.findall(r"`((?:src|python|tests)/[\w./]+)`", README):
        assert (FOLDER.parent / path).exists(), path
