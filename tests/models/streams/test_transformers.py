"""The streams of production models against the modules that transformers ships.

A layer of theirs, with linear maps for attention and MLP, and their last read, have the weights of
ours: states, reads and gradients agree, in float64 with their own casts to float32 made casts to
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ddl.lab.config import GPTConfig
from ddl.models.streams.connected import ConnectedStream
from ddl.models.sublayers import NORM_EPS
from ddl.models.trunk import make_trunk
from ddl.nn.additions import Addition
from tests.support.helpers import normal, randomise_

B, T, D, N, RANK = 2, 3, 10, 4, 3
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-10}


class Theirs(NamedTuple):
    """layer: a decoder layer of two sublayers. run: calls it with X. end: X to the final read.

    names: our parameter → theirs. shift: what theirs lack of ours.
    """

    layer: nn.Module
    run: Callable[[Tensor], Tensor]
    end: nn.ModuleList
    names: dict[str, str]
    shift: dict[str, float]


class Returns(nn.Module):
    """A sublayer of theirs: a linear map, whose result they expect among others."""

    def __init__(self, others: int, argument: str | None = None) -> None:
        super().__init__()
        self.map = nn.Linear(D, D, bias=False)
        self.others, self.argument = others, argument

    def forward(self, x: Tensor | None = None, *_: Any, **given: Any) -> Any:
        out = self.map(x if self.argument is None else given[self.argument])
        return (out, *[None] * self.others) if self.others else out


def empty(kind: type[nn.Module], **parts: Any) -> nn.Module:
    """A module of theirs with these parts alone, which its `forward` uses."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def their(model: str, *names: str) -> list[Any]:
    home = f"transformers.models.{model}.modeling_{model}"
    module = pytest.importorskip(home, reason=f"transformers without {model}")
    return [getattr(module, name) for name in names]


CONFIG = SimpleNamespace(
    hidden_size=D,
    rms_norm_eps=NORM_EPS,
    **{"hc_mult": N, "hc_count": N, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20},
    **{"hc_magnitude": 2.0, "hc_lowrank": RANK},
)
NORMS = {
    "norms.0.weight": "layer.input_layernorm.weight",
    "norms.1.weight": "layer.post_attention_layernorm.weight",
    "head.map": "end.0.hc_fn",
    "head.base": "end.0.hc_base",
    "head.scale": "end.0.hc_scale",
    "readout.weight": "end.1.weight",
}
CONNECTIONS = {
    f"connections.{i}.{ours}": f"layer.{place}.{theirs}"
    for i, place in enumerate(("attn_hc", "ffn_hc"))
    for ours, theirs in {"map": "fn", "base": "base", "scale": "scale"}.items()
}


def connected(prefix: str, model: str, attention: Returns) -> Theirs:
    """DeepSeek-V4 and HY-V4, whose modules have the same names."""
    names = ("DecoderLayer", "HyperConnection", "HyperHead")
    layer, connection, head = their(model, *(prefix + name for name in names))
    made = empty(
        layer,
        self_attn=attention,
        mlp=Returns(0),
        input_layernorm=nn.RMSNorm(D, NORM_EPS),
        post_attention_layernorm=nn.RMSNorm(D, NORM_EPS),
        attn_hc=connection(CONFIG),
        ffn_hc=connection(CONFIG),
    )

    def run(state: Tensor) -> Tensor:
        out = layer.forward(made, state)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    end = nn.ModuleList([head(CONFIG), nn.RMSNorm(D, NORM_EPS)])
    return Theirs(made, run, end, NORMS | CONNECTIONS, {})


def gated() -> Theirs:
    names = ("Qwen4ExpTextDecoderLayer", "Qwen4ExpTextGatedResidual")
    layer, connection = their("qwen4_exp", *names)
    made = empty(
        layer,
        self_attn=Returns(1),
        mlp=Returns(0),
        ple=None,
        attn_hyper_connection=connection(CONFIG),
        mlp_hyper_connection=connection(CONFIG),
    )
    made.layer_type = "full_attention"

    def run(state: Tensor) -> Tensor:
        out: Tensor = layer.forward(made, state.flatten(-2), position_embeddings=None)
        return out.unflatten(-1, (N, D))

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = connection(CONFIG, use_combine=False)

        def forward(self, state: Tensor) -> Any:
            return self.read(state.flatten(-2))

    places = {
        "connections.0.read.": "layer.attn_hyper_connection.",
        "connections.1.read.": "layer.mlp_hyper_connection.",
        "head.": "end.0.read.",
    }
    parts = {
        "norm_weight": "hc_norm.weight",
        "down.weight": "input_mix_weight_down.weight",
        "up.weight": "input_mix_weight_up.weight",
    }
    names_of = {o + part: t + of for o, t in places.items() for part, of in parts.items()}
    names_of |= {
        "connections.0.join_map.weight": "layer.attn_hyper_connection.block_inject_weight.weight",
        "connections.1.join_map.weight": "layer.mlp_hyper_connection.block_inject_weight.weight",
    }
    shift = {name: 1.0 for name in names_of if name.endswith("norm_weight")}
    return Theirs(made, run, nn.ModuleList([Flat()]), names_of, shift)


STREAMS: dict[str, Callable[[], Theirs]] = {
    "mhc": lambda: connected("DeepseekV4", "deepseek_v4", Returns(1)),
    "independent-hc": lambda: connected("HYV4", "hy_v4", Returns(2, "hidden_states")),
    "gated": gated,
}


def ours(residual: Any) -> ConnectedStream:
    config = GPTConfig(
        residual,
        num_layers=1,
        num_heads=1,
        hidden_size=D,
        value_channels=N,
        gated_rank=RANK if residual == "gated" else None,
    )
    sublayers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(2))
    stream = make_trunk(config, sublayers)
    assert isinstance(stream, ConnectedStream)
    randomise_(stream, std=0.8)
    return stream


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("residual", STREAMS)
def test_states_reads_and_gradients_are_theirs(
    residual: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    theirs, stream = STREAMS[residual](), ours(residual).to(dtype)
    whole = nn.ModuleDict({"layer": theirs.layer, "end": theirs.end}).to(dtype)
    names = theirs.names | {
        "sublayers.0.weight": "layer.self_attn.map.weight",
        "sublayers.1.weight": "layer.mlp.map.weight",
    }
    there, here = dict(whole.named_parameters()), dict(stream.named_parameters())
    assert set(names) == set(here)
    assert set(names.values()) == set(there)
    with torch.no_grad():
        for name, other in names.items():
            there[other].copy_(here[name] - theirs.shift.get(name, 0.0))

    x = normal(B, T, D, dtype=dtype).requires_grad_()
    state = theirs.run(x.unsqueeze(-2).expand(B, T, N, D).contiguous())
    expected = state
    for part in theirs.end:
        expected = part(expected)
    seen: list[Addition] = []
    stream.hooks = (seen.append,)
    found = stream(x)

    tolerance = TOLERANCES[dtype]
    close(seen[1].after().transpose(-1, -2), state, tolerance, "the state")
    close(found, expected, tolerance, "the last read")
    cotangent = normal(B, T, D, seed=3, dtype=dtype)
    parameters = [x, *(there[name] for name in names.values())]
    wanted = torch.autograd.grad(expected, parameters, cotangent)
    got = torch.autograd.grad(found, [x, *(here[name] for name in names)], cotangent)
    largest = max(other.abs().max().item() for other in wanted)
    for name, one, other in zip(["x", *names], got, wanted, strict=True):
        # In float32 the sums of small gradients cancel: what is rounded are their large terms.
        close(one, other, tolerance, name, largest if dtype == torch.float32 else None)


def close(
    found: Tensor, expected: Tensor, tolerance: float, name: str, scale: float | None = None
) -> None:
    """Within a tolerance of the scale, without one of the largest number."""
    own = expected.detach().abs().max().item()
    assert own > 1e-3, name
    atol = tolerance * (own if scale is None else scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("model", "config", "constants"),
    [
        (
            "deepseek_v4",
            "DeepseekV4Config",
            {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "hc_mult": 4},
        ),
        ("hy_v4", "HYV4Config", {"hc_magnitude": 2.0, "hc_eps": 1e-6}),
        ("qwen4_exp", "Qwen4ExpTextConfig", {"hc_lowrank": 320}),
    ],
)
def test_constants_are_those_that_ship(
    model: str, config: str, constants: dict[str, float]
) -> None:
    home = f"transformers.models.{model}.configuration_{model}"
    module = pytest.importorskip(home, reason=f"transformers without {model}")
    shipped = getattr(module, config)()
    assert {name: getattr(shipped, name) for name in constants} == constants
