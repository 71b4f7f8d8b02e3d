"""Tables that a script writes between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ddl.files import write_text


def fill(page: str, tables: Mapping[str, str], *, name: str) -> str:
    """Return the page with each table between the marks of its name. ValueError without marks."""
    for mark, table in tables.items():
        marked = re.compile(rf"(<!-- {mark}: begin[^>]*-->\n).*?(<!-- {mark}: end -->)", re.DOTALL)
        page, count = marked.subn(lambda match, text=table: match[1] + text + "\n" + match[2], page)
        if count != 1:
            raise ValueError(f"{name} must have the marks of {mark} once, got {count}")
    return page


def write_tables(page: Path, tables: Mapping[str, str], *, command: str, check: bool) -> int:
    """Write the tables into a page; with `check` only say whether it has them, exit status 1."""
    old = page.read_text(encoding="utf-8")
    new = fill(old, tables, name=page.name)
    if not check:
        write_text(page, new)
    elif new != old:
        print(f"{page.name} is stale: run python -m {command}", file=sys.stderr)
    return int(check and new != old)
