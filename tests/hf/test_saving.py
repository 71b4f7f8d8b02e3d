"""Models that are changed, saved, and loaded in a fresh process, are the same bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddl import hf
from ddl.errors import InputError
from ddl.models.tokenizers import ByteTokenizer
from tests.support import ROOT
from tests.support.decoder_cases import VARIANTS, converted, plain
from tests.support.helpers import randomise_
from tests.support.hf_cases import model, nanogpt
from tests.support.reloaded import TEXT, facts, reloaded


def a_nanogpt() -> Any:
    gpt = nanogpt(delta={"value_channels": 2})
    randomise_(gpt)
    return hf.from_gpt(gpt)


# Each is made with 61 tokens. An adapter's is the model that gets one.
KINDS: dict[str, Any] = {
    "own": lambda: hf.from_gpt(model(residual="ddl-tc")),
    "nanoGPT": a_nanogpt,
    "converted": lambda: converted("token and conv"),
    "converted, tied": lambda: converted("token and conv", tie_word_embeddings=True),
    "adapter": plain,
}
TIED = {"own", "nanoGPT", "converted, tied"}
RESIZED = {"more tokens": 80, "fewer tokens": 45}
LOADED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "mapped": {"device_map": {"": "cpu"}},
    "from the disk": {"device_map": {"": "disk"}},
}
ROWS = ("as it is", *RESIZED, "new tokens", "shards", "its own folder", *LOADED)
CELLS = [cell for cell in product(KINDS, ROWS) if cell != ("adapter", "from the disk")]


def resize_(subject: Any, size: int) -> None:
    """Resize a model's vocabulary; the logits of the tokens that stay are as before."""
    ids = torch.arange(24).view(2, 12)
    kept = min(size, subject.config.vocab_size)
    before = subject(ids).logits[..., :kept]
    subject.resize_token_embeddings(size)
    torch.testing.assert_close(subject(ids).logits[..., :kept], before)


def tokenizer() -> Any:
    fast = hf.to_fast(ByteTokenizer())
    fast.add_tokens(["<new>"])
    return fast


@torch.no_grad()
def write(kind: str, row: str, folder: Path) -> dict[str, Any]:
    """Save a model in `folder`/saved; return the facts of it."""
    torch.manual_seed(0)
    subject = made = KINDS[kind]()
    saved, in_parts = folder / "saved", row in ("shards", "its own folder")
    subject.generation_config.max_new_tokens = 7
    if row in RESIZED:
        resize_(subject, RESIZED[row])
    if row == "new tokens":
        resize_(subject, len(tokenizer()))
        tokenizer().save_pretrained(saved)
    if row in LOADED:
        subject.save_pretrained(folder / "before")
        more = {"offload_folder": folder / "away", **LOADED[row]}
        subject = AutoModelForCausalLM.from_pretrained(folder / "before", **more)
    if kind == "adapter":
        subject.save_pretrained(folder / "base")
        hf.convert(subject, **VARIANTS["adapter"])
        for parameter in subject.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
    subject.save_pretrained(saved, **({"max_shard_size": "1KB"} if in_parts else {}))
    assert (len(list(saved.glob("*.safetensors"))) > 1) == in_parts
    if row == "its own folder":
        subject = reloaded(folder)
        for parameter in subject.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.5)
        subject.save_pretrained(saved)
        assert len(list(saved.glob("*.safetensors"))) == 1
    return facts(made if row == "from the disk" else subject)  # operators read from memory alone


def checks(kind: str, row: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, bool]:
    """Whether the facts of a model and those that the fresh process found agree."""
    if "error" in after:
        return {after["error"]: False}
    logits, dtypes = before["logits"], before["dtypes"]
    dtype = LOADED.get(row, {}).get("dtype", torch.float32)
    gates = {dtypes[name] for name in dtypes if re.search(r"\.(gate|value)\.", name)}
    found = {
        "tied": before["tied"] == (kind in TIED),
        "generation": before["max_new_tokens"] == 7,
        "gates": gates == {torch.float32} and dtype in dtypes.values(),
        "config": (after["vocab_size"], after["dtype"]) == (before["vocab_size"], dtype),
        "drawn from the config": kind == "adapter" or after["drawn"] == dtypes,
    }
    for name in ("facts", "facts, mapped"):
        found[f"logits of {name}"] = torch.equal(after[name]["logits"], logits)
        found[name] = after[name] | {"logits": None} == before | {"logits": None}
    if row == "new tokens":
        found["tokenizer"] = after["tokenizer"] == tokenizer()(TEXT).input_ids
    if kind in ("own", "nanoGPT"):
        found["ddl.hf.load"] = torch.equal(after["load"], logits)
        found["its tokenizer"] = after["load's tokenizer"] == after.get("tokenizer")
    return found


def test_saving(tmp_path: Path) -> None:
    """One test, because loading in a fresh process takes longer than all that is loaded."""
    before = [write(kind, row, tmp_path / f"{kind}: {row}") for kind, row in CELLS]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.reloaded", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    after = torch.load(tmp_path / "reloaded.pt")
    wrong = [
        f"{kind}: {row}: {name}"
        for (kind, row), known in zip(CELLS, before, strict=True)
        for name, holds in checks(kind, row, known, after[f"{kind}: {row}"]).items()
        if not holds
    ]
    assert not wrong, "\n".join(wrong)


def test_an_adapter_of_new_tokens_is_refused_without_them(tmp_path: Path) -> None:
    write("adapter", "more tokens", tmp_path)
    sentence = r"^`model` must have the 80 tokens of the adapter's own, got a vocabulary of 61$"
    with pytest.raises(InputError, match=sentence):
        hf.load_adapter(plain(), tmp_path / "saved")
