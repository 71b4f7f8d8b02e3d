"""Errors carry their parts: the names in a sentence become flags without reading the sentence."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import ddl
from ddl.errors import InputError, first_line
from ddl.lab.cli import COMMANDS
from ddl.lab.cli.main import _flags

PACKAGE = Path(ddl.__file__).parent
CALLS = {"InputError", "sentence", "refuse", "require", "damaged"}
# They do not speak of the arguments of a command: sweeps.py names the keys of a file.
NO_COMMAND = (
    "decoders",
    "ops",
    "nn",
    "nanogpt",
    "nanochat",
    "recording",
    "cuda.py",
    "reference.py",
    "sweeps.py",
)


def name_of(call: ast.Call) -> str | None:
    """The name of the function that is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def named(text: ast.AST) -> set[str]:
    """The arguments that a literal text names."""
    texts = [node.value for node in ast.walk(text) if isinstance(node, ast.Constant)]
    found = [re.findall(r'`(\w+)`|(\w+)(?==")', text) for text in texts if isinstance(text, str)]
    return {first or second for each in found for first, second in each}


def test_a_sentence_that_names_another_argument_lists_it() -> None:
    unlisted, calls = [], 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or name_of(node) not in CALLS:
                continue
            calls += 1
            strings = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            unlisted += [f"{file.name}:{node.lineno} {n}" for n in named(node) - strings]
    assert calls > 200
    assert not unlisted


def test_a_text_that_names_an_argument_has_it_listed_somewhere() -> None:
    """Also if it is no part of the call: a command would print `text_field` for --text-field."""
    arguments = {name for command in COMMANDS.values() for name in _flags(command.options)}
    unlisted = []
    for file in PACKAGE.rglob("*.py"):
        if set(file.relative_to(PACKAGE).parts) & set(NO_COMMAND):
            continue
        nodes = list(ast.walk(ast.parse(file.read_text())))
        calls = [node for node in nodes if isinstance(node, ast.Call) and name_of(node) in CALLS]
        inside = {id(part) for call in calls for part in ast.walk(call)}
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        listed = {
            element.value
            for node in nodes
            if isinstance(node, ast.Tuple)
            for element in node.elts
            if isinstance(element, ast.Constant)
        }
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in inside | docstrings:
                missing = named(node) & arguments - listed
                unlisted += [f"{file.name}:{node.lineno} {name}" for name in missing]
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
    assert first_line(KeyError("name")) == "'name'"
