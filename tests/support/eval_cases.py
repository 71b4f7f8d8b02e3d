"""Models, tasks and a data cache for the tests of `ddl eval`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import torch
from lm_eval.tasks import TaskManager

from ddl.hf import from_gpt, to_fast
from ddl.lab.config import GPTConfig, TrainConfig
from ddl.lab.evaluation import score, tasks
from ddl.lab.evaluation.harness import Harness
from ddl.lab.train.runs import RunDirectory
from ddl.models import GPT
from ddl.models.tokenizers import ByteTokenizer, Tokenizer
from tests.support.eval_reference import TASKS

VARIANTS = ("additive", "ddl", "ddl-cc", "ddl-tc")
CONFIG = GPTConfig(
    residual="ddl-cc", vocab_size=256, block_size=96, num_layers=2, num_heads=2, hidden_size=32
)


def make(residual: str, **changes: Any) -> GPT:
    """Return a model far from its initialisation, so that gates have moved and no answers tie."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(CONFIG, residual=residual, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.wte.weight.mul_(4)
    return model


def harness(model: GPT, batch_size: int | str = 4) -> Harness:
    return Harness(from_gpt(model), to_fast(ByteTokenizer(), model.config), batch_size)


def results(model: Harness, names: list[str], shots: int = 0, **options: Any) -> dict[str, Any]:
    """Return lm-eval's results for local tasks, samples included."""
    index = TaskManager(include_path=str(TASKS), include_defaults=False)
    return score(model, tasks.load(names, index), index, num_fewshot=shots, samples=True, **options)


def write_run(path: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a run directory like that of `ddl train`."""
    config = TrainConfig(model=model.config, out=path)
    RunDirectory.create(config, tokenizer or ByteTokenizer()).save(model)
    return path


@contextmanager
def datasets_in(cache: Path) -> Iterator[Path]:
    """Keep data sets in `cache`, so that tests neither read nor write the user's cache."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = cache
    try:
        yield cache
    finally:
        datasets.config.HF_DATASETS_CACHE = before


# The papers' benchmarks by lm-eval's names, and local files in their format: train, validation,
# test.
PAPER = {
    "arc_challenge": ("arc_train", "arc_train", "arc_test"),
    "arc_easy": ("arc_train", "arc_train", "arc_test"),
    "hellaswag": ("hellaswag_train", "hellaswag_validation", None),
    "openbookqa": ("openbookqa_train", "openbookqa_train", "openbookqa_test"),
    "piqa": ("piqa_train", "piqa_validation", None),
    "sciq": ("sciq_train", "sciq_train", "sciq_test"),
    "social_iqa": ("social_iqa_train", "social_iqa_validation", None),
    "winogrande": ("winogrande_train", "winogrande_validation", None),
}


def fill(cache: Path, index: TaskManager, *tasks: str) -> None:
    """Write local data into the cache as if it were the papers' tasks, already downloaded."""
    for task in tasks:
        splits = zip(("train", "validation", "test"), PAPER[task], strict=True)
        files = {split: str(TASKS / f"{name}.jsonl") for split, name in splits if name}
        builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(cache))
        builder.download_and_prepare()
        about = index.task_index[task].cfg
        repository, config = about["dataset_path"], about.get("dataset_name") or "default"
        dataset = repository.split("/")[1]
        home = cache / repository.replace("/", "___") / config / "0.0.0" / ("0" * 40)
        shutil.copytree(builder.cache_dir, home)
        info = json.loads((home / "dataset_info.json").read_text())
        for split in info["splits"].values():
            split["dataset_name"] = dataset
        info |= {"config_name": config, "dataset_name": dataset, "builder_name": "parquet"}
        (home / "dataset_info.json").write_text(json.dumps(info))
        for file in home.glob("json-*.arrow"):
            file.rename(home / file.name.replace("json", dataset, 1))


def paper_index() -> TaskManager:
    """Return the papers' tasks from lm-eval's files; reading all tasks would take many seconds."""
    home = Path(lm_eval.tasks.__file__).parent
    names = ("arc", "hellaswag", "openbookqa", "piqa", "sciq", "siqa", "winogrande")
    paths = [str(home / name) for name in names]
    return TaskManager(include_path=paths, include_defaults=False)
