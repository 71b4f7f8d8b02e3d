"""The table of options: signatures, fields and types agree with it, and all follow its rules."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal

import pytest
import torch

from ddl import DeltaResidual, DeltaStream, Expand, Read
from ddl.errors import InputError
from ddl.lab.config import PRESETS, STREAMS, GPTConfig
from ddl.models import GPT
from ddl.models.config import SPELLED
from ddl.options import MODEL_OPTIONS, RESIDUAL_OPTIONS, STREAM_OPTIONS

TABLE = RESIDUAL_OPTIONS | STREAM_OPTIONS
TINY = PRESETS["tiny"].model
OF_EXPAND = {"kind": "expand", "kernel_size": "expand_kernel_size"}
OF_CONFIG = {ours: name for name, ours in SPELLED.items()}

# (owner of options, owner's name → table's name if they differ, owner's other arguments)
OWNERS: list[tuple[Callable[..., Any], dict[str, str], set[str]]] = [
    (DeltaResidual, {}, {"hidden_size", "value_channels", "device", "dtype"}),
    (Read, {}, {"hidden_size", "value_channels", "shared", "device", "dtype"}),
    (Expand, OF_EXPAND, {"hidden_size", "value_channels", "device", "dtype"}),
    (
        DeltaStream,
        {},
        # the default of `compress` depends on the number of value channels
        {"hidden_size", "value_channels", "sublayers", "compress", "residual", "device", "dtype"},
    ),
    (GPTConfig, OF_CONFIG, set()),
]


@pytest.mark.parametrize(
    ("owner", "names", "beside"), OWNERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_defaults_and_types_are_the_tables(
    owner: Callable[..., Any], names: dict[str, str], beside: set[str]
) -> None:
    table = TABLE | MODEL_OPTIONS
    init = owner if owner is GPTConfig else owner.__init__
    types = typing.get_type_hints(init)
    parameters = inspect.signature(owner).parameters
    for name in parameters.keys() - beside:
        option = table[names.get(name, name)]
        assert repr(parameters[name].default) == repr(option.default), name
        if typing.get_origin(option.allowed) is Literal:
            optional = option.default is None
            assert types[name] == (option.allowed | None if optional else option.allowed), name


def test_every_option_of_the_table_is_somebodys() -> None:
    owned = {
        names.get(n, n) for owner, names, _ in OWNERS for n in inspect.signature(owner).parameters
    }
    assert owned >= TABLE.keys() | MODEL_OPTIONS.keys()
    ours = {field.name for field in fields(GPTConfig)}
    assert ours == RESIDUAL_OPTIONS.keys() | MODEL_OPTIONS.keys() | set(SPELLED.values()) | {
        "anchor_every", "compress_parameterization", "expand_kernel_size", "read_init",
        "stream_dtype", "sublayers_per_compressor",
    }  # fmt: skip


def test_conditions_name_options_and_choices_of_the_table() -> None:
    for name, option in (TABLE | MODEL_OPTIONS).items():
        for case in option.used:
            for other, values in case.items():
                assert name != other
                choices = typing.get_args((TABLE | MODEL_OPTIONS)[other].allowed)
                assert set(values.split()) < set(choices), name


@pytest.mark.parametrize(
    ("residual", "changes"),
    [
        ("ddl", {"gate": "mlp", "gate_hidden": 8, "value": "constant", "value_constant": 1.0}),
        ("ddl", {"value_from": "compressed", "value_init": 0.5, "beta_init": 0.5, "eps_k": 1e-5}),
        ("ddl-cc", {"value_channels": 2, "sublayers_per_compressor": 1, "expand_kernel_size": 2}),
        ("ddl-cc-noec", {"value": "sigmoid", "value_scale": 2.0, "value_channels": 3}),
        ("ddl-tc", {"compress_kernel_size": 3, "expand_kernel_size": 2, "gate": "mlp"}),
        ("ddl-tc", {"value_channels": 1, "compress_kernel_size": 3}),
        ("ddl-tc-noec", {"read_init": 0.5, "compress_parameterization": "factored"}),
        ("additive", {"mlp_size": 1}),
        ("ddl-tc-noec", {"compress_kernel_size": 3, "value_from": "compressed"}),
        ("ddl", {"gate_from": "convolved", "gate_kernel_size": 2, "mapping": "v"}),
        ("ddl", {"mapping": "v", "direction": "flatten", "direction_hidden": 8}),
        ("ddl-cc", {"gate_from": "flatten", "gate": "mlp", "gate_hidden": 8, "beta_init": 0.0}),
        ("ddl-cc", {"mapping": "v", "direction": "attention", "value": "sigmoid"}),
        ("ddl-tc", {"mapping": "v", "direction": "mean", "gate": "mlp", "gate_from": "pooled"}),
        ("ddl-tc", {"erase": "none", "branch_scale": 0.5}),
    ],
)
def test_a_config_that_is_accepted_makes_a_model(residual: str, changes: dict[str, Any]) -> None:
    model = GPT(replace(TINY, residual=residual, **changes))
    assert model(torch.randint(TINY.vocab_size, (1, 8))).logits.isfinite().all()


CHANGED = {
    "mapping": "v", "gate": "mlp", "gate_hidden": 64, "gate_from": "pooled", "gate_kernel_size": 3,
    "direction": "mean", "direction_hidden": 64, "beta_init": 0.5, "value": "sigmoid",
    "value_init": 0.0, "value_scale": 2.0, "value_constant": 1.0, "value_from": "compressed",
    "rewrites": 2, "direction_rank": 8, "eps_k": 1e-5, "erase": "none",
    "branch_scale": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("residual", ["additive", "expanded"])
def test_a_baseline_has_no_options_of_rewrites(residual: str) -> None:
    assert CHANGED.keys() == RESIDUAL_OPTIONS.keys()
    known = " or ".join(f'"{residual}"' for residual in STREAMS)
    for name, given in CHANGED.items():
        default = RESIDUAL_OPTIONS[name].default
        with pytest.raises(InputError) as refusal:
            replace(TINY, residual=residual, **{name: given})
        expected = f"`{name}` must be left at {default!r} unless residual={known}, got {given!r}"
        assert str(refusal.value) == expected
