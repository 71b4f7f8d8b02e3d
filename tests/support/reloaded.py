"""Load the models that tests/hf/test_saving.py has saved, in a process that has done nothing else.

`python -m tests.support.reloaded FOLDER` writes FOLDER/reloaded.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ddl import hf

TEXT = "a <new> token"


def reloaded(folder: Path, **options: Any) -> Any:
    """The model in `folder`/saved; if it is an adapter, beside the one in `folder`/base."""
    base = folder / "base"
    path = base if base.exists() else folder / "saved"
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)
    return hf.load_adapter(model, folder / "saved") if base.exists() else model


def tokens(vocab_size: int) -> torch.Tensor:
    """Tokens (2, 12), with the last one of the vocabulary."""
    return (vocab_size - 1 - 5 * torch.arange(24).view(2, 12)) % vocab_size


@torch.no_grad()
def facts(model: Any) -> dict[str, Any]:
    """Everything that files have to keep of a model."""
    return {
        "logits": model(tokens(model.config.vocab_size)).logits,
        "vocab_size": model.config.vocab_size,
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "dtypes": {name: parameter.dtype for name, parameter in model.named_parameters()},
        "max_new_tokens": model.generation_config.max_new_tokens,
    }


@torch.no_grad()
def found_in(folder: Path) -> dict[str, Any]:
    saved = folder / "saved"
    config = AutoConfig.from_pretrained(saved)
    found: dict[str, Any] = {"vocab_size": config.vocab_size, "dtype": config.dtype}
    model: Any = reloaded(folder)
    found["facts"] = facts(model)
    found["facts, mapped"] = facts(reloaded(folder, device_map="auto"))
    if not (folder / "base").exists():
        drawn = AutoModelForCausalLM.from_config(config)
        found["drawn"] = facts(drawn)["dtypes"]
    if (saved / "tokenizer.json").exists():
        found["tokenizer"] = AutoTokenizer.from_pretrained(saved)(TEXT).input_ids
    if isinstance(model, hf.OurModel):
        model, tokenizer = hf.load(saved, dtype="auto")
        output = model(tokens(found["vocab_size"]))
        found["load"] = getattr(output, "logits", output)
        found["load's tokenizer"] = None if tokenizer is None else tokenizer.encode(TEXT)
    return found


def error_or_found_in(folder: Path) -> dict[str, Any]:
    try:
        return found_in(folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    folders = [folder for folder in root.iterdir() if folder.is_dir()]
    torch.save({folder.name: error_or_found_in(folder) for folder in folders}, root / "reloaded.pt")
