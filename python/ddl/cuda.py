"""The operators on NVIDIA GPUs: whether they can run there, and compiling their kernels ahead.

Kernels are compiled when they are first needed, for the sizes, dtypes and options at hand, in some
tenths of a second each. The result is kept on disk, in DDL_CACHE_DIR or `ddl` in the user's cache
directory, so that a second process finds it. DDL_LOG=debug prints for each kernel
what it was compiled for, and which plans were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import _native
from .ops import KERNELS

__all__ = ["Kernel", "warmup", "why_unavailable"]


class Kernel(NamedTuple):
    """A compiled kernel, and what the compiler said about it."""

    name: str
    architecture: str
    macros: str
    """What it was compiled for, as in "REAL=float STATE_T=bf16 D=768 …"."""
    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread for which registers were missing."""
    shared: int
    """Bytes of shared memory per block."""
    seconds: float
    """What compiling took, or finding."""
    cached: bool
    """Whether it was found, in memory or on disk."""


def why_unavailable(device: torch.device | str | int = "cuda") -> str | None:
    """A sentence that says why a CUDA device cannot run the operators, or None where it can.

    device: "cuda", the current one, or "cuda:1", or its number. Raises ValueError for another.
    """
    return _native.why_unavailable(_index(device))


def warmup(
    module: nn.Module, *args: Any, architecture: str | None = None, **kwargs: Any
) -> list[Kernel]:
    """Compiles every kernel that `module(*args, **kwargs)` and its backward will launch.

    Nothing is computed and no memory is taken: the module runs on fake tensors, and what its
    operators would launch is compiled side by side on all cores and loaded. Worth a call before a
    CUDA graph is captured, or where many processes start at once; sizes of batch and time do not
    matter.

    Args:
        module: any module that holds operators of this package, on any device.
        args, kwargs: what it will be called with, in the same dtypes. torch.no_grad() around the
            call is heeded, and autocast on "cuda", or on "cpu" where there is no GPU.
        architecture: such as "sm_90", to compile for a GPU that is not here; None for the GPU that
            the module is on, else the current one.

    Returns:
        The kernels, those found in the cache included.

    Raises:
        TypeError: `module` is none. ValueError: an architecture that the compiler does not know.
        RuntimeError: no GPU, driver or compiler.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` must be a torch.nn.Module, got {type(module).__name__}")
    if architecture is not None and not isinstance(architecture, str):
        raise ValueError(f'`architecture` must be a name such as "sm_90", got {architecture!r}')
    with _noting(architecture, _index(_home(module))) as noted, _autocast_like_cuda():
        _run_on_fakes(module, args, kwargs)
    return noted


@contextmanager
def _noting(architecture: str | None, index: int) -> Iterator[list[Kernel]]:
    """Compiles, at its end, for the calls that this thread makes in it, and fills the list."""
    kernels: list[Kernel] = []
    _native.begin_warmup(architecture, index)
    done = False
    try:
        yield kernels
        done = True
    finally:
        kernels += [Kernel(*row) for row in _native.end_warmup(done)]


class _Noted(TorchDispatchMode):
    """Sends our operators' calls to native code, fake tensors and all."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "ddl":
            return KERNELS[func._opname](*args)
        return func(*args, **(kwargs or {}))


def _run_on_fakes(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward and, where something asks for gradients, backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with FakeTensorMode(), _Noted():
        fakes, args, kwargs = tree_map_only(Tensor, _fake, (tensors, args, kwargs))
        outputs = tree_leaves(torch.func.functional_call(module, fakes, args, kwargs))
        roots = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def _fake(tensor: Tensor) -> Tensor:
    """A tensor without memory like this one, on the CPU so that no GPU is needed."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _autocast_like_cuda() -> AbstractContextManager[object]:
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))


def _home(module: nn.Module) -> torch.device | int:
    tensors: Callable[[], Iterator[Tensor]] = module.parameters
    devices = [tensor.device for tensor in tensors() if tensor.is_cuda]
    if devices:
        return devices[0]
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _index(device: torch.device | str | int) -> int:
    """The number of a CUDA device."""
    try:
        # A bare number means the current accelerator's to torch, and may mean another kind there.
        known = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        known = None
    if known is None or known.type != "cuda" or (known.index or 0) < 0:
        raise ValueError(f"`device` must be a CUDA device, got {device!r}")
    return _current() if known.index is None else known.index


def _current() -> int:
    """The current device. Where torch has not begun with CUDA it is the first, and a look at it
    must not make torch begin."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
