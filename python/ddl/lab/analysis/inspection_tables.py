"""The tables that `ddl inspect` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from ddl.models.tokenizers import Tokenizer, printable
from ddl.recording import Lens

from .labels import labels

__all__ = [
    "AUDIT",
    "audit_table",
    "depth_table",
    "has_rewrites",
    "lens_table",
    "sentences",
    "three_digits",
]

Summary = Mapping[str, Any]  # of `Inspection.summary`, also as inspection.json has it


def has_rewrites(summary: Summary) -> bool:
    """Whether it is of a model with rewrites; else its sublayers add to the stream."""
    return "regimes" in summary["sublayers"][0]


def depth_table(summary: Summary) -> Table:
    """One row per sublayer; fits 80 characters."""
    rewrites, tokens = has_rewrites(summary), f"means over {summary['tokens']:,} tokens"
    table = _table(f"{'Rewrites' if rewrites else 'What sublayers add,'} over depth, {tokens}")
    columns = _columns(summary) if rewrites else _columns_of_additions(summary)
    return _filled(table, _names(summary), columns)


def audit_table(summary: Summary) -> Table:
    """One row per sublayer: its discrepancy before and after, and who erases its write."""
    table = _table("Do rewrites correct, and are writes erased?")
    names = _names(summary)
    columns = {
        "before": _means(summary, "error"),
        "after": _means(summary, "error_after"),
        "shrinks": [_percent(of["shrinks"]["mean"]) for of in summary["sublayers"]],
        "erased": [_percent(_erased(row, at)) for at, row in enumerate(summary["survival"][1:], 1)],
        "most by": [_eraser(row, at, names) for at, row in enumerate(summary["survival"][1:], 1)],
    }
    return _filled(table, names, columns)


AUDIT = """\
before, after: the mean discrepancy |v − k̂ᵀX| before the rewrite and after it.
shrinks: the share of the tokens whose discrepancy becomes smaller.
erased: how much of the write, by norm, later sublayers erase; left is the rest.
most by: the sublayer that erases most of it, and how much.
"""


def _names(summary: Summary) -> list[str]:
    return labels([sublayer["name"] for sublayer in summary["sublayers"]])


def _filled(table: Table, names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    """The table with a row for each sublayer."""
    table.add_column("sublayer", no_wrap=True)
    for heading in columns:
        words = heading in ("mostly", "most by")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for label, *cells in zip(names, *columns.values(), strict=True):
        table.add_row(Text(label), *map(Text, cells))
    return table


def _erased(row: Sequence[float | None], at: int) -> float:
    """The share of a write's norm that later sublayers erase. row: of its survival; at: its own."""
    return _known(row[at]) - _known(row[-1])


def _eraser(row: Sequence[float | None], at: int, names: Sequence[str]) -> str:
    """The sublayer that erases most of a write, and its share of it."""
    left = [_known(share) for share in row[at:]]
    drops = [before - after for before, after in pairwise(left)]
    most = max(range(len(drops)), key=drops.__getitem__, default=None)
    if most is None or not drops[most] > 0:
        return "–"
    return f"{names[at + most]} {_percent(drops[most])}"


def _columns(summary: Summary) -> dict[str, list[str]]:
    """The cells under each heading, for a model with rewrites."""
    sublayers = summary["sublayers"]
    return {
        "β": _spreads(summary, "beta"),
        "error": _means(summary, "error"),
        "write": _means(summary, "write_norm"),
        "|X|": _means(summary, "state_norm_after"),
        "rank": [f"{_known(rank):.2f}" for rank in summary["effective_rank"][1:]],
        "left": [_percent(row[-1]) for row in summary["survival"][1:]],
        "share": [_percent(share) for share in summary["shares"][1:]],
        "mostly": [
            max(of["regimes"], key=lambda regime: _known(of["regimes"][regime])) for of in sublayers
        ],
    }


def _columns_of_additions(summary: Summary) -> dict[str, list[str]]:
    """The cells under each heading, for a model without rewrites."""
    columns = {
        "write": _means(summary, "write_norm"),
        "|X|": _means(summary, "state_norm_after"),
        "cosine": [_signed(_known(of["coherence"]["mean"])) for of in summary["sublayers"]],
    }
    if "effective_rank" in summary:
        columns["rank"] = [f"{_known(rank):.2f}" for rank in summary["effective_rank"][1:]]
    if "survival" in summary:
        columns["left"] = [_percent(row[-1]) for row in summary["survival"][1:]]
    return columns | {"share": [_percent(share) for share in summary["shares"][1:]]}


def _spreads(summary: Summary, quantity: str) -> list[str]:
    found = [of[quantity] for of in summary["sublayers"]]
    return [f"{_known(of['mean']):.2f} ±{_known(of['std']):.2f}" for of in found]


def _means(summary: Summary, quantity: str) -> list[str]:
    return [three_digits(_known(of[quantity]["mean"])) for of in summary["sublayers"]]


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


def sentences(summary: Summary) -> str:
    """The part left of the embedding, which has no row in the table; the columns; the text."""
    measured = f"\nMeasured on {summary['text']}." if summary.get("text") else ""
    share = _percent(summary["shares"][0])
    if "survival" in summary:
        embedding = (
            f"Of the embedding {_percent(summary['survival'][0][-1])} is left after the last"
            f" sublayer; it is {share} of the last state."
        )
    else:
        embedding = f"The embedding is {share} of the last state."
    return f"{embedding}\n{REWRITES if has_rewrites(summary) else _additions(summary)}{measured}"


REWRITES = (
    "β: gate and its spread. error: |v − p|. write: its norm. |X|, rank: norm and effective"
    " rank of the state after it. left: of the write, by norm, at the end. share: of the last"
    " state. mostly: the commonest regime."
)


def _additions(summary: Summary) -> str:
    several = "effective_rank" in summary
    rank = "|X|, rank: norm and effective rank" if several else "|X|: norm"
    left = " left: of the write, by norm, at the end." if several else ""
    return (
        f"write: norm of what the sublayer adds. {rank} of the stream after it. cosine: of the"
        f" write with that of the sublayer before.{left} share: of the last state."
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
    channels = read.channel_tokens.shape[1]
    alone = "; 0: channel 0 alone" if channels > 1 else ""
    table = _table(f"Stream lens: the next token if the stream ended there{alone}")
    table.add_column("after")
    table.add_column("all")
    for channel in range(channels if channels > 1 else 0):
        table.add_column(f"{channel}")
    for row, name in enumerate(["embedding", *labels(read.sublayers[1:])]):
        found = [_words(read.tokens[row, 0, -1], read.probabilities[row, 0, -1], tokenizer)]
        for channel in range(channels if channels > 1 else 0):
            token = read.channel_tokens[row, channel, 0, -1, :1]
            found.append(_words(token, read.channel_probabilities[row, channel, 0, -1], tokenizer))
        table.add_row(Text(name), *map(Text, found))
    return table


def _words(tokens: torch.Tensor, probabilities: torch.Tensor, tokenizer: Tokenizer) -> str:
    named = _named(tokens.tolist(), tokenizer)
    pairs = zip(named, probabilities.tolist(), strict=False)  # a channel alone names one token
    return "  ".join(f"{word} {p:.0%}" for word, p in pairs)


def _named(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [repr(printable(tokenizer.decode([token]))) for token in tokens]
