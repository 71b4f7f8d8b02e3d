"""Stand-ins for NVIDIA's libraries, built from C against NVIDIA's headers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def headers(name: str) -> list[Path]:
    """Return the folders of torch's NVIDIA packages that contain a header."""
    return [
        path.parent for path in Path(torch.__file__).parents[1].glob(f"nvidia/*/include/{name}")
    ]


def needs(header: str) -> list[pytest.MarkDecorator]:
    """Return the skip conditions of a test that needs a stand-in."""
    return [
        pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is for Linux"),
        pytest.mark.skipif(
            not headers(header), reason=f"{header} comes with a torch that is built for CUDA"
        ),
        pytest.mark.skipif(not shutil.which("gcc"), reason="the stand-in is built with gcc"),
    ]


def build(source: str, header: str, library: str, folder: Path, *flags: str) -> Path:
    """Build `source` as `library`; return `folder`, for the loader's search path."""
    folder.mkdir(exist_ok=True)
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{headers(header)[0]}"]
    output = [f"-Wl,-soname,{library}", "-o", str(folder / library)]
    subprocess.run(["gcc", *options, *flags, str(HERE / source), *output], check=True)
    return folder


def environment(folder: Path, cache: Path, **variables: str) -> dict[str, str]:
    """The variables of a process with `folder` on the loader's search path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DDL_", "STAND_IN_"))}
    return kept | {"LD_LIBRARY_PATH": str(folder), "DDL_CACHE_DIR": str(cache)} | variables


def run(
    folder: Path, cache: Path, arguments: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with `folder` on the loader's search path."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(folder, cache, **variables),
        capture_output=True,
        text=True,
        check=False,
    )


# Loads torch once, and runs each piece of code in a fork: a new process with its own variables,
# without the two seconds that torch takes to load. The loader's search path is the first process's.
FORKING = """
import json, os, sys, traceback
import torch

def run(job):
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:0] = filter(None, [os.environ.get("PYTHONPATH")])
    for number, name in ((1, job["out"]), (2, job["error"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    try:
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if not child:
        status = run(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forking:
    """A process that has loaded torch, with `folder` on the loader's search path, and forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            env=environment(folder, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, cache: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        out, error = self.folder / "stdout", self.folder / "stderr"
        given = environment(self.folder, cache, **variables)
        job = {"code": code, "environment": given, "out": str(out), "error": str(error)}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        status = int(self.process.stdout.readline())
        said = (path.read_text("utf-8") for path in (out, error))
        return subprocess.CompletedProcess(["-c", code], status, *said)


@contextmanager
def forking(folder: Path) -> Iterator[Forking]:
    """Start a `Forking`, and end it."""
    server = Forking(folder)
    try:
        yield server
    finally:
        server.process.communicate()
