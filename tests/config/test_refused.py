"""Options that others leave without effect are refused, unless they have their default value.

The modules and GPTConfig have rules of their own for it, which have to agree.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddl import DeltaResidual, DeltaStream, Expand, Read
from ddl.config import PRESETS
from ddl.errors import InputError
from ddl.models import GPT

TINY = PRESETS["tiny"].model


def one_sublayer(**options: Any) -> DeltaStream:
    return DeltaStream(8, [nn.Identity()], **options)


# What is built, its options, the first of them without effect, and the sentence after the name.
UNUSED: list[tuple[Any, dict[str, Any], str]] = [
    (DeltaResidual, {"gate_hidden": 64}, '128 unless gate="mlp", got 64'),
    (DeltaResidual, {"value_scale": 2.0}, '4.0 unless value="sigmoid", got 2.0'),
    (DeltaResidual, {"value_scale": 2.0, "value": "constant"}, '4.0 unless value="sigmoid", got'),
    (DeltaResidual, {"value_constant": 1.0}, '2.0 unless value="constant", got 1.0'),
    (
        DeltaResidual,
        {"value_init": 0.0, "value": "sigmoid"},
        '1.0 unless value="linear" and mapping="k", got 0.0',
    ),
    (
        DeltaResidual,
        {"value_init": 0.0, "mapping": "v"},
        '1.0 unless value="linear" and mapping="k", got 0.0',
    ),
    (
        DeltaResidual,
        {"value_from": "compressed", "mapping": "v"},
        "'context' unless mapping=\"k\" and not value=\"constant\", got 'compressed'",
    ),
    (
        DeltaResidual,
        {"value_from": "compressed", "value": "constant"},
        "'context' unless mapping=\"k\" and not value=\"constant\", got 'compressed'",
    ),
    *(
        (DeltaResidual, {"gate_kernel_size": 3, **gate}, '4 unless gate_from="convolved", got 3')
        for gate in ({}, {"gate_from": "pooled"}, {"gate": "mlp"})
    ),
    (DeltaResidual, {"direction": "mean"}, "'linear' unless mapping=\"v\", got 'mean'"),
    *(
        (
            DeltaResidual,
            {"direction_hidden": 64, **mapping},
            '128 unless direction is not "linear", got 64',
        )
        for mapping in ({}, {"mapping": "v"})
    ),
    (Read, {"kernel_size": 3}, '4 unless compress="token" or parameterization="factored", got 3'),
    (
        Read,
        {"kernel_size": 3, "compress": "channel"},
        '4 unless compress="token" or parameterization="factored", got 3',
    ),
    (
        Read,
        {"parameterization": "factored"},
        "'direct' unless compress=\"channel\" or \"token\", got 'factored'",
    ),
    *(
        (Read, options, 'False unless compress="channel" and parameterization="factored", got True')
        for options in (
            {"causal": True},
            {"causal": True, "compress": "channel"},
            {"causal": True, "compress": "token"},
            {"causal": True, "compress": "token", "parameterization": "factored"},
        )
    ),
    *(
        (Read, {name: given, "compress": "token", "shared": Read(8, compress="token")}, sentence)
        for name, given, sentence in (
            ("kernel_size", 3, "4 unless shared=None, got 3"),
            ("parameterization", "factored", "'direct' unless shared=None, got 'factored'"),
            ("causal", True, "False unless shared=None, got True"),
        )
    ),
    (Expand, {"kernel_size": 3}, '4 unless kind="conv", got 3'),
    (one_sublayer, {"expand_kernel_size": 3}, '4 unless expand="conv", got 3'),
    (
        one_sublayer,
        {"sublayers_per_compressor": 1},
        '2 unless compress="channel" or "token", got 1',
    ),
    (
        one_sublayer,
        {"kernel_size": 3, "value_channels": 2},
        '4 unless compress="token" or parameterization="factored", got 3',
    ),
    (
        one_sublayer,
        {"causal": True, "value_channels": 2, "compress": "token"},
        'False unless compress="channel" and parameterization="factored", got True',
    ),
    (one_sublayer, {"gate_hidden": 64}, '128 unless gate="mlp", got 64'),
    (one_sublayer, {"direction": "flatten"}, "'linear' unless mapping=\"v\", got 'flatten'"),
]


@pytest.mark.parametrize(("build", "options", "sentence"), UNUSED)
def test_options_without_effect(build: Any, options: dict[str, Any], sentence: str) -> None:
    sizes = () if build is one_sublayer else (8,)
    name = next(iter(options))
    start = f"`{name}` must be left at {sentence}"
    with pytest.raises(ValueError, match=f"^{re.escape(start)}"):
        build(*sizes, **options)
    given = options.pop(name)
    build(*sizes, **options)  # without it the rest is right
    module = build(*sizes, **options, **{name: default_of(build, name)})
    assert given != default_of(build, name)
    assert isinstance(module, nn.Module)


def default_of(build: Any, name: str) -> Any:
    """What the signature says, where a stream's own has the name or hands it on."""
    for owner in (DeltaStream, DeltaResidual) if build is one_sublayer else (build,):
        if name in (parameters := inspect.signature(owner).parameters):
            return parameters[name].default
    raise KeyError(name)


# --- GPTConfig -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gate_hidden": 64}, "`gate_hidden` must be left at 128 unless `gate` is mlp, got 64"),
        (
            {"value_scale": 2.0},
            "`value_scale` must be left at 4.0 unless `value` is sigmoid, got 2.0",
        ),
        (
            {"value_init": 0.0, "value": "sigmoid"},
            "`value_init` must be left at 1.0 unless `value` is linear, got 0.0",
        ),
        (
            {"value_constant": 1.0},
            "`value_constant` must be left at 2.0 unless `value` is constant, got 1.0",
        ),
        (
            {"value_from": "compressed", "value": "constant"},
            "`value_from` must be left at context unless `value` is linear or sigmoid, got"
            " 'compressed'",
        ),
        (
            {"residual": "ddl", "value_channels": 8},
            "`value_channels` must be left at 4 unless `residual` is ddl-cc or ddl-cc-noec or"
            " ddl-tc or ddl-tc-noec, got 8",
        ),
        (
            {"residual": "ddl", "sublayers_per_compressor": 1},
            "`sublayers_per_compressor` must be left at 2 unless `residual` is ddl-cc or"
            " ddl-cc-noec or ddl-tc or ddl-tc-noec, got 1",
        ),
        (
            {"residual": "ddl-cc", "compress_kernel_size": 3},
            "`compress_kernel_size` must be left at 4 unless `residual` is ddl-tc or ddl-tc-noec,"
            " or `compress_parameterization` is factored, got 3",
        ),
        (
            {"residual": "ddl-tc-noec", "expand_kernel_size": 3},
            "`expand_kernel_size` must be left at 4 unless `residual` is ddl-cc or ddl-tc, got 3",
        ),
        (
            {"gate_kernel_size": 3, "gate_from": "pooled"},
            "`gate_kernel_size` must be left at 4 unless `gate_from` is convolved, got 3",
        ),
        (
            {"direction": "mean"},
            "`direction` must be left at linear unless `mapping` is v, got 'mean'",
        ),
        (
            {"direction_hidden": 64, "mapping": "v"},
            "`direction_hidden` must be left at 128 unless `direction` is mean or flatten or"
            " attention, got 64",
        ),
        (
            {"value_init": 0.0, "mapping": "v"},
            "`value_init` must be left at 1.0 unless `mapping` is k, got 0.0",
        ),
        (
            {"value_from": "compressed", "mapping": "v"},
            "`value_from` must be left at context unless `mapping` is k, got 'compressed'",
        ),
        (
            {"value": "constant", "mapping": "v"},
            "`value` must be linear or sigmoid if `mapping` is v, got 'constant'",
        ),
        *(
            (
                {"mapping": "v", "direction": "attention", **single},
                "`direction` must be linear, mean or flatten with one value channel, got"
                " 'attention'",
            )
            for single in ({"residual": "ddl"}, {"value_channels": 1})
        ),
    ],
)
def test_options_of_a_config(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        replace(TINY, **changes)


def test_the_additive_residual_has_no_options() -> None:
    changes = {
        "mapping": "v",
        "gate": "mlp",
        "gate_hidden": 64,
        "gate_from": "pooled",
        "gate_kernel_size": 3,
        "beta_init": 0.5,
        "value": "sigmoid",
        "value_init": 0.0,
        "value_scale": 2.0,
        "value_constant": 1.0,
        "value_from": "compressed",
        "eps_k": 1e-5,
    }
    for name, given in changes.items():
        sentence = rf"^`{name}` must be left at .* unless `residual` is ddl or ddl-cc or .*, got "
        with pytest.raises(InputError, match=sentence):
            replace(TINY, residual="additive", **{name: given})


@pytest.mark.parametrize(
    ("residual", "changes"),
    [
        ("ddl", {"gate": "mlp", "gate_hidden": 8, "value": "constant", "value_constant": 1.0}),
        ("ddl", {"value_from": "compressed", "value_init": 0.5, "beta_init": 0.5, "eps_k": 1e-5}),
        ("ddl-cc", {"value_channels": 2, "sublayers_per_compressor": 1, "expand_kernel_size": 2}),
        ("ddl-cc-noec", {"value": "sigmoid", "value_scale": 2.0, "value_channels": 3}),
        ("ddl-tc", {"compress_kernel_size": 3, "expand_kernel_size": 2, "gate": "mlp"}),
        ("ddl-tc-noec", {"compress_kernel_size": 3, "value_from": "compressed"}),
        ("ddl", {"gate_from": "convolved", "gate_kernel_size": 2, "mapping": "v"}),
        ("ddl", {"mapping": "v", "direction": "flatten", "direction_hidden": 8}),
        ("ddl-cc", {"mapping": "v", "direction": "attention", "value": "sigmoid"}),
        ("ddl-tc", {"mapping": "v", "direction": "mean", "gate": "mlp", "gate_from": "pooled"}),
    ],
)
def test_what_the_config_takes_the_trunk_takes(residual: str, changes: dict[str, object]) -> None:
    """Both refuse options without effect, by rules of their own that have to agree."""
    model = GPT(replace(TINY, residual=residual, **changes))
    assert model(torch.randint(TINY.vocab_size, (1, 8))).logits.isfinite().all()
