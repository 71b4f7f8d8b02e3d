"""Hugging Face: ddl-rs models for the Auto classes, `generate`, the Trainer and lm-eval.

    import ddl.hf
    model = AutoModelForCausalLM.from_pretrained(directory)

The import registers `DDLConfig` and `DDLForCausalLM` with AutoConfig and AutoModelForCausalLM.
`save` and `load` carry a model and its tokenizer from `ddl.models` into such a directory and back.
Needs the extra `hf`: pip install 'ddl-rs[hf]'.
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
