"""The probes of `ddl doctor`: variables, the cache of kernels, processor, versions and extras."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl import _native
from ddl.lab.doctor import installation
from ddl.lab.doctor.hardware import processor
from ddl.lab.doctor.installation import packages, versions
from ddl.lab.doctor.kernels import cache
from ddl.lab.doctor.report import Report
from ddl.lab.doctor.variables import variables


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("DDL_", "OMP_")):
            monkeypatch.delenv(name)


def warnings(report: Report) -> list[str]:
    assert report.ok
    return [problem.sentence for problem in report.problems]


# --- environment variables ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "DDL_SIMD",
            "sse9",
            "`DDL_SIMD` must be portable or avx2, got sse9: it is ignored: unset it, or see"
            " docs/environment.md",
        ),
        ("DDL_SIMD", "avx2", "`DDL_SIMD` lowers the instructions of the CPU kernels: unset it"),
        (
            "DDL_THREADS",
            "-3",
            "`DDL_THREADS` must be rayon, got -3: it is ignored: unset it, or see"
            " docs/environment.md",
        ),
        (
            "DDL_LOG",
            "\x1b[31m\n",
            "`DDL_LOG` must be debug, got ?[31m?: it is ignored: unset it, or see"
            " docs/environment.md",
        ),
        (
            "DDL_PLAN",
            "NONSENSE",
            "`DDL_PLAN` overrides how CUDA kernels are cut, which is for measuring: unset it",
        ),
        (
            "OMP_NUM_THREADS",
            "many",
            "`OMP_NUM_THREADS` must be a number of threads, got many: it is ignored: unset it, or"
            " see docs/environment.md",
        ),
        (
            "DDL_" + "SMID",
            "avx2",
            "`DDL_" + "SMID` is no variable of this version: correct its name, or unset it",
        ),
    ],
)
def test_values_without_effect(
    name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    report = Report()
    variables(report)
    assert warnings(report) == [sentence]


def test_values_that_mean_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDL_LOG", "debug")
    monkeypatch.setenv("DDL_THREADS", "rayon")
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    monkeypatch.setenv("DDL_CACHE_DIR", "x" * 500)
    report = Report()
    shown = variables(report)
    assert warnings(report) == []
    assert set(shown) == {"DDL_LOG", "DDL_THREADS", "OMP_NUM_THREADS", "DDL_CACHE_DIR"}
    assert len(shown["DDL_CACHE_DIR"]) == 101


# --- the cache of kernels -------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("DDL_CACHE_DIR", str(path))
    return path


@pytest.mark.skipif(platform.system() != "Linux", reason="NVRTC is for Linux")
def test_a_compiled_kernel_is_sound(directory: Path) -> None:
    code = (
        "from ddl import DeltaResidual, cuda\nimport torch\n"
        "cuda.warmup(DeltaResidual(8), *[torch.zeros(2, 8)] * 2, context=torch.zeros(2, 8),"
        " architecture='sm_90')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "NVRTC, which was found neither" in done.stderr:
        pytest.skip("there is no NVRTC")
    assert done.returncode == 0, done.stderr
    report = Report()
    found = cache(report)
    assert warnings(report) == []
    assert found["kernels"] >= 1
    assert (found["writable"], found["private"]) == (True, True)


ELSEWHERE = "name another directory in DDL_CACHE_DIR"


def test_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below", tmp_path / "kernels"):
        if path.name == "kernels":  # for root, modes forbid nothing
            monkeypatch.setattr(os, "access", lambda *_: False)
        monkeypatch.setenv("DDL_CACHE_DIR", str(path))
        report = Report()
        assert cache(report)["writable"] is False
        sentence = "for compiled kernels, cannot be written, so that each process compiles them"
        assert f"{path}, {sentence}: {ELSEWHERE}" in [p.sentence for p in report.problems]


def test_a_directory_that_is_not_private(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code refuses such a directory, so CUDA kernels do not work: an error."""
    directory.chmod(0o777)
    report = Report()
    assert cache(report)["private"] is False
    assert [problem.sentence for problem in report.problems] == [
        f"others can write to {directory}, for compiled kernels (mode 777), so that CUDA kernels"
        f" are refused: chmod go-w {directory}"
    ]
    assert not report.ok
    directory.chmod(0o700)
    found = os.stat(directory)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    report = Report()
    assert cache(report)["private"] is (found.st_uid == 0)  # the superuser's is trusted


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    report = Report()
    assert cache(report) == {"directory": None}
    assert warnings(report) == [f"there is no home directory for compiled kernels: {ELSEWHERE}"]


def test_the_directory_is_chosen_as_native_code_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ddl import environment

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DDL_CACHE_DIR", "")
    assert environment.cache_directory() == tmp_path / "ddl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert environment.cache_directory() == Path.home() / ".cache" / "ddl"


# --- processor ------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() != "x86_64", reason="DDL_SIMD lowers nothing elsewhere")
@pytest.mark.parametrize(("lowered", "level"), [("avx2", "AVX2"), ("portable", "SSE2")])
def test_vectors_that_are_lowered(lowered: str, level: str) -> None:
    if level == "AVX2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the processor has no AVX2")
    code = "from ddl import _native; print(_native.simd_level())"
    command, variables = [sys.executable, "-c", code], os.environ | {"DDL_SIMD": lowered}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert done.stdout == f"{level}\n"
    assert _native.simd_level() in ("AVX-512", "AVX2", "SSE2")


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr("ddl.lab.doctor.hardware.usable_cores", lambda: 4)
    report = Report()
    assert processor(report)["torch_threads"] == 64
    assert warnings(report) == [
        "torch has 64 threads on 4 cores that this process may use: set OMP_NUM_THREADS=4, or call"
        " torch.set_num_threads(4)"
    ]


# --- versions and extras --------------------------------------------------------------------------


def test_packages_of_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2.10", 'rich (>=13.7,<20); extra == "train"', "tyro>=1; extra == 'train'",
        'ddl-rs[train]>=0.1 ; extra == "data"', 'pyarrow>=17; extra == "data"',
        'ruff; extra == "dev"', "tomli>=2; python_full_version < '3.11' and extra == 'train'",
    ]  # fmt: skip
    monkeypatch.setattr(installation.importlib.metadata, "requires", lambda _: lines)
    monkeypatch.setattr(installation, "installed", {"rich": "13.8"}.get)
    train = {"rich": "13.8", "tyro": "missing"}
    assert packages(Report()) == {"data": train | {"pyarrow": "missing"}, "train": train}


def test_an_old_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    report = Report()
    assert versions(report)["torch"] == "2.9.1"
    assert [problem.sentence for problem in report.problems] == [
        "torch is 2.9.1, and ddl-rs needs 2.10: install a newer torch"
    ]
    assert not report.ok


def test_an_old_glibc_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    report = Report()
    versions(report)
    assert report.problems[0].what == "glibc is 2.17, and the wheel needs 2.28"


def test_missing_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "DISTRIBUTION", "no-such-distribution")
    report = Report()
    assert packages(report) == {}
    assert warnings(report)[0].startswith("the package's metadata are missing")


def test_facts_are_json() -> None:
    report = Report()
    for probe in (versions, processor, packages):
        assert json.loads(json.dumps(probe(report))) is not None
