"""Small models of every kind for the tests of ddl.hf, directories with them, and commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from ddl.lab import cli
from ddl.lab.config import RESIDUALS, GPTConfig, TrainConfig
from ddl.lab.train.runs import RunDirectory
from ddl.models import GPT, NanoGPT, NanoGPTConfig
from ddl.models.tokenizers import Tokenizer as OurTokenizer
from tests.support.prepare_cases import write_tokenizer

# No test may use the network.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

# transformers 5.23 gave the method, and the Trainer's option, a new name.
HAS_NEW_NAME = hasattr(PreTrainedModel, "activation_checkpointing_enable")
CHECKPOINTING = "activation_checkpointing" if HAS_NEW_NAME else "gradient_checkpointing"

VOCABULARY = 61
VARIANTS: dict[str, dict[str, Any]] = {name: {"residual": name} for name in RESIDUALS}
# Options beyond the residual that change the set of parameters.
VARIANTS |= {
    "mlp-gate": {"residual": "ddl-tc", "gate": "mlp", "gate_hidden": 8, "eps_k": 0.3},
    "factored": {"residual": "ddl-cc", "compress_parameterization": "factored"},
    "constant": {"residual": "ddl", "value": "constant"},
    "wide-heads": {"residual": "additive", "head_size": 24},
    "v-map": {"residual": "ddl-cc", "mapping": "v", "direction": "mean"},
    "gate-of-state": {"residual": "ddl-tc", "gate_from": "convolved"},
    "two-rewrites": {"residual": "ddl-tc", "rewrites": 2, "direction_rank": 4},
    "write-only": {"residual": "ddl-cc", "erase": "none"},
    "mixers": {"residual": "ddl-cc", "mixer": "multi-value", "mixer_n": 2, "mixer_gated": True},
    "hybrid": {"residual": "additive", "mixer": "deltanet", "mixer_layers": (1,)},
    "flatten": {"residual": "ddl-cc", "gate_from": "flatten", "mlp_size": 20, "read_init": 0.5},
}


def small(**options: Any) -> GPTConfig:
    sizes = {"vocab_size": VOCABULARY, "block_size": 40, "num_layers": 2}
    return GPTConfig(**{**sizes, "num_heads": 2, "hidden_size": 32, **options})


# Operators in sequence, for tests.support.tolerances: four sublayers, their rewrites, the head.
DEPTH = 4 + 4 + 1


def model(noise: float = 0.3, **options: Any) -> GPT:
    """A model whose trunk is not at its initialisation, so its output depends on all tokens."""
    torch.manual_seed(0)
    gpt = GPT(small(**options)).eval()
    shake_(gpt.trunk, noise)
    return gpt


def nanogpt(**options: Any) -> NanoGPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "block_size": 40, "n_layer": 2}
    return NanoGPT(NanoGPTConfig(**{**sizes, "n_head": 2, "n_embd": 32, **options})).eval()


def shake_(module: nn.Module, std: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(std * torch.randn_like(parameter))


def tokens(*shape: int, seed: int = 1, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows: torch.Tensor, lengths: list[int], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the first `lengths` tokens of each row on one side; return tokens and mask."""
    ids, mask = torch.full_like(rows, 7), torch.zeros_like(rows)
    for i, length in enumerate(lengths):
        real = slice(rows.shape[1] - length, None) if side == "left" else slice(0, length)
        ids[i, real], mask[i, real] = rows[i, :length], 1
    return ids, mask


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def byte_pair_files(directory: Path) -> Path:
    """Write a GPT-2-style tokenizer.json with 300 tokens into a new directory."""
    directory.mkdir()
    write_tokenizer(directory / "tokenizer.json", size=300)
    return directory


# --- commands -------------------------------------------------------------------------------------


def a_run(
    out: Path, tokenizer: OurTokenizer, residual: str = "ddl-cc", vocab_size: int = 256
) -> str:
    gpt = model(residual=residual, vocab_size=vocab_size)
    RunDirectory.create(TrainConfig(model=gpt.config, data=None, out=out), tokenizer).save(gpt)
    return str(out)


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.lstrip()


def refused(capsys: pytest.CaptureFixture[str], sentence: str, *args: str) -> None:
    assert said(capsys, *args) == (1, "", f"ddl {args[0]}: {sentence}\n")
