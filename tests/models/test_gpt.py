"""The Transformer: sizes, causality, loss, initialisation, generation and error messages."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddl.lab.config import RESIDUALS, GPTConfig
from ddl.lab.config.presets import MEDIUM, SMALL, TINY
from ddl.models import GPT, Cache
from ddl.models.sublayers import Rotary
from tests.support.tolerances import assert_close

SHORT = replace(TINY, block_size=16)


def make(residual: str, **changes: object) -> GPT:
    return GPT(replace(SHORT, residual=residual, **changes))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(SHORT.vocab_size, shape)


# arXiv 2601.00417 has about 124 M parameters (small) and 353 M (medium). The baselines here have
# 123.6 M and 353.5 M, and the parameters of each residual are added up.
@pytest.mark.parametrize(
    ("base", "residual", "expected"),
    [
        (SMALL, "additive", 123_590_400),
        (SMALL, "ddl", 123_627_312),
        (SMALL, "ddl-cc", 123_734_904),
        (SMALL, "ddl-tc", 123_854_712),
        (MEDIUM, "additive", 353_508_352),
        (MEDIUM, "ddl", 353_606_752),
        (MEDIUM, "ddl-cc", 353_873_136),
        (MEDIUM, "ddl-tc", 354_180_336),
    ],
)
def test_presets_have_the_papers_sizes(base: GPTConfig, residual: str, expected: int) -> None:
    with torch.device("meta"):
        model, baseline = (GPT(replace(base, residual=r)) for r in (residual, "additive"))
    assert model.num_parameters() == expected
    assert baseline.num_parameters() == pytest.approx(124e6 if base is SMALL else 353e6, rel=0.004)
    # Gates and values of every sublayer, a compressor per block and for the last read, expansion.
    L, d, m = base.num_layers, base.hidden_size, 1 if residual == "ddl" else base.value_channels
    gates_and_values = 2 * L * (d + 1 + m * d + m)
    taps = {"additive": 0, "ddl": 0, "ddl-cc": 1, "ddl-tc": base.compress_kernel_size}[residual]
    compressors = (L + 1) * d * m * taps
    expansion = d * m * base.expand_kernel_size if taps else 0
    added = 0 if residual == "additive" else gates_and_values + compressors + expansion
    assert expected - baseline.num_parameters() == added
    assert added < 0.0022 * baseline.num_parameters()


@pytest.mark.parametrize("name", ["ddl-cc", "ddl-tc"])
def test_the_names_of_residuals_that_erase_nothing(name: str) -> None:
    assert replace(SHORT, residual=f"{name}-none") == replace(SHORT, residual=name, erase="none")


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_token_changes_nothing_before_it(residual: str) -> None:
    model, idx = make(residual), tokens(2, 12)
    changed = idx.clone()
    changed[:, 7] = (idx[:, 7] + 1) % SHORT.vocab_size
    before, after = model(idx).logits, model(changed).logits
    assert_close("logits before", after[:, :7], before[:, :7], torch.float32)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_labels_are_shifted_and_ignored_where_minus_100() -> None:
    model, idx = make("additive"), tokens(3, 9)
    labels = idx.clone()
    labels[0, 4:] = -100
    logits, loss = model(idx, labels=labels)
    losses = [
        -logits[b, t].log_softmax(-1)[labels[b, t + 1]]
        for b in range(3)
        for t in range(8)
        if labels[b, t + 1] >= 0
    ]
    assert len(losses) == 3 + 8 + 8
    assert loss is not None
    assert_close("loss", loss, torch.stack(losses).mean(), torch.float32)
    assert model(idx).loss is None


@pytest.mark.parametrize("residual", RESIDUALS)
def test_loss_falls(residual: str) -> None:
    model, idx = make(residual), tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(idx, labels=idx).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(SHORT.vocab_size)) < 0.3
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("residual", RESIDUALS)
def test_state_dict_round_trip_and_copies(residual: str) -> None:
    model, idx = make(residual), tokens(2, 8)
    expected = model(idx).logits
    other = make(residual)
    assert not torch.equal(other(idx).logits, expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(idx).logits, expected)
    assert torch.equal(copy.deepcopy(model)(idx).logits, expected)
    assert not any("cos" in name or "sin" in name for name in model.state_dict())


@pytest.mark.parametrize("residual", RESIDUALS)
def test_meta_construction(residual: str) -> None:
    with torch.device("meta"):
        model = make(residual)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    source, idx = make(residual), tokens(2, 8)
    expected = source(idx).logits

    filled = copy.deepcopy(model).to_empty(device="cpu")
    filled.load_state_dict(source.state_dict())
    assert torch.equal(filled(idx).logits, expected)

    assigned = copy.deepcopy(model)  # leaves the rotary tables on the meta device
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(assigned(idx).logits, expected)

    fresh = copy.deepcopy(model).to_empty(device="cpu")
    for parameter in fresh.parameters():
        nn.init.constant_(parameter, float("nan"))
    fresh.reset_parameters()
    loss = fresh(idx, labels=idx).loss
    assert abs(loss.item() - math.log(SHORT.vocab_size)) < 0.3


def test_backbone_is_the_same_for_every_residual() -> None:
    states = []
    for residual in RESIDUALS:
        torch.manual_seed(7)
        model = make(residual)
        states.append({"wte": model.wte.weight, **dict(model.trunk.sublayers.named_parameters())})
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_initialisation() -> None:
    model = make("additive", hidden_size=128)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.03)
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 7 * SHORT.num_layers
    for weight in linears:
        assert weight.std().item() == pytest.approx(0.5 / math.sqrt(128), rel=0.03)
    assert all(p.ndim == 2 or torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    assert model.trunk.sublayers[1].c_fc1.out_features == 341  # ⌊8·128/3⌋


@pytest.mark.parametrize("value", ["linear", "sigmoid", "constant"])
def test_values_start_where_the_config_says(value: str) -> None:
    start = {"value_init": 0.75} if value == "linear" else {}
    with torch.device("meta"):
        later = make("ddl-cc", value=value, **start).to_empty(device="cpu")
    later.reset_parameters()
    for model in (make("ddl-cc", value=value, **start), later):
        linears = [r.value for r in model.trunk.residuals if r.value is not None]
        assert len(linears) == (0 if value == "constant" else 4)
        expected = 0.75 if value == "linear" else 0.0
        assert all((v.bias == expected).all() for v in linears)


def test_rotary_keeps_norms_and_sees_distances_only() -> None:
    rotary = Rotary(8, 16)
    q, k = torch.randn(8), torch.randn(8)
    rotated_q, rotated_k = (rotary(x.expand(1, 16, 1, 8))[0, :, 0] for x in (q, k))
    norms = rotated_q.norm(dim=-1)
    assert_close("norm", norms, q.norm().expand(16), torch.float32)
    assert torch.equal(rotated_q[0], q)
    scores = rotated_q @ rotated_k.T  # entry (i, j) depends on i − j alone
    assert_close("scores", scores[1:, 1:], scores[:-1, :-1], torch.float32, scale=q.norm().item())
    assert (scores[0, 1:] - scores[0, :-1]).abs().max() > 0.1
    # Rotate-half layout: element i is rotated with element i + head_dim/2.
    first = rotary(F.one_hot(torch.tensor(1), 8).float().expand(1, 2, 1, 8))[0, 1, 0]
    assert first.nonzero().flatten().tolist() == [1, 5]


def test_rotary_tables_survive_casts_and_moves() -> None:
    expected = Rotary(8, 16)
    for spoiled in (Rotary(8, 16).bfloat16(), Rotary(8, 16).to("meta").to_empty(device="cpu")):
        assert torch.equal(spoiled.cos, expected.cos)
        assert torch.equal(spoiled.sin, expected.sin)


def test_attention_equals_the_formula() -> None:
    model = make("additive")
    attention, h = model.trunk.sublayers[0], torch.randn(1, 6, 64)
    q, k, v = (c(h).view(1, 6, 2, 32) for c in (attention.c_q, attention.c_k, attention.c_v))
    nn.init.uniform_(attention.q_rms.weight, 0.5, 2)
    q, k = attention.rotary(q), attention.rotary(k)
    q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() for x in (q, k))
    q = q * attention.q_rms.weight
    scores = torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(32)
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    y = torch.einsum("bhts,bshc->bthc", scores.softmax(-1), v).reshape(1, 6, 64)
    expected = y @ attention.c_proj.weight.T
    assert_close("attention", attention(h), expected, torch.float32)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_bfloat16_autocast(residual: str) -> None:
    model, idx = make(residual), tokens(2, 16)
    expected = model(idx, labels=idx).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(idx, labels=idx)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert_close("loss", loss, expected, torch.bfloat16)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_whole_model_in_another_dtype(residual: str, dtype: torch.dtype) -> None:
    model, idx = make(residual), tokens(2, 16)
    expected = model(idx, labels=idx).loss
    logits, loss = model.to(dtype)(idx, labels=idx)
    assert logits.dtype == dtype
    assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
    coarsest = torch.float32 if dtype == torch.float64 else dtype
    assert_close("loss", loss, expected, coarsest)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.table(0)
@pytest.mark.parametrize("residual", ["ddl-tc", "ddl-cc", "additive"])
def test_compiles_without_graph_breaks(residual: str) -> None:
    model, idx = make(residual), tokens(2, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        loss = run(idx, labels=idx).loss
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters()]))
    (expected, gradients), (loss, compiled_gradients) = results
    assert_close("loss", loss, expected, torch.float32)
    for (name, _), a, e in zip(
        model.named_parameters(), compiled_gradients, gradients, strict=True
    ):
        assert_close(f"gradient of {name}", a, e, torch.float32, gradient=True)


def test_generate_greedily_is_argmax_over_a_sliding_window() -> None:
    model, idx = make("additive"), tokens(2, 14)
    out = model.generate(idx, 6, temperature=0)
    expected = idx
    for _ in range(6):
        logits = model(expected[:, -16:]).logits[:, -1]
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(out, expected)
    assert torch.equal(model.generate(idx, 6, top_k=1), expected)


def test_generate_samples_repeatably_and_among_top_k() -> None:
    model, idx = make("ddl-cc"), tokens(2, 4)
    draws = [
        model.generate(idx, 5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    many = model.generate(idx[:1].expand(200, 4), 1, top_k=3)[:, -1]
    best = model(idx[:1]).logits[0, -1].topk(3).indices
    assert set(many.tolist()) == set(best.tolist())
    shares = model(idx[:1]).logits[0, -1].softmax(-1).sort(descending=True)
    fewest = int((shares.values.double().cumsum(0) < 0.05).sum()) + 1
    nucleus = model.generate(idx[:1].expand(2000, 4), 1, top_p=0.05)[:, -1]
    assert fewest > 1
    assert set(nucleus.tolist()) == set(shares.indices[:fewest].tolist())


def test_the_lowest_temperature_takes_the_likeliest() -> None:
    model, idx = make("ddl"), tokens(2, 4)
    greedy = model.generate(idx, 5, temperature=0)
    assert torch.equal(model.generate(idx, 5, temperature=1e-300), greedy)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_batch_without_sequences(residual: str) -> None:
    model, cache, idx = make(residual), Cache(make(residual).config), tokens(1, 4)[:0]
    assert model(idx).logits.shape == (0, 4, 256)
    assert model.generate(idx, 3).shape == (0, 7)
    with torch.no_grad():
        assert model(idx, cache=cache, last=1).logits.shape == (0, 1, 256)
