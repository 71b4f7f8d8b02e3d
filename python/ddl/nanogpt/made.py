"""A class of converted models, for the last line of nanoGPT's model.py."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from torch import nn

from .mixin import Converted, WithOptions, derived
from .model import rewrite_blocks

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
    return converted_class(kind, _ConvertedWhenMade, "nanoGPT", disable, options)


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


def converted_class(
    kind: Class, mixin: type, whose: str, disable: bool, options: dict[str, Any]
) -> Class:
    """Return the subclass of another project's GPT whose models the mixin converts."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        got = f"an object of class {type(kind).__name__}: `convert` takes a model"
        raise TypeError(f"`kind` must be {whose}'s class GPT, got {got}")
    if issubclass(kind, WithOptions):
        raise ValueError(f"`kind` must be {whose}'s class GPT, got one already converted")
    options = {"value_channels": 1, "compress": None, "expand": "repeat", **options}
    made: Class = derived(kind, mixin, "", tuple(sorted(options.items())))
    return kind if disable else made
