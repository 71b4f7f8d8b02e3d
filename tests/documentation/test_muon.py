"""Muon gets the matrices of the sublayers in the models that the pages describe, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddl import DeltaResidual, hf, nanochat, nanogpt
from ddl.errors import InputError
from ddl.hf.modeling import from_gpt
from ddl.models import GPT
from ddl.optim import matrices_and_others
from tests.support import ROOT, nanochat_standin, nanogpt_standin
from tests.support.decoder_cases import plain
from tests.support.hf_cases import small

STREAM: dict[str, Any] = {"value_channels": 4, "compress": "token", "expand": "conv"}


def code_of(page: str, until: str) -> dict[str, Any]:
    """The names of a page's Python, up to the block that has the text `until`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page", "Block": nanogpt_standin.Block}
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec"), names)
        if until in block:
            return names
    raise AssertionError(f"{page} has no {until}")


def vision_transformer() -> nn.Module:
    return code_of("docs/own-model.md", "VisionTransformer(")["VisionTransformer"](16, 2, 2, 8)


def swapped_by_hand() -> nn.Module:
    block = code_of("README.md", "class DeltaBlock")["DeltaBlock"]
    swapped: Any = type("Swapped", (nanogpt_standin.GPT,), {"block": block})
    return swapped(nanogpt_standin.GPTConfig(n_layer=2))


def nanogpts(**options: Any) -> nn.Module:
    made = nanogpt.converted(nanogpt_standin.GPT, **STREAM, **options)
    return made(nanogpt_standin.GPTConfig(n_layer=2))


def nanochats(**options: Any) -> nn.Module:
    made = nanochat.converted(nanochat_standin.GPT, **STREAM, **options)
    return made(nanochat_standin.GPTConfig(n_layer=2))


NANOGPT = r"transformer\.h\.\d\.(attn|mlp)\.c_\w+\.weight"
DECODER = r"model\.layers\.\d\.(self_attn|mlp)\.\w+_proj\.weight"
MODELS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "own-model.md": (vision_transformer, r"stream\.sublayers\.\d\.\w+\.weight", 2 * (2 + 2)),
    "parallel.md": (
        lambda: code_of("docs/parallel.md", "def main")["Model"](),
        r"stream\.sublayers\.\d\.\d\.weight",
        4 * 2,
    ),
    "README.md": (swapped_by_hand, NANOGPT, 2 * (2 + 2)),
    "nanoGPT": (nanogpts, NANOGPT, 2 * (2 + 2)),
    "nanoGPT, disabled": (lambda: nanogpts(disable=True), NANOGPT, 2 * (2 + 2)),
    "nanochat": (nanochats, r"transformer\.h\.\d\.(attn|mlp)\.\w+\.weight", 2 * (4 + 2) + 1),
    "decoder": (lambda: hf.convert(plain(), **STREAM, anneal_steps=4), DECODER, 2 * (4 + 3)),
    "decoder, plain": (plain, DECODER, 2 * (4 + 3)),
    "GPT-2": (
        lambda: hf.convert(plain("GPT2"), **STREAM, start=None),
        r"transformer\.h\.\d\.(attn|mlp)\.c_\w+\.weight",
        2 * (2 + 2),
    ),
    "Hugging Face": (
        lambda: from_gpt(GPT(small(residual="ddl-tc"))),
        r"model\.trunk\.sublayers\.\d\.\w+\.weight",
        2 * (4 + 3),
    ),
}


@pytest.mark.parametrize(("make", "wanted", "count"), MODELS.values(), ids=MODELS)
def test_only_the_matrices_of_sublayers(
    make: Callable[[], nn.Module], wanted: str, count: int
) -> None:
    model = make()
    ((group,), rest) = matrices_and_others(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = [names.pop(id(parameter)) for parameter in group["params"]]
    assert [name for name in matrices if not re.fullmatch(wanted, name)] == []
    assert len(matrices) == count
    assert {id(parameter) for group in rest for parameter in group["params"]} == names.keys()


class Head(nn.Module):
    """A stream of one addition in the model itself, where nothing tells sublayer and head apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.unembed = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.residuals = nn.ModuleList([DeltaResidual(4)])


@pytest.mark.parametrize("make", [Head, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9))])
def test_models_without_blocks_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(InputError, match=r"^`model` must have its sublayers in a DeltaStream, in "):
        matrices_and_others(make())
    assert matrices_and_others(nn.LayerNorm(3))[0] == []


def test_blocks_and_heads_in_lists() -> None:
    """Lists of single layers, such as several heads, are no blocks; those with rewrites are."""

    class Model(nn.Module):
        def __init__(self, residual: bool) -> None:
            super().__init__()
            block = nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": nn.Linear(4, 4)})
            if residual:
                block["delta"] = nn.ModuleDict({"residual": DeltaResidual(4)})
            self.blocks = nn.Sequential(block) if residual else nn.ModuleList([block])
            self.heads = nn.ModuleList([nn.Linear(4, 9), nn.Linear(4, 9)])
            if residual:  # and what is a block in a plain model
                self.heads.append(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 9)))

    for residual in (True, False):
        model: Any = Model(residual)
        ((group,), _) = matrices_and_others(model)
        assert group["params"] == [model.blocks[0]["mlp"].weight]
        torch.optim.Muon([group])
