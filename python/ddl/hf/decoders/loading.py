"""Load converted decoders: whole ones by the Auto classes, adapters beside a model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from transformers import AutoConfig, PreTrainedModel

from ddl.errors import InputError
from ddl.paths import at_home

from .configuration import DDLDecoderConfig
from .conversion import convert, decoder_class

Model = TypeVar("Model", bound=PreTrainedModel)


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
        return _class_of(config).from_pretrained(path, *args, config=config.of_base, **kwargs)

    @classmethod
    def _from_config(cls, config: DDLDecoderConfig, **kwargs: Any) -> Any:
        return _class_of(config)._from_config(config.of_base, **kwargs)


def _class_of(config: DDLDecoderConfig) -> Any:
    return decoder_class(config.kind, config.parts, tuple(sorted(config.stream.items())))


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
    found: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    with torch.device("meta"):
        like = _class_of(config)(copy.deepcopy(model.config))
    expected = like.state_dict()
    shapes = {name: expected[name].shape for name in like.of_stream()}
    if {name: tensor.shape for name, tensor in found.items()} != shapes:
        must = f"hold the parameters of an adapter for this {config.made_from}"
        raise InputError("path", must, f"{path} with others")
    convert(model, **config.stream)
    model.load_state_dict(found, strict=False)
    return model
