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

# Those without torch come first.
_HOMES = (".config", ".flops", ".cache", ".gpt", ".nanogpt", ".streams.additive")


def __getattr__(name: str) -> Any:
    homes = (import_module(home, __name__) for home in _HOMES if name in __all__)
    for home in homes:
        if hasattr(home, name):
            value = globals()[name] = getattr(home, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
