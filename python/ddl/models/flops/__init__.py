"""FLOPs per token of every residual and model, one formula per part; imports no torch."""

from .count import Flops
from .model import flops_by_part, flops_per_token

__all__ = ["Flops", "flops_by_part", "flops_per_token"]
