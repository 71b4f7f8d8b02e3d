"""The scripts of a release delete only their own files, and say in a sentence why they stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

RELEASE = ROOT / "release"


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(RELEASE)
    import wheels

    return wheels


@pytest.fixture
def check_wheel(monkeypatch):
    monkeypatch.syspath_prepend(RELEASE)
    import check_wheel

    return check_wheel


def test_a_build_replaces_its_own_files_alone(tmp_path, monkeypatch, wheels):
    kept = ("photos.tar.gz", "other-1.0-cp310-abi3-linux_x86_64.whl", "ddl_rs-0.1-cp310_arm64.whl")
    wheels_of_both = ("cp310-abi3-linux_x86_64.whl", "cp315-abi3.abi3t-linux_x86_64.whl")
    replaced = ("ddl_rs-0.0.1.tar.gz", *(f"ddl_rs-0.0.1-{wheel}" for wheel in wheels_of_both))
    for name in (*kept, *replaced):
        (tmp_path / name).touch()
    monkeypatch.setattr(wheels.build_backend, "missing", lambda: None)
    monkeypatch.setattr(wheels, "maturin", lambda *_, **__: None)
    monkeypatch.setattr(wheels, "build_wheel", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--out", str(tmp_path)])
    wheels.main()
    assert {path.name for path in tmp_path.iterdir()} == set(kept)


@pytest.mark.parametrize("target", ["x86_64", "x86_64-abi3t"])
def test_a_wheel_replaces_that_of_its_own_abi_alone(tmp_path, monkeypatch, wheels, target):
    names = {
        "x86_64": "ddl_rs-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl",
        "x86_64-abi3t": "ddl_rs-0.1.0-cp315-abi3.abi3t-manylinux_2_28_x86_64.whl",
        "aarch64": "ddl_rs-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl",
    }
    for name in names.values():
        (tmp_path / name).touch()
    calls = []
    monkeypatch.setattr(wheels.build_backend, "missing", lambda: None)
    for step in ("add_rust_target", "build_libgcc", "remapped_paths"):
        monkeypatch.setattr(wheels, step, lambda *_: [])
    monkeypatch.setattr(wheels, "maturin", lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--out", str(tmp_path), "--targets", target])
    wheels.main()
    assert {path.name for path in tmp_path.iterdir()} == set(names.values()) - {names[target]}
    assert ("python3.15t" in calls[0]) == target.endswith("abi3t")


@pytest.mark.parametrize(("lock", "abi"), [(0, "abi3"), (1, "abi3.abi3t")])
def test_the_wheel_for_this_kind_of_python_is_found(tmp_path, monkeypatch, check_wheel, lock, abi):
    monkeypatch.setattr(check_wheel.sysconfig, "get_config_var", lambda _: lock)
    monkeypatch.setattr(check_wheel.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(check_wheel.sys, "platform", "linux")
    for name in ("cp310-abi3", "cp315-abi3.abi3t"):
        (tmp_path / f"ddl_rs-0.1.0-{name}-manylinux_2_28_x86_64.whl").touch()
    assert f"-{abi}-" in check_wheel.find_wheel(tmp_path).name


def run(script: str, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with `path` as the only place of programs."""
    command = [sys.executable, RELEASE / script, *arguments]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def test_wheels_without_rust_are_refused_in_a_sentence(tmp_path):
    result = run("wheels.py", "--out", str(tmp_path), path=tmp_path)
    assert result.returncode == 1
    assert "but `cargo` was not found: install Rust" in result.stderr
    assert result.stderr.count("\n") == 1, "a sentence, no traceback"


@pytest.mark.parametrize(
    ("script", "failed", "sentence"),
    [
        ("wheels.py", "cargo", "The build stopped, because this failed: "),
        ("check_builds.py", "git", "The builds were not checked, because this failed: git clone"),
    ],
)
def test_a_program_that_fails_is_named(tmp_path, script, failed, sentence):
    rust = "rustc 99.0.0"
    for name, answer in {"cargo": "", "rustc": rust, "cc": "", "git": "", "rustup": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\nexit {int(name == failed)}\n")
        (tmp_path / name).chmod(0o755)
    out = ["--targets", "sdist", "--out", str(tmp_path / "dist")] if script == "wheels.py" else []
    result = run(script, *out, path=tmp_path)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("script", ["wheels.py", "check_wheel.py", "check_builds.py"])
def test_a_wrong_argument_is_refused(tmp_path, script):
    result = run(script, "--wrong", path=tmp_path)
    assert result.returncode == 2
    assert "unrecognized arguments: --wrong" in result.stderr


def test_a_failed_step_shows_its_output(tmp_path, capsys, check_wheel):
    code = "raise ImportError('GLIBC_2.99 not found')"
    with pytest.raises(SystemExit, match=r"^import: failed after"):
        check_wheel.step("import", [sys.executable, "-c", code])
    assert "GLIBC_2.99 not found" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^train: `ddl` was not found$"):
        check_wheel.step("train", ["ddl"], env={"PATH": str(tmp_path)})


def test_a_wheel_that_does_not_import_says_why(tmp_path, capsys, check_wheel):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'GLIBC_2.99 not found' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^import: failed after"):
        check_wheel.check_commands(tmp_path, tmp_path)
    assert "GLIBC_2.99 not found" in capsys.readouterr().out
