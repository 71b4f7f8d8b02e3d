"""Stand-ins for NVIDIA's libraries, built from C against NVIDIA's headers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def run(
    folder: Path, cache: Path, arguments: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with `folder` on the loader's search path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DDL_", "STAND_IN_"))}
    env = kept | {"LD_LIBRARY_PATH": str(folder), "DDL_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env | variables,
        capture_output=True,
        text=True,
        check=False,
    )
