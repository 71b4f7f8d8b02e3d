"""Looking inside a model that runs: record what its rewrites do, change them, read their states."""

from .editing import edit
from .lens import Lens, lens
from .quantities import KEPT, PER_CHANNEL, QUANTITIES, REGIMES
from .recorder import Recording, Statistics, record

__all__ = [
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
