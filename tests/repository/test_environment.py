"""docs/environment.md lists every environment variable; each language reads them in one file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

LISTED = set(re.findall(r"`([A-Z]\w+)`", (ROOT / "docs" / "environment.md").read_text("utf-8")))
PYTHON, RUST = ROOT / "python" / "ddl" / "environment.py", ROOT / "src" / "environment.rs"
FOLDERS = ("python", "src", "kernels", "tests", "benchmarks", "docs")
SUFFIXES = {".py", ".rs", ".c", ".cpp", ".cu", ".cuh", ".h", ".md"}
# How a variable is read, and the name in such a place.
READS = {
    ".py": re.compile(r"\bos\s*\.\s*(environ|getenv|putenv)|from os import .*environ"),
    ".rs": re.compile(r"\benv::(\w*vars?(_os)?|home_dir|\{)|\benv::\*|\bvar(_os)?\(\""),
}
LITERAL = re.compile(
    r"(?:environ\w*[.\w]*[\[(]|getenv\(|is_set\(|set_default\(|setting\(|var(?:_os)?\(|named\()\"([A-Z_]+)\""
)


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        files = (ROOT / folder).rglob("*")
        yield from (path for path in files if path.suffix in SUFFIXES and path.is_file())


@pytest.mark.parametrize(("folder", "place"), [("python", PYTHON), ("src", RUST)])
def test_one_place_reads_the_environment(folder: str, place: Path) -> None:
    reads = READS[place.suffix]
    found = {
        str(path.relative_to(ROOT))
        for path in sources(folder)
        if path.suffix == place.suffix and reads.search(path.read_text("utf-8"))
    }
    assert found == {str(place.relative_to(ROOT))}


def test_every_variable_is_listed() -> None:
    """Ours wherever they are named, and others where native code, Python or C asks for them."""
    named: dict[str, Path] = {}
    for path in sources(*FOLDERS):
        text = path.read_text("utf-8")
        names = re.findall(r"\b(?:DDL|STAND_IN)_[A-Z_]*[A-Z]\b", text) + LITERAL.findall(text)
        named |= dict.fromkeys(names, path)
    assert {"DDL_PLAN", "XDG_CACHE_HOME", "STAND_IN_LOG", "DDL_EMULATOR_ORDER"} <= named.keys()
    unlisted = {name: path for name, path in named.items() if name not in LISTED | {"PATH"}}
    assert unlisted == {}


def test_no_variable_is_listed_that_is_gone() -> None:
    ours = {name for name in LISTED if name.startswith(("DDL_", "STAND_IN_"))}
    texts = [
        path.read_text("utf-8")
        for path in sources("python", "src", "tests", "benchmarks")
        if path != Path(__file__)
    ]
    assert {name for name in ours if not any(name in text for text in texts)} == set()
