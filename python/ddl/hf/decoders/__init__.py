"""Decoders of transformers on a delta stream: every residual addition becomes a rewrite.

    model = ddl.hf.convert(model, value_channels=4)

The layers stay transformers' own and call their own norms and sublayers. What passes between them
is a `Stream`: norms read it, and adding to it rewrites it.
"""

from __future__ import annotations

from .configuration import DDLDecoderConfig
from .conversion import DDLDecoderForCausalLM, convert, load_adapter
from .stream import Stream

__all__ = ["DDLDecoderConfig", "DDLDecoderForCausalLM", "Stream", "convert", "load_adapter"]
