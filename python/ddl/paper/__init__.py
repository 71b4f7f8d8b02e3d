"""Import and export checkpoints of the paper's code (Deep Delta Learning, arXiv 2601.00417).

    config, state = convert(*load("checkpoint.pt"))
    model = GPT(config)
    model.load_state_dict(state)

All published variants, gates, values and compressors are supported. They are recognised by the
names and shapes of the parameters.
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
