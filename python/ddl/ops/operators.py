"""The PyTorch operators: schemas, implementations, fake implementations, registration.

`rewrite`, `read`, `rewrite_read` and `expand` are `torch.library` operators (`torch.ops.ddl.…`),
and so are their backwards. Only this file calls the compute functions of `_native`, which borrow
the tensors' memory; outputs.py allocates the outputs, autograd.py saves tensors and returns
gradients. Users call `ddl.functional`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ddl import _native
from ddl.ops import outputs as empty

from .autograd import DERIVATIVES, autograd_implementation
from .checks import check_read, check_rewrite
from .outputs import is_absent

_READ = (
    "Tensor? compress, Tensor? norm_weight, float? norm_eps, Tensor? gate_weight, "
    "Tensor? gate_bias, Tensor? value_weight, Tensor? value_bias, float? value_scale, "
    "bool value_from_compressed"
)
_REWRITE = "Tensor direction, Tensor value, Tensor gate, float eps_k"
_READ_GRADS = "Tensor? grad_context, Tensor? grad_new_value, Tensor? grad_new_gate"
_READ_SAVED = "Tensor new_value, Tensor new_gate, Tensor compressed, Tensor rstd"

_SCHEMAS = {
    # -> state, stats
    "rewrite": f"(Tensor state, {_REWRITE}) -> (Tensor, Tensor)",
    # -> context, value, gate, compressed, rstd
    "read": f"(Tensor state, {_READ}, ScalarType? context_dtype) -> ({', '.join(['Tensor'] * 5)})",
    # -> state, context, value, gate, compressed, rstd, stats
    "rewrite_read": f"(Tensor state, {_REWRITE}, {_READ}, ScalarType? context_dtype)"
    f" -> ({', '.join(['Tensor'] * 7)})",
    "expand": "(Tensor x, Tensor? weight, int value_channels) -> Tensor",
    # -> gradients of state, direction, value, gate
    "rewrite_backward": f"(Tensor grad_state, Tensor state, {_REWRITE}, Tensor stats)"
    f" -> ({', '.join(['Tensor'] * 4)})",
    # -> gradients of state and of the six parameters
    "read_backward": f"({_READ_GRADS}, Tensor state, {_READ}, {_READ_SAVED})"
    f" -> ({', '.join(['Tensor'] * 7)})",
    # -> gradients of state, direction, value, gate and of the six parameters
    "rewrite_read_backward": f"(Tensor? grad_state, {_READ_GRADS}, Tensor state, {_REWRITE},"
    f" {_READ}, {_READ_SAVED}, Tensor stats) -> ({', '.join(['Tensor'] * 10)})",
    # overwrites grad_state with the gradient of the state
    # -> gradients of direction, value, gate and of the six parameters
    "rewrite_read_backward_": f"(Tensor(a!) grad_state, {_READ_GRADS}, Tensor state, {_REWRITE},"
    f" {_READ}, {_READ_SAVED}, Tensor stats) -> ({', '.join(['Tensor'] * 9)})",
    # -> gradients of x and weight
    "expand_backward": "(Tensor grad_state, Tensor x, Tensor? weight) -> (Tensor, Tensor)",
}

_library = torch.library.Library("ddl", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)


# --- implementations ----------------------------------------------------------------------------
# CPU and CUDA tensors share them: native code looks at the device.

# `_cuda_getCurrentRawStream` skips making a Stream object; not every torch has it.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


def _resources(state: Tensor) -> tuple[int, int, Callable[[Tensor, int], Tensor]]:
    """The resources that native code may use: (CPU threads, CUDA stream, scratch allocator)."""
    if state.is_cuda:
        return 0, _current_stream(state.device.index), _scratch
    return torch.get_num_threads(), 0, _scratch


def _scratch(like: Tensor, size: int) -> Tensor:
    """Allocate at least `size` bytes on the device of `like`, for one call.

    The stream orders later reuse of the memory after the call.
    """
    return like.new_empty(-(-size // 4), dtype=torch.float32)


def _contiguous(arguments: Iterable[Any]) -> list[Any]:
    """Make tensors contiguous, as native code requires; other arguments pass through."""
    return [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]


def _none_if_absent(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Replace stand-ins for absent tensors by None, and make the others contiguous."""
    return [None if x is None or is_absent(x) else x.contiguous() for x in tensors]


def _rewrite(*arguments: Any) -> tuple[Tensor, Tensor]:
    state, *rewrite = _contiguous(arguments)
    new_state, stats = outputs = empty.rewrite(state)
    saved = (new_state, stats, None, None, None, None, None)
    _native.rewrite_read(state, tuple(rewrite), None, saved, *_resources(state))
    return outputs


def _read(*arguments: Any) -> tuple[Tensor, ...]:
    state, *read = _contiguous(arguments)
    outputs = empty.read(state, *read)
    saved = (None, None, *_none_if_absent(outputs))
    _native.rewrite_read(state, None, tuple(read[:9]), saved, *_resources(state))
    return outputs


def _rewrite_read(*arguments: Any) -> tuple[Tensor, ...]:
    state, *rest = _contiguous(arguments)
    outputs = new_state, *read_outputs, stats = empty.rewrite_read(state, *rest)
    saved = (new_state, stats, *_none_if_absent(read_outputs))
    _native.rewrite_read(state, tuple(rest[:4]), tuple(rest[4:13]), saved, *_resources(state))
    return outputs


def _expand(x: Tensor, weight: Tensor | None, value_channels: int) -> Tensor:
    state = empty.expand(x, weight, value_channels)
    contiguous_x, contiguous_weight = _contiguous((x, weight))
    _native.expand_forward(contiguous_x, contiguous_weight, state, *_resources(x))
    return state


def _rewrite_backward(*arguments: Any) -> tuple[Tensor, ...]:
    grad_state, state, *rewrite, stats = _contiguous(arguments)
    outputs = empty.rewrite_backward(grad_state, state, *rewrite)
    _native.rewrite_read_backward(
        state,
        tuple(rewrite),
        None,
        (None, stats, None, None, None, None, None),
        (grad_state, None, None, None),
        (*outputs, None, None, None, None, None, None),
        *_resources(state),
    )
    return outputs


def _read_backward(*arguments: Any) -> tuple[Tensor, ...]:
    outputs = grad_state, *grad_parameters = empty.read_backward(*arguments)
    *grads, state = _contiguous(arguments[:4])
    new_value, new_gate, compressed, rstd = _none_if_absent(arguments[13:])
    _native.rewrite_read_backward(
        state,
        None,
        tuple(_contiguous(arguments[4:13])),
        (None, None, None, new_value, new_gate, compressed, rstd),
        (None, *grads),
        (grad_state, None, None, None, *_none_if_absent(grad_parameters)),
        *_resources(state),
    )
    return outputs


def _rewrite_read_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _fill_gradients(arguments, empty.rewrite_read_backward(*arguments))


def _rewrite_read_backward_in_place(grad_state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Store the state's gradient over grad_state: three passes over memory instead of four."""
    grad = grad_state.contiguous()
    outputs = empty.rewrite_read_backward_in_place(grad_state, *arguments)
    _fill_gradients((grad, *arguments), (grad, *outputs))
    if grad is not grad_state:
        grad_state.copy_(grad)
    return outputs


def _fill_gradients(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    *grads, state = _contiguous(arguments[:5])
    new_value, new_gate, compressed, rstd, stats = _none_if_absent(arguments[18:])
    _native.rewrite_read_backward(
        state,
        tuple(_contiguous(arguments[5:9])),
        tuple(_contiguous(arguments[9:18])),
        (None, stats, None, new_value, new_gate, compressed, rstd),
        tuple(grads),
        (*outputs[:4], *_none_if_absent(outputs[4:])),
        *_resources(state),
    )
    return outputs


def _expand_backward(grad_state: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    outputs = grad_x, grad_weight = empty.expand_backward(grad_state, x, weight)
    contiguous_x, contiguous_weight, contiguous_grad = _contiguous((x, weight, grad_state))
    _native.expand_backward(
        contiguous_x,
        contiguous_weight,
        contiguous_grad,
        grad_x,
        None if is_absent(grad_weight) else grad_weight,
        *_resources(x),
    )
    return outputs


# --- fake implementations -----------------------------------------------------------------------
# Shapes and dtypes without data, for torch.compile, export and the meta device. Native code checks
# real tensors; here checks.py raises the same messages. (For `expand` and the backwards, allocating
# the outputs already checks everything.)


def _allow_inductor_fallback(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fake implementation to put our operators on inductor's fallback allow-list.

    Inductor falls back to calling them anyway, but otherwise it first formats a message with the
    operands and everything they were computed from. Shared operands are formatted once per use, so
    time and memory grow tenfold per layer of a model, to 15 GB at six. The fake implementations of
    a graph always run before inductor lowers it.
    """

    def allowing(*arguments: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        allowed = getattr(lowering, "FALLBACK_ALLOW_LIST", None)  # not a public name
        if allowed is not None:
            allowed.update(f"ddl::{name}" for name in _SCHEMAS)
        return fake(*arguments)

    return allowing


def _rewrite_fake(state: Tensor, *rewrite: Any) -> tuple[Tensor, Tensor]:
    check_rewrite(state, *rewrite)
    return empty.rewrite(state)


def _read_fake(state: Tensor, *read: Any) -> tuple[Tensor, ...]:
    check_read(state, *read[:9])
    return empty.read(state, *read)


def _rewrite_read_fake(state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    check_rewrite(state, *arguments[:4])
    check_read(state, *arguments[4:13])
    return empty.rewrite_read(state, *arguments)


# --- registration -------------------------------------------------------------------------------


def _refuse(transform: str, name: str) -> Any:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{transform} of `ddl.{name}` must go through `ddl.reference.{name}`, "
            "got the fused operator, which has first reverse-mode derivatives only"
        )

    return refuse


def _refusing_tangents(implementation: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap an implementation to raise for forward-mode tangents, which it would silently drop.

    `ddl.functional` checks this, too; direct calls of torch.ops.ddl skip that.
    """
    refuse = _refuse("forward-mode differentiation", name)

    def refusing(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            tensors = (x for x in arguments if isinstance(x, Tensor))
            if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
                refuse()
        return implementation(*arguments)

    return refusing


# Operator name → implementation; `ddl.cuda.warmup` calls these without the dispatcher.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
_Row = tuple[str, Callable[..., Any], Callable[..., Any]]  # name, implementation, fake
_forwards: list[_Row] = [
    ("rewrite", _rewrite, _rewrite_fake),
    ("read", _read, _read_fake),
    ("rewrite_read", _rewrite_read, _rewrite_read_fake),
    ("expand", _expand, empty.expand),
]
_backwards: list[_Row] = [
    ("rewrite", _rewrite_backward, empty.rewrite_backward),
    ("read", _read_backward, empty.read_backward),
    ("rewrite_read", _rewrite_read_backward, empty.rewrite_read_backward),
    ("expand", _expand_backward, empty.expand_backward),
]


def _register(
    name: str, implementation: Callable[..., Any], fake: Callable[..., Any], real: Any
) -> None:
    """Register one operator. real: `implementation`, possibly wrapped, for the dispatcher."""
    IMPLEMENTATIONS[name] = implementation
    for device in ("CPU", "CUDA"):
        _library.impl(name, real, device)
    torch.library.register_fake(f"ddl::{name}", _allow_inductor_fallback(fake), lib=_library)


def _differentiate(name: str, real: Any, setup: Any, grad: Any) -> None:
    """Register an operator's derivative."""
    autograd = autograd_implementation(getattr(torch.ops.ddl, name).default, real, setup, grad)
    _library.impl(name, autograd, "Autograd", with_keyset=True)


for _name, _implementation, _fake in _forwards:
    _real = _refusing_tangents(_implementation, _name)
    _register(_name, _implementation, _fake, _real)
    _differentiate(_name, _real, *DERIVATIVES[_name])
    torch.library.register_vmap(f"ddl::{_name}", _refuse("vmap", _name), lib=_library)

for _name, _implementation, _fake in _backwards:
    _backward = f"{_name}_backward"
    _register(_backward, _implementation, _fake, _implementation)
    _differentiate(_backward, _implementation, lambda *_: None, _refuse("double backward", _name))
    torch.library.register_vmap(f"ddl::{_backward}", _refuse("vmap", _name), lib=_library)

# For compiled graphs, which know when a gradient is not needed again (autograd.py). CPU only: on a
# GPU a store does not load its cache line first, so overwriting saves no memory traffic.
_library.impl("rewrite_read_backward_", _rewrite_read_backward_in_place, "CPU")
torch.library.register_fake(
    "ddl::rewrite_read_backward_",
    _allow_inductor_fallback(empty.rewrite_read_backward_in_place),
    lib=_library,
)
