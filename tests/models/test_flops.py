"""FLOPs: products of matrices as torch counts them, all other work as plain PyTorch does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddl import reference
from ddl.errors import InputError
from ddl.models import GPT, Flops, GPTConfig, flops_by_part, flops_per_token
from ddl.models.flops import parts
from ddl.models.streams.attention_residual import attend
from ddl.models.streams.gated import GatedConnection, GatedRead
from ddl.models.streams.hyper import HyperConnection
from ddl.models.streams.mhc import IndependentConnection, ManifoldConnection, WeightedHead
from ddl.models.sublayers import Attention, SwiGLU
from ddl.nn import mixer
from ddl.nn.direction import FurtherDirections, make_direction
from ddl.nn.gate import apply_gate, make_gate
from ddl.nn.pool import Pool
from ddl.ops import devices, plain
from ddl.ops.declarations import FORWARDS
from tests.support import ROOT
from tests.support.counting import count

B, T, D, M = 4, 32, 96, 4
Run = Callable[[], Tensor]


def plain_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return h if weight is None else h * weight


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def plain_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """As `reference.delta_rule`, but from a state that has a gradient, and each token taken once:
    the gradient of x[:, t] is as large as x."""
    if beta.ndim == 3:
        k, v, beta = (x.unsqueeze(2) for x in (k, v, beta))
    H, K, V = beta.shape[-1], k.shape[-1], v.shape[-1]
    queries = max(1, q.shape[2] // H)
    q = repeat(q, queries * H, 2)
    k, v = (repeat(x, H, 3) for x in (k, v))
    S = torch.zeros(q.shape[0], H, K, V, requires_grad=True)
    decay = None if g is None else (g if g.ndim == 4 else g[..., None]).exp()[..., None].unbind(1)
    y = []
    tokens = zip(*(x.unbind(1) for x in (q, k, v, beta)), strict=True)
    for t, (q_t, *writes) in enumerate(tokens):
        S = S if decay is None else decay[t] * S
        for k_j, v_j, beta_j in zip(*(x.unbind(1) for x in writes), strict=True):
            p = (k_j.unsqueeze(-2) @ S).squeeze(-2)
            S = S + k_j[..., None] * (beta_j[..., None] * (v_j - p)).unsqueeze(-2)
        y.append((q_t.unflatten(1, (H, queries)) @ S).flatten(1, 2))
    return K**-0.5 * torch.stack(y, 1), S


def repeat(x: Tensor, heads: int, axis: int) -> Tensor:
    times = heads // x.shape[axis]
    return x if times == 1 else x.repeat_interleave(times, axis)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run operators as on a device without kernels, and norms as their formulas."""
    monkeypatch.setattr(devices, "WITH_KERNELS", ())
    for operator in FORWARDS:
        monkeypatch.setattr(operator, "call", plain.outputs_of(operator))
    monkeypatch.setattr(devices, "_KNOWN", {torch.device("cpu"): False})
    monkeypatch.setattr(mixer, "delta_rule", plain_delta_rule)
    monkeypatch.setattr(F, "rms_norm", lambda x, size, weight=None, eps=None: plain_norm(x, weight))
    norm = lambda x, size, weight, bias, eps: plain_layer_norm(x, weight, bias)  # noqa: E731
    monkeypatch.setattr(F, "layer_norm", norm)


def leaf(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


# --- whole models ---------------------------------------------------------------------------------

BASE = GPTConfig(
    vocab_size=40, block_size=12, num_layers=2, num_heads=2, hidden_size=16, mlp_size=20
)
CONFIGS: list[dict[str, Any]] = [
    {"residual": "additive"},
    {"residual": "additive", "head_size": 6},
    {"residual": "additive-conv", "compress_kernel_size": 3},
    {"residual": "hc", "value_channels": 3},
    {"residual": "mhc", "value_channels": 3},
    {"residual": "independent-hc", "value_channels": 3},
    {"residual": "gated", "value_channels": 3, "gated_rank": 5},
    {"residual": "attention-residual"},
    {"residual": "attention-residual", "sublayers_per_block": 3},
    {"residual": "expanded"},
    {"residual": "ddl"},
    {"residual": "ddl", "gate": "mlp", "gate_hidden": 7},
    {"residual": "ddl-cc"},
    {"residual": "ddl-cc", "value": "sigmoid", "value_from": "compressed"},
    {"residual": "ddl-cc", "value": "constant"},
    {"residual": "ddl-cc", "compress_parameterization": "factored"},
    {"residual": "ddl-cc", "gate_from": "pooled"},
    {"residual": "ddl-cc", "gate_from": "flatten", "gate": "mlp", "gate_hidden": 5},
    {"residual": "ddl-cc", "gate_from": "convolved", "gate_kernel_size": 3},
    {"residual": "ddl-cc", "mapping": "v"},
    {"residual": "ddl-cc", "mapping": "v", "direction": "mean", "direction_hidden": 6},
    {"residual": "ddl-cc", "mapping": "v", "direction": "flatten", "direction_hidden": 6},
    {"residual": "ddl-cc", "mapping": "v", "direction": "attention", "direction_hidden": 6},
    {"residual": "ddl-cc", "rewrites": 3},
    {"residual": "ddl-cc", "rewrites": 2, "direction_rank": 5},
    {"residual": "ddl-cc-noec", "value_channels": 2},
    {"residual": "ddl-tc", "compress_kernel_size": 3},
    {"residual": "ddl-tc-noec", "rewrites": 2},
    {"residual": "ddl-cc", "erase": "none"},
    {"residual": "ddl-tc", "erase": "none", "value": "constant"},
    {"residual": "additive", "mixer": "deltanet"},
    {"residual": "additive", "mixer": "deltaproduct", "mixer_n": 2},
    {"residual": "additive", "mixer": "multi-kv", "mixer_n": 2, "mixer_gated": True},
    {"residual": "additive", "mixer": "multi-value", "mixer_n": 2},
    {"residual": "additive", "mixer": "multi-key", "mixer_n": 2},
    {"residual": "additive", "mixer": "multi-query", "mixer_n": 2},
    {"residual": "ddl-cc", "mixer": "multi-head", "mixer_n": 2, "mixer_gated": "per-feature"},
]
of_every_residual = pytest.mark.parametrize(
    "options", CONFIGS, ids=lambda options: "-".join(map(str, options.values()))
)


@of_every_residual
def test_products_of_matrices_are_those_that_torch_counts(options: dict[str, Any]) -> None:
    """Exactly, for every residual and option; torch counts attention without its mask.

    A factored compression forms its weights by products, once in a step: they are left out.
    """
    config = replace(BASE, **options)
    model = GPT(config)
    tokens = torch.randint(config.vocab_size, (2, config.block_size))
    forward, backward = count(lambda: loss_of(model, tokens))
    expected = flops_per_token(config, keys=config.block_size)
    once = 0
    if config.compress_parameterization == "factored":
        reads = config.num_layers + 1  # pairs of sublayers share one, and the readout has its own
        taps = config.compress_kernel_size
        once = 2 * reads * config.hidden_size * config.value_channels * taps
    assert forward.matrix - once == expected.matrix_forward * tokens.numel()
    assert backward.matrix - 2 * once == expected.matrix_backward * tokens.numel()


@of_every_residual
def test_all_other_work_of_a_model_is_that_of_plain_pytorch(options: dict[str, Any]) -> None:
    """Within 5 %: torch adds the mask of attention to its logits, 4 % here, and the slices of
    several directions have gradients that are summed, 3 % here. Everything else is below 2 %."""
    config = replace(BASE, hidden_size=128, num_layers=1, block_size=48, **options)
    model = GPT(config)
    tokens = torch.randint(config.vocab_size, (8, config.block_size))
    forward, backward = count(lambda: loss_of(model, tokens))
    expected = flops_per_token(config, keys=config.block_size) * tokens.numel()
    assert forward.other == pytest.approx(expected.forward - expected.matrix_forward, rel=0.05)
    assert backward.other == pytest.approx(expected.backward - expected.matrix_backward, rel=0.05)


def loss_of(model: GPT, tokens: Tensor) -> Tensor:
    loss = model(tokens, labels=tokens).loss
    assert loss is not None
    return loss


# --- the parts ------------------------------------------------------------------------------------


def applied(module: Callable[..., Tensor], *inputs: tuple[int, ...]) -> Run:
    if isinstance(module, torch.nn.Module) and hasattr(module, "reset_parameters"):
        module.reset_parameters()
    given = [leaf(B, T, *size) for size in inputs]
    return lambda: module(*given)


def rewriting(n: int, **options: Any) -> Run:
    k, v, beta = ((D,), (M,), ()) if n == 1 else ((n, D), (n, M), (n,))
    t = [leaf(B, T, *size) for size in ((D, M), k, v, beta)]
    return lambda: reference.rewrite(*t, **({"eps_k": 0.1} | options))


def reading(kind: str) -> Run:
    state, norm = leaf(B, T, D, 1 if kind == "identity" else M), leaf(D)
    weight = {"identity": None, "channel": leaf(D, M), "token": leaf(D, M, 3)}[kind]
    return lambda: reference.read(state, compress=weight, norm_weight=norm).context


def reading_more(name: str, **parameters: Any) -> Run:
    """A gate or value of a context that is read as it is."""
    h = leaf(B, T, D, 1)
    return lambda: getattr(reference.read(h, norm_eps=None, **parameters), name)


def expanding(kind: str) -> Run:
    weight = leaf(D, M, 3) if kind == "conv" else None
    return applied(lambda x: reference.expand(x, weight, value_channels=M), (D,))


def gating(kind: Any) -> Run:
    gate = make_gate(kind, D, 24, 1)
    return applied(lambda z: apply_gate(kind, gate, z), (D,))


def connecting(module: Callable[[Tensor], Any], *, normed: bool = True) -> Run:
    norm = leaf(D)

    def joined(state: Tensor) -> Tensor:
        h, mixed, join, _ = module(state)
        written = plain_norm(h, norm) if normed else h
        return mixed + join.unsqueeze(-1) * written.unsqueeze(-2)

    return applied(joined, (M, D))


def attending() -> Callable[..., Tensor]:
    query = leaf(D)
    return lambda *sums: attend(list(sums), query, 1e-5)


def losing(vocabulary: int) -> Run:
    weight, labels = leaf(vocabulary, D), torch.randint(vocabulary, (B * T,))
    return applied(lambda h: F.cross_entropy(F.linear(h, weight).flatten(0, 1), labels), (D,))


CONFIG = replace(BASE, hidden_size=D, block_size=T)
DIRECTIONS: tuple[Any, ...] = ("linear", "mean", "flatten", "attention")
POOLS: dict[str, Any] = {"pooled": "mean", "flatten": "flatten", "convolved": "convolved"}
PARTS: dict[str, Callable[[], tuple[Flops, Run]]] = {
    "linear": lambda: (
        parts.linear(D, 40, bias=True),
        applied(torch.nn.Linear(D, 40), (D,)),
    ),
    "rms norm": lambda: (parts.rms_norm(D), applied(torch.nn.RMSNorm(D), (D,))),
    "attention": lambda: (parts.attention(D, D, 2, T), applied(Attention(CONFIG, 0), (D,))),
    "swiglu": lambda: (parts.swiglu(D, 20), applied(SwiGLU(CONFIG), (D,))),
    "head": lambda: (parts.head(D, 200), losing(200)),
    "rewrite": lambda: (parts.rewrite(D, M), rewriting(1)),
    "rewrites": lambda: (parts.rewrite(D, M, 3), rewriting(3)),
    "write alone": lambda: (parts.rewrite(D, M, erase="none"), rewriting(1, erase="none")),
    "identity read": lambda: (parts.read(D, 1, "identity", 1), reading("identity")),
    "channel read": lambda: (parts.read(D, M, "channel", 1), reading("channel")),
    "token read": lambda: (parts.read(D, M, "token", 3), reading("token")),
    "gate": lambda: (
        parts.gates(D, 1),
        reading_more("gate", gate_weight=leaf(D), gate_bias=leaf(1)[0]),
    ),
    "gates": lambda: (
        parts.gates(D, 3),
        reading_more("gate", gate_weight=leaf(3, D), gate_bias=leaf(3)),
    ),
    "projected gate": lambda: (parts.projected_gates(D, 1, None), gating("linear")),
    "mlp gate": lambda: (parts.projected_gates(D, 1, 24), gating("mlp")),
    "value": lambda: (
        parts.values(D, M, sigmoid=False),
        reading_more("value", value_weight=leaf(M, D), value_bias=leaf(M)),
    ),
    "sigmoid value": lambda: (
        parts.values(D, M, sigmoid=True),
        reading_more("value", value_weight=leaf(M, D), value_bias=leaf(M), value_scale=4.0),
    ),
    "repeat": lambda: (parts.expand(D, M, "repeat", 1), expanding("repeat")),
    "conv": lambda: (parts.expand(D, M, "conv", 3), expanding("conv")),
    "directions": lambda: (
        parts.further_directions(D, 3, None),
        applied(FurtherDirections(D, 3, None), (D,)),
    ),
    "directions of a rank": lambda: (
        parts.further_directions(D, 3, 5),
        applied(FurtherDirections(D, 3, 5), (D,)),
    ),
    "hyper-connection": lambda: (
        parts.hyper_connection(D, M),
        connecting(HyperConnection(D, M, 0)),
    ),
    "manifold connection": lambda: (
        parts.manifold_connection(D, M),
        connecting(ManifoldConnection(D, M, 1e-5)),
    ),
    "independent connection": lambda: (
        parts.independent_connection(D, M),
        connecting(IndependentConnection(D, M, 1e-5)),
    ),
    "gated connection": lambda: (
        parts.gated_connection(D, M, 24),
        connecting(GatedConnection(D, M, 1e-5, 24), normed=False),
    ),
    "weighted read": lambda: (
        parts.weighted_read(D, M),
        applied(WeightedHead(D, M, 1e-5, base=0.0, scale=1.0), (M, D)),
    ),
    "gated read": lambda: (
        parts.gated_read(D, M, 24),
        applied(GatedRead(D, M, 1e-5, 24), (M, D)),
    ),
    "attention read": lambda: (
        parts.attention_read(D, 3),
        applied(attending(), (D,), (D,), (D,)),
    ),
}
for _kind in DIRECTIONS:
    PARTS[f"direction {_kind}"] = lambda kind=_kind: (
        parts.direction(D, M, kind, 24),
        applied(make_direction(kind, D, M, 24), (D, M), (D,)),
    )
for _kind, _pool in POOLS.items():
    PARTS[f"pool {_kind}"] = lambda kind=_kind, pool=_pool: (
        parts.pool(D, M, kind, 3),
        applied(Pool(D, M, pool, kernel_size=3), (D, M)),
    )
# Else 1 %: numbers per token that are neither d nor m, and gradients of slices of weights.
TOLERANCES = {
    "attention": 0.05,  # its mask
    "rewrites": 0.07,  # n − 1 sums of n·d numbers, for the slices of the directions
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_that_of_plain_pytorch(name: str) -> None:
    expected, run = PARTS[name]()
    forward, backward = count(run)
    tolerance = TOLERANCES.get(name, 0.01)
    expected = expected * (B * T)
    assert forward.matrix == expected.matrix_forward
    assert backward.matrix == expected.matrix_backward
    others = (expected.forward - forward.matrix, expected.backward - backward.matrix)
    assert (forward.other, backward.other) == pytest.approx(others, rel=tolerance)


# --- what is counted ------------------------------------------------------------------------------


def test_attention_is_causal_unless_keys_are_given() -> None:
    half, whole = flops_per_token(BASE), flops_per_token(BASE, keys=12)
    per_key = BASE.num_layers * 12 * BASE.hidden_size  # two products, each 2 forward and 4 backward
    assert whole.matrix - half.matrix == pytest.approx(per_key * (12 - 6.5))
    assert flops_per_token(BASE, length=5) == flops_per_token(BASE, keys=3)
    with pytest.raises(InputError, match=r"^`length` must be an integer of at least 1, got 0$"):
        flops_per_token(BASE, length=0)


def test_what_is_computed_again_is_in_no_total() -> None:
    """Of 4 sublayers with a state stored for every third: 0, 1, 2 and 0 links, and every X'."""
    stored, again = (replace(BASE, anchor_every=n) for n in (1, 3))
    one, other = flops_per_token(stored), flops_per_token(again)
    d, m = BASE.hidden_size, BASE.value_channels
    link, read = 2 * d * m + d, 2 * d * m
    assert (one.total, one.matrix) == (other.total, other.matrix)
    assert one.recomputed == 4 * (link + read)
    assert other.recomputed == one.recomputed + 3 * link
    deep = replace(BASE, num_layers=4)  # with N = 8 a state in 8 sublayers, as on a CPU
    assert flops_per_token(deep) == flops_per_token(replace(deep, anchor_every=8))
    assert flops_per_token(replace(BASE, residual="additive")).recomputed == 0


def test_what_is_returned_may_be_changed() -> None:
    whole = flops_per_token(BASE)
    flops_by_part(BASE).clear()
    assert flops_per_token(BASE) == whole


def test_the_parts_add_up() -> None:
    parts = flops_by_part(BASE)
    assert list(parts) == [
        *("embedding", "attention", "mlp", "expand", "reads", "values", "gates", "rewrites"),
        "head",
    ]
    assert sum(part.total for part in parts.values()) == pytest.approx(flops_per_token(BASE).total)


# --- the documentation ----------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "flops.md").read_text(encoding="utf-8")


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    example, printed = (
        re.search(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
        for kind in ("python", "text")
    )
    assert example is not None
    assert printed is not None
    exec(compile(example[1], "docs/flops.md", "exec"), {})
    assert capsys.readouterr().out == printed[1]
