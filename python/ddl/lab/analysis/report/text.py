"""Texts of runs as a page may show them: names, samples and options are anybody's."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

from ddl.lab.train.plots import shorten
from ddl.models.tokenizers import printable

# Marks that turn the direction of what follows: with them a text can look like another one. Text in
# Arabic or Hebrew needs none; its letters have a direction.
BIDI_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_VISIBLE = str.maketrans(dict.fromkeys(BIDI_MARKS, "\ufffd"))


def visible(text: str) -> str:
    """The text with U+FFFD for control characters except newline and tab, for marks of direction
    and for what UTF-8 cannot encode. It still has to be escaped for HTML."""
    encodable = text.encode("utf-8", "replace").decode()
    return printable(encodable).translate(_VISIBLE)


def chart_text(text: str) -> str:
    """The text as plotly.js shows it unchanged: in charts it reads tags and entities."""
    return html.escape(" ".join(visible(text).split()))


def chart_labels(texts: Sequence[str], most: int = 24) -> list[str]:
    """Labels of an axis: at most this many characters, and each one different, because plotly.js
    draws two rows of one label over each other."""
    found: list[str] = []
    for text in texts:
        label = chart_text(shorten(text, most))
        same = (f"{label} ({number})" for number in itertools.count(2))
        found.append(label if label not in found else next(s for s in same if s not in found))
    return found
