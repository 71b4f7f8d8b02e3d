"""`ddl eval` runs tasks, prints tables and writes a record; lm-eval's own command agrees."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ddl.hf
import ddl.lab.evaluation.plugin
from ddl.lab import cli
from ddl.lab.config import EvalConfig
from ddl.lab.config.paper_tasks import PAPER
from ddl.lab.evaluation import evaluate, tasks
from ddl.models.tokenizers import ByteTokenizer
from tests.support.eval_cases import (
    datasets_in,
    fill,
    harness,
    make,
    paper_index,
    results,
    write_run,
)
from tests.support.eval_reference import TASKS


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "ddl-cc", make("ddl-cc"))


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `run`, exported for Hugging Face."""
    path = tmp_path_factory.mktemp("hf") / "ddl-cc"
    ddl.hf.save(make("ddl-cc"), ByteTokenizer(), path)
    return path


def scores(results: dict[str, Any], task: str) -> dict[str, float]:
    return {key: value for key, value in results[task].items() if isinstance(value, float)}


def test_tables_and_record(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `ddl eval` in an empty folder, with lm-eval's spelling of the options."""
    monkeypatch.chdir(tmp_path)
    options = "--tasks local_arc,local_piqa local_rolling --num_fewshot 1 --limit 3 --batch_size 2"
    arguments = ["eval", str(run), *options.split(), "--include_path", str(TASKS)]
    assert cli.main([*arguments, "--device", "cpu", "--out", "scores.json"]) == 0
    printed, said = capfd.readouterr()
    assert "fatal" not in said  # git prints it outside a repository
    record = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    (only,) = record["runs"]
    names = ["local_arc", "local_piqa", "local_rolling"]
    first = f"{run}, 34,484 parameters: 1-shot, the first 3 examples of each\n"
    assert printed.startswith(first)
    expected = results(harness(make("ddl-cc")), names, 1, limit=3)["results"]
    for name in names:
        assert f"|{name}" in printed
        for value in scores(only["results"], name).values():
            assert f"{value:.4f}|" in printed
        assert scores(only["results"], name) == pytest.approx(scores(expected, name))
        assert only["n-samples"][name]["effective"] == 3
    assert printed.endswith("wrote scores.json\n")
    weights = (run / "model.safetensors").read_bytes()
    assert record["model"] == {
        "path": str(run),
        "checkpoint": "last",
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "residual": "ddl-cc",
        "parameters": make("ddl-cc").num_parameters(),
        "dtype": "float32",
        "context": 96,
    }
    assert record["limit"] == 3
    assert only["n-shot"] == dict.fromkeys(names, 1)
    assert only["versions"] == dict.fromkeys(names, 1.0)
    assert set(record["versions"]) == {"ddl-rs", "lm_eval", "torch"}


def test_the_papers_tables_from_cached_data(
    run: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lm-eval's eight tasks get the scores of the local tasks of the same form.

    With cached data, nothing is requested from the network.
    """
    index = paper_index()
    fill(cache, index, *PAPER)
    monkeypatch.setattr(tasks, "index", lambda names, include_path: index)
    monkeypatch.setattr(tasks, "_hub_answers", lambda: pytest.fail("asked the Hub"))
    before = set(run.iterdir())
    assert cli.main(["eval", str(run), "--device", "cpu"]) == 0
    (out,) = set(run.iterdir()) - before
    record = json.loads(out.read_text(encoding="utf-8"))
    assert out.name.startswith("eval-")
    out.unlink()
    printed = capsys.readouterr().out
    assert printed.count("|winogrande") == 2
    assert [entry["num_fewshot"] for entry in record["runs"]] == [0, 1]
    assert record["tasks"] == ["paper"]
    local = [f"local_{name}" for name in ("arc", *PAPER[2:])]
    for shots, entry in enumerate(record["runs"]):
        assert entry["n-shot"] == dict.fromkeys(PAPER, shots)
        expected = results(harness(make("ddl-cc"), 8), local, shots)["results"]
        for task, name in zip(PAPER, ["local_arc", *local], strict=True):
            for metric, value in scores(entry["results"], task).items():
                assert math.isclose(value, expected[name][metric], abs_tol=1e-9), (task, metric)


@pytest.mark.parametrize("shots", [None, 0])
def test_shots_of_a_preset_and_of_a_task(shots: int | None) -> None:
    from ddl.lab.evaluation.scores import _requested

    names, numbers = _requested(
        EvalConfig(Path(), tasks=("paper,mine", "other"), num_fewshot=shots)
    )
    assert names == [*PAPER, "mine", "other"]
    assert list(numbers) == ([0, 1] if shots is None else [0])
    assert _requested(EvalConfig(Path(), tasks=("mine",)))[1] == (None,)


@pytest.mark.exhaustive
def test_a_hugging_face_directory_scores_the_same(run: Path, hf_directory: Path) -> None:
    options: dict[str, Any] = {
        "tasks": ("local_piqa", "local_rolling", "local_generate"),
        "include_path": TASKS,
        "device": "cpu",
    }
    of_run = evaluate(EvalConfig(run, out=run / "a.json", **options))
    of_hf = evaluate(EvalConfig(hf_directory, out=run / "b.json", **options))
    assert of_hf["runs"][0]["results"] == of_run["runs"][0]["results"]
    assert of_hf["model"]["parameters"] == of_run["model"]["parameters"]
    assert of_hf["model"]["residual"] == "ddl-cc"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_ways_to_one_directory(
    dtype: torch.dtype, hf_directory: Path, tmp_path: Path
) -> None:
    """Their numbers are equal, not only to rounding: as docs/evaluation.md says."""
    model, folder = AutoModelForCausalLM.from_pretrained(hf_directory, dtype=dtype), tmp_path / "hf"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(hf_directory).save_pretrained(folder)
    names = ["local_arc", "local_rolling", "local_generate"]
    config = EvalConfig(folder, tasks=tuple(names), include_path=TASKS, batch_size=4, device="cpu")
    record = evaluate(config)
    assert record["model"]["dtype"] == str(dtype).removeprefix("torch.")
    expected = {name: scores(record["runs"][0]["results"], name) for name in names}
    assert all(expected.values())
    hf = {"trust_remote_code": True, "softmax_dtype": "float32", "logits_cache": False}
    for way, arguments in (("hf", hf), ("ddl", {})):
        found = lm_eval.simple_evaluate(
            model=way,
            model_args={"pretrained": str(folder)} | arguments,
            tasks=list(names),
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            batch_size=4,
            device="cpu",
        )["results"]
        assert {name: scores(found, name) for name in names} == expected, way


def test_any_hugging_face_model(tmp_path: Path) -> None:
    """`ddl eval` also scores a Hugging Face model that is not ours, for comparisons."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    ddl.hf.to_fast(ByteTokenizer()).save_pretrained(tmp_path)
    config = EvalConfig(tmp_path, tasks=("local_open*",), include_path=TASKS, device="cpu")
    record = evaluate(config)
    assert list(record["runs"][0]["results"]) == ["local_openbookqa"]
    assert record["model"]["context"] == 128
    assert record["model"]["residual"] is None


def test_lm_evals_own_command(run: Path, hf_directory: Path, tmp_path: Path) -> None:
    """lm-eval's command scores an exported directory in a process that has not imported ddl."""
    names = ["local_arc", "local_winogrande", "local_rolling", "local_generate"]
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args"),
        f"pretrained={hf_directory},trust_remote_code=True,softmax_dtype=float32,logits_cache=False",
        *("--tasks", ",".join(names), "--num_fewshot", "1", "--include_path", str(TASKS)),
        *("--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path / "out.json")),
    ]
    environment = os.environ | {
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("**/out*.json")
    theirs = json.loads(file.read_text())["results"]
    config = EvalConfig(
        run,
        tasks=tuple(names),
        num_fewshot=1,
        include_path=TASKS,
        batch_size=4,
        device="cpu",
        out=tmp_path / "ours",
    )
    ours = evaluate(config)["runs"][0]["results"]
    for name in names:
        assert scores(ours, name)
        assert scores(theirs, name) == pytest.approx(scores(ours, name), rel=1e-6)
