"""The installed package: its linked libraries, imports and metadata."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddl
from ddl import _native
from tests.support import ROOT, elf


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_the_build_of_this_tree_links_neither_torch_nor_cuda():
    """tests/release/test_wheel.py says the same of a wheel, symbol by symbol."""
    assert _native.__file__ is not None
    needed = elf.read(Path(_native.__file__).read_bytes()).needed
    assert "libc.so.6" in needed
    assert [name for name in needed if re.match("lib(torch|c10|cu|nv)", name)] == []


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
    extras = (None, "train", "plot", "report", "dev")
    asked = [r for extra in extras for r in requirements(extra) if r.name != "ddl-rs"]
    for requirement in asked:
        versions = pins[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_named_tuples_that_are_compiled_have_no_properties():
    """torch.compile of torch 2.10 traces their fields and methods alone. Hooks run uncompiled."""
    package = Path(ddl.__file__).parent
    for path in package.rglob("*.py"):
        where = path.relative_to(package)
        if where.parts[0] == "lab" or where == Path("nn", "hooks.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                for member in node.body:
                    decorators = map(ast.unparse, getattr(member, "decorator_list", ()))
                    assert "property" not in decorators, f"{where}: {node.name}.{member.name}"


def test_version_is_the_metadata_version():
    assert ddl.__version__ == importlib.metadata.version("ddl-rs")


def test_the_citation_has_this_version():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited
    assert cited[1] == ddl.__version__


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
