"""nanochat's GPT on a delta stream: every residual addition becomes a rewrite.

    GPT = ddl.nanochat.converted(GPT, value_channels=4)  # at the end of nanochat/gpt.py
    KVCache = ddl.nanochat.cached(KVCache)  # in nanochat/engine.py, after the class

Only the blocks change. Embeddings, smear, value embeddings, attention, MLP, the scalars of the
stream, head and loss stay the same modules under the same names, and the model's `forward` stays:
it scales what a block returned, mixes in the first embedding and passes it to the next block.
Between two blocks that is a `State` instead of a tensor.
"""

from __future__ import annotations

from .block import DeltaBlock
from .model import convert, converted
from .state import State, cached

__all__ = ["DeltaBlock", "State", "cached", "convert", "converted"]
