"""Tables that a script writes between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping


def fill(page: str, tables: Mapping[str, str], *, name: str) -> str:
    """Return the page with each table between the marks of its name. ValueError without marks."""
    for mark, table in tables.items():
        marked = re.compile(rf"(<!-- {mark}: begin[^>]*-->\n).*?(<!-- {mark}: end -->)", re.DOTALL)
        page, count = marked.subn(lambda match, text=table: match[1] + text + "\n" + match[2], page)
        if count != 1:
            raise ValueError(f"{name} must have the marks of {mark} once, got {count}")
    return page
