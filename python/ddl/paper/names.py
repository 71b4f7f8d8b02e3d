"""Map parameter names and shapes between the paper's code and ours.

Three versions of that code are published. They differ in names and shapes, but compute the same. A
*layout* is one of the two in use, named after the attention's output projection:

    c_proj  compress.shortconv.weight (d·m, K)   input_embed.conv.weight (d·m, 1, K)   *.c_proj
    o_proj  compress.weight (d, m, K)            input_embed.weight (d, m, K)          *.o_proj

The first version stored its convolutions as nn.Conv1d does: compress.shortconv.conv.weight (d·m, 1,
K) over time, compress.shortconv.weight (d, 1, K) over the value channels. It is read, not written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from ddl.errors import InputError, listed
from ddl.models.config import STREAMS
from ddl.models.scaling import without_wrappers
from ddl.options import Residual

Layout = Literal["c_proj", "o_proj"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
TOKEN_KERNEL, CHANNEL_KERNEL, EXPANSION = "shortconv.weight", "weight", "input_embed.conv.weight"
SUBLAYERS = {
    "attn": ("ln_1", ("c_q", "c_k", "c_v", "c_proj", "q_rms", "k_rms")),
    "mlp": ("ln_2", ("c_fc1", "c_fc2", "c_proj")),
}
GATES = {
    "linear": {"beta.weight": "gate.weight", "beta.bias": "gate.bias"},
    "mlp": {
        "beta_in.weight": "gate.0.weight",
        "beta_out.weight": "gate.2.weight",
        "beta_out.bias": "gate.2.bias",
    },
}
COMPRESSOR = re.compile(r"((?:transformer\.h\.\d+\.compress|readout)\.)(shortconv\.)?weight")
COUNT = "transformer.h.0.anneal.step"  # the only integer in a checkpoint, of a converted nanoGPT


def stream(residual: Residual) -> tuple[str, str]:
    """Return a residual's (compress, expand); empty strings for the additive one."""
    return STREAMS.get(residual, ("", ""))


def pairs(residual: Residual, num_layers: int, gate: str, value: str) -> dict[str, str | None]:
    """Map each name in layout c_proj to ours, without the tied `lm_head.weight`.

    A projection to a constant value, which the published model never uses, maps to None.
    """
    additive = residual == "additive"
    names: dict[str, str | None] = {EMBEDDING: "wte.weight"}
    names["ln_f.weight"] = "trunk.readout.weight" if additive else "trunk.readout.norm_weight"
    for block in range(num_layers):
        there = f"transformer.h.{block}."
        for index, (kind, (norm, parameters)) in enumerate(SUBLAYERS.items(), 2 * block):
            for name in parameters:
                names[f"{there}{kind}.{name}.weight"] = f"trunk.sublayers.{index}.{name}.weight"
            if additive:
                names[f"{there}{norm}.weight"] = f"trunk.norms.{index}.weight"
                continue
            names[f"{there}{norm}.weight"] = f"trunk.reads.{index}.norm_weight"
            for name in GATES[gate]:
                names[f"{there}ddl_{kind}.{name}"] = f"trunk.residuals.{index}.{GATES[gate][name]}"
            for name in ("weight", "bias"):
                used = f"trunk.residuals.{index}.value.{name}"
                names[f"{there}ddl_{kind}.v_proj.{name}"] = used if value != "constant" else None
        names |= _compressor(residual, f"{there}compress.", f"trunk.reads.{2 * block}.")
    names |= _compressor(residual, "readout.", "trunk.readout.")
    if stream(residual)[1] == "conv":
        names[EXPANSION] = "trunk.expand.weight"
    return names


def _compressor(residual: Residual, there: str, here: str) -> dict[str, str | None]:
    kernels = {"token": TOKEN_KERNEL, "channel": CHANNEL_KERNEL}
    kernel = kernels.get(stream(residual)[0])
    if kernel is None:
        return {}
    return {f"{there}{kernel}": f"{here}compress_kernel", f"{there}read": f"{here}compress_read"}


# --- tensors --------------------------------------------------------------------------------------


def over_time(name: str) -> bool:
    """Return whether a parameter is a convolution over time.

    Its taps are in reverse order there: their last tap reads the current token, here the first one
    does. They flatten (feature, value channel) into one dimension.
    """
    return name.endswith((TOKEN_KERNEL, EXPANSION))


def to_ours(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert a tensor of layout c_proj to ours, of this shape."""
    return tensor.reshape(shape).flip(-1) if over_time(name) else tensor


def to_theirs(name: str, tensor: Tensor, layout: Layout = "c_proj") -> tuple[str, Tensor]:
    """Convert our tensor for a name of layout c_proj to `layout`, with its name there."""
    if over_time(name):
        tensor = tensor.flip(-1)  # (d, m, K)
    if layout == "o_proj":
        name = name.replace("shortconv.", "").replace("conv.", "")
        return name.replace(".c_proj.", ".o_proj."), tensor
    if over_time(name):
        tensor = tensor.flatten(0, 1)
    return name, tensor.unsqueeze(1) if name == EXPANSION else tensor


def from_layout(name: str, tensor: Tensor, hidden_size: int) -> tuple[str, Tensor]:
    """Convert a parameter of any published layout to layout c_proj."""
    name = name.replace(".o_proj.", ".c_proj.").replace(".shortconv.conv.", ".shortconv.")
    cube = tensor.ndim == 3
    if name == "input_embed.weight":
        return EXPANSION, tensor.flatten(0, 1).unsqueeze(1) if cube else tensor
    compressor = COMPRESSOR.fullmatch(name)
    if compressor is None or not cube:
        return name, tensor
    if not compressor[2]:
        return f"{compressor[1]}{TOKEN_KERNEL}", tensor.flatten(0, 1)
    kernel = CHANNEL_KERNEL if len(tensor) == hidden_size else TOKEN_KERNEL
    return f"{compressor[1]}{kernel}", tensor.squeeze(1)


# --- state dicts ----------------------------------------------------------------------------------


def cleaned(argument: str, state_dict: Mapping[Any, Any]) -> dict[str, tuple[str, Tensor]]:
    """The tensors of a state dict by their names without what wrappers of modules add, each with
    its original name. Raises InputError for a name that is there twice, and for other values."""
    tensors: dict[str, tuple[str, Tensor]] = {}
    for original, tensor in state_dict.items():
        name = without_wrappers(str(original))
        if name in tensors:
            raise InputError(argument, f"hold {name} once", f"{tensors[name][0]} and {original}")
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or name == COUNT):
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise InputError(argument, "hold floating-point tensors", f"{got} for {original}")
        tensors[name] = original, tensor
    return tensors


def check_state(
    argument: str, what: str, state: Mapping[str, Tensor], model: Mapping[str, Tensor]
) -> None:
    """Raise InputError unless a state dict has the names and shapes of a model's."""
    missing = [name for name in model if name not in state]
    check_keys(argument, what, missing, [name for name in state if name not in model])
    check_shapes(state, model)


def check_keys(argument: str, what: str, missing: list[str], unknown: list[str]) -> None:
    """Raise InputError with both lists unless both are empty."""
    wrong = [
        f"{len(names)} {kind} ({listed(names)})"
        for kind, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if wrong:
        raise InputError(argument, f"hold the parameters of {what}", " and ".join(wrong))


def check_shapes(state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Raise InputError unless each tensor of the model has its shape in the state dict."""
    pairs = ((name, tuple(state[name].shape), tuple(model[name].shape)) for name in model)
    wrong = [f"{got} instead of {must} for {name}" for name, got, must in pairs if got != must]
    if wrong:
        raise InputError.sentence(
            f"the parameters must have the config's shapes, got {listed(wrong)}"
        )
