"""Other libraries beside ours: stand-ins are called as the real ones, missing ones are named."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.test_benchmarks import load
from tests.support import library_standins

__all__ = ["load"]  # a fixture
OTHERS = ("authors", "tile-kernels", "liger-kernel")
D = 32


@pytest.fixture
def beside(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times a stand-in beside ours on a CPU."""
    clock = load("ddl.lab.bench.clock").Clock(torch.device("cpu"), 2**16)
    sizes = {"batch": 2, "time": 13, "state": torch.bfloat16, "features": torch.bfloat16}
    case = load("ddl.lab.bench.problems").Case("rewrite_read", "channel", D, 4, **sizes)
    libraries = load("gpu.libraries")

    def run(name: str) -> list[Any]:
        folder = library_standins.install(name, tmp_path, monkeypatch)
        monkeypatch.setattr(libraries.metadata, "version", lambda package: "0.8.5")
        return load("gpu.beside").compare(clock, case, name, 2, 2, folder)

    return run


@pytest.mark.parametrize("name", OTHERS)
def test_a_library_is_checked_and_timed_beside_ours(beside: Any, name: str) -> None:
    ours, other = beside(name)
    assert [ours["library"], other["library"]] == ["ours", name]
    assert other["version"] == ("d1f7621" if name == "authors" else "0.8.5")
    for line in (ours, other):
        assert line["gate"]["red"] is None
        assert line["gate"]["worst"] < 0.6
        assert line["beside"] == name
        assert list(line["one_row_us"]) == ["no grad", "forward + backward"]
        assert len(line["forward"]["seconds"]) == len(line["copy"]["seconds"]) == 2
        assert line["forward"]["bytes"] == 2 * 13 * D * 2 * 10
        assert line["backward"]["bytes"] == 2 * 13 * D * 2 * 15


@pytest.mark.parametrize("name", OTHERS)
def test_a_library_is_checked_a_sequence_at_a_time(
    load: Any, beside: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As at the sizes that are timed, where the reference has no memory for all of them."""
    monkeypatch.setattr(load("ddl.lab.bench.problems"), "AT_ONCE", 13 * D * 4)
    assert [line["gate"]["red"] for line in beside(name)] == [None, None]


@pytest.mark.parametrize(
    ("name", "function"),
    [("authors", "FusedDeepDeltaFunction"), ("tile-kernels", "mhc_post"),
     ("tile-kernels", "mhc_pre"), ("liger-kernel", "liger_mhc_pre")],
)  # fmt: skip
def test_what_is_wrong_elsewhere_is_not_timed(
    load: Any, beside: Any, monkeypatch: pytest.MonkeyPatch, name: str, function: str
) -> None:
    right = getattr(library_standins, function)
    if name == "authors":
        apply = right.apply
        monkeypatch.setattr(right, "apply", staticmethod(lambda *given: 1.2 * apply(*given)))
    else:

        def wrong(*given: Any, **numbers: Any) -> Any:
            found = right(*given, **numbers)
            return (1.2 * found[0], found[1]) if isinstance(found, tuple) else 1.2 * found

        monkeypatch.setattr(library_standins, function, wrong)
    ours, other = beside(name)
    assert "rms error" in other["gate"]["red"]
    assert not {"forward", "one_row_us"} & other.keys()
    assert ours["gate"]["red"] is None
    assert "forward" in ours
    table = load("gpu.tables_others").others([{"part": "others", **x} for x in (ours, other)])
    assert [row[3] for row in table.rows] == ["RED"]


def test_what_raises_elsewhere_costs_its_own_row_alone(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(x: Any, h_pre: Any) -> Any:
        raise RuntimeError("PassManager::run failed\nat a line")

    monkeypatch.setattr(library_standins, "liger_mhc_pre", refuse)
    ours, other = beside("liger-kernel")
    assert other["gate"]["red"] == "RuntimeError: PassManager::run failed"
    assert "forward" in ours


def test_a_missing_library_is_named_in_a_sentence(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = load("gpu.libraries")
    why = libraries.why_skipped
    assert why("ours", "cpu", None) is None
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(libraries.metadata, "version", version)
    liger = "pip install 'liger-kernel==0.8.*'"
    assert why("liger-kernel", "cuda", None) == f"not installed: {liger}"
    assert why("tile-kernels", "cuda", None) == "not installed: pip install 'tile-kernels==1.0.*'"
    versions["liger-kernel"] = "0.9.0"
    assert why("liger-kernel", "cuda", None) == (
        f"version 0.9.0 is installed, whose API may be another: {liger}"
    )
    versions["liger-kernel"] = "0.8.5"
    assert why("liger-kernel", "cuda", None) is None
    assert why("liger-kernel", "cpu", None) == "its kernels need a GPU"

    assert why("authors", "cuda", None) == (
        "give --authors FOLDER, a clone of github.com/yifanzhang-pro/deep-delta-learning at "
        "d1f7621, with its requirements (pydantic, Triton)"
    )
    assert why("authors", "cuda", str(tmp_path)) == (
        "--authors must be a clone at d1f7621: it has no model/modules/ddl_shortconv.py"
    )
    library_standins.install("authors", tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert why("authors", "cuda", str(tmp_path)) == "this code needs Python 3.14, this is 3.12"
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert why("authors", "cuda", str(tmp_path)) is None


def test_the_table_has_ours_once_and_says_what_each_computes(load: Any) -> None:
    def line(library: str, beside: str, seconds: float) -> dict[str, Any]:
        half = {"median": seconds, "gb_s": 2.0 / seconds}
        return {
            "part": "others", "what": library, "library": library, "beside": beside, "d": 768,
            "version": "1.0.0", "copy": {"gb_s": 4.0}, "forward": half, "backward": half,
            "one_row_us": {"no grad": 10.0, "forward + backward": 30.0},
        }  # fmt: skip

    lines = [
        line("ours", "ours", 1.0),
        line("ours", "tile-kernels", 0.8),
        line("tile-kernels", "tile-kernels", 2.0),
        {"part": "others", "what": "Liger", "skipped": "not installed: pip install it"},
    ]
    table = load("gpu.tables_others").others(lines)
    assert table.rows == [
        ["ddl-rs", "1.0.0", "768", "50", "50", "1.00", "10.0", "30.0"],
        ["TileKernels", "1.0.0", "768", "25", "25", "2.50", "10.0", "30.0"],
    ]
    assert [note.partition(":")[0] for note in table.notes] == [
        "ddl-rs", "TileKernels", "Liger is left out",
    ]  # fmt: skip
    assert "another function of the same bytes" in table.notes[1]


def test_the_piece_of_a_library_gets_the_folder(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In call 2 alone, and a missing library's piece gives its sentence."""
    calls, workers = load("gpu.calls"), load("gpu.main").NO_WORKERS
    monkeypatch.setattr(calls, "why_skipped", lambda name, *_: "no" if name[0] == "l" else None)
    part = calls.parts("2", "cuda", workers, None, "/clone")[-1]
    assert part.name == "others"
    ours, authors, liger, _ = part.pieces
    assert (ours.fresh, authors.fresh) == (False, True)
    assert authors.arguments["folder"] == "/clone"
    assert authors.arguments["library"] == "authors"
    assert [case["d"] for case in authors.arguments["cases"]] == [768, 2048, 4096]
    assert list(liger.lines(1)) == [{"what": "Liger", "skipped": "no"}]
    assert all(part.name != "others" for part in calls.parts("3", "cuda", workers, None))
