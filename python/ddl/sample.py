"""Text from a finished run."""

from __future__ import annotations

from unicodedata import category

import torch

from ddl.commands import SampleConfig
from ddl.config import InputError
from ddl.models import GPT
from ddl.runs import load_config, load_run
from ddl.tokenizer import Tokenizer
from ddl.train import pick_device


def sample(config: SampleConfig) -> str:
    """The prompt and its continuation by the run's model. Raises InputError."""
    trained = load_config(config.run)
    device = pick_device(config.device, trained.model.residual)
    model, tokenizer = load_run(config.run, device)
    return complete(
        model,
        tokenizer,
        config.prompt,
        tokens=config.tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """Continue `prompt` by `tokens` sampled tokens; equal seeds give equal text."""
    start = tokenizer.encode(prompt)
    if not start:
        raise InputError("`prompt` must have at least one character, got an empty one")
    idx = torch.tensor([start], device=model.wte.weight.device)
    generator = torch.Generator().manual_seed(seed)
    try:
        out = model.generate(idx, tokens, temperature=temperature, top_k=top_k, generator=generator)
    except ValueError as error:  # its sentences name the same arguments
        raise InputError(str(error)) from error
    return tokenizer.decode(out[0].tolist())


def printable(text: str) -> str:
    """Replace control characters but newline and tab: a byte model may write escape sequences."""
    return "".join("\ufffd" if category(c) == "Cc" and c not in "\n\t" else c for c in text)
