"""Registration of the operators `torch.ops.ddl.…` with torch's dispatcher, and their calls.

Schemas come from declarations.py, fake implementations from outputs.py and derivatives from
autograd.py. CPU and CUDA kernels are registered by native code (src/torch/dispatch.rs), which torch
calls without Python. `ddl.functional` calls the functions here, which flatten its records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddl import _native
from ddl.errors import IMPORTED_ONCE
from ddl.results import ReadParameters, Write

from . import autograd, declarations, devices, private
from .calls import DIRECT, OVERLOADS, call, differentiable
from .declarations import BACKWARDS, CACHED, OPERATORS, Operator
from .devices import has_kernels
from .outputs import fake
from .plain import run_plain
from .refusals import raise_refusal

try:
    _library = torch.library.Library("ddl", "DEF")
except RuntimeError as error:
    raise ImportError(IMPORTED_ONCE) from error


def rewrite(state: Tensor, write: Write) -> tuple[Tensor, Tensor | None]:
    """Return X' and what a backward needs; None for that without kernels, here and below."""
    result: tuple[Tensor, Tensor | None]
    result = _run(declarations.rewrite, state, *write.arguments())
    return result


def read(
    state: Tensor, parameters: ReadParameters, document_starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return context, value, gate, and the raw read and 1/rms, which a backward needs."""
    result: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    result = _run(declarations.read, state, *parameters, document_starts)
    return result


def rewrite_read(
    state: Tensor,
    write: Write,
    parameters: ReadParameters,
    anchor: Tensor | None,
    chain: list[Tensor] | None,
    document_starts: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what `rewrite` returns, then what `read` does.

    anchor, chain: the last stored state and the tensors of `ddl.results.Chain`, or None.
    """
    result: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    rest = (anchor, chain, document_starts)
    result = _run(declarations.rewrite_read, state, *write.arguments(), *parameters, *rest)
    return result


def expand(
    x: Tensor, weight: Tensor | None, value_channels: int, document_starts: Tensor | None
) -> Tensor:
    """Return the state."""
    state: Tensor = _run(declarations.expand, x, weight, value_channels, document_starts)
    return state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    document_starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y and the final state. Native code has it for CPUs alone."""
    given = (q, k, v, beta, g, initial_state)
    needed = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in given)
    saves = torch.is_grad_enabled() and needed
    arguments = (q, k, v, beta, g, scale, initial_state, document_starts, saves)
    operator = declarations.delta_rule
    if q.device.type in devices.WITH_KERNELS:
        y, state, *_ = call(operator, *arguments)
    else:
        y, state, *_ = run_plain(operator, operator.Arguments(*arguments))
    return y, state


def _run(operator: Operator, first: Tensor, *others: Any) -> Any:
    """Call an operator on the device of its first tensor."""
    if isinstance(first, Tensor) and not has_kernels(first.device):
        return run_plain(operator, operator.Arguments(first, *others))
    return call(operator, first, *others)


def bind(
    operator: Operator,
    device: torch.device,
    fixed: Sequence[Any],
    **outputs: bool,
) -> Callable[..., Any]:
    """Return a cached operator with everything fixed but its first and its last two tensors.

    These are its arguments, by position; the last two are what past tokens left, and which tokens
    start a document. It is one function, because its callers come to it with cold caches
    (ddl/nn/cached.py). device: of the tensors that it will be called with. fixed: the arguments
    between, in order. outputs: by name, whether an output is there; the result has None for one
    that is not, which kernels return as an empty tensor.
    """
    overload, direct = OVERLOADS[operator.name], DIRECT[operator.name]
    entry, is_inference_mode_enabled = private.entry_of(overload), torch.is_inference_mode_enabled
    names = enumerate(operator.outputs)
    with_none = itemgetter(*(at if outputs.get(name, True) else -1 for at, name in names))

    def plain(*tensors: Any) -> Any:
        return run_plain(operator, operator.Arguments(*tensors[:-2], *fixed, *tensors[-2:]))

    def compiled(*tensors: Any) -> Any:
        return with_none((*overload(*tensors[:-2], *fixed, *tensors[-2:]), None))

    def bound(*tensors: Any) -> Any:
        # In inference mode the dispatcher goes to the kernel, and there is nothing to record.
        call = entry if is_inference_mode_enabled() else direct
        try:
            return with_none((*call(*tensors[:-2], *fixed, *tensors[-2:]), None))
        except (RuntimeError, TypeError) as error:
            raise_refusal(operator, (*tensors[:-2], *fixed, *tensors[-2:]), error)

    if not has_kernels(device):
        return plain
    return compiled if torch.compiler.is_compiling() else bound


# --- registration ---------------------------------------------------------------------------------


def _register_kernels() -> None:
    torch_folder = Path(torch.__file__).parent
    suffix = "dylib" if sys.platform == "darwin" else "so"
    _native.search_nvrtc_in([str(torch_folder.parent), sys.prefix])
    _native.register(str(torch_folder / "lib" / f"libtorch_cpu.{suffix}"))


def _differentiate(
    operator: Operator, save: Callable[..., None], gradients: Callable[..., Any]
) -> None:
    """Register an operator's derivative, and its direct call."""
    DIRECT[operator.name] = differentiable(operator, save, gradients)
    _library.impl(operator.name, DIRECT[operator.name], "Autograd")


def _refuse(kind: str, operator: Operator) -> Callable[..., Any]:
    return lambda *_, **__: autograd.refuse_derivative(kind, operator)


for _operator in OPERATORS:
    _library.define(_operator.schema, tags=torch.Tag.pt2_compliant_tag)
    _name = f"ddl::{_operator.name}"
    torch.library.register_fake(_name, fake(_operator), lib=_library)
    if _operator is not declarations.overwriting_backward:
        torch.library.register_vmap(_name, _refuse("vmap", _operator), lib=_library)
    OVERLOADS[_operator.name] = getattr(torch.ops.ddl, _operator.name).default
_register_kernels()

_differentiate(declarations.rewrite, autograd.save_rewrite, autograd.rewrite_gradients)
_differentiate(declarations.read, autograd.save_read, autograd.read_gradients)
_differentiate(
    declarations.rewrite_read, autograd.save_rewrite_read, autograd.rewrite_read_gradients
)
_differentiate(declarations.expand, autograd.save_expand, autograd.expand_gradients)
_differentiate(declarations.delta_rule, autograd.save_delta_rule, autograd.delta_rule_gradients)
for _forward, _backward in BACKWARDS:
    _differentiate(_backward, autograd.save_nothing, _refuse("double backward", _forward))
for _cached in CACHED:
    _differentiate(_cached, autograd.refuse_recording, _refuse("a derivative", _cached))
# For compiled graphs, which know when a gradient is not needed again (autograd.py).
DIRECT[declarations.overwriting_backward.name] = OVERLOADS[declarations.overwriting_backward.name]
