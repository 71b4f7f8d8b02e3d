"""The single table of options, and checks of numbers, choices and options. It imports no torch.

The table has an option's default, its allowed values and when it has an effect. The argument or
field documents the option and repeats its default; tests/lab/config/test_options.py compares them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from ddl.errors import InputError

# As in native code, without which `ddl doctor` has to run: tests compare them.
LEAST_EPS_K = 1e-18
LEAST_NORM_EPS = 1e-36
MOST_REWRITES = 8
MOST_LINKS = 31
LEAST_BETA = 2e-6  # initial gates are clamped to [LEAST_BETA, 2 − LEAST_BETA]
LARGEST_COUNT = 2**63 - 1
MOST_LAYERS = 2**14  # a mistyped number would build modules for hours

# --- checks: each raises InputError, a ValueError -------------------------------------------------


def refuse(name: str, expected: str, got: object, others: tuple[str, ...] = ()) -> NoReturn:
    raise InputError(name, f"be {expected}", repr(got), others)


def check_count(
    name: str, number: Any, *, optional: bool = False, least: int = 1, most: int = LARGEST_COUNT
) -> None:
    """Raise unless `number` is an integer (NumPy's included) in [least, most] or optional None."""
    if number is None and optional:
        return
    if not is_whole(number) or number < least:
        refuse(name, f"an integer of at least {least}", number)
    if number > most:
        refuse(name, f"at most {most}", number)


def check_positive(name: str, number: Any, *, optional: bool = False, least: float = 0.0) -> None:
    """Raise unless `number` is positive, finite and ≥ `least`, or None if optional."""
    _check_number(name, number, "a positive finite number", lambda n: 0 < n < math.inf, optional)
    if number is not None and number < least:
        refuse(name, f"at least {least:g}", number)


def check_finite(name: str, number: Any) -> None:
    """Raise unless `number` is finite."""
    _check_number(name, number, "a finite number", lambda n: abs(n) < math.inf)


def check_between(name: str, number: Any, low: float, high: float) -> None:
    """Raise unless `number` is in the closed interval [low, high]."""
    _check_number(name, number, f"between {low} and {high}", lambda n: low <= n <= high)


def check_share(name: str, number: Any, *, optional: bool = False) -> None:
    """Raise unless `number` is in the half-open interval (0, 1], or None if optional."""
    _check_number(name, number, "above 0 and at most 1", lambda n: 0 < n <= 1, optional)


def check_least(name: str, number: Any, least: float = 0) -> None:
    """Raise unless `number` ≥ `least`; infinity is allowed."""
    _check_number(name, number, f"at least {least}", lambda n: n >= least)


def _check_number(
    name: str, number: Any, expected: str, fits: Callable[[Any], bool], optional: bool = False
) -> None:
    if not (number is None and optional) and not (is_number(number) and fits(number)):
        refuse(name, expected, number)


def check_flag(name: str, flag: Any) -> None:
    """Raise unless `flag` is True or False."""
    if not isinstance(flag, bool):
        refuse(name, "True or False", flag)


def check_choice(name: str, choice: Any, choices: Sequence[str], *, optional: bool = False) -> None:
    """Raise unless `choice` is one of `choices` or optional None."""
    if choice not in choices and not (choice is None and optional):
        refuse(name, quoted(choices) + (" or None" if optional else ""), choice)


def is_whole(number: Any) -> bool:
    """Return whether `number` is an integer, NumPy's included; a bool is not."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def is_number(number: Any) -> bool:
    """Return whether `number` is a real number, NumPy's included; a bool is not, nor is an integer
    beyond torch's 64 bits, which JSON, TOML and Python have."""
    if isinstance(number, int) and abs(number) > LARGEST_COUNT:
        return False
    return isinstance(number, Real) and not isinstance(number, bool)


def check_known(given: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Raise TypeError, with a near name or all of them, for a name that `owner` does not know."""
    for name in given:
        if name not in known:
            hint = near(name, known) or f": it has {', '.join(known)}"
            raise TypeError(f"`{name}` must be an option of {owner}, got an unknown one{hint}")


def near(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the one that may be meant; empty for none."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean `{found[0]}`?" if found else ""


def quoted(choices: Iterable[str]) -> str:
    """The choices as a caller writes them: `"a" or "b"`."""
    return " or ".join(f'"{choice}"' for choice in choices)


# --- options of stored models that are gone -------------------------------------------------------

LAST_COMMIT = "600add3e"  # the last with these options
REMOVED: dict[str, tuple[Any, ...]] = {  # option → the values that models still have
    "heads": (1,),
    "normalize": (True,),
    "erase": ("tied", "none"),
}


def without_removed(stored: dict[str, Any]) -> dict[str, Any]:
    """Return stored options of a model without those that are gone, which must have had no effect.

    Raises InputError with the name of one that had.
    """
    own = {"normalize", "erase"} if stored.get("residual") == "expanded" else set()
    for name, values in REMOVED.items():
        if name not in own and stored.get(name, values[0]) not in values:
            must, got = " or ".join(map(repr, values)), repr(stored[name])
            why = f"which can no longer be built; commit {LAST_COMMIT} is the last that can"
            raise InputError.sentence(f"`{name}` must be {must}, got {got}, {why}")
    gone = {"heads", "normalize"} | own
    return {name: value for name, value in stored.items() if name not in gone}


# --- the table ------------------------------------------------------------------------------------

Mapping = Literal["k", "v"]
Gate = Literal["linear", "mlp"]
GateFrom = Literal["context", "pooled", "convolved", "flatten"]
Direction = Literal["linear", "mean", "flatten", "attention"]
Value = Literal["linear", "sigmoid", "constant"]
Erase = Literal["tied", "none"]
ValueFrom = Literal["context", "compressed"]
Compress = Literal["identity", "channel", "token"]
Scaling = Literal["standard", "mup", "completep"]  # of a model with width and depth
InitialWeights = Literal["standard", "paper-code"]
Parameterization = Literal["direct", "factored"]
ExpandKind = Literal["repeat", "conv"]
MixerKind = Literal[
    "deltanet",
    "deltaproduct",
    "multi-head",
    "multi-kv",
    "multi-value",
    "multi-key",
    "multi-query",
]
Mixer = Literal["attention", MixerKind]
MixerGated = Literal[False, True, "per-feature"]
StreamDtype = Literal["bfloat16", "float16"]
Residual = Literal[
    "additive",
    "additive-conv",
    "hc",
    "mhc",
    "independent-hc",
    "gated",
    "attention-residual",
    "ddl",
    "ddl-cc",
    "ddl-cc-noec",
    "ddl-cc-none",
    "ddl-tc",
    "ddl-tc-noec",
    "ddl-tc-none",
    "expanded",
]


class Option(NamedTuple):
    """One option: its default, its allowed values, and when it has an effect.

    allowed: a Literal of the choices, or a check called with the name and the value. None is
    allowed, too, if it is the default.
    used: cases, each a dict from other options to their values, separated by spaces. The option has
    an effect if all conditions of one case hold; with no case it always has one.
    """

    default: Any
    allowed: Any
    used: Sequence[dict[str, str]] = ()


Options = dict[str, Option]


def check_layers(name: str, layers: Any) -> None:
    """Raise unless `layers` are numbers from 0 on, each once."""
    fits = isinstance(layers, list | tuple) and all(is_whole(i) and i >= 0 for i in layers)
    if not fits or not layers or len(set(layers)) != len(layers):
        refuse(name, "one or more numbers of layers from 0 on, each once, or None", layers)


def check_mixer_gated(name: str, gated: Any) -> None:
    """Raise unless `gated` is one of MixerGated; 1 and 0 are none of them."""
    if not isinstance(gated, bool) and gated != "per-feature":
        refuse(name, 'True, False or "per-feature"', gated)


# DeltaResidual's; DeltaStream and GPTConfig have the same names for them.
RESIDUAL_OPTIONS: Options = {
    "mapping": Option("k", Mapping),
    "gate": Option("linear", Gate),
    "gate_hidden": Option(128, check_count, [{"gate": "mlp"}]),
    "gate_from": Option("context", GateFrom),
    "gate_kernel_size": Option(4, check_count, [{"gate_from": "convolved"}]),
    "direction": Option("linear", Direction, [{"mapping": "v"}]),
    "direction_hidden": Option(128, check_count, [{"direction": "mean flatten attention"}]),
    "value": Option("linear", Value),
    "value_init": Option(1.0, check_finite, [{"value": "linear", "mapping": "k"}]),
    "value_scale": Option(4.0, check_positive, [{"value": "sigmoid"}]),
    "value_constant": Option(2.0, check_finite, [{"value": "constant"}]),
    "value_from": Option("context", ValueFrom, [{"mapping": "k", "value": "linear sigmoid"}]),
    "rewrites": Option(1, partial(check_count, most=MOST_REWRITES), [{"mapping": "k"}]),
    "direction_rank": Option(None, check_count, [{"mapping": "k"}]),
    "beta_init": Option(1.0, partial(check_between, low=0, high=2)),
    "erase": Option("tied", Erase),
    "branch_scale": Option(1.0, check_finite),
    "eps_k": Option(None, partial(check_positive, least=LEAST_EPS_K)),
}

# DeltaStream's, and Read's and Expand's under DeltaStream's names.
STREAM_OPTIONS: Options = {
    "compress": Option("identity", Compress),
    "kernel_size": Option(
        4, check_count, [{"compress": "token"}, {"compress_parameterization": "factored"}]
    ),
    "compress_parameterization": Option(
        "direct", Parameterization, [{"compress": "channel token"}]
    ),
    "causal": Option(
        False, check_flag, [{"compress": "channel", "compress_parameterization": "factored"}]
    ),
    "read_init": Option(None, check_finite, [{"compress": "channel token"}]),
    "norm_eps": Option(1e-5, partial(check_positive, optional=True, least=LEAST_NORM_EPS)),
    "norm_affine": Option(True, check_flag),
    "expand": Option("repeat", ExpandKind),
    "expand_kernel_size": Option(4, check_count, [{"expand": "conv"}]),
    "sublayers_per_compressor": Option(2, check_count, [{"compress": "channel token"}]),
    "anchor_every": Option(None, partial(check_count, most=MOST_LINKS + 1)),
    "stream_dtype": Option(None, StreamDtype),
}

MIXERS = " ".join(get_args(MixerKind))
SEVERAL_NUMBERS = MIXERS.removeprefix("deltanet ")

# DeltaMixer's.
MIXER_OPTIONS: Options = {
    "kind": Option("deltanet", MixerKind),
    "n": Option(1, check_count, [{"kind": SEVERAL_NUMBERS}]),
    "gated": Option(False, check_mixer_gated),
}

EXPANDED_STATES = "ddl-cc ddl-cc-noec ddl-tc ddl-tc-noec"
SEVERAL_STREAMS = "hc mhc independent-hc gated"  # residuals with n streams and without rewrites

# GPTConfig's own.
MODEL_OPTIONS: Options = {
    "residual": Option("ddl-cc", Residual),
    "vocab_size": Option(50304, check_count),
    "block_size": Option(1024, check_count),
    "num_layers": Option(12, partial(check_count, most=MOST_LAYERS)),
    "num_heads": Option(6, check_count),
    "head_size": Option(None, check_count),
    "hidden_size": Option(768, check_count),
    "mlp_size": Option(None, check_count),
    "rope_base": Option(10000.0, check_positive),
    "mixer": Option("attention", Mixer),
    "mixer_layers": Option(None, check_layers, [{"mixer": MIXERS}]),
    "mixer_n": Option(1, check_count, [{"mixer": SEVERAL_NUMBERS}]),
    "mixer_gated": Option(False, check_mixer_gated, [{"mixer": MIXERS}]),
    "parameterization": Option("standard", Scaling),
    "base_width": Option(None, check_count, [{"parameterization": "mup completep"}]),
    "base_layers": Option(None, check_count, [{"parameterization": "completep"}]),
    "initial_weights": Option(
        "standard",
        InitialWeights,
        [{"parameterization": "standard", "residual": f"additive ddl {EXPANDED_STATES}"}],
    ),
    "value_channels": Option(
        4, check_count, [{"residual": f"{EXPANDED_STATES} expanded {SEVERAL_STREAMS}"}]
    ),
    "gated_rank": Option(None, check_count, [{"residual": "gated"}]),
    "sublayers_per_block": Option(None, check_count, [{"residual": "attention-residual"}]),
}


def spread_anchors(sublayers: int, value_channels: int, device_type: str = "cpu") -> int:
    """The default of `anchor_every` for states on a device of this type (torch.device.type).

    One state in 8 is stored, on a CUDA device one in 4, spread evenly over the sublayers. On a GPU
    each rewrite that the backward applies again is one more wait for memory in every token
    (docs/decisions/anchors.md). Of 12 sublayers on a CPU it is one state in 12: the second of one
    in 8 would serve only 4 rewrites. With one value channel a state costs no more than a direction,
    so every state is stored.
    """
    if value_channels == 1:
        return 1
    least = 4 if device_type == "cuda" else 8
    return max(least, math.ceil(sublayers / max(1, sublayers // least)))


def check_options(
    given: dict[str, Any], options: Options, spelling: Callable[..., Any] = lambda *same: same
) -> None:
    """Raise if an option's value is not allowed, or has no effect and is not the default.

    given: values by the table's names; other names are ignored. spelling: converts a name and
    values of the table to the caller's, for the error message.
    """
    known = {name: option for name, option in options.items() if name in given}
    for name, (default, allowed, _) in known.items():
        value, spelled = given[name], spelling(name, ())[0]
        if choices := get_args(allowed):
            check_choice(spelled, value, choices, optional=default is None)
        elif value is not None or default is not None:
            allowed(spelled, value)
    for name, option in known.items():
        if not has_effect(option, given):
            cases = [[spelling(n, values.split()) for n, values in c.items()] for c in option.used]
            conditions = [[f"{other}={quoted(values)}" for other, values in c] for c in cases]
            when = " or ".join(map(" and ".join, conditions))
            others = tuple(other for case in cases for other, _ in case)
            spelled = spelling(name, ())[0]
            check_left({spelled: given[name]}, {spelled: option}, when, others)


def has_effect(option: Option, given: dict[str, Any]) -> bool:
    """Return whether one of the option's cases holds. given: values by the table's names."""
    cases = [[given[other] in values.split() for other, values in c.items()] for c in option.used]
    return not cases or any(map(all, cases))


def check_left(
    given: dict[str, Any], options: Options, when: str, others: tuple[str, ...] = ()
) -> None:
    """Raise if an option is not at its default, because it has an effect only `when`.

    others: options that `when` names.
    """
    for name, option in options.items():
        if given[name] != option.default:
            refuse(name, f"left at {option.default!r} unless {when}", given[name], others)


def check_residual(given: dict[str, Any], value_channels: int) -> None:
    """Check DeltaResidual's options, each by itself and in combination."""
    check_options(given, RESIDUAL_OPTIONS)
    if given["mapping"] == "v" and given["value"] == "constant":
        raise InputError(
            "value", 'be "linear" or "sigmoid" with mapping="v"', '"constant"', ("mapping",)
        )
    if given["direction_rank"] is not None and given["rewrites"] == 1:
        got = given["direction_rank"]
        raise InputError("direction_rank", "be left at None with 1 rewrite", got)
    if given["direction"] == "attention" and value_channels == 1:
        raise InputError(
            "direction", 'be "linear", "mean" or "flatten" with 1 value channel', '"attention"'
        )
