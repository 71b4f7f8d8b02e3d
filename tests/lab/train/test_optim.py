"""AdamW and the schedule against their formulas, and the parameters that are decayed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import nn

from ddl import DeltaResidual, Expand, Read
from ddl.errors import InputError
from ddl.lab.config import OptimConfig
from ddl.models import GPT
from ddl.models.nanogpt import NanoGPT, NanoGPTConfig
from ddl.optim import learning_rate, make_optimizer, matrices_and_others, parameter_groups
from ddl.options import Residual
from tests.support.hf_cases import small

F64 = torch.float64


@pytest.mark.parametrize("eps", [1e-8, 1e-3, 10.0])
@pytest.mark.parametrize("decay", ["sublayers", "matrices"])
def test_three_steps_of_adamw(eps: float, decay: str) -> None:
    """p ← p − lr·(λ p + m̂/(√v̂ + ε)), in float64; λ = 0 for what is not decayed.

    Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with bias correction.
    """
    config = OptimConfig(lr=0.01, betas=(0.8, 0.9), eps=eps, weight_decay=0.3, decay=decay)
    module = nn.ModuleDict({"sublayer": nn.Linear(5, 4), "residual": DeltaResidual(4, 3)}).to(F64)
    optimizer = make_optimizer(module, config)
    generator = torch.Generator().manual_seed(0)
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    moments: dict[str, tuple[Any, Any]] = dict.fromkeys(expected, (0.0, 0.0))
    for step in (1, 2, 3):
        for name, parameter in module.named_parameters():
            g = 1e-3 * torch.randn(parameter.shape, generator=generator, dtype=F64)
            parameter.grad = g
            m, v = moments[name]
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            moments[name] = m, v
            p = expected[name]
            decayed = p.ndim >= 2 and (decay == "matrices" or name.startswith("sublayer"))
            update = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + eps)
            expected[name] = p - 0.01 * (0.3 * decayed * p + update)
        optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_learning_rate_schedule() -> None:
    config = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 21) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[12] == pytest.approx(0.55)
    assert rates[20] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0), 0, 1) == 1.0


WITH_MIXERS = {"mixer": "deltaproduct", "mixer_n": 2, "mixer_gated": "per-feature"}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(lambda name: GPT(small(residual=name)), name) for name in get_args(Residual)},
    "mixers": lambda: GPT(small(residual="ddl-tc", **WITH_MIXERS)),
    "nanoGPT": lambda: NanoGPT(NanoGPTConfig(2, 2, 16, 8, 20, delta={"value_channels": 2})),
}


@pytest.mark.parametrize("decay", ["sublayers", "matrices"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_muon_gets_the_matrices_of_the_sublayers(make: Any, decay: Any) -> None:
    model = make()
    keys = {"matrices": {"kind": "muon", "lr": 0.02}, "others": {"kind": "adamw"}}
    hidden, rest = matrices_and_others(model, weight_decay=0.3, decay=decay, **keys)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    (group,) = hidden
    matrices = {names[id(parameter)] for parameter in group["params"]}
    inner = r"transformer\.h\.\d\.|trunk\.sublayers\.\d+\."
    assert all(re.match(inner, name) for name in matrices)
    assert not any("res_" in name or "read_" in name or "taps" in name for name in matrices)
    left = [name for name in names.values() if name.endswith("c_proj.weight")]
    assert len(left) >= 4
    assert matrices.issuperset(left)
    assert {key: group[key] for key in ("kind", "lr", "weight_decay")} == {
        "kind": "muon", "lr": 0.02, "weight_decay": 0.3
    }  # fmt: skip
    others = [names[id(p)] for group in rest for p in group["params"]]
    assert sorted([*others, *matrices]) == sorted(names.values())
    assert {group["kind"] for group in rest} == {"adamw"}
    assert {group["weight_decay"] for group in rest} <= {0.0, 0.3}
    torch.optim.Muon([{"params": group["params"]}])  # refuses what is not 2-D
    torch.optim.AdamW([{"params": group["params"]} for group in rest])


@pytest.mark.parametrize("residual", ["additive", "ddl", "ddl-cc", "ddl-tc"])
def test_decay_groups_by_default(residual: str) -> None:
    model = GPT(small(residual=residual))
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    backbone = {
        id(p)
        for name, p in model.named_parameters()
        if p.ndim == 2 and ("sublayers" in name or "wte" in name)
    }
    assert {id(p) for p in decayed["params"]} == backbone
    assert len(backbone) == 7 * 2 + 1
    delta = [m for m in model.modules() if isinstance(m, DeltaResidual | Read | Expand)]
    owned = {id(p) for m in delta for p in m.parameters()}
    assert bool(owned) == (residual != "additive")
    kept_ids = [id(p) for p in kept["params"]]
    assert owned <= set(kept_ids)
    assert len(kept_ids) == len(set(kept_ids))
    assert len(decayed["params"]) + len(kept_ids) == len(list(model.parameters()))


@pytest.mark.parametrize("residual", ["additive", "ddl", "ddl-cc", "ddl-tc"])
def test_all_matrices_are_decayed_if_asked_for(residual: str) -> None:
    model = GPT(small(residual=residual))
    decayed, kept = (g["params"] for g in parameter_groups(model, 0.1, "matrices"))
    assert all(p.ndim >= 2 for p in decayed)
    assert all(p.ndim < 2 for p in kept)
    assert len(decayed) + len(kept) == len(list(model.parameters()))
    owned = {id(p) for m in model.modules() if isinstance(m, DeltaResidual | Read | Expand)
             for p in m.parameters()}  # fmt: skip
    assert bool(owned & {id(p) for p in decayed}) == (residual != "additive")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eps": 0.0}, "`eps` must be a positive finite number, got 0.0"),
        ({"eps": float("inf")}, "`eps` must be a positive finite number, got inf"),
        ({"decay": "all"}, '`decay` must be "sublayers" or "matrices", got \'all\''),
    ],
)
def test_options_of_the_optimizer_that_are_refused(
    options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        OptimConfig(**options)


def test_another_rule_of_decay_is_refused() -> None:
    sentence = '`decay` must be "sublayers" or "matrices", got None'
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parameter_groups(nn.Linear(2, 2), 0.1, None)  # type: ignore[arg-type]
