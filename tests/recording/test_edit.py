"""`ddl.edit`: chosen gates and values, and nothing else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import ddl
from ddl.nn import History
from tests.support import nanogpt_cases
from tests.support.helpers import gradients
from tests.support.recording_cases import (
    F64,
    B,
    D,
    L,
    T,
    embeddings,
    make,
    variants,
)

SEEN = ("beta", "value", "readout", "state", "state_after", "direction")


@variants
def test_a_gate_of_zero_writes_nothing_bit_for_bit(options: dict[str, Any]) -> None:
    stream, x = make(options, torch.float32), embeddings(dtype=torch.float32)
    with (
        ddl.edit(stream, sublayers=1, tokens=slice(1, 3), beta=0.0),
        ddl.record(stream, tokens=SEEN) as recording,
    ):
        stream(x)
    before, after = recording.tokens("state")[1], recording.tokens("state_after")[1]
    assert torch.equal(before[:, 1:3], after[:, 1:3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all((-2, -1)).any()
    beta = recording.tokens("beta")
    assert (beta[1, :, 1:3] == 0).all()
    assert (beta[0] != 0).all()


@variants
def test_gates_of_zero_everywhere_leave_the_embedding(options: dict[str, Any]) -> None:
    stream, x = make(options), embeddings()
    with torch.no_grad(), ddl.edit(stream, beta=0.0):
        got = stream(x)
    X = stream.expand(x)
    assert torch.equal(got, stream.readout(X))


def test_one_replaces_and_two_reflects() -> None:
    stream, x = make({"value_channels": 3, "eps_k": 1e-9}), embeddings()
    with ddl.edit(stream, beta=1.0), ddl.record(stream, tokens=SEEN) as one:
        stream(x)
    held = torch.einsum("lbtd,lbtdm->lbtm", one.tokens("direction"), one.tokens("state_after"))
    torch.testing.assert_close(held, one.tokens("value"))
    with ddl.edit(stream, beta=2.0, value=0.0), ddl.record(stream) as two:
        stream(x)
    norms = (two.statistics(name).mean for name in ("state_norm", "state_norm_after"))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("value_channels", [1, 3])
@pytest.mark.parametrize("rewrites", [1, 2])
@pytest.mark.parametrize("anchor_every", [1, 3])
def test_erasing_nothing_is_a_stream_that_never_erases(
    value_channels: int, rewrites: int, anchor_every: int
) -> None:
    """Outputs and gradients; of one sublayer alone, the others' rewrites stay tied."""
    options = {"value_channels": value_channels, "rewrites": rewrites, "anchor_every": anchor_every}
    tied, none, x = make(options), make({**options, "erase": "none"}), embeddings()
    with ddl.edit(tied, erase="none"):
        got = gradients(tied(x), {}, tied)
    torch.testing.assert_close(got, gradients(none(x), {}, none), rtol=0, atol=1e-10)
    with (
        torch.no_grad(),
        ddl.edit(tied, sublayers="residuals.1", erase="none", beta=0.5),
        ddl.record(tied, tokens=("eigenvalue", "beta")) as recording,
    ):
        tied(x)
    keeps = (recording.tokens("eigenvalue") == 1).flatten(1).all(1)
    chosen = [number // rewrites == 1 for number in range(L * rewrites)]
    assert keeps.tolist() == chosen
    assert (recording.tokens("beta") == 0.5).flatten(1).all(1).tolist() == chosen


def test_erasing_nothing_needs_whole_sublayers() -> None:
    sentence = "^`sublayers` must name whole sublayers with `erase`, got some of a sublayer's rew"
    with (
        pytest.raises(ValueError, match=sentence),
        ddl.edit(make({"rewrites": 2}), sublayers=["residuals.0", 3], erase="none"),
    ):
        pass


def test_recorded_values_put_back_change_nothing_and_exchanged_ones_do() -> None:
    stream, x = make({"value_channels": 3}), embeddings()
    with torch.no_grad(), ddl.record(stream, tokens=("value",)) as recording:
        plain = stream(x)
    own = recording.tokens("value")[2]
    with torch.no_grad(), ddl.edit(stream, sublayers=2, value=own):
        assert torch.equal(stream(x), plain)
    with torch.no_grad(), ddl.edit(stream, sublayers=2, tokens=[0, -1], value=own.flip(0)):
        exchanged = stream(x)
    changed = (exchanged != plain).any(-1)
    assert changed.tolist() == [[True, False, False, False, True]] * B


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        (3, [3]),
        ([0, 2], [0, 2]),
        (slice(-2, None), [3, 4]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
        (torch.tensor([4, 1]), [1, 4]),
        (None, [0, 1, 2, 3, 4]),
    ],
)
def test_tokens_are_positions_slices_or_masks(tokens: Any, chosen: list[int]) -> None:
    stream = make({})
    with (
        ddl.edit(stream, sublayers=0, tokens=tokens, beta=0),
        ddl.record(stream, tokens=("beta",)) as recording,
    ):
        stream(embeddings())
    zero = (recording.tokens("beta")[0] == 0).all(0).nonzero().flatten()
    assert zero.tolist() == chosen


def test_a_mask_may_differ_between_sequences() -> None:
    stream, mask = make({}), torch.eye(B, T, dtype=torch.bool)
    with ddl.edit(stream, tokens=mask, beta=0), ddl.record(stream, tokens="beta") as recording:
        stream(embeddings())
    assert torch.equal(recording.tokens("beta") == 0, mask.expand(L, B, T))


@pytest.mark.parametrize(
    ("sublayers", "chosen"),
    [(0, [0]), (-1, [3]), ([1, "residuals.3"], [1, 3]), ("residuals.2", [2]), (None, [0, 1, 2, 3])],
)
def test_sublayers_are_numbers_or_names(sublayers: Any, chosen: list[int]) -> None:
    stream = make({})
    with ddl.edit(stream, sublayers=sublayers, beta=0), ddl.record(stream) as recording:
        stream(embeddings())
    assert (recording.statistics("beta").max == 0).nonzero().flatten().tolist() == chosen


def test_contexts_nest_and_the_inner_one_comes_last() -> None:
    stream, x = make({}), embeddings()
    outer, inner = ddl.edit(stream, beta=2.0), ddl.edit(stream, sublayers=0, beta=0.5)
    with outer, inner, ddl.record(stream) as recording:
        stream(x)
    assert recording.statistics("beta").mean.tolist() == [0.5, 2.0, 2.0, 2.0]
    with ddl.record(stream) as recording:
        stream(x)
    assert recording.statistics("beta").std.all()


def test_gradients_reach_what_is_passed() -> None:
    stream, x = make({"value_channels": 3}), embeddings()
    beta = torch.full((B, T), 0.7, dtype=F64, requires_grad=True)
    value = torch.zeros(3, dtype=F64, requires_grad=True)
    with ddl.edit(stream, sublayers=1, beta=beta, value=value):
        stream(x).square().sum().backward()
    assert beta.grad is not None
    assert beta.grad.all()
    assert value.grad is not None
    assert value.grad.all()
    assert (
        stream.residuals[1].gate.weight.grad is None
        or not stream.residuals[1].gate.weight.grad.any()
    )


def test_padding_stays_unwritten() -> None:
    stream, x = make({"value_channels": 2}), embeddings()
    keep = torch.tensor([[False, True, True, True, True]] * B)
    with ddl.edit(stream, beta=1.0, value=3.0), ddl.record(stream, tokens="beta") as seen:
        stream(x, keep=keep)
    assert torch.equal(seen.tokens("beta"), keep.expand(L, B, T).double())


@pytest.mark.parametrize("edited", [{"beta": 0}, {"erase": "none"}], ids=str)
@pytest.mark.parametrize("compress", ["channel", "token"])
def test_generation_with_a_cache(compress: str, edited: dict[str, Any]) -> None:
    stream, x = make({"value_channels": 2, "compress": compress}), embeddings()
    with torch.no_grad(), ddl.edit(stream, sublayers=0, **edited):
        whole, history = stream(x), History()
        parts = [stream(x[:, t : t + 1], history=history) for t in range(T)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
    with (
        torch.no_grad(),
        ddl.edit(stream, tokens=[0], beta=0),
        pytest.raises(ValueError, match="`tokens` must be None while a cache is used"),
    ):
        stream(x, history=History())


def test_nanogpt() -> None:
    model = nanogpt_cases.make_delta({"value_channels": 2}).eval()
    idx, _ = nanogpt_cases.tokens()
    with ddl.edit(model, sublayers="transformer.h.1.res_attn", beta=0), ddl.record(model) as seen:
        model(idx)
    zero = seen.statistics("beta").max == 0
    assert [n for n, z in zip(seen.sublayers, zero, strict=True) if z] == [
        "transformer.h.1.res_attn"
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "`beta`, `value` or `erase` must be given, got None for all"),
        ({"erase": "tied"}, "`erase` must be \"none\" or None, got 'tied'"),
        ({"erase": "none", "tokens": 1}, "`tokens` must be None with `erase`, got positions"),
        ({"beta": 2.1}, r"`beta` must be in \[0, 2\], got 2.1"),
        ({"beta": float("nan")}, r"`beta` must be in \[0, 2\], got nan"),
        ({"beta": torch.tensor([0.0, -1])}, r"`beta` must be in \[0, 2\], got a tensor with -1.0"),
        ({"beta": 1.0, "sublayers": 4}, "`sublayers` must be below 4 or among the names .*, got 4"),
        ({"beta": 1.0, "sublayers": ["x"]}, "`sublayers` must be below 4 .*, got 'x'"),
        ({"beta": 2.0000001}, r"`beta` must be in \[0, 2\], got 2.0000001"),
        ({"beta": 1.0, "sublayers": slice(1)}, "`sublayers` must be below 4 .*, got slice"),
        ({"beta": 1.0, "sublayers": 1.0}, "`sublayers` must be below 4 .*, got 1.0"),
        ({"beta": 1.0, "tokens": 10**30}, "`tokens` must be a number, several, a slice"),
        ({"beta": 1.0, "tokens": "ab"}, "`tokens` must be a number, .*, got 'ab'"),
        ({"beta": 1.0, "tokens": 0.5}, "`tokens` must be a number, several, a slice"),
        ({"beta": 1.0, "tokens": [0, 5]}, "`tokens` must be positions in 5 tokens, got 5"),
        (
            {"beta": 1.0, "tokens": torch.ones(4, dtype=torch.bool)},
            r"`tokens` must be a mask of shape \(2, 5\) or \(5,\), got \(4,\)",
        ),
        (
            {"beta": torch.ones(3)},
            r"`beta` must have a shape that broadcasts to \(2, 5\), got \(3,\)",
        ),
        (
            {"value": torch.ones(2)},
            r"`value` must have a shape that broadcasts to \(2, 5, 3\), got \(2,\)",
        ),
    ],
)
def test_refused(options: dict[str, Any], sentence: str) -> None:
    stream = make({"value_channels": 3})
    with pytest.raises(ValueError, match=sentence), ddl.edit(stream, **options):
        stream(embeddings())
    assert all(residual.hooks == () for residual in stream.residuals)


def test_the_model_is_as_before_afterwards() -> None:
    stream, x = make({"value_channels": 2}), embeddings()
    before = stream(x)
    with ddl.edit(stream, beta=0.0):
        stream(x)
    assert torch.equal(stream(x), before)
    assert x.shape[-1] == D


@pytest.mark.parametrize("name", ["beta", "value"])
@pytest.mark.parametrize(
    ("given", "got"),
    [
        ("x", "'x'"),
        (1j, "1j"),
        ([[1.0, 2.0], [1.0]], r"\[\[1.0, 2.0\], \[1.0\]\]"),
        (torch.ones((), dtype=torch.complex64), "a tensor of torch.complex64 on cpu"),
        (torch.ones((), device="meta"), "a tensor of torch.float32 on meta"),
    ],
)
def test_what_is_no_number_is_refused(name: str, given: Any, got: str) -> None:
    with (
        pytest.raises(TypeError, match=f"^`{name}` must be real numbers, got {got}$"),
        ddl.edit(make({}), **{name: given}),
    ):
        pass


def test_numbers_are_as_exact_as_the_state() -> None:
    stream = make({})
    with (
        ddl.edit(stream, beta=0.1, value=0.3),
        ddl.record(stream, tokens=("beta", "value")) as seen,
    ):
        stream(embeddings())
    assert (seen.tokens("beta") == 0.1).all()
    assert (seen.tokens("value") == 0.3).all()


@pytest.mark.parametrize("tokens", [[], torch.tensor([]), slice(100, 200)])
def test_no_token_is_edited_if_none_is_named(tokens: Any) -> None:
    stream, x = make({}), embeddings()
    before = stream(x)
    with ddl.edit(stream, tokens=tokens, beta=0.0):
        assert torch.equal(stream(x), before)


def test_a_slice_may_run_backwards_and_a_number_may_be_numpys() -> None:
    stream, x = make({}), embeddings()
    with ddl.edit(stream, sublayers=1, beta=0.0):
        expected = stream(x)
    with ddl.edit(stream, sublayers=np.int64(1), tokens=slice(None, None, -1), beta=0.0):
        assert torch.equal(stream(x), expected)


def test_a_copy_made_inside_is_not_edited() -> None:
    stream, x = make({}), embeddings()
    before = stream(x)
    with ddl.edit(stream, beta=0.0):
        copied = copy.deepcopy(stream)
        pickle.dumps(stream.residuals[0])  # a hook cannot be pickled
    assert torch.equal(copied(x), before)
