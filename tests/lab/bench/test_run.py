"""`ddl bench` end to end at tiny sizes, and what is wrong is not timed. No test looks at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ddl import functional
from ddl.lab import cli
from ddl.lab.bench import agreement
from ddl.lab.bench.agreement import make
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import MismatchError
from ddl.lab.bench.oracle import exact
from ddl.lab.bench.run import MEASURES, Run, bench
from ddl.lab.bench.setting import Setting, setting_of
from ddl.lab.config import RESIDUALS, BenchConfig
from ddl.nn import DeltaStream
from ddl.options import Residual, quoted

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "device": "cpu", "hidden_size": 32, "layers": 1, "time": 8, "batch": 2, "tokens": 3,
    "repeats": 2,
}  # fmt: skip
WORDS = [f"--{name}={value}".replace("_", "-") for name, value in TINY.items()]
EVERY_ROW = {
    "ops": ["rewrite forward", "rewrite backward", "read channel forward", "read channel backward",
            "read token forward", "read token backward", "rewrite_read channel forward",
            "rewrite_read channel backward", "rewrite_read token forward",
            "rewrite_read token backward", "expand repeat forward", "expand repeat backward",
            "expand conv forward", "expand conv backward"],
    "blocks": ["ddl forward", "ddl backward", "ddl-cc forward", "ddl-cc backward",
               "ddl-tc forward", "ddl-tc backward"],
    "models": ["ddl step", "ddl-cc step", "ddl-tc step", "ddl generate", "ddl-cc generate",
               "ddl-tc generate"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddl.lab.bench.run.COPIED", {"cpu": 2**16})


def setting(**fields: Any) -> Setting:
    return setting_of(BenchConfig((), **(TINY | fields)), CPU)


def rows(part: str, **fields: Any) -> list[Any]:
    return list(MEASURES[part](setting(**fields), Clock(CPU, 2**16)))


def reds(part: str, **fields: Any) -> dict[str, str | None]:
    """Why each row of a part is red; a row that is red has no times."""
    found = rows(part, **fields)
    assert all((row.red is None) == bool(row.seconds) for row in found)
    return {row.what: row.red for row in found}


def test_a_run_and_its_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All parts, the record in the form of benchmarks/results, and the exit statuses."""
    out = tmp_path / "before.jsonl"
    assert cli.main(["bench", *WORDS, "--threads", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "| ops    | rewrite_read token backward   | plain PyTorch" in said
    assert f"wrote {out}" in said
    assert re.search(r"^### d .*, 1 layer, float32, .*, 1 thread$", said, re.MULTILINE)
    (line,) = out.read_text(encoding="utf-8").splitlines()
    assert str(Path.home()) not in line
    record = json.loads(line)
    assert record["benchmark"] == "bench"
    assert record["threads"] == 1
    common = {"date", "machine", "load_average", "python", "torch", "ddl", "commit", "native"}
    assert common <= record.keys()  # as in the records of the repository's scripts
    found: dict[str, list[str]] = {}
    for row in record["results"]:
        found.setdefault(row["part"], []).append(row["what"])
        assert row["gate"]["red"] is None
        assert 0 <= row["gate"]["worst"] <= 1
        assert len(row["seconds"]) == len(row["baseline_seconds"]) == 2
        assert ("gb_s" in row) == (row["part"] == "ops")
        assert ("tokens_per_second" in row) == row["what"].endswith("generate")
    assert found == EVERY_ROW

    loose = ["--min-ratio", "0", "--max-p95", "inf"]
    again = ["bench", "ops", *WORDS, "--baseline", str(out), "--json"]
    assert cli.main([*again, *loose]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert document["failed"] == []
    assert [row["what"] for row in document["run"]["results"]] == EVERY_ROW["ops"]
    assert cli.main([*again, "--min-ratio", "1e9"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"]
    assert document["failed"][0].startswith("ops rewrite forward: its ratio must be at least 1e+09")


@pytest.mark.exhaustive
def test_a_regression_is_said_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "before.jsonl"
    run = bench(BenchConfig(("ops",), out=out, **TINY))
    assert run.comparison is None
    before = json.loads(out.read_text(encoding="utf-8"))
    for row in before["results"]:
        row["ratio"], row["p95_over_baseline"] = 1e9, 1e9
    before["machine"]["cpu"] = "another"
    out.write_text(json.dumps(before), encoding="utf-8")
    assert cli.main(["bench", "ops", *WORDS, "--baseline", str(out)]) == 1
    said = capsys.readouterr()
    sentences = said.err.splitlines()
    assert [s.split(": ")[1] for s in sentences] == [f"ops {row}" for row in EVERY_ROW["ops"]]
    assert "note: the baseline is of another machine or device (cpu another, now" in said.out


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "m"), [("bfloat16", 2), ("float32", 1)])
def test_every_part_passes_its_check(dtype: str, m: int) -> None:
    for part in MEASURES:
        found = reds(part, dtype=dtype, value_channels=m, residuals=("ddl", "ddl-tc"))
        assert set(found.values()) == {None}, found


def test_models_are_compared_with_the_reference_in_float64() -> None:
    """The oracle is the reference in float64, and the fused model differs from it by rounding."""
    for residual in ("additive", "ddl", "ddl-cc", "ddl-cc-noec", "ddl-tc", "ddl-tc-noec"):
        model = make(setting().model(residual, layers=2))
        oracle = exact(model)
        assert not isinstance(oracle.trunk, DeltaStream)
        idx = torch.randint(256, (2, 8))
        expected = agreement.results(oracle, idx)
        assert expected["logits"].dtype == torch.float64
        found = agreement.results(model, idx)
        assert expected.keys() == found.keys()
        assert 0 < agreement.check(found, expected) < agreement.TOLERANCE


# --- what is wrong gets no time -------------------------------------------------------------------


def wrong_by_a_little(function: Any) -> Any:
    """The operator with a context that is 1 % too large."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result._replace(context=1.01 * result.context)

    return changed


def test_a_wrong_operator_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(functional, "rewrite_read", wrong_by_a_little(functional.rewrite_read))
    assert cli.main(["bench", "ops", *WORDS, "--out", str(tmp_path / "out.jsonl")]) == 1
    results = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["results"]
    assert all(("median" in row) == (row["gate"]["red"] is None) for row in results)
    found = {row["what"]: row["gate"]["red"] for row in results}
    wrong = {what for what, red in found.items() if red is not None}
    assert wrong == {what for what in found if what.startswith("rewrite_read")}
    assert all("output 1: rms error" in str(found[what]) for what in wrong)
    said = capsys.readouterr()
    assert "RED" in said.out
    sentence = "ddl bench: ops rewrite_read token forward: not timed, because the check failed:"
    assert sentence in said.err


def test_a_wrong_baseline_is_not_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddl.lab.bench import plain

    right = plain.rewrite

    def wrong(state: Any, direction: Any, value: Any, gate: Any, **options: Any) -> Any:
        return right(state, direction, value, 1.01 * gate, **options)

    monkeypatch.setattr(plain, "rewrite", wrong)
    found = reds("ops")
    assert str(found["rewrite forward"]).startswith("plain PyTorch (products): output 0: rms error")
    assert found["read token forward"] is None


@pytest.mark.table(0)
@pytest.mark.parametrize("part", ["blocks", "models"])
def test_wrong_residuals_are_not_timed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.step

    def changed(*args: Any, **kwargs: Any) -> Any:
        result, chain = right(*args, **kwargs)
        return result._replace(context=1.01 * result.context), chain

    monkeypatch.setattr(functional, "step", changed)
    found = reds(part)
    assert all(red is not None and red.startswith("ddl") for red in found.values())


def test_a_wrong_additive_block_refuses_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddl.models.trunk import AdditiveStream

    right = AdditiveStream.forward

    def changed(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        h = right(self, x, *args, **kwargs)
        return h if h.dtype == torch.float64 else 1.01 * h

    monkeypatch.setattr(AdditiveStream, "forward", changed)
    assert all(
        str(red).startswith("additive: logits: rms error") for red in reds("blocks").values()
    )


def test_a_wrong_cache_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddl.models import Cache

    right = Cache.extend
    monkeypatch.setattr(
        Cache, "extend", lambda cache, layer, k, v: right(cache, layer, k.flip(1), v)
    )
    found = reds("models", hidden_size=128)
    assert all("logits of a cached step: rms error" in str(red) for red in found.values())


def test_bfloat16_that_leads_elsewhere_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LARGEST_DRIFT", 1e-6)
    for part in ("blocks", "models"):
        found = reds(part, dtype="bfloat16", residuals=("ddl",))
        assert all("in bfloat16 its gradients are" in str(red) for red in found.values())


def test_a_scale_is_checked_by_the_length_of_its_maps_gradient() -> None:
    """Its own gradient is a sum that nearly cancels."""
    expected = {"head.map": torch.full((4, 4), 0.5), "head.scale": torch.tensor([1e-6])}
    near = expected | {"head.scale": torch.tensor([1e-6 + 1e-4])}
    assert agreement.check(near, expected) == pytest.approx(1e-4 / 2)
    with pytest.raises(MismatchError, match=r"scale: rms error 1\.0e-03"):
        agreement.check(expected | {"head.scale": torch.tensor([2e-3])}, expected)


# --- what is refused before anything is measured --------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--hidden-size 40", "`--hidden-size` must be a multiple of 32, got 40"),
        ("--repeats 0", "`--repeats` must be an integer of at least 1, got 0"),
        ("--time 1", "`--time` must be an integer of at least 2, got 1"),
        ("--min-ratio 0.5", "`--min-ratio` must be left at 0.9 without `--baseline`, got 0.5"),
        ("--max-p95 2", "`--max-p95` must be left at 1.2 without `--baseline`, got 2.0"),
        (
            "--residuals ddl additive",
            f"`--residuals` must be {quoted(get_args(Residual)[1:])}, got 'additive'",
        ),
        ("--out /no/file", "`--out` must be a file that can be written to, got /no/file"),
        ("--out /", "`--out` must be a file that can be written to, got /"),
        (
            "--baseline /no/file",
            "`--baseline` must be a file that `--out` wrote, got /no/file: No such file or"
            " directory",
        ),
    ],
)
def test_one_sentence(
    options: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddl.lab.bench.run.measure", lambda *_: pytest.fail("it measured"))
    assert cli.main(["bench", *options.split()]) == 1
    said = capsys.readouterr()
    assert said.err == f"ddl bench: {sentence}\n"
    assert said.out == ""


def test_other_sizes_than_the_baseline_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "before.jsonl"
    bench(BenchConfig(("ops",), out=out, **TINY))
    assert cli.main(["bench", "ops", *WORDS, "--hidden-size", "64", "--baseline", str(out)]) == 1
    sentence = "ddl bench: `--hidden-size` must be 32 as in the baseline, got 64\n"
    assert capsys.readouterr().err == sentence


def test_too_little_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand more")

    monkeypatch.setitem(MEASURES, "ops", full)
    assert cli.main(["bench", *WORDS]) == 1
    assert capsys.readouterr().err == (
        "ddl bench: `--batch` must be small enough for the check in float64 on this device, got 2:"
        " CUDA out of memory.\n"
    )


def test_the_sizes_of_a_device() -> None:
    config = BenchConfig(())
    assert setting_of(config, CPU).sizes() == {
        "hidden_size": 384, "value_channels": 4, "layers": 2, "time": 256, "batch": 4,
        "tokens": 32, "dtype": "float32",
    }  # fmt: skip
    assert setting_of(config, torch.device("cuda")).hidden_size == 1024


def test_a_busy_machine_is_noted() -> None:
    record = {"results": [], "machine": {"cores": 2}, "load_average": [0.9, 0, 0]}
    assert Run(record, None).notes == []
    (note,) = Run(record | {"load_average": [3.25, 0, 0]}, None).notes
    assert note.startswith("other work kept the machine busy (load average 3.25 on 2 cores)")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_residual_can_be_measured(dtype: str) -> None:
    """With the options of the setting that have an effect on it, and no others."""
    made = {
        residual: setting(dtype=dtype, value_channels=8).model(residual, layers=1)
        for residual in RESIDUALS
    }
    several = {name for name, config in made.items() if config.value_channels == 8}
    rounded = {name for name, config in made.items() if config.stream_dtype is not None}
    assert several == {
        r for r in RESIDUALS if r.startswith(("ddl-", "mhc", "hc", "ind", "exp"))
    } | {"gated"}
    rewriting = {r for r in RESIDUALS if r.startswith("ddl")}
    assert rounded == (rewriting if dtype == "bfloat16" else set())


def test_baselines_are_measured_beside_additions() -> None:
    names = ("additive-conv", "mhc", "independent-hc", "gated", "attention-residual", "expanded")
    found = reds("models", residuals=names)
    assert set(found) == {f"{name} {what}" for name in names for what in ("step", "generate")}
    assert set(found.values()) == {None}
