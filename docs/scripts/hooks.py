"""The one difference from mkdocs' own behaviour: links that leave docs/ lead to the repository.

On GitHub the pages are read as files, so they link to files beside docs/. The site has none of
them: such a link becomes one to the repository (`repo_url`), or the name of the file if none is
configured. A link to a file that does not exist is a warning, as mkdocs' own are.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.links")

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\.?/[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the links of a page that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)
    root = Path(config["docs_dir"]).parent
    repository = config["repo_url"]

    def replaced(link: re.Match[str]) -> str:
        inside = posixpath.normpath(posixpath.join("docs", folder, link["target"]))
        if inside.startswith("docs/"):
            return link[0]
        if not (root / inside).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, inside)
        if not repository:
            return link["text"]
        kind = "tree" if (root / inside).is_dir() else "blob"
        return f"[{link['text']}]({repository}/{kind}/main/{inside}{link['anchor'] or ''})"

    return LINK.sub(replaced, markdown)
