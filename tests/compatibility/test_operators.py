"""Programs that torch.export wrote with an earlier version still find their operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import ddl.functional  # noqa: F401  registers the operators, as a program's user has to
from tests.compatibility.cases import FORMATS
from tests.support.tolerances import assert_close

RECORDED = [
    line
    for path in FORMATS
    for line in (path / "operators.txt").read_text(encoding="utf-8").splitlines()
]
REWRITE = RECORDED[0]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda line: line.partition("(")[0])
def test_a_recorded_schema_is_served(recorded: str) -> None:
    then = torch._C.parse_schema(recorded)
    now = getattr(torch.ops.ddl, then.name.removeprefix("ddl::")).default._schema
    assert now.is_backward_compatible_with(then), f"recorded: {then}\nnow: {now}"


@pytest.mark.parametrize(
    ("before", "after", "compatible"),
    [
        ("float eps_k", "float eps_k, bool exact=False", True),
        ("float eps_k", "float eps_k, bool exact", False),
        ("float eps_k", "int eps_k", False),
        ("Tensor gate", "Tensor beta", False),
        (", Tensor gate", "", False),
        ("Tensor value, Tensor gate", "Tensor gate, Tensor value", False),
        (", Tensor stats", "", False),
        ("Tensor stats)", "Tensor stats, Tensor norms)", False),
    ],
)
def test_torch_tells_a_compatible_schema(before: str, after: str, compatible: bool) -> None:
    assert REWRITE.count(before) == 1
    then, now = (torch._C.parse_schema(s) for s in (REWRITE, REWRITE.replace(before, after)))
    assert now.is_backward_compatible_with(then) is compatible


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_a_recorded_program_runs(path: Path) -> None:
    program = torch.export.load(path / "program.pt2")
    targets = {str(node.target) for node in program.graph.nodes}
    assert targets >= {f"ddl.{name}.default" for name in ("rewrite", "read", "rewrite_read")}
    record = safetensors.torch.load_file(path / "program.safetensors")
    output = program.module()(record["x"])
    assert_close("output", output, record["output"], torch.float32)
