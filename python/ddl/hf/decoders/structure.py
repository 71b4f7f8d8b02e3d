"""Where a decoder adds: its layers and norms, found by running it on an input that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ddl.recording.sublayers import evaluating

__all__ = ["ADD", "Structure", "device_of", "exchanged", "structure_of"]

ADD = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)

TOKENS = 8  # of the input on which a model is watched
PRE_NORM = (
    "x + F(norm(x)) twice, attention and MLP; post-norms, parallel sublayers and multipliers of "
    "the residual are not supported"
)
EXPECTED = ["norm reads", "returns", "returns", "adds"] * 2  # norm, sublayer, addition


class Structure(NamedTuple):
    """The names of a decoder's parts.

    decoder: of the decoder within the model. layers: of its list of layers. norms: of the two norms
    in every layer. final: of the norm after the last layer.
    """

    decoder: str
    layers: str
    norms: tuple[str, str]
    final: str


def structure_of(model: Any) -> Structure:
    """Find the parts of a transformers decoder, and check that its layers are pre-norm.

    The model runs twice on eight random tokens, in evaluation mode: as it is, and with a `Watched`
    in place of the stream. Every layer must read it by two norms, each before one sublayer whose
    output is what is added, and must return the sums that it returns as it is.

    Raises:
        TypeError: `model` is no decoder of transformers. ValueError: a layer, which is named, is
            built otherwise.
    """
    name, decoder = _decoder_of(model)
    layers_name, layers = _layers_of(decoder, model)
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(embedding), (1, TOKENS), generator=generator, device="cpu")
    tokens = tokens.to(embedding.device)
    log = _Log(".".join(part for part in ("model", name, layers_name) if part))
    with torch.no_grad(), evaluating(model):
        with _returned_by(layers) as plain:
            decoder(input_ids=tokens, use_cache=False)
        with _watching(decoder, layers, log), _returned_by(layers) as watched:
            try:
                decoder(input_ids=tokens, use_cache=False)
            except Exception as error:  # a layer can do anything with its input
                if not log.events:
                    raise
                raise log.refusal(-1, f"one that {error}") from error
    for index, (before, after) in enumerate(zip(plain, watched, strict=True)):
        norms = _norms_of(log, index)
        if not isinstance(after, Watched) or not torch.allclose(after.x, before):
            raise log.refusal(index, "one that returns something else")
        if norms != _norms_of(log, 0):
            raise log.refusal(index, f"one with the norms {norms}, after {_norms_of(log, 0)}")
    if len(log.after) != 1:
        got = f"{len(log.after)} modules that do"
        raise ValueError(f"one norm must read what the last layer returns, got {got}")
    return Structure(name, layers_name, _norms_of(log, 0), log.after[0])


class Watched:
    """A stream x (B, T, d), which only norms may read and to which sublayers may add."""

    def __init__(self, x: Tensor, log: _Log) -> None:
        self.x, self.log = x, log

    def __add__(self, other: Any) -> Watched:
        self.log.events[-1].append(("adds", "", other))
        return Watched(self.x + other, self.log)

    def to(self, *args: Any, **kwargs: Any) -> Watched:
        """On another device, for a model whose layers are on several."""
        return Watched(self.x.to(device_of(args, kwargs)), self.log)

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"uses its input otherwise (`{name}`)")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function not in ADD or len(args) != 2 or kwargs:
            raise TypeError(f"uses its input otherwise ({getattr(function, '__name__', function)})")
        return args[0] + args[1] if isinstance(args[0], Watched) else args[1] + args[0]


class _Log:
    """The events of a stream. name: of the list of layers.

    events: of every layer, in order: a kind, the name of a module, and a tensor. after: the names
    of modules that read the stream behind the last layer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[list[tuple[str, str, Any]]] = []
        self.after: list[str] = []

    def refusal(self, index: int, got: str) -> ValueError:
        index = len(self.events) - 1 if index < 0 else index
        return ValueError(f"`{self.name}[{index}]` must be {PRE_NORM}: got {got}")


def _decoder_of(model: Any) -> tuple[str, nn.Module]:
    """The decoder within a model, and its name."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        got = f"a {type(model).__name__}"
        raise TypeError(f"`model` must be a causal language model of transformers, got {got}")
    if any(parameter.is_meta for parameter in model.parameters()):
        got = "some on meta, of a model that is offloaded or not loaded"
        raise TypeError(f"`model` must have its parameters in memory, got {got}")
    decoder: nn.Module = model.get_decoder()
    return next(found for found in model.named_modules() if found[1] is decoder)


def _layers_of(decoder: nn.Module, model: Any) -> tuple[str, nn.ModuleList]:
    """The list of a decoder's layers, and its name."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, child)
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1 or count == 0:
        got = f"{len(lists)} in {type(decoder).__name__}"
        raise TypeError(f"`model` must have one list of its {count} layers, got {got}")
    return lists[0]


@contextmanager
def _returned_by(layers: nn.ModuleList) -> Iterator[list[Any]]:
    """Yield a list that collects what the layers return."""
    found: list[Any] = []
    handles = [
        layer.register_forward_hook(lambda layer, args, output: found.append(output))
        for layer in layers
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watching(decoder: nn.Module, layers: nn.ModuleList, log: _Log) -> Iterator[None]:
    """Let the first layer get a Watched, and note what all of them do with it."""

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        log.events.append([])
        first = len(log.events) == 1
        return exchanged(args, kwargs, lambda x: Watched(x, log)) if first else (args, kwargs)

    def reads(name: str, note: Callable[[str], object]) -> Any:
        def hook(module: nn.Module, args: Any) -> Any:
            if not (args and isinstance(args[0], Watched)):
                return args
            note(name)
            return (args[0].x, *args[1:])

        return hook

    def returns(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(module, nn.Dropout):
                log.events[-1].append(("returns", name, output))

        return hook

    def note(name: str) -> None:
        log.events[-1].append(("norm reads", name, None))

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    for layer in layers:
        for name, child in layer.named_children():
            handles.append(child.register_forward_pre_hook(reads(name, note)))
            handles.append(child.register_forward_hook(returns(name)))
    for name, child in decoder.named_children():
        if child is not layers:
            handles.append(child.register_forward_pre_hook(reads(name, log.after.append)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def device_of(args: Any, kwargs: Any) -> torch.device:
    """The device among the arguments of `to`; TypeError if there are others that matter."""
    given = {"device": args[0] if args else None, **kwargs}
    if len(args) > 1 or given.keys() - {"device", "non_blocking"}:
        raise TypeError("uses its input otherwise (`to` with more than a device)")
    if not isinstance(given["device"], torch.device | str | int):
        raise TypeError("uses its input otherwise (`to` without a device)")
    return torch.device(given["device"])


def exchanged(args: Any, kwargs: Any, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The arguments of a layer with `make(x)` in place of x, its first or `hidden_states`."""
    if args:
        return (make(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": make(kwargs["hidden_states"])}


def _norms_of(log: _Log, index: int) -> tuple[str, str]:
    """The names of a layer's norms; raises ValueError if it is built otherwise."""
    events = log.events[index]
    if [kind for kind, _, _ in events] != EXPECTED:
        order = ", ".join(f"{name} {kind}".strip() for kind, name, _ in events)
        raise log.refusal(index, f"one in which, in this order, {order}")
    for at in (0, 4):
        (_, norm, _), (_, first, _), (_, sublayer, output), (_, _, added) = events[at : at + 4]
        output = output[0] if isinstance(output, tuple) else output
        if norm != first or not (isinstance(added, Tensor) and torch.equal(output, added)):
            raise log.refusal(index, f"one that adds something else than what {sublayer} returns")
    return events[0][1], events[4][1]
