"""`ddl sample`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddl.errors import InputError
from ddl.lab.config import SampleConfig
from ddl.lab.output import make_console

from .command import Command, parse

if TYPE_CHECKING:
    from rich.console import Console

HELP = """Continue a prompt with the model of a run directory.

ddl sample runs/ddl-tc-d256-L4-s1337 --prompt "The statement" --tokens 200"""


def run(args: list[str]) -> None:
    config = parse(SampleConfig, args, prog="ddl sample", description=HELP, positional=True)
    from ddl.models.tokenizers import printable

    print(printable(sample(config, make_console(stderr=True))))


COMMAND = Command("continue a prompt: ddl sample RUN --prompt TEXT", SampleConfig, run)


def sample(config: SampleConfig, console: Console | None = None) -> str:
    """Return the prompt continued by the model at `config.run`; show progress on the console.

    Raises InputError if the model cannot be loaded or the prompt cannot be continued.
    """
    from ddl.lab.load import complete, load_or_decoder, no_tokenizer
    from ddl.models.tokenizers import encode_prompt

    model, tokenizer = load_or_decoder(
        config.run, config.device, checkpoint=config.checkpoint, argument="run"
    )
    if tokenizer is None:
        raise no_tokenizer(config.run, "run")
    try:
        encode_prompt(config.prompt, tokenizer)
    except InputError as error:
        if config.prompt != SampleConfig.prompt:
            raise
        got = f"{error.got}, the default"
        raise InputError(error.argument, error.expected, got) from error
    with _bar(console, config.tokens) as progress:
        return complete(
            model,
            tokenizer,
            config.prompt,
            tokens=config.tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            progress=progress,
        )


@contextmanager
def _bar(console: Console | None, tokens: int) -> Iterator[Callable[[], object] | None]:
    """Show a progress bar with the remaining time and, at the end, the tokens per second."""
    if console is None:
        yield None
        return
    from rich.progress import MofNCompleteColumn

    from ddl.lab.progress import passing_bar

    with passing_bar(console, MofNCompleteColumn()) as bar:
        task = bar.add_task("writing", total=tokens)
        yield lambda: bar.advance(task)
        seconds = bar.tasks[0].elapsed or 0.0
    if seconds > 0:
        console.print(f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s", highlight=False)
