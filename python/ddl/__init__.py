"""Deep Delta Learning residuals as fused operators for PyTorch.

    X'  =  X + β k̂ (vᵀ − k̂ᵀ X)          instead of          x' = x + F(x)

`DeltaResidual` is the drop-in for one addition; `DeltaStream` is the fused way through a whole
trunk with an expanded residual stream; `ddl.functional` has the operators, `ddl.reference` the
equations in plain PyTorch. Formulas: Deep Delta Learning, arXiv 2601.00417.
"""

from . import functional, reference
from ._native import __version__
from .residual import DeltaResidual
from .stream import DeltaStream, Expand, Read

__all__ = [
    "DeltaResidual",
    "DeltaStream",
    "Expand",
    "Read",
    "__version__",
    "functional",
    "reference",
]
