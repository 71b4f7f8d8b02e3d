"""Transformers' models of the delta rule over time on our kernel, where they fall back to PyTorch.

Qwen3-Next, Qwen3.5, Kimi Linear and others compute it on a CPU by functions that each model's file
has a copy of. These are replaced, in the modules of the installed transformers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ddl.functional import delta_rule
from ddl.nn.mixers.mixer import unit

Function = Callable[..., tuple[Tensor, Tensor | None]]

# The functions of transformers, and whether g has an axis for the key features.
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": False,
    "torch_recurrent_gated_delta_rule": False,
    "chunk_kimi_delta_attention": True,
    "recurrent_kimi_delta_attention": True,
}
# Their arguments, besides `chunk_size`, which those by chunks have.
TAKEN = {
    *("query", "key", "value", "g", "beta", "initial_state"),
    *("output_final_state", "use_qk_l2norm_in_kernel", "kwargs"),
}


def accelerate_delta_rule() -> Callable[[], None]:
    """Let transformers' models of the delta rule run our kernel on a CPU, in training, too.

        undo = ddl.hf.accelerate_delta_rule()

    It holds for every model of these classes in the process, whenever it was made, until `undo()`;
    to call it again changes nothing. Logits, gradients and generated tokens are as before within
    rounding. Elsewhere than on a CPU, for packed sequences (cu_seqlens) and in torch.export
    transformers' own functions run. With DDL_ACCELERATE_DELTA_RULE=1 the import of `ddl.hf` calls
    it.

    Raises RuntimeError, and replaces nothing, if the installed transformers has no such function,
    or one that takes other arguments or computes something else.
    """
    found = [(module, name) for module in _modules() for name in FUNCTIONS if hasattr(module, name)]
    if not found:
        raise RuntimeError(_sentence("a model of the delta rule", "none"))
    ours = {
        (module, name): _accelerated(f"{module.__name__}.{name}", getattr(module, name), name)
        for module, name in found
        if not hasattr(getattr(module, name), "accelerates")
    }
    for (module, name), function in ours.items():
        setattr(module, name, function)

    def undo() -> None:
        for (module, name), function in ours.items():
            if getattr(module, name) is function:
                setattr(module, name, function.accelerates)

    return undo


@functools.cache
def _modules() -> tuple[Any, ...]:
    """The modules of transformers that define one of the functions."""
    assert transformers.__file__ is not None
    names = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if any(f"def {name}(" in text for name in FUNCTIONS):
            names.append(f"transformers.models.{path.parent.name}.{path.stem}")
    return tuple(map(importlib.import_module, names))


def _accelerated(where: str, function: Function, name: str) -> Any:
    """The function that replaces one of transformers', after it has been compared with it."""
    theirs: Function = inspect.unwrap(function)  # without its search for other packages
    signature = inspect.signature(theirs)
    names = signature.parameters.keys()
    if names - {"chunk_size"} != TAKEN:
        expected = f"the arguments {', '.join(sorted(TAKEN))} of {where}"
        raise RuntimeError(_sentence(expected, ", ".join(names)))

    @functools.wraps(theirs)
    def accelerated(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        packed = any(given["kwargs"].get(key) is not None for key in ("cu_seqlens", "seq_idx"))
        elsewhere = given["query"].device.type != "cpu" or torch.compiler.is_exporting()
        return function(*args, **kwargs) if packed or elsewhere else _compute(given)

    accelerated.accelerates = function  # type: ignore[attr-defined]
    _compare(where, theirs, accelerated, FUNCTIONS[name])
    return accelerated


def _compute(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Do what transformers' functions do, in float32 as they."""
    query, key, value, g, beta = (
        given[name].float() for name in ("query", "key", "value", "g", "beta")
    )
    if given["use_qk_l2norm_in_kernel"]:
        query, key = unit(query), unit(key)
    y, state = delta_rule(query, key, value, beta, g, initial_state=given["initial_state"])
    return y.to(given["query"].dtype), state if given["output_final_state"] else None


def _compare(where: str, theirs: Function, ours: Function, by_feature: bool) -> None:
    """Raise RuntimeError unless both compute the same outputs, on a small problem."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))
        g = -torch.rand(1, 5, 2, 4) if by_feature else -torch.rand(1, 5, 2)
        more = {"g": g, "beta": torch.rand(1, 5, 2), "initial_state": torch.randn(1, 2, 4, 4)}
        for normalised in (False, True):
            options = more | {"output_final_state": True, "use_qk_l2norm_in_kernel": normalised}
            pairs: Any = zip(ours(q, k, v, **options), theirs(q, k, v, **options), strict=True)
            if not all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in pairs):
                raise RuntimeError(_sentence(f"the gated delta rule in {where}", "another one"))


def _sentence(expected: str, got: str) -> str:
    return (
        f"`transformers` must have {expected}, as version 5.23 has, got {got} in "
        f"{transformers.__version__}: `ddl.hf.accelerate_delta_rule` replaces nothing"
    )
