"""Import and export checkpoints of the paper's code (Deep Delta Learning, arXiv 2601.00417).

    config, state = convert(*load("checkpoint.pt"))
    model = GPT(config)
    model.load_state_dict(state)

All published variants, gates, values and compressors are supported. They are recognised by the
names and shapes of the parameters.
"""

from .conversion import Translation, Variant, convert, revert, translate
from .files import Checkpoint, import_checkpoint, load
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
