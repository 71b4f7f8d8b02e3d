"""The one table of options, and the checks of numbers, choices and options. No torch in here.

The table holds the rule of an option. Its documentation stands beside the argument or the field,
and so does its default, again: tests/config/test_options.py holds signatures and fields against the
table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from ddl.errors import InputError

LEAST_EPS_K = 1e-18  # float32 holds its square (src/problem)
LEAST_NORM_EPS = 1e-36  # float32 holds it under a root
LARGEST = sys.float_info.max
LARGEST_COUNT = 2**63 - 1

# --- checks: each raises InputError, a ValueError -------------------------------------------------


def refuse(name: str, expected: str, got: object) -> NoReturn:
    raise InputError(f"`{name}` must be {expected}, got {got!r}")


def check_count(
    name: str,
    number: Any,
    *,
    optional: bool = False,
    least: int = 1,
    kinds: tuple[type, ...] = (Integral,),
) -> None:
    """Refuse all but integers of at least `least`, NumPy's included, and None if it is optional."""
    if number is None and optional:
        return
    if not is_whole(number, kinds) or number < least:
        refuse(name, f"an integer of at least {least}", number)
    if number > LARGEST_COUNT:
        refuse(name, f"at most {LARGEST_COUNT}", number)


def check_positive(
    name: str,
    number: Any,
    *,
    optional: bool = False,
    least: float = 0.0,
    kinds: tuple[type, ...] = (float, Real),
) -> None:
    """Refuse all but positive finite numbers of at least `least`, and None if it is optional."""
    if number is None and optional:
        return
    if not is_number(number, kinds) or not number > 0 or not _is_finite(number):
        refuse(name, "a positive finite number", number)
    if number < least:
        refuse(name, f"at least {least:g}", number)


def check_finite(name: str, number: Any) -> None:
    """Refuse all but finite numbers."""
    if not is_number(number) or not _is_finite(number):
        refuse(name, "a finite number", number)


def check_between(name: str, number: Any, low: float, high: float) -> None:
    """Refuse all but numbers in (low, high)."""
    if not is_number(number) or not low < number < high:
        refuse(name, f"between {low} and {high}, both excluded", number)


def check_least(name: str, number: Any, least: float = 0) -> None:
    """Refuse all but numbers of at least `least`; infinity passes."""
    if not is_number(number) or not number >= least:
        refuse(name, f"at least {least}", number)


def check_flag(name: str, flag: Any) -> None:
    """Refuse all but True and False."""
    if not isinstance(flag, bool):
        refuse(name, "True or False", flag)


def check_choice(name: str, choice: Any, choices: Sequence[str]) -> None:
    """Refuse all but the choices."""
    if choice not in choices:
        refuse(name, quoted(choices), choice)


def is_whole(number: Any, kinds: tuple[type, ...] = (Integral,)) -> bool:
    """Whether it is an integer, NumPy's included; a bool is none."""
    return isinstance(number, kinds) and not isinstance(number, bool)


def is_number(number: Any, kinds: tuple[type, ...] = (float, Real)) -> bool:
    """Whether it is a real number, NumPy's included; a bool is none."""
    return isinstance(number, kinds) and not isinstance(number, bool)


def _is_finite(number: Any) -> bool:
    """Whether a float can hold it: integers, as JSON has them, can be beyond every float."""
    if isinstance(number, int):
        return -LARGEST <= number <= LARGEST
    return -math.inf < number < math.inf


def quoted(choices: Iterable[str]) -> str:
    """The choices as a caller would write them."""
    return " or ".join(f'"{choice}"' for choice in choices)


# --- the table ------------------------------------------------------------------------------------

Mapping = Literal["k", "v"]
Gate = Literal["linear", "mlp"]
GateFrom = Literal["context", "pooled", "convolved"]
Direction = Literal["linear", "mean", "flatten", "attention"]
Value = Literal["linear", "sigmoid", "constant"]
ValueFrom = Literal["context", "compressed"]
Compress = Literal["identity", "channel", "token"]
Parameterization = Literal["direct", "factored"]
ExpandKind = Literal["repeat", "conv"]
Residual = Literal["additive", "ddl", "ddl-cc", "ddl-cc-noec", "ddl-tc", "ddl-tc-noec"]


class Option(NamedTuple):
    """One option: its default, its choices or the check of its value, and when it has an effect.

    used: cases, any of which gives it an effect; a case names options and the values, separated by
    spaces, that each of them may have. Without a case it always has an effect.
    """

    default: Any
    allowed: tuple[str, ...] | Callable[[str, Any], None]
    used: Sequence[dict[str, str]] = ()


Options = dict[str, Option]

# DeltaResidual's; DeltaStream and GPTConfig have the same names for them.
RESIDUAL_OPTIONS: Options = {
    "mapping": Option("k", get_args(Mapping)),
    "gate": Option("linear", get_args(Gate)),
    "gate_hidden": Option(128, check_count, [{"gate": "mlp"}]),
    "gate_from": Option("context", get_args(GateFrom)),
    "gate_kernel_size": Option(4, check_count, [{"gate_from": "convolved"}]),
    "direction": Option("linear", get_args(Direction), [{"mapping": "v"}]),
    "direction_hidden": Option(128, check_count, [{"direction": "mean flatten attention"}]),
    "value": Option("linear", get_args(Value)),
    "value_init": Option(1.0, check_finite, [{"value": "linear", "mapping": "k"}]),
    "value_scale": Option(4.0, check_positive, [{"value": "sigmoid"}]),
    "value_constant": Option(2.0, check_finite, [{"value": "constant"}]),
    "value_from": Option(
        "context", get_args(ValueFrom), [{"mapping": "k", "value": "linear sigmoid"}]
    ),
    "beta_init": Option(1.0, partial(check_between, low=0, high=2)),
    "eps_k": Option(None, partial(check_positive, optional=True, least=LEAST_EPS_K)),
}

# DeltaStream's, and Read's and Expand's under DeltaStream's names.
STREAM_OPTIONS: Options = {
    "compress": Option("identity", get_args(Compress)),
    "kernel_size": Option(
        4, check_count, [{"compress": "token"}, {"parameterization": "factored"}]
    ),
    "parameterization": Option(
        "direct", get_args(Parameterization), [{"compress": "channel token"}]
    ),
    "causal": Option(False, check_flag, [{"compress": "channel", "parameterization": "factored"}]),
    "norm_eps": Option(1e-5, partial(check_positive, optional=True, least=LEAST_NORM_EPS)),
    "expand": Option("repeat", get_args(ExpandKind)),
    "expand_kernel_size": Option(4, check_count, [{"expand": "conv"}]),
    "sublayers_per_compressor": Option(2, check_count, [{"compress": "channel token"}]),
}

# GPTConfig's own.
MODEL_OPTIONS: Options = {
    "residual": Option("ddl-cc", get_args(Residual)),
    "vocab_size": Option(50304, check_count),
    "block_size": Option(1024, check_count),
    "num_layers": Option(12, check_count),
    "num_heads": Option(6, check_count),
    "head_size": Option(None, partial(check_count, optional=True)),
    "hidden_size": Option(768, check_count),
    "rope_base": Option(10000.0, check_positive),
    "value_channels": Option(4, check_count, [{"compress": "channel token"}]),
}

# (name, values) as in the table → the same as the caller spells them.
Spelling = Callable[[str, Sequence[str]], tuple[str, Sequence[str]]]


def as_it_is(name: str, values: Sequence[str]) -> tuple[str, Sequence[str]]:
    return name, values


def check_options(given: dict[str, Any], options: Options, spelling: Spelling = as_it_is) -> None:
    """Refuse an option that is unknown, out of range or, unless it has its default, without effect.

    given: values by the table's names; others are not looked at. spelling: the caller's own names,
    for the sentence.
    """
    known = {name: option for name, option in options.items() if name in given}
    for name, (_, allowed, _) in known.items():
        check = allowed if callable(allowed) else partial(check_choice, choices=allowed)
        check(spelling(name, ())[0], given[name])
    for name, option in known.items():
        if not _has_effect(option, given):
            check_left(given, {name: option}, _written(option.used, spelling), spelling)


def _has_effect(option: Option, given: dict[str, Any]) -> bool:
    cases = [[given[other] in values.split() for other, values in c.items()] for c in option.used]
    return not cases or any(map(all, cases))


def _written(used: Sequence[dict[str, str]], spelling: Spelling) -> str:
    """The cases as a caller would write them: `mapping="k" and value="linear" or "sigmoid"`."""
    cases = [[spelling(other, values.split()) for other, values in c.items()] for c in used]
    return " or ".join(
        " and ".join(f"{other}={quoted(values)}" for other, values in case) for case in cases
    )


def check_left(
    given: dict[str, Any], options: Options, when: str, spelling: Spelling = as_it_is
) -> None:
    """Refuse an option that is not left at its default, because it has an effect only `when`."""
    for name, option in options.items():
        if given[name] != option.default:
            expected = f"left at {option.default!r} unless {when}"
            refuse(spelling(name, ())[0], expected, given[name])


def check_residual(given: dict[str, Any], value_channels: int) -> None:
    """Refuse options of DeltaResidual, each for itself and together."""
    check_options(given, RESIDUAL_OPTIONS)
    if given["mapping"] == "v" and given["value"] == "constant":
        raise InputError('`value` must be "linear" or "sigmoid" with mapping="v", got "constant"')
    if given["direction"] == "attention" and value_channels == 1:
        raise InputError(
            '`direction` must be "linear", "mean" or "flatten" with 1 value channel, '
            'got "attention"'
        )
