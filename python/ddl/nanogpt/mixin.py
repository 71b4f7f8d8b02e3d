"""The methods that a converted model's class has besides nanoGPT's."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ddl.nn import DeltaResidual, Expand, Read
from ddl.nn.checks import report_other_options
from ddl.optim import never_decayed
from ddl.options import without_removed

from .annealing import Annealing, count_steps

DELTA_ARGS = "delta_args"  # the options' name in the model and in its state dict's metadata
RENAMED = {"parameterization": "compress_parameterization"}  # options of earlier state dicts
COMPILED = "_orig_mod"  # the model's own name in the state dict of a compiled one
# Options with which the same parameters compute the same function.
NO_MATTER = ("anchor_every", "beta_init", "read_init", "start", "stream_dtype", "value_init")


class Rebuilt:
    """Mixin of classes that a function made; `made_of` is the function and its arguments."""

    def __reduce__(self) -> Any:
        """Let pickle rebuild the class, unless it can import it by its name."""
        kind = type(self)
        if _importable(kind):
            return copyreg.__newobj__, (kind,), self.__dict__  # type: ignore[attr-defined]
        return _blank, kind.made_of, self.__dict__  # type: ignore[attr-defined]


def derived(kind: Any, mixin: type, name: str = "", options: tuple[Any, ...] = ()) -> Any:
    """The subclass of a class with a mixin before it; name: of the subclass, if it has another.

    options: its `options`, as sorted pairs.
    """
    return _derived(kind, mixin, name or kind.__name__, options)


@cache  # so that a copy is of the same class
def _derived(kind: Any, mixin: type, name: str, options: tuple[Any, ...]) -> Any:
    contents = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "made_of": (_derived, kind, mixin, name, options),
    }
    contents |= {"options": dict(options)} if options else {}
    return type(name, (mixin, kind), contents)


class WithOptions(Rebuilt, nn.Module):
    """A converted model of any kind: its new parameters, and the options of its conversion.

    delta_args: the options, those left at their defaults included.
    """

    delta_args: Mapping[str, Any] = MappingProxyType({})  # empty before the conversion

    def __setstate__(self, state: Any) -> None:
        """Fill a copy, or a model that was pickled, whose steps count as the original's."""
        super().__setstate__(state)
        count_steps(self)

    def reset_parameters(self) -> None:
        """Initialise what the conversion added, for a model that was made on meta.

        Call it after `to_empty`. The modules that were there before are left as they are.
        """
        for module in self.modules():
            if isinstance(module, DeltaResidual | Read | Expand | Annealing):
                module.reset_parameters()

    def of_stream(self) -> set[str]:
        """The names in the state dict of what the conversion added."""
        new = {id(parameter) for parameter in never_decayed(self)}
        names = {name for name, parameter in self.named_parameters() if id(parameter) in new}
        for name, module in self.named_modules():
            if isinstance(module, Annealing):
                names.add(f"{name}.step")
        return names

    # --- the options in the state dict's metadata, which torch saves and loads with it ------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None and self.delta_args:
            metadata[DELTA_ARGS] = dict(self.delta_args)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """Do as nn.Module, and report an error if the state dict is of other options."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        metadata = getattr(state_dict, "_metadata", None)
        saved = local_metadata.get(DELTA_ARGS) or options_in(metadata) or {}
        ours = {name: value for name, value in self.delta_args.items() if name not in NO_MATTER}
        report_other_options(named_as_today(saved), ours, args[-1])


class Converted(WithOptions):
    """Mixin that `convert` and `converted` put before the class of a model."""

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        """Run nanoGPT's method on nanoGPT's parameters, then add the new ones without decay."""
        new = {p: None for p in never_decayed(self) if p.requires_grad}
        for parameter in new:
            parameter.requires_grad_(False)  # nanoGPT's method skips parameters without gradient
        try:
            optimizer = super().configure_optimizers(*args, **kwargs)  # type: ignore[misc]
        finally:
            for parameter in new:
                parameter.requires_grad_(True)
        for group in optimizer.param_groups:  # a method of one's own may not skip them
            group["params"] = [p for p in group["params"] if p not in new]
        optimizer.add_param_group({"params": list(new), "weight_decay": 0.0})
        return optimizer

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last block.

        For one value channel the state is (B, T, d, 1).
        """
        return logits_of_state(self, state)


def options_in(metadata: Any) -> dict[str, Any] | None:
    """The options of the conversion in a state dict's `_metadata`, also of a compiled model."""
    for name in ("", COMPILED):
        found = metadata.get(name) if isinstance(metadata, Mapping) else None
        options = found.get(DELTA_ARGS) if isinstance(found, Mapping) else None
        if isinstance(options, dict):
            return named_as_today(options)
    return None


def named_as_today(options: Mapping[str, Any]) -> dict[str, Any]:
    """The stored options of a conversion under today's names; raises as `without_removed`."""
    return without_removed({RENAMED.get(name, name): value for name, value in options.items()})


def logits_of_state(model: Any, state: Tensor) -> Tensor:
    """Do as `Converted.logits_of_state`, for any model with `transformer` and `lm_head`."""
    transformer = model.transformer
    read = transformer.h[-1].readout
    x = transformer.ln_f(read(state.squeeze(-1) if state.shape[-1] == 1 else state))
    logits: Tensor = model.lm_head(x)
    return logits


def _importable(kind: type) -> bool:
    try:
        return bool(attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind)
    except (AttributeError, KeyError):
        return False


def _blank(make: Any, *args: Any) -> Any:
    """An empty instance of the class that `make(*args)` returns."""
    kind = make(*args)
    return kind.__new__(kind)
