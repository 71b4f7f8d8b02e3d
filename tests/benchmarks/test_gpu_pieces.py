"""The pieces of a call on a GPU: their processes, failures, time and commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_benchmarks import BENCHMARKS, load
from tests.support import ROOT
from tests.support.emulated_device import needs_emulator

__all__ = ["load"]  # a fixture
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@needs_emulator
@pytest.mark.exhaustive
def test_a_plan_runs_on_the_emulated_gpu(load: Any) -> None:
    """The plan holds for its process; the job after it has a fresh one."""
    work = load("gpu.work")
    workers = work.Workers("emulated", ahead=True)
    case = {"op": "rewrite_read", "form": "channel", "d": 64, "m": 4, "batch": 1, "time": 5}
    job = work.Job("plan", "smoke", workers, {"case": case | {"state": "bfloat16"}}, limit=120)
    try:
        job.plan = "CLUSTER=3"
        with pytest.raises(load("gpu.log").PieceError, match=r"ValueError: .* CLUSTER=3"):
            list(job.lines(120))
        job.plan = "CLUSTER=2 STAGES=1"
        (line,) = job.lines(120)
        assert (line["plan"], line["gate"]["red"]) == ("CLUSTER=2 STAGES=1", None)
        assert workers.current is None
    finally:
        workers.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children with their parent")
def test_what_hangs_ends_with_its_call() -> None:
    code = "from gpu.work import Process; p = Process(['sleep', '60'], None); print(p.child.pid)"
    code += "; import sys, time; sys.stdout.flush(); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=BENCHMARKS, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        assert child.exists()
        parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and running(child):
        time.sleep(0.02)
    assert not running(child)


def running(process: Path) -> bool:
    """A process that has ended stays as a zombie until somebody asks for its status."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what goes wrong --------------------------------------------------------------------------


class Piece:
    """Gives some lines, then perhaps fails."""

    limit = 60.0

    def __init__(self, name: str, *lines: dict[str, Any], error: Exception | None = None) -> None:
        self.name, self.given, self.error = name, lines, error

    def lines(self, limit: float) -> Iterator[dict[str, Any]]:
        yield from self.given
        if self.error is not None:
            raise self.error


def test_a_call_goes_on_after_a_failure(load: Any, tmp_path: Path) -> None:
    log_module, path = load("gpu.log"), tmp_path / "out" / "gpu.jsonl"
    log = log_module.Log(path)
    error = log_module.PieceError
    pieces = [
        Piece("a", error=error("OutOfMemoryError: CUDA", skipped=True)),
        Piece("b", {"what": "b 1"}, error=error("AcceleratorError: an illegal access")),
        Piece("c", {"what": "c", "us": 1.0}),
    ]
    log_module.Budget(1, 60).run(log, log_module.Part("ops", 60, 1, pieces))
    assert [line["what"] for line in records(path)] == ["a", "b 1", "b", "c"]
    assert log_module.faults(log.lines) == ["ops b: AcceleratorError: an illegal access"]
    assert log_module.omissions(log.lines) == ["ops a: OutOfMemoryError: CUDA"]
    many = [{"part": "ops", "what": f"{i}", "error": "lost"} for i in range(30)]
    last = load("gpu.report").last_line("call 2", [*log.lines, *many])
    assert last.startswith("call 2; failed: ops b, ops 0, ops 1, ")
    assert "ops 10 and 19 more; not run: ops a: OutOfMemoryError" in last
    assert "\n" not in last


def test_time_is_divided_among_the_parts(load: Any) -> None:
    """A part has its own share and what the earlier ones left; the rest of it is named."""
    module = load("gpu.log")
    log, budget = module.Log(None), module.Budget(minutes=2, seconds=60)  # shares count twice
    budget.run(log, module.Part("copy", 10, 21, [Piece("a"), Piece("b")]))
    assert log.lines[-1]["pieces"] == ["a", "b"]
    assert log.lines[-1]["skipped"] == "no time left in a call of 2 minutes"
    budget.run(log, module.Part("ops", 10, 39, [Piece("c", {"what": "c"})]))
    assert log.lines[-1]["what"] == "c"
    budget.started -= 70  # as if "c" had taken this long
    budget.run(log, module.Part("train", 40, 51, [Piece("d")]))
    assert log.lines[-1]["pieces"] == ["d"]
    budget.run(log, module.Part("plans", 0, 49, [Piece("e", {"what": "e"})]))
    assert log.lines[-1]["what"] == "e"


def test_a_worker_that_hangs_or_dies_is_replaced(load: Any, tmp_path: Path) -> None:
    work = load("gpu.work")
    error = load("gpu.log").PieceError
    workers = work.Workers("cpu", ahead=False)
    try:
        hung = work.Job("a", "copies", workers, {"rounds": 10**9})
        with pytest.raises(error, match="killed, no result after 3 s"):
            list(hung.lines(3))
        assert workers.current is None
        asked = work.Job("b", "smoke", workers, {"case": {}})
        with pytest.raises(error, match="KeyError: 'state'"):
            list(asked.lines(60))
        workers.worker(fresh=True).process.child.kill()
        with pytest.raises(error, match="the process died: status -9"):
            list(asked.lines(60))
    finally:
        workers.close()


def test_where_torch_cannot_be_imported_the_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu"),
        "2",
        "--out",
        str(tmp_path),
        "--pieces",
        "1",
    ]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "python")])
    environment = ENVIRONMENT | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1, done.stderr
    reason = "the process died: ImportError: libcudart.so.13: no such file"
    assert records(tmp_path / "gpu-2.jsonl")[0]["error"] == reason
    assert "; failed: machine start, copy copy," in done.stdout.splitlines()[-1]


def test_what_cannot_be_run_is_refused(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("gpu.main").main(["2", "--device", "cpu", "--only", "ops,trian"])
    assert stopped.value.code == 2
    assert (
        "--only must name parts, which are machine, copy, compile, ops," in capsys.readouterr().err
    )


def test_a_line_that_was_cut_off_costs_no_other(load: Any, tmp_path: Path) -> None:
    jsonl, path = load("ddl.lab.bench.jsonl"), tmp_path / "a.jsonl"
    jsonl.append(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": ')
    assert jsonl.read(path) == [{"a": 1}]
    jsonl.append(path, {"c": "β"})
    assert jsonl.read(path) == [{"a": 1}, {"c": "β"}]


# --- commands ---------------------------------------------------------------------------------


def test_pytests_output_is_read(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures with their reasons, and counts, from pytest itself under pytest-xdist."""
    monkeypatch.setattr(load("gpu.checks"), "MOST_WORKERS", 1)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a b', 'c'])\n"
        "def test_x(x): assert x == 'c', 'not c'\n"
        "def test_s(): pytest.skip('no')\n"
    )
    command = load("gpu.checks").pytest("t", str(test), limit=60, parallel=True)
    command.folder = tmp_path
    failed, reason, end = command.lines(60)
    assert failed == {"what": "test_it.py::test_x[a b]", "error": "failed"}
    assert reason["what"] == failed["what"]
    assert "not c" in reason["reason"]
    assert end["tests"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert (end["what"], end["status"]) == ("t", 1)
    assert "error" not in end


def test_an_empty_choice_of_tests_is_a_failure(load: Any) -> None:
    """In the words of pytest without workers."""
    reader = load("gpu.checks").Pytest()
    said = ["tests/a.py::test_x[a b] PASSED        [ 50%]", "tests/a.py::test_y ERROR    [100%]"]
    assert [reader(text, None) for text in said] == [
        None, {"what": "tests/a.py::test_y", "error": "failed"}
    ]  # fmt: skip
    empty = load("gpu.checks").Pytest()
    empty("ERROR: file or directory not found: tests/b.py", None)
    reason = "status 4: ERROR: file or directory not found: tests/b.py"
    skipped = load("gpu.checks").Pytest()
    skipped("tests/a.py::test_x SKIPPED (no GPU)    [100%]", None)
    assert skipped(None, 0)["skipped"] == "no test ran, 1 were skipped"
    assert empty(None, 4) == {"tests": {}, "status": 4, "error": reason}


def test_a_hanging_test_is_named(load: Any) -> None:
    reader = load("gpu.checks").Pytest()
    output = [
        "tests/a.py::test_x[1] ",
        "tests/a.py::test_x[2] ",
        "[gw0] [ 50%] PASSED tests/a.py::test_x[1] ",
    ]
    assert [reader(text, None) for text in output] == [None] * 3
    assert reader(None, None) == {
        "tests": {"passed": 1}, "status": None, "running": ["tests/a.py::test_x[2]"]
    }  # fmt: skip


def test_a_sanitizers_report_is_kept(load: Any) -> None:
    reader = load("gpu.checks").Sanitizer()
    for text in (
        "========= COMPUTE-SANITIZER",
        "tests/a.py::test_x PASSED  [100%]",
        "========= Invalid __global__ read of size 4 bytes",
        "========= ERROR SUMMARY: 1",
    ):
        reader(text, None)  # fmt: skip
    end = reader(None, 1)
    assert end["error"] == "Invalid __global__ read of size 4 bytes"
    assert end["tests"] == {"passed": 1}


def test_what_a_call_chooses_of_the_tests_exists(load: Any) -> None:
    """Of a table most cases are left out, unless every case is asked for."""
    checks, calls = load("gpu.checks"), load("gpu.calls")
    commands = [piece.command for piece in calls.tests("cuda")]
    assert all("--all" in command for command in commands)
    clusters = commands[-1]
    of_clusters = clusters[clusters.index("-k") + 1]
    for chosen, least in ((of_clusters, 15), (checks.SANITIZED, 8)):
        options = ["--all", "--collect-only", "-q", "-k", chosen, "tests/gpu/test_ops.py"]
        options += ["tests/gpu/test_memory.py"]
        listing = [*clusters[:3], *options]
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout
        assert listed.count("::test_") >= least


def test_counters_are_read(load: Any) -> None:
    reader = load("gpu.checks").Counters()
    table = (
        '"ID","gpu__time_duration.sum","smsp__cycles.sum"',
        '"","us","cycle"',
        '"0","93.5","7"',
    )
    for text in ("==PROF== Connected", *table):
        reader(text, None)
    assert reader(None, 0) == {"metrics": {"gpu__time_duration.sum": "93.5 us"}}
    refused = load("gpu.checks").Counters()
    refused("==ERROR== ERR_NVGPUCTRPERM", None)
    assert refused(None, 1) == {
        "skipped": "Nsight Compute gave no counters: ==ERROR== ERR_NVGPUCTRPERM"
    }
