"""Checks of a module's tensor and module arguments; errors name the caller's argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, distributed, nn

from ddl.ops import checks
from ddl.ops.checks import (
    STORED,
    check_dtype,
    check_is_plain,
    check_mask,
    check_shape,
    check_stored,
)
from ddl.options import without_removed

from .adapters import active, forward_of, is_offloaded

Module = TypeVar("Module", bound=nn.Module)


def check_stream(
    name: str, stream: Any, size: tuple[int, ...], *, over_time: bool = False, **masks: Any
) -> None:
    """Raise unless `stream` is a tensor of shape (…, *size).

    size: (hidden_size,) or (hidden_size, value_channels). over_time: also require a time axis.
    masks: by name, each a bool tensor (…,) with an entry for every token, or None.
    """
    if type(stream) is not Tensor:
        check_is_plain(name, stream)
    if tuple(stream.shape[-len(size) :]) != size:
        expected = ", ".join(map(str, size))
        raise ValueError(f"`{name}` must have shape (…, {expected}), got {tuple(stream.shape)}")
    if over_time and stream.ndim == len(size):
        axes = ", ".join(("hidden_size", "value_channels")[: len(size)])
        raise ValueError(f"`{name}` must have shape (…, time, {axes}), got {tuple(stream.shape)}")
    if stream.dtype not in STORED:
        check_dtype(name, stream)
    for mask_name, mask in masks.items():
        if mask is not None:
            check_mask(mask_name, mask, stream.shape[: -len(size)], stream)


def check_features(name: str, features: Any, shape: tuple[Any, ...], state: Tensor) -> None:
    """Raise unless `features` has `shape`, and a device and dtype that match the state's."""
    check_is_plain(name, features)
    check_shape(name, features, shape)
    check_stored(name, features, state)


def check_returned(name: str, returned: Any, context: Tensor) -> None:
    """Raise unless a sublayer's output has its context's shape and a matching device and dtype."""
    if not isinstance(returned, Tensor):
        raise TypeError(f"`{name}` must return a torch.Tensor, got {type(returned).__name__}")
    check_is_plain(name, returned, "return")
    if returned.shape != context.shape:
        expected, got = tuple(context.shape), tuple(returned.shape)
        raise ValueError(f"`{name}` must return shape {expected}, got {got}")
    check_stored(name, returned, context)


def require_exact_type(name: str, module: Any, kind: type[Module]) -> Module:
    """Do as `require_own_forward`; raise TypeError, too, if FSDP2 would not gather the module."""
    if type(module) is not kind or "forward" in module.__dict__:
        module = require_own_forward(name, module, kind)
    if distributed.is_available() and distributed.is_initialized():
        _check_gathered(name, module)
    return module


def require_own_forward(name: str, module: Any, kind: type[Module]) -> Module:
    """Return the module; raise TypeError unless calling it would run `kind.forward`.

    The operators read the module's parameters directly. They would silently ignore a wrapper, a
    subclass with another forward, or a forward set on the instance. Of PEFT's wrappers the one of
    `modules_to_save` has a whole module inside, which is returned. A hook of accelerate that moves
    no parameters may be on it.
    """
    module = active(module)
    if not isinstance(module, kind):
        got = type(module).__name__
        got = f"{type(module).__module__}.{got}" if got == kind.__name__ else got
    elif is_offloaded(module):
        raise TypeError(
            f"`{name}` must keep its parameters on the device, because they are used without "
            f"calling it, got a {kind.__name__} that accelerate offloads: name the class around "
            "it, such as GPT, DeltaBlock or the stream's, in `preload_module_classes` of "
            "`dispatch_model`, `cpu_offload` or `disk_offload`"
        )
    elif forward_of(module) is not kind.forward:
        got = f"{type(module).__name__} with another forward"
    else:
        return module
    raise TypeError(
        f"`{name}` must be a {kind.__name__} with its own forward, because its parameters are used "
        f"without calling it, got {got}: to compute a parameter in another way, use "
        "torch.nn.utils.parametrize"
    )


def _check_gathered(name: str, module: nn.Module) -> None:
    """Raise TypeError if FSDP2 shards a module by itself."""
    for path, part in module.named_modules(prefix=name):
        for parameter in part.parameters(recurse=False):
            if checks.is_distributed(parameter):
                raise TypeError(
                    f"`{path}` must be gathered when the operators read it, got a DTensor: give"
                    " the stream as a whole to fully_shard, and its sublayers if you like, but no"
                    " single read or residual, because these are never called"
                )


def report_other_options(
    saved: Mapping[str, Any], ours: Mapping[str, Any], errors: list[str]
) -> None:
    """Append a sentence for each option that differs, once for all modules of a model.

    saved: the options in a state dict's metadata. An option that is missing there, as in older
    ones, is not compared, nor one that is None on one side: another option, a name or a shape
    shows the difference.
    """
    saved = without_removed(dict(saved))
    for name, option in ours.items():
        theirs = saved.get(name)
        sentence = f"`{name}` must be {theirs!r}, as when this state dict was saved, got {option!r}"
        if None not in (theirs, option) and theirs != option and sentence not in errors:
            errors.append(sentence)
