"""Checkpoints of the paper's published code (Deep Delta Learning, arXiv 2601.00417): in and out.

    config, state = convert(*load("checkpoint.pt"))
    model = GPT(config)
    model.load_state_dict(state)

All published variants, gates, values and compressors are known; what a checkpoint is, its names and
shapes tell.
"""

from .exporting import revert
from .files import Checkpoint, import_checkpoint, load
from .importing import Translation, Variant, convert, translate
from .names import Layout

__all__ = [
    "Checkpoint",
    "Layout",
    "Translation",
    "Variant",
    "convert",
    "import_checkpoint",
    "load",
    "revert",
    "translate",
]
