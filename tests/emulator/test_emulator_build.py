"""The emulator compiles each kernel once, and works with the sanitizers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.emulator.build import BuildError, build, sanitizer_environment, unsupported
from tests.emulator.faults import DEFINES, SOURCE, line_of
from tests.emulator.launch import Module
from tests.emulator.source import SourceError
from tests.support import ROOT

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))


class Pointer(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


# --- sanitizers ---------------------------------------------------------------------------------


def run_sanitized(sanitizer: str, kernel: str, index: int = 0) -> subprocess.CompletedProcess[str]:
    library = build(SOURCE, DEFINES, sanitizer)
    command = [sys.executable, "-m", "tests.emulator.faults", str(library), kernel, str(index)]
    environment = {**os.environ, **sanitizer_environment(sanitizer)}
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this kernel's address space randomisation is too wide for ThreadSanitizer")
    return result


@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
@pytest.mark.parametrize(
    "kernel", ["sum_of_block", "reverse", "lanes", "warp_neighbours", "count_threads", "ring"]
)
def test_sanitizers_accept_correct_kernels(sanitizer: str, kernel: str) -> None:
    result = run_sanitized(sanitizer, kernel)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("kernel", "index", "access", "text"),
    [
        ("write_at_index", 1024, "WRITE", "a.out[a.index] = 1.0f"),
        ("read_at_index", -1, "READ", "threadIdx.x == 3 ? a.index : 0"),
        ("dynamic_at_index", 1024, "WRITE", "values[a.index] = 1.0f;  // dynamic"),
        ("static_pointer_at_index", 8, "WRITE", "void write_through"),
    ],
)
def test_asan_names_the_line_that_leaves_memory(
    kernel: str, index: int, access: str, text: str
) -> None:
    result = run_sanitized("asan", kernel, index)
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr
    assert f"{access} of size 4" in result.stderr
    assert f" tests/emulator/faults.cu:{line_of(text)}" in result.stderr


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("missing_barrier", "values[(threadIdx.x + blockDim.x - 1) % blockDim.x]"),
        ("missing_second_barrier", "values[threadIdx.x] = float(round);"),
        ("missing_warp_barrier", "values[threadIdx.x ^ 1];  // of another lane"),
        ("blocks_race", "a.out[threadIdx.x] += 1.0f"),
    ],
)
def test_tsan_names_the_line_that_races(kernel: str, text: str) -> None:
    result = run_sanitized("tsan", kernel)
    assert "ThreadSanitizer: data race" in result.stderr
    assert f" tests/emulator/faults.cu:{line_of(text)}" in result.stderr


@pytest.mark.parametrize(
    ("sanitizer", "kernel", "index", "message"),
    [
        ("asan", "two_barriers", 0, "divergent barrier"),
        ("tsan", "two_barriers", 0, "divergent barrier"),
        ("asan", "misaligned_16", 1, "misaligned access"),
        ("asan", "overflow", 2**31 - 1, "signed integer overflow"),
    ],
)
def test_the_emulators_own_checks_work_under_sanitizers(
    sanitizer: str, kernel: str, index: int, message: str
) -> None:
    result = run_sanitized(sanitizer, kernel, index)
    assert result.stderr.startswith(f"{kernel}, block (0, 0, 0)"), result.stderr
    assert message in result.stderr


# --- building -----------------------------------------------------------------------------------


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel file and a header that tests may change, with their own cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for runtime in build(SOURCE, DEFINES).parent.glob("libruntime*.so"):  # spares compiling it
        shutil.copy(runtime, cache)
    monkeypatch.setenv("DDL_EMULATOR_CACHE", str(cache))
    (tmp_path / "header.cuh").write_text("#pragma once\nstruct Argument { float* out; };\n")
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(
        '#include "header.cuh"  // once\n#include "header.cuh"\n'
        '/* no kernel:\nextern "C" __global__ void in_a_comment(const Argument a) {} */\n'
        'extern "C" __global__ void fill(const Argument a) { *a.out = VALUE; }\n'
    )
    return kernel


def test_builds_once_for_each_text_and_set_of_macros(kernel_file: Path) -> None:
    first = build(kernel_file, ["VALUE=1", "OTHER"])
    built = first.stat().st_mtime_ns
    assert build(kernel_file, ["OTHER", "VALUE=1"]) == first
    assert first.stat().st_mtime_ns == built
    assert build(kernel_file, ["VALUE=2", "OTHER"]) != first
    header = kernel_file.with_name("header.cuh")
    header.write_text(header.read_text().replace("float*", "double*"))
    assert build(kernel_file, ["VALUE=1", "OTHER"]) != first
    assert {path.suffix for path in first.parent.iterdir()} == {".so"}  # no temporary files remain


def test_the_cache_may_move(kernel_file: Path) -> None:
    built = build(kernel_file, ["VALUE=2.5f"])
    moved = built.parent.rename(kernel_file.with_name("moved")) / built.name
    out = torch.zeros(1)
    Module(moved).launch("fill", (1,), (1,), Pointer(out.data_ptr()))
    assert out.item() == 2.5


def test_the_compilers_message_names_the_line(kernel_file: Path) -> None:
    kernel_file.write_text(
        """/* a comment with
        __shared__ in it */
#include "header.cuh"
extern "C" __global__ void fill(const Argument a) {
  __shared__ float
      values[2]
            [3];
  values[1][2] = VALUE;
}
"""
    )
    with pytest.raises(BuildError, match=r"kernel\.cu:8:.*'VALUE' was not declared"):
        build(kernel_file)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("#include <cuda_fp16.h>\n", SourceError, "includes <cuda_fp16.h>, but NVRTC is given no"),
        ("__device__ void f();\n", SourceError, 'has no `extern "C" __global__` function'),
        (
            'extern "C" __global__ void f(const int) { __shared__ int a[2], b[2]; }\n',
            BuildError,
            "A_SHARED_DECLARATION_THAT_THE_EMULATOR_DOES_NOT_UNDERSTAND",
        ),
    ],
)
def test_refuses_what_it_does_not_understand(
    kernel_file: Path, text: str, error: type[Exception], message: str
) -> None:
    kernel_file.write_text(text)
    with pytest.raises(error, match=message):
        build(kernel_file)
