"""The operators on NumPy arrays, with their gradients as functions, and without torch.

Functions, arguments and results are those of `ddl.functional`, which explains them; results have
the bits that it has on a CPU. Arrays may be float32, float16 and bfloat16 (of the package
ml_dtypes) in any mix, or all float64. An array that is not contiguous is copied, and values, gates
and states of `delta_rule` in half precision are converted. Other Python threads run meanwhile. An
operator uses as many threads as torch, or one per processor if torch is not loaded.

`…_vjp` takes the arguments of its operator and, by keyword, the gradients of its results; None is
zero. It computes the operator again, and returns the gradients of all arrays by their names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_args

from ddl import _native, options
from ddl.options import LEAST_EPS_K, LEAST_NORM_EPS
from ddl.results import ERASE, DeltaRuleResult, ReadResult, RewriteReadResult

try:
    import numpy as np
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("`ddl.arrays` needs numpy: pip install 'ddl-rs[arrays]'") from error

__all__ = [
    "delta_rule",
    "delta_rule_vjp",
    "expand",
    "expand_vjp",
    "read",
    "read_vjp",
    "rewrite",
    "rewrite_read",
    "rewrite_read_vjp",
    "rewrite_vjp",
]

Array = np.ndarray[Any, Any]
_READ = ("context", "new_value", "new_gate")


def rewrite(
    state: Array,
    direction: Array,
    value: Array,
    gate: Array,
    *,
    eps_k: float,
    erase: options.Erase = "tied",
) -> Array:
    """Return X' (…, d, m), the rewritten state."""
    return _call("rewrite", locals())["new_state"]


def rewrite_vjp(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the gradients of `rewrite` from `grad_new_state`."""
    return _vjp(rewrite, arguments, named, "new_state")


def read(
    state: Array,
    *,
    compress: Array | None = None,
    norm_weight: Array | None = None,
    norm_eps: float | None = 1e-5,
    gate_weight: Array | None = None,
    gate_bias: Array | None = None,
    value_weight: Array | None = None,
    value_bias: Array | None = None,
    value_scale: float | None = None,
    value_from: str = "context",
    context_dtype: Any = None,
    document_starts: Array | None = None,
) -> ReadResult:
    """Return the context, value and gate. context_dtype: what `np.dtype` takes."""
    results: Any = map(_call("read", locals()).get, _READ)
    return ReadResult(*results)


def read_vjp(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the gradients of `read` from `grad_context`, `grad_new_value`, `grad_new_gate`."""
    return _vjp(read, arguments, named, *_READ)


def rewrite_read(
    state: Array,
    direction: Array,
    value: Array,
    gate: Array,
    *,
    eps_k: float,
    erase: options.Erase = "tied",
    compress: Array | None = None,
    norm_weight: Array | None = None,
    norm_eps: float | None = 1e-5,
    gate_weight: Array | None = None,
    gate_bias: Array | None = None,
    value_weight: Array | None = None,
    value_bias: Array | None = None,
    value_scale: float | None = None,
    value_from: str = "context",
    context_dtype: Any = None,
    document_starts: Array | None = None,
) -> RewriteReadResult:
    """Return X', and the context, value and gate that `read` computes from it."""
    results: Any = map(_call("rewrite_read", locals()).get, ("new_state", *_READ))
    return RewriteReadResult(*results)


def rewrite_read_vjp(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the gradients of `rewrite_read` from `grad_new_state` and those of `read_vjp`."""
    return _vjp(rewrite_read, arguments, named, "new_state", *_READ)


def expand(
    x: Array,
    weight: Array | None = None,
    *,
    value_channels: int,
    document_starts: Array | None = None,
) -> Array:
    """Return the state X (…, d, m) with m value channels."""
    return _call("expand", locals())["state"]


def expand_vjp(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the gradients of `expand` from `grad_state`."""
    return _vjp(expand, arguments, named, "state")


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    g: Array | None = None,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    document_starts: Array | None = None,
) -> DeltaRuleResult:
    """Return y (B, T, H, V) and the final state (B, H, K, V)."""
    return DeltaRuleResult(*_call("delta_rule", locals()).values())


def delta_rule_vjp(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the gradients of `delta_rule` from `grad_y` and `grad_final_state`."""
    return _vjp(delta_rule, arguments, named, "y", "final_state")


_LEAST = {"eps_k": LEAST_EPS_K, "norm_eps": LEAST_NORM_EPS, "value_scale": 0.0, "scale": 0.0}
_CHOICES = {"erase": ERASE, "value_from": get_args(options.ValueFrom)}
_GATES = {"value", "gate", "beta", "g", "initial_state"}
_WITHOUT_GRADIENT = {*_LEAST, *_CHOICES, "value_channels", "context_dtype", "document_starts"}


def _call(operator: str, given: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Check the arguments, run the operator, and return its results by name."""
    double = getattr(next(iter(given.values())), "dtype", None) == np.float64
    arguments = {name: _checked(name, value, double) for name, value in given.items()} | others
    arguments["erase"] = ERASE.index(arguments.get("erase", "tied"))
    arguments["value_from_compressed"] = arguments.get("value_from") == "compressed"
    threads = getattr(sys.modules.get("torch"), "get_num_threads", lambda: None)()
    try:
        return _native.on_arrays(operator, arguments, threads)
    except TypeError as error:
        sentence = str(error).replace("torch.Tensor", "numpy.ndarray").replace("torch.", "")
        raise TypeError(sentence) from None


def _vjp(operator: Callable[..., Any], arguments: Any, named: Any, *results: str) -> dict[str, Any]:
    """Return the gradients of an operator's arrays from those of its results."""
    grads = {f"grad_{name}": named.pop(f"grad_{name}", None) for name in results}
    bound = inspect.signature(operator).bind(*arguments, **named)
    bound.apply_defaults()
    name, given = operator.__name__, bound.arguments | grads
    outputs = _call(name, given, saves=True)
    if len(results) == 1 and given[f"grad_{results[0]}"] is None:
        given[f"grad_{results[0]}"] = np.zeros_like(outputs[results[0]])
    found = _call(f"{name}_backward", given, wanted=-1, **outputs)
    return {
        name: None if x is None else found[f"grad_{name}"].astype(x.dtype, copy=False)
        for name, x in bound.arguments.items()
        if name not in _WITHOUT_GRADIENT
    }


def _checked(name: str, value: Any, double: bool) -> Any:
    """Return an argument as native code takes it. double: whether the first array is float64."""
    if name in _LEAST:
        options.check_positive(name, value, optional=name != "eps_k", least=_LEAST[name])
    elif name in _CHOICES:
        options.check_choice(name, value, _CHOICES[name])
    elif name == "value_channels":
        options.check_count(name, value)
    elif value is None:
        return None  # native code refuses it if it is needed
    elif name == "context_dtype":
        allowed = ("float64",) if double else ("float32", "bfloat16", "float16")
        if (value := np.dtype(value).name) not in allowed:
            raise TypeError(f"`{name}` must be {' or '.join(allowed)}, got {value}")
    elif not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"`{name}` must be a numpy.ndarray, got {type(value).__name__}")
    else:
        if name in _GATES and value.dtype.name in ("float16", "bfloat16"):
            value = value.astype(np.float64 if double else np.float32)
        value = np.require(value, requirements=["C", "A"])
    return value
