"""The tables and pictures of the study, from records of known numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from study import corpus, page, pictures, records, tables
from tests.support.figures import saved_figure


def marks(*names: str) -> str:
    return "".join(
        f"{name}\n<!-- {name}: begin (made) -->\nold\n<!-- {name}: end -->\n" for name in names
    )


MARKS = {
    page.PAGE: marks("comparison", "questions", "depth", "equal"),
    page.PROTOCOL: marks(
        "audit", "smaller", "normalisation", "tuning", "devices", "provenance", "again"
    ),
}


def record(name: str, losses: list[float], *, lr: float = 1e-3, steps: int = 2000) -> str:
    made: dict[str, Any] = {
        "name": name,
        "config": {"optim": {"lr": lr}, "model": {"num_layers": 2}, "steps": steps},
        "parameters": 1_234_567,
        "versions": {"torch": "2.11.0", "python": "3.11.7"},
        "data": "d1",
        "loss": losses[-1],
        "validation": [[500 * (i + 1), loss] for i, loss in enumerate(losses)],
    }
    if name.startswith("cc"):
        means = {
            "beta": [1.0, 0.5, 1.5],
            "error": [0.1, 0.2, 0.3],
            "write_norm": [1.0, 2.0, 3.0],
            "coherence": [None, 0.1, -0.2],
        }
        made["training"] = [{"step": step, **means} for step in (500, 1000)]
        made["depth"] = {
            "coherence": [[1.0, 0.1, 0.2], [0.1, 1.0, 0.3], [0.2, 0.3, 1.0]],
            "singular_values": [[0.5, 0.2], [0.7, 0.3], [0.9, 0.4]],
            "effective_rank": [1.0, 1.5, 2.0, 1.8],
            "survival": [
                [1.0, 0.9, 0.8, 0.7],
                [None, 1.0, 0.95, 0.9],
                [None, None, 1.0, 0.85],
                [None, None, None, 1.0],
            ],
            "eigenvalue_counts": [[1, 2, 3], [0, 4, 2], [6, 0, 0]],
            "beta": [[0.5, 0.1], [1.0, 0.1], [1.5, 0.1]],
            "alpha": [0.25, 0.5, 0.75],
            "without_erasing": [losses[-1] + rise for rise in (0.0, 0.01, 0.02, 0.0, 0.03)],
        }
    return json.dumps(made) + "\n"


@pytest.fixture(autouse=True)
def _few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask about the variants that the records below have."""
    asked = {"Is it better": (("main", "cc", "additive"), ("depth", "cc", "additive")),
             "And hc": (("main", "hc", "additive"),)}  # fmt: skip
    monkeypatch.setattr(tables, "QUESTIONS", asked)
    monkeypatch.setattr(tables, "AUDITED", ("cc",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "records"
    folder.mkdir()
    finals = {"additive": (1.30, 1.32, 1.31), "cc": (1.20, 1.24, 1.19), "hc": (1.31, 1.30, 1.32)}

    def sweep(name: str, finals: dict[str, tuple[float, ...]], **options: Any) -> None:
        (folder / f"{name}.jsonl").write_text(
            "".join(
                record(f"{name}-s{seed}", [loss + 0.1, loss], **options)
                for name, values in finals.items()
                for seed, loss in enumerate(values, start=1)
            )
        )

    sweep("main", finals)
    sweep("depth", {name: finals[name] for name in ("additive", "cc")})
    sweep("equal-flops", {"cc": (1.21, 1.25, 1.20)}, steps=1900)
    sweep("equal-seconds", {"cc": (1.30, 1.34, 1.29)}, steps=1000)
    sweep("cpu", {"cc": (1.21, 1.22, 1.20), "additive": (1.30, 1.32, 1.31)})
    (folder / "tuning.jsonl").write_text(
        "".join(
            record(f"{name}-lr{lr}-s101", [loss])
            for name, lr, loss in (
                ("cc", 0.002, 1.25), ("cc", 0.001, 1.26), ("additive", 0.001, 1.3),
            )
        )
    )  # fmt: skip
    (folder / "smaller.jsonl").write_text(
        "".join(
            record(f"{name}-s{seed}", [loss])
            for name, values in {
                "default": (1.5, 1.52), "same": (1.5, 1.52), "default-bf16": (1.6, 1.6),
                "stream-bf16": (1.61, 1.63),
            }.items()
            for seed, loss in enumerate(values, start=1)
        )
    )  # fmt: skip
    for kind, losses in {"ours": (1.5, 1.6), "l2": (1.5, 1.6), "rms": (1.6, 1.8)}.items():
        text = "".join(record(f"bfloat16-s{s}", [loss]) for s, loss in enumerate(losses, start=1))
        (folder / f"normalisation-{kind}.jsonl").write_text(text)
    with (folder / "normalisation-ours.jsonl").open("a") as file:
        file.write(record("float32-s1", [1.51]) + record("float32-s2", [1.54]))
    seconds = {"additive": {"eager": [1.0, 2.0, 1.0]}, "cc": {"eager": [2.0, 3.0, 1.9]}}
    (folder / "cost.json").write_text(json.dumps({"seconds": seconds}))
    repeated = {
        "name": "cc-s2",
        "loss": {"recorded": 1.21, "again": 1.21},
        "processor": {"recorded": "a GPU", "again": "a CPU"},
    }
    (folder / "again.json").write_text(json.dumps(repeated | {"equal": {"validation": True}}))
    return folder


@pytest.fixture
def drawn(tmp_path: Path, folder: Path) -> Path:
    """The pages, and pictures, which take a second each."""
    for file, text in MARKS.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    page.write(tmp_path, folder)
    return tmp_path


@pytest.fixture
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages alone."""
    monkeypatch.setattr(page, "PICTURES", {})
    made: Path = request.getfixturevalue("drawn")
    return made


def rows(root: Path, name: str) -> list[list[str]]:
    text = "".join((root / file).read_text() for file in MARKS)
    return rows_of(text.split(f"<!-- {name}: begin (made) -->\n")[1].split("<!--")[0])


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_the_comparison(root: Path) -> None:
    """Paired differences −0.10, −0.08 and −0.12, whose t interval has 4.303 · s/√3 around it, and
    6.205 · s/√3 for two comparisons."""
    additive, hc, cc = rows(root, "comparison")
    assert additive == [
        "additive", "1,234,567", "0.001", "1.3100 ± 0.0100", "–", "–",
    ]  # fmt: skip
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert cc == [
        "ddl-cc", "1,234,567", "0.001", "1.2100 ± 0.0265", "**−0.1000**",
        f"−{0.1 + half:.4f} to −{0.1 - half:.4f}",
    ]  # fmt: skip
    assert hc[0] == "hc"
    assert hc[4] == "+0.0000"


def test_the_questions(root: Path) -> None:
    """A question is named once, and corrected for all three comparisons."""
    cc, deep, hc = rows(root, "questions")
    assert cc[:4] == ["Is it better", "4", "**−0.1000**", "ddl-cc − additive"]
    assert deep[:4] == ["", "4", "**−0.1000**", "ddl-cc − additive"]
    assert hc[:4] == ["And hc", "4", "+0.0000", "hc − additive"]


def test_the_deeper_models(root: Path) -> None:
    additive, cc = rows(root, "depth")
    assert additive[:4] == ["additive", "1,234,567", "1.3100 ± 0.0100", "–"]
    assert cc[3] == "−0.1000"


def test_equal_cost(root: Path) -> None:
    """All differences are from the same additive runs, those of the comparison."""
    (cc,) = rows(root, "equal")
    assert (cc[0], cc[2], cc[4], cc[5]) == ("ddl-cc", "1,900", "1.90", "1,000")
    assert [cell.split(" ")[0] for cell in (cc[1], cc[3], cc[6])] == [
        "−0.1000",
        "−0.0900",
        "+0.0000",
    ]


def test_what_is_erased(root: Path) -> None:
    assert rows(root, "audit") == [
        ["ddl-cc", "β", "0.50", "1.00", "1.50", ""],
        ["", "α", "0.25", "0.50", "0.75", ""],
        ["", "erased later", "0.10", "0.15", "0.00", ""],
        ["", "loss without", "0.010", "0.020", "0.000", "0.030"],
    ]


def test_two_devices(root: Path, folder: Path) -> None:
    """Runs whose options differ are not compared."""
    assert rows(root, "devices") == [
        ["additive", "+0.0000", "+0.0000"],
        ["ddl-cc", "+0.0000", "+0.0200"],
    ]
    file = folder / "cpu.jsonl"
    file.write_text(file.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    assert tables.devices(page.compared(folder), records.read("cpu", folder)).count("\n") == 1


@pytest.mark.parametrize(("comparisons", "mean"), [(1, "**+0.0933**"), (2, "+0.0933")])
def test_more_comparisons_ask_for_a_clearer_difference(comparisons: int, mean: str) -> None:
    """0.06, 0.10, 0.12 are 5.29 standard errors; t is 4.303, or 6.205 for one of two."""
    base = {seed: records.Trained("a", seed, {"loss": 1.0}) for seed in range(3)}
    runs = {
        seed: records.Trained("b", seed, {"loss": 1.0 + difference})
        for seed, difference in enumerate((0.06, 0.10, 0.12))
    }
    assert tables._difference(base, runs, comparisons).split(" | ")[0] == mean


def test_seeds_that_a_variant_lacks_are_left_out(folder: Path) -> None:
    file = folder / "main.jsonl"
    file.write_text(file.read_text() + record("cc-s4", [1.0, 1.0]))
    assert {name: list(runs) for name, runs in page.compared(folder).items()} == {
        "additive": [1, 2, 3], "hc": [1, 2, 3], "cc": [1, 2, 3],
    }  # fmt: skip


def test_the_learning_rates(root: Path) -> None:
    assert rows(root, "tuning") == [
        ["additive", "**1.3000**", "–"],
        ["ddl-cc", "1.2600", "**1.2500**"],
    ]


def test_the_smaller_questions(root: Path) -> None:
    """Each against the default of its precision; equal runs have a difference of exactly 0."""
    found = {row[0]: row[1:] for row in rows(root, "smaller")}
    assert found["same"] == ["1.5100 ± 0.0141", "0", "the same numbers"]
    assert found["stream-bf16"][:2] == ["1.6200 ± 0.0141", "+0.0200"]
    assert found["default-bf16"][1] == "–"
    assert found["eps-of-the-papers"][:2] == ["1.5250 ± 0.0212", "+0.0150"]
    assert list(found) == [
        "default", "eps-of-the-papers", "default-bf16", "stream-bf16", "same",
    ]  # fmt: skip


def test_the_states_that_are_stored_change_no_loss() -> None:
    """Of the committed records: every validation loss, not the last one alone."""
    found = records.read("smaller")
    stored, default = found["every-state-stored"], found["default"]
    assert list(stored) == list(default) == [1, 2, 3]
    for seed, run in stored.items():
        assert run.record["validation"] == default[seed].record["validation"]


def test_how_k_is_normalised(root: Path) -> None:
    """Differences 0.1 and 0.2, whose t interval of one degree of freedom has 12.706 · s/√2."""
    found = {(row[0], row[1]): row[2:] for row in rows(root, "normalisation")}
    assert list(found) == [
        ("float32", "ours"), *(("bfloat16", kind) for kind in ("ours", "l2", "rms")),
    ]  # fmt: skip
    assert found["bfloat16", "l2"] == ["1.5500 ± 0.0707", "0", "the same numbers"]
    half = 12.7062 * 0.0707107 / math.sqrt(2)
    assert found["bfloat16", "rms"][1:] == ["+0.1500", f"−{half - 0.15:.4f} to +{half + 0.15:.4f}"]


def test_what_all_runs_had_in_common(root: Path, folder: Path) -> None:
    def found() -> dict[str, str]:
        return {row[0]: row[1] for row in rows(root, "provenance")}

    data = "tokens, digest of `ddl train`"
    assert found()["corpus, SHA-256"] == f"`{corpus.SHA256}`"
    assert (found()[data], found()["torch"]) == ("`d1`", "2.11.0")
    assert "| of all 46 runs | |" in (root / page.PROTOCOL).read_text()
    assert found()["trained on"] == "a CPU that was not named (46)"
    file = folder / "tuning.jsonl"
    file.write_text(file.read_text().replace('"d1"', '"d2"', 1))
    page.write(root, folder)
    assert found()[data] == "`d1, d2`"


def test_the_run_that_was_drawn(root: Path, folder: Path) -> None:
    shown = ["cc-s2", "1.21 (a GPU)", "1.21 (a CPU)"]
    assert rows(root, "again") == [[*shown, "is the same"]]
    made = json.loads((folder / "again.json").read_text())
    assert rows_of(tables.redrawn(made | {"equal": {"validation": True, "depth": False}})) == [
        [*shown, "differs"]
    ]


def test_what_is_not_current(drawn: Path, folder: Path) -> None:
    assert page.stale(drawn, folder) == []
    with (folder / "smaller.jsonl").open("a") as file:
        file.write(record("default-s3", [1.4]))
    assert page.stale(drawn, folder) == [page.PROTOCOL]
    with (folder / "main.jsonl").open("a") as file:
        file.write(record("hc-s4", [1.4, 1.3]))
    with (folder / "cpu.jsonl").open("a") as file:
        file.write(record("cc-s4", [1.4, 1.3]))
    assert page.stale(drawn, folder) == [*page.PICTURES, page.PROTOCOL]
    page.write(drawn, folder)
    assert page.stale(drawn, folder) == []
    (drawn / "docs/results-gates.png").unlink()
    assert page.stale(drawn, folder) == ["docs/results-gates.png"]
    (drawn / page.PROTOCOL).write_text(MARKS[page.PROTOCOL].replace("tuning: end", "tuning: fin"))
    with pytest.raises(ValueError, match="must have the marks of tuning once, got 0"):
        page.stale(drawn, folder)


def test_the_curves(folder: Path, tmp_path: Path) -> None:
    runs = page.compared(folder)
    draw, _ = page.PICTURES["docs/results-curves.png"]
    figure = saved_figure(lambda: draw(runs, tmp_path / "curves.png", "digest"))
    losses, differences = figure.axes
    means = {line.get_label(): list(line.get_ydata()) for line in losses.lines}
    assert means["ddl-cc"] == pytest.approx([1.31, 1.21])
    assert means["additive"] == pytest.approx([1.41, 1.31])
    hc, cc = (list(bar[0].get_ydata()) for bar in differences.containers)
    assert cc == pytest.approx([-0.1, -0.1])
    assert hc == pytest.approx([0, 0])


def test_a_variant_without_rewrites_has_no_heat_map(folder: Path) -> None:
    runs = page.compared(folder)
    assert list(pictures.with_rewrites(runs)) == ["cc"]


def test_the_spectra(folder: Path, tmp_path: Path) -> None:
    runs = page.compared(folder)
    draw, _ = page.PICTURES["docs/results-spectra.png"]
    values, ranks = saved_figure(lambda: draw(runs, tmp_path / "spectra.png", "digest")).axes
    (cc,) = values.containers
    assert cc.get_label() == "ddl-cc"
    assert list(cc[0].get_ydata()) == pytest.approx([0.7, 0.3])
    ends = [[y for _, y in segment] for segment in cc[2][0].get_segments()]
    assert ends == [pytest.approx([0.5, 0.9]), pytest.approx([0.2, 0.4])]
    assert list(ranks.lines[0].get_ydata()) == pytest.approx([1.0, 1.5, 2.0, 1.8])
