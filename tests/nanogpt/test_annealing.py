"""A model of start="additive" is the additive one at first, then the blend, then a DDL model."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from ddl.nanogpt import DeferredRewrite, convert
from ddl.nanogpt.annealing import Annealing, blend
from ddl.results import Write
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.nanogpt_cases import (
    F64,
    OTHERS,
    VARIANTS,
    added,
    annealed,
    by_equations,
    make,
    same,
    tokens,
    variants,
)
from tests.support.nanogpt_standin import GPT
from tests.support.tolerances import assert_close

LATER: dict[str, dict[str, Any]] = {
    "write-only": {"value_channels": 3, "erase": "none"},
}
EVERY = VARIANTS | OTHERS | LATER | {"m4": {"value_channels": 4}}
every_variant = pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)


def trained(dtype: torch.dtype = torch.float32, **fields: Any) -> GPT:
    """A model with additions, far from its initialisation."""
    model = make(dtype, **fields)
    randomise_(model, std=0.7)
    return model


# --- step 0 --------------------------------------------------------------------------------------


@every_variant
def test_it_starts_as_the_additive_model(options: dict[str, Any]) -> None:
    """Logits and gradients of everything that was there, to float32 rounding."""
    original = trained()
    model = convert(copy.deepcopy(original), **options, start="additive", anneal_steps=10)
    named, expected = {}, {}
    for m, found in ((model, named), (original, expected)):
        found |= gradients(m(*tokens())[0], {}, m)
    assert_close("logits", model(*tokens())[0], original(*tokens())[0], torch.float32, depth=8)
    kept = {name: named[name] for name in expected}
    assert_same_gradients(kept, expected, torch.float32, depth=8)
    for name in added(model):
        learns = "compress" in name or "expand" in name
        assert bool(named[name].any()) == learns, name


@pytest.mark.parametrize("autocast", [False, True])
def test_with_one_channel_it_starts_to_the_bit(autocast: bool) -> None:
    """Also if the sublayers compute in bfloat16, while the stream is in float32."""
    original = trained()
    model = convert(copy.deepcopy(original), start="additive", anneal_steps=10)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(model(*tokens())[0], original(*tokens())[0])


@pytest.mark.parametrize("options", [VARIANTS["m1"], VARIANTS["cc-noec"]], ids=str)
def test_projections_that_are_zero(options: dict[str, Any]) -> None:
    """Then k = 0 and |k|² has no root with a derivative; the additive gradients are still right."""
    original = trained()
    for block in original.transformer.h:
        torch.nn.init.zeros_(block.attn.c_proj.weight)
        torch.nn.init.zeros_(block.mlp.c_proj.weight)
        torch.nn.init.zeros_(block.attn.c_proj.bias)
        torch.nn.init.zeros_(block.mlp.c_proj.bias)
    model = convert(copy.deepcopy(original), **options, start="additive", anneal_steps=10)
    assert_close("logits", model(*tokens())[0], original(*tokens())[0], torch.float32, depth=8)
    named, expected = (gradients(m(*tokens())[0], {}, m) for m in (model, original))
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", named[name], gradient, torch.float32, gradient=True)


# --- on the way ----------------------------------------------------------------------------------


def by_modules(model: GPT, idx: Tensor, a: float) -> Tensor:
    """The same for any options, from residuals called as modules."""
    t, H = model.transformer, list(model.transformer.h)
    X = H[0].expand(t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1]))))
    for block in H:
        for norm, sublayer, read, residual in (
            (block.ln_1, block.attn, block.read_attn, block.res_attn),
            (block.ln_2, block.mlp, block.read_mlp, block.res_mlp),
        ):
            x = read(X)
            written = sublayer(norm(x))
            rewritten = residual(X, written, context=norm(x), compressed=x)
            added = written if X.ndim == 3 else written[..., None]
            X = X + a * (rewritten - X) + (1 - a) * added
    return model.lm_head(t.ln_f(H[-1].readout(X)))


def compare(model: GPT, loop: Any) -> None:
    idx, targets = tokens()
    logits, expected = model(idx, targets)[0], loop(model, idx, 0.3)
    assert_close("logits", logits, expected, F64, depth=8)
    named, looped = (gradients(y, {}, model) for y in (logits, expected))
    assert_same_gradients(named, looped, F64, depth=8)


@variants
def test_the_blend_is_the_equation(options: dict[str, Any]) -> None:
    compare(annealed(options, 3, of=10), by_equations)


@pytest.mark.parametrize("options", (OTHERS | LATER).values(), ids=OTHERS | LATER)
def test_the_blend_of_other_options(options: dict[str, Any]) -> None:
    """Of several rewrites each has a share in its gate, which their sum does not show."""
    loop = by_equations if "rewrites" in options else by_modules
    compare(annealed(options, 3, of=10), loop)


@pytest.mark.parametrize("eps_k", [1e-5, 0.1])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_rounding(dtype: torch.dtype, share: float, eps_k: float) -> None:
    """The blend keeps its precision where β is tiny or 0, and where k is tiny, 0 or large."""
    state, k, v = normal(8, 9, 16, 3), normal(8, 9, 16), normal(8, 9, 3)
    k[:, 0], k[:, 1], k[:, 2] = 0, k[:, 1] * 1e-6, k[:, 2] * 1e3
    beta = normal(8, 9).sigmoid()
    beta[0], beta[1] = 0, 1e-7
    state, k = state.to(dtype), k.to(dtype)
    stored = F64 if dtype == F64 else torch.float32
    a = torch.tensor(share, dtype=stored)
    Y, write = blend(a, state, k, Write(k, v.to(stored), beta.to(stored), eps_k))
    assert (Y.dtype, write.value.dtype, write.gate.dtype) == (dtype, stored, stored)
    found = functional.write_to(Y, write)
    X, K = state.double(), k.double()
    rewritten = reference.rewrite(X, K, v.double(), beta.double(), eps_k=eps_k) - X
    expected = X + share * rewritten + (1 - share) * K[..., None]
    for t in range(9):  # one by one, since the scale of k = 1000 would hide the others
        assert_close(f"token {t}", found[:, t], expected[:, t], dtype, depth=2)


@variants
def test_autocast(options: dict[str, Any]) -> None:
    model, exact = (annealed(options, 3, of=10, dtype=t) for t in (torch.float32, F64))
    idx, targets = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(idx, targets)
    loss.backward()
    error = (logits.double() - exact(idx, targets)[0]).square().mean().sqrt()
    assert error < 8 * torch.finfo(torch.bfloat16).eps
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_states_in_bfloat16() -> None:
    """With stream_dtype the blended state keeps that dtype."""
    options = {"value_channels": 2, "stream_dtype": "bfloat16"}
    model = annealed(options, 3, of=10, dtype=torch.float32)
    seen = []
    for block in model.transformer.h[:-1]:
        block.register_forward_hook(lambda _, __, pending: seen.append(pending))
    with torch.autocast("cpu", torch.bfloat16):
        model(*tokens())
    assert [(type(p), p.state.dtype, p.chain) for p in seen] == [
        (DeferredRewrite, torch.bfloat16, None)
    ]


# --- at the end ----------------------------------------------------------------------------------


def plain(model: GPT, options: dict[str, Any]) -> GPT:
    """A model converted without `start`, with the same parameters."""
    twin = convert(make(**vars(model.config)), **options)
    state = model.state_dict()
    del state["transformer.h.0.anneal.step"]
    twin.load_state_dict(state)
    return twin


@every_variant
def test_in_the_end_it_is_the_converted_model_to_the_bit(options: dict[str, Any]) -> None:
    model = annealed(options, 10, of=10, dtype=torch.float32, dropout=0.2)
    assert same(model, plain(model, options))
    before = annealed(options, 9, of=10, dtype=torch.float32, dropout=0.2)
    assert not same(before, model)


@variants
def test_in_the_end_it_stores_as_little(options: dict[str, Any]) -> None:
    """The chain of rewrites is back, and nothing blends."""
    chains = []
    for step in (9, 10):
        model = annealed(options, step, of=10)
        hook = model.transformer.h[0].register_forward_hook(lambda _, __, p: chains.append(p))
        model(*tokens())
        hook.remove()
    way, end = chains
    assert (way.share.item(), way.chain) == (0.9, None)
    assert (end.share, end.chain is None) == (None, "value_channels" not in options)


def test_a_is_linear_in_the_steps_and_stays_at_one() -> None:
    annealing = Annealing(4)
    shares = []
    for _ in range(7):
        shares.append((annealing.share(F64).item(), annealing.done))
        annealing.advance()
    assert shares == [
        (0.0, False), (0.25, False), (0.5, False), (0.75, False), (1.0, True), (1.0, True),
        (1.0, True),
    ]  # fmt: skip
    assert annealing.step.item() == 4


# --- refused -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"start": "gpt2"}, "`start` must be \"additive\" or None, got 'gpt2'"),
    ({"start": "additive"}, "`anneal_steps` must be an integer of at least 1, got None"),
    (
        {"start": "additive", "anneal_steps": 0},
        "`anneal_steps` must be an integer of at least 1, got 0",
    ),
    (
        {"start": "additive", "anneal_steps": 1.5},
        "`anneal_steps` must be an integer of at least 1, got 1.5",
    ),
    (
        {"start": "additive", "anneal_steps": 5, "value_channels": 2, "read_init": 1.0},
        '`read_init` must be left out with start="additive", got 1.0',
    ),
    ({"anneal_steps": 5}, '`anneal_steps` must be left at None unless start="additive", got 5'),
]


@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_refused(options: dict[str, Any], sentence: str, disable: bool) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        convert(model, **options, disable=disable)
    assert type(model) is GPT
    assert same(model, make())
