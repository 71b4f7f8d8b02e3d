"""The options of a converted nanoGPT, from the names and shapes in its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddl.options import without_removed

__all__ = ["BLOCKS", "assumptions", "shown"]

BLOCKS = "transformer.h."
# Options that no name or shape shows, with the defaults of `ddl.nanogpt.convert`.
HIDDEN = {
    "gate_from": "context",
    "value": "linear",
    "value_from": "context",
    "erase": "tied",
    "branch_scale": 1.0,
}


def shown(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options of `ddl.nanogpt.convert` that names and shapes show, but not `start`.

    state: a converted model's. What is not recognised is left out, so a model that is made with
    these options has the state's names and shapes only if all were understood.
    """
    here = {
        name.removeprefix(f"{BLOCKS}0."): tuple(tensor.shape)
        for name, tensor in state.items()
        if name.startswith(f"{BLOCKS}0.")
    }
    options = _stream(here) | _residual(here)
    own = [name for name in state if ".read_" in name and name.endswith(("_weight", "_kernel"))]
    sublayers = sorted(2 * int(name.split(".")[2]) + (".read_mlp." in name) for name in own)
    if len(sublayers) > 1:
        options["sublayers_per_compressor"] = sublayers[1] - sublayers[0]
    elif sublayers:  # all read with the first one's weights
        blocks = {name.split(".")[2] for name in state if name.startswith(BLOCKS)}
        options["sublayers_per_compressor"] = max(2, 2 * len(blocks))
    return options


def assumptions(options: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the defaults of what neither `options` nor names and shapes say."""
    assumed: dict[str, Any] = {"eps_k": 0.02 * hidden_size**0.5}
    mapping = options.get("mapping", "k")
    for name, default in HIDDEN.items():
        if name != "value_from" or mapping == "k":
            assumed[name] = default
    if (
        options.get("compress_parameterization") == "factored"
        and options.get("compress") == "channel"
    ):
        assumed["causal"] = False
    if options.get("value") == "constant":
        assumed["value_constant"] = 2.0
        assumed.pop("value_from", None)
    return {name: value for name, value in assumed.items() if name not in options}


def _stream(here: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The options of expansion and reads."""
    options: dict[str, Any] = {}
    direct, factored = (here.get(f"read_attn.compress_{part}") for part in ("weight", "kernel"))
    expanded = here.get("expand.weight")
    if direct is not None and len(direct) in (2, 3):
        options |= {"value_channels": direct[1], "compress": "channel"}
        if len(direct) == 3:
            options |= {"compress": "token", "kernel_size": direct[2]}
    if factored is not None and len(factored) in (2, 3):
        options |= {"value_channels": here.get("read_attn.compress_read", (1,))[0]}
        options |= {"compress": "token" if len(factored) == 3 else "channel"}
        options |= {"compress_parameterization": "factored", "kernel_size": factored[-1]}
    if expanded is not None and len(expanded) == 3:
        options |= {"value_channels": expanded[1], "expand": "conv"}
        options |= {"expand_kernel_size": expanded[2]}
    return options


def _residual(here: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The options of the rewrites, those of the first sublayer."""
    own = {
        name.removeprefix("res_attn."): shape
        for name, shape in here.items()
        if name.startswith("res_attn.")
    }
    options: dict[str, Any] = {}
    d, m = here.get("ln_1.weight", (1,))[0], _stream(here).get("value_channels", 1)
    gate = own.get("gate.weight") or own.get("gate.2.weight") or (1, d)
    first = own.get("gate.0.weight") or gate
    if "gate.0.weight" in own:
        options |= {"gate": "mlp", "gate_hidden": first[0]}
    if "gate_pool.weight" in own:
        options |= {"gate_from": "convolved", "gate_kernel_size": own["gate_pool.weight"][-1]}
    elif m > 1 and first[-1] == d * m:
        options |= {"gate_from": "flatten"}
    options |= _writes(own, gate[0], d, m)
    if "further.down.weight" in own:
        options |= {"direction_rank": own["further.down.weight"][0]}
    if "value.weight" not in own:
        options |= {"value": "constant"}
    return options | _direction(own, d, m)


def _writes(own: Mapping[str, tuple[int, ...]], gates: int, d: int, m: int) -> dict[str, Any]:
    """The number of rewrites. Raises InputError for several heads, and for gates that erase."""
    rewrites = 1 + own.get("further.up.weight", (0,))[0] // d
    if rewrites == 1 and "value.weight" in own:
        without_removed({"heads": max(1, own["value.weight"][0] // m)})
    without_removed({"erase": "separate" if gates > rewrites else "tied"})
    return {"rewrites": rewrites} if rewrites > 1 else {}


def _direction(own: Mapping[str, tuple[int, ...]], d: int, m: int) -> dict[str, Any]:
    """The options of a v-Map's branch, if there is one."""
    if "direction.weight" in own:
        return {"mapping": "v"}
    if "direction.query.weight" in own:
        hidden = own["direction.query.weight"][0]
        return {"mapping": "v", "direction": "attention", "direction_hidden": hidden}
    if "direction.hidden.weight" in own:
        hidden, width = own["direction.hidden.weight"]
        kind = "flatten" if m > 1 and width == d * m else "mean"
        return {"mapping": "v", "direction": kind, "direction_hidden": hidden}
    return {}
