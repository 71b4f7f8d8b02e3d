"""Conversion of transformers' decoders, whole ones and by an adapter that was saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal, TypeVar

import safetensors.torch
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ddl.errors import InputError
from ddl.nanogpt.annealing import Annealing
from ddl.nanogpt.model import check_additive
from ddl.options import Compress, ExpandKind, check_choice, check_count, refuse
from ddl.paths import at_home

from .configuration import DDLDecoderConfig
from .converted import ConvertedDecoder, add_stream, decoder_class
from .structure import structure_of

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
        add_stream(model, structure, options)
    model.__class__ = decoder_class(type(model), structure, options)
    return model


def load_adapter(model: Model, path: str | Path) -> Model:
    """Convert `model` by the adapter that a converted model's `save_pretrained` wrote; return it.

    model: the decoder for which the adapter was made, in place.
    Raises InputError if `path` has no adapter, or one of another kind of model or other sizes.
    """
    path = at_home(path, argument="path")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if not isinstance(config, DDLDecoderConfig) or config.stream.get("train") != "stream":
        raise InputError("path", "hold an adapter of a converted decoder", path)
    if type(model).__name__ != config.made_from:
        raise InputError("model", f"be a {config.made_from}", f"a {type(model).__name__}")
    most = int(config.base["vocab_size"])
    if model.config.vocab_size < most:  # the adapter's file has no embedding of new tokens
        got = f"a vocabulary of {model.config.vocab_size}"
        raise InputError("model", f"have the {most} tokens of the adapter's own", got)
    saved: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        saved |= safetensors.torch.load_file(file)
    with torch.device("meta"):
        like = _class_of(config)(copy.deepcopy(model.config))
    expected = like.state_dict()
    shapes = {name: expected[name].shape for name in like.of_stream()}
    if {name: tensor.shape for name, tensor in saved.items()} != shapes:
        must = f"hold the parameters of an adapter for this {config.made_from}"
        raise InputError("path", must, f"{path} with others")
    convert(model, **config.stream)
    model.load_state_dict(saved, strict=False)
    return model


class DDLDecoderForCausalLM(PreTrainedModel):
    """The class that AutoModelForCausalLM has for a DDLDecoderConfig.

    It makes models of the base's class; none is of this one. A converted Llama is a
    `LlamaForCausalLM` with other layers.
    """

    config_class = DDLDecoderConfig

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load a converted decoder; see PreTrainedModel.

        Raises InputError for an adapter, which is loaded beside its model.
        """
        if config is None:
            config = DDLDecoderConfig.from_pretrained(path)
        if config.stream["train"] == "stream":
            must = "hold a whole model, or be given to `ddl.hf.load_adapter(model, path)`"
            raise InputError("path", must, f"{path} with an adapter of {config.made_from}")
        kind = _class_of(config)
        loaded = kind.from_pretrained(path, *args, config=config.of_base, **kwargs)
        model: nn.Module = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, Annealing):  # whose buffer transformers has filled
                module.find_out_if_done()
        return loaded

    @classmethod
    def _from_config(cls, config: DDLDecoderConfig, **kwargs: Any) -> Any:
        return _class_of(config)._from_config(config.of_base, **kwargs)


def _class_of(config: DDLDecoderConfig) -> Any:
    return decoder_class(config.kind, config.parts, config.stream)


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
