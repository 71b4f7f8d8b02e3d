"""Build the commit twice and compare the bytes; build the sdist with Rust and without.

`make check-wheel` runs this after the environments. It takes the last commit, not the working tree.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        builds = [build(Path(folder) / name) for name in ("here", "in/another/folder")]
        if builds[0] != builds[1]:
            sys.exit(f"Two builds of one commit differ: {builds[0]} and {builds[1]}")
        for name, digest in builds[0].items():
            print(f"same bytes   {name} {digest}")
        [sdist] = (Path(folder) / "here" / "dist").glob("*.tar.gz")
        check_sdist(sdist, Path(folder))


def build(folder: Path) -> dict[str, str]:
    """Clone the last commit into `folder`, build a wheel and the sdist; return their hashes."""
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    command = [sys.executable, "release/wheels.py", "--targets", "x86_64", "sdist"]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    files = sorted((folder / "dist").iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def check_sdist(sdist: Path, folder: Path) -> None:
    """Install the sdist by pip, without Rust and with it."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--no-deps", sdist]
    bare = os.environ | {"PATH": str(environment / "bin")}
    refused = subprocess.run(pip, env=bare, cwd=folder, capture_output=True, text=True)
    sentence = "but `cargo` was not found: install Rust"
    if refused.returncode == 0 or sentence not in refused.stdout + refused.stderr:
        sys.exit(f"pip should have said {sentence!r}: {refused.stdout}{refused.stderr}")
    print("sdist        says in a sentence that Rust is missing")
    subprocess.run([*pip, "--quiet"], cwd=folder, check=True)
    load = "import ddl._native; print('sdist        built and loaded', ddl._native.__version__)"
    subprocess.run([environment / "bin" / "python", "-c", load], cwd=folder, check=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the program has said why
        sys.exit(
            f"The builds were not checked, because this failed: {shlex.join(map(str, error.cmd))}"
        )
