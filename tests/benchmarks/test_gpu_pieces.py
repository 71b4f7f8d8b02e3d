"""The pieces of a call on a GPU: their processes, failures, time and commands."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_benchmarks import BENCHMARKS, load

__all__ = ["load"]  # a fixture


class Piece:
    """Gives some lines, then perhaps fails."""

    limit = 60.0

    def __init__(self, name: str, *lines: dict[str, Any], error: Exception | None = None) -> None:
        self.name, self.results, self.error = name, lines, error

    def lines(self, limit: float) -> Iterator[dict[str, Any]]:
        yield from self.results
        if self.error is not None:
            raise self.error


def test_call_continues_after_a_failure(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, path = load("gpu.log"), tmp_path / "out" / "gpu.jsonl"
    log = module.Log(path, minutes=1)
    error = module.PieceError("AcceleratorError: an illegal access")
    pieces = [Piece("a", {"what": "a 1"}, error=error), Piece("b", {"what": "b", "us": 1.0})]
    log.run(module.Part("compiled", 60, pieces))
    written = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["what"] for line in written] == ["a 1", "a", "b"]
    load("gpu.tables").show("day", log.lines)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "FAILED compiled a: AcceleratorError: an illegal access",
        "day; failed: compiled a; not run: nothing",
    ]


def test_pieces_without_time_are_named(load: Any, tmp_path: Path) -> None:
    """A part ends with its own time or the call's, and a piece needs as long as the last one."""
    module = load("gpu.log")
    log = module.Log(tmp_path / "gpu.jsonl", minutes=1)
    slow = Piece("a", {"what": "a"})
    slow.lines = lambda limit: time.sleep(0.2) or iter([{"what": "a"}])  # type: ignore[method-assign]
    log.run(module.Part("plans", 0.3, [slow, Piece("b"), Piece("c")]))
    assert [line["what"] for line in log.lines] == ["a", "2 pieces"]
    assert log.lines[-1]["pieces"] == ["b", "c"]
    log.end = time.monotonic()
    log.run(module.Part("launch", 60, [Piece("d")]))
    assert (log.lines[-1]["skipped"], log.lines[-1]["pieces"]) == ("no time left", ["d"])


def test_worker_that_hangs_or_dies(load: Any) -> None:
    work = load("gpu.work")
    error = load("gpu.log").PieceError
    case = {"op": "rewrite_read", "form": "token", "d": 16, "m": 4, "batch": 1, "time": 4}
    hung = work.Job("a", "operators", "cpu", {"case": case | {"state": "float32"}, "rounds": 10**7})
    with pytest.raises(error, match="killed, no result after 2 s"):
        list(hung.lines(2))
    with pytest.raises(error, match="KeyError: 'state'"):
        list(work.Job("b", "operators", "cpu", {"case": {}, "rounds": 1}).lines(60))
    worker = work.Worker("cpu")
    worker.process.kill()
    worker.send("machine", {})
    with pytest.raises(error, match="the process died, status -9"):
        list(worker.answers(60))
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children with their parent")
def test_hanging_workers_end_with_their_call() -> None:
    code = "from gpu.work import Worker; import time; w = Worker('cpu'); "
    code += "print(w.process.pid, flush=True); time.sleep(60)"
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
    """A process that has ended stays as a zombie until its parent reads the status."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_driver_is_not_called_before_the_workers_are_forked() -> None:
    """After cuInit a process cannot fork one that uses the GPU."""
    code = """if True:
        import torch
        def call(*_): print("called")
        torch._C._cuda_getDeviceCount = torch._C._cuda_init = call
        torch.cuda.is_available = torch.cuda.device_count = call
        import gpu.ahead, sys
        print("gpu.steps" in sys.modules)
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS, check=True)
    assert done.stdout == "True\n"


def test_cut_off_line_costs_no_other(load: Any, tmp_path: Path) -> None:
    jsonl, path = load("ddl.lab.bench.jsonl"), tmp_path / "a.jsonl"
    jsonl.append(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": ')
    assert jsonl.read(path) == [{"a": 1}]
    jsonl.append(path, {"c": "β"})
    assert jsonl.read(path) == [{"a": 1}, {"c": "β"}]


# --- commands ---------------------------------------------------------------------------------


def test_pytest_output(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures with their reasons, and counts, from pytest itself under pytest-xdist."""
    monkeypatch.setattr(load("gpu.work"), "MOST_WORKERS", 1)
    monkeypatch.chdir(tmp_path)
    options = "def pytest_addoption(parser): parser.addoption('--all', action='store_true')\n"
    (tmp_path / "conftest.py").write_text(options)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a b', 'c'])\n"
        "def test_x(x): assert x == 'c', 'not c'\n"
        "def test_s(): pytest.skip('no')\n"
    )
    failed, end = load("gpu.work").pytest(test, "test_").lines(60)
    assert failed["what"] == "test_it.py::test_x[a b]"
    assert "not c" in failed["error"]
    assert (end["what"], end["status"]) == ("test_it: test_", 1)
    assert end["tests"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert "error" not in end


def test_pytest_output_without_results(load: Any) -> None:
    read = load("gpu.work").read_pytest
    (empty,) = read("ERROR: file or directory not found: tests/b.py\n", 4)
    assert empty["error"] == "status 4: ERROR: file or directory not found: tests/b.py"
    (skipped,) = read("[gw0] [100%] SKIPPED tests/a.py::test_x \n", 0)
    assert skipped["skipped"] == "no test ran, 1 were skipped"
    (killed,) = read("tests/a.py::test_y \n[gw0] [ 50%] PASSED tests/a.py::test_x[1] \n", None)
    assert killed == {"tests": {"passed": 1}, "status": None}


def test_command_that_is_killed_or_missing(load: Any) -> None:
    work = load("gpu.work")
    lines = work.Command("a", ["sh", "-c", "echo b; sleep 60"], lambda *x: [{"out": x}]).lines(1)
    assert next(lines)["out"] == ("b\n", None)
    with pytest.raises(load("gpu.log").PieceError, match="killed, not done after 1 s"):
        next(lines)
    (line,) = work.Command("ncu", ["/no/ncu"], work.read_counters).lines(10)
    assert line["skipped"] == "Nsight Compute gave no counters: status 127"


def test_counters(load: Any) -> None:
    read = load("gpu.work").read_counters
    table = [
        "==PROF== Connected",
        '"ID","gpu__time_duration.sum","smsp__cycles.sum"',
        '"","us","cycle"',
        '"0","93.5","7"',
    ]
    assert read("\n".join(table), 0) == [{"metrics": {"gpu__time_duration.sum": "93.5 us"}}]
    (refused,) = read("==ERROR== ERR_NVGPUCTRPERM", 1)
    assert refused["skipped"] == "Nsight Compute gave no counters: ==ERROR== ERR_NVGPUCTRPERM"
