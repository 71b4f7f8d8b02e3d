"""Run directories that an earlier version wrote load, and their models compute the same."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ddl.errors import InputError
from ddl.lab import cli
from ddl.lab.config import TrainConfig
from ddl.lab.config.stored import from_json, to_json
from ddl.lab.load import load
from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory, load_config, load_run
from ddl.models import GPT
from tests.compatibility.cases import FORMATS, LAST, PROMPT, RUNS
from tests.support.tolerances import assert_close
from tests.support.train_cases import quiet, short

CPU = torch.device("cpu")
F32 = torch.float32
FOUND = [path / name for path in FORMATS for name in RUNS if (path / name).is_dir()]
every_run = pytest.mark.parametrize("run", FOUND, ids=lambda run: f"{run.parent.name}-{run.name}")


def assert_recorded_logits(run: Path, model: GPT) -> None:
    record = safetensors.torch.load_file(run.with_name(f"{run.name}.safetensors"))
    with torch.no_grad():
        logits = model(record["tokens"], last=LAST).logits
    assert_close("logits", logits, record["logits"], F32)


@every_run
def test_a_run_loads_and_computes_the_same(run: Path) -> None:
    record = safetensors.torch.load_file(run.with_name(f"{run.name}.safetensors"))
    for model, tokenizer in (load_run(run, CPU), load(run, "cpu")):
        assert tokenizer is not None
        assert tokenizer.encode(PROMPT) == record["tokens"][0].tolist()
        assert_recorded_logits(run, model)


@every_run
def test_the_weights_are_a_state_dict_of_gpt(run: Path) -> None:
    model = GPT(load_config(run).model).eval()
    model.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"), strict=True)
    assert_recorded_logits(run, model)


@every_run
def test_sample_continues_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", PROMPT, "--tokens", "9", "--device", "cpu"]
    assert cli.main(["sample", str(run), *options]) == 0
    assert capsys.readouterr().out.startswith(PROMPT)


@every_run
def test_its_metrics_are_plotted_and_have_the_names_of_today(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "old")
    old = RunDirectory(tmp_path / "old")
    assert old.plot().stat().st_size > 0
    config = short(tmp_path, "additive", steps=2, log_every=1, out=tmp_path / "new")
    new = train(config, quiet()).run
    names = {frozenset(record) for record in new.metrics.read()}
    assert len(old.metrics.read()) >= 2
    for record in old.metrics.read():
        assert any(record.keys() <= name for name in names), f"nothing logs {sorted(record)} now"


# --- fields ---------------------------------------------------------------------------------------


def sections(values: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Any]]:
    """The objects of a config.json, each with the configuration of defaults that belongs to it."""
    default = TrainConfig()
    return {
        "": (values, default),
        "model.": (values["model"], default.model),
        "optim.": (values["optim"], default.optim),
    }


def test_a_field_that_an_old_file_lacks_takes_its_default() -> None:
    written = json.loads(to_json(TrainConfig()))
    taken = 0
    for inside, (section, default) in sections(written).items():
        for field in dataclasses.fields(default):
            value = section.pop(field.name)
            read = from_json(TrainConfig, json.dumps(written))
            assert read == TrainConfig(), f"{inside}{field.name}"
            section[field.name] = value
            taken += 1
    assert taken > 40


@every_run
def test_a_run_without_the_fields_at_their_default(run: Path, tmp_path: Path) -> None:
    """As if every field that this run leaves at its default were newer than the run."""
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    removed = 0
    for section, default in sections(values).values():
        for name, value in json.loads(to_json(default)).items():
            if name in section and section[name] == value and not isinstance(value, dict):
                del section[name]
                removed += 1
    assert removed > 15
    file.write_text(json.dumps(values), encoding="utf-8")
    assert load_config(tmp_path / "run") == load_config(run)
    model, _ = load_run(tmp_path / "run", CPU)
    assert model.config == load_config(run).model
    for name, parameter in load_run(run, CPU)[0].named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


@every_run
@pytest.mark.parametrize("inside", ["", "model.", "optim."])
def test_a_field_of_a_newer_version_is_refused(
    inside: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    sections(values)[inside][0]["tokens"] = 3  # also the name of an option of `ddl sample`
    file.write_text(json.dumps(values), encoding="utf-8")
    sentence = (
        f"`config.json` must hold a TrainConfig, got the unknown field '{inside}tokens'; "
        "if a newer ddl-rs wrote it, install that version"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        load_run(tmp_path / "run", CPU)
    assert cli.main(["sample", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == f"ddl sample: {sentence}\n"
