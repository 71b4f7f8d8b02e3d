"""DeltaMixer with padding, documents, a past, transformations and wrong arguments."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl.errors import InputError
from ddl.nn import DeltaMixer, DeltaStream, History
from ddl.nn.convolution import Slot
from ddl.optim import parameter_groups
from tests.nn.mixers.test_kinds import GATED, HEADS, KINDS, B, D, T, make
from tests.support.helpers import documents

every_kind = pytest.mark.parametrize("kind", KINDS)
every_gate = pytest.mark.parametrize("gated", GATED)


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, D, dtype=dtype, generator=torch.Generator().manual_seed(3))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.table(1)
@every_gate
@every_kind
def test_no_token_sees_a_later_one(kind: str, gated: Any) -> None:
    mixer, h = make(kind, gated, dtype=torch.float64), inputs()
    changed = h.clone()
    changed[:, 7:] = torch.nan
    close(mixer(changed)[:, :7], mixer(h)[:, :7])


@pytest.mark.parametrize("gated", [True, "per-feature"])
@pytest.mark.parametrize("rate", [1.0, 11.0, 44.0])
def test_gradients_of_rates_are_exact_however_small(gated: Any, rate: float) -> None:
    """With decays of exp(−rate) a token: relative to the gradient, which is as small as they."""
    mixer, h = make("deltanet", gated), inputs(torch.float32)
    assert mixer.decay is not None
    with torch.no_grad():
        mixer.decay.log_rate.fill_(math.log(rate))
        mixer.decay.up.bias.fill_(math.log(math.e - 1))  # softplus of it is 1
    grads = []
    for call, x in ((copy.deepcopy(mixer).double(), h.double()), (mixer, h)):
        assert call.decay is not None
        (grad,) = torch.autograd.grad(call(x).square().sum(), call.decay.log_rate)
        grads.append(grad.double())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=0)


@pytest.mark.table(1)
@every_gate
@every_kind
def test_padding_leaves_no_trace(kind: str, gated: Any) -> None:
    """On either side; what follows it goes on as if it were not there."""
    mixer, h = make(kind, gated, dtype=torch.float64), inputs()
    for keep in ([False] * 3 + [True] * (T - 3), [True] * (T - 4) + [False] * 4):
        mask = torch.tensor(keep).expand(B, T)
        history = History()
        history.begin()
        with torch.no_grad():
            y = mixer(h, keep=mask, slot=Slot(history, "a"))
            history.commit()
            close(y[:, mask[0]], mixer(h[:, mask[0]]))
            spoilt = h.masked_fill(~mask.unsqueeze(-1), torch.nan)
            close(mixer(spoilt, keep=mask)[:, mask[0]], y[:, mask[0]])
            alone = History()
            alone.begin()
            mixer(h[:, mask[0]], slot=Slot(alone, "a"))
            alone.commit()
        close(history.get("a.state"), alone.get("a.state"))


@pytest.mark.table(1)
@every_gate
@every_kind
def test_documents_are_computed_as_if_alone(kind: str, gated: Any) -> None:
    mixer, h = make(kind, gated, dtype=torch.float64), inputs()
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[0, 4] = starts[0, 5] = starts[1, 9] = True
    y = mixer(h, document_starts=starts)
    for row, own in documents(starts):
        close(y[row, own], mixer(h[row : row + 1, own])[0])
    spoilt = h.clone()
    spoilt[0, :4] = torch.nan
    close(mixer(spoilt, document_starts=starts)[0, 4:], y[0, 4:])


@pytest.mark.table(1)
@every_gate
@every_kind
@pytest.mark.parametrize("pieces", [[1] * T, [3, 1, 7], [10, 1]], ids=str)
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(kind: str, gated: Any, pieces: list[int]) -> None:
    mixer, h, history, y = make(kind, gated, dtype=torch.float64), inputs(), History(), []
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[1, 6] = True
    for piece, begun in zip(h.split(pieces, 1), starts.split(pieces, 1), strict=True):
        history.begin()
        y.append(mixer(piece, document_starts=begun, slot=Slot(history, "a")))
        history.commit()
    close(torch.cat(y, 1), mixer(h, document_starts=starts))
    assert set(history._past) == {"a.q", "a.k", "a.v", "a.state"}


@torch.no_grad()
def test_an_interrupted_pass_leaves_the_past_as_it_was() -> None:
    mixer, h, history = make("deltanet", dtype=torch.float64), inputs(), History()
    for times in (1, 2):
        history.begin()
        for _ in range(times):
            y = mixer(h[:, 3:], slot=Slot(history, "a"))
    history.commit()
    close(y, mixer(h[:, 3:]))


@pytest.mark.table(0)
@every_gate
def test_compiled_without_breaks_and_exported(gated: Any) -> None:
    mixer, h = make("multi-kv", gated), inputs(torch.float32)
    expected = mixer(h)
    compiled = torch.compile(mixer, fullgraph=True)(h)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)
    compiled.sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())
    exported = torch.export.export(mixer, (h,), strict=True)
    torch.testing.assert_close(exported.module()(h), expected, rtol=1e-4, atol=1e-5)


def test_autocast_keeps_gates_and_states_in_float32() -> None:
    mixer, h = make("deltaproduct", True), inputs(torch.float32)
    history = History()
    history.begin()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = mixer(h, slot=Slot(history, "a"))
    history.commit()
    assert y.dtype == torch.bfloat16
    assert history.get("a.state").dtype == torch.float32
    torch.testing.assert_close(y.float(), mixer(h), rtol=5e-2, atol=2e-2)


@every_gate
def test_a_model_made_on_meta_starts_as_any_other(gated: Any) -> None:
    options: dict[str, Any] = {"kind": "multi-kv", "n": 8, "gated": gated}
    torch.manual_seed(1)
    expected = DeltaMixer(64, 16, **options)
    made = DeltaMixer(64, 16, device="meta", **options).to_empty(device="cpu")
    torch.manual_seed(1)
    made.reset_parameters()
    both = [{name: p.detach() for name, p in m.named_parameters()} for m in (made, expected)]
    for (name, a), b in zip(both[0].items(), both[1].values(), strict=True):
        assert a.isfinite().all(), name
        assert a.std(correction=0) == pytest.approx(float(b.std(correction=0)), rel=0.3), name
        assert a.mean() == pytest.approx(float(b.mean()), abs=0.3 * float(b.abs().mean())), name


def test_a_fresh_mixer_replaces_and_decays_slowly() -> None:
    """β = 1 for every token; a decay over one token between exp(−1.6) and 1."""
    mixer, h = DeltaMixer(64, 4, gated=True), torch.randn(2, 9, 64)
    assert not any(p.any() for p in mixer.gate.parameters())
    g = mixer.decay(h)
    assert g.min() > -4
    assert g.max() < 0
    assert mixer.decay.up.bias.exp().log1p().max() <= 0.1 + 1e-6


def test_copies_and_state_dicts_compute_the_same() -> None:
    mixer, h = make("multi-key", "per-feature"), inputs(torch.float32)
    loaded = DeltaMixer(D, HEADS, kind="multi-key", n=3, gated="per-feature", head_size=5)
    loaded.load_state_dict(mixer.state_dict())
    for other in (copy.deepcopy(mixer), loaded):
        assert torch.equal(other(h), mixer(h))


def test_what_never_decays() -> None:
    mixer = make("deltanet", "per-feature")
    decayed, kept = parameter_groups(mixer, 0.1)
    names = {id(p): name for name, p in mixer.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        *(f"c_{part}.weight" for part in ("q", "k", "v", "g", "proj")),
        *("decay.down.weight", "decay.up.weight"),
    }
    assert len(kept["params"]) == 8  # taps, gate, the decay's bias and rates, norm


def test_it_takes_attentions_place_in_a_stream() -> None:
    sublayers: list[nn.Module] = [DeltaMixer(16, 2), nn.Linear(16, 16)]
    stream = DeltaStream(16, sublayers, value_channels=2, compress="channel")
    y = stream(torch.randn(2, 5, 16))
    y.sum().backward()
    assert all(p.grad is not None for p in stream.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "`heads` must be a divisor of the hidden size of 12, got 5"),
        ({"heads": 0}, "`heads` must be an integer of at least 1, got 0"),
        (
            {"kind": "delta"},
            f"`kind` must be {' or '.join(f'{chr(34)}{k}{chr(34)}' for k in KINDS)}",
        ),
        ({"n": 2}, '`n` must be left at 1 unless kind="deltaproduct" or "multi-head"'),
        ({"kind": "multi-kv", "n": 0}, "`n` must be an integer of at least 1, got 0"),
        ({"gated": "head"}, "`gated` must be True, False or \"per-feature\", got 'head'"),
        ({"gated": 1}, '`gated` must be True, False or "per-feature", got 1'),
        ({"kernel_size": 0}, "`kernel_size` must be an integer of at least 1, got 0"),
        ({"norm_eps": -1.0}, "`norm_eps` must be a positive finite number, got -1.0"),
        ({"norm_eps": "a"}, "`norm_eps` must be a positive finite number, got 'a'"),
        ({"head_size": 1.5}, "`head_size` must be an integer of at least 1, got 1.5"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        DeltaMixer(**({"hidden_size": D, "heads": HEADS} | options))


def test_wrong_inputs_are_refused() -> None:
    mixer = make("deltanet")
    with pytest.raises(
        ValueError, match=r"`h` must be of shape \(batch, time, 12\), got \(2, 12\)"
    ):
        mixer(torch.randn(2, 12))
    with pytest.raises(ValueError, match=r"`h` must have shape \(…, 12\), got \(2, 5, 11\)"):
        mixer(torch.randn(2, 5, 11))
    with pytest.raises(TypeError, match=r"`h` must be a torch\.Tensor"):
        mixer([1.0])
    with pytest.raises(
        ValueError, match=r"^a step with a cache must be called under torch.no_grad"
    ):
        mixer(torch.randn(2, 5, 12), slot=Slot(History(), "a"))
    mask = torch.ones(2, 3, dtype=torch.bool)
    for name in ("keep", "document_starts"):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \(2, 5\), got \(2, 3\)"):
            mixer(torch.randn(2, 5, 12), **{name: mask})
