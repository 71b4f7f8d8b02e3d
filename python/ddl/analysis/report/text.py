"""Texts of runs as a page may show them: names, samples and options are anybody's."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ddl.text import visible
from ddl.train.plots import shorten

from ..labels import distinct


def chart_text(text: str) -> str:
    """The text as plotly.js shows it unchanged: in charts it reads tags and entities."""
    return html.escape(" ".join(visible(text).split()))


def chart_labels(texts: Sequence[str], most: int = 24) -> list[str]:
    """Labels of an axis: at most this many characters, and each one different, because plotly.js
    draws two rows of one label over each other."""
    return distinct([chart_text(shorten(text, most)) for text in texts])
