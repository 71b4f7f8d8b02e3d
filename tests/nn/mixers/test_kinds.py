"""DeltaMixer against the equations of each kind, written out as loops over tokens and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ddl.nn import DeltaMixer
from ddl.options import MixerKind

B, T, D, HEADS, N, SIZE = 2, 11, 12, 2, 3, 5
KINDS: tuple[str, ...] = get_args(MixerKind)
GATED = (False, True, "per-feature")


def make(kind: str, gated: Any = False, **options: Any) -> DeltaMixer:
    """A mixer whose gates depend on the token."""
    torch.manual_seed(0)
    n = {} if kind == "deltanet" else {"n": N}
    mixer = DeltaMixer(D, HEADS, kind=kind, gated=gated, head_size=SIZE, **n, **options)
    with torch.no_grad():
        mixer.gate.weight.normal_(std=0.3)
        mixer.gate.bias.normal_(std=0.3)
        mixer.norm.weight.normal_(1, 0.2)
    return mixer


# --- the equations --------------------------------------------------------------------------------


def convolved(mixer: DeltaMixer, name: str, h: Tensor) -> Tensor:
    """silu(Σ_s w_s (W h)_{t−s}) of one sequence, (T, width)."""
    x = h @ getattr(mixer, f"c_{name}").weight.T
    rows = []
    for t in range(len(h)):
        taps = [mixer.taps[name][:, s] * x[t - s] for s in range(mixer.kernel_size) if t >= s]
        total = torch.stack(taps).sum(0)
        rows.append(total / (1 + (-total).exp()))
    return torch.stack(rows)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def decays(mixer: DeltaMixer, h: Tensor) -> Tensor:
    """exp(g) of a token, (states, K)."""
    states = mixer.gate.weight.shape[0] // mixer.layout.steps
    if mixer.decay is None:
        return h.new_ones(states, SIZE)
    low = h if mixer.decay.down is None else mixer.decay.down.weight @ h
    logit = mixer.decay.up.weight @ low + mixer.decay.up.bias
    step = (1 + logit.exp()).log().view(states, -1)
    return (-mixer.decay.log_rate.exp()[:, None] * step).exp().expand(states, SIZE)


Token = Callable[[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor], list[Tensor]]


def written(S: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return S + beta * torch.outer(k, v - S.T @ k)


class States:
    """The states of one head; `token` takes the head's queries, keys, values, β and decays."""

    def __init__(self, kind: str, like: Tensor) -> None:
        count = 1 if kind in ("deltanet", "deltaproduct", "multi-query") else N
        self.kind = kind
        self.S = [like.new_zeros(SIZE, SIZE) for _ in range(count)]

    def token(self, q: Any, k: Any, v: Any, beta: Any, decay: Any) -> list[Tensor]:
        S = [a[:, None] * s for a, s in zip(decay, self.S, strict=True)]
        every = range(N)
        match self.kind:
            case "deltanet":
                S = [written(S[0], k[0], v[0], beta[0])]
                y = [S[0].T @ q[0]]
            case "deltaproduct":
                for j in every:
                    S = [written(S[0], k[j], v[j], beta[j])]
                y = [S[0].T @ q[0]]
            case "multi-head":
                S = [written(S[i], k[i], v[i], beta[i]) for i in every]
                y = [S[i].T @ q[i] for i in every]
            case "multi-kv":
                S = [written(S[i], k[i], v[i], beta[i]) for i in every]
                y = [S[i].T @ q[0] for i in every]
            case "multi-value":
                S = [written(S[i], k[0], v[i], beta[i]) for i in every]
                y = [S[i].T @ q[0] for i in every]
            case "multi-key":
                S = [written(S[i], k[i], v[0], beta[i]) for i in every]
                y = [S[i].T @ q[0] for i in every]
            case _:
                S = [written(S[0], k[0], v[0], beta[0])]
                y = [S[0].T @ q[i] for i in every]
        self.S = S
        return y


def looped(mixer: DeltaMixer, h: Tensor) -> Tensor:
    """The mixer's output for one sequence h (T, d)."""
    steps = mixer.kind == "deltaproduct"
    q, k, v = (convolved(mixer, name, h) for name in "qkv")
    heads = [States(mixer.kind, h) for _ in range(HEADS)]
    rows = []
    for t in range(len(h)):
        beta = 2 / (1 + (-(mixer.gate.weight @ h[t] + mixer.gate.bias)).exp())
        decay = decays(mixer, h[t])
        y: list[Tensor] = []
        for head, states in enumerate(heads):

            def of_head(row: Tensor, by_step: bool, head: int = head) -> Tensor:
                """Its vectors: those of a head follow each other, those of a step are apart."""
                by_head = row.view(-1, HEADS, SIZE)[:, head] if by_step else None
                return row.view(HEADS, -1, SIZE)[head] if by_head is None else by_head

            queries = [unit(x) for x in of_head(q[t], False)]
            keys = [unit(x) for x in of_head(k[t], steps)]
            gates = beta.view(-1, HEADS)[:, head] if steps else beta.view(HEADS, -1)[head]
            y += states.token(
                queries, keys, of_head(v[t], steps), gates, decay.view(HEADS, -1, SIZE)[head]
            )
        gate = mixer.c_g.weight @ h[t]
        normed = [SIZE**-0.5 * x / (x.square().mean() / SIZE + mixer.norm.eps).sqrt() for x in y]
        scaled = torch.cat([x * mixer.norm.weight for x in normed])
        rows.append(mixer.c_proj.weight @ (scaled * gate / (1 + (-gate).exp())))
    return torch.stack(rows)


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixer_computes_its_kinds_equations(kind: str, gated: Any) -> None:
    """Outputs and each gradient by name, in float64."""
    mixer = make(kind, gated, dtype=torch.float64)
    h = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    names = dict(mixer.named_parameters()) | {"h": h}
    cotangent = torch.randn(B, T, D, dtype=torch.float64)
    y, expected = mixer(h), torch.stack([looped(mixer, row) for row in h])
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grads, exact = (
        torch.autograd.grad(out, list(names.values()), cotangent) for out in (y, expected)
    )
    for name, grad, of_loop in zip(names, grads, exact, strict=True):
        torch.testing.assert_close(grad, of_loop, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_near(kind: str, dtype: torch.dtype) -> None:
    mixer = make(kind, True, dtype=torch.float64)
    h = torch.randn(B, T, D, dtype=torch.float64)
    expected = mixer(h)
    y = mixer.to(dtype)(h.to(dtype))
    assert y.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_are_as_many_as_the_kind_says(kind: str) -> None:
    """n matrices where the note has n; the states of n heads where it has n states."""
    mixer = make(kind)
    has = {
        "deltanet": (1, 1, 1, 1),
        "deltaproduct": (1, N, N, 1),
        "multi-head": (N, N, N, N),
        "multi-kv": (1, N, N, N),
        "multi-value": (1, 1, N, N),
        "multi-key": (1, N, 1, N),
        "multi-query": (N, 1, 1, 1),
    }[kind]
    widths = [getattr(mixer, f"c_{name}").weight.shape[0] for name in "qkv"]
    assert widths == [HEADS * number * SIZE for number in has[:3]]
    assert mixer.layout.states == has[3]
