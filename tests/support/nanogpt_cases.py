"""Converted models, for the tests of `ddl.nanogpt`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import reference
from ddl.nanogpt import convert
from tests.support.helpers import randomise_
from tests.support.nanogpt_standin import GPT, GPTConfig

F64 = torch.float64
B, T = 2, 9

VARIANTS: dict[str, dict[str, Any]] = {
    "m1": {},
    "cc": {"value_channels": 3, "expand": "conv"},
    "cc-noec": {"value_channels": 3},
    "tc": {"value_channels": 3, "compress": "token", "expand": "conv"},
    "tc-noec": {"value_channels": 2, "compress": "token", "kernel_size": 3},
}
OTHERS: dict[str, dict[str, Any]] = {
    "m1-conv": {"expand": "conv", "expand_kernel_size": 2},
    "m1-channel": {"compress": "channel"},
    "m1-token": {"compress": "token", "kernel_size": 3},
    "factored": {"value_channels": 3, "compress": "token", "compress_parameterization": "factored"},
    "shared-by-all": {"value_channels": 2, "sublayers_per_compressor": 4},
    "shared-by-none": {"value_channels": 2, "sublayers_per_compressor": 1},
    "papers-code": {"value": "sigmoid", "value_from": "compressed", "eps_k": 1e-5},
    "wide": {"value_channels": 2, "gate": "mlp", "gate_hidden": 3, "value_from": "compressed"},
    "constant": {"value_channels": 2, "value": "constant"},
    "v-map": {"value_channels": 2, "mapping": "v"},
    "two-rewrites": {"value_channels": 2, "rewrites": 2},
    "branches": {
        "value_channels": 2,
        "expand": "conv",  # equal channels would all get the same attention weight
        "mapping": "v",
        "direction": "attention",
        "direction_hidden": 3,
        "gate_from": "convolved",
        "gate_kernel_size": 3,
    },
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def make(dtype: torch.dtype = torch.float32, **fields: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**fields)).to(dtype)


def make_delta(options: dict[str, Any], dtype: torch.dtype = F64, **fields: Any) -> GPT:
    """A converted model with every parameter random."""
    model = convert(make(dtype, **fields), **options)
    randomise_(model, std=0.7)
    return model


def annealed(
    options: dict[str, Any], step: int, *, of: int, dtype: torch.dtype = F64, **fields: Any
) -> GPT:
    """A model of start="additive" after `step` steps, with every parameter random."""
    model = make_delta({**options, "start": "additive", "anneal_steps": of}, dtype, **fields)
    for _ in range(step):
        model.transformer.h[0].anneal.advance()
    return model


def tokens(seed: int = 0, time: int = T) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(64, (2, B, time), generator=g))


def added(model: GPT) -> dict[str, nn.Parameter]:
    """The parameters that conversion added to nanoGPT's."""
    own = make(**vars(model.config)).state_dict().keys()
    return {name: p for name, p in model.named_parameters() if name not in own}


def same(a: GPT, b: GPT) -> bool:
    """Return whether loss, gradients and logits are equal, with dropout and at inference."""
    results = []
    for model in (a, b):
        torch.manual_seed(1)
        logits, loss = model.train()(*tokens())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results.append([logits, loss, *grads, model.eval()(tokens()[0])[0]])
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def groups(model: GPT, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    names = {p: name for name, p in model.named_parameters()}
    listed = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert sum(map(len, listed)) == len(set().union(*listed))  # no duplicates
    return [set(group) for group in listed]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    torch.manual_seed(seed)
    _, loss = model(*tokens(seed))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def by_equations(model: GPT, idx: Tensor, a: float = 1.0) -> Tensor:
    """Logits of every position from the papers' formulas, with linear gates and values.

    a: the share of the rewrites in an annealed model.
    """
    t, H = model.transformer, list(model.transformer.h)
    x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1])))
    X = reference.expand(x, H[0].expand.weight, value_channels=H[0].expand.value_channels)
    for block in H:
        w = block.read_attn.compress_weight  # shared by both sublayers
        for norm, sublayer, residual in (
            (block.ln_1, block.attn, block.res_attn),
            (block.ln_2, block.mlp, block.res_mlp),
        ):
            h = norm(reference.read(X, compress=w, norm_eps=None).context)
            written, gate, value = sublayer(h), residual.gate, residual.value
            values = (h @ value.weight.mT + value.bias).chunk(residual.rewrites, -1)
            betas = (2 * torch.sigmoid(h @ gate.weight.mT + gate.bias)).split(1, -1)
            further = [] if residual.further is None else residual.further(written).unbind(-2)[1:]
            for k, v, beta in zip([written, *further], values, betas, strict=True):
                k_hat = k / (k.square().sum(-1, keepdim=True) + residual.eps_k**2).sqrt()
                p = torch.einsum("btd,btdm->btm", k_hat, X)
                X = X + a * (beta * k_hat)[..., None] * (v - p)[..., None, :]
            X = X + (1 - a) * written[..., None]
    w = H[-1].readout.compress_weight
    return model.lm_head(t.ln_f(reference.read(X, compress=w, norm_eps=None).context))
