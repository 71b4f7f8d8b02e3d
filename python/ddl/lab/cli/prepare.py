"""`ddl prepare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddl.lab.config import PrepareConfig
from ddl.lab.output import make_console

from .command import Command, parse

if TYPE_CHECKING:
    from rich.console import Console

    from ddl.lab.data.prepare import Prepared, Progress

HELP = """Turn text, JSON lines or parquet into shards of tokens for `ddl train --data`.

The same command goes on after an interruption.

ddl prepare fineweb-edu/ --out data/fineweb-edu --tokenizer gpt2"""


def run(args: list[str]) -> None:
    config = parse(PrepareConfig, args, prog="ddl prepare", description=HELP, positional=True)
    from ddl.lab.data.prepare import prepare

    with _bar(make_console(stderr=True)) as report:
        done = prepare(config, report)
    print(summary(config, done))


COMMAND = Command(
    "turn text into tokens: ddl prepare IN… --out DIR --tokenizer T", PrepareConfig, run, "data"
)


def summary(config: PrepareConfig, done: Prepared) -> str:
    """A line for the user that says how much was prepared."""
    parts = [
        f"{done.index.tokens(part):,} tokens of {done.index.documents(part):,} documents for {part}"
        for part in done.index.shards
    ]
    if done.index.without_text:
        parts.append(f"and left out {done.index.without_text:,} rows without text")
    verb = "was complete already:" if done.was_complete else "has"
    return f"{config.out} {verb} {', '.join(parts)}"


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar with bytes of the inputs, tokens per second and the remaining time."""
    from rich.progress import DownloadColumn, TextColumn

    from ddl.lab.progress import passing_bar

    speed = TextColumn("{task.fields[speed]}")
    with passing_bar(console, DownloadColumn(), speed) as bar:
        task, started = bar.add_task("preparing", total=None, speed=""), time.monotonic()

        def report(progress: Progress) -> None:
            speed = progress.tokens / max(1e-3, time.monotonic() - started)
            bar.update(
                task,
                completed=progress.done,
                total=progress.total,
                speed=f"{speed:,.0f} tokens/s",
            )

        yield report
