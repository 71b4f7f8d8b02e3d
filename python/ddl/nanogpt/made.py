"""A class of converted models, for the last line of nanoGPT's model.py."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from torch import nn

from .mixin import Converted, derived
from .model import rewrite_blocks

__all__ = ["check_class", "converted", "options_of"]

Class = TypeVar("Class", bound=type[nn.Module])

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)  # True in `from_pretrained`


def converted(kind: Class, *, disable: bool = False, **options: Any) -> Class:
    """Return a subclass of nanoGPT's GPT whose models are converted when they are made.

        GPT = ddl.nanogpt.converted(GPT, value_channels=4)  # at the end of model.py

    A model of it is what `convert(GPT(config), **options)` returns, and is an instance of `kind`.
    So whatever makes a GPT and then loads a state dict goes on working: train.py with
    --init_from=resume, and sample.py. `from_pretrained` loads GPT-2's weights into a model of
    `kind` and converts it; with start="additive" the result starts as GPT-2.

    kind: the class, whose models `convert` accepts. disable: return `kind` itself. options: as in
    `convert`; they are checked when a model is made.

    Raises:
        TypeError: `kind` is no class of modules. ValueError: it is already converted.
    """
    check_class(kind, Converted, "nanoGPT")
    if disable:
        return kind
    made: Class = derived(kind, _ConvertedWhenMade, "", options_of(options))
    return made


class _ConvertedWhenMade(Converted):
    """Mixin that converts a model at the end of its class's `__init__`."""

    options: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _PLAIN.get():
            rewrite_blocks(self, **self.options)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Make and fill the plain model, as nanoGPT does, then convert it."""
        before = _PLAIN.set(True)  # nanoGPT expects as many parameters as GPT-2 has
        try:
            model = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        finally:
            _PLAIN.reset(before)
        rewrite_blocks(model, **cls.options)
        model.__class__ = cls  # nanoGPT makes a GPT by name, which may be the plain class
        return model


def check_class(kind: Any, mixin: type, whose: str) -> None:
    """Raise TypeError unless `kind` is a class of modules, ValueError if it is converted."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        got = f"an object of class {type(kind).__name__}: `convert` takes a model"
        raise TypeError(f"`kind` must be {whose}'s class GPT, got {got}")
    if issubclass(kind, mixin):
        raise ValueError(f"`kind` must be {whose}'s class GPT, got one already converted")


def options_of(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options of a class whose models are converted when they are made."""
    defaults = {"value_channels": 1, "compress": None, "expand": "repeat"}
    return tuple(sorted((defaults | options).items()))
