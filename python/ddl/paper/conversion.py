"""Convert state dicts of the paper's code to ours and back: pure functions, no files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ddl.errors import InputError, listed
from ddl.models import GPT
from ddl.models.config import PUBLISHED, GPTConfig, residual_of
from ddl.options import Residual, check_choice, quoted
from ddl.paper import names, options
from ddl.paths import PAPER_MODEL_TYPES

from .names import EMBEDDING, EXPANSION, HEAD, LAYOUTS, Layout

Variant = Literal["auto"] | Residual
State = dict[str, Tensor]


class Translation(NamedTuple):
    """A converted checkpoint.

    config, state: for `GPT(config).load_state_dict(state)`.
    assumed: options that neither the weights nor config.json contain, with the published defaults.
    unused: parameters of the checkpoint that the published model never uses and ours does not have.
    """

    config: GPTConfig
    state: State
    assumed: dict[str, Any]
    unused: list[str]


def convert(
    state_dict: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    variant: Variant = "auto",
) -> tuple[GPTConfig, State]:
    """Convert a state dict of the paper's code to the config and state dict of a `ddl.models.GPT`.

    state_dict: in any published layout; its names and shapes give the variant, all sizes and the
        gate. Tensors keep their dtype, and the result may share their memory.
    config: the published config.json, for the other options; a missing option has its published
        default.
    variant: residual that the checkpoint must have; "auto" accepts any.

    Projections to a constant value, which the published model has but never uses, are left out.
    Raises InputError for missing or unknown keys, shapes that do not fit, a config that contradicts
    the weights, options that have no counterpart here, or another `variant`.
    """
    return translate(state_dict, config, variant=variant)[:2]


def translate(
    state_dict: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    variant: Variant = "auto",
) -> Translation:
    """Do as `convert`, and also return the assumed options and the unused parameters."""
    check_choice("variant", variant, ("auto", *PUBLISHED))
    options.check_fixed(config or {})
    state, called = _read(state_dict)
    residual = _recognise(state) if variant == "auto" else variant
    gate = "mlp" if any(".beta_in." in name or ".beta_out." in name for name in state) else "linear"
    width = state[EMBEDDING].shape[1] if EMBEDDING in state else 1  # the names are checked below
    layers = _blocks(state)
    fields, assumed = options.to_ours(config or {}, residual, hidden_size=width, num_layers=layers)
    pairs = names.pairs(residual, layers, gate, fields.get("value", "linear"))
    names.check_keys(
        "state_dict",
        f"a published {residual} model",
        missing=[name for name, ours in pairs.items() if ours and name not in state],
        unknown=[called[name] for name in state if name not in pairs],
    )
    sizes = _sizes(state, residual, gate, layers)
    ours = GPTConfig(residual=residual, **sizes, **fields)
    options.check_sizes(config or {}, ours)
    unused = [called[name] for name in state if pairs[name] is None]
    return Translation(ours, _ours(state, pairs, ours), assumed, unused)


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
    names.check_state("state_dict", "the config's model", state_dict, empty_state(config))
    config, state = _factored(config, dict(state_dict))
    width = config.hidden_size
    channels = 1 if config.residual == "ddl" else config.value_channels
    theirs: State = {}
    for name, ours in names.pairs(
        config.residual, config.num_layers, config.gate, config.value
    ).items():
        if ours is None:
            size = (channels,) if name.endswith("bias") else (channels, width)
            theirs[name] = state["wte.weight"].new_zeros(size)
        else:
            renamed, tensor = names.to_theirs(name, state[ours], layout)
            theirs[renamed] = tensor
    theirs[HEAD] = theirs[EMBEDDING]
    return {"model_type": PAPER_MODEL_TYPES[layout]} | options.to_theirs(config), theirs


# --- theirs to ours -------------------------------------------------------------------------------


def _read(state_dict: Mapping[str, Tensor]) -> tuple[State, dict[str, str]]:
    """Return the state dict in layout c_proj, without the tied head, and each original name."""
    cleaned = names.cleaned("state_dict", state_dict)
    if HEAD in cleaned:  # safetensors may have stored it instead of the embedding
        head = cleaned.pop(HEAD)
        kept = cleaned.setdefault(EMBEDDING, head)[1]
        if kept.data_ptr() != head[1].data_ptr() and not torch.equal(kept, head[1]):
            raise InputError(HEAD, f"be equal to `{EMBEDDING}`", "another tensor")
    width = cleaned[EMBEDDING][1].shape[-1] if EMBEDDING in cleaned else 0
    state: State = {}
    called: dict[str, str] = {}
    for name, (original, tensor) in cleaned.items():
        name, tensor = names.from_layout(name, tensor, width)
        if name in state:
            raise InputError("state_dict", "be of one layout", f"{called[name]} and {original}")
        state[name], called[name] = tensor, original
    return state, called


def _recognise(state: State) -> Residual:
    """Recognise the residual by the parameters' names."""
    if not any(".ddl_attn." in name or ".ddl_mlp." in name for name in state):
        return "additive"
    kernels = [match for name in state if (match := names.COMPRESSOR.fullmatch(name))]
    if not kernels:
        return "ddl"
    compress = "token" if any(match[2] for match in kernels) else "channel"
    return residual_of(compress, "conv" if EXPANSION in state else "repeat")


def _blocks(state: State) -> int:
    """Number of blocks."""
    matches = (re.match(r"transformer\.h\.(\d+)\.", name) for name in state)
    numbers = [int(match[1]) for match in matches if match]
    if not numbers:
        expected = "hold the blocks transformer.h.0, .1, … of the paper's code"
        got = f"the keys {listed(list(state))}" if state else "nothing"
        raise InputError("state_dict", expected, got)
    return 1 + max(numbers)


def _sizes(state: State, residual: Residual, gate: str, layers: int) -> dict[str, Any]:
    """The fields of GPTConfig that follow from the shapes."""
    shape = {name.removeprefix("transformer.h.0."): tensor.shape for name, tensor in state.items()}
    vocab_size, width = shape[EMBEDDING]
    head_dim, mlp_size = shape["attn.q_rms.weight"][0], shape["mlp.c_fc1.weight"][0]
    heads = shape["attn.c_q.weight"][0] // max(head_dim, 1)
    usual = heads > 0 and head_dim * heads == width
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": heads,
        "head_size": None if usual else head_dim,
        "mlp_size": None if mlp_size == 8 * width // 3 else mlp_size,
    }
    if residual == "additive":
        return fields
    fields["gate"] = gate
    if gate == "mlp":
        fields["gate_hidden"] = shape["ddl_attn.beta_in.weight"][0]
    compress, expand = names.stream(residual)
    if compress != "identity":
        kernel = names.TOKEN_KERNEL if compress == "token" else names.CHANNEL_KERNEL
        fields["compress_kernel_size"] = shape[f"readout.{kernel}"][-1]
        fields["value_channels"] = shape["readout.read"][0]
    if expand == "conv":
        fields["expand_kernel_size"] = shape[EXPANSION][-1]
    return fields


def _ours(state: State, pairs: Mapping[str, str | None], config: GPTConfig) -> State:
    """Return the tensors under our names, each checked against the config's shape."""
    model = empty_state(config)
    used = {name: ours for name, ours in pairs.items() if ours is not None}
    names.check_shapes(state, {n: names.to_theirs(n, model[ours])[1] for n, ours in used.items()})
    return {ours: names.to_ours(n, state[n], model[ours].shape) for n, ours in used.items()}


def empty_state(config: GPTConfig) -> State:
    """The state dict of `GPT(config)`, without memory."""
    with torch.device("meta"):
        return GPT(config).state_dict()


# --- ours to theirs -------------------------------------------------------------------------------


def _check_published(config: GPTConfig, layout: Layout) -> None:
    """Raise InputError for options that the published code does not have."""
    if config.residual not in PUBLISHED:
        expected = f"be {quoted(PUBLISHED)}, those of the papers' code"
        raise InputError("residual", expected, repr(config.residual))
    if layout == "c_proj" and config.parameterization == "completep":
        expected = "be standard or mup with the layout c_proj of the paper's code"
        raise InputError("parameterization", expected, repr(config.parameterization))
    usual = 8 * config.hidden_size // 3
    if config.residual != "additive" and config.mlp_hidden != usual:
        expected = f"be ⌊8·hidden_size/3⌋ = {usual} in the paper's code"
        raise InputError("mlp_size", expected, config.mlp_hidden)
    compress = names.stream(config.residual)[0]
    wanted: dict[str, Any] = {"mixer": "attention", "mapping": "k", "gate_from": "context"}
    wanted |= {"rewrites": 1, "erase": "tied"}
    if layout == "c_proj":  # the code of this layout scales no branches
        wanted["branch_scale"] = 1
    if config.residual != "additive" and config.value != "constant":
        wanted["value_from"] = "compressed"
    if compress in ("channel", "token"):
        wanted["sublayers_per_compressor"] = 2
    for name, value in wanted.items():
        if getattr(config, name) != value:
            where = "with the layout c_proj" if name == "branch_scale" else "in the paper's code"
            raise InputError(name, f"be {value} {where}", getattr(config, name))
    taps, channels = config.compress_kernel_size, config.value_channels
    factored = config.compress_parameterization == "factored"
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
