"""Convert our state dicts to those of the paper's code: the inverse of importing.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddl.errors import InputError
from ddl.models.config import PUBLISHED, GPTConfig
from ddl.options import check_choice, quoted
from ddl.paper import names, options
from ddl.paths import PAPER_MODEL_TYPES

from .importing import State, shapes_of
from .names import EMBEDDING, HEAD, LAYOUTS, Layout


def revert(
    config: GPTConfig, state_dict: Mapping[str, Tensor], *, layout: Layout = "c_proj"
) -> tuple[dict[str, Any], State]:
    """Convert a model of ours to the paper's config.json and state dict: the inverse of `convert`.

    layout: parameter names, "c_proj" for the papers' code, "o_proj" for its newest version. Tensors
    keep their values bit for bit. A "direct" compressor is written as a convolution and a trivial
    read vector. Projections to a constant value, which the published model requires but never uses,
    are zeros.

    Raises InputError if the published code has no such model, or the state dict does not match the
    config.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_published(config, layout)
    names.check_state("state_dict", "the config's model", state_dict, shapes_of(config))
    config, state = _factored(config, dict(state_dict))
    width = config.hidden_size
    channels = 1 if config.residual == "ddl" else config.value_channels
    theirs: State = {}
    for name, ours in names.pairs(
        config.residual, config.num_layers, config.gate, config.value
    ).items():
        if ours is None:
            size = (channels,) if name.endswith("bias") else (channels, width)
            tensor = state["wte.weight"].new_zeros(size)
        else:
            tensor = names.to_theirs(name, state[ours])
        name, tensor = names.to_layout(name, tensor, layout, config)
        theirs[name] = tensor
    theirs[HEAD] = theirs[EMBEDDING]
    return {"model_type": PAPER_MODEL_TYPES[layout]} | options.to_theirs(config), theirs


def _check_published(config: GPTConfig, layout: Layout) -> None:
    """Raise InputError for options that the published code does not have."""
    if config.residual not in PUBLISHED:
        expected = f"be {quoted(PUBLISHED)}, those of the papers' code"
        raise InputError("residual", expected, repr(config.residual))
    compress = names.stream(config.residual)[0]
    wanted: dict[str, Any] = {"mixer": "attention", "mapping": "k", "gate_from": "context"}
    wanted |= {"rewrites": 1, "erase": "tied"}
    if layout == "c_proj":  # the code of this layout scales no branches
        wanted["branch_scale"] = 1
        if config.parameterization == "completep":
            expected = "be standard or mup with the layout c_proj of the paper's code"
            raise InputError("parameterization", expected, repr(config.parameterization))
    if config.residual != "additive" and config.value != "constant":
        wanted["value_from"] = "compressed"
    if compress in ("channel", "token"):
        wanted["sublayers_per_compressor"] = 2
    usual = 8 * config.hidden_size // 3
    if config.residual != "additive" and config.mlp_hidden != usual:
        expected = f"be ⌊8·hidden_size/3⌋ = {usual} in the paper's code"
        raise InputError("mlp_size", expected, config.mlp_hidden)
    for name, value in wanted.items():
        if getattr(config, name) != value:
            where = "with the layout c_proj" if name == "branch_scale" else "in the paper's code"
            raise InputError(name, f"be {value} {where}", getattr(config, name))
    factored = config.compress_parameterization == "factored"
    taps, channels = config.compress_kernel_size, config.value_channels
    if compress == "channel" and factored and taps > channels:
        expected = f"be at most value_channels = {channels} in the paper's code"
        raise InputError("compress_kernel_size", expected, taps)


def _factored(config: GPTConfig, state: State) -> tuple[GPTConfig, State]:
    """Factor the compressors into a convolution c and a trivial read vector r; the model is equal.

    Token compression: r = 1. Channel compression: c is centred with m taps, and r is 1 at its
    centre and 0 elsewhere, so w_ij = Σ_s c_is r_{j−s+centre} = c_ij.
    """
    compress = names.stream(config.residual)[0]
    if compress not in ("channel", "token") or config.compress_parameterization == "factored":
        return config, state
    changes: dict[str, Any] = {"compress_parameterization": "factored"}
    channels = config.value_channels
    for name in [name for name in state if name.endswith("compress_weight")]:
        weight = state.pop(name)
        read = weight.new_ones(channels)
        if compress == "channel":
            changes["compress_kernel_size"] = channels
            read = weight.new_zeros(channels)
            read[(channels - 1) // 2] = 1
        stem = name.removesuffix("weight")
        state |= {f"{stem}kernel": weight, f"{stem}read": read}
    return replace(config, **changes), state
