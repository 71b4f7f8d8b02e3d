"""Calls of native code in a process without torch, whose place stand_in_torch.c takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import _native, reference
from tests.support.tolerances import assert_close

HERE = Path(__file__).parent


def build(folder: Path, version: str) -> Path:
    """Build the stand-in for a version of torch, such as "2.13"; without gcc skip the test."""
    if sys.platform != "linux" or not shutil.which("gcc"):
        pytest.skip("the stand-in for torch is a library for Linux that gcc builds")
    library = folder / f"libtorch_cpu-{version}.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    macro = f"-DTORCH={version.replace('.', '')}"
    subprocess.run(["gcc", *options, macro, str(HERE / "stand_in_torch.c")], check=True)
    return library


def call(
    library: Path,
    operator: str,
    arguments: dict[str, Any],
    *,
    emulator: Sequence[str] = (),
    **variables: str,
) -> dict[str, Any]:
    """Call an operator, with float32 tensors, and return what without_torch.py prints.

    emulator: the beginning of the command, for another processor. variables: of the environment.
    """
    given = {name: _described(value) for name, value in arguments.items()}
    script = [sys.executable, str(HERE / "without_torch.py"), _native.__file__, str(library)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDL_")}
    run = subprocess.run(
        [*emulator, *script],
        input=json.dumps({"operator": operator, "arguments": given}),
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, f"exit status {run.returncode}: {run.stderr}"
    return json.loads(run.stdout)


def assert_right(
    library: Path, arguments: dict[str, Any], emulator: Sequence[str] = ()
) -> dict[str, Any]:
    """Call `rewrite_read`, compare its outputs with the reference, and return all that it did."""
    done = call(library, "rewrite_read", arguments | {"saves": True}, emulator=emulator)
    assert done["refusal"] == ""
    expected = reference.rewrite_read(**arguments)
    outputs = {"state": "new_state", "context": "context", "value": "new_value", "gate": "new_gate"}
    for field, name in outputs.items():
        numbers = getattr(expected, field)
        actual = torch.tensor(done["outputs"][name]).view_as(numbers)
        assert_close(name, actual, numbers, torch.float32)
    absent = [name for name, numbers in done["outputs"].items() if numbers is None]
    assert absent == ["compressed", "new_pending"]
    return done


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return {
        "shape": value.shape,
        "strides": value.stride(),
        "numbers": value.flatten().tolist(),
    }
