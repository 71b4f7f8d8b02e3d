"""Converted decoders: the modules that they gain, and the methods of their classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ddl.hf.cache import cache_in, history_in, refuse_continuous_batching
from ddl.nanogpt.annealing import Annealing, count_steps
from ddl.nanogpt.mixin import WithOptions, derived
from ddl.nanogpt.model import FIXED, stream_for
from ddl.nn.stream import DeltaStream

from .configuration import DDLDecoderConfig
from .entry import TOKENS, Entry, check_arguments, looks_back, tokens_of
from .stream import FinalNorm, Place, Scale, StreamNorm, check_norm, reading_norm
from .structure import Structure

# Of the parameters that stay float32 in a model of a half-precision dtype.
FLOAT32_PATTERNS = [r"\.(read|res|scale)_[12]\.", r"\.expand\.weight$", r"\.readout\.compress_"]


def add_stream(model: Any, structure: Structure, options: dict[str, Any]) -> None:
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


class ConvertedDecoder(WithOptions):
    """Mixin before the class of a model, which is converted when it is made.

    structure: of the model, in every class that `decoder_class` returns.
    """

    structure: ClassVar[Structure]
    _keep_in_fp32_modules_strict: ClassVar[list[str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kept = super()._keep_in_fp32_modules_strict or ()  # type: ignore[misc]
        cls._keep_in_fp32_modules_strict = [*kept, *FLOAT32_PATTERNS]

    def _convert(self, **options: Any) -> None:
        add_stream(self, self.structure, options)

    @property
    def is_adapter(self) -> bool:
        """Whether only the stream is trained and saved."""
        return bool(self.delta_args["train"] == "stream")

    @property
    def stream_modules(self) -> list[str]:
        """The names of what the conversion added, for `modules_to_save` of PEFT's LoraConfig.

        Reads that share a compression are left out: a copy of one would be trained for it alone.
        """
        shared = self.delta_args["sublayers_per_compressor"] > 1
        names = ["res_1", "res_2", *(() if shared else ("read_1", "read_2"))]
        names += ["scale_1", "scale_2", "expand", "readout"]
        found = {
            name.rpartition(".")[2]
            for name, module in self.named_modules()
            if next(module.parameters(), None) is not None
        }
        return [name for name in names if name in found]

    def reset_parameters(self) -> None:
        """Initialise what the conversion added, as after `to_empty`."""
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, Scale):
                module.reset_parameters()

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last layer.

        For one value channel the state is (B, T, d, 1).
        """
        model: Any = self
        norm: Any = model.get_submodule(self.structure.decoder).get_submodule(self.structure.final)
        state = state.squeeze(-1) if state.shape[-1] == 1 else state
        _, x = norm.readout(state, return_compressed=True)
        logits: Tensor = model.get_output_embeddings()(norm(x))
        return logits

    # --- generation and training ------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Add a history to the cache, which records its past if the cache does."""
        base: Any = super()
        done = base._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        past = cache_in(model_kwargs)
        if past is not None and looks_back(self.delta_args):
            decoder = self.get_submodule(self.structure.decoder)
            history_in(past, len(getattr(decoder, self.structure.layers)))
            if generation_config.is_assistant:  # and the cache was told before
                past.activate_past_recording()
        return done

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,  # by name, or transformers would not pass it on
        **kwargs: Any,
    ) -> Any:
        """Note the padding, before a mask of another shape is made for a static cache."""
        base: Any = super()
        kwargs["inputs_embeds"] = inputs_embeds
        inputs = base.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if looks_back(self.delta_args):
            mask = {"attention_mask": kwargs.get("attention_mask")}
            inputs[TOKENS] = tokens_of({**inputs, "position_ids": None, **mask})
        return inputs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """No compilation behind the user's back of what a history keeps between two passes."""
        base: Any = super()
        return not looks_back(self.delta_args) and base._valid_auto_compile_criteria(
            *args, **kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, from `generate_batch`, if reads of several tokens need a history."""
        if looks_back(self.delta_args):
            refuse_continuous_batching("reads of several tokens need the past of the stream")
        base: Any = super()
        return base.init_continuous_batching(*args, **kwargs)

    # --- files ------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as the base class does, with a DDLDecoderConfig; of an adapter, the stream alone."""
        base: Any = super()
        if self.is_adapter:
            own: Any = kwargs.get("state_dict") or self.state_dict()
            names = self.of_stream()
            kwargs["state_dict"] = {name: own[name] for name in own if name in names}
        model: Any = self
        config, model.config = model.config, DDLDecoderConfig.of(model)
        try:
            base.save_pretrained(save_directory, *args, **kwargs)
        finally:
            model.config = config


def decoder_class(kind: Any, structure: Structure, options: dict[str, Any]) -> Any:
    """The subclass of a transformers class whose models are converted when they are made."""
    pairs = tuple(sorted(options.items()))
    return derived(kind, ConvertedDecoder, structure=structure, options=pairs)


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
