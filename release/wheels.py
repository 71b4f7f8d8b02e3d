"""Build the wheels for Linux and the sdist into dist/: `make wheels`.

zig links against the symbols of glibc 2.28 on any Linux, for x86-64 and for ARM. Two builds of one
commit have the same bytes wherever they are made with the same Rust and the pinned maturin and zig.

Each architecture has two wheels: of Python's stable ABI, abi3, and of the one that free-threaded
Python has, too, abi3t. The first free-threaded Python with abi3t, 3.15, need not be installed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import build_backend

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
ABI3T = "-abi3t"  # the end of a target's name
WHEELS = tuple(architecture + abi for architecture in ARCHITECTURES for abi in ("", ABI3T))
GLIBC = "2.28"  # torch's own wheels ask for it, too
MANYLINUX = f"manylinux_{GLIBC.replace('.', '_')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument(
        "--targets", nargs="+", choices=[*WHEELS, "sdist"], default=[*WHEELS, "sdist"],
        help="default: all",
    )  # fmt: skip
    options = parser.parse_args()
    if sentence := build_backend.missing():
        sys.exit(sentence)
    for target in options.targets:
        for old in options.out.glob(pattern(target)):
            old.unlink()
        if target == "sdist":
            maturin("sdist", "--out", options.out.resolve())
        else:
            build_wheel(target, options.out.resolve())
    for file in sorted(options.out.glob("ddl_rs-*")):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file}")


def pattern(target: str) -> str:
    """Return the pattern of the names that a target's file has in any version."""
    if target == "sdist":
        return "ddl_rs-*.tar.gz"
    abi = "abi3.abi3t" if target.endswith(ABI3T) else "abi3"
    return f"ddl_rs-*-{abi}-*_{target.removesuffix(ABI3T)}.whl"


def build_wheel(wheel: str, out: Path) -> None:
    """Build one of WHEELS."""
    architecture = wheel.removesuffix(ABI3T)
    python = ["--interpreter", "python3.15t"] if wheel.endswith(ABI3T) else []
    target = f"{architecture}-unknown-linux-gnu"
    add_rust_target(target)
    libgcc = build_libgcc(architecture)
    flags = ["-C", f"link-arg={libgcc}", *remapped_paths()]
    maturin(
        "build", "--release", "--locked", "--strip", "--zig", "--target", target, *python,
        "--compatibility", MANYLINUX, "--auditwheel", "check", "--out", out,
        CARGO_ENCODED_RUSTFLAGS="\x1f".join(flags),
    )  # fmt: skip


def add_rust_target(target: str) -> None:
    """Have rustup install Rust's standard library for `target` if it is not there."""
    library = Path(rustc("--print", "sysroot")) / "lib" / "rustlib" / target / "lib"
    if library.is_dir():
        return
    if not shutil.which("rustup"):
        sys.exit(f"Rust has no standard library for {target}: install it, or get Rust from rustup.")
    subprocess.run(["rustup", "target", "add", target], check=True, cwd=ROOT)


def build_libgcc(architecture: str) -> Path:
    """Build the library that stands in for libgcc_s when the extension is linked."""
    library = ROOT / "target" / "libgcc" / architecture / "libgcc_s.so.1"
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu.{GLIBC}",
            "-shared", "-nostdlib", "-Wl,-soname,libgcc_s.so.1", "-o", library,
            ROOT / "release" / "libgcc_s.c",
        ],
        check=True,
    )  # fmt: skip
    return library


def remapped_paths() -> list[str]:
    """Return the flags that keep this machine's folders out of the extension."""
    subprocess.run(["cargo", "fetch", "--locked", "--quiet"], check=True, cwd=ROOT)
    cargo = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    folders = {str(ROOT): "ddl-rs", rustc("--print", "sysroot"): "rust"}
    for registry in (cargo / "registry" / "src").glob("*"):
        folders[str(registry)] = "crates"
    return [f"--remap-path-prefix={folder}={name}" for folder, name in folders.items()]


def rustc(*arguments: str) -> str:
    result = subprocess.run(
        ["rustc", *arguments], check=True, cwd=ROOT, capture_output=True, text=True
    )
    return result.stdout.strip()


def maturin(*arguments: str | Path, **environment: str) -> None:
    # maturin looks for ziglang in the first python3, and our build backend is a wrapper around it.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["MATURIN_NO_MISSING_BUILD_BACKEND_WARNING"] = "1"
    command = [sys.executable, "-m", "maturin", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | environment)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the program has said why
        sys.exit(f"The build stopped, because this failed: {shlex.join(map(str, error.cmd))}")
