"""The contents of finished Linux wheels: `make check-wheel` runs this with `--wheels dist`."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support import ROOT, elf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")

ABI3T = "-abi3.abi3t-"  # in the name of a wheel for free-threaded Python
GLIBC = (2, 28)
SYSTEM_LIBRARIES = {
    "libc",
    "libgcc_s",
    "libm",
    "libpthread",
    "libdl",
    "ld-linux-x86-64",
    "ld-linux-aarch64",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "wheel" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--wheels")
        wheels = sorted(Path(folder).glob("*manylinux*.whl")) if folder else []
        if folder and not wheels:
            raise pytest.UsageError(f"`--wheels` must be a folder with Linux wheels, got {folder}")
        metafunc.parametrize("wheel", wheels, ids=[path.stem for path in wheels], scope="module")


def name_of_native(wheel: Path) -> str:
    if ABI3T not in wheel.name:
        return "ddl/_native.abi3.so"
    architecture = re.search(r"_(x86_64|aarch64)$", wheel.stem)[1]
    return f"ddl/_native.abi3t-{architecture}-linux-gnu.so"


@pytest.fixture
def native(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name_of_native(wheel))


def foreign(library: elf.Library) -> list[elf.Symbol]:
    """Return what neither the C library of GLIBC, nor libgcc, nor Python's stable ABI provides."""
    return [
        symbol
        for symbol in library.undefined
        if not (symbol.version and _glibc(symbol.version) <= GLIBC)
        and not symbol.name.startswith(("_Unwind_", "Py", "_Py"))
        and not (symbol.weak and not symbol.version)
    ]


def _glibc(version: str) -> tuple[int, ...]:
    found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
    return (int(found[1]), int(found[2])) if found else (99,)


def test_it_needs_no_symbol_of_torch_or_cuda_or_of_a_newer_glibc(native: bytes) -> None:
    library = elf.read(native)
    assert any(symbol.name.startswith("Py") for symbol in library.undefined)
    assert foreign(library) == []


def test_it_links_only_system_libraries(native: bytes) -> None:
    needed = {name.split(".so")[0] for name in elf.read(native).needed}
    assert {"libc", "libgcc_s"} <= needed <= SYSTEM_LIBRARIES


def test_the_unwinder_is_that_of_torch(native: bytes) -> None:
    """One of zig's own would end the process at the first refused call (release/libgcc_s.c)."""
    assert "_Unwind_RaiseException" in {symbol.name for symbol in elf.read(native).undefined}
    assert b"libunwind: " not in native, "LLVM's unwinder begins its messages so"


def test_it_holds_no_folder_of_the_machine_that_built_it(wheel: Path) -> None:
    folders = [str(ROOT), str(Path.home()), os.environ.get("CARGO_HOME", ".cargo/registry")]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            assert [folder for folder in folders if folder.encode() in data] == [], name


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 3_000_000


def test_it_is_this_version_for_every_python_from_3_10(wheel: Path) -> None:
    """And, without a lock, from 3.15 on."""
    version = importlib.metadata.version("ddl-rs")
    pythons = "cp315-abi3.abi3t" if ABI3T in wheel.name else "cp310-abi3"
    assert wheel.name.startswith(f"ddl_rs-{version}-{pythons}-manylinux_2_28_")


def test_it_has_the_whole_package_and_no_more(wheel: Path) -> None:
    package = ROOT / "python"
    kinds = {".py", ".pyi", ".html", ".js", ".css"}  # the last three: of `ddl report`
    sources = [path for path in (package / "ddl").rglob("*") if path.suffix in kinds]
    expected = {
        name_of_native(wheel),
        "ddl/py.typed",
        *(str(path.relative_to(package)) for path in sources),
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_auditwheel_passes_it(wheel: Path) -> None:
    platform = wheel.stem.split("-")[-1]
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f'platform tag: "{platform}"' in " ".join(shown.split())


def test_abi3audit_passes_it(wheel: Path) -> None:
    if ABI3T in wheel.name:
        pytest.skip("abi3audit does not know how modules of abi3t are exported (PEP 793)")
    command = [sys.executable, "-m", "abi3audit", "--strict", wheel]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_foreign_symbols_are_seen_where_there_are_some() -> None:
    library = elf.read((Path(torch.__file__).parent / "lib" / "libtorch_python.so").read_bytes())
    names = {symbol.name for symbol in foreign(library)}
    assert any("c10" in name for name in names)
    assert any(name.startswith("libtorch") for name in library.needed)
