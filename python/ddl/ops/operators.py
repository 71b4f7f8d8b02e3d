"""Registration of the operators `torch.ops.ddl.…` with torch's dispatcher.

Schemas come from declarations.py, fake implementations from outputs.py and derivatives from
autograd.py. CPU and CUDA kernels are registered by native code (src/torch/dispatch.rs), which torch
calls without Python. Users call `ddl.functional`, which calls the functions here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddl import _native
from ddl.errors import IMPORTED_ONCE

from . import declarations, private
from .autograd import (
    DIRECT,
    OVERLOADS,
    derivative,
    differentiable,
    for_torch_library,
    guarded,
    refuse_derivative,
    refuse_recording,
)
from .declarations import BACKWARDS, CACHED, OPERATORS, Operator
from .devices import has_kernels
from .outputs import fake
from .plain import run_plain
from .refusals import raise_refusal

try:
    _library = torch.library.Library("ddl", "DEF")
except RuntimeError as error:
    raise ImportError(IMPORTED_ONCE) from error


def _register_kernels() -> None:
    torch_folder = Path(torch.__file__).parent
    suffix = "dylib" if sys.platform == "darwin" else "so"
    _native.search_nvrtc_in([str(torch_folder.parent), sys.prefix])
    _native.register(str(torch_folder / "lib" / f"libtorch_cpu.{suffix}"))


def _differentiate(operator: Operator, setup: Any, grad: Any) -> None:
    """Register an operator's derivative, and its direct call."""
    if private.below_autograd is None:
        name = f"ddl::{operator.name}"
        torch.library.register_autograd(
            name, for_torch_library(grad), setup_context=setup, lib=_library
        )
        DIRECT[operator.name] = guarded(operator)
        return
    DIRECT[operator.name] = differentiable(operator, setup, grad)
    _library.impl(operator.name, DIRECT[operator.name], "Autograd")


def _refuse(kind: str, operator: Operator) -> Callable[..., Any]:
    return lambda *_, **__: refuse_derivative(kind, operator)


for _operator in OPERATORS:
    _library.define(_operator.schema, tags=torch.Tag.pt2_compliant_tag)
    _name = f"ddl::{_operator.name}"
    torch.library.register_fake(_name, fake(_operator), lib=_library)
    if _operator is not declarations.overwriting_backward:
        torch.library.register_vmap(_name, _refuse("vmap", _operator), lib=_library)
    OVERLOADS[_operator.name] = getattr(torch.ops.ddl, _operator.name).default
_register_kernels()

_overwriting = declarations.overwriting_backward
for _forward, _backward in BACKWARDS:
    _overwrites = _overwriting if _forward is declarations.rewrite_read else None
    _differentiate(_forward, *derivative(_forward, _backward, _overwrites))
    _differentiate(_backward, lambda *_: None, _refuse("double backward", _forward))
for _cached in CACHED:
    _differentiate(_cached, refuse_recording, _refuse("a derivative", _cached))
# For compiled graphs, which know when a gradient is not needed again (autograd.py).
DIRECT[_overwriting.name] = OVERLOADS[_overwriting.name]


def _by_name(operator: Operator) -> Callable[..., Any]:
    """The function for `ddl.functional`: with arguments by name, on every device."""
    overload, direct = OVERLOADS[operator.name], DIRECT[operator.name]
    names, is_compiling = operator.names, torch.compiler.is_compiling
    in_order = itemgetter(*names)

    def named(**given: Any) -> Any:
        first = given[names[0]]
        if isinstance(first, Tensor) and not has_kernels(first.device):
            return run_plain(operator, operator.Arguments(**given))
        if is_compiling():  # torch.compile does not know itemgetter
            return overload(*[given[name] for name in names])
        return direct(*in_order(given))

    named.__name__ = operator.name
    return named


rewrite, read, rewrite_read, expand = (_by_name(forward) for forward, _ in BACKWARDS)


def bind(operator: Operator, device: torch.device, **options: Any) -> Callable[..., Any]:
    """Return a cached operator with everything fixed but its first and its last two tensors.

    These are its arguments, by position; the last two are what past tokens left, and which tokens
    start a document. It is one function, because its callers come to it with cold caches
    (ddl/nn/cached.py). device: of the tensors that it will be called with.
    """
    names = operator.names
    given = len(names) - len(options) - 2
    fixed = tuple([options[name] for name in names[given:-2]])
    overload, direct = OVERLOADS[operator.name], DIRECT[operator.name]
    entry, is_inference_mode_enabled = private.entry_of(overload), torch.is_inference_mode_enabled

    def plain(*tensors: Any) -> Any:
        arguments = operator.Arguments(*tensors[:-2], *fixed, *tensors[-2:])
        return run_plain(operator, arguments)

    def compiled(*tensors: Any) -> Any:
        return overload(*tensors[:-2], *fixed, *tensors[-2:])

    def bound(*tensors: Any) -> Any:
        # In inference mode the dispatcher goes to the kernel, and there is nothing to record.
        call = entry if is_inference_mode_enabled() else direct
        try:
            return call(*tensors[:-2], *fixed, *tensors[-2:])
        except (RuntimeError, TypeError) as error:
            raise_refusal(operator, (*tensors[:-2], *fixed, *tensors[-2:]), error)

    if not has_kernels(device):
        return plain
    return compiled if torch.compiler.is_compiling() else bound


def bind_cached_read(device: torch.device, **options: Any) -> Callable[..., Any]:
    """Return `cached_read` with these options; it takes state, pending, document_starts."""
    return bind(declarations.cached_read, device, **options)


def bind_cached_rewrite_read(device: torch.device, **options: Any) -> Callable[..., Any]:
    """Return `cached_rewrite_read` with these options.

    It takes state, direction, value, gate, pending and document_starts.
    """
    return bind(declarations.cached_rewrite_read, device, **options)


def bind_cached_expand(device: torch.device, **options: Any) -> Callable[..., Any]:
    """Return `cached_expand` with these options; it takes x, before, document_starts."""
    return bind(declarations.cached_expand, device, **options)
