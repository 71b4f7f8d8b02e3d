"""torch's private names: each with its reason, and what is done in a torch that lacks it.

tests/ops/test_private.py takes the names away and tests what is done then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def below_autograd(overload: Any) -> Callable[..., Any]:
    """The call of an overload below its own Autograd kernel, from which it is called.

    Every torch that is supported has the name, as torch.library itself uses it.
    """
    guard = torch._C._AutoDispatchBelowAutograd

    def call(*values: Any) -> Any:
        with guard():
            return overload(*values)

    return call


def is_traced_for_compile(tensor: Tensor) -> bool:
    """True for torch.compile's functional tensors, whose copies it drops if nobody needs them.

    Without the class: no gradient is overwritten.
    """
    module = sys.modules.get("torch._subclasses.functional_tensor")
    functional_tensor = getattr(module, "FunctionalTensor", None)
    return functional_tensor is not None and isinstance(tensor, functional_tensor)


def allow_inductor_fallback(*names: str) -> None:
    """Put operators, as "ddl::rewrite", on inductor's list of those that it calls as they are.

    It calls them anyway, but otherwise it first formats a message with the operands and everything
    they were computed from. Shared operands are formatted once per use, so time and memory grow
    tenfold per layer of a model, to 15 GB at six. Without the list: that.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    allowed = getattr(lowering, "FALLBACK_ALLOW_LIST", None)
    if allowed is not None:
        allowed.update(names)


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that torch.compile calls while tracing, whose result it keeps.

    `torch.compiler.assume_constant_result` does only this, and imports torch._dynamo, which makes
    `import ddl` take half a second longer. If the mark is not known: the graph breaks there.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(module: Any) -> Any:
    """The module inside torch.compile's wrapper. Without the name: the wrapper."""
    return getattr(module, "_orig_mod", module)


def fake_tensor_tools() -> tuple[Any, Any, Any]:
    """Return FakeTensorMode, TorchDispatchMode and the module of nested tuples and dictionaries.

    With them a module runs on tensors without memory (ddl.cuda.warmup). torch documents them, under
    private names; without them it raises.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils import _pytree
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError as error:
        raise RuntimeError(
            f"`ddl.cuda.warmup` needs torch's fake tensors, got a torch without ({error}): "
            "run one step instead, which compiles the kernels that it launches"
        ) from None
    return FakeTensorMode, TorchDispatchMode, _pytree
