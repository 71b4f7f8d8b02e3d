"""The modules: each holds parameters and calls one fused operator."""

from .convolution import Slot
from .expand import Expand
from .history import History
from .mixer import DeltaMixer
from .read import Read
from .residual import DeltaResidual
from .stream import DeltaStream

__all__ = ["DeltaMixer", "DeltaResidual", "DeltaStream", "Expand", "History", "Read", "Slot"]
