"""Hugging Face support: ddl-rs models for the Auto classes, `generate`, the Trainer and lm-eval.

    import ddl.hf
    model = AutoModelForCausalLM.from_pretrained(directory)

The import registers `DDLConfig` and `DDLForCausalLM` with AutoConfig and AutoModelForCausalLM.
`save` writes a model of `ddl.models` and its tokenizer to such a directory, `load` reads them back.
It needs the extra `hf`: pip install 'ddl-rs[hf]'.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .cache import DDLCache
from .configuration import DDLConfig
from .files import load, save
from .modeling import DDLForCausalLM, from_gpt
from .tokenization import to_fast

__all__ = ["DDLCache", "DDLConfig", "DDLForCausalLM", "from_gpt", "load", "save", "to_fast"]

AutoConfig.register(DDLConfig.model_type, DDLConfig, exist_ok=True)
AutoModelForCausalLM.register(DDLConfig, DDLForCausalLM, exist_ok=True)
