"""Convert options between the paper's config.json and GPTConfig."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ddl.errors import InputError, listed
from ddl.models.config import STREAMS, GPTConfig
from ddl.options import Residual, check_count, check_finite, check_flag, check_positive

# Options that do not follow from the weights' shapes, with their published defaults.
DEFAULTS: dict[str, bool | int | float] = {
    "block_size": 1024,
    "rope_base": 10000.0,
    "ddl_k_eps": 1e-5,
    "ddl_v_constant": False,
    "ddl_v_constant_value": 2.0,
    "ddl_v_sigmoid": True,
    "ddl_v_sigmoid_scale": 4.0,
    "ddl_state_dv_shortconv_causal": False,
    "ddl_beta_init": 1.0,
}
BASE = 1024  # the published default of hidden_size_base, which `mup` divides by d
# With a scalar state (residual "ddl"), these options of the constant value have other names.
SCALAR = {
    "ddl_v_constant": "ddl_v_dim1_constant",
    "ddl_v_constant_value": "ddl_v_dim1_constant_value",
}
# Options of the published code that have no counterpart here → the values that change nothing.
FIXED: dict[str, tuple[Any, ...]] = {
    "use_qk_rmsnorm": (True,),
    "rope_ratio": (1,),
    "rms_norm_eps": (None, 1e-5),
    "using_groupnorm": (False,),
    "use_output_gate": (False,),
    "use_k_shift": (False,),
    "use_v_shift": (False,),
    "q_activation": (None, "identity"),
    "k_activation": (None, "identity"),
    "v_activation": (None, "identity"),
    "ddl_sequence_reduction_version": (1,),
}
# Our parameterizations under the names of the newest code, which scale the logits; completeP scales
# the branches, too. SCALED: names that are read, in small letters.
SPELLED = {"mup": "widthmuP", "completep": "completeP"}
SCALED = {
    **{theirs.lower(): ours for ours, theirs in SPELLED.items()},
    "spectralp": "completep",
    "standard": None,
    "none": None,
}


def check_fixed(config: Mapping[str, Any]) -> None:
    """Raise InputError for an option that our models do not have."""
    for name, allowed in FIXED.items():
        if name in config and config[name] not in allowed:
            expected = " or ".join(_json(value) for value in allowed)
            raise InputError.sentence(
                f"`{name}` in config.json must be {expected}, got {_json(config[name])}: "
                "the models here have no such option"
            )


def to_ours(
    config: Mapping[str, Any], residual: Residual, *, hidden_size: int, num_layers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of GPTConfig that do not follow from the weights, and the options of the published
    config.json that were read although it lacks them, with the defaults used."""
    assumed: dict[str, Any] = {}
    checks: dict[type, Callable[[str, Any], None]] = {bool: check_flag, int: check_count}

    def option(name: str) -> Any:
        scalar = SCALAR.get(name) if residual == "ddl" else None
        value = config.get(scalar or name, config.get(name))
        if value is None:
            value = assumed[name] = DEFAULTS[name]
        checks.get(type(DEFAULTS[name]), check_finite)(name, value)
        return value

    fields: dict[str, Any] = {
        "block_size": option("block_size"),
        "rope_base": float(option("rope_base")),
    }
    fields |= (scaling := _scaling(config, num_layers))
    factor = config.get("residual_branch_mult")
    check_positive("residual_branch_mult", factor, optional=True)
    # The parameterization divides branches by num_layers / base_layers itself.
    base_layers = scaling.get("base_layers", num_layers)
    branch_scale = 1.0 if factor is None else float(factor) * num_layers / base_layers
    branch_scale = 1.0 if math.isclose(branch_scale, 1, rel_tol=1e-12) else branch_scale
    if residual == "additive":
        if branch_scale != 1:
            raise InputError.sentence(
                "`residual_branch_mult` in config.json must be left out of an additive model here, "
                "where the parameterization alone scales additions",
                ("residual_branch_mult",),
            )
        return fields, assumed
    # By which the models here multiply what follows.
    wider = math.sqrt(hidden_size / scaling.get("base_width", hidden_size))
    fields["branch_scale"] = branch_scale
    beta = float(option("ddl_beta_init"))
    fields["beta_init"] = min(max(beta, 0.0), 2.0)  # as the published code
    fields["eps_k"] = float(option("ddl_k_eps")) / wider
    if STREAMS[residual][0] != "identity":
        fields["compress_parameterization"] = "factored"
        fields["read_init"] = config.get("ddl_state_read_init")  # on which no weight depends
    if STREAMS[residual][0] == "channel":
        fields["compress_causal"] = option("ddl_state_dv_shortconv_causal")
    if option("ddl_v_constant"):
        constant = float(option("ddl_v_constant_value")) / wider
        return fields | {"value": "constant", "value_constant": constant}, assumed
    fields["value_from"] = "compressed"
    if option("ddl_v_sigmoid"):
        scale = float(option("ddl_v_sigmoid_scale")) / wider
        fields |= {"value": "sigmoid", "value_scale": scale}
    return fields, assumed


def _scaling(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """GPTConfig's parameterization with its base; empty unless the logits are scaled."""
    spelled = config.get("parameterization")
    if str(spelled).lower() not in SCALED:
        known = ", ".join(SPELLED.values())
        must = f"`parameterization` in config.json must be null, standard, {known} or spectralP"
        raise InputError.sentence(f"{must}, got {_json(spelled)}", ("parameterization",))
    kind = SCALED[str(spelled).lower()] or ("mup" if config.get("mup") else None)
    if kind is None:
        return {}
    fields: dict[str, Any] = {"base_width": config.get("hidden_size_base", BASE)}
    if kind == "completep":
        fields["base_layers"] = config.get("num_hidden_layers_base", num_layers)
    for field, base in fields.items():
        check_count(field, base)
    return fields | {"parameterization": kind}


def to_theirs(config: GPTConfig) -> dict[str, Any]:
    """The published config.json for our model, whose compression, if any, must be factored."""
    theirs = _sizes(config) | {
        "block_size": config.block_size,
        "use_qk_rmsnorm": True,
        "rope_base": config.rope_base,
        "rope_ratio": 1.0,
    }
    if config.parameterization != "standard":  # `mup` is of older code
        theirs |= {"mup": True, "parameterization": SPELLED[config.parameterization]}
        theirs["hidden_size_base"] = config.base_width
    if config.base_layers is not None:
        theirs["num_hidden_layers_base"] = config.base_layers
    if config.residual == "additive":
        return theirs
    ours = config.rewrite_options
    if ours["branch_scale"] != 1 or config.parameterization == "completep":
        theirs["residual_branch_mult"] = ours["branch_scale"]
    eps_k = 0.02 * math.sqrt(config.hidden_size) if config.eps_k is None else ours["eps_k"]
    theirs |= {"ddl_k_eps": eps_k, "ddl_beta_init": config.beta_init}
    theirs |= {
        "ddl_v_constant": config.value == "constant",
        "ddl_v_constant_value": ours["value_constant"],
        "ddl_v_sigmoid": config.value == "sigmoid",
        "ddl_v_sigmoid_scale": ours["value_scale"],
    }
    if config.residual == "ddl":
        theirs |= {scalar: theirs[name] for name, scalar in SCALAR.items()}
    if STREAMS[config.residual][0] != "identity":
        theirs["ddl_state_read_init"] = config.read_init
    if STREAMS[config.residual][0] == "channel":
        theirs["ddl_state_dv_shortconv_causal"] = config.compress_causal
    return theirs


def _sizes(config: GPTConfig) -> dict[str, Any]:
    """The options that the weights determine, with this config's values, under published names."""
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
    }
    if config.residual == "additive":
        if config.mlp_size is not None:
            sizes["intermediate_size"] = config.mlp_size  # an option of the published baseline
        return sizes
    sizes["ddl_beta_single_linear"] = config.gate == "linear"
    if config.gate == "mlp":
        sizes["ddl_beta_hidden_size"] = config.gate_hidden
    compress, expand = STREAMS[config.residual]
    if compress != "identity":
        sizes["ddl_value_channels"] = config.value_channels
        sizes["ddl_state_shortconv_kernel_size"] = config.compress_kernel_size
    if expand == "conv":
        sizes["input_embed_shortconv_kernel_size"] = config.expand_kernel_size
    return sizes


def check_sizes(config: Mapping[str, Any], ours: GPTConfig) -> None:
    """Raise InputError if config.json contradicts the weights."""
    wrong = [
        f"{name} = {_json(value)} instead of {_json(size)}"
        for name, size in _sizes(ours).items()
        if (value := config.get(name, size)) != size
    ]
    if wrong:
        raise InputError("config.json", "agree with the weights", listed(wrong))


def _json(value: Any) -> str:
    """Convert a value to JSON, as config.json has it."""
    return json.dumps(value, default=repr, ensure_ascii=False)
