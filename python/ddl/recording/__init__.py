"""Looking inside a model that runs: record what its sublayers do to the stream, change rewrites,
read states."""

from .editing import edit
from .lens import Lens, lens
from .quantities import ADDED, KEPT, PER_CHANNEL, QUANTITIES, REGIMES
from .recorder import Recording, Statistics, record

__all__ = [
    "ADDED",
    "KEPT",
    "PER_CHANNEL",
    "QUANTITIES",
    "REGIMES",
    "Lens",
    "Recording",
    "Statistics",
    "edit",
    "lens",
    "record",
]
