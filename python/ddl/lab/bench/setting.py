"""The sizes of a run, with the device's defaults filled in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddl.lab.config import BenchConfig, GPTConfig
from ddl.models.config import idle_options

# Sizes that the user may leave open. A GPU needs more work than a CPU before its speed shows.
CPU = {"hidden_size": 384, "time": 256, "batch": 4}
GPU = {"hidden_size": 1024, "time": 1024, "batch": 16}
VOCABULARY = 256


@dataclass(frozen=True)
class Setting:
    """Sizes of the measurement: d, m, blocks of a model, T, B, new tokens, rounds, dtype."""

    residuals: tuple[str, ...]
    hidden_size: int
    value_channels: int
    layers: int
    time: int
    batch: int
    tokens: int
    repeats: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        chosen: torch.dtype = getattr(torch, self.dtype)
        return chosen

    def sizes(self) -> dict[str, Any]:
        """The values that two comparable runs share, as JSON types."""
        names = "hidden_size value_channels layers time batch tokens dtype"
        return {name: getattr(self, name) for name in names.split()}

    def model(self, residual: str, layers: int) -> GPTConfig:
        """The configuration of a model with this residual."""
        config = GPTConfig(
            residual=residual,  # type: ignore[arg-type]
            vocab_size=VOCABULARY,
            block_size=self.time + self.tokens,
            num_layers=layers,
            num_heads=max(1, self.hidden_size // 64),
            hidden_size=self.hidden_size,
        )
        options: dict[str, Any] = {"value_channels": self.value_channels}
        options["stream_dtype"] = "bfloat16" if self.dtype == "bfloat16" else None
        idle = idle_options(vars(config))
        return replace(config, **{name: options[name] for name in options.keys() - idle})

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast to bfloat16 if that is the dtype; nothing for float32."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")


def setting_of(config: BenchConfig, device: torch.device) -> Setting:
    """The sizes of a run on `device`."""
    defaults = GPU if device.type == "cuda" else CPU
    given = {name: getattr(config, name) for name in Setting.__dataclass_fields__}
    for name, size in defaults.items():
        given[name] = size if given[name] is None else given[name]
    return Setting(**given)
