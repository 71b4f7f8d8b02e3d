"""Any arguments give the operators' result in the right shapes or an exception, never a crash.

A panic in native code raises PanicException, which is no `Exception`, and so fails these tests.
Two kinds of arguments are left out, because `ddl.functional` refuses them before the operators:
None for a required tensor, and a state or x without axes. Whether results are right is asked by
tests/soak, of arguments as random as these.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import ddl.ops  # noqa: F401  registers torch.ops.ddl
from tests.support.layouts import LAYOUTS, laid_out

REFUSALS = (ValueError, TypeError, RuntimeError)  # NotImplementedError is a RuntimeError
FORWARD = ["rewrite", "read", "rewrite_read", "expand"]
BACKWARD = [f"{name}_backward" for name in FORWARD]
NEEDED = ("state", "direction", "value", "gate", "x", "grad_state", "stats")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
BATCHES = [(), (3,), (2, 3), (0,), (2, 0), (0, 0), (1, 1, 2)]
POSITIVE = [0.1, 1e300]
ANY_NUMBER = [*POSITIVE, 1e-300, 0.0, -1.0, float("nan"), float("inf")]
FILL = [0.0, 1.0, -2.5, float("nan"), float("inf"), 1e38]


@st.composite
def tensors(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, meta: bool = False
) -> Tensor:
    """Draw a tensor of this shape with any values and strides. meta: it may be on meta."""
    x = torch.full(shape, draw(st.sampled_from(FILL))).to(dtype)
    layout = draw(st.sampled_from(["packed"] * 4 + [*LAYOUTS] + ["meta"] * meta))
    return x.to("meta") if layout == "meta" else laid_out(x, layout)


def right(
    draw: st.DrawFn, name: str, batch: tuple[int, ...], taps: int
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return matching shapes and dtypes by the schemas' names; taps = 0 means no token axis."""
    d, m = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([1, 2, 3]))
    double = draw(st.booleans())
    stored = torch.float64 if double else draw(st.sampled_from([FLOATS[0], *FLOATS[2:]]))
    small = torch.float64 if double else torch.float32
    over_time = (taps,) if taps else ()
    read = {
        "compress": (d, m, *over_time),
        "gate_weight": (d,),
        "gate_bias": (),
        "norm_weight": (d,),
        "value_weight": (m, d),
        "value_bias": (m,),
        "weight": (d, m, taps),
    }
    tokens = {"state": (d, m), "direction": (d,), "x": (d,), "grad_state": (d, m)}
    tokens |= {"grad_new_state": (d, m), "grad_context": (d,), "compressed": (d,)}
    gates = {"value": (m,), "gate": (), "new_value": (m,)}
    gates |= {"new_gate": (), "grad_new_value": (m,), "grad_new_gate": ()}
    shapes = {n: (shape, stored) for n, shape in read.items()}
    shapes |= {n: ((*batch, *last), stored) for n, last in tokens.items()}
    shapes |= {n: ((*batch, *last), small) for n, last in gates.items()}
    shapes["document_starts"] = (batch, torch.bool)
    shapes["before"] = ((*batch[:-1], max(0, taps - 1), d), stored)
    shapes["pending"] = ((*batch[:-1], max(0, taps - 1), d), small)
    each = {"rewrite": 1 + m, "read": 1, "rewrite_read": 2 + m}.get(name.removesuffix("_backward"))
    shapes["stats"] = ((math.prod(batch) * (each or 0),), small)
    return shapes | {"value_channels": ((m,), None)}


@st.composite
def arguments(draw: st.DrawFn, name: str) -> list[Any]:
    """Draw arguments of torch.ops.ddl.<name>, up to three of them wrong."""
    batch, taps = draw(st.sampled_from(BATCHES)), draw(st.sampled_from([0, 1, 4]))
    shapes = right(draw, name, batch, taps)
    schema = getattr(torch.ops.ddl, name).default._schema.arguments
    most = draw(st.sampled_from([0, 3]))
    wrong = draw(st.sets(st.sampled_from([argument.name for argument in schema]), max_size=most))
    absent = draw(st.sets(st.sampled_from(["gate", "value", "norm_w", "grad_"])))
    meta = draw(st.sampled_from([False, False, True]))
    values: list[Any] = []
    for n in (argument.name for argument in schema):
        group = any(n.startswith((a, f"new_{a}")) for a in absent)
        none = n in ("context_dtype", "anchor", "chain")
        none |= n in ("pending", "before") and n not in wrong and (taps < 2 or draw(st.booleans()))
        none |= n == "document_starts" and n not in wrong and (not batch or draw(st.booleans()))
        if n == "value_channels":
            values.append(draw(st.integers(-1, 3)) if n in wrong else shapes[n][0][0])
        elif n == "erase":
            values.append(draw(st.integers(-1, 3) if n in wrong else st.integers(0, 1)))
        elif n in ("value_from_compressed", "saves"):
            values.append(draw(st.booleans()))
        elif n == "wanted":
            values.append(draw(st.integers(-1, 1 << 10)))
        elif n in ("anchor", "chain") and n in wrong:
            drawn = draw(st.lists(tensors((2, 3), torch.float32), min_size=1, max_size=8))
            values.append(drawn if n == "chain" else drawn[0])
        elif none:
            values.append(None)
        elif n not in shapes:
            numbers = ANY_NUMBER if n in wrong else POSITIVE
            optional = group or (n == "value_scale" and draw(st.booleans()))
            values.append(None if optional else draw(st.sampled_from(numbers)))
        elif n in wrong:
            axes = st.lists(st.integers(0, 5), min_size=n in ("state", "x"), max_size=5)
            shape = draw(st.one_of(axes.map(tuple), st.just(shapes[n][0]), st.just((0, 0))))
            values.append(draw(tensors(shape, draw(st.sampled_from(DTYPES)), meta)))
        elif n not in NEEDED and (group or (n in ("weight", "compressed") and not taps)):
            values.append(None)
        else:
            values.append(draw(tensors(*shapes[n], meta)))
    return values


def outcome(name: str, values: list[Any]) -> Any:
    """Return (shape, dtype) of every result, or the exception's message."""
    try:
        with torch.no_grad():
            results = getattr(torch.ops.ddl, name)(*values)
    except REFUSALS as error:
        return str(error)
    return [None if x is None else (tuple(x.shape), x.dtype) for x in results]


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_meta_tensors_give_the_same(name: str) -> None:
    """The same shapes as real ones, and of a forward the same errors.

    What is given back to a backward native code alone compares with what was saved.
    """
    accepted = 0

    @given(st.data())
    @settings(max_examples=100)
    def check(data: st.DataObject) -> None:
        nonlocal accepted
        values = data.draw(arguments(name))
        real = outcome(name, values)
        if any(isinstance(x, Tensor) and x.is_meta for x in values):
            return
        meta = outcome(name, [x.to("meta") if isinstance(x, Tensor) else x for x in values])
        if isinstance(real, list):
            assert real == meta
            accepted += 1
        elif name in FORWARD:
            assert not isinstance(meta, list), (real, meta)

    check()
    assert accepted > 10, "hardly any arguments came past the schema"
