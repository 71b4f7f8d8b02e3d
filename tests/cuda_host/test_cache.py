"""The cache of compiled kernels: persistence, integrity, privacy, and its messages.

test_cache_at_once.py has several processes.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl import _native
from tests.support import SUPPORT

SCRIPT = SUPPORT / "compile_kernels.py"
assert _native.__file__ is not None
COMMAND = [sys.executable, str(SCRIPT), _native.__file__, str(Path(torch.__file__).parents[1])]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is for Linux")


def environment(cache: Path, **variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DDL_", "XDG_"))}
    return kept | {"DDL_CACHE_DIR": str(cache)} | variables


def compile_kernels(
    cache: Path, *sizes: int, architecture: str = "sm_90", **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the report about each kernel, and stderr."""
    command = [*COMMAND, architecture, *map(str, sizes)]
    env = environment(cache, **variables)
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def were_cached(kernels: list[dict[str, Any]]) -> list[bool]:
    return [kernel["cached"] for kernel in kernels]


def fixed(kernels: list[dict[str, Any]]) -> list[list[Any]]:
    """The lines that depend neither on the time nor on the cache."""
    fields = ("name", "architecture", "macros", "registers", "spilled", "shared")
    return [[kernel[field] for field in fields] for kernel in kernels]


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "some" / "cache"


def test_a_second_process_finds_what_the_first_compiled(cache):
    first, said = compile_kernels(cache, 64, 128)
    assert were_cached(first) == [False, False]
    assert said == ""
    assert len(entries(cache)) == 2
    second, said = compile_kernels(cache, 128, 64)
    assert were_cached(second) == [True, True]
    assert said == ""
    assert fixed(first) == fixed(second)
    assert len(entries(cache)) == 2


def test_sizes_and_architectures_are_kept_apart(cache):
    for architecture in ("sm_80", "sm_90"):
        kernels, _ = compile_kernels(cache, 64, 96, architecture=architecture)
        assert were_cached(kernels) == [False, False]
        assert {kernel["architecture"] for kernel in kernels} == {architecture}
    assert len(entries(cache)) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "another entry's"])
def test_a_damaged_entry_is_built_again(cache, damage):
    whole, _ = compile_kernels(cache, 64)
    (entry,) = entries(cache)
    data = entry.read_bytes()
    if damage == "flip":
        middle = len(data) // 2
        entry.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "cut":
        entry.write_bytes(data[:-1])
    elif damage == "empty":
        entry.write_bytes(b"")
    else:
        compile_kernels(cache, 128)
        (other,) = set(entries(cache)) - {entry}
        entry.write_bytes(other.read_bytes())
    again, said = compile_kernels(cache, 64)
    assert were_cached(again) == [False]
    assert said == ""
    assert fixed(again) == fixed(whole)
    assert entry.read_bytes() == data, "the same text and options give the same bytes"
    assert were_cached(compile_kernels(cache, 64)[0]) == [True]


def test_the_directory_is_the_users_own(cache):
    compile_kernels(cache, 64)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [entry.stat().st_mode & 0o777 for entry in entries(cache)] == [0o600]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_to_is_refused(cache, mode):
    compile_kernels(cache, 64)
    cache.chmod(mode)
    command = [*COMMAND, "sm_90", "64"]
    env = environment(cache)
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1] == (
        f"RuntimeError: compiled kernels are kept in {cache}, which others can write to "
        f"(mode {mode:o}): make it yours alone (chmod go-w), or name another directory in "
        "DDL_CACHE_DIR"
    )
    cache.chmod(0o755)  # others may read
    assert were_cached(compile_kernels(cache, 64)[0]) == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(cache):
    compile_kernels(cache, 64)
    os.chown(cache, 12345, 12345)
    command = [*COMMAND, "sm_90", "64"]
    env = environment(cache)
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert f"kept in {cache}, which belongs to user 12345: make it yours" in result.stderr


def test_without_a_directory_kernels_are_kept_in_memory(tmp_path):
    nowhere = tmp_path / "file" / "cache"
    nowhere.parent.write_text("no directory")
    kernels, said = compile_kernels(nowhere, 64, 128)
    assert were_cached(kernels) == [False, False]
    assert re.fullmatch(
        rf"ddl: compiled kernels are kept for this process only, because {nowhere} cannot be "
        r"written \(.*\); name another directory in DDL_CACHE_DIR\n",
        said,
    ), "one line, once"


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_the_directory_by_default(tmp_path, variable):
    compile_kernels(Path(), 64, DDL_CACHE_DIR="", **{"HOME": "/nowhere", variable: str(tmp_path)})
    within = {"XDG_CACHE_HOME": "ddl", "HOME": ".cache/ddl"}[variable]
    assert len(entries(tmp_path / within)) == 1


def test_the_home_directory(tmp_path):
    compile_kernels(Path(), 64, DDL_CACHE_DIR="~/kernels", HOME=str(tmp_path))
    assert len(entries(tmp_path / "kernels")) == 1


def test_the_home_directory_of_a_user(tmp_path):
    """It is not the variable HOME's."""
    me = pwd.getpwuid(os.getuid())
    given = f"~{me.pw_name}/{os.path.relpath(tmp_path, me.pw_dir)}/kernels"
    compile_kernels(Path(), 64, DDL_CACHE_DIR=given, HOME="/nowhere")
    assert len(entries(tmp_path / "kernels")) == 1


def test_a_home_directory_that_is_not_known(tmp_path):
    env = environment(Path(), DDL_CACHE_DIR="~no-such-user/x")
    result = subprocess.run([*COMMAND, "sm_90", "64"], env=env, capture_output=True, text=True)
    assert result.returncode != 0
    assert (
        "DDL_CACHE_DIR must begin with the ~ of a user whose home directory is known, got"
        " ~no-such-user/x: write the whole path"
    ) in result.stderr


def test_the_log_says_what_is_compiled_for_what(cache):
    line = (
        r"ddl: {} rewrite_read_fwd for sm_90 in \d+\.\d\d s: \d+ registers, 0 bytes spilled, "
        r"\d+ bytes of shared memory \(REAL=float STATE_T=float D=64 M=1 .* BLOCKS=\d+\)"
    )
    for verb in ("compiled", "found"):
        _, said = compile_kernels(cache, 64, DDL_LOG="debug")
        assert re.fullmatch(line.format(verb), said.strip())
    _, said = compile_kernels(cache, 64, DDL_LOG="warning")
    assert said == ""


def test_a_log_that_nobody_reads_breaks_nothing(cache):
    reader, writer = os.pipe()
    os.close(reader)
    env = environment(cache, DDL_LOG="debug")
    command = [*COMMAND, "sm_90", "64"]
    result = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert result.returncode == 0
    assert were_cached(json.loads(result.stdout)) == [False]


def test_a_forked_process_compiles_for_itself(cache):
    """A thread pool would not exist in the forked child."""
    code = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "from compile_kernels import main\n"
        "main(*sys.argv[1:], '64', '96')\n"
        "if os.fork() == 0:\n"
        "    signal.alarm(60)\n"
        "    main(*sys.argv[1:], '128', '160')\n"
        "    sys.stdout.flush()\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *COMMAND[2:], "sm_90"],
        env=environment(cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(entries(cache)) == 4


def test_without_nvrtc_a_sentence_says_what_to_install(cache, tmp_path):
    alone = [sys.executable, str(SCRIPT), _native.__file__, str(tmp_path)]
    env = environment(cache)
    result = subprocess.run(
        [*alone, "sm_90", "64"], env=env, capture_output=True, text=True, check=False
    )
    if result.returncode == 0:
        pytest.skip("this system has an NVRTC of its own")
    assert result.stderr.splitlines()[-1] == (
        "RuntimeError: CUDA kernels are compiled by NVRTC, which was found neither beside torch "
        "nor on the system: install a torch that is built for CUDA, or "
        "`pip install nvidia-cuda-nvrtc`"
    )
