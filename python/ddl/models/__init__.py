"""Language models built from the package's modules."""

from ddl.config import GPTConfig

from .cache import Cache
from .gpt import GPT, GPTOutput
from .nanogpt import NanoGPT, NanoGPTConfig
from .trunk import AdditiveStream

__all__ = ["GPT", "AdditiveStream", "Cache", "GPTConfig", "GPTOutput", "NanoGPT", "NanoGPTConfig"]
