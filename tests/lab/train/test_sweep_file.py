"""A sweep's file: the runs that it makes, and the sentence for everything that is wrong in one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.config import PRESETS, RECIPES, TrainConfig
from ddl.lab.config.sweeps import HINTS, Sweep, parse_sweep, read_sweep

EXAMPLE = """
preset = "tiny"
out = "runs/sweep"
seeds = [1, 2, 3]
[variants.additive]
model.residual = "additive"
[variants.cc]
model.residual = "ddl-cc"
[options]
optim.lr = [1e-3, 2e-3]
"""


def sweep(tmp_path: Path, text: str) -> Sweep:
    file = tmp_path / "trial.toml"
    file.write_text(text, encoding="utf-8")
    return read_sweep(file)


def test_variants_by_options_by_seeds(tmp_path: Path) -> None:
    runs = sweep(tmp_path, EXAMPLE).runs
    assert [run.name for run in runs[:5]] == [
        "additive-lr0.001-s1", "additive-lr0.002-s1", "cc-lr0.001-s1", "cc-lr0.002-s1",
        "additive-lr0.001-s2",
    ]  # fmt: skip
    assert len(runs) == 12
    for run in runs:
        assert run.config.directory == Path("runs/sweep") / run.name
        assert run.name == f"{run.variant}-s{run.config.seed}"
        assert run.config.resume == "auto"
        assert f"lr{run.config.optim.lr}" in run.name
        assert run.config.steps == PRESETS["tiny"].steps
    assert {run.config.model.residual for run in runs} == {"additive", "ddl-cc"}


def test_more_seeds_change_neither_names_nor_numbers(tmp_path: Path) -> None:
    few, more = (sweep(tmp_path, EXAMPLE.replace("1, 2, 3", seeds)) for seeds in ("1", "1, 9"))
    assert more.runs[: len(few.runs)] == few.runs


def test_the_order_in_the_file_does_not_change_names(tmp_path: Path) -> None:
    one, other = (
        sweep(tmp_path, f"{EXAMPLE}\n{lines}")
        for lines in ("steps = [5, 6]\nlog_every = [2]", "log_every = [2]\nsteps = [5, 6]")
    )
    assert one == other
    assert one.runs[0].name == "additive-log_every2-lr0.001-steps5-s1"


def test_by_variant(tmp_path: Path) -> None:
    runs = sweep(tmp_path, EXAMPLE).by_variant()
    assert [run.name for run in runs[2:5]] == [
        "additive-lr0.001-s3", "additive-lr0.002-s1", "additive-lr0.002-s2"
    ]  # fmt: skip


def test_what_may_be_left_out(tmp_path: Path) -> None:
    (run,) = sweep(tmp_path, "").runs
    demo = PRESETS["demo"]
    assert run.config.directory == Path("runs/trial/ddl-tc-s1337")
    assert (run.config.model, run.config.steps, run.config.seed) == (demo.model, demo.steps, 1337)


def test_types(tmp_path: Path) -> None:
    """TOML has neither None nor tuples, and 1 is no float there."""
    text = """
    preset = "tiny"
    [variants.a]
    model = { eps_k = "None", beta_init = 1 }
    optim.betas = [0.8, 0.9]
    track = []
    [options]
    "model.value_channels" = 2  # quoted, it is the same option
    compile = false
    """
    (run,) = sweep(tmp_path, text).runs
    config = run.config
    assert config.model.eps_k is None
    assert repr(config.model.beta_init) == "1.0"
    assert config.optim.betas == (0.8, 0.9)
    assert config.track == ()
    assert config.model.value_channels == 2


def test_a_list_of_lists_for_an_option_that_is_a_list(tmp_path: Path) -> None:
    text = "options.optim.betas = [[0.8, 0.9], [0.9, 0.99]]"
    runs = sweep(tmp_path, text).runs
    assert [run.config.optim.betas for run in runs] == [(0.8, 0.9), (0.9, 0.99)]
    assert [run.variant for run in runs] == ["ddl-tc-betas0.8,0.9", "ddl-tc-betas0.9,0.99"]


def test_a_list_of_one_value_is_in_the_name(tmp_path: Path) -> None:
    """So that names stay if another value is added."""
    assert sweep(tmp_path, "options.steps = [5]").runs[0].name == "ddl-tc-steps5-s1337"
    assert sweep(tmp_path, "options.steps = 5").runs[0].name == "ddl-tc-s1337"


def test_a_variant_wins_over_an_option(tmp_path: Path) -> None:
    runs = sweep(tmp_path, "options.steps = 5\nvariants.a = {}\nvariants.b.steps = 6").runs
    assert [run.config.steps for run in runs] == [5, 6]


def test_values_in_names_are_those_of_a_path(tmp_path: Path) -> None:
    runs = sweep(tmp_path, 'options.data = ["../a b", "topics"]').runs
    assert [run.name for run in runs] == ["ddl-tc-data.._a_b-s1337", "ddl-tc-datatopics-s1337"]


def test_a_recipe(tmp_path: Path) -> None:
    text = 'recipe = "paper-code"\nvariants.tc.model.residual = "ddl-tc"'
    (run,) = sweep(tmp_path, text).runs
    expected = RECIPES["paper-code"](PRESETS["demo"], {"residual": "ddl-tc"})
    assert (run.config.model, run.config.optim) == (expected.model, expected.optim)


def test_every_option_of_ddl_train_is_known() -> None:
    assert {"steps", "model.residual", "optim.lr", "device"} <= HINTS.keys()
    assert len(HINTS) > 50
    assert all(hasattr(TrainConfig(), name.split(".")[0]) for name in HINTS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "stepz = 3",
            "`stepz` must be one of preset, recipe, out, seeds, variants, options, got ",
        ),
        ('preset = "huge"', "`preset` must be one of tiny, demo, small, medium, got 'huge'"),
        ("preset = 3", "`preset` must be one of tiny, demo, small, medium, got 3"),
        ('recipe = "x"', "`recipe` must be one of paper-code, got 'x'"),
        ("out = 3", "`out` must be a directory, got 3"),
        ("seeds = 3", "`seeds` must be a list of integers, got 3"),
        ("seeds = []", "`seeds` must be a list of integers, got []"),
        ("seeds = [1, -1]", "`seeds` must be an integer of at least 0, got -1"),
        ("seeds = [true]", "`seeds` must be an integer of at least 0, got True"),
        ("seeds = [1, 1]", "`seeds` must be different, got [1, 1]"),
        ("options = 3", "`options` must be a table, as [options], got 3"),
        ("variants = 3", "`variants` must be a table, as [variants], got 3"),
        ("variants.a = 3", "`variants.a` must be a table of options, got 3"),
        ("variants.'a/b' = {}", "`variants.a/b` must have a name of letters, digits and _+.- that"),
        ("variants.'..' = {}", "`variants...` must have a name of letters, digits and _+.- that"),
        ("options.seed = 3", "`options.seed` must be left out, because `seeds` sets it, got it"),
        (
            "variants.a.out = 'x'",
            "`variants.a.out` must be left out, because `out` sets it, got it",
        ),
        (
            "options.resume = 'x'",
            "`options.resume` must be left out, because the sweep sets it, go",
        ),
        (
            "variants.cc.model.residul = 'ddl'",
            "`variants.cc.model.residul` must be an option of `ddl train`, got an unknown one, "
            "which is near model.residual",
        ),
        (
            "options.model = 3",
            "`options.model` must be an option of `ddl train`, got an unknown one",
        ),
        ("options.zzz = 3", "`options.zzz` must be an option of `ddl train`, got an unknown one"),
        (
            "options.steps.x = 3",
            "`options.steps.x` must be an option of `ddl train`, got an unknown one",
        ),
        (
            "variants.cc.model.residual = 'ddl-x'",
            '`variants.cc.model.residual` must be "additive" or "additive-conv" or "hc"',
        ),
        (
            "options.optim.lr = [0.1, 0]",
            "`options.optim.lr` must be a positive finite number, got 0",
        ),
        ("options.optim.lr = []", "`options.optim.lr` must be at least one value, got []"),
        (
            "options.steps = 1979-05-27",
            "`options.steps` must be an integer of at least 1, got datet",
        ),
        ("options.steps = true", "`options.steps` must be an integer of at least 1, got True"),
        (
            "options.optim.betas = [1, 2]",
            "`options.optim.betas` must be two numbers in [0, 1), got ",
        ),
        ("options.model.head_size = 3", "`options.model.head_size` must be even, got 3"),
        (
            "options.data = ['a b', 'a_b']",
            "`variants` and `options` must give every run its own nam",
        ),
        (
            "options.steps = [5]\nvariants.a.steps = 6",
            "`options.steps` must be one value where `variants.a.steps` replaces it, got a list",
        ),
        (
            "options.model.gate_hidden = 64",
            '`options.model.gate_hidden` must be left at 128 unless gate="mlp", got 64',
        ),
    ],
)
def test_a_sentence_names_the_key(tmp_path: Path, text: str, sentence: str) -> None:
    expected = f"{tmp_path / 'trial.toml'}: {sentence}"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
        sweep(tmp_path, text)


@pytest.mark.parametrize("content", [
    b"preset = ",
    b"\xff",
    b"a = 1\na = 2",
    b"=" * 9,
    pytest.param(
        b"a = " + b"1" * 5000,
        marks=pytest.mark.skipif(
            not hasattr(sys, "get_int_max_str_digits"),
            reason="this Python (before 3.10.7) reads integers of any length",
        ),
    ),
])  # fmt: skip
def test_what_is_no_toml(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trial.toml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=rf"^`file` must be TOML, got {re.escape(str(file))}: "):
        read_sweep(file)
    with pytest.raises(InputError, match=r"^`file` must be readable, got .*: Is a directory$"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("line", ["{} = 1", "[{}]", '"x" = 1\noptions.{} = 1'])
def test_a_key_of_many_parts_is_refused_at_once(tmp_path: Path, line: str) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(line.format(".".join(["a"] * 100_000)))
    sentence = f"`file` must have at most 200 dots in a line, got {file}, which has "
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        read_sweep(file)
    file.write_text("[options." + ".".join(["a"] * 190) + "]\n" + ".".join(["a"] * 190) + " = 1")
    with pytest.raises(InputError, match="must be an option of `ddl train`, got an unknown one"):
        read_sweep(file)


def test_a_nested_table_is_the_same_as_dots() -> None:
    values: dict[str, Any] = {"out": "x", "preset": "tiny"}
    dotted = values | {"options": {"model.num_layers": 1}}
    nested = values | {"options": {"model": {"num_layers": 1}}}
    assert parse_sweep(dotted) == parse_sweep(nested)
