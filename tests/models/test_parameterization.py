"""mup and completep: rates, initial values and multipliers by width and depth."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from ddl.errors import InputError
from ddl.hf import from_gpt, load, save
from ddl.models import GPT, GPTConfig
from ddl.models.config import SCALED, STREAMS
from ddl.models.scaling import plain_name
from ddl.optim import (
    OptimConfig,
    make_optimizer,
    matrices_and_others,
    parameter_groups,
    set_learning_rate,
)
from ddl.paper import convert as import_published
from ddl.paper import revert
from tests.support.sampling import few

SMALL: dict[str, Any] = {
    "vocab_size": 40, "block_size": 16, "num_layers": 2, "num_heads": 4, "hidden_size": 32
}  # fmt: skip
IDX = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
every = pytest.mark.parametrize("residual", SCALED)


def wide(residual: str, **options: Any) -> GPTConfig:
    """Four times as wide and twice as deep as its base."""
    config = GPTConfig(residual=residual, **{**SMALL, "num_layers": 4, "num_heads": 16})
    given = {"parameterization": "completep", "base_width": 32, "base_layers": 2, **options}
    return replace(config, hidden_size=128, **given)


def rates(model: nn.Module, lr: float = 1.0) -> dict[str, float]:
    """The rate of every parameter, by name."""
    optimizer = make_optimizer(model, OptimConfig(lr=lr))
    found = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    return {name: found[id(p)] for name, p in model.named_parameters()}


@every
def test_a_model_of_its_base_size_is_the_standard_one(residual):
    config = GPTConfig(residual=residual, **SMALL)
    torch.manual_seed(0)
    plain = GPT(config)
    for name, base in (("mup", {}), ("completep", {"base_layers": 2})):
        torch.manual_seed(0)
        model = GPT(replace(config, parameterization=name, base_width=32, **base))
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert torch.equal(model(IDX).logits, plain(IDX).logits)
        assert rates(model) == rates(plain)
        assert {g["weight_decay"] for g in parameter_groups(model, 0.1)} == {0.1, 0.0}


@every
def test_rates_by_what_a_parameter_sums_over(residual):
    rewrites = residual in STREAMS
    config = wide(residual, **({"gate": "mlp"} if rewrites else {}))
    model = GPT(config)
    found, r = rates(model), 4
    for name, rate in found.items():
        if name.endswith("value.bias"):
            expected = math.sqrt(r) if rewrites else 1
        elif name.endswith("value.weight"):
            expected = 1 / math.sqrt(r) if rewrites else 1 / r
        elif (
            name.endswith(("gate.0.weight", "gate.weight", "c_proj.weight"))
            or ".sublayers." in name
        ):
            inputs = model.get_parameter(name).shape[-1] if "weight" in name else 1
            known = name.endswith("weight") and model.get_parameter(name).ndim == 2
            expected = {344: 85 / 341, 341: 85 / 341}.get(inputs, 1 / r) if known else 1
        else:
            expected = 1  # embedding, norms, compressors, expansion, last layer of the gate, biases
        assert rate == pytest.approx(expected), name


def test_weight_decay_and_epsilon_go_with_the_rate():
    optimizer = make_optimizer(GPT(wide("ddl-cc")), OptimConfig(lr=1e-3, eps=1e-8))
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(1e-3 * group["lr_scale"])
        assert group["eps"] == pytest.approx(1e-8 / 8)
        if group["weight_decay"]:
            assert group["lr"] * group["weight_decay"] == pytest.approx(1e-4)
    set_learning_rate(optimizer, 2e-3)
    assert all(g["lr"] == pytest.approx(2e-3 * g["lr_scale"]) for g in optimizer.param_groups)
    again = make_optimizer(GPT(wide("ddl-cc")), OptimConfig())
    again.load_state_dict(optimizer.state_dict())
    assert [g["lr_scale"] for g in again.param_groups] == [
        g["lr_scale"] for g in optimizer.param_groups
    ]
    model = GPT(wide("ddl-cc"))
    hidden, rest = matrices_and_others(model)
    assert "lr_scale" not in hidden[0]  # an orthogonal step needs none
    assert {g["lr_scale"] for g in rest} > {1.0, 0.25}


@pytest.mark.parametrize("value", ["linear", "sigmoid", "constant"])
def test_values_grow_with_the_root_of_the_width(value):
    given = {} if value == "constant" else {"value_from": "compressed"}
    config = wide("ddl-cc", value=value, eps_k=0.5, beta_init=1.0, **given)
    model = GPT(config)
    residual = model.trunk.residuals[0]
    assert residual.eps_k == pytest.approx(1.0)
    assert residual.branch_scale == 0.5
    if value == "linear":
        assert torch.equal(residual.value.bias, torch.full((4,), 2.0))
    elif value == "sigmoid":
        assert residual.value_scale == 8.0
    else:
        assert residual.value_constant == 4.0


def test_logits_and_additions_are_divided():
    config = wide("additive")
    model = GPT(config).double()
    plain = GPT(replace(config, parameterization="standard", base_width=None, base_layers=None))
    plain = plain.double()
    plain.load_state_dict(model.state_dict())
    first: list[torch.Tensor] = []
    for each in (model, plain):
        each.trunk.hooks = (lambda addition: first.append(addition.written),)
        each(IDX)
    torch.testing.assert_close(first[0], first[8] / 2)  # the first of eight sublayers
    h = model.hidden_states(model.wte(IDX))
    assert h.detach().square().mean().item() == pytest.approx(1 / 16, rel=0.02)  # of a norm, over 4


@pytest.mark.parametrize("residual", few(SCALED, "ddl-cc"))
def test_other_forms_of_a_model_agree(residual, tmp_path: Path):
    model = GPT(wide(residual)).eval()
    hf = from_gpt(model)
    assert torch.equal(hf(IDX).logits, model(IDX).logits)
    assert [g["lr_scale"] for g in parameter_groups(hf, 0.1)] == [
        g["lr_scale"] for g in parameter_groups(model, 0.1)
    ]
    save(model, None, tmp_path / "saved")
    loaded, _ = load(tmp_path / "saved")
    assert loaded.config == model.config
    torch.testing.assert_close(loaded(IDX).logits, model(IDX).logits)
    state = torch.randn(1, 3, 128, 1 if residual in ("additive", "ddl") else 4)
    torch.testing.assert_close(hf.logits_of_state(state), model.logits_of_state(state))


@pytest.mark.parametrize("residual", ["additive", "ddl-cc", "ddl-tc"])
@pytest.mark.parametrize("value", ["sigmoid", "constant"])
def test_the_papers_mup_is_the_factor_of_the_logits(residual, value):
    own = {"value": value, "eps_k": 1e-5} if residual != "additive" else {}
    if own and value == "sigmoid":
        own["value_from"] = "compressed"
    config = wide(residual, parameterization="mup", base_layers=None, **own)
    torch.manual_seed(0)
    model = GPT(config).eval()
    theirs, state = revert(config, model.state_dict())
    assert (theirs["mup"], theirs["hidden_size_base"]) == (True, 32)
    back, ours = import_published(state, theirs)
    assert (back.parameterization, back.base_width) == ("mup", 32)
    again = GPT(back).eval()
    again.load_state_dict(ours)
    torch.testing.assert_close(again(IDX).logits, model(IDX).logits, rtol=1e-4, atol=1e-5)
    without = {
        name: given for name, given in theirs.items() if name not in ("mup", "parameterization")
    }
    plain, numbers = import_published(state, without)
    unscaled = GPT(plain).eval()
    unscaled.load_state_dict(numbers)
    torch.testing.assert_close(unscaled(IDX).logits / 4, model(IDX).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parameterization": "mup"}, "`base_width` must be given with parameterization='mup'"),
        (
            {"parameterization": "completep", "base_width": 16},
            "`base_layers` must be given with parameterization='completep'",
        ),
        ({"base_width": 16}, "`base_width` must be left at None"),
        (
            {"parameterization": "mup", "base_width": 16, "base_layers": 1},
            "`base_layers` must be l",
        ),
        (
            {"parameterization": "mup", "base_width": 12},
            "`base_width` must be hidden_size/num_heads = 8 times a number",
        ),
        (
            {"parameterization": "mup", "base_width": 16, "residual": "mhc"},
            "`parameterization` must be left at 'standard' unless residual=",
        ),
    ],
)
def test_what_does_not_fit(options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        GPTConfig(**{**SMALL, "residual": "ddl-cc", **options})


def test_a_sigmoids_input_sums_over_the_width_like_any_other() -> None:
    """Its √r is outside of it; a linear value's weight has it inside."""
    linear, sigmoid = (rates(GPT(wide("ddl-cc", value=value))) for value in ("linear", "sigmoid"))
    name = "trunk.residuals.0.value"
    assert linear[f"{name}.weight"] == pytest.approx(1 / 2)
    assert linear[f"{name}.bias"] == pytest.approx(2)
    assert sigmoid[f"{name}.weight"] == pytest.approx(1 / 4)
    assert sigmoid[f"{name}.bias"] == 1


def test_a_value_of_the_sublayers_output_is_built_at_any_width() -> None:
    GPT(wide("ddl-cc", mapping="v", direction="mean"))(IDX)


@pytest.mark.parametrize("number", ["0.1", None, math.nan, torch.ones(())])
def test_what_is_no_number_is_refused(number: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="`weight_decay` must be a finite number"):
        parameter_groups(model, number)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1.0)
    with pytest.raises(ValueError, match="`lr` must be a finite number"):
        set_learning_rate(optimizer, number)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]


def test_wrappers_keep_the_rates() -> None:
    config = wide("ddl-cc")
    plain = rates(GPT(config))
    assert {0.25, 0.5, 1.0, 2.0} <= set(plain.values())

    pruned = GPT(config)
    for residual in pruned.trunk.residuals:
        prune.identity(residual.value, "weight")
    prune.identity(pruned.trunk.sublayers[1].c_proj, "weight")

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    parametrized = GPT(config)
    register_parametrization(parametrized.trunk.sublayers[0].c_q, "weight", Doubled())

    recomputed = GPT(config)
    for index, sublayer in enumerate(recomputed.trunk.sublayers):
        recomputed.trunk.sublayers[index] = checkpoint_wrapper(sublayer)
    for changed in (pruned, parametrized, recomputed):
        names = {plain_name(name): rate for name, rate in rates(changed).items()}
        assert names == plain


def test_a_parameter_without_a_rule_is_refused_by_name() -> None:
    model = GPT(wide("ddl"))
    model.trunk.sublayers[0].adapter = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"^`trunk.sublayers.0.adapter.weight` must be a parameter"
    ):
        make_optimizer(model, OptimConfig())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"base_layers": 9},
            r"`base_layers` must be at most num_layers = 4, or β would start above 2",
        ),
        ({"mixer": "deltanet"}, r'`parameterization` must be left at .* and mixer="attention"'),
    ],
)
def test_what_has_no_rule_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        wide("ddl-cc", **options)


def test_an_unknown_published_parameterization_is_refused() -> None:
    own = GPTConfig(residual="ddl", value="sigmoid", value_from="compressed", **SMALL)
    config, state = revert(own, GPT(own).state_dict())
    with pytest.raises(InputError, match=r"`parameterization` in config.json must be null"):
        import_published(state, config | {"parameterization": "foo"})
