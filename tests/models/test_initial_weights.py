"""`initial_weights="paper-code"`: each parameter has the published distribution, and trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ddl.errors import InputError
from ddl.models import GPT, GPTConfig
from ddl.models.config import PUBLISHED

D, LAYERS, TAPS, CHANNELS = 192, 3, 3, 4


def make(residual: str = "ddl-tc", **options: Any) -> GPT:
    torch.manual_seed(3)
    several = {} if residual in ("additive", "ddl") else {"compress_parameterization": "factored"}
    sizes: dict[str, Any] = {
        "vocab_size": 64, "block_size": 16, "hidden_size": D, "num_heads": 4, "num_layers": LAYERS,
        "initial_weights": "paper-code",
    }  # fmt: skip
    return GPT(GPTConfig(residual=residual, **(sizes | several | options)))


def check_std(weight: torch.Tensor, expected: float) -> None:
    """Hold a sample's deviation to that of its normal distribution, within 5 standard errors."""
    assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel()))
    assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel())


@pytest.mark.parametrize("residual", PUBLISHED)
def test_sublayers_are_smaller_in_deep_models(residual: str) -> None:
    model = make(residual)
    check_std(model.wte.weight, 0.02)
    for sublayer in model.trunk.sublayers:
        for name, module in sublayer.named_children():
            if isinstance(module, nn.Linear):
                size_out, size_in = module.weight.shape
                expected = 0.5 / math.sqrt(size_in) * min(1, math.sqrt(size_out / size_in))
                check_std(module.weight, expected / (LAYERS if name == "c_proj" else 1))


@pytest.mark.parametrize("value", ["sigmoid", "linear"])
def test_gates_and_values_start_at_random(value: str) -> None:
    model = make(value=value, beta_init=0.4)
    residuals = list(model.trunk.residuals)
    gates = torch.cat([residual.gate.weight.flatten() for residual in residuals])
    check_std(gates, 0.5 / D)
    for residual in residuals:
        torch.testing.assert_close(2 * residual.gate.bias.sigmoid(), torch.tensor([0.4]))
        check_std(residual.value.weight, 0.5 / math.sqrt(D) * math.sqrt(CHANNELS / D))
    biases = torch.cat([residual.value.bias for residual in residuals])
    assert biases.abs().max().item() <= 1 / math.sqrt(D)
    assert biases.std().item() == pytest.approx(1 / math.sqrt(3 * D), rel=0.5)


def test_both_layers_of_an_mlp_gate_are_drawn() -> None:
    model = make(gate="mlp", gate_hidden=64)
    hidden = torch.cat([residual.gate[0].weight.flatten() for residual in model.trunk.residuals])
    check_std(hidden, 0.5 / math.sqrt(D) * math.sqrt(64 / D))
    last = torch.cat([residual.gate[-1].weight.flatten() for residual in model.trunk.residuals])
    check_std(last, 0.5 / 64)


@pytest.mark.parametrize("parameterization", ["direct", "factored"])
def test_a_token_compressor_reads_the_mean_over_its_taps(parameterization: str) -> None:
    model = make(compress_parameterization=parameterization, compress_kernel_size=TAPS)
    weight = model.trunk.readout.effective_weight()
    torch.testing.assert_close(weight, torch.full_like(weight, 1 / CHANNELS / TAPS))


def test_a_channel_compressor_has_even_taps() -> None:
    model = make("ddl-cc", compress_kernel_size=TAPS)
    kernel = model.trunk.readout.compress_kernel
    torch.testing.assert_close(kernel, torch.full_like(kernel, 1 / TAPS))


def test_from_the_meta_device_it_starts_the_same() -> None:
    again = make()
    with torch.device("meta"):
        model = GPT(again.config)
    for each in (again, model.to_empty(device="cpu")):
        torch.manual_seed(3)
        each.reset_parameters()
    check_std(again.trunk.residuals[0].value.weight, 0.5 / math.sqrt(D) * math.sqrt(CHANNELS / D))
    expected = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_equal_seeds_give_equal_backbones() -> None:
    first, second = make("additive"), make("ddl-tc")
    others = dict(second.trunk.sublayers.named_parameters())
    for name, parameter in first.trunk.sublayers.named_parameters():
        assert torch.equal(parameter, others[name]), name


def test_every_parameter_has_a_gradient() -> None:
    model = make("ddl-tc")
    tokens = torch.randint(64, (2, 16))
    loss = model(tokens, labels=tokens).loss
    assert loss is not None
    loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"residual": "hc"}, r"`initial_weights` must be left at .*standard.* unless"),
        ({"parameterization": "mup", "base_width": 96}, "`initial_weights` must be left at"),
        ({"value_init": 0.5}, r"`value_init` must be left at 1.0 unless initial_weights="),
        ({"initial_weights": "paper"}, "`initial_weights` must be "),
    ],
)
def test_what_the_published_code_has_not_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        GPTConfig(**({"hidden_size": D, "num_heads": 4, "initial_weights": "paper-code"} | options))
