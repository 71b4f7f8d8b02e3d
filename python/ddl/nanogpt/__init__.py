"""nanoGPT's GPT on a delta stream: every residual addition becomes a rewrite.

    model = ddl.nanogpt.convert(model, value_channels=4)
    GPT = ddl.nanogpt.converted(GPT, value_channels=4)  # the class, at the end of model.py

Only the blocks change. Embeddings, attention, MLP, LayerNorms and head stay the same modules under
the same names, and the model's `forward` stays: it passes each block's output to the next block.
Between two blocks that output is a `DeferredRewrite` instead of a tensor, so that the next block's
read is fused with it.
"""

from __future__ import annotations

from .block import DeferredRewrite, DeltaBlock
from .mixin import logits_of_state, named_as_today, options_in
from .model import convert, converted

__all__ = [
    "DeferredRewrite",
    "DeltaBlock",
    "convert",
    "converted",
    "logits_of_state",
    "named_as_today",
    "options_in",
]
