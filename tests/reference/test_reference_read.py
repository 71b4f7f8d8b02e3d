"""The reference's read, rewrite_read and expansion, and the derivatives of all its functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from ddl import reference
from tests.support.tolerances import TOLERANCES, assert_close

F64 = torch.float64
DTYPES = list(TOLERANCES)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(
        *shape, dtype=F64, generator=torch.Generator().manual_seed(seed + len(shape))
    )


def read_arguments(d: int, m: int, K: int | None = None, **other: Any) -> dict[str, Any]:
    """Every parameter of a read in float64; K is None for a channel compressor, 0 for identity."""
    compress = {None: normal(d, m), 0: None}.get(K, normal(d, m, K or 1))
    return {
        "compress": compress,
        "norm_weight": 1 + 0.3 * normal(d, seed=2),
        "gate_weight": normal(d, seed=3),
        "gate_bias": torch.tensor(0.3, dtype=F64),
        "value_weight": normal(m, d, seed=5),
        "value_bias": normal(m),
        **other,
    }


def cast(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: a.to(dtype) if isinstance(a, Tensor) else a for n, a in arguments.items()}


sizes = st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(1, 9), st.integers(1, 5))

# --- compress ------------------------------------------------------------------------------------


def compressed(X: Tensor, weight: Tensor | None) -> Tensor:
    return reference.read(X, compress=weight, norm_eps=None).context


def test_identity_compression_is_the_state_itself() -> None:
    X = normal(2, 3, 5, 1)
    assert torch.equal(compressed(X, None), X[..., 0])


@given(sizes)
def test_channel_compression_feature_by_feature(size: tuple[int, ...]) -> None:
    B, T, d, m = size
    X, w = normal(B, T, d, m), normal(d, m)
    expected = torch.zeros(B, T, d, dtype=F64)
    for i in range(d):
        for j in range(m):
            expected[..., i] += w[i, j] * X[..., i, j]
    assert_close("x", compressed(X, w), expected, F64)


@given(sizes, st.integers(1, 6))
def test_token_compression_is_a_convolution(size: tuple[int, ...], K: int) -> None:
    """d groups of m channels; the current token is conv1d's last tap, and our tap 0."""
    B, T, d, m = size
    X, w = normal(B, T, d, m), normal(d, m, K)
    channels = F.pad(X.permute(0, 2, 3, 1).reshape(B, d * m, T), (K - 1, 0))
    expected = F.conv1d(channels, w.flip(-1), groups=d).mT if T else X.sum(-1)
    assert_close("x", compressed(X, w), expected, F64)


@given(sizes, st.integers(1, 6))
def test_token_compression_is_causal_and_sees_as_many_tokens_as_taps(
    size: tuple[int, ...], K: int
) -> None:
    B, T, d, m = size
    X, w = normal(B, T, d, m), normal(d, m, K)
    before = compressed(X, w)
    for t in range(T):
        changed = X.clone()
        changed[:, t] += 1 + normal(B, d, m, seed=t) ** 2
        touched = (compressed(changed, w) != before).any(-1).any(0)
        assert touched.tolist() == [t <= u < t + K for u in range(T)]


@given(sizes)
def test_token_compression_with_one_tap_is_channel_compression(size: tuple[int, ...]) -> None:
    B, T, d, m = size
    X, w = normal(B, T, d, m), normal(d, m)
    assert torch.equal(compressed(X, w[..., None]), compressed(X, w))


# --- normalise, value and gate -------------------------------------------------------------------


@given(sizes, st.sampled_from([None, 0.0, 1e-5, 0.5]), st.sampled_from([None, 4.0]), st.booleans())
def test_read_one_token_at_a_time(
    size: tuple[int, ...], norm_eps: float | None, scale: float | None, raw: bool
) -> None:
    B, T, d, m = size
    source = "compressed" if raw else "context"
    other = {"norm_eps": norm_eps, "value_scale": scale, "value_from": source}
    X, p = normal(B, T, d, m), read_arguments(d, m, **other)
    result = reference.read(X, **p)
    for b, t in torch.cartesian_prod(torch.arange(B), torch.arange(T)).reshape(-1, 2):
        x = (X[b, t] * p["compress"]).sum(1)
        rstd = 1.0 if norm_eps is None else 1 / (x @ x / d + norm_eps) ** 0.5
        h = x * rstd * p["norm_weight"]
        logit = p["value_weight"] @ (x if raw else h) + p["value_bias"]
        v = logit if scale is None else scale / (1 + torch.exp(-logit))
        beta = 2 / (1 + torch.exp(-(p["gate_weight"] @ h + p["gate_bias"])))
        assert_close("h", result.context[b, t], h, F64)
        assert_close("v", result.value[b, t], v, F64, scale=1 + logit.abs().max().item())
        assert_close("beta", result.gate[b, t], beta, F64, scale=1.0)


def test_what_is_not_given_is_left_out() -> None:
    X, p = normal(2, 3, 4, 2), read_arguments(4, 2)
    bare = reference.read(X, compress=p["compress"])
    assert bare.value is None
    assert bare.gate is None
    ones, zeros = torch.ones(4, dtype=F64), torch.zeros((), dtype=F64)
    weights = {"gate_weight": p["gate_weight"], "value_weight": p["value_weight"]}
    default = reference.read(X, compress=p["compress"], **weights)
    explicit = reference.read(
        X, compress=p["compress"], **weights, norm_weight=ones, norm_eps=1e-5, gate_bias=zeros,
        value_bias=torch.zeros(2, dtype=F64), value_from="context", context_dtype=F64,
    )  # fmt: skip
    for name, a, b in zip(default._fields, default, explicit, strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(bare.context, default.context)


def test_the_gate_at_logit_zero_is_one_and_lies_between_zero_and_two() -> None:
    X, w = 100 * normal(50, 4, 2), normal(4, 2)
    assert (reference.read(X, compress=w, gate_weight=torch.zeros(4).double()).gate == 1).all()
    gate = reference.read(X, compress=w, gate_weight=100 * normal(4)).gate
    assert 0 <= gate.min() < 0.01
    assert 1.99 < gate.max() <= 2


# --- rewrite_read --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [None, 0, 3], ids=["channel", "identity", "token"])
def test_rewrite_read_is_rewrite_then_read(dtype: torch.dtype, K: int | None) -> None:
    m = 1 if K == 0 else 3
    inputs = [normal(2, 5, 6, m), normal(2, 5, 6), normal(2, 5, m), normal(2, 5).sigmoid()]
    inputs = [a.to(dtype) for a in inputs]
    other = {"norm_eps": 1e-3, "value_scale": 4.0, "value_from": "compressed"}
    arguments = cast(read_arguments(6, m, K, **other, context_dtype=torch.float32), dtype)
    result = reference.rewrite_read(*inputs, eps_k=0.1, **arguments)
    state = reference.rewrite(*inputs, eps_k=0.1)
    read = reference.read(state, **arguments)
    for name, a, b in zip(result._fields[:4], result[:4], (state, *read[:3]), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_dtypes(dtype: torch.dtype) -> None:
    """v and β are float32, or float64 for a float64 state; the context has the requested dtype."""
    wide = TOLERANCES[dtype].compute
    X, k, v, beta = (a.to(dtype) for a in (normal(2, 3, 4), normal(2, 3), normal(2, 4), normal(2)))
    arguments = cast(read_arguments(3, 4), dtype)
    result = reference.rewrite_read(X, k, v.to(wide), beta.to(wide), eps_k=0.1, **arguments)
    assert [a.dtype for a in result[:4]] == [dtype, dtype, wide, wide]
    for context in (torch.bfloat16, torch.float32):
        assert reference.read(X, **arguments, context_dtype=context).context.dtype == context


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Bit for bit the float32 result, rounded when stored, with autocast on or off."""
    X, k, v, beta = normal(2, 5, 6, 3), normal(2, 5, 6), normal(2, 5, 3), normal(2, 5).sigmoid()
    narrow = [a.to(dtype) for a in (X, k)] + [v.float(), beta.float()]
    arguments = cast(read_arguments(6, 3, 2), dtype)
    state = reference.rewrite(*(a.float() for a in narrow), eps_k=0.1).to(dtype)
    expected = reference.read(state.float(), **cast(arguments, torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = reference.rewrite_read(*narrow, eps_k=0.1, **arguments)
    assert torch.equal(result.state, state)
    assert torch.equal(result.context, expected.context.to(dtype))
    assert torch.equal(result.value, expected.value)
    assert torch.equal(result.gate, expected.gate)


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_graph_breaks(autocast: bool) -> None:
    """float32 tensors: autocast would run their contractions in bfloat16."""
    inputs = [normal(2, 5, 6, 3), normal(2, 5, 6), normal(2, 5, 3), normal(2, 5).sigmoid()]
    inputs, arguments = [a.float() for a in inputs], cast(read_arguments(6, 3, 2), torch.float32)
    compiled = torch.compile(reference.rewrite_read, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = [
            run(*inputs, eps_k=0.1, **arguments) for run in (compiled, reference.rewrite_read)
        ]
    for name, a, b in zip(results[0]._fields[:4], *(r[:4] for r in results), strict=True):
        assert_close(name, a, b, torch.float32)
    torch._dynamo.reset()


# --- expand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(sizes, st.integers(1, 5))
def test_expansion_at_initialisation_is_repetition(
    dtype: torch.dtype, size: tuple[int, ...], K: int
) -> None:
    B, T, d, m = size
    x = normal(B, T, d).to(dtype)
    weight = torch.zeros(d, m, K, dtype=dtype)
    weight[..., 0] = 1
    repeated = reference.expand(x, value_channels=m)
    assert torch.equal(reference.expand(x, weight, value_channels=m), repeated)
    assert repeated.dtype == dtype
    assert all(torch.equal(repeated[..., j], x) for j in range(m))


@given(sizes, st.integers(1, 5))
def test_expansion_is_a_depthwise_convolution(size: tuple[int, ...], K: int) -> None:
    B, T, d, m = size
    x, w = normal(B, T, d), normal(d, m, K)
    expected = torch.zeros(B, T, d, m, dtype=F64)
    if T:
        y = F.conv1d(F.pad(x.mT, (K - 1, 0)), w.reshape(d * m, 1, K).flip(-1), groups=d)
        expected = y.reshape(B, d, m, T).permute(0, 3, 1, 2)
    assert_close("X", reference.expand(x, w, value_channels=m), expected, F64)


# --- derivatives ---------------------------------------------------------------------------------


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.clone().requires_grad_() for t in tensors)


def test_gradcheck_rewrite() -> None:
    inputs = leaves(
        normal(2, 3, 4, 2), normal(2, 3, 4), normal(2, 3, 2), 2 * normal(2, 3).sigmoid()
    )
    for eps_k in (0.0, 0.3):
        assert gradcheck(lambda *a, eps_k=eps_k: reference.rewrite(*a, eps_k=eps_k), inputs)


@pytest.mark.table(1)
@pytest.mark.parametrize("K", [None, 0, 3], ids=["channel", "identity", "token"])
@pytest.mark.parametrize("norm_eps", [None, 1e-5])
@pytest.mark.parametrize("value_scale", [None, 4.0])
@pytest.mark.parametrize("value_from", ["context", "compressed"])
def test_gradcheck_rewrite_read(
    K: int | None, norm_eps: float | None, value_scale: float | None, value_from: str
) -> None:
    m = 1 if K == 0 else 2
    options = {"norm_eps": norm_eps, "value_scale": value_scale, "value_from": value_from}
    parameters = read_arguments(3, m, K)
    names = [name for name, a in parameters.items() if a is not None]
    state = (normal(2, 4, 3, m), normal(2, 4, 3), normal(2, 4, m), 2 * normal(2, 4).sigmoid())

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, args[4:], strict=True))
        return tuple(reference.rewrite_read(*args[:4], eps_k=0.1, **named, **options)[:4])

    assert gradcheck(run, leaves(*state, *(parameters[name] for name in names)))


def test_gradcheck_expand_and_spectra() -> None:
    x, w, gate = leaves(normal(2, 4, 3), normal(3, 2, 3), normal(2, 4).sigmoid())
    assert gradcheck(lambda x, w: reference.expand(x, w, value_channels=2), (x, w))
    assert gradcheck(lambda x: reference.expand(x, value_channels=2), (x,))
    for spectrum in (reference.operator, reference.eigenvalues, reference.determinant):
        assert gradcheck(lambda k, b, f=spectrum: f(k, b, 0.3), (x, gate)), spectrum


# --- bad arguments -------------------------------------------------------------------------------


z = torch.zeros
BAD = [
    (lambda: reference.read(z(2, 4)), "`compress` must be a weight of shape (2, 4) or (2, 4, K) "
     "for 4 value channels, got None"),
    (lambda: reference.read(z(2, 3, 4), compress=z(3, 5)),
     "`compress` must have shape (3, 4) or (3, 4, K), got (3, 5)"),
    (lambda: reference.read(z(3, 4), compress=z(3, 4, 2)),
     "`state` must have shape (…, time, hidden_size, value_channels), got (3, 4)"),
    (lambda: reference.read(z(3, 1), value_from="state"),
     '`value_from` must be "context" or "compressed", got \'state\''),
    (lambda: reference.expand(z(2, 3), z(3, 5, 2), value_channels=4),
     "`weight` must have shape (3, 4, K), got (3, 5, 2)"),
    (lambda: reference.expand(z(3), z(3, 4, 2), value_channels=4),
     "`x` must have shape (…, time, hidden_size), got (3,)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), BAD, ids=range(len(BAD)))
def test_bad_arguments(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()
