"""The progress bars of training, and of checking its data."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ddl.lab.data import Corpus
from ddl.lab.data.verifying import size_of, verify

from .processes import ALONE, Processes


def verify_corpus(corpus: Corpus, console: Console, processes: Processes = ALONE) -> None:
    """Verify the shards of a corpus under a progress bar; other corpora have nothing to verify.

    Each of several processes checks a part. Raises InputError for a damaged shard.
    """
    columns = TextColumn("checking data"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    quiet = not console.is_terminal  # without a terminal, a bar would leave an empty line
    with (
        processes.together(),
        Progress(*columns, console=console, transient=True, disable=quiet) as bar,
    ):
        task = bar.add_task("checking", total=size_of(corpus.shards) / processes.count)
        verify(
            corpus.shards,
            corpus.tokenizer.vocab_size,
            lambda count: bar.advance(task, count),
            (processes.rank, processes.count),
        )


def progress_bar(console: Console) -> Progress:
    """A progress bar with steps, recent mean loss, tokens per second and remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )
