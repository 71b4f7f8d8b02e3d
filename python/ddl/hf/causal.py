"""CausalName: the classes' names, by which transformers knows a model that predicts next tokens."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["CausalName"]


class CausalName:
    """Mixin: the Trainer shifts the labels of this class and its subclasses.

    With `label_smoothing_factor` it computes the loss itself, and shifts labels only for names in
    this table, to which AutoModelForCausalLM.register adds none. FSDP2 makes a subclass of another
    name.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__
