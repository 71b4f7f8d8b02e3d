"""release/notes.py prints the changelog's section for a tag, or says why there is no release."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

VERSION = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
TITLE = f"## [{VERSION}] - 2027-01-31\n"
SECTIONS = """
### Added

- `gate`: an option ([docs/gate.md](docs/gate.md), [the paper](https://arxiv.org/abs/2601.00417)).

"""
OLDER = "## [0.0.1] - 2026-01-31\n\n- Older.\n"


def notes(root: Path, tag: str, changelog: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script beside this repository's Cargo.toml and a changelog."""
    shutil.copy(ROOT / "Cargo.toml", root)
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n{changelog}", "utf-8")
    (root / "release").mkdir()
    script = shutil.copy(ROOT / "release" / "notes.py", root / "release")
    return subprocess.run([sys.executable, script, tag], capture_output=True, text=True)


def test_the_section_of_the_version_is_printed(tmp_path):
    run = notes(tmp_path, f"v{VERSION}", TITLE + SECTIONS + OLDER)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "### Added\n\n- `gate`: an option (docs/gate.md, "
        "[the paper](https://arxiv.org/abs/2601.00417)).\n"
    )


@pytest.mark.parametrize(
    ("tag", "changelog", "sentence"),
    [
        ("v9.9.9", TITLE + SECTIONS, f"The tag must be v{VERSION}, the version in Cargo.toml, got"),
        (VERSION, TITLE + SECTIONS, f"got {VERSION}; change one of them."),
        (f"v{VERSION}", SECTIONS, "give [Unreleased] that title."),
        (f"v{VERSION}", OLDER, f"CHANGELOG.md must have a text below `## [{VERSION}] - `"),
        (f"v{VERSION}", f"## [{VERSION}]\n{SECTIONS}", "and a date, and has none"),
        (f"v{VERSION}", f"{TITLE}\n{OLDER}", "CHANGELOG.md must have a text"),
    ],
    ids=["other version", "no v", "unreleased", "other section", "no date", "empty"],
)
def test_nothing_is_released_otherwise(tmp_path, tag, changelog, sentence):
    run = notes(tmp_path, tag, changelog)
    assert run.returncode == 1
    assert run.stdout == ""
    assert sentence in run.stderr
    assert len(run.stderr.splitlines()) == 1
