"""Conversion of transformers' decoders: additions become rewrites in the layers' own forward."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ddl.nanogpt.annealing import Annealing, count_steps
from ddl.nanogpt.model import FIXED, check_additive, stream_for
from ddl.nn.stream import DeltaStream
from ddl.options import Compress, ExpandKind, check_choice, check_count, refuse

from .converted import FLOAT32_PATTERNS, ConvertedDecoder
from .entry import Entry, check_arguments, looks_back
from .stream import FinalNorm, Place, Scale, StreamNorm, check_norm, reading_norm
from .structure import Structure, structure_of

Model = TypeVar("Model", bound=PreTrainedModel)

ANNEAL_STEPS = 2000


def convert(
    model: Model,
    *,
    value_channels: int = 1,
    compress: Compress | None = None,
    expand: ExpandKind = "repeat",
    start: Literal["additive"] | None = "additive",
    anneal_steps: int | None = None,
    train: Literal["all", "stream"] = "all",
    **options: Any,
) -> Model:
    """Turn every addition of a transformers decoder into a rewrite, in place, and return `model`.

        model = ddl.hf.convert(AutoModelForCausalLM.from_pretrained("…"), value_channels=4)

    The layers stay the model's own, with their norms, sublayers, dropouts and roundings. A `Stream`
    passes through them in place of the hidden states: their norms read it, their `+` rewrites it.
    Every entry of the state dict keeps its name and its numbers. Each layer gains gates and values
    (`res_1`, `res_2`) and compressions (`read_1`, `read_2`); if they have parameters, the
    first layer gains `expand` and the final norm `readout`. They are in float32, and initialised as
    in DeltaStream. torch's random state is left unchanged.

    A trained model computes another function once its additions are rewrites. With
    start="additive" it computes the same one at first, to rounding, and reaches the rewrites step
    by step of the optimizer that trains it, as `ddl.nanogpt.convert` says.

    train="stream" makes an adapter: the additions stay, and after each of them comes a rewrite

        X' = Y + s β k̂ (v − k̂ᵀY)ᵀ,   Y = X + F 1ᵀ

    whose factor s, a parameter (1,), starts at 0, so the model computes what it did. Only what was
    added is trained and saved.

    Args:
        model: a causal language model of transformers with pre-norm layers (Llama, Mistral, Qwen 2
            and 3, SmolLM 3, Phi 3, GPT-2 and others). It runs on eight tokens, which finds
            its norms and that its layers are x + F(norm(x)).
        value_channels, compress, expand: as in DeltaStream.
        start: "additive" to start as the model is; None for rewrites from the start.
        anneal_steps: optimizer steps until every addition has become a rewrite; None for 2000.
            Only with start="additive" and train="all".
        train: "all" parameters, or only those of the "stream".
        options: further options of DeltaStream, including those of DeltaResidual. norm_eps,
            norm_affine, device and dtype are not allowed: the model sets them.

    Raises:
        TypeError: `model` is no decoder of transformers; an option is unknown.
        ValueError: a layer is built otherwise (it is named); `model` is already converted;
            DeltaStream refuses an option; `start`, `anneal_steps` or `train` does not fit.
    """
    options |= {"value_channels": value_channels, "compress": compress, "expand": expand}
    options |= _checked_start(start, anneal_steps, train, **options)
    if isinstance(model, ConvertedDecoder):
        raise ValueError("`model` must be as transformers made it, got one already converted")
    structure = structure_of(model)
    with torch.inference_mode(False):  # its parameters could not be trained
        convert_with(model, structure, options)
    kind: Any = type(model)
    model.__class__ = decoder_class(kind, structure, tuple(sorted(options.items())))
    return model


def convert_with(model: Any, structure: Structure, options: dict[str, Any]) -> None:
    """Add the modules of the options to a model of this structure, and let its norms read streams.

    The model's class stays as it is. Raises before anything is changed.
    """
    decoder = model.get_submodule(structure.decoder)
    layers = getattr(decoder, structure.layers)
    final = getattr(decoder, structure.final)
    like = model.get_input_embeddings().weight
    for norm in (final, *(getattr(layer, name) for layer in layers for name in structure.norms)):
        check_norm(norm)
    dtype = torch.promote_types(like.dtype, torch.float32)
    stream, known = stream_for(
        [nn.Identity() for _ in range(2 * len(layers))],  # places: the layers have the sublayers
        options,
        like=like,
        dtype=dtype,
        own=("start", "anneal_steps", "train"),
        fixed=FIXED,
        caller="ddl.hf.convert",
    )
    if looks_back(known):
        check_arguments(layers)
    adapter = options["train"] == "stream"
    if adapter:
        model.requires_grad_(False)
    for number, layer in enumerate(layers):
        _add_parts(layer, number, stream, structure.norms)
        if adapter:
            layer.scale_1, layer.scale_2 = (
                _beside(Scale(device=like.device, dtype=dtype), layer) for _ in range(2)
            )
    layers[0].expand = _beside(stream.expand, layers[0])
    if options["anneal_steps"] is not None:
        annealing = Annealing(options["anneal_steps"], device=like.device)
        layers[0].anneal = annealing.train(layers[0].training)
        count_steps(model)
    final.readout = _beside(stream.readout, final)
    reading_norm(final, FinalNorm)
    model.delta_args = known
    Entry(
        *(decoder, layers, final),
        looks_back=looks_back(known),
        anchor_every=stream.anchor_every,
        stream_dtype=stream.stream_dtype,
    )


@cache  # so that a copy is of the same class
def decoder_class(kind: Any, structure: Structure, options: tuple[tuple[str, Any], ...]) -> Any:
    """The subclass of a transformers class whose models are converted when they are made."""
    contents = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "structure": structure,
        "options": dict(options),
        "_keep_in_fp32_modules_strict": [
            *(kind._keep_in_fp32_modules_strict or ()),
            *FLOAT32_PATTERNS,
        ],
        "made_of": (decoder_class, kind, structure, options),
    }
    return type(kind.__name__, (_ConvertedWhenMade, kind), contents)


class _ConvertedWhenMade(ConvertedDecoder):
    """Mixin that converts a model at the end of its class's `__init__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        convert_with(self, self.structure, self.options)


def _checked_start(start: Any, anneal_steps: Any, train: Any, **options: Any) -> dict[str, Any]:
    """Return the options of how a model starts, anneal_steps filled in; raise if they don't fit."""
    check_choice("train", train, ("all", "stream"))
    check_choice("start", start, ("additive",), optional=True)
    if start is not None:
        check_additive(**options)
    elif train == "stream":
        refuse("start", '"additive" with train="stream"', start, ("train",))
    if start is not None and train == "all":
        anneal_steps = ANNEAL_STEPS if anneal_steps is None else anneal_steps
        check_count("anneal_steps", anneal_steps)
    elif anneal_steps is not None:
        must = 'left out unless start="additive" and train="all"'
        refuse("anneal_steps", must, anneal_steps, ("start", "train"))
    return {"start": start, "anneal_steps": anneal_steps, "train": train}


def _add_parts(layer: Any, number: int, stream: DeltaStream, norms: tuple[str, str]) -> None:
    """Give a layer its reads and residuals, and let its norms read streams."""
    for at, norm_name in enumerate(norms):
        norm = getattr(layer, norm_name)
        setattr(layer, f"read_{at + 1}", _beside(stream.reads[2 * number + at], layer))
        setattr(layer, f"res_{at + 1}", _beside(stream.residuals[2 * number + at], layer))
        reading_norm(norm, StreamNorm)
        norm.place = Place(layer, at + 1, number)


def _beside(part: nn.Module, module: nn.Module) -> nn.Module:
    """A part of the stream on the device and in the mode of a module; on meta it stays there."""
    like, own = next(module.parameters(), None), next(part.parameters(), None)
    if like is not None and own is not None and not own.is_meta:
        part.to(like.device)
    return part.train(module.training)
