"""Converted models of any kind: their classes, options and state dicts."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

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


def derived(kind: Any, mixin: type, name: str = "", **attributes: Any) -> Any:
    """The subclass of a class with a mixin before it; the same one for the same arguments.

    name: of the subclass, if it has another. attributes: what it has besides, hashable.
    """
    return _derived(kind, mixin, name or kind.__name__, tuple(attributes.items()))


@cache  # so that a copy is of the same class
def _derived(kind: Any, mixin: type, name: str, attributes: tuple[Any, ...]) -> Any:
    made_of = (_derived, kind, mixin, name, attributes)
    contents = {"__doc__": kind.__doc__, "__module__": kind.__module__, "made_of": made_of}
    return type(name, (mixin, kind), contents | dict(attributes))


class WithOptions(Rebuilt, nn.Module):
    """A converted model of any kind: its new parameters, and the options of its conversion.

    options: of a class whose models are converted when they are made, as sorted pairs; () if
    `convert` converted the model. delta_args: the options, those left at their defaults included.
    """

    options: ClassVar[tuple[tuple[str, Any], ...]] = ()
    delta_args: Mapping[str, Any] = MappingProxyType({})  # empty before the conversion

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.options:
            self._convert(**dict(self.options))

    def _convert(self, **options: Any) -> None:
        """Add the stream to a model that has just been made."""
        raise NotImplementedError

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


def _importable(kind: type) -> bool:
    try:
        return bool(attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind)
    except (AttributeError, KeyError):
        return False


def _blank(make: Any, *args: Any) -> Any:
    """An empty instance of the class that `make(*args)` returns."""
    kind = make(*args)
    return kind.__new__(kind)
