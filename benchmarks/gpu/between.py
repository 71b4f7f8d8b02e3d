"""The step between two sublayers, in our operator and in those of other libraries.

Each reads a state of m = 4 value channels or streams of d features and a sublayer's output, and
gives the next state, the next sublayer's input and, but for the authors' code, the weights of the
next write. So all move the same bytes; `computes` in libraries.py says how the functions differ.
`exact` is the same in plain PyTorch, to which outputs and gradients are compared in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddl import functional, reference
from ddl.lab.bench import problems
from ddl.lab.bench.problems import Case, Operator, Problem, build
from ddl.lab.bench.traffic import moved
from ddl.models.streams.connected import map_of_streams
from ddl.models.streams.mhc import EPS, ITERATIONS, MAP_STD, sinkhorn

EPS_K = 1e-5
VALUE_SCALE = 4.0
NORM_EPS = 1e-5
JOIN = 2.0  # b = 2·sigmoid
# Inputs of all kernels here that have a row for each token. Scales: for `compare`; the gradients of
# mHC's three scales (in one tensor or in three) are judged by the size of the base's.
PER_TOKEN = (*problems.PER_TOKEN, "h", "output", "join", "mix")
MAP_SCALES = ("scale", "scale_read", "scale_join", "scale_mix")
SCALES = problems.SCALES | dict.fromkeys(MAP_SCALES, "base")

Outputs = tuple[Tensor, ...]


@dataclass
class Between:
    problem: Problem
    op: Operator
    exact: Operator


def ours(case: Case, device: torch.device, folder: str | None) -> Between:
    """Our operator with the published value, v = 4·sigmoid(W_v x + b_v)."""
    problem = build(case, device)
    problem.numbers |= {"eps_k": EPS_K, "value_scale": VALUE_SCALE, "value_from": "compressed"}
    return Between(problem, functional.rewrite_read, reference.rewrite_read)


def authors(case: Case, device: torch.device, folder: str | None) -> Between:
    """The authors' code, as DDL-gpt-mha-rope-CC-accelerated.py calls it."""
    if folder not in sys.path:
        sys.path.insert(0, str(folder))
    apply = import_module("model.DDL_utils").FusedDeepDeltaFunction.apply
    compressor = import_module("model.modules.ddl_shortconv").CcResidualShortConvCompressor
    config = SimpleNamespace(hidden_size=case.d, ddl_value_channels=case.m)
    compress = compressor(config, implementation="triton_required", module_name="benchmarks/gpu")
    norm = import_module("model.modules.rmsnorm").RMSNorm(case.d)
    for module in (compress, norm):
        module.to(device, case.state)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)

    def op(state: Tensor, direction: Tensor, x: Tensor, h: Tensor, **parameters: Tensor) -> Outputs:
        linears = (parameters[name] for name in LINEARS)
        state = apply(state, direction, x, h, *linears, EPS_K, VALUE_SCALE)
        x = compress(state)
        return state, x, norm(x)

    given = build(case, device).inputs
    inputs = {name: given[name] for name in ("state", "direction")}
    inputs |= {name: drawn(given["direction"].shape, given["state"]) for name in ("x", "h")}
    inputs |= {name: given[name] for name in LINEARS}
    inputs["gate_weight"], inputs["gate_bias"] = (  # of nn.Linear(d, 1)
        given[name].detach().unsqueeze(0).requires_grad_() for name in ("gate_weight", "gate_bias")
    )
    inputs |= {"taps": compress.weight, "read": compress.read, "norm_weight": norm.weight}
    return Between(same_bytes(case, inputs), op, published)


LINEARS = ("value_weight", "value_bias", "gate_weight", "gate_bias")


def published(
    state: Tensor, direction: Tensor, x: Tensor, h: Tensor, *, taps: Tensor, read: Tensor,
    norm_weight: Tensor, **linears: Tensor,
) -> Outputs:  # fmt: skip
    """The authors' function: value and gate of x and h, the rewrite, then its channel read."""
    value_weight, value_bias, gate_weight, gate_bias = (linears[name] for name in LINEARS)
    value = VALUE_SCALE * torch.sigmoid(nn.functional.linear(x, value_weight, value_bias))
    gate = 2 * torch.sigmoid(nn.functional.linear(h, gate_weight, gate_bias)).squeeze(-1)
    state = reference.rewrite(state, direction, value, gate, eps_k=EPS_K)
    m, before = len(read), (taps.shape[1] - 1) // 2  # "same" padding over the channels
    padded = nn.functional.pad(taps, (m, m))
    rows = [padded[:, m + before - out : 2 * m + before - out] for out in range(m)]  # of (d, m)
    compress = sum(weight * row for weight, row in zip(read, rows, strict=True))
    x = (state * compress).sum(-1)
    found = reference.read(state, compress=compress, norm_weight=norm_weight, norm_eps=NORM_EPS)
    return state, x, found.context


def tile_kernels(case: Case, device: torch.device, folder: str | None) -> Between:
    """DeepSeek's kernels. `mhc_pre` fuses more where no gradients are asked for."""
    pre = import_module("tile_kernels.modeling.mhc").mhc_pre
    post = import_module("tile_kernels.modeling.mhc.ops").mhc_post
    numbers = {"norm_eps": EPS, "pre_eps": EPS, "sinkhorn_eps": EPS, "sinkhorn_repeat": ITERATIONS}

    def op(
        state: Tensor, output: Tensor, join: Tensor, mix: Tensor, weight: Tensor, base: Tensor,
        scale: Tensor,
    ) -> Outputs:  # fmt: skip
        state = post(output, state, join, mix)
        x, weights = pre(
            state, weight, scale, base, mhc_mult=case.m, post_mult_value=JOIN, **numbers
        )
        return NextPost.apply(state), x, *weights

    def exact(
        state: Tensor, output: Tensor, join: Tensor, mix: Tensor, weight: Tensor, base: Tensor,
        scale: Tensor,
    ) -> Outputs:  # fmt: skip
        joined = join.squeeze(-1)
        state, x, join, mix = connection(state, output, joined, mix.mT, weight, base, scale)
        return state, x, join.unsqueeze(-1), mix

    inputs = streams(case, device)
    inputs["join"] = inputs["join"].detach().unsqueeze(-1).requires_grad_()
    inputs["scale"] = torch.ones(3, device=device, requires_grad=True)
    return Between(same_bytes(case, inputs), op, exact)


class NextPost(torch.autograd.Function):
    """Stands for the next sublayer's `mhc_post`, whose backward leaves its gradient on the storage.

    `mhc_pre`'s backward finds it there, adds its own in place and gives autograd none. Nodes made
    last run first, so this one has run by then.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        ctx.save_for_backward(state)
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (state,) = ctx.saved_tensors
        state.untyped_storage().grad_from_mhc_post = gradient
        return gradient


def liger(case: Case, device: torch.device, folder: str | None) -> Between:
    """Liger's three functions, with the map in bfloat16 for its tensor cores."""
    library = import_module("liger_kernel.transformers.functional")
    numbers = {"tmax": ITERATIONS, "rms_eps": EPS, "pre_eps": EPS, "sinkhorn_eps": EPS}

    def op(
        state: Tensor, output: Tensor, join: Tensor, mix: Tensor, weight: Tensor, base: Tensor,
        **scales: Tensor,
    ) -> Outputs:  # fmt: skip
        state = library.liger_mhc_post_res(state, output, join, mix)
        read, join, mix = library.liger_mhc_coeffs(
            state, weight, base, *scales.values(), post_mult=JOIN, **numbers
        )
        return state, library.liger_mhc_pre(state, read), join, mix

    def exact(
        state: Tensor, output: Tensor, join: Tensor, mix: Tensor, weight: Tensor, base: Tensor,
        **scales: Tensor,
    ) -> Outputs:  # fmt: skip
        scale = torch.stack(list(scales.values()))
        return connection(state, output, join, mix, weight.mT, base, scale)

    inputs = streams(case, device)
    weight = inputs["weight"].detach().mT.to(case.state, memory_format=torch.contiguous_format)
    inputs["weight"] = weight.requires_grad_()
    for name in ("scale_read", "scale_join", "scale_mix"):
        inputs[name] = torch.ones((), device=device, requires_grad=True)
    return Between(same_bytes(case, inputs), op, exact)


def connection(
    state: Tensor, output: Tensor, join: Tensor, mix: Tensor, weight: Tensor, base: Tensor,
    scale: Tensor,
) -> Outputs:  # fmt: skip
    """ddl.models.streams.mhc from one write to the next: X' = mix X + b fᵀ, x = X'ᵀ a, b', M'."""
    state = mix @ state + join.unsqueeze(-1) * output.unsqueeze(-2)
    m = state.shape[-2]
    sizes = torch.tensor([m, m, m * m], device=scale.device)
    z = map_of_streams(state, weight, EPS) * scale.repeat_interleave(sizes) + base
    reads, joins, mixes = z.split([m, m, m * m], -1)
    x = ((torch.sigmoid(reads) + EPS).unsqueeze(-1) * state).sum(-2)
    mixes = sinkhorn(torch.softmax(torch.unflatten(mixes, -1, (m, m)), -1) + EPS)
    return state, x, JOIN * torch.sigmoid(joins), mixes


def streams(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The arguments of mHC without its scales. The weights of writes and the map are float32."""
    m, d, tokens = case.m, case.d, (case.batch, case.time)
    wide = torch.empty((), device=device)
    narrow = wide.to(case.state)
    return {
        "state": drawn((*tokens, m, d), narrow),
        "output": drawn((*tokens, d), narrow),
        "join": drawn((*tokens, m), wide),
        "mix": drawn((*tokens, m, m), wide).detach().softmax(-1).requires_grad_(),
        "weight": drawn((m * (m + 2), m * d), wide, MAP_STD),
        "base": drawn((m * (m + 2),), wide),
    }


def drawn(shape: tuple[int, ...], like: Tensor, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=like.device, dtype=like.dtype).mul_(scale).requires_grad_()


def same_bytes(case: Case, inputs: dict[str, Tensor]) -> Problem:
    return Problem(inputs, {}, *bytes_of(case), inputs["state"], PER_TOKEN, SCALES)


def bytes_of(case: Case) -> tuple[int, int]:
    """The bytes that all of them must move, forward and backward."""
    element = {"state": case.state.itemsize, "features": case.features.itemsize}
    per_feature = moved(case.op, case.form, case.m, rewrites=1, **element)
    forward, backward = (case.batch * case.time * case.d * count for count in per_feature)
    return forward, backward


BETWEEN: dict[str, Callable[[Case, torch.device, str | None], Between]] = {
    "ours": ours,
    "authors": authors,
    "tile-kernels": tile_kernels,
    "liger-kernel": liger,
}
