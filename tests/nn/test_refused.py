"""The modules raise for invalid arguments, with messages that name the caller's arguments."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaResidual, DeltaStream, Expand, Read

zeros = torch.zeros
F32_OR_HALF = "torch.float32 or torch.bfloat16 or torch.float16"
ANY = "float32, float64, bfloat16 or float16"
COUNT = "must be an integer of at least 1"
COMPRESS = '`compress` must be "identity" or "channel" or "token"'


def one_sublayer(**options: Any) -> DeltaStream:
    return DeltaStream(8, [nn.Identity()], **options)


# --- options --------------------------------------------------------------------------------------

RESIDUAL_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 0}, f"`hidden_size` {COUNT}, got 0"),
    ({"value_init": float("inf")}, "`value_init` must be a finite number, got inf"),
    ({"value_channels": 1.5}, f"`value_channels` {COUNT}, got 1.5"),
    *(
        ({"hidden_size": bad}, f"`hidden_size` {COUNT}, got {bad!r}")
        for bad in (np.bool_(True), np.float64(4), torch.tensor(4))
    ),
    ({"hidden_size": 2**63}, f"`hidden_size` must be at most {2**63 - 1}, got {2**63}"),
    ({"value_constant": 10**400}, f"`value_constant` must be a finite number, got {10**400}"),
    ({"gate_hidden": -1}, f"`gate_hidden` {COUNT}, got -1"),
    ({"mapping": "q"}, '`mapping` must be "k" or "v", got \'q\''),
    ({"gate_kernel_size": 0}, f"`gate_kernel_size` {COUNT}, got 0"),
    ({"direction_hidden": 0.5}, f"`direction_hidden` {COUNT}, got 0.5"),
    (
        {"gate_from": "state"},
        '`gate_from` must be "context" or "pooled" or "convolved" or "flatten", got \'state\'',
    ),
    (
        {"direction": "mlp"},
        '`direction` must be "linear" or "mean" or "flatten" or "attention", got \'mlp\'',
    ),
    (
        {"mapping": "v", "direction": "attention"},
        '`direction` must be "linear", "mean" or "flatten" with 1 value channel, got "attention"',
    ),
    ({"gate": "deep"}, '`gate` must be "linear" or "mlp", got \'deep\''),
    ({"value": "tanh"}, '`value` must be "linear" or "sigmoid" or "constant", got \'tanh\''),
    ({"value_from": "x"}, '`value_from` must be "context" or "compressed", got \'x\''),
    ({"value_scale": 0.0}, "`value_scale` must be a positive finite number, got 0.0"),
    ({"eps_k": 0.0}, "`eps_k` must be a positive finite number, got 0.0"),
    ({"eps_k": math.nan}, "`eps_k` must be a positive finite number, got nan"),
    ({"value_constant": math.inf}, "`value_constant` must be a finite number, got inf"),
    ({"beta_init": -0.1}, "`beta_init` must be between 0 and 2, got -0.1"),
    ({"beta_init": 2.1}, "`beta_init` must be between 0 and 2, got 2.1"),
    ({"beta_init": math.nan}, "`beta_init` must be between 0 and 2, got nan"),
    ({"beta_init": "1"}, "`beta_init` must be between 0 and 2, got '1'"),
    (
        {"mapping": "v", "value": "constant"},
        '`value` must be "linear" or "sigmoid" with mapping="v", got "constant"',
    ),
    ({"eps_k": 1e-19}, "`eps_k` must be at least 1e-18, got 1e-19"),
]


@pytest.mark.parametrize(("options", "sentence"), RESIDUAL_OPTIONS)
def test_residual_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        DeltaResidual(**{"hidden_size": 8, **options})


RESIDUAL_SHAPES: list[tuple[dict[str, tuple[int, ...]], str]] = [
    ({"x": (2, 5, 7)}, "`x` must have shape (…, 7, 3), got (2, 5, 7)"),
    ({"x": (2, 5, 7, 4)}, "`x` must have shape (…, 7, 3), got (2, 5, 7, 4)"),
    ({"x": (3,)}, "`x` must have shape (…, 7, 3), got (3,)"),
    ({"sublayer_out": (2, 5, 8)}, "`sublayer_out` must have shape (2, 5, 7), got (2, 5, 8)"),
    ({"sublayer_out": (2, 4, 7)}, "`sublayer_out` must have shape (2, 5, 7), got (2, 4, 7)"),
    ({"context": (2, 5, 8)}, "`context` must have shape (2, 5, 7), got (2, 5, 8)"),
    ({"context": (1, 5, 7)}, "`context` must have shape (2, 5, 7), got (1, 5, 7)"),
    ({"compressed": (2, 7)}, "`compressed` must have shape (2, 5, 7), got (2, 7)"),
]


@pytest.mark.parametrize(("change", "sentence"), RESIDUAL_SHAPES)
@pytest.mark.parametrize("mapping", ["k", "v"])
def test_residual_shapes(change: dict[str, tuple[int, ...]], sentence: str, mapping: str) -> None:
    shapes = {"x": (2, 5, 7, 3), **dict.fromkeys(("sublayer_out", "context"), (2, 5, 7)), **change}
    module = DeltaResidual(7, 3, mapping=mapping)
    inputs = {name: zeros(shape) for name, shape in {"compressed": (2, 5, 7), **shapes}.items()}
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        module(**inputs)


RESIDUAL_KINDS: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, "`x` must be a torch.Tensor, got NoneType"),
    ({"sublayer_out": (zeros(2, 7), None)}, "`sublayer_out` must be a torch.Tensor, got tuple"),
    ({"context": 1.0}, "`context` must be a torch.Tensor, got float"),
    ({"compressed": [0.0]}, "`compressed` must be a torch.Tensor, got list"),
    ({"x": zeros(2, 7, 3, dtype=torch.int64)}, f"`x` must have dtype {ANY}, got torch.int64"),
    (
        {"sublayer_out": zeros(2, 7, dtype=torch.float64)},
        f"`sublayer_out` must have dtype {F32_OR_HALF}, got torch.float64",
    ),
    (
        {"context": zeros(2, 7, dtype=torch.float64)},
        f"`context` must have dtype {F32_OR_HALF}, got torch.float64",
    ),
    (
        {"compressed": zeros(2, 7, dtype=torch.bool)},
        f"`compressed` must have dtype {ANY}, got torch.bool",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), RESIDUAL_KINDS)
def test_residual_kinds(change: dict[str, Any], sentence: str) -> None:
    inputs = {"x": zeros(2, 7, 3), **dict.fromkeys(("sublayer_out", "context"), zeros(2, 7))}
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        DeltaResidual(7, 3)(**{**inputs, **change})


@pytest.mark.parametrize("name", ["sublayer_out", "context", "compressed"])
def test_residual_devices(name: str) -> None:
    inputs = {"x": zeros(2, 7, 3), **dict.fromkeys(("sublayer_out", "context"), zeros(2, 7))}
    with pytest.raises(ValueError, match=f"^`{name}` must be on cpu, got a tensor on meta$"):
        DeltaResidual(7, 3)(**{**inputs, name: zeros(2, 7, device="meta")})


def test_a_scalar_state_of_another_width() -> None:
    h = zeros(2, 7)
    sentence = "`x` must have shape (…, 7), got (2, 8)"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        DeltaResidual(7)(zeros(2, 8), h, context=h)


@pytest.mark.parametrize("m", [1, 3])
def test_the_raw_read_is_asked_for(m: int) -> None:
    """The raw read is needed for m = 1, too: the read may compress over tokens."""
    x, h = zeros(2, 7) if m == 1 else zeros(2, 7, m), zeros(2, 7)
    sentence = (
        '`compressed` must be the raw read, of shape (2, 7), with value_from="compressed", got '
        "None: `read(x, return_compressed=True)` returns it, and where the context is the norm of "
        "x itself it is x"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        DeltaResidual(7, m, value_from="compressed")(x, h, context=h)


STREAM: list[tuple[Any, str]] = [
    (
        lambda: Read(8, 4),
        '`compress` must be "channel" or "token" for 4 value channels, got "identity"',
    ),
    (lambda: Read(8, 4, compress="conv"), f"{COMPRESS}, got 'conv'"),
    (
        lambda: Read(8, compress_parameterization="low-rank"),
        '`compress_parameterization` must be "direct" or "factored", got \'low-rank\'',
    ),
    (lambda: Read(8, norm_eps=-1.0), "`norm_eps` must be a positive finite number, got -1.0"),
    (lambda: Read(8, norm_affine=1), "`norm_affine` must be True or False, got 1"),
    (
        lambda: Read(8, norm_eps=None, norm_affine=False),
        "`norm_affine` must be left at True with norm_eps=None, got False",
    ),
    (lambda: Read(8, 4, compress="token", kernel_size=0), f"`kernel_size` {COUNT}, got 0"),
    (
        lambda: Read(8, 4, compress="channel", shared=Read(8, 2, compress="channel")),
        "`shared` must be a Read with hidden_size=8, value_channels=4, compress='channel', got "
        "Read(hidden_size=8, value_channels=2, compress='channel')",
    ),
    (
        lambda: Read(8, 4, compress="token", shared=Read(8, 4, compress="channel")),
        "`shared` must be a Read with hidden_size=8, value_channels=4, compress='token', got "
        "Read(hidden_size=8, value_channels=4, compress='channel')",
    ),
    (
        lambda: Read(8, shared=Read(9)),
        "`shared` must be a Read with hidden_size=8, value_channels=1, compress='identity', got "
        "Read(hidden_size=9)",
    ),
    (
        lambda: Read(8, shared=nn.Linear(8, 8)),
        "`shared` must be a Read with hidden_size=8, value_channels=1, compress='identity', got "
        "Linear(in_features=8, out_features=8, bias=True)",
    ),
    (lambda: Read(0), f"`hidden_size` {COUNT}, got 0"),
    (lambda: Read(8, 0), f"`value_channels` {COUNT}, got 0"),
    (lambda: Expand(True), f"`hidden_size` {COUNT}, got True"),
    (lambda: Expand(8, -1), f"`value_channels` {COUNT}, got -1"),
    (lambda: Expand(8, 4, kernel_size=0), f"`kernel_size` {COUNT}, got 0"),
    (lambda: Expand(8, 4, kind="tile"), '`kind` must be "repeat" or "conv", got \'tile\''),
    (lambda: one_sublayer(compress=""), f"{COMPRESS}, got ''"),
    (lambda: one_sublayer(value_channels=2, compress="conv"), f"{COMPRESS}, got 'conv'"),
    (lambda: Read(8, norm_eps=1e-37), "`norm_eps` must be at least 1e-36, got 1e-37"),
    (lambda: DeltaStream(8, []), "`sublayers` must hold at least one module, got none"),
    (lambda: one_sublayer(expand="tile"), '`expand` must be "repeat" or "conv", got \'tile\''),
    (lambda: one_sublayer(expand_kernel_size=0), f"`expand_kernel_size` {COUNT}, got 0"),
    (
        lambda: one_sublayer(sublayers_per_compressor=0),
        f"`sublayers_per_compressor` {COUNT}, got 0",
    ),
    (
        lambda: Read(8, 4, compress="channel")(zeros(2, 3, 8)),
        "`state` must have shape (…, 8, 4), got (2, 3, 8)",
    ),
    (lambda: Read(8)(zeros(2, 3, 9)), "`state` must have shape (…, 8), got (2, 3, 9)"),
    (
        lambda: Read(8, 4, compress="token")(zeros(8, 4)),
        "`state` must have shape (…, time, hidden_size, value_channels), got (8, 4)",
    ),
    (
        lambda: Read(8, compress="token")(zeros(8)),
        "`state` must have shape (…, time, hidden_size), got (8,)",
    ),
    (
        lambda: Expand(8, 4, kind="conv")(zeros(8)),
        "`x` must have shape (…, time, hidden_size), got (8,)",
    ),
    (lambda: one_sublayer()(zeros(8)), "`x` must have shape (…, time, hidden_size), got (8,)"),
    (lambda: Expand(8, 4)(zeros(2, 3, 9)), "`x` must have shape (…, 8), got (2, 3, 9)"),
    (lambda: one_sublayer()(zeros(2, 3, 9)), "`x` must have shape (…, 8), got (2, 3, 9)"),
    (
        lambda: DeltaStream(8, [nn.Identity(), nn.Linear(8, 9)])(zeros(2, 3, 8)),
        "`sublayers[1]` must return shape (2, 3, 8), got (2, 3, 9)",
    ),
]


@pytest.mark.parametrize(("build", "sentence"), STREAM, ids=[s.split("`")[1] for _, s in STREAM])
def test_read_expand_and_stream(build: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        build()


class Returns(nn.Module):
    """A sublayer whose output is not a tensor like its context."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, h: Tensor) -> Any:
        return self.change(h)


KINDS: list[tuple[Any, str]] = [
    (
        lambda: DeltaStream(8, nn.Linear(8, 8)),
        "`sublayers` must be a sequence of modules, got Linear",
    ),
    (
        lambda: DeltaStream(8, nn.Sequential(nn.Linear(8, 8), nn.Tanh())),
        "`sublayers` must be a sequence of modules, got Sequential",
    ),
    (
        lambda: one_sublayer(value_chanels=4),
        "`value_chanels` must be an option of DeltaStream or of DeltaResidual, got an unknown one: "
        "did you mean `value_channels`?",
    ),
    (
        lambda: one_sublayer(zzz=4),
        "`zzz` must be an option of DeltaStream or of DeltaResidual, got an unknown one: it has "
        "value_channels, compress, kernel_size, compress_parameterization, causal, read_init, "
        "norm_eps, "
        "norm_affine, "
        "expand, expand_kernel_size, sublayers_per_compressor, anchor_every, stream_dtype, "
        "mapping, gate, gate_hidden, gate_from, gate_kernel_size, direction, direction_hidden, "
        "value, value_init, value_scale, value_constant, value_from, rewrites, direction_rank, "
        "beta_init, erase, branch_scale, eps_k, device, dtype",
    ),
    (
        lambda: DeltaStream(8, [Returns(lambda h: (h, None))])(zeros(2, 3, 8)),
        "`sublayers[0]` must return a torch.Tensor, got tuple",
    ),
    (
        lambda: DeltaStream(8, [nn.Identity(), Returns(lambda h: None)])(zeros(2, 3, 8)),
        "`sublayers[1]` must return a torch.Tensor, got NoneType",
    ),
    (
        lambda: DeltaStream(8, [Returns(lambda h: h.double())])(zeros(2, 3, 8)),
        f"`sublayers[0]` must have dtype {F32_OR_HALF}, got torch.float64",
    ),
    (
        lambda: one_sublayer(value_channels=2)(zeros(2, 3, 8, dtype=torch.int64)),
        f"`x` must have dtype {ANY}, got torch.int64",
    ),
    (
        lambda: one_sublayer()(zeros(2, 8), 1, call=lambda *_: None, mask=2),
        "`call` must give the sublayers their arguments itself, got others: 1 by position, mask",
    ),
    (
        lambda: one_sublayer()(zeros(2, 8), call=lambda *_: None),
        "`sublayers[0]` must return a torch.Tensor, got NoneType",
    ),
    (lambda: one_sublayer()([0.0]), "`x` must be a torch.Tensor, got list"),
    (lambda: Expand(8)(None), "`x` must be a torch.Tensor, got NoneType"),
    (
        lambda: Read(8)(zeros(2, 8, dtype=torch.complex64)),
        f"`state` must have dtype {ANY}, got torch.complex64",
    ),
]


@pytest.mark.parametrize(("build", "sentence"), KINDS)
def test_kinds_of_tensors_in_read_expand_and_stream(build: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        build()


# --- options without effect -----------------------------------------------------------------------

TOKEN_OR_FACTORED = 'compress="token" or compress_parameterization="factored"'
CHANNEL_AND_FACTORED = 'compress="channel" and compress_parameterization="factored"'
DIRECTION_HIDDEN = '128 unless direction="mean" or "flatten" or "attention", got 64'
VALUE_INIT = '1.0 unless value="linear" and mapping="k", got 0.0'
VALUE_FROM = '\'context\' unless mapping="k" and value="linear" or "sigmoid", got \'compressed\''
DIRECT = "'direct' unless"


def shared(**options: Any) -> dict[str, Any]:
    return {**options, "compress": "token", "shared": Read(8, compress="token")}


# (options, of which the first has no effect; the message after `must be left at`)
UNUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    DeltaResidual: [
        ({"gate_hidden": 64}, '128 unless gate="mlp", got 64'),
        ({"value_scale": 2.0}, '4.0 unless value="sigmoid", got 2.0'),
        ({"value_scale": 2.0, "value": "constant"}, '4.0 unless value="sigmoid", got 2.0'),
        ({"value_constant": 1.0}, '2.0 unless value="constant", got 1.0'),
        ({"value_init": 0.0, "value": "sigmoid"}, VALUE_INIT),
        ({"value_init": 0.0, "mapping": "v"}, VALUE_INIT),
        ({"value_from": "compressed", "mapping": "v"}, VALUE_FROM),
        ({"value_from": "compressed", "value": "constant"}, VALUE_FROM),
        ({"gate_kernel_size": 3}, '4 unless gate_from="convolved", got 3'),
        ({"gate_kernel_size": 3, "gate_from": "pooled"}, '4 unless gate_from="convolved", got 3'),
        ({"gate_kernel_size": 3, "gate": "mlp"}, '4 unless gate_from="convolved", got 3'),
        ({"direction": "mean"}, "'linear' unless mapping=\"v\", got 'mean'"),
        ({"direction_hidden": 64}, DIRECTION_HIDDEN),
        ({"direction_hidden": 64, "mapping": "v"}, DIRECTION_HIDDEN),
    ],
    Read: [
        ({"kernel_size": 3}, f"4 unless {TOKEN_OR_FACTORED}, got 3"),
        ({"kernel_size": 3, "compress": "channel"}, f"4 unless {TOKEN_OR_FACTORED}, got 3"),
        (
            {"compress_parameterization": "factored"},
            f'{DIRECT} compress="channel" or "token", got \'factored\'',
        ),
        *(
            ({"causal": True, **options}, f"False unless {CHANNEL_AND_FACTORED}, got True")
            for options in (
                {},
                {"compress": "channel"},
                {"compress": "token"},
                {"compress": "token", "compress_parameterization": "factored"},
            )
        ),
        (shared(kernel_size=3), "4 unless shared=None, got 3"),
        (shared(compress_parameterization="factored"), f"{DIRECT} shared=None, got 'factored'"),
        (shared(causal=True), "False unless shared=None, got True"),
    ],
    Expand: [({"kernel_size": 3}, '4 unless kind="conv", got 3')],
    DeltaStream: [
        ({"expand_kernel_size": 3}, '4 unless expand="conv", got 3'),
        ({"sublayers_per_compressor": 1}, '2 unless compress="channel" or "token", got 1'),
        ({"kernel_size": 3, "value_channels": 2}, f"4 unless {TOKEN_OR_FACTORED}, got 3"),
        (
            {"causal": True, "value_channels": 2, "compress": "token"},
            f"False unless {CHANNEL_AND_FACTORED}, got True",
        ),
        ({"gate_hidden": 64}, '128 unless gate="mlp", got 64'),
        ({"direction": "flatten"}, "'linear' unless mapping=\"v\", got 'flatten'"),
    ],
}


@pytest.mark.parametrize(
    ("build", "options", "sentence"),
    [(build, *case) for build, cases in UNUSED.items() for case in cases],
)
def test_options_without_effect(build: Any, options: dict[str, Any], sentence: str) -> None:
    sizes = (8, [nn.Identity()]) if build is DeltaStream else (8,)
    name, *others = options
    with pytest.raises(ValueError, match=f"^{re.escape(f'`{name}` must be left at {sentence}')}$"):
        build(*sizes, **options)
    rest = {other: options[other] for other in others}
    build(*sizes, **rest)  # the other options are valid
    build(*sizes, **rest, **{name: default_of(build, name)})


def default_of(build: Any, name: str) -> Any:
    """The default in the signature, of DeltaResidual if a stream hands the option on."""
    parameters = inspect.signature(build).parameters
    return parameters.get(name, inspect.signature(DeltaResidual).parameters.get(name)).default


RETURNED = {
    "torch.Tensor, got NoneType": lambda h: None,
    "torch.Tensor, got list": lambda h: [h],
    "dtype float32": lambda h: h.long(),
    "dtype float32, ": lambda h: h > 0,
}


@pytest.mark.parametrize("options", [{}, {"mapping": "v"}, {"rewrites": 2}], ids=str)
@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_what_a_sublayer_returns(kind, options, mode):
    class Wrong(nn.Module):
        def forward(self, h):
            return RETURNED[kind](h)

    stream = DeltaStream(8, [nn.Linear(8, 8), Wrong()], value_channels=2, **options)
    with mode(), pytest.raises(TypeError, match=r"^`sublayers\[1\]` must (return a|have) " + kind):
        stream(torch.randn(2, 3, 8))
