"""Tensor parallel sublayers by transformers' plans: two processes compute what one does."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from ddl import hf
from tests.support import ROOT, decoder_cases
from tests.support.decoder_cases import converted, plain
from tests.support.helpers import assert_same_gradients
from tests.support.hf_cases import DEPTH, VARIANTS, tokens
from tests.support.hf_cases import model as gpt
from tests.support.processes import together

SIZES = {"mlp_size": 86}  # even, as torch and transformers 5.20 require it
EVEN = {"vocab_size": 62}
OWN = ["ddl-tc", "hybrid", "mlp-gate"]
Make = Callable[..., Any]  # takes the options of from_pretrained


def pretrained(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)


def own(folder: Path, variant: str) -> Make:
    hf.from_gpt(gpt(**SIZES, **VARIANTS[variant])).save_pretrained(folder)
    return partial(pretrained, folder)


def saved(folder: Path, variant: str) -> Make:
    converted(variant, **EVEN).save_pretrained(folder)
    return partial(pretrained, folder)


def loaded_first(folder: Path, variant: str) -> Make:
    """Convert a Llama whose sublayers are tensor parallel already."""
    plain(**EVEN).save_pretrained(folder)

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        return hf.convert(pretrained(folder, **options), **decoder_cases.VARIANTS[variant])

    return make


def beside(folder: Path, variant: str) -> Make:
    plain(**EVEN).save_pretrained(folder)
    converted(variant, **EVEN).save_pretrained(folder / "adapter")
    return lambda **options: hf.load_adapter(pretrained(folder, **options), folder / "adapter")


CASES: dict[str, Callable[[Path], Make]] = {
    **{variant: partial(own, variant=variant) for variant in OWN},
    "a converted Llama": partial(saved, variant="token and conv"),
    "a Llama that is converted": partial(loaded_first, variant="channel"),
    "an adapter": partial(beside, variant="adapter"),
}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: Any) -> dict[str, Tensor]:
    """Of two backwards, which accumulate."""
    for seed in (1, 2):
        idx = tokens(2, 9, seed=seed)
        model.train()(idx, labels=idx).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: whole(grad) for name, grad in found.items()}


def compare(make: Make, folder: Path) -> None:
    """Compare a tensor parallel model with the same one in a single process."""
    model, alone = make(distributed_config=DistributedConfig(tp_size=2)), make()
    split = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert any("mlp" in name or "c_fc1" in name for name in split)
    assert not any("res" in name or "read" in name for name in split)
    actual = gradients(model)
    assert_same_gradients(actual, gradients(alone), torch.float64, depth=DEPTH)
    for name, grad in actual.items():
        both = [torch.empty_like(grad) for _ in range(2)]
        distributed.all_gather(both, grad.contiguous())
        assert torch.equal(*both), name
    written = [
        m.eval().generate(tokens(2, 4), max_new_tokens=8, do_sample=False) for m in (model, alone)
    ]
    assert torch.equal(*written)
    model.save_pretrained(folder)  # written by the first process


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_processes_compute_what_one_does(case: Any, tmp_path: Path) -> None:
    make = case(tmp_path / "model")
    together(2, tmp_path, lambda rank: compare(make, tmp_path / "split"))
    make().save_pretrained(tmp_path / "alone")
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("split", "alone"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    *_, lines = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    own(tmp_path / "exported", "ddl-tc")
    loaded_first(tmp_path / "llama", "channel")
    monkeypatch.chdir(tmp_path)

    def act(rank: int) -> None:
        names: dict[str, Any] = {}
        exec(compile(lines, "parallel.md", "exec"), names)
        for name in ("exported", "llama"):
            assert names[name](tokens(1, 5)).logits.isfinite().all()
            assert any(isinstance(p, DTensor) for p in names[name].parameters())

    together(2, tmp_path, act)
