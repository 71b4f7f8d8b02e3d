"""The build from source says in a sentence what a machine lacks, before it fetches or builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

HOOKS = (
    "get_requires_for_build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
)
RUST = re.search(r'rust-version = "(.+)"', (ROOT / "Cargo.toml").read_text())[1]


def program(folder: Path, name: str, answer: str = "", code: int = 0) -> None:
    """Write a program that prints `answer`."""
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    file.chmod(0o755)


def call(hook: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call a hook as pip does, with `path` as the only place of programs."""
    code = f"import build_backend; print(build_backend.{hook}())"
    environment = {name: text for name, text in os.environ.items() if "LINKER" not in name}
    environment |= {"PATH": str(path), "PYTHONPATH": str(ROOT / "release"), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ({}, f"which needs Rust {RUST} or newer, but `cargo` was not found: install Rust"),
        ({"cargo": "", "cc": ""}, "but `rustc` was not found: install Rust"),
        ({"cargo": "", "rustc": "rustc 1.70.0 (9f", "cc": ""}, "but `rustc` is 1.70.0: `rustup"),
        ({"cargo": "", "rustc": "no toolchain", "cc": ""}, "`rustc --version` answers: no toolc"),
        ({"cargo": "", "rustc": "no default\nhelp: run"}, "answers: no default help: run"),
        ({"cargo": "", "rustc": f"rustc {RUST}.0"}, "which needs a linker: install gcc or clang."),
    ],
)
def test_what_is_missing_is_said(tmp_path, hook, programs, sentence):
    for name, answer in programs.items():
        program(tmp_path, name, answer)
    result = call(hook, tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("ddl-rs is built from source here, ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1, "a sentence, no traceback"


@pytest.mark.parametrize("version", [RUST + ".0", "1.100.0-nightly", "2.0.1"])
def test_with_rust_nothing_else_is_fetched(tmp_path, version):
    for name, answer in {"cargo": "", "rustc": f"rustc {version} (abc 2026)", "cc": ""}.items():
        program(tmp_path, name, answer)
    result = call("get_requires_for_build_wheel", tmp_path)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_a_linker_that_cargo_is_told_of_is_enough(tmp_path):
    for name, answer in {"cargo": "", "rustc": f"rustc {RUST}.0"}.items():
        program(tmp_path, name, answer)
    linker = {"CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER": "x86_64-conda-linux-gnu-cc"}
    result = call("get_requires_for_build_wheel", tmp_path, **linker)
    assert result.returncode == 0, result.stderr


def test_a_stack_trace_of_rustup_is_not_asked_for(tmp_path):
    program(tmp_path, "cargo")
    program(tmp_path, "rustc", "'$RUST_BACKTRACE'")
    result = call("get_requires_for_build_wheel", tmp_path, RUST_BACKTRACE="1")
    assert result.stderr.endswith("answers: 0\n")


def test_maturin_alone_would_fetch_a_compiler(tmp_path):
    """If it stops doing that, release/build_backend.py can go."""
    code = "import maturin; print(maturin.get_requires_for_build_wheel())"
    environment = {"PATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "puccinialin" in result.stdout, result.stderr


def test_windows_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "release")
    import build_backend

    monkeypatch.setattr(sys, "platform", "win32")
    assert build_backend.missing() == (
        "ddl-rs runs on Linux and macOS: on Windows, install it in WSL 2."
    )
