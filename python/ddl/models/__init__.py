"""Language models built from the package's modules.

Names are imported on first use: `ddl.models.config`, which commands' options need, loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Cache
    from .config import GPTConfig
    from .flops import Flops, flops_by_part, flops_per_token
    from .gpt import GPT, GPTOutput
    from .nanogpt import NanoGPT, NanoGPTConfig
    from .streams.additive import AdditiveStream

__all__ = [
    "GPT",
    "AdditiveStream",
    "Cache",
    "Flops",
    "GPTConfig",
    "GPTOutput",
    "NanoGPT",
    "NanoGPTConfig",
    "flops_by_part",
    "flops_per_token",
]

_HOMES = {
    "GPT": ".gpt",
    "AdditiveStream": ".streams.additive",
    "Cache": ".cache",
    "Flops": ".flops",
    "GPTConfig": ".config",
    "GPTOutput": ".gpt",
    "NanoGPT": ".nanogpt",
    "NanoGPTConfig": ".nanogpt",
    "flops_by_part": ".flops",
    "flops_per_token": ".flops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value
