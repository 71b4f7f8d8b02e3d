"""The installed package: its linked libraries, imports and metadata."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddl
from ddl import _native
from tests.support import ROOT

# All libraries that this manylinux wheel may link.
SYSTEM_LIBRARIES = {"libc", "libgcc_s", "libm", "libpthread", "libdl"}

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5


def needed_libraries(path: Path) -> list[str]:
    """Return the DT_NEEDED entries of a 64-bit little-endian ELF file, in file order."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", f"{path} is not a 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, entries = struct.unpack_from("<HH", data, 54)
    # Elf64_Phdr: type, flags, offset, vaddr, paddr, filesz, memsz, align
    headers = [
        struct.unpack_from("<IIQQQQQQ", data, table + i * entry_size) for i in range(entries)
    ]

    dynamic = next(h for h in headers if h[0] == PT_DYNAMIC)
    tags = list(struct.iter_unpack("<QQ", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    tags = tags[: [tag for tag, _ in tags].index(DT_NULL)]

    address = dict(tags)[DT_STRTAB]
    strings = next(
        address - vaddr + offset
        for kind, _, offset, vaddr, _, size, _, _ in headers
        if kind == PT_LOAD and vaddr <= address < vaddr + size
    )
    starts = [strings + value for tag, value in tags if tag == DT_NEEDED]
    return [data[start : data.index(b"\0", start)].decode() for start in starts]


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_native_module_links_only_system_libraries():
    assert _native.__file__ is not None
    needed = needed_libraries(Path(_native.__file__))
    assert "libc" in {name.split(".so")[0] for name in needed}
    foreign = [
        name
        for name in needed
        if name.split(".so")[0] not in SYSTEM_LIBRARIES and not name.startswith("ld-linux")
    ]
    assert foreign == [], "one wheel has to serve every torch version, with and without CUDA"


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_linked_libraries_are_seen_where_there_are_some():
    needed = needed_libraries(Path(torch.__file__).parent / "lib" / "libtorch_python.so")
    assert any(name.startswith("libtorch") for name in needed)


@pytest.fixture(scope="module")
def fresh_import() -> dict:
    """Time and modules of importing `ddl`'s names in a new process that has imported torch."""
    code = (
        "import json, sys, time, torch\n"
        "before = set(sys.modules)\n"
        "start = time.process_time()\n"  # not the wall clock: other tests share the cores
        "from ddl import DeltaResidual, DeltaStream, functional, reference\n"
        "seconds = time.process_time() - start\n"
        "print(json.dumps({'seconds': seconds, 'loaded': sorted(set(sys.modules) - before)}))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_is_quick(fresh_import):
    assert fresh_import["seconds"] < 0.5


def test_import_loads_torch_and_nothing_else_large(fresh_import):
    loaded = {name.split(".")[0] for name in fresh_import["loaded"]}
    assert {"ddl"} <= loaded
    optional = {"matplotlib", "numpy", "rich", "safetensors", "tokenizers", "transformers", "tyro"}
    assert loaded & optional == set()
    assert "torch._dynamo" not in fresh_import["loaded"]


def test_import_alone_loads_no_torch():
    """The command line imports ddl, too."""
    before, after = ("assert 'torch' not in sys.modules", "assert 'torch' in sys.modules")
    code = f"import sys, ddl; {before}; ddl.Read; {after}"
    subprocess.run([sys.executable, "-c", code], check=True)


def requirements(extra: str | None) -> list[Requirement]:
    declared = [Requirement(line) for line in importlib.metadata.requires("ddl-rs") or []]
    if extra is None:
        return [r for r in declared if r.marker is None]
    return [r for r in declared if r.marker is not None and r.marker.evaluate({"extra": extra})]


def test_torch_is_the_only_dependency():
    assert [(r.name, str(r.specifier)) for r in requirements(None)] == [("torch", ">=2.10")]


def test_every_development_dependency_is_pinned():
    text = (ROOT / "requirements-dev.lock").read_text()
    assert "://" not in text, "the lock file names packages, not where they come from"
    pins: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, flags=re.MULTILINE):
        pins.setdefault(canonicalize_name(name), []).append(version)
    assert pins["torch"] == ["2.11.0"]
    for requirement in [r for extra in (None, "train", "plot", "dev") for r in requirements(extra)]:
        versions = pins[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_version_is_the_metadata_version():
    assert ddl.__version__ == importlib.metadata.version("ddl-rs")


def test_package_is_typed():
    assert (Path(ddl.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", sorted(ddl.__all__))
def test_public_names_are_documented(name):
    thing = getattr(ddl, name)
    if isinstance(thing, str):
        return
    # Not inspect.getdoc: that would accept nn.Module's text for an undocumented subclass.
    assert thing.__doc__, f"ddl.{name} has no docstring"
    if inspect.isclass(thing):
        assert thing.__doc__ != thing.__mro__[1].__doc__
