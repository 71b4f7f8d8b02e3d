"""torch.compile of models over changing lengths: one graph for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ddl.hf import from_gpt
from ddl.models import GPT
from tests.support.hf_cases import VARIANTS, model, tokens


def compiled(module: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    return torch.compile(module, backend=counter, fullgraph=True), counter


def marked(length: int) -> Tensor:
    idx = tokens(2, length)
    torch._dynamo.mark_dynamic(idx, 1)
    return idx


def shallow(kind: str) -> GPT:
    layers = 2 if "mixer_layers" in VARIANTS[kind] else 1
    return model(num_layers=layers, **VARIANTS[kind])


def check(gpt: GPT) -> None:
    run, counter = compiled(gpt)
    for length in (7, 11):
        torch.testing.assert_close(run(marked(length)).logits, gpt(tokens(2, length)).logits)
    assert counter.frame_count == 1


def test_a_marked_length_stays_dynamic() -> None:
    check(shallow("ddl-tc"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", VARIANTS)
def test_so_does_that_of_every_variant(kind: str) -> None:
    check(shallow(kind))


@pytest.mark.parametrize("hf", [False, True])
def test_the_second_length_makes_the_graph_of_all_others(hf: bool) -> None:
    gpt = shallow("additive")
    run, counter = compiled(from_gpt(gpt) if hf else gpt)
    for length in (7, 9, 12, 20):
        idx = tokens(2, length)
        torch.testing.assert_close(run(idx).logits, gpt(idx).logits)
    assert counter.frame_count == 2
