"""Files are opened in ddl/files.py, which refuses pipes and devices: a pipe may be waited for for
ever, and a device read without end."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "python" / "ddl"
READS = {"read_text", "read_bytes"}  # methods of a path
# Readers of other libraries; the function that calls one checks the files before.
LIBRARIES = {
    *("from_pretrained", "from_file", "read_file", "memmap", "fromfile", "load_file", "load_model"),
    *("safe_open", "ParquetFile", "HuggingFaceStorageReader", "TaskManager"),
    *("torch.load", "np.load", "np.loadtxt", "np.genfromtxt", "tomllib.load", "json.load"),
}
CHECKS = {"open_file", "require_file", "require_files"}
# Files that read past the checks, and why they may.
ALLOWED = {
    ("hf/decoders/converted.py", "from_pretrained"): "transformers' own method, called by the user",
    ("hf/decoders/loading.py", "from_pretrained"): "the same, for the Auto classes",
    ("hf/delta_rule.py", "read_text"): "the source of the installed transformers",
    ("lab/analysis/report/page.py", "read_text"): "a resource of this package",
    ("lab/doctor/gpus.py", "read_text"): "files of /proc",
    ("lab/doctor/processor.py", "read_text"): "files of /proc",
    ("lab/machine.py", "read_text"): "a file of /proc",
    ("lab/machine.py", "read_bytes"): "this package's own extension",
    ("lab/train/trackers.py", "open"): "os.devnull",
    ("lab/train/checkpoint.py", "HuggingFaceStorageReader"): "after the files' checksums",
    (
        "hf/tokenization.py",
        "from_pretrained",
    ): "after `load`, its one caller, has checked the files",
    ("locks.py", "os.open"): "directories, which it locks",
    ("nanogpt/made.py", "from_pretrained"): "GPT-2's weights, by name, in nanoGPT's own code",
}


def name_of(call: ast.Call) -> str:
    """The last name of what is called, or the last two for a module that is known by them."""
    both = ast.unparse(call.func)
    return both if both in LIBRARIES | {"os.open"} else both.rpartition(".")[2]


def writes(call: ast.Call) -> bool:
    """Whether open() is called with a mode or flags that only write."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return any(set("wax") & set(mode) and len(mode) < 4 for mode in modes) or any(
        "O_WRONLY" in ast.unparse(argument) for argument in given
    )


def reads(source: str) -> Iterator[str]:
    """The names of calls that read a file which has not been checked in the same function."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    checked: set[ast.Call] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            checked |= set(inside) if CHECKS & set(map(name_of, inside)) else set()
    for call in calls:
        name, method = name_of(call), isinstance(call.func, ast.Attribute)
        if (
            (name in READS and method)
            or (name in ("open", "os.open") and not writes(call))
            or (name in LIBRARIES and call not in checked)
        ):
            yield name


def test_no_reader_goes_around_the_checks() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "files.py"
        for name in reads(path.read_text("utf-8"))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("path.read_text(encoding='utf-8')", "read_text"),
        ("Path('x').read_bytes()", "read_bytes"),
        ("open(path)", "open"),
        ("open(path, 'rb')", "open"),
        ("(path / 'meta.pkl').open('rb')", "open"),
        ("os.open(path, os.O_RDONLY)", "os.open"),
        ("np.memmap(path, np.uint8, 'r')", "memmap"),
        ("torch.load(path, weights_only=True)", "torch.load"),
        ("AutoTokenizer.from_pretrained(path)", "from_pretrained"),
    ],
)
def test_a_reader_is_seen(line: str, name: str) -> None:
    assert list(reads(f"def f(path):\n    require(path)\n    return {line}")) == [name]
    if name in LIBRARIES:
        assert list(reads(f"def f(path):\n    require_file(path)\n    return {line}")) == []


@pytest.mark.parametrize(
    "line", ["read_text(path)", "path.open('wb')", "open(os.devnull, 'w')", "writer.load(path)"]
)
def test_what_is_none_is_left_out(line: str) -> None:
    assert list(reads(f"def f(path):\n    return {line}")) == []
