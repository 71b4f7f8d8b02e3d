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

from ddl.lab.doctor import cache as cache_module
from ddl.lab.doctor import processor, versions
from ddl.lab.doctor.cache import cache, fnv_1a, is_damaged
from ddl.lab.doctor.processor import AVX2, AVX512, simd_level
from ddl.lab.doctor.report import Report
from ddl.lab.doctor.variables import variables
from ddl.lab.doctor.versions import Requirement, fits, packages, parse, requirements_of


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


def entry(folder: Path, key: bytes, image: bytes = bytes(range(256))) -> Path:
    """An entry as src/cuda/compile/cache.rs writes it."""
    numbers = b"".join(number.to_bytes(4, "little") for number in (64, 8, 1024, len(key)))
    body = numbers + key + image
    path = folder / f"{fnv_1a(key):032x}.kernel"
    path.write_bytes(b"ddl kernel 1\n" + fnv_1a(body).to_bytes(16, "little") + body)
    return path


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("DDL_CACHE_DIR", str(path))
    return path


def test_the_hash_is_that_of_the_cache() -> None:
    """The values of cache.rs's own test."""
    assert fnv_1a(b"a") == 0xD228CB696F1A8CAF78912B704E4A8964
    assert fnv_1a(b"foobar") == 0x343E1662793C64BF6F0D3597BA446F18


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
    found = cache(report, whole=True)
    assert warnings(report) == []
    assert found["kernels"] == found["checked"] >= 1
    assert found["damaged"] == []
    assert (found["writable"], found["private"]) == (True, True)


def test_damaged_kernels_are_named(directory: Path) -> None:
    paths = [entry(directory, key) for key in (b"one", b"two", b"three", b"four")]
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].rename(paths[2].with_stem("0" * 32))
    (directory / "f.12-0-345").write_bytes(b"")
    report = Report()
    found = cache(report)
    assert found["kernels"] == found["checked"] == 4
    assert sorted(found["damaged"]) == sorted([paths[1].name, "0" * 32 + ".kernel"])
    assert found["unfinished"] == 1
    damaged, left = warnings(report)
    assert damaged.startswith("2 of 4 compiled kernels are damaged, and will be compiled again: ")
    assert left.endswith("were left by processes that were killed: delete f.12-0-345")


def test_every_damaged_byte_and_every_cut_is_seen(directory: Path) -> None:
    path = entry(directory, b"key", b"image")
    whole = path.read_bytes()
    assert not is_damaged(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert is_damaged(path), at
        path.write_bytes(whole[:at])
        assert is_damaged(path), at


def test_a_large_cache_is_checked_for_a_while(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        entry(directory, str(number).encode())
    monkeypatch.setattr(cache_module, "SECONDS", -1.0)
    assert cache(Report())["checked"] == 0
    assert cache(Report(), whole=True)["checked"] == 5


ELSEWHERE = "name another directory in DDL_CACHE_DIR"


def test_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    too_long = tmp_path / ("n" * 300)
    for path, said in (
        (file, "is no directory, so that each process compiles them"),
        (file / "below", "cannot be made"),
        (too_long, "cannot be made"),
    ):
        monkeypatch.setenv("DDL_CACHE_DIR", str(path))
        report = Report()
        assert cache(report)["writable"] is False
        assert warnings(report) == [f"{path}, for compiled kernels, {said}: {ELSEWHERE}"]


def test_a_directory_that_cannot_be_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # for root, modes forbid nothing
    report = Report()
    assert cache(report)["writable"] is False
    (sentence,) = warnings(report)
    assert "cannot be written, so that each process compiles them" in sentence


def test_a_directory_that_cannot_be_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    report = Report()
    cache(report)
    assert warnings(report) == [f"{directory} cannot be read (Permission denied): {ELSEWHERE}"]


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


@pytest.mark.parametrize(
    ("machine", "flags", "lowered", "level"),
    [
        ("x86_64", AVX2 | AVX512, None, "AVX-512"),
        ("x86_64", AVX2 | AVX512, "avx2", "AVX2"),
        ("x86_64", AVX2 | AVX512, "portable", "SSE2"),
        ("x86_64", (AVX2 | AVX512) - {"gfni"}, None, "AVX2"),  # before Ice Lake
        ("x86_64", AVX2 - {"fma"}, None, "SSE2"),
        ("x86_64", None, None, None),
        ("aarch64", frozenset({"asimd"}), None, "NEON"),
        ("riscv64", frozenset(), None, "portable"),
    ],
)
def test_simd_levels(
    machine: str, flags: Any, lowered: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if lowered is not None:
        monkeypatch.setenv("DDL_SIMD", lowered)
    assert simd_level(flags) == level


def test_features_have_the_usual_names() -> None:
    assert processor.features(AVX2 | AVX512 | {"asimd"}) == ["AVX2", "AVX-512", "NEON"]
    assert processor.features(None) == []


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    report = Report()
    assert processor.threads(report, 4)["torch_threads"] == 64
    assert warnings(report) == [
        "torch has 64 threads on 4 cores that this process may use: set OMP_NUM_THREADS=4, or call"
        " torch.set_num_threads(4)"
    ]


# --- versions and extras --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bounds", "judged"),
    [
        ("2.11.0+cu130", ">=2.10", True), ("2.9.1", ">=2.10", False), ("2", ">=2.0", True),
        ("1.9", ">=1.9.4,<2", False), ("2.0", ">=1.9.4,<2", False), ("1.10", ">=1.9.4,<2", True),
        ("3.0", "", True), ("3.0", "~=3.0", None), ("unknown", ">=1", None),
    ],
)  # fmt: skip
def test_bounds(version: str, bounds: str, judged: bool | None) -> None:
    assert fits(version, bounds) is judged


def test_requirements_are_read_from_metadata() -> None:
    assert parse("torch>=2.10") == Requirement("torch", (), ">=2.10", None)
    line = 'ddl-rs[hf,train]>=0.1 ; extra == "eval"'
    assert parse(line) == Requirement("ddl-rs", ("hf", "train"), ">=0.1", "eval")
    assert parse("rich (>=13.7,<20); extra == 'train'").bounds == ">=13.7,<20"  # type: ignore
    assert parse("??") is None
    for name in ("python_version", "python_full_version"):
        assert parse(f"tomli>=2; {name} < '3.9' and extra == 'train'") is None
        assert parse(f"tomli>=2; {name} < '3.99' and extra == 'train'") is not None
    known = [
        Requirement("rich", (), ">=13", "train"), Requirement("ddl-rs", ("train",), "", "data"),
        Requirement("pyarrow", (), ">=17", "data"), Requirement("ddl-rs", ("data",), "", "train"),
    ]  # fmt: skip
    assert [r.name for r in requirements_of("data", known)] == ["rich", "pyarrow"]  # and it ends


def test_packages_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [Requirement("rich", (), ">=13.7", "train"), Requirement("tyro", (), ">=0.9", "train")]
    monkeypatch.setattr(versions, "requirements", lambda: known)
    monkeypatch.setattr(versions, "installed", {"rich": "12.0.1"}.get)
    report = Report()
    found = packages(report)
    assert found["train"]["complete"] is False
    assert found["train"]["packages"]["tyro"]["version"] is None
    assert warnings(report) == [
        "rich is 12.0.1, and ddl-rs was made for >=13.7: pip install 'rich>=13.7'"
    ]


def test_an_old_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    report = Report()
    assert versions.versions(report)["torch"] == "2.9.1"
    assert [problem.sentence for problem in report.problems] == [
        "torch is 2.9.1, and ddl-rs needs >=2.10: install a newer torch"
    ]
    assert not report.ok


def test_an_old_glibc_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    report = Report()
    versions.versions(report)
    assert report.problems[0].what == "glibc is 2.17, and the wheel needs 2.28"


def test_missing_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "DISTRIBUTION", "no-such-distribution")
    report = Report()
    assert packages(report) == {}
    assert warnings(report)[0].startswith("the package's metadata are missing")


def test_facts_are_json() -> None:
    report = Report()
    for probe in (versions.versions, processor.processor, packages):
        assert json.loads(json.dumps(probe(report))) is not None
