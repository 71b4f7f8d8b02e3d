"""The tables and pictures of the documentation show the newest records."""

from __future__ import annotations

import pytest

from docs.scripts import performance, pictures
from docs.scripts.marked import fill
from study import page


@pytest.mark.parametrize("script", [performance, pictures, page])
def test_tables_and_pictures_are_current(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_table_is_stale(monkeypatch, capsys):
    whole = performance.newest

    def changed(name):
        record = whole(name)
        if name == "memory":
            record["results"][1]["saved_over_additive"] += 0.1
        return record

    monkeypatch.setattr(performance, "newest", changed)
    monkeypatch.setattr(pictures, "newest", changed)
    assert performance.main(["--check"]) == 1
    assert pictures.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "docs/performance.md is not current" in out
    assert "performance-memory.svg is not current" in out
    assert "rewrite.svg" not in out


@pytest.mark.parametrize(
    "name", ["train_step", "train_step-autocast", "memory", "decode", "ops", "streams"]
)
def test_the_table_beside_a_record_is_of_it(name):
    table = (performance.RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert performance.newest(name)["commit"]["hash"][:10] in table


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match=r"page\.md must have the marks of memory once, got 0"):
        fill("text", {"memory": "|"}, name="page.md")
