"""The methods that a converted decoder's class has besides its own: saving, loading, generation."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ddl.hf.cache import cache_in, history_in, refuse_continuous_batching
from ddl.nanogpt.annealing import Annealing
from ddl.nanogpt.mixin import WithOptions

from .configuration import DDLDecoderConfig
from .entry import TOKENS, looks_back, tokens_of
from .stream import Scale
from .structure import Structure

# Of the parameters that stay float32 in a model of a half-precision dtype.
FLOAT32_PATTERNS = [r"\.(read|res|scale)_[12]\.", r"\.expand\.weight$", r"\.readout\.compress_"]


class ConvertedDecoder(WithOptions):
    """Mixin that `convert` puts before the class of a model.

    structure, options: of the conversion, in every class that `convert` makes.
    """

    structure: ClassVar[Structure]
    options: ClassVar[dict[str, Any]]

    @property
    def is_adapter(self) -> bool:
        """Whether only the stream is trained and saved."""
        return bool(self.options["train"] == "stream")

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

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as the base class does."""
        base: Any = super()
        loaded = base.from_pretrained(*args, **kwargs)
        model: nn.Module = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, Annealing):
                module.find_out_if_done()
        return loaded
