"""`ddl train --recipe`: it sets the defaults of options, and those that are given win."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ddl.lab.train
from ddl.lab import cli
from ddl.lab.cli.recipe import take_recipe
from ddl.lab.config import PRESETS, TrainConfig, paper_code
from ddl.lab.train import Trained
from ddl.lab.train.runs import RunDirectory


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configurations with which `ddl train` would have trained."""
    seen: list[TrainConfig] = []

    def train(config: TrainConfig, console: object, **_: object) -> Trained:
        seen.append(config)
        return Trained(RunDirectory(config.directory), 0)

    monkeypatch.setattr(ddl.lab.train, "train", train)
    return seen


@pytest.mark.parametrize(
    ("line", "preset", "given", "changes"),
    [
        ("small --recipe paper-code", "small", {}, {}),
        ("--recipe=paper-code", "demo", {}, {}),
        ("tiny --steps 3 --recipe paper-code --compile", "tiny", {}, {"steps": 3, "compile": True}),
        ("tiny --recipe paper-code --model.residual ddl", "tiny", {"residual": "ddl"}, {}),
        (
            "tiny --model.residual=additive --recipe paper-code",
            "tiny",
            {"residual": "additive"},
            {},
        ),
        ("tiny --recipe paper-code --model.value constant", "tiny", {"value": "constant"}, {}),
        ("tiny --recipe paper-code --model.mapping v", "tiny", {"mapping": "v"}, {}),
        ("tiny --recipe paper-code --model.value_channels 2", "tiny", {"value_channels": 2}, {}),
        (
            "tiny --recipe paper-code --model.compress-parameterization direct"
            " --model.value-channels 2",
            "tiny",
            {"compress_parameterization": "direct", "value_channels": 2},
            {},
        ),
    ],
)
def test_recipe(
    line: str,
    preset: str,
    given: dict[str, Any],
    changes: dict[str, Any],
    trained: list[TrainConfig],
) -> None:
    assert cli.main(["train", *line.split()]) == 0
    assert trained == [replace(paper_code(PRESETS[preset], given), **changes)]


def test_an_option_that_is_given_wins(trained: list[TrainConfig]) -> None:
    options = (
        "--model.eps-k 0.5 --model.value-scale 2 --model.value-from context --optim.decay sublayers"
        " --model.compress-kernel-size 3 --optim.eps 1e-6"
    )
    assert cli.main(["train", "tiny", *options.split(), "--recipe", "paper-code"]) == 0
    (config,) = trained
    model, optim = config.model, config.optim
    assert (model.eps_k, model.value_scale, model.value_from) == (0.5, 2.0, "context")
    assert (optim.decay, optim.eps, model.compress_kernel_size) == ("sublayers", 1e-6, 3)
    assert (model.value, model.compress_parameterization) == ("sigmoid", "factored")


def test_without_a_recipe_nothing_changes(trained: list[TrainConfig]) -> None:
    assert cli.main(["train", "small"]) == 0
    assert trained == [PRESETS["small"]]
    assert trained[0].model.eps_k is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("tiny --recipe papers", "`--recipe` must be paper-code, got 'papers'"),
        (
            "--recipe paper-code tiny",
            "`preset` must come first, as in `ddl train tiny`, got it later",
        ),
        (
            "tiny --recipe paper-code --model.residual ddl --model.value-channels 2",
            "`--model.value-channels` must be left at 4 unless "
            '--model.residual="ddl-cc" or "ddl-cc-noec" or "ddl-tc" or "ddl-tc-noec" or '
            '"expanded" or "hc" or "mhc" or "independent-hc" or "gated", got 2',
        ),
    ],
)
def test_refused(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *line.split()]) == 1
    assert capsys.readouterr().err == f"ddl train: {sentence}\n"


def test_help_shows_all_options_with_the_recipes_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "tiny", "--recipe", "paper-code", "--help"])
    assert stop.value.code in (0, None)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--recipe paper-code sets" in text
    assert "(default: 1e-05)" in text
    assert "--optim.warmup-steps" in text


def test_the_recipe_leaves_its_initial_weights_out_of_other_parameterizations() -> None:
    options = [
        "--recipe",
        "paper-code",
        "--model.residual",
        "ddl",
        "--model.parameterization",
        "mup",
    ]
    defaults, rest = take_recipe(PRESETS["tiny"], options)
    assert defaults.model.initial_weights == "standard"
    assert defaults.model.eps_k == 1e-5
    assert rest == ["--model.parameterization", "mup"]
    plain, _ = take_recipe(PRESETS["tiny"], options[:4])
    assert plain.model.initial_weights == "paper-code"
