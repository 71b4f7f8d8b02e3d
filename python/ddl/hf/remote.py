"""The modelling file for Auto classes if `ddl.hf` was not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddl.files import write_text

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


def auto_map(config: Any) -> dict[str, str]:
    """Return the `auto_map` of a config of ours."""
    name = type(config).__name__
    kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    return {auto: f"{MODULE}.{name.removesuffix('Config')}{kind}" for auto, kind in kinds.items()}


def write(directory: Path) -> None:
    """Write the modelling file that `auto_map` refers to into a directory."""
    write_text(directory / f"{MODULE}.py", TEXT)
