"""The build backend that pip calls for the sdist: maturin's, after a look at what a build needs.

Where there is no Rust, maturin on its own downloads a compiler into a temporary folder.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import maturin

CARGO_TOML = Path(__file__).resolve().parents[1] / "Cargo.toml"


def missing() -> str | None:
    """Return a sentence that says what this machine lacks to build ddl-rs, or None."""
    if sys.platform == "win32":
        return "ddl-rs runs on Linux and macOS: on Windows, install it in WSL 2."
    least = re.search(r'^rust-version = "(.+)"', CARGO_TOML.read_text(), re.MULTILINE)[1]
    advice = "install Rust from https://rustup.rs, or a wheel of ddl-rs, which needs no Rust."
    wanted = f"ddl-rs is built from source here, which needs Rust {least} or newer"
    for program in ("cargo", "rustc"):
        if not shutil.which(program):
            return f"{wanted}, but `{program}` was not found: {advice}"
    quiet = os.environ | {"RUST_BACKTRACE": "0"}
    found = subprocess.run(["rustc", "--version"], capture_output=True, text=True, env=quiet)
    version = re.match(r"rustc (\d+)\.(\d+)", found.stdout)
    if version is None:
        answer = " ".join((found.stderr or found.stdout).split()) or "nothing"
        return f"{wanted}, but `rustc --version` answers: {answer}"
    if tuple(map(int, version.groups())) < tuple(map(int, least.split("."))):
        return f"{wanted}, but `rustc` is {found.stdout.split()[1]}: `rustup update`, or {advice}"
    # Conda's Rust, for one, names a linker that is none of the three.
    named = any(re.fullmatch(r"CARGO_TARGET_\w+_LINKER", variable) for variable in os.environ)
    if not named and not any(shutil.which(linker) for linker in ("cc", "gcc", "clang")):
        return "ddl-rs is built from source here, which needs a linker: install gcc or clang."
    return None


def checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, ended by a sentence where something is missing."""

    @functools.wraps(hook)
    def run(*arguments: Any, **options: Any) -> Any:
        if sentence := missing():
            sys.exit(sentence)
        return hook(*arguments, **options)

    return run


get_requires_for_build_wheel = checked(maturin.get_requires_for_build_wheel)
get_requires_for_build_editable = checked(maturin.get_requires_for_build_editable)
get_requires_for_build_sdist = checked(maturin.get_requires_for_build_sdist)
prepare_metadata_for_build_wheel = checked(maturin.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = checked(maturin.prepare_metadata_for_build_editable)
build_wheel = checked(maturin.build_wheel)
build_editable = checked(maturin.build_editable)
build_sdist = checked(maturin.build_sdist)
