"""Which NVRTC is taken, and what is said of one that fails: a stand-in built from the real nvrtc.h.

What the real one makes of the kernels is in test_cuda_compile.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddl import _native

SOURCE = Path(__file__).parent / "stand_in_nvrtc.c"
SCRIPT = Path(__file__).parent / "compile_kernels.py"
HEADERS = [path.parent for path in Path(torch.__file__).parents[1].glob("nvidia/*/include/nvrtc.h")]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is for Linux"),
    pytest.mark.skipif(not HEADERS, reason="nvrtc.h comes with a torch that is built for CUDA"),
    pytest.mark.skipif(not shutil.which("gcc"), reason="the stand-in is built with gcc"),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in; a folder for the loader to look in."""
    return build(tmp_path_factory.mktemp("compiler"))


def build(folder: Path, *flags: str) -> Path:
    folder.mkdir(exist_ok=True)
    library = folder / "libnvrtc.so.12"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = ["gcc", "-shared", "-fPIC", *warnings, f"-I{HEADERS[0]}", *flags, str(SOURCE)]
    subprocess.run([*command, "-Wl,-soname,libnvrtc.so.12", "-o", str(library)], check=True)
    return folder


def compile_one(
    torch_file: Path, system: Path, cache: Path, architecture: str = "sm_90", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Compiles a kernel where torch lies at `torch_file` and the loader looks into `system`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DDL_", "STAND_IN_"))}
    env = kept | {"LD_LIBRARY_PATH": str(system), "DDL_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), _native.__file__, str(torch_file), architecture, "64"],
        env=env | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def is_of_the_stand_in(result: subprocess.CompletedProcess[str]) -> bool:
    assert result.returncode == 0, result.stderr
    ((name, _, _, registers, *_),) = json.loads(result.stdout)
    return name == "rewrite_read_fwd" and registers == 77


def sentence(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stdout
    return re.split(r"^(?:RuntimeError|ValueError): ", result.stderr, flags=re.M)[-1].strip()


def test_the_systems_compiler_serves_a_torch_without_one(compiler, tmp_path):
    result = compile_one(tmp_path / "torch" / "__init__.py", compiler, tmp_path / "kernels")
    assert is_of_the_stand_in(result)


@pytest.mark.parametrize("place", ["nvidia/cuda_nvrtc/lib", "torch/lib", "lib"])
def test_a_compiler_beside_torch_comes_first(place, compiler, tmp_path):
    beside = tmp_path / "site-packages" / place
    shutil.copytree(compiler, beside)
    broken = build(tmp_path / "system", "-DnvrtcGetCUBIN=nvrtcGetSomething")
    torch_file = tmp_path / "site-packages" / "torch" / "__init__.py"
    result = compile_one(torch_file, broken, tmp_path / "kernels")
    assert is_of_the_stand_in(result)


def test_a_compiler_without_a_function_that_is_needed(tmp_path):
    old = build(tmp_path / "system", "-DnvrtcGetCUBIN=nvrtcGetSomething")
    result = compile_one(tmp_path / "torch" / "__init__.py", old, tmp_path / "kernels")
    assert sentence(result) == (
        "NVRTC is too old: libnvrtc.so.12 has no `nvrtcGetCUBIN`; "
        "install a torch for CUDA 12 or newer"
    )


def test_a_kernel_that_does_not_compile(compiler, tmp_path):
    result = compile_one(
        tmp_path / "torch" / "__init__.py",
        compiler,
        tmp_path / "kernels",
        STAND_IN_FAIL="nvrtcCompileProgram 6",
    )
    said = sentence(result)
    assert said.startswith(
        "`rewrite_read_fwd` did not compile for sm_90 with NVRTC 12.34; please report this with "
        "what follows: --gpu-architecture=sm_90 "
    )
    assert " -DD=64 " in said
    assert "NVRTC_ERROR_COMPILATION\nptxas info" in said, "the compiler's own words"
    assert not list((tmp_path / "kernels").glob("*.cubin")), "nothing was kept"


def test_a_failure_without_words(compiler, tmp_path):
    result = compile_one(
        tmp_path / "torch" / "__init__.py",
        compiler,
        tmp_path / "kernels",
        STAND_IN_FAIL="nvrtcGetCUBINSize 77",
    )
    assert sentence(result).endswith("NVRTC error 77")


def test_an_architecture_that_the_compiler_does_not_know(compiler, tmp_path):
    result = compile_one(
        tmp_path / "torch" / "__init__.py", compiler, tmp_path / "kernels", "sm_120"
    )
    assert sentence(result) == '`architecture` must be one of sm_80, sm_90, got "sm_120"'
