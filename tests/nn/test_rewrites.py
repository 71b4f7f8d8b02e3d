"""Several rewrites per sublayer: the module against its formulas, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaResidual, DeltaStream, reference
from ddl.nn.direction import FurtherDirections
from tests.support import ROOT
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.tolerances import assert_close

F64, F32 = torch.float64, torch.float32
B, T, D, M = 2, 5, 7, 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"direction_rank": 2},
    {"gate": "mlp", "gate_hidden": 4},
    {"value": "sigmoid"},
    {"value": "constant"},
    {"value_from": "compressed"},
    {"gate_from": "pooled"},
]


def by_hand(p: DeltaResidual, n: int, inputs: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """The residual from its parameters, one reference rewrite after the other."""
    x, k, h, raw = inputs.values()
    z = raw if options.get("value_from") == "compressed" else h
    pooled = x.mean(-1)
    g = h
    if options.get("gate_from") == "pooled":
        g = pooled / (pooled.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if options.get("gate") == "mlp":
        g, last = torch.tanh(g @ p.gate[0].weight.mT), p.gate[2]
    else:
        last = p.gate
    down = k if p.further.down is None else k @ p.further.down.weight.mT
    for j in range(n):
        direction = k if j == 0 else down @ p.further.up.weight[(j - 1) * D : j * D].mT
        if options.get("value") == "constant":
            v = torch.full((B, T, M), 2.0, dtype=x.dtype)
        else:
            rows = slice(j * M, (j + 1) * M)
            v = z @ p.value.weight[rows].mT + p.value.bias[rows]
        if options.get("value") == "sigmoid":
            v = 4 / (1 + torch.exp(-v))
        beta = 2 / (1 + torch.exp(-(g @ last.weight[j] + last.bias[j])))
        x = reference.rewrite(x, direction, v, beta, eps_k=p.eps_k)
    return x


def make_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    names = ("x", "sublayer_out", "context", "compressed")
    shapes = ((B, T, D, M), *[(B, T, D)] * 3)
    pairs = enumerate(zip(names, shapes, strict=True), start=1)
    return {n: normal(*s, seed=i).to(dtype).requires_grad_() for i, (n, s) in pairs}


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("rewrites", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formulas(options: dict[str, Any], rewrites: int, dtype: torch.dtype) -> None:
    module = DeltaResidual(D, M, rewrites=rewrites, **options).to(dtype)
    randomise_(module)
    inputs = make_inputs(dtype)
    x = module(**inputs)
    expected = by_hand(module, rewrites, inputs, options)
    assert_close("state", x, expected, dtype, depth=rewrites)
    if options.get("value_from") != "compressed":
        inputs.pop("compressed")
    named, wanted = (gradients(y, inputs, module) for y in (x, expected))
    assert_same_gradients(named, wanted, dtype, depth=2 * rewrites)


def test_one_rewrite_has_the_parameters_it_always_had() -> None:
    plain, one = DeltaResidual(D, M), DeltaResidual(D, M, rewrites=1)
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in one.named_parameters()
    }
    assert one.further is None


@pytest.mark.parametrize(("rank", "count"), [(None, 2 * D * D), (2, 2 * D + 2 * 2 * D)])
def test_the_parameters_of_the_further_directions(rank: int | None, count: int) -> None:
    assert sum(p.numel() for p in FurtherDirections(D, 3, rank).parameters()) == count


def test_they_start_apart() -> None:
    """At the start every gate is beta_init, and no direction is that of another."""
    torch.manual_seed(0)
    module = DeltaResidual(64, M, rewrites=3, beta_init=0.5).double()
    k, h = normal(1, T, 64, seed=1), normal(1, T, 64, seed=2)
    gate = module.write(normal(1, T, 64, M), h, h, *module.value_and_gate(h, None)).gate
    assert_close("beta", gate, torch.full((1, T, 3), 0.5, dtype=F64), F32)
    directions = module.further(k)
    cosines = torch.cosine_similarity(directions[..., :, None, :], directions[..., None, :, :], -1)
    others = cosines[..., ~torch.eye(3, dtype=torch.bool)]
    assert others.abs().max() < 0.6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rewrites": 0}, "`rewrites` must be an integer of at least 1, got 0"),
        ({"rewrites": 9}, "`rewrites` must be at most 8, got 9"),
        (
            {"rewrites": 2, "mapping": "v"},
            '`rewrites` must be left at 1 unless mapping="k", got 2',
        ),
        (
            {"direction_rank": 2},
            "`direction_rank` must be left at None with 1 rewrite, got 2",
        ),
        ({"rewrites": 2, "direction_rank": 0}, "`direction_rank` must be an integer"),
    ],
)
@pytest.mark.parametrize(
    "make", [DeltaResidual, lambda d, **o: DeltaStream(d, [nn.Identity()], **o)]
)
def test_what_does_not_fit_is_refused(make: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        make(D, **options)


def test_the_documentation_runs() -> None:
    text = (ROOT / "docs" / "rewrites.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["h"].shape == (2, 16, names["d"])
    counts = [sum(p.numel() for p in r.further.parameters()) for r in names["stream"].residuals]
    assert counts == [8 * 2 * names["d"]] * 4  # r·n·d, as it says
