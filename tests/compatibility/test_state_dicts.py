"""State dicts that an earlier version wrote load with strict=True, and compute the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ddl import DeltaResidual, Expand, Read
from ddl.options import RESIDUAL_OPTIONS, STREAM_OPTIONS, Options
from tests.compatibility.cases import FORMATS, MODULES, call
from tests.support.tolerances import assert_close

FOUND = [file for path in FORMATS for file in sorted(path.glob("modules/*.safetensors"))]


def split(record: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The state dict, the arguments and the output in a record."""
    parts: dict[str, dict[str, Tensor]] = {"state": {}, "given": {}}
    for name, tensor in record.items():
        kind, _, rest = name.partition(".")
        if rest:
            parts[kind][rest] = tensor
    return parts["state"], parts["given"], record["output"]


@pytest.mark.parametrize("file", FOUND, ids=lambda file: f"{file.parts[-3]}-{file.stem}")
def test_a_state_dict_loads_and_computes_the_same(file: Path) -> None:
    state, given, expected = split(safetensors.torch.load_file(file))
    module = MODULES[file.stem].make()
    module.load_state_dict(state, strict=True)
    assert_close(file.stem, call(module, given), expected, torch.float32)


# --- the cases have every parameter ---------------------------------------------------------------


def every_choice(options: Options) -> Iterator[dict[str, Any]]:
    """Every combination of the options that have a few choices."""
    named = {name: option.allowed for name, option in options.items()}
    choices = {name: allowed for name, allowed in named.items() if isinstance(allowed, tuple)}
    for combination in itertools.product(*choices.values()):
        yield dict(zip(choices, combination, strict=True))


def names_of(kind: type[nn.Module], options: Options) -> set[str]:
    """The names of all parameters that a module has under any combination of its choices."""
    names: set[str] = set()
    for chosen in every_choice(options):
        for channels in (1, 2):
            try:
                module = kind(4, channels, **chosen, device="meta")
            except ValueError:  # they do not go together
                continue
            names |= module.state_dict().keys()
    return names


def test_the_cases_have_every_parameter() -> None:
    read = {name: STREAM_OPTIONS[name] for name in ("compress", "compress_parameterization")}
    possible = names_of(DeltaResidual, RESIDUAL_OPTIONS) | names_of(Read, read)
    possible |= names_of(Expand, {"kind": STREAM_OPTIONS["expand"]})
    assert len(possible) > 15
    inside = r"^(residuals\.\d+|reads\.\d+|readout|expand)\."
    there = {
        re.sub(inside, "", name) for case in MODULES.values() for name in case.make().state_dict()
    }
    assert possible <= there, "add a case to tests/compatibility/cases.py"
