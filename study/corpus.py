"""The study's text: the prose of seven of Debian's documentation packages, one document per page.

    python study/corpus.py study/corpus.jsonl                 # fetches the packages with apt-get
    python study/corpus.py study/corpus.jsonl --packages DIR  # takes the .deb files in DIR

A document holds the paragraphs of one HTML page, in order: whole sentences without tables, code and
navigation, each paragraph once in the whole corpus. It is a line of JSON with `text` and `source`.
The packages have fixed versions and checksums (PACKAGES), so the file is the same everywhere;
versions that have left Debian's mirrors are on snapshot.debian.org.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# Package → its version and the SHA-256 of its .deb file. Debian 12.
PACKAGES = {
    "debian-handbook": (
        "11.20220922",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
    ),
    "debian-policy": (
        "4.6.2.0",
        "ef9d01b625c3b87c3a845c2cd1b66f1a16e9240b2b9e5bee53472a00e8457a39",
    ),
    "developers-reference": (
        "12.18",
        "0dba82f6fa16e373f2a84ad07e7971aa9264ad2e7d2ae46b37edbc9c5fd57e2e",
    ),
    "git-doc": (
        "1:2.39.5-0+deb12u3",
        "3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
    ),
    "postgresql-doc-15": (
        "15.20-0+deb12u1",
        "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
    ),
    "python3.11-doc": (
        "3.11.2-6+deb12u9",
        "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
    ),
    "sqlite3-doc": (
        "3.40.1-2+deb12u2",
        "466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
    ),
}
SHA256 = "c3cdedf615053b3f90218e74f34c8a9bfbe6b564e1fdf99ea3221c0a555719b9"  # of the corpus

SKIPPED = {"script", "style", "head", "nav", "table", "pre", "form"}
BLOCKS = {"p", "li", "h1", "h2", "h3", "h4", "dd", "dt", "blockquote", "div"}
LEAST_PARAGRAPH, LEAST_DOCUMENT = 60, 500  # characters


class Paragraphs(HTMLParser):
    """The paragraphs of a page that look like sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._text: list[str] = []
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in SKIPPED:
            self._skipped += 1
        if tag in BLOCKS:
            self.end_paragraph()

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipped = max(0, self._skipped - 1)
        if tag in BLOCKS:
            self.end_paragraph()

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text.append(data)

    def end_paragraph(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self._text)).strip()
        self._text = []
        if len(text) >= LEAST_PARAGRAPH and text[0].isupper() and text[-1] in ".:!?)":
            self.found.append(text)


def documents(folder: Path) -> Iterator[dict[str, str]]:
    """The documents of the packages that are unpacked below `folder`, each in its own folder."""
    seen: set[str] = set()
    for package in PACKAGES:
        pages = sorted(path for path in (folder / package).rglob("*.html") if path.is_file())
        for page in pages:
            if package == "debian-handbook" and "en-US" not in page.parts:
                continue
            parser = Paragraphs()
            parser.feed(page.read_text(encoding="utf-8", errors="replace"))
            parser.end_paragraph()
            paragraphs = [text for text in dict.fromkeys(parser.found) if text not in seen]
            seen.update(paragraphs)
            text = "\n".join(paragraphs)
            if len(text) >= LEAST_DOCUMENT:
                yield {"text": text, "source": f"{package}/{page.name}"}


def unpack(packages: Path, folder: Path) -> None:
    """Check the .deb files in `packages` and unpack each below `folder`."""
    for package, (version, sha256) in PACKAGES.items():
        name = f"{package}_{version.replace(':', '%3a')}_all.deb"
        file = packages / name
        if not file.exists():
            sys.exit(f"{packages} has no {name}: fetch it from snapshot.debian.org")
        got = hashlib.sha256(file.read_bytes()).hexdigest()
        if got != sha256:
            sys.exit(f"{file} must have SHA-256 {sha256}, got {got}")
        subprocess.run(["dpkg-deb", "-x", str(file), str(folder / package)], check=True)


def fetch(folder: Path) -> None:
    """Fetch the packages' .deb files with apt-get into `folder`."""
    for package, (version, _) in PACKAGES.items():
        wanted = f"{package}={version}"
        try:
            subprocess.run(["apt-get", "download", wanted], cwd=folder, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            sys.exit(
                f"apt-get cannot fetch {wanted}: run apt-get update, or fetch the packages from "
                "snapshot.debian.org and name their folder with --packages"
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="the file to write, JSON lines")
    parser.add_argument("--packages", type=Path, help="folder with the .deb files; else apt-get")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packages = args.packages
        if packages is None:
            packages = folder / "packages"
            packages.mkdir()
            fetch(packages)
        unpack(packages, folder)
        lines = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents(folder))
    got = hashlib.sha256(lines.encode()).hexdigest()
    if got != SHA256:
        sys.exit(f"the corpus must have SHA-256 {SHA256}, got {got}: is this another Python?")
    args.out.write_text(lines, encoding="utf-8")
    print(f"{args.out}: {lines.count(chr(10)):,} documents, {len(lines.encode()):,} bytes")


if __name__ == "__main__":
    main()
