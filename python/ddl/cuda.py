"""CUDA support: check that a GPU can run the operators, and compile their kernels ahead of time.

A kernel is compiled on first use for the given sizes, dtypes and options, which takes some tenths
of a second. The result is cached on disk, in DDL_CACHE_DIR or in `ddl` in the user's cache
directory, for later processes. DDL_LOG=debug prints for each kernel what it was compiled for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddl import _native
from ddl.ops.declarations import OPERATORS
from ddl.ops.private import fake_tensor_tools, uncompiled
from ddl.ops.refusals import described

__all__ = ["Kernel", "warmup", "why_unavailable"]

_listing = Lock()  # torch.func.functional_call puts fake parameters into the module itself


class Kernel(NamedTuple):
    """A compiled CUDA kernel and the resources that the compiler reports for it."""

    name: str
    architecture: str
    macros: str
    """Macros that it was compiled with, as in "REAL=float STATE_T=bf16 D=768 …"."""
    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes per thread that spilled from registers to local memory."""
    shared: int
    """Bytes of shared memory per block."""
    seconds: float
    """Seconds to compile it, or to load it from the cache."""
    cached: bool
    """True if it came from the cache, in memory or on disk."""


def why_unavailable(device: torch.device | str | int = "cuda") -> str | None:
    """Return a sentence that says why a CUDA device cannot run the operators; None if it can.

    device: "cuda" for the current device, or one such as "cuda:1", or its number. Raises ValueError
    for anything else.
    """
    return _native.why_unavailable(_index(device))


def warmup(
    module: nn.Module, *args: Any, architecture: str | None = None, **kwargs: Any
) -> list[Kernel]:
    """Compile and load every kernel that `module(*args, **kwargs)` and its backward will launch.

    Nothing is computed and no memory is allocated: the module runs on fake tensors, and the kernels
    that its operators would launch are compiled in parallel on all cores. Call it before capturing
    a CUDA graph or starting many processes at once. Batch and time sizes do not matter. Several
    threads may warm up at once, but none may call `module` meanwhile: its parameters are fake.

    Args:
        module: any module that uses operators of this package, on any device.
        args, kwargs: arguments of the later call, with the same dtypes. torch.no_grad() around this
            function applies, and so does autocast on "cuda" (on "cpu" if there is no GPU).
        architecture: target such as "sm_90", also for a GPU that this machine lacks; None for the
            GPU that the module is on, else the current one.

    Returns:
        The kernels, including those found in the cache.

    Raises:
        TypeError: `module` is not a module. ValueError: the compiler does not know `architecture`.
        RuntimeError: there is no GPU, driver or compiler.
    """
    module = uncompiled(module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` must be a torch.nn.Module, got {type(module).__name__}")
    if architecture is not None and not isinstance(architecture, str):
        raise ValueError(f'`architecture` must be a name such as "sm_90", got {architecture!r}')
    warmup = _native.Warmup(architecture, _index(_home(module)))
    with _listing, _autocast_like_cuda():
        _list_kernels(warmup, module, args, kwargs)
    return [Kernel(**kernel) for kernel in warmup.compile()]


def alignment(tensor: Tensor) -> Any:
    """Bytes from an aligned address; native code copies a strided tensor to one."""
    return tensor.storage_offset() * tensor.itemsize if tensor.is_contiguous() else 0


def _list_kernels(
    kernels: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run the forward on fake tensors and, if an output requires grad, the backward."""
    fake_mode, dispatch_mode, pytree = fake_tensor_tools()
    declared = {operator.name: operator for operator in OPERATORS}

    def list_and_run(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "ddl":
            operator = name.partition(".")[0]  # without the overload
            kernels.add(operator, described(declared[operator], args, alignment))
        return func(*args, **(kwargs or {}))

    listing = type("Listing", (dispatch_mode,), {"__torch_dispatch__": list_and_run})
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with fake_mode(), listing():
        fakes, args, kwargs = pytree.tree_map_only(Tensor, _fake, (tensors, args, kwargs))
        outputs = pytree.tree_leaves(torch.func.functional_call(module, fakes, args, kwargs))
        roots = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def _fake(tensor: Tensor) -> Tensor:
    """Return a fake tensor like this one, but on the CPU, so that no GPU is needed."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _autocast_like_cuda() -> AbstractContextManager[object]:
    """Apply CUDA's autocast setting to the CPU, where the fake tensors are."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))


def _home(module: nn.Module) -> torch.device | int:
    """The CUDA device of the module's parameters, else the current one, else 0."""
    devices = [parameter.device for parameter in module.parameters() if parameter.is_cuda]
    if devices:
        return devices[0]
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _index(device: torch.device | str | int) -> int:
    """The index of a CUDA device."""
    try:
        # torch reads a bare number as a device of the current accelerator, which may not be CUDA.
        known = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        known = None
    if known is None or known.type != "cuda" or (known.index or 0) < 0:
        raise ValueError(f"`device` must be a CUDA device, got {device!r}")
    return _current() if known.index is None else known.index


def _current() -> int:
    """The current device's index; 0 if torch has not initialised CUDA, which this must not do."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
