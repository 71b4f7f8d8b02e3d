"""Hugging Face support: ddl-rs models for the Auto classes, `generate`, the Trainer and lm-eval.

    import ddl.hf
    model = AutoModelForCausalLM.from_pretrained(directory)

The import registers `DDLForCausalLM` and, for nanoGPT's models, `DDLNanoGPTForCausalLM` with the
Auto classes, and their configurations.
`convert` turns the additions of other decoders, such as a Llama, into rewrites; `load_adapter` adds
rewrites that were trained beside one.
`save` writes a model of `ddl.models` and its tokenizer to such a directory, `load` reads them back.
`accelerate_delta_rule` lets transformers' own models of the delta rule over time run our kernel.
It needs the extra `hf`: pip install 'ddl-rs[hf]'.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ddl.environment import accelerates_delta_rule

from .base import OurModel
from .cache import DDLCache
from .configuration import DDLConfig, DDLNanoGPTConfig
from .decoders import DDLDecoderConfig, DDLDecoderForCausalLM, convert, load_adapter
from .delta_rule import accelerate_delta_rule
from .files import load, save
from .modeling import DDLForCausalLM, DDLModel, from_gpt
from .nanogpt import DDLNanoGPTForCausalLM, DDLNanoGPTModel
from .tokenization import to_fast

__all__ = [
    "DDLCache",
    "DDLConfig",
    "DDLDecoderConfig",
    "DDLDecoderForCausalLM",
    "DDLForCausalLM",
    "DDLModel",
    "DDLNanoGPTConfig",
    "DDLNanoGPTForCausalLM",
    "DDLNanoGPTModel",
    "OurModel",
    "accelerate_delta_rule",
    "convert",
    "from_gpt",
    "load",
    "load_adapter",
    "save",
    "to_fast",
]

for _model in (DDLForCausalLM, DDLNanoGPTForCausalLM, DDLDecoderForCausalLM):
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)
for _decoder in (DDLModel, DDLNanoGPTModel):
    AutoModel.register(_decoder.config_class, _decoder, exist_ok=True)
if accelerates_delta_rule():
    accelerate_delta_rule()
