"""The modules of src import only those listed before them, and no files import in a circle."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

# The modules of a folder, in rows. Each may import modules of earlier rows, but not of its own.
ORDER = {
    "": [
        "environment error library",
        "records tensor",
        "problem",
        "cpu cuda",
        "delta_rule",
        "execute",
        "slices torch",
        "python tch",
    ],
    "cpu": ["simd", "buffer", "parallel partition state whole", "expand rewrite_read"],
    "delta_rule": [
        "slice",
        "division",
        "rows transposed",
        "chunk loaded partial single",
        "sums walk",
        "backward forward",
        "tests",
    ],
    "slices": ["array memory", "expand rewrite_read"],
    "tch": ["call", "expand rewrite_read"],
    "torch": ["shims", "dispatcher memory", "run source", "stack", "operators", "dispatch"],
    "cuda": ["kernel", "plan", "compile", "device", "auxiliary", "expand rewrite_read"],
}
PYTHON = {"error.rs", "python"}  # the only modules that may use PyO3


def code_of(file: Path) -> str:
    """The source without comments and literals; `super` in an inline module is the file itself."""
    text = re.sub(r"""'(?:[^'\\]|\\.)'|//.*|"(?:[^"\\]|\\[\s\S])*\"""", "", file.read_text("utf-8"))
    inline = re.compile(r"^(?:pub )?mod \w+ \{$.*?^\}", re.MULTILINE | re.DOTALL)
    return inline.sub(lambda block: re.sub(r"(?<!::)\bsuper\b", "self", block[0]), text)


def leaves(tree: str) -> list[str]:
    """The paths of a use tree: `a::{b, c::d as e}` is a::b and a::c::d as e."""
    head, brace, rest = tree.strip().partition("{")
    inside = rest.rpartition("}")[0]
    parts = re.findall(r"(?:[^,{}]|\{(?:[^{}]|\{[^{}]*\})*\})+", inside)
    inner = [head + leaf for part in parts if part.strip() for leaf in leaves(part)]
    return inner if brace else [head]


def file_of(src: Path, path: list[str]) -> Path:
    """The file of the deepest module on a path from the crate's root."""
    ends = (src.joinpath(*path[:end]) for end in range(len(path), 0, -1))
    files = (file for end in ends for file in (end / "mod.rs", end.with_name(f"{end.name}.rs")))
    return next((file for file in files if file.is_file()), src / "lib.rs")


def imports(src: Path, file: Path) -> set[Path]:
    """The files that a file refers to, in use declarations and in other paths."""
    code, parts = code_of(file), file.relative_to(src).with_suffix("").parts
    here = [part for part in parts if part not in ("lib", "mod")]
    known = {"crate": [], "self": here, "super": here[:-1]}
    known |= {child: [*here, child] for child in re.findall(r"\bmod (\w+);", code)}

    def absolute(path: str) -> Iterator[list[str]]:
        first, *rest = path.split("::")
        if first in known:
            where = list(known[first])
            for name in rest:
                up = where[:-1] if name == "super" else where
                where = up if name in ("super", "self") else [*where, name]
            yield where

    paths = []
    for leaf in (leaf for tree in re.findall(r"\buse\s+([^;]+);", code) for leaf in leaves(tree)):
        path, _, alias = leaf.partition(" as ")
        for target in absolute(path.strip()):
            paths.append(target)
            known.setdefault(alias.strip() or "".join(target[-1:]), target)
    paths += [found for path in re.findall(r"\b\w+(?:::\w+)+", code) for found in absolute(path)]
    return {file_of(src, path) for path in paths} - {file}


def against_the_rows(src: Path, folder: str, graph: dict[Path, set[Path]]) -> Iterator[str]:
    ranks = {room: rank for rank, row in enumerate(ORDER[folder]) for room in row.split()}
    there = {entry.stem for entry in (src / folder).iterdir()} - {"lib", "mod"}
    yield from (f"src/{folder}: {room} is no known room" for room in sorted(there ^ set(ranks)))
    for pair in ((file, target) for file, targets in graph.items() for target in targets):
        if all(path.is_relative_to(src / folder) for path in pair):
            file, target = (path.relative_to(src / folder) for path in pair)
            room, other = (path.parts[0].removesuffix(".rs") for path in (file, target))
            if room in ranks and room != other and ranks.get(other, len(ranks)) >= ranks[room]:
                yield f"{file} imports {target}"


def faults(src: Path) -> list[str]:
    graph = {file: imports(src, file) for file in sorted(src.rglob("*.rs"))}
    found = [fault for folder in ORDER for fault in against_the_rows(src, folder, graph)]
    for file in graph:
        inside = file.relative_to(src)
        if inside.parts[0] not in PYTHON and re.search(r"\bpyo3::", code_of(file)):
            found.append(f"{inside} knows Python")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = [str(file.relative_to(src)) for file in error.args[1]]
        found.append("a circle: " + " ← ".join(circle))
    return found


def test_rooms_import_in_one_direction():
    assert faults(SRC) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("cpu/expand.rs", "use crate::{cuda::{self as gpu}};", "cpu/expand.rs imports cuda/mod.rs"),
        ("cuda/plan/limits.rs", "use super::super::device::Call;", "plan/limits.rs imports device"),
        ("cuda/plan/limits.rs", "use super::fits;", "a circle: "),
        ("problem/sizes.rs", "fn f() { crate::python::g() }", "problem/sizes.rs imports python"),
        ("tensor/rows.rs", "use pyo3::prelude::*;", "tensor/rows.rs knows Python"),
        ("corridor.rs", "", "corridor is no known room"),
    ],
)
def test_an_import_against_an_arrow_is_a_fault(tmp_path, file, line, fault):
    src = shutil.copytree(SRC, tmp_path / "src")
    with (src / file).open("a", encoding="utf-8") as text:
        text.write(f"\n{line}\n")
    assert any(fault in found for found in faults(src)), faults(src)
