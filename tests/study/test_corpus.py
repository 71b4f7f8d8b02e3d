"""The study's corpus: which paragraphs of a page are taken, and that packages are checked."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from study import corpus

SENTENCE = "The delta rule erases what it overwrites, along one direction of the state."
OTHER = "Every sublayer reads the stream through a compression and writes with a rewrite."


def paragraphs(page: str) -> list[str]:
    parser = corpus.Paragraphs()
    parser.feed(page)
    parser.end_paragraph()
    return parser.found


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (f"<p>{SENTENCE}</p><p>{OTHER}</p>", [SENTENCE, OTHER]),
        (f"<p>{SENTENCE.replace(' ', chr(10) + '  ')}</p>", [SENTENCE]),
        (f"<div>{SENTENCE}<ul><li>{OTHER}</ul>", [SENTENCE, OTHER]),
        (f"<p>The <code>delta</code> rule{SENTENCE[14:]}</p>", [SENTENCE]),
        (f"<pre>{SENTENCE}</pre><table><tr><td>{SENTENCE}</table><nav>{SENTENCE}</nav>", []),
        (f"<head><title>{SENTENCE}</title></head><script>{SENTENCE}</script>", []),
        (f"<p>{SENTENCE[:40]}.</p>", []),  # short
        (f"<p>{SENTENCE[:-1]}</p>", []),  # without an end
        (f"<p>{SENTENCE.lower()}</p>", []),  # without a beginning
    ],
)
def test_paragraphs(page: str, expected: list[str]) -> None:
    assert paragraphs(page) == expected


def test_each_paragraph_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PACKAGES", {"one": ("1", ""), "two": ("2", "")})
    long = [f"{SENTENCE[:-1]}, and once more for the {n}th time." for n in range(12)]
    for name, texts in (("one/a", long[:8]), ("one/b", long[:3]), ("two/a", [*long[6:], *long])):
        page = tmp_path / f"{name}.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text("".join(f"<p>{text}</p>" for text in texts))
    found = list(corpus.documents(tmp_path))
    assert [each["source"] for each in found] == ["one/a.html"]  # the rest is short or known
    monkeypatch.setattr(corpus, "LEAST_DOCUMENT", 100)
    found = list(corpus.documents(tmp_path))
    assert [each["source"] for each in found] == ["one/a.html", "two/a.html"]
    assert found[1]["text"] == "\n".join(long[8:])


@pytest.mark.parametrize("apt_get", [None, "#!/bin/sh\nexit 100\n"], ids=["none", "fails"])
def test_what_apt_get_cannot_fetch_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apt_get: str | None
) -> None:
    if apt_get is not None:
        (tmp_path / "apt-get").write_text(apt_get)
        (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^apt-get cannot fetch debian-handbook=.*: run apt-get"):
        corpus.fetch(tmp_path)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_packages_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"<p>{SENTENCE[:-1]}, and once more for the {n}th time.</p>" for n in range(8))
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: doc\nVersion: 1:2\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"
    (tree / "DEBIAN" / "control").write_text(control)
    (tree / "page.html").write_text(text)
    built = tmp_path / "doc_1%3a2_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(tree), str(built)], check=True, capture_output=True)
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    arguments = [str(tmp_path / "corpus.jsonl"), "--packages", str(tmp_path)]

    monkeypatch.setattr(corpus, "PACKAGES", {"doc": ("1:2", "0" * 64)})
    with pytest.raises(SystemExit, match=f"must have SHA-256 0000.*, got {digest}"):
        corpus.main(arguments)
    monkeypatch.setattr(corpus, "PACKAGES", {"doc": ("1:2", digest)})
    with pytest.raises(SystemExit, match="the corpus must have SHA-256") as refused:
        corpus.main(arguments)
    assert not (tmp_path / "corpus.jsonl").exists()
    monkeypatch.setattr(corpus, "SHA256", re.findall("[0-9a-f]{64}", str(refused.value))[1])
    corpus.main(arguments)
    (line,) = (tmp_path / "corpus.jsonl").read_text().splitlines()
    assert json.loads(line)["text"].startswith(SENTENCE[:-1])
    monkeypatch.setattr(corpus, "PACKAGES", {"doc": ("1:3", digest)})
    with pytest.raises(SystemExit, match=r"has no doc_1%3a3_all\.deb"):
        corpus.main(arguments)
