"""Text from a finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unicodedata import category

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ddl.config import SampleConfig
from ddl.data.tokenizer import Tokenizer
from ddl.errors import InputError
from ddl.files import is_hf
from ddl.models import GPT
from ddl.train import pick_device
from ddl.train.runs import load_config, load_run


def sample(config: SampleConfig, console: Console | None = None) -> str:
    """The prompt and its continuation by the run's model; a bar on the console.

    Raises InputError.
    """
    model, tokenizer = load(config)
    with writing(console, config.tokens) as progress:
        return complete(
            model,
            tokenizer,
            config.prompt,
            tokens=config.tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            seed=config.seed,
            progress=progress,
        )


def load(config: SampleConfig) -> tuple[GPT, Tokenizer]:
    """Model, on its device, and tokenizer of a run or of what `ddl export` wrote."""
    if not is_hf(config.run):
        trained = load_config(config.run)
        return load_run(config.run, pick_device(config.device, trained.model.residual))
    from ddl import hf

    model, tokenizer = hf.load(config.run)
    if tokenizer is None:
        raise InputError(f"`run` must have a tokenizer, got {config.run} without tokenizer.json")
    return model.to(pick_device(config.device, model.config.residual)), tokenizer


@contextmanager
def writing(console: Console | None, tokens: int) -> Iterator[Callable[[], object] | None]:
    """A bar with the time left and, at the end, a line with the tokens per second."""
    if console is None:
        yield None
        return
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = not console.is_terminal  # a bar that cannot move leaves an empty line
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("writing", total=tokens)
        yield lambda: bar.advance(task)
        seconds = bar.tasks[0].elapsed or 0.0
    if seconds > 0:
        console.print(f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s", highlight=False)


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    progress: Callable[[], object] | None = None,
) -> str:
    """Continue `prompt` by `tokens` sampled tokens; equal seeds give equal text.

    `progress` is called after every token.
    """
    start = tokenizer.encode(prompt)
    if not start:
        raise InputError("`prompt` must have at least one character, got an empty one")
    idx = torch.tensor([start], device=model.wte.weight.device)
    generator = torch.Generator().manual_seed(seed)
    try:
        out = model.generate(
            idx,
            tokens,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            progress=progress,
        )
    except ValueError as error:  # its sentences name the same arguments
        raise InputError(str(error)) from error
    return tokenizer.decode(out[0].tolist())


def printable(text: str) -> str:
    """Replace control characters but newline and tab: a byte model may write escape sequences."""
    return "".join("\ufffd" if category(c) == "Cc" and c not in "\n\t" else c for c in text)
