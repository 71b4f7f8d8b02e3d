"""Branches of the residual in whole models: from the config to training, caching and export."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaResidual, DeltaStream
from ddl.errors import InputError
from ddl.lab.config import GPTConfig, OptimConfig
from ddl.models import GPT, Cache
from ddl.optim import make_optimizer, parameter_groups
from ddl.paper import revert
from tests.support.branch_cases import DIRECTIONS, GATES, name_of
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.read_cases import READS, B, D, T
from tests.support.tolerances import assert_close

F64, F32 = torch.float64, torch.float32
VOCABULARY = 61
EXACT = 1e-12  # for logits of about one in float64: the order of summation

ARCHITECTURES: list[dict[str, Any]] = [
    *DIRECTIONS,
    *GATES,
    {**DIRECTIONS[3], **GATES[3]},
    {**DIRECTIONS[1], **GATES[0], "value": "sigmoid"},
]
architectures = pytest.mark.parametrize("options", ARCHITECTURES, ids=name_of)


def config_of(residual: str = "ddl-cc", **options: Any) -> GPTConfig:
    sizes = {"vocab_size": VOCABULARY, "block_size": 64, "num_layers": 2, "num_heads": 2}
    return GPTConfig(residual=residual, hidden_size=32, **(sizes | options))


def model_of(residual: str = "ddl-cc", **options: Any) -> GPT:
    model = GPT(config_of(residual, **options)).to(F64).eval().requires_grad_(False)
    randomise_(model.trunk, std=0.3)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- the stream ----------------------------------------------------------------------------------


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h + h.cumsum(1) / 4))


def by_loop(stream: DeltaStream, x: Tensor) -> Tensor:
    X = stream.expand(x)
    for read, F_l, residual in zip(stream.reads, stream.sublayers, stream.residuals, strict=True):
        h = read(X)
        X = residual(X, F_l(h), context=h)
    return stream.readout(X)


@architectures
@pytest.mark.parametrize("read", [READS[0], READS[2], READS[3]], ids=name_of)
def test_stream_is_the_loop(read: dict[str, Any], options: dict[str, Any]) -> None:
    """Compare output and every gradient; attention gets four channels instead of one."""
    if options.get("direction") == "attention" and read["value_channels"] == 1:
        read = {"value_channels": 4, "sublayers_per_compressor": 1}
    stream = DeltaStream(D, [Sublayer() for _ in range(3)], expand="conv", **read, **options)
    randomise_(stream.to(F64))
    x = normal(B, T, D).requires_grad_()
    actual, expected = stream(x), by_loop(stream, x)
    assert_close("readout", actual, expected, F64, depth=3)
    named, looped = (gradients(y, {"x": x}, stream) for y in (actual, expected))
    assert_same_gradients(named, looped, F64, depth=3)


# --- the model -----------------------------------------------------------------------------------


def test_the_config_reaches_every_residual() -> None:
    options = {**DIRECTIONS[2], **GATES[3], "value": "sigmoid", "value_channels": 3}
    model = GPT(config_of(**options))
    built = DeltaResidual(32, **options)
    for residual in model.trunk.residuals:
        assert residual.extra_repr() == built.extra_repr()
        shapes = {name: p.shape for name, p in residual.named_parameters()}
        assert shapes == {name: p.shape for name, p in built.named_parameters()}
    assert built.gate_pool.weight.shape == (32, 3)
    assert built.direction.hidden.weight.shape == (3, 96)


@architectures
def test_what_is_new_is_never_decayed(options: dict[str, Any]) -> None:
    model = GPT(config_of(**options))
    decayed, kept = (group["params"] for group in parameter_groups(model, 0.1))
    ours = [p for residual in model.trunk.residuals for p in residual.parameters()]
    assert len(ours) > 2 * 4
    assert {id(p) for p in ours} <= {id(p) for p in kept}
    backbone = [p for p in model.trunk.sublayers.parameters() if p.ndim == 2]
    assert {id(p) for p in decayed} == {id(p) for p in (model.wte.weight, *backbone)}


def train(model: GPT, steps: int, *, autocast: bool = False) -> list[float]:
    """Return losses on counting in threes from random starts."""
    optimizer = make_optimizer(model, OptimConfig(lr=5e-3))
    g, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (8, 1), generator=g)
        idx = (start + 3 * torch.arange(24)) % VOCABULARY
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(idx, labels=idx).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("options", "autocast"),
    [*((options, False) for options in ARCHITECTURES), (ARCHITECTURES[-2], True)],
    ids=lambda value: str(value) if isinstance(value, bool) else name_of(value),
)
def test_the_loss_falls(options: dict[str, Any], autocast: bool) -> None:
    """Every new parameter is trained: all have changed at the end."""
    model = GPT(config_of(**options))
    before = copy.deepcopy(model.state_dict())
    losses = train(model, 40, autocast=autocast)
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.3
    assert losses[-1] < losses[0] - 2, losses
    for name, parameter in model.trunk.residuals.named_parameters():
        assert not torch.equal(parameter, before[f"trunk.residuals.{name}"]), name


@architectures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_whole_model_in_half_precision(options: dict[str, Any], dtype: torch.dtype) -> None:
    model, idx = GPT(config_of(**options)), tokens(2, 16)
    expected = model(idx, labels=idx).loss
    loss = model.to(dtype)(idx, labels=idx).loss
    assert_close("loss", loss, expected, dtype)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ARCHITECTURES[-2:], ids=name_of)
def test_compiles_without_graph_breaks(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, idx, results = GPT(config_of(num_layers=1, **options)), tokens(2, 16), []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = run(idx, labels=idx).loss
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (expected, eager), (loss, compiled) = results
    assert_close("loss", loss, expected, F32)
    for name, gradient in eager.items():
        assert_close(f"gradient of {name}", compiled[name], gradient, F32, gradient=True)


def test_a_model_from_the_meta_device_is_a_fresh_one() -> None:
    config = config_of(**ARCHITECTURES[-2])
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    fresh = GPT(config)
    torch.manual_seed(3)
    fresh.reset_parameters()
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


# --- token by token ------------------------------------------------------------------------------


def in_pieces(model: GPT, idx: Tensor, pieces: list[int]) -> Tensor:
    cache = Cache(model.config)
    return torch.cat([model(piece, cache=cache).logits for piece in idx.split(pieces, 1)], dim=1)


@architectures
@pytest.mark.parametrize("residual", ["ddl-cc", "ddl-tc"])
@pytest.mark.parametrize("pieces", [[1] * 11, [2, 1, 5, 3], [8, 3]], ids=str)
def test_cached_logits_are_the_uncached(
    residual: str, options: dict[str, Any], pieces: list[int]
) -> None:
    model, idx = model_of(residual, **options), tokens(2, 11)
    whole = model(idx).logits
    torch.testing.assert_close(in_pieces(model, idx, pieces), whole, rtol=0, atol=EXACT)


def test_a_scalar_state_remembers_for_its_gate_alone() -> None:
    model, idx = model_of("ddl", gate_from="convolved"), tokens(2, 11)
    whole = model(idx).logits
    torch.testing.assert_close(in_pieces(model, idx, [2, 1, 5, 3]), whole, rtol=0, atol=EXACT)


@architectures
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(options: dict[str, Any], side: str) -> None:
    model, lengths, longest = model_of("ddl-tc", **options), (1, 2, 5, 9), 9
    batch, mask = torch.full((4, longest), 7), torch.zeros(4, longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        real = slice(longest - length, None) if side == "left" else slice(length)
        batch[row, real], mask[row, real] = tokens(1, length, seed=row)[0], 1
    logits = model(batch, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        alone = model(tokens(1, length, seed=row)).logits[0]
        torch.testing.assert_close(logits[row, mask[row].bool()], alone, rtol=0, atol=EXACT)


@pytest.mark.parametrize("options", [GATES[1], ARCHITECTURES[-2]], ids=name_of)
def test_padded_and_reordered_rows_go_on_from_their_own_past(options: dict[str, Any]) -> None:
    model, lengths, rows = model_of("ddl-tc", **options), (1, 3, 8), torch.tensor([2, 0, 0, 1])
    batch, mask = torch.full((3, 8), 5), torch.zeros(3, 8, dtype=torch.int64)
    for row, length in enumerate(lengths):
        batch[row, 8 - length :], mask[row, 8 - length :] = tokens(1, length, seed=row)[0], 1
    cache, more = Cache(model.config), tokens(4, 3, seed=9)
    model(batch, attention_mask=mask, cache=cache)
    cache.select(rows)
    mask = torch.cat((mask[rows], mask.new_ones(4, 3)), dim=1)
    got = [
        model(more[:, :1], attention_mask=mask[:, :9], cache=cache).logits,
        model(more[:, 1:], attention_mask=mask, cache=cache).logits,
    ]
    for row, source in enumerate(rows.tolist()):
        prompt = tokens(1, lengths[source], seed=source)
        whole = model(torch.cat((prompt, more[row : row + 1]), dim=1)).logits[0, -3:]
        torch.testing.assert_close(torch.cat(got, dim=1)[row], whole, rtol=0, atol=EXACT)


def test_generation_is_the_uncached_loop() -> None:
    model, idx = model_of("ddl-cc", **ARCHITECTURES[-2], block_size=16), tokens(2, 5)
    got = model.generate(idx, 20, temperature=0)
    for _ in range(20):
        logits = model(idx[:, -16:]).logits[:, -1]
        idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(got, idx)


# --- the read's initial value ---------------------------------------------------------------------


@pytest.mark.parametrize("parameterization", ["direct", "factored"])
@pytest.mark.parametrize("residual", ["ddl-cc", "ddl-tc-noec"])
def test_every_read_of_a_model_starts_with_read_init(residual: str, parameterization: str) -> None:
    options = {"compress_parameterization": parameterization, "value_channels": 3}
    for read_init, start in ((None, 1 / 3), (0.7, 0.7)):
        trunk = GPT(config_of(residual, read_init=read_init, **options)).trunk
        for read in (*trunk.reads, trunk.readout):
            weight = read.effective_weight()
            now = weight[..., 0] if weight.ndim == 3 else weight
            assert_close("w", now, torch.full_like(now, start), F32)
            assert weight.count_nonzero() == now.numel()


# --- the MLP --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mlp_size", "hidden"), [(None, 8 * 32 // 3), (20, 20), (128, 128)])
def test_the_mlp_has_its_width_and_its_formula(mlp_size: int | None, hidden: int) -> None:
    model = model_of("ddl", mlp_size=mlp_size)
    assert model.config.mlp_hidden == hidden
    for mlp in model.trunk.sublayers[1::2]:
        w1, w2, w3 = (getattr(mlp, name).weight for name in ("c_fc1", "c_fc2", "c_proj"))
        assert (w1.shape, w2.shape, w3.shape) == ((hidden, 32), (hidden, 32), (32, hidden))
        h = normal(3, 32)
        a = h @ w1.mT
        assert_close("F(h)", mlp(h), (a / (1 + torch.exp(-a)) * (h @ w2.mT)) @ w3.mT, F64)


# --- the paper's code ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rewrites": 2}, "`rewrites` must be 1 in the paper's code, got 2"),
        ({"mapping": "v"}, "`mapping` must be k in the paper's code, got v"),
        (DIRECTIONS[2], "`mapping` must be k in the paper's code, got v"),
        (
            {"gate_from": "pooled", "value_from": "compressed"},
            "`gate_from` must be context in the paper's code, got pooled",
        ),
        (GATES[3], "`gate_from` must be context in the paper's code, got convolved"),
        (GATES[-1], "`gate_from` must be context in the paper's code, got flatten"),
        (
            {"mlp_size": 128},
            "`mlp_size` must be ⌊8·hidden_size/3⌋ = 85 in the paper's code, got 128",
        ),
    ],
    ids=str,
)
def test_the_papers_code_has_none_of_it(options: dict[str, Any], sentence: str) -> None:
    config = config_of(**options)
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        revert(config, GPT(config).state_dict())
    plain = replace(GPTConfig(), num_layers=1, value_from="compressed")
    with torch.device("meta"):
        assert revert(plain, GPT(plain).state_dict())
