"""The commands and the Python of docs/huggingface.md run in order, and do what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ddl.hf
from ddl.lab import cli
from ddl.models.tokenizers import ByteTokenizer
from tests.support import ROOT
from tests.support.hf_cases import model as gpt_model
from tests.support.hf_cases import names
from tests.support.paper_standin import published

PAGE = ROOT / "docs" / "huggingface.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run the page; return the directory with its files, and its Python variables."""
    directory, left = tmp_path_factory.mktemp("page"), {}
    (directory / "notes.txt").write_text(TEXT, encoding="utf-8")
    torch.save(published("cc-ec", vocab_size=256).state_dict(), directory / "checkpoint.pt")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for number, (kind, text) in enumerate(BLOCKS):
            if kind == "python":
                exec(compile(text, f"{PAGE.name}, block {number}", "exec"), left)
            for line in text.splitlines() if kind == "bash" else ():
                if line.startswith("ddl "):
                    assert cli.main(shlex.split(line)[1:]) == 0, line
    return directory, left


def test_what_is_called() -> None:
    """tests/hf/test_accelerate.py runs the command of accelerate."""
    assert [line.split()[0] for line in COMMANDS] == [
        "pip",
        "ddl",
        "ddl",
        "accelerate",
        "ddl",
        "ddl",
    ]
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}


def test_what_it_writes(page: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = page
    for name in ("exported", "mine", "imported"):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(
            names(directory / name)
        )
        AutoModelForCausalLM.from_pretrained(directory / name)
    assert names(directory / "theirs") == ["config.json", "pytorch_model.bin"]


def test_what_it_leaves(page: tuple[Path, dict[str, Any]]) -> None:
    directory, left = page
    assert left["half"].dtype == torch.bfloat16
    assert [
        text[: len(start)]
        for text, start in zip(left["texts"], ("The statement", "A class"), strict=True)
    ] == [
        "The statement",
        "A class",
    ]
    before, after = left["out"].sequences, left["longer"]
    assert torch.equal(after[:, : before.shape[1]], before)
    assert after.shape[1] == before.shape[1] + 8
    assert left["trainer"].state.global_step == 10
    tuned = AutoModelForCausalLM.from_pretrained(directory / "tuned")
    assert torch.equal(tuned.model.wte.weight, left["model"].model.wte.weight.cpu())
    exported, _ = ddl.hf.load(directory / "exported")
    assert not torch.equal(tuned.model.wte.weight, exported.wte.weight)
    assert left["shared"].model.wte.weight is left["gpt"].wte.weight


def test_what_it_says_of_the_cache(page: tuple[Path, dict[str, Any]]) -> None:
    """Continuing from the cache gives the same tokens as without it."""
    _, left = page
    model, mask = AutoModelForCausalLM.from_pretrained(page[0] / "exported"), left["mask"]
    longer = model.generate(left["out"].sequences, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(longer, left["longer"])


def test_what_it_says_of_tokens_that_the_tokenizer_lacks(page: tuple[Path, dict[str, Any]]) -> None:
    """With a vocabulary that is padded, unlike the page's, the example's lines are needed."""
    (example,) = (text for _, text in BLOCKS if "suppress_tokens" in text)
    _, left = page
    assert left["spare"] == []
    padded = ddl.hf.from_gpt(gpt_model(vocab_size=300))
    with torch.no_grad():
        padded.model.wte.weight[257:] *= 30
    tokenizer = ddl.hf.to_fast(ByteTokenizer(), padded.config.gpt)
    prompts = tokenizer(["ab", "c"], return_tensors="pt", padding=True)
    assert padded.generate(**prompts, max_new_tokens=20).max() > 256
    found: dict[str, Any] = {"model": padded, "tokenizer": tokenizer, "prompts": prompts}
    exec(example, found)
    assert found["spare"] == list(range(257, 300))
    assert found["tokens"].max() <= 256


def test_extras_exist() -> None:
    project = (PAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"ddl-rs\[([\w,]+)\]", TEXT):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", project, flags=re.MULTILINE)
