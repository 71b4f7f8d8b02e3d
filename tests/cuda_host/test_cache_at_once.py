"""Processes that fill one cache of compiled kernels at once, that are killed, that find no room."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cuda_host.test_cache import (
    COMMAND,
    SCRIPT,
    compile_kernels,
    entries,
    environment,
    fixed,
    were_cached,
)
from tests.support import SUPPORT

SIZES = (64, 96, 128)
MANY = 24  # processes at once
UNFINISHED = re.compile(r"\w{32}\.(\d+)-\d+-\d+")  # the process is in the name
NOT_KEPT = (
    r"ddl: compiled kernels are kept for this process only, because {} cannot be written "
    r"\({}.*\); name another directory in DDL_CACHE_DIR\n"
)
# Compiles as the script does, but no file may become larger than 4 KiB, less than any entry.
SMALL_FILES = f"""
import resource, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from compile_kernels import main
for limit, size in ((resource.RLIMIT_FSIZE, 4096), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (size, size))
signal.signal(signal.SIGXFSZ, signal.Handlers(int(sys.argv.pop(1))))
main(*sys.argv[1:])
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is for Linux")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The entries, by name, of a process that was alone."""
    alone = tmp_path_factory.mktemp("alone")
    compile_kernels(alone, *SIZES)
    assert len(entries(alone)) == len(SIZES)
    return contents(alone)


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in entries(cache)}


def names(cache: Path) -> set[str]:
    return set(os.listdir(cache)) if cache.exists() else set()


def start(cache: Path, *sizes: int, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "sm_90", *map(str, sizes)],
        env=environment(cache, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def with_small_files(cache: Path, handler: signal.Handlers) -> subprocess.CompletedProcess[str]:
    """Compile one kernel whose entry cannot be written whole: `handler` is for SIGXFSZ."""
    command = [sys.executable, "-c", SMALL_FILES, str(int(handler)), *COMMAND[2:], "sm_90", "64"]
    return subprocess.run(
        command, env=environment(cache), capture_output=True, text=True, check=False
    )


def bad_disk(folder: Path, *flags: str) -> str:
    """Build a library that makes large writes slow, and more by `flags`; for LD_PRELOAD."""
    if not shutil.which("gcc"):
        pytest.skip("the bad disk is built with gcc")
    library = folder / "bad_disk.so"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(library)]
    subprocess.run(["gcc", *options, str(SUPPORT / "bad_disk.c"), "-ldl"], check=True)
    return str(library)


def check_usable(cache: Path, whole: dict[str, bytes]) -> None:
    """Check that a process gets every kernel and leaves the entries of one that was alone."""
    again, said = compile_kernels(cache, *SIZES)
    assert said == ""
    assert [kernel["registers"] > 0 for kernel in again] == [True] * len(SIZES)
    kept = contents(cache)
    assert {name: kept[name] for name in kept if not UNFINISHED.fullmatch(name)} == whole
    assert were_cached(compile_kernels(cache, *SIZES)[0]) == [True] * len(SIZES)


def test_many_processes_at_once(cache, whole):
    rotated = [SIZES[i % 3 :] + SIZES[: i % 3] for i in range(MANY)]
    started = [start(cache, *sizes) for sizes in rotated]
    finished = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * MANY, finished[0][1]
    assert {stderr for _, stderr in finished} == {""}
    reports = [sorted(fixed(json.loads(out))) for out, _ in finished]
    assert all(report == reports[0] for report in reports)
    assert contents(cache) == whole, "no unfinished file is left"
    assert were_cached(compile_kernels(cache, *SIZES)[0]) == [True] * 3


@pytest.mark.table(0)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("killed", [2, 4])
def test_processes_killed_while_they_write(cache, whole, tmp_path, killed, seed):
    """Each is killed soon after a file appears or goes: all then write the same entries."""
    disk, moments = bad_disk(tmp_path), random.Random(seed)
    started = [start(cache, *SIZES, LD_PRELOAD=disk) for _ in range(4)]
    victims = started[:killed]
    for victim in victims:
        before, ends = names(cache), time.monotonic() + 10
        while names(cache) == before and time.monotonic() < ends and victim.poll() is None:
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.04))
        victim.kill()
    finished = [process.communicate() for process in started]
    for process, (out, said) in zip(started, finished, strict=True):
        assert process.returncode == 0 or (process in victims and process.returncode == -9), said
        assert process.returncode != 0 or (said == "" and len(json.loads(out)) == len(SIZES))
    kept = contents(cache)
    for name, data in kept.items():
        left = UNFINISHED.fullmatch(name)
        assert int(left[1]) in {victim.pid for victim in victims} if left else data == whole[name]
    if killed < len(started):
        assert kept.keys() >= whole.keys()
    check_usable(cache, whole)


def test_a_process_killed_in_the_middle_of_an_entry(cache, whole):
    result = with_small_files(cache, signal.SIG_DFL)
    assert result.returncode == -signal.SIGXFSZ, result.stderr
    (left,) = entries(cache)
    assert UNFINISHED.fullmatch(left.name), "nothing has an entry's name"
    assert left.stat().st_size == 4096
    check_usable(cache, whole)
    assert {path.suffix for path in entries(cache)} == {".kernel", left.suffix}


def test_a_disk_without_room_costs_the_entry_alone(cache, whole):
    result = with_small_files(cache, signal.SIG_IGN)
    assert result.returncode == 0, result.stderr
    assert were_cached(json.loads(result.stdout)) == [False]
    assert re.fullmatch(NOT_KEPT.format(re.escape(str(cache)), "File too large"), result.stderr)
    assert entries(cache) == [], "nothing unfinished is left where room is short"
    check_usable(cache, whole)


def test_a_directory_that_vanishes_again_and_again(cache, whole):
    process = start(cache, *SIZES)
    while process.poll() is None:
        try:
            cache.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # it has an entry
            shutil.rmtree(cache, ignore_errors=True)
    out, said = process.communicate()
    assert process.returncode == 0, said
    assert were_cached(json.loads(out)) == [False] * len(SIZES)
    assert re.fullmatch(NOT_KEPT.format(re.escape(str(cache)), "No such file"), said) or said == ""
    check_usable(cache, whole)


def test_a_directory_that_vanishes_while_it_is_examined(cache, tmp_path):
    disk = bad_disk(tmp_path, "-DVANISHING")
    kernels, said = compile_kernels(cache, *SIZES, LD_PRELOAD=disk)
    assert were_cached(kernels) == [False] * len(SIZES)
    assert re.fullmatch(NOT_KEPT.format(re.escape(str(cache)), "No such file"), said), "once"
