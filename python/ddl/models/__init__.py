"""Language models built from the package's modules."""

from ddl.config import GPTConfig
from ddl.models.cache import Cache
from ddl.models.gpt import GPT, GPTOutput
from ddl.models.trunk import AdditiveStream

__all__ = ["GPT", "AdditiveStream", "Cache", "GPTConfig", "GPTOutput"]
