"""The choice of NVRTC and the messages when it fails, with a stand-in built from the real nvrtc.h.

test_compile.py compiles the kernels with the real one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddl import _native
from tests.support import SUPPORT, stand_ins

SCRIPT = SUPPORT / "compile_kernels.py"

# Loads a library by its path, as torch loads its own, and then runs a script.
LOADED_BEFORE = """
import ctypes, runpy, sys
del sys.argv[0]
ctypes.CDLL(sys.argv.pop(0))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = stand_ins.needs("nvrtc.h")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in; return its folder, for the loader's search path."""
    return build(tmp_path_factory.mktemp("compiler"))


def build(folder: Path, *flags: str, library: str = "libnvrtc.so.12") -> Path:
    return stand_ins.build("stand_in_nvrtc.c", "nvrtc.h", library, folder, *flags)


def build_broken(folder: Path, library: str = "libnvrtc.so.12") -> Path:
    return build(folder, "-DnvrtcGetCUBIN=nvrtcGetSomething", library=library)


def compile_one(
    system: Path,
    folder: Path,
    *,
    site: str = "nothing",
    architecture: str = "sm_90",
    before: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Compile a kernel with `site` as site-packages and `system` on the loader's search path."""
    arguments = [*before, str(SCRIPT), _native.__file__, str(folder / site), architecture, "64"]
    return stand_ins.run(system, folder / "kernels", arguments, **variables)


def is_of_the_stand_in(result: subprocess.CompletedProcess[str]) -> bool:
    assert result.returncode == 0, result.stderr
    (kernel,) = json.loads(result.stdout)
    return kernel["name"] == "rewrite_read_fwd" and kernel["registers"] == 77


def sentence(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stdout
    return re.split(r"^(?:RuntimeError|ValueError): ", result.stderr, flags=re.M)[-1].strip()


def test_the_systems_compiler_serves_a_torch_without_one(compiler, tmp_path):
    assert is_of_the_stand_in(compile_one(compiler, tmp_path))
    assert kept(tmp_path), "the compiled kernel"


def test_the_systems_compiler_is_found_without_a_version(compiler, tmp_path):
    (tmp_path / "system").mkdir()
    shutil.copy(compiler / "libnvrtc.so.12", tmp_path / "system" / "libnvrtc.so")
    assert is_of_the_stand_in(compile_one(tmp_path / "system", tmp_path))


def test_a_compiler_that_torch_has_loaded_comes_before_all(compiler, tmp_path):
    newer = build_broken(tmp_path / "system", "libnvrtc.so.13")
    shutil.copytree(newer, tmp_path / "site-packages" / "torch" / "lib")
    loaded = [LOADED_BEFORE, str(compiler / "libnvrtc.so.12")]
    assert is_of_the_stand_in(
        compile_one(newer, tmp_path, site="site-packages", before=["-c", *loaded])
    )


def kept(folder: Path) -> list[Path]:
    return list((folder / "kernels").glob("*"))


@pytest.mark.parametrize("path", ["nvidia/cuda_nvrtc/lib", "torch/lib", "lib"])
def test_a_compiler_beside_torch_comes_first(path, compiler, tmp_path):
    shutil.copytree(compiler, tmp_path / "site-packages" / path)
    broken = build_broken(tmp_path / "system")
    assert is_of_the_stand_in(compile_one(broken, tmp_path, site="site-packages"))


def test_a_compiler_without_a_function_that_is_needed(tmp_path):
    old = build_broken(tmp_path / "system")
    assert sentence(compile_one(old, tmp_path)) == (
        "NVRTC is too old: libnvrtc.so.12 has no `nvrtcGetCUBIN`; "
        "install a torch for CUDA 12 or newer"
    )


def test_a_kernel_that_does_not_compile(compiler, tmp_path):
    said = sentence(compile_one(compiler, tmp_path, STAND_IN_FAIL="nvrtcCompileProgram 6"))
    first, *report = said.splitlines()
    assert re.fullmatch(
        "`rewrite_read_fwd` did not compile for sm_90 with NVRTC 12.34; please report this with "
        r"what follows: --gpu-architecture=sm_90 --std=c\+\+17 --ptxas-options=-v(?: -D\w+=\S+)+ "
        "NVRTC_ERROR_COMPILATION",
        first,
    )
    assert " -DD=64 " in first
    assert report[0].startswith("ptxas info"), "the compiler's own report"
    assert not kept(tmp_path)


def test_a_failure_without_words(compiler, tmp_path):
    failed = compile_one(compiler, tmp_path, STAND_IN_FAIL="nvrtcGetCUBINSize 77")
    assert sentence(failed).endswith("NVRTC error 77")
    assert not kept(tmp_path)


def test_an_architecture_that_the_compiler_does_not_know(compiler, tmp_path):
    refused = sentence(compile_one(compiler, tmp_path, architecture="sm_120"))
    assert refused == '`architecture` must be one of sm_80, sm_90, got "sm_120"'
