"""PEFT's wrappers and accelerate's hooks on modules whose parameters are read without a call."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def active(module: Any) -> Any:
    """Return the copy that `modules_to_save` trains in place of a module; else the module."""
    other = sys.modules.get("peft.utils.other")
    if other is None or not isinstance(module, other.ModulesToSaveWrapper):
        return module
    names = () if module.disable_adapters else module.active_adapters
    copies = [module.modules_to_save[name] for name in names if name in module.modules_to_save]
    return copies[0] if copies else module.original_module


def check_shared(first: nn.Module, second: nn.Module) -> None:
    """Raise TypeError if embedding and head, which share a weight, have adapters of their own.

    PEFT merges them into the weight one by one, so that each module would get both. Trained tokens
    are one adapter for both.
    """
    other = sys.modules.get("peft.utils.other")
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if other is None or tuners is None:
        return
    wrappers = (other.AuxiliaryTrainingWrapper, tuners.BaseTunerLayer)
    if not isinstance(first, wrappers) and not isinstance(second, wrappers):
        return
    tokens, tied = (getattr(module, "token_adapter", module) for module in (first, second))
    if getattr(tied, "tied_adapter", None) is not tokens:
        raise TypeError(
            "`wte` and `lm_head` must have no adapter but that of `trainable_token_indices`, "
            "because they share a weight, got PEFT's "
            f"{type(first).__name__} and {type(second).__name__}"
        )


def forward_of(module: nn.Module) -> Any:
    """The function that a call runs; below accelerate's hook, which moves inputs, if it has one."""
    own = module.__dict__.get("_old_forward" if "_hf_hook" in module.__dict__ else "forward")
    return type(module).forward if own is None else getattr(own, "__func__", own)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings the module's parameters to the device for its calls alone."""
    hook = module.__dict__.get("_hf_hook")
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))
