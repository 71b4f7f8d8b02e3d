"""Errors carry their parts: the names in a sentence become flags without reading the sentence."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import ddl
from ddl.errors import InputError, first_line

PACKAGE = Path(ddl.__file__).parent
CALLS = {"InputError", "sentence", "refuse", "require"}


def named(call: ast.Call) -> set[str]:
    """The arguments that a call's literal text names."""
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
    found = [re.findall(r'`(\w+)`|(\w+)(?==")', text) for text in texts if isinstance(text, str)]
    return {first or second for each in found for first, second in each}


def test_a_sentence_that_names_another_argument_lists_it() -> None:
    unlisted, calls = [], 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            if (name.id if isinstance(name, ast.Name) else name) not in CALLS:
                continue
            calls += 1
            strings = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            unlisted += [f"{file.name}:{node.lineno} {n}" for n in named(node) - strings]
    assert calls > 200
    assert not unlisted


def test_names_are_replaced() -> None:
    error = InputError("gate", 'be 1 unless mode="x" or `other`', "`other`, 2", ("mode", "other"))
    sentence = 'must be 1 unless --m="x" or `--o`, got `--o`, 2'
    flags = {"gate": "--gate", "mode": "--m", "other": "--o"}
    assert str(error.renamed(flags)) == f"`--gate` {sentence}"
    assert str(error.renamed({})) == str(error)


def test_a_path_keeps_its_name() -> None:
    """A directory may be called as an option is."""
    error = InputError(Path("hf"), "be JSON", "", ())
    assert str(error.renamed({"hf": "--hf"})) == str(error)


def test_an_error_can_be_pickled() -> None:
    for error in (InputError("x", "be 1", 2, ("y",)), InputError.sentence("No.", ("y",))):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.others) == (str(error), ("y",))


def test_an_error_is_quoted_by_its_first_line() -> None:
    assert first_line(ValueError("a\nb")) == "a"
    assert first_line(EOFError()) == "EOFError()"
