"""The modelling file for Auto classes if `ddl.hf` was not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ddl.files import write_text
from ddl.paths import DECODER_MODEL_TYPE

MODULE = "modeling_ddl"
# The import is inside `try`, because transformers would otherwise require a package called ddl.
TEXT = '''\
"""Deep Delta Learning, for AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True).

The model itself is in the package ddl-rs; `import ddl.hf` does the same as this file.
"""

try:
    from ddl.hf import *
except ModuleNotFoundError as error:
    raise ImportError(
        f"this model needs the package ddl-rs, pip install 'ddl-rs[hf]': {error}"
    ) from error
'''


class OurConfig(PreTrainedConfig):
    """Base of our configurations.

    auto_map: as `auto_map` returns it, or {}: trl reads it of every model whose class is not in
    transformers.
    """

    auto_map: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: checkpoints refer to the installed module instead of containing a copy."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as the base class does, and the modelling file if `auto_map` names it."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.auto_map == auto_map(self):
            write_text(Path(save_directory) / f"{MODULE}.py", TEXT)


def auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """Return the `auto_map` of a config. A converted decoder has no class without a head."""
    name = type(config).__name__.removesuffix("Config")
    kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    if config.model_type == DECODER_MODEL_TYPE:
        del kinds["AutoModel"]
    return {auto: f"{MODULE}.{name}{kind}" for auto, kind in kinds.items()}
