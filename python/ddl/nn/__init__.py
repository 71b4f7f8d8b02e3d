"""The modules: each holds parameters and calls one fused operator."""

from .expand import Expand
from .history import History
from .read import Read
from .residual import DeltaResidual
from .stream import DeltaStream

__all__ = ["DeltaResidual", "DeltaStream", "Expand", "History", "Read"]
