"""From text to scores, for every residual: train, export, reload, generate, evaluate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

from transformers import AutoModelForCausalLM, AutoTokenizer

import ddl.hf  # noqa: F401 (registers with the Auto classes)
from ddl.lab.cli import main
from ddl.lab.config import PUBLISHED
from ddl.lab.load import complete
from ddl.lab.train.runs import load_run
from tests.support.eval_cases import datasets_in
from tests.support.eval_reference import TASKS
from tests.support.sampling import few

CPU, PROMPT, NEW = torch.device("cpu"), "The statement", 40
SIZES = ("--steps", 60, "--eval-every", 30, "--eval-batches", 4, "--optim.warmup-steps", 5)


def ddl_command(*arguments: Any) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module", params=few(PUBLISHED, "additive", "ddl-tc"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on Python's documentation."""
    path = tmp_path_factory.mktemp("runs") / request.param
    options = ("--model.residual", request.param, "--out", path, "--device", "cpu")
    ddl_command("train", "tiny", *SIZES, *options)
    return path


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    path = run.with_name(f"{run.name}-hf")
    ddl_command("export", run, "--hf", path)
    return path


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path) -> Iterator[None]:
    with datasets_in(tmp_path / "datasets"):
        yield


def test_the_loss_falls(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert losses[-1] < losses[0] < math.log(256)


@torch.no_grad()
def test_the_exported_model_is_the_trained_one(run: Path, exported: Path) -> None:
    ours, tokenizer = load_run(run, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    read = AutoTokenizer.from_pretrained(exported)
    idx = torch.tensor([tokenizer.encode(PROMPT)])
    assert read(PROMPT, return_tensors="pt").input_ids.tolist() == idx.tolist()
    assert torch.equal(theirs(idx).logits, ours(idx).logits)


def test_generation_with_a_cache_is_the_same_everywhere(run: Path, exported: Path) -> None:
    ours, tokenizer = load_run(run, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    read = AutoTokenizer.from_pretrained(exported)
    inputs = read(PROMPT, return_tensors="pt")
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    cached, uncached = (
        theirs.generate(**inputs, **greedy, use_cache=cache)[0] for cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    text = complete(ours, tokenizer, PROMPT, tokens=NEW, temperature=0, top_k=None, seed=0)
    written = tokenizer.encode(text)
    assert len(written) == inputs.input_ids.shape[1] + NEW
    # They differ after our model's end of text, which `min_new_tokens` forbids in the other.
    same = written.index(read.eos_token_id) if read.eos_token_id in written else len(written)
    assert same > inputs.input_ids.shape[1]
    assert cached[:same].tolist() == written[:same]


def test_a_run_and_its_export_get_the_same_scores(run: Path, exported: Path) -> None:
    records = []
    for model in (run, exported):
        out = model.with_suffix(".json")
        ddl_command(
            "eval", model, "--tasks", "local_arc", "local_rolling", "--include-path", TASKS,
            "--device", "cpu", "--out", out,
        )  # fmt: skip
        records.append(json.loads(out.read_text()))
    scores = [record["runs"][0]["results"] for record in records]
    assert scores[0] == scores[1]
    # A model trained on English is better than 256, the perplexity of a uniform distribution.
    assert 1 < scores[0]["local_rolling"]["byte_perplexity,none"] < 128
