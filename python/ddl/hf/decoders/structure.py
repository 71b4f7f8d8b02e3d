"""Where a decoder adds: its layers and norms, found by running it on an input that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ddl.recording.sublayers import evaluating

ADD = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)

TOKENS = 8  # of the input on which a model is watched
PRE_NORM = (
    "x + F(norm(x)) twice, attention and MLP; post-norms, parallel sublayers and multipliers of "
    "the residual are not supported"
)


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

    The model runs on eight random tokens, in evaluation mode. The modules of every layer must be
    norm, sublayer, norm and sublayer, and the norms' inputs and the layer's output must be the sums
    of its input and the sublayers' outputs.

    Raises:
        TypeError: `model` is no decoder of transformers. ValueError: a layer, which is named, is
            built otherwise.
    """
    name, decoder = _decoder_of(model)
    layers_name, layers = _layers_of(decoder, model)
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(embedding), (1, TOKENS), generator=generator, device="cpu")
    with torch.no_grad(), evaluating(model), _watched(decoder, layers) as (passes, after):
        decoder(input_ids=tokens.to(embedding.device), use_cache=False)
    where = ".".join(part for part in ("model", name, layers_name) if part)
    norms = {index: _norms_of(seen, f"{where}[{index}]") for index, seen in enumerate(passes)}
    for index, names in norms.items():
        if names != norms[0]:
            raise _refusal(f"{where}[{index}]", f"one with the norms {names}, after {norms[0]}")
    if len(after) != 1:
        got = f"{len(after)} modules that do"
        raise ValueError(f"one norm must read what the last layer returns, got {got}")
    return Structure(name, layers_name, norms[0], after[0])


@dataclass
class _Pass:
    """A pass through a layer, noted by hooks: its input and output, and the calls of its modules.

    calls: the name of each module, dropouts left out, its first positional argument, its output.
    """

    x: Tensor | None = None
    calls: list[tuple[str, Tensor | None, Tensor | None]] = field(default_factory=list)
    output: Tensor | None = None

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self.x = _copied(args or kwargs["hidden_states"])

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.output = _copied(output)

    def called(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Note a call, and add 1 to its output: sublayers of a new model may return zeros."""
        if not isinstance(module, nn.Dropout):
            several = isinstance(output, tuple)
            output = (output[0] + 1, *output[1:]) if several else output + 1
            self.calls.append((name, _copied(args), _copied(output)))
        return output


def _norms_of(seen: _Pass, layer: str) -> tuple[str, str]:
    """The names of a layer's norms; raises ValueError if it is built otherwise."""
    if len(seen.calls) != 4:
        names = ", ".join(name for name, _, _ in seen.calls)
        raise _refusal(layer, f"one that calls {names}")
    (first, before_first, _), (one, _, f), (second, before_second, _), (two, _, g) = seen.calls
    x = seen.x
    if not _same(before_first, x):
        raise _refusal(layer, f"one whose input is not that of {first}")
    for added, name, total in ((f, one, before_second), (g, two, seen.output)):
        x = None if x is None or added is None else x.to(added.device) + added
        if not _same(x, total):
            raise _refusal(layer, f"one that does not add what {name} returns, and nothing else")
    return first, second


def _refusal(layer: str, got: str) -> ValueError:
    return ValueError(f"`{layer}` must be {PRE_NORM}: got {got}")


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return x is not None and y is not None and torch.equal(x, y.to(x.device))


@contextmanager
def _watched(decoder: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[list[_Pass], list[str]]]:
    """Yield the passes through the layers, and the names of modules that read the last output."""
    passes, after = [_Pass() for _ in layers], list[str]()
    handles = []
    for layer, seen in zip(layers, passes, strict=True):
        handles.append(layer.register_forward_pre_hook(seen.enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(seen.leave))
        for name, child in layer.named_children():
            handles.append(child.register_forward_hook(partial(seen.called, name)))

    def reads(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _same(_copied(args), passes[-1].output):
            after.append(name)

    for name, child in decoder.named_children():
        handles.append(child.register_forward_hook(partial(reads, name)))
    try:
        yield passes, after
    finally:
        for handle in handles:
            handle.remove()


def _copied(x: Any) -> Tensor | None:
    """A copy of a tensor, or of the first of several; later operations may be in place."""
    x = x[0] if isinstance(x, tuple) and x else x
    return x.clone() if isinstance(x, Tensor) else None


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
