"""`ddl.nanogpt.converted`: one line at the end of model.py, and the way from there to a score."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch

from ddl import DeltaResidual
from ddl.lab import cli
from ddl.nanogpt import convert, converted
from tests.support import ROOT, nanogpt_standin
from tests.support.nanogpt_cases import make, same, tokens
from tests.support.nanogpt_folder import run_script, write_folder
from tests.support.nanogpt_standin import GPT

TASKS = ROOT / "tests" / "support" / "lm_eval_tasks"
LINES = "import ddl.nanogpt\n\nGPT = ddl.nanogpt.converted(GPT, value_channels=4, expand='conv')"
OPTIONS = {"value_channels": 2, "expand": "conv"}


def test_a_model_is_the_converted_one() -> None:
    plain, kind = make(), converted(GPT, **OPTIONS)
    torch.manual_seed(3)
    config = plain.config
    made = kind(config)
    torch.manual_seed(3)
    expected = convert(GPT(config), **OPTIONS)
    assert same(made, expected)
    assert isinstance(made, GPT)
    assert kind.__name__ == "GPT"
    assert same(copy.deepcopy(made), made)
    assert converted(GPT, **OPTIONS) is kind
    assert converted(GPT, **OPTIONS, disable=True) is GPT


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_of_gpt2_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT makes a GPT by its module's name and asserts the number of its entries."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 16, "vocab_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    kind = converted(GPT, value_channels=2, start="additive", anneal_steps=5)
    monkeypatch.setattr(nanogpt_standin, "GPT", kind)
    model = kind.from_pretrained(str(tmp_path), {"dropout": 0.0})
    monkeypatch.undo()
    plain = GPT.from_pretrained(str(tmp_path), {"dropout": 0.0})
    idx, targets = torch.randint(32, (2, 9)), torch.randint(32, (2, 9))
    torch.testing.assert_close(
        model.eval()(idx, targets)[0], plain.eval()(idx, targets)[0], rtol=1e-4, atol=1e-5
    )
    assert type(model) is kind
    assert model.transformer.h[0].anneal.steps == 5


def test_refusals() -> None:
    expected = "^`kind` must be nanoGPT's class GPT, got"
    with pytest.raises(TypeError, match=f"{expected} an object of class GPT: `convert` t"):
        converted(make())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"{expected} an object of class int: "):
        converted(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"got the class GPT: `converted` takes a class$"):
        convert(GPT)
    with pytest.raises(TypeError, match=r"^`expnd` must be .* did you mean `expand`\?$"):
        converted(GPT, expnd="conv")(make().config)
    with pytest.raises(ValueError, match=r"got one already converted$"):
        converted(converted(GPT))


@pytest.mark.parametrize("compiled", ["False", "True"])
def test_from_training_to_a_score(
    compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train, resume, sample, import; then all that takes a model."""
    pytest.importorskip("lm_eval")
    folder = write_folder(tmp_path / "nanogpt", LINES)
    run_script(folder, "train.py", "--max_iters=3", f"--compile={compiled}")
    again = ("--init_from=resume", "--max_iters=5", f"--compile={compiled}")
    out, names = run_script(folder, "train.py", *again)
    assert out.startswith("iter 3:")
    assert len(run_script(folder, "sample.py")[0]) >= 40
    ours = tmp_path / "ours"
    assert cli.main(["import", str(folder / "out"), str(ours)]) == 0
    config = json.loads((ours / "config.json").read_text())
    assert config["delta"]["value_channels"] == 4
    from ddl.lab.load import load

    idx, targets = tokens()
    expected = names["model"].eval()(idx[:, :9], targets[:, :9])[0]
    torch.testing.assert_close(load(ours, "cpu").model(idx[:, :9]), expected, rtol=1e-4, atol=1e-5)
    if compiled == "True":
        return
    monkeypatch.chdir(tmp_path)
    Path("cats.txt").write_text("the cat sat on the mat.\n" * 20, encoding="utf-8")
    evaluation = ["--tasks", "local_arc", "--limit", "2", "--include_path", str(TASKS)]
    for command in (
        ["eval", "ours", *evaluation, "--device", "cpu"],
        ["sample", "ours", "--prompt", "the ", "--tokens", "4", "--device", "cpu"],
        ["inspect", "ours", "--data", "cats.txt", "--prompt", "the cat", "--tokens", "64"],
        ["export", "ours", "--hf", "copy"],
        ["import", "ours", "back"],
    ):
        status = cli.main(command)
        assert (status == 0) == (command[0] != "import"), command  # it is imported already


def test_a_block_made_on_meta_is_initialised_by_reset_parameters() -> None:
    """`to_empty` leaves whatever the memory held: here NaN."""
    with torch.device("meta"):
        module = DeltaResidual(8, 4)
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    torch.manual_seed(0)
    fresh = DeltaResidual(8, 4)
    assert {n for n, _ in module.named_parameters()} == {n for n, _ in fresh.named_parameters()}
    for name, parameter in module.named_parameters():
        assert parameter.isfinite().all(), name
    torch.testing.assert_close(module.gate.bias, fresh.gate.bias)


def test_a_checkpoint_of_the_class_is_read_by_pickle(tmp_path: Path) -> None:
    model = converted(GPT, **OPTIONS)(make().config)
    model.crop_block_size(12)
    assert same(pickle.loads(pickle.dumps(model)), model)
