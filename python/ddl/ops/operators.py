"""Registration of the operators `torch.ops.ddl.…` with torch's dispatcher.

Schemas come from declarations.py, fake implementations from outputs.py and derivatives from
autograd.py. Kernels for CPUs and GPUs are registered by native code (src/torch/dispatch.rs), which
torch calls without Python; other devices have plain PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ddl import _native
from ddl.errors import IMPORTED_ONCE

from . import plain, private
from .autograd import call_of
from .declarations import FORWARDS, OPERATORS, Forward, Operator
from .outputs import fake
from .refusals import refuse_transforms

try:
    _library = torch.library.Library("ddl", "DEF")
except RuntimeError as error:
    raise ImportError(IMPORTED_ONCE) from error


def _register_kernels() -> None:
    torch_folder = Path(torch.__file__).parent
    suffix = "dylib" if sys.platform == "darwin" else "so"
    _native.search_nvrtc_in([str(torch_folder.parent), sys.prefix])
    library = str(torch_folder / "lib" / f"libtorch_cpu.{suffix}")
    for operator in OPERATORS:
        keys = ["CPU"] if operator.on_cpus_alone else ["CPU", "CUDA"]
        _native.register(library, operator.name, operator.declared, keys)


def _define(operator: Operator, overload: str = "") -> Any:
    _library.define(operator.schema(overload), tags=torch.Tag.pt2_compliant_tag)
    name = f"{operator.name}.{overload}" if overload else operator.name
    torch.library.register_fake(f"ddl::{name}", fake(operator), lib=_library)
    _library.impl(name, refuse_transforms, "FuncTorchDynamicLayerFrontMode")
    return getattr(getattr(torch.ops.ddl, operator.name), overload or "default")


def _define_with_derivative(operator: Forward) -> None:
    overload, kernel = _define(operator), _define(operator, "kernel")
    # For devices without kernels; these have no `kernel` and no backward.
    _library.impl(operator.name, plain.outputs_of(operator), "CompositeExplicitAutograd")
    recorded = call_of(operator, private.below_autograd(overload))
    _library.impl(operator.name, plain.or_plain(operator, recorded), "Autograd")
    call = call_of(operator, kernel, plain.or_plain(operator, overload))
    operator.call = plain.or_plain(operator, call) if operator.on_cpus_alone else call


for _operator in OPERATORS:
    if not isinstance(_operator, Forward):
        _operator.call = _define(_operator)
for _operator in FORWARDS:
    _define_with_derivative(_operator)
_register_kernels()
