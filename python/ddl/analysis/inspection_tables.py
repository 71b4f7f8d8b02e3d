"""The tables that `ddl inspect` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from ddl.data.tokenizer import Tokenizer
from ddl.recording import Lens
from ddl.text import visible

from .labels import labels

__all__ = ["depth_table", "lens_table", "sentences", "three_digits"]


Summary = Mapping[str, Any]  # of `Inspection.summary`, also as inspection.json has it


def depth_table(summary: Summary) -> Table:
    """One row per sublayer; fits 80 characters."""
    sublayers = summary["sublayers"]
    table = _table(f"Rewrites over depth, means over {summary['tokens']:,} tokens")
    table.add_column("sublayer", no_wrap=True)
    measured = {"error": "error", "write": "write_norm", "|X|": "state_norm_after"}
    for name in ("β", *measured, "rank", "left", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mostly", no_wrap=True)
    for i, label in enumerate(labels([sublayer["name"] for sublayer in sublayers])):
        of, regimes = sublayers[i], sublayers[i]["regimes"]
        table.add_row(
            Text(label),
            f"{_known(of['beta']['mean']):.2f} ±{_known(of['beta']['std']):.2f}",
            *(three_digits(_known(of[quantity]["mean"])) for quantity in measured.values()),
            f"{_known(summary['effective_rank'][i + 1]):.2f}",
            _percent(summary["survival"][i + 1][-1]),
            _percent(summary["shares"][i + 1]),
            Text(max(regimes, key=lambda regime: _known(regimes[regime]))),
        )
    return table


def sentences(summary: Summary) -> str:
    """The part left of the embedding, which has no row in the table; the columns; the text."""
    measured = f"\nMeasured on {summary['text']}." if summary.get("text") else ""
    return (
        f"Of the embedding {_percent(summary['survival'][0][-1])} is left after the last"
        f" sublayer; it is {_percent(summary['shares'][0])} of the last state.\n"
        "β: gate and its spread. error: |v − p|. write: its norm. |X|, rank: norm and effective"
        " rank of the state after it. left: of the write, by norm, at the end. share: of the last"
        f" state. mostly: the commonest regime.{measured}"
    )


def three_digits(value: float) -> str:
    """A number with three significant digits, also if the last are 0: 2.00, 0.900, 150."""
    return f"{value:#.3g}".removesuffix(".")


def _percent(value: float | None) -> str:
    """A share in whole percent, with a minus sign, and none before 0."""
    return f"{_known(value):.0%}".replace("-0%", "0%").replace("-", "−")


def _known(value: float | None) -> float:
    """A figure of a summary, in which null stands for what is not known."""
    return math.nan if value is None else float(value)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def lens_table(read: Lens, tokenizer: Tokenizer) -> Table:
    """The likeliest next tokens after the prompt, one row per sublayer."""
    table = _table("Stream lens: the next token if the stream ended there; 0: channel 0 alone")
    table.add_column("after")
    table.add_column("all")
    channels = read.channel_tokens.shape[1]
    for channel in range(channels if channels > 1 else 0):
        table.add_column(f"{channel}")
    for row, name in enumerate(["embedding", *labels(read.sublayers[1:])]):
        found = [_words(read.tokens[row, 0, -1], read.probabilities[row, 0, -1], tokenizer)]
        for channel in range(channels if channels > 1 else 0):
            alone = read.channel_tokens[row, channel, 0, -1, :1]
            found.append(_words(alone, read.channel_probabilities[row, channel, 0, -1], tokenizer))
        table.add_row(Text(name), *map(Text, found))
    return table


def _words(tokens: torch.Tensor, probabilities: torch.Tensor, tokenizer: Tokenizer) -> str:
    named = _named(tokens.tolist(), tokenizer)
    pairs = zip(named, probabilities.tolist(), strict=False)  # a channel alone names one token
    return "  ".join(f"{word} {p:.0%}" for word, p in pairs)


def _named(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [repr(visible(tokenizer.decode([token]))) for token in tokens]
