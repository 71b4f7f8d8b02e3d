"""`ddl.record`: what it sees equals the equations, and it changes nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddl
from ddl import DeltaResidual
from ddl.lab.analysis.spectra import regime_shares
from ddl.models import GPT
from ddl.nn import History
from ddl.recording import KEPT, PER_CHANNEL, QUANTITIES, REGIMES
from ddl.recording.quantities import BINS, bins
from tests.support import hf_cases, nanogpt_cases
from tests.support.helpers import gradients, randomise_
from tests.support.recording_cases import (
    F64,
    B,
    D,
    L,
    T,
    by_hand,
    embeddings,
    make,
    variants,
)


def expected(stream: ddl.DeltaStream, x: Tensor) -> dict[str, Tensor]:
    """Every quantity (L, B, T, …) by the equations."""
    found: dict[str, list[Tensor]] = {name: [] for name in (*QUANTITIES, *KEPT)}
    previous = None
    parts = zip(by_hand(stream, x), stream.residuals, strict=True)
    for (X, k, v, beta, alpha, after), residual in parts:
        unit, s = k / (k.square().sum(-1, True) + residual.eps_k**2).sqrt(), residual.branch_scale
        p = torch.einsum("btd,btdm->btm", unit, X)
        cosine = torch.full(beta.shape, math.nan, dtype=F64)
        if previous is not None:
            cosine = (unit * previous).sum(-1) / (unit.norm(dim=-1) * previous.norm(dim=-1))
        previous = unit
        values = {
            "beta": beta,
            "k_norm": k.norm(dim=-1),
            "eigenvalue": 1 - s * alpha * unit.square().sum(-1),
            "readout": p,
            "value": v,
            "error": (v - p).norm(dim=-1),
            "error_after": (v - torch.einsum("btd,btdm->btm", unit, after)).norm(dim=-1),
            "shrinks": torch.zeros_like(beta),
            "write_norm": (after - X).flatten(-2).norm(dim=-1),
            "state_norm": X.flatten(-2).norm(dim=-1),
            "state_norm_after": after.flatten(-2).norm(dim=-1),
            "channel_norm": X.norm(dim=-2),
            "channel_norm_after": after.norm(dim=-2),
            "coherence": cosine,
            "direction": unit,
            "state": X,
            "state_after": after,
        }
        values["shrinks"] = (values["error_after"] < values["error"]).to(F64)
        for name, value in values.items():
            found[name].append(value)
    return {name: torch.stack(rows) for name, rows in found.items()}


@variants
def test_every_quantity_is_that_of_the_equations(options: dict[str, Any]) -> None:
    stream, x = make(options), embeddings()
    with ddl.record(stream, tokens=(*QUANTITIES, *KEPT)) as recording:
        stream(x)
    assert recording.sublayers == [f"residuals.{i}" for i in range(L)]
    assert len(recording) == B * T
    for name, wanted in expected(stream, x).items():
        got = recording.tokens(name)
        first = 1 if name == "coherence" else 0  # nothing comes before the first sublayer
        torch.testing.assert_close(got, wanted[first:], rtol=1e-10, atol=1e-10, msg=name)


@variants
def test_statistics_are_those_of_all_tokens(options: dict[str, Any]) -> None:
    stream, parts = make(options), [embeddings(), embeddings(3, seed=1), embeddings(1, seed=2)]
    with ddl.record(stream) as recording:
        for x in parts:
            stream(x)
    all_of = [expected(stream, x) for x in parts]
    for name in QUANTITIES:
        wide = stream.value_channels if name in PER_CHANNEL else 1
        samples = torch.cat([each[name].reshape(L, -1, wide) for each in all_of], dim=1)
        samples = samples if name in PER_CHANNEL else samples.squeeze(-1)
        wanted = (samples.mean(1), samples.std(1, correction=0), samples.amin(1), samples.amax(1))
        got = recording.statistics(name)
        for field, a, b in zip(got._fields, got, wanted, strict=True):
            options_ = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}
            torch.testing.assert_close(a, b, msg=f"{field} of {name}", **options_)
    λ = torch.cat([each["eigenvalue"].reshape(L, -1) for each in all_of], dim=1)
    shares = recording.regimes()
    for name, (above, up_to) in REGIMES.items():
        inside = ((λ > above) | (above == -1)) & (λ <= up_to)
        torch.testing.assert_close(shares[name], inside.double().mean(1))
    assert sum(shares.values()).tolist() == pytest.approx([1.0] * L)


def test_regimes_cover_the_interval_without_gaps() -> None:
    bounds = sorted(REGIMES.values())
    assert bounds[0][0] == -1
    assert bounds[-1][1] == 1
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def test_a_bound_belongs_to_the_bin_nearer_to_zero() -> None:
    """So recordings and ddl.lab.analysis.spectra count every eigenvalue in the same regime."""
    edges = torch.arange(-BINS // 2, BINS // 2 + 1).double() / (BINS // 2)  # −1 to 1
    counts = bins(edges)
    inner = BINS // 2  # the bins from 0 to the first edge hold both of their ends, 0 once
    expected = torch.ones(BINS, dtype=torch.int64)
    expected[inner] += 1
    assert torch.equal(counts, expected)
    near = torch.tensor([-0.9, -0.1, 0.1, 0.9], dtype=torch.float64)
    assert bins(near).nonzero().flatten().tolist() == [2, 18, 21, 37]
    shares = regime_shares(near[:, None].numpy())
    assert shares["near-projection"] == shares["near-reflection"] * 2 == 0.5


@variants
def test_nothing_changes_while_recording(options: dict[str, Any]) -> None:
    stream, x = make(options, torch.float32), embeddings(dtype=torch.float32).requires_grad_()
    state = torch.get_rng_state()
    plain = stream(x)
    wanted = gradients(plain, {"x": x}, stream)
    with ddl.record(stream, tokens=tuple(KEPT)):
        seen = stream(x)
        got = gradients(seen, {"x": x}, stream)
    assert torch.equal(plain, seen)
    assert all(torch.equal(got[name], gradient) for name, gradient in wanted.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_inside_leaves_no_tap() -> None:
    stream = make({})
    with pytest.raises(RuntimeError, match="mine"), ddl.record(stream) as recording:
        raise RuntimeError("mine")
    stream(embeddings())
    assert len(recording) == 0
    assert all(residual.hooks == () for residual in stream.residuals)


def counted(stream: nn.Module) -> tuple[Any, list[torch.fx.GraphModule]]:
    """A compiled stream, and the graphs that were compiled so far."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    return torch.compile(stream, fullgraph=True, backend=backend), graphs


def test_a_compiled_model_is_recorded_and_never_compiled_again() -> None:
    stream, x = make({"value_channels": 2}), embeddings()
    compiled, graphs = counted(stream)
    before = compiled(x)
    with ddl.record(compiled) as recording:
        compiled(x)
    assert len(recording) == B * T
    assert torch.equal(compiled(x), before)
    assert len(graphs) == 1


def test_contexts_that_end_out_of_order_leave_compilation_as_it_was() -> None:
    """As in two threads: the first to end may not compile, nor the last one forbid it for good."""
    stream, x = make({"value_channels": 2}), embeddings()
    compiled, graphs = counted(stream)
    first, second = ddl.record(stream), ddl.record(stream)
    first.__enter__()
    with contextlib.ExitStack() as ending:
        recording = ending.enter_context(second)
        first.__exit__(None, None, None)
        compiled(x)
        assert len(recording) == B * T
        assert not graphs
    compiled(x)
    assert len(graphs) == 1


def test_threads_record_at_once() -> None:
    streams = [make({}) for _ in range(4)]
    seen: list[int] = []

    def work(stream: ddl.DeltaStream) -> None:
        for _ in range(20):
            with ddl.record(stream) as recording:
                stream(embeddings())
            seen.append(len(recording))

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [B * T] * 80
    assert all(residual.hooks == () for stream in streams for residual in stream.residuals)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_what_is_not_a_number_is_in_no_regime() -> None:
    stream = make({})
    with torch.no_grad():
        stream.residuals[1].gate.weight.fill_(math.nan)
    with ddl.record(stream) as recording:
        stream(embeddings())
    assert len(recording) == B * T
    assert recording.eigenvalue_counts().sum(1).tolist() == [B * T, 0, 0, 0]
    shares = torch.stack(list(recording.regimes().values())).sum(0)
    assert shares.tolist() == pytest.approx([1, 0, 0, 0])
    assert recording.statistics("eigenvalue").mean.isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize(("scale", "at"), [(2.5, 0), (-0.5, BINS - 1)])
def test_an_eigenvalue_outside_counts_in_the_outermost_bin(scale: float, at: int) -> None:
    """A branch_scale outside [0, 1] brings λ below −1, or above 1."""
    stream = make({"branch_scale": scale})
    with ddl.record(stream, tokens=("eigenvalue",)) as recording:
        stream(embeddings())
    λ, counts = recording.tokens("eigenvalue").reshape(L, -1), recording.eigenvalue_counts()
    assert (λ.abs() > 1.1).any(1).all()
    assert torch.equal(counts.sum(1), torch.full((L,), B * T))
    outermost = λ < -0.95 if at == 0 else λ > 0.95
    assert torch.equal(counts[:, at], outermost.sum(1))
    for row, shares in enumerate(zip(*recording.regimes().values(), strict=True)):
        wanted = regime_shares(λ[row, :, None].numpy())
        assert dict(zip(REGIMES, shares, strict=True)) == pytest.approx(wanted)
    assert bins(torch.tensor([-math.inf, math.inf]))[[0, -1]].tolist() == [1, 1]


def test_a_name_that_is_given_twice_is_kept_once() -> None:
    stream = make({})
    with ddl.record(stream, tokens=("beta", "beta")) as recording:
        stream(embeddings())
    assert recording.tokens("beta").shape == (4, B, T)


def test_a_shared_residual_has_no_tokens_of_its_own() -> None:
    stream = make({})
    stream.residuals[2] = stream.residuals[0]
    with ddl.record(stream, tokens=("beta",)) as recording:
        stream(embeddings())
    sentence = "`tokens` needs sublayers that run equally often, got 4, 2, 2 rows"
    with pytest.raises(ValueError, match=sentence):
        recording.tokens("beta")


def test_padding_is_not_counted() -> None:
    stream, x = make({"value_channels": 2}), embeddings()
    keep = torch.tensor([[False, False, True, True, True], [False] * 4 + [True]])
    with ddl.record(stream, tokens=("beta",)) as recording:
        stream(x, keep=keep)
    assert len(recording) == 4
    beta = recording.tokens("beta")
    assert (beta[:, ~keep] == 0).all()
    torch.testing.assert_close(recording.statistics("beta").mean, beta[:, keep].mean(1))


@pytest.mark.parametrize("value_channels", [1, 3])
def test_tokens_that_continue_a_sequence_are_recorded(value_channels: int) -> None:
    stream, x = make({"value_channels": value_channels}), embeddings()
    wanted = expected(stream, x)["beta"]
    history = History()
    with torch.no_grad():
        stream(x[:, :2], history=history)  # without hooks first, so that they are noticed later
        with ddl.record(stream, tokens=("beta",)) as recording:
            for t in range(2, T):
                stream(x[:, t : t + 1], history=history)
        assert len(recording) == B * (T - 2)
        stream(x[:, :1], history=history)
    assert len(recording) == B * (T - 2)
    got = recording.tokens("beta").squeeze(-1).unflatten(1, (T - 2, B)).transpose(1, 2)
    torch.testing.assert_close(got, wanted[..., 2:])


@nanogpt_cases.variants
def test_nanogpt(options: dict[str, Any]) -> None:
    model = nanogpt_cases.make_delta(options).eval()
    idx, _ = nanogpt_cases.tokens()
    plain = model(idx)[0]
    with ddl.record(model, tokens=("state", "state_after")) as recording:
        assert torch.equal(model(idx)[0], plain)
    assert recording.sublayers[:2] == ["transformer.h.0.res_attn", "transformer.h.0.res_mlp"]
    # Each state is what the rewrite before it left.
    torch.testing.assert_close(recording.tokens("state")[1:], recording.tokens("state_after")[:-1])


def test_hugging_face() -> None:
    from ddl.hf.modeling import from_gpt

    gpt = hf_cases.model(residual="ddl-cc").eval()
    model, idx = from_gpt(gpt), hf_cases.tokens(2, 6)
    with ddl.record(gpt) as wanted:
        gpt(idx)
    with ddl.record(model) as got:
        model(idx)
    found = got.summary()
    for sublayer in found["sublayers"]:
        sublayer["name"] = sublayer["name"].removeprefix("model.")
    assert found == wanted.summary()


class ByHand(torch.nn.Module):
    """Two residuals by hand, the second made first: names follow the order of execution."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = DeltaResidual(D), DeltaResidual(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, torch.sin(x), context=x)
        return self.second(x, torch.cos(x), context=x)


def test_residuals_by_hand() -> None:
    model, x = ByHand().double(), embeddings()
    randomise_(model)
    with ddl.record(model, tokens=("coherence",)) as recording:
        y = model(x)
        assert torch.equal(y, model(x))
    assert recording.sublayers == ["first", "second"]
    assert recording.tokens("coherence").shape == (1, 2 * B, T)


def numbers(recording: ddl.recording.Recording) -> int:
    parts = [vars(moments).values() for moments in recording._moments.values()]
    tensors = [t for part in (*parts, recording._counts.values()) for t in part]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def test_memory_does_not_grow_with_tokens() -> None:
    stream = make({"value_channels": 2})
    with ddl.record(stream) as recording:
        stream(embeddings())
        once = numbers(recording)
        for _ in range(3):
            stream(embeddings(40))
    assert numbers(recording) == once
    assert recording._kept == {}


def test_summary_is_json_with_null_for_the_unknown() -> None:
    stream = make({"value_channels": 2})
    with ddl.record(stream) as recording:
        stream(embeddings())
    summary = json.loads(json.dumps(recording.summary(), allow_nan=False))
    first, second = summary["sublayers"][:2]
    assert summary["tokens"] == B * T
    assert first["coherence"]["mean"] is None
    assert -1 <= second["coherence"]["mean"] <= 1
    assert len(first["value"]["mean"]) == 2
    assert sum(first["eigenvalue_counts"]) == B * T


def test_an_empty_recording() -> None:
    with ddl.record(make({})) as recording:
        pass
    assert len(recording) == 0
    assert recording.summary() == {"tokens": 0, "sublayers": []}


def test_refused() -> None:
    stream = make({})
    with (
        pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got int"),
        ddl.record(3),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"`model` must have a DeltaResidual or .* got a Linear"),
        ddl.record(torch.nn.Linear(2, 2)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"`tokens` must be among beta, .*, got 'gate'"),
        ddl.record(stream, tokens=("gate",)),
    ):
        pass
    with ddl.record(stream, tokens="beta") as recording:
        stream(embeddings())
        stream(embeddings(3))
    assert str(recording) == f"<Recording: sublayers={L}, tokens={B * T + B * 3}, kept=('beta',)>"
    with pytest.raises(ValueError, match=r"needs passes of one length, .*, or use `statistics`$"):
        recording.tokens("beta")
    with pytest.raises(ValueError, match="among the `tokens` of record, beta, got 'value'"):
        recording.tokens("value")
    with pytest.raises(ValueError, match="`quantity` must be one of beta, "):
        recording.statistics("gate")


def test_every_residual_of_our_models_can_be_recorded() -> None:
    for residual in ("ddl", "ddl-cc", "ddl-cc-noec", "ddl-tc", "ddl-tc-noec"):
        model: GPT = hf_cases.model(residual=residual)
        with ddl.record(model) as recording, torch.no_grad():
            model(hf_cases.tokens(1, 4))
        assert len(recording.sublayers) == len(model.trunk.sublayers)
