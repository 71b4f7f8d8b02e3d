"""Print the changelog's section for a tag: `python3 release/notes.py v0.2.0`.

The tag has to be `v` and the version in Cargo.toml, and the section has to have a date and a text.
If not, it says so in a sentence and returns 1, and nothing is released.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path) -> str:
    """Return the package's version in Cargo.toml."""
    package = (root / "Cargo.toml").read_text("utf-8").partition("[package]")[2]
    return re.search(r'^version = "(.+)"$', package, flags=re.MULTILINE)[1]


def notes(root: Path, tag: str) -> str:
    """Return the text of the tag's section. Raise ValueError if there is something to mend."""
    number = version(root)
    if tag != f"v{number}":
        raise ValueError(
            f"The tag must be v{number}, the version in Cargo.toml, got {tag}; change one of them."
        )
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    title = rf"\[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d\n"
    text = next((s.partition("\n")[2].strip() for s in sections if re.match(title, s)), "")
    if not text:
        raise ValueError(
            f"CHANGELOG.md must have a text below `## [{number}] - ` and a date, and has none; "
            "give [Unreleased] that title."
        )
    # A page of GitHub's releases is not beside the files that the changelog links.
    return re.sub(r"\[([^\]]+)\]\((?!https://)[^)]+\)", r"\1", text) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("`notes.py` takes one argument, the tag: python3 release/notes.py v0.2.0")
    try:
        sys.stdout.write(notes(ROOT, sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
