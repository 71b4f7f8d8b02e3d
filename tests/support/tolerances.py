"""The project's only table of tolerances, and the helper that uses it.

Errors are relative to the scale of the whole tensor, so that elements near zero do not dominate:

    max error = max_i |a_i - e_i| / max(rms(e), |e_i|)        every tensor
    rms error = rms(a - e) / rms(e)                           tensors of 64 elements or more

The maximum has to allow for the worst of millions of roundings. The rms does not, so its bound is
several times tighter: it catches a formula that is wrong by a percent in bfloat16.

Bounds are multiples of u, half the spacing of numbers at one in the *storage* type. Computation is
in float64 for float64 and in float32 for all others. The worst cases in the reasons are of the
reference in that type against itself in float64: rewrite_read over d = 8 ... 4096, m = 1 ... 16,
all compressions. Each bound is two to six times the worst case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_FOR_RMS = 64  # with fewer elements an rms error is as erratic as a maximum


class Tolerance(NamedTuple):
    compute: torch.dtype
    u: float
    max_forward: float  # these four in units of u
    max_gradient: float
    rms_forward: float
    rms_gradient: float
    reason: str


# fmt: off
TOLERANCES: dict[torch.dtype, Tolerance] = {  # by storage type
    torch.float64: Tolerance(
        torch.float64, 2**-53, 200, 800, 20, 80,
        "the order of summation: same operation counts as float32, so the same multiples of u",
    ),
    torch.float32: Tolerance(
        torch.float32, 2**-24, 200, 800, 20, 80,
        "the order of sums of up to 4096 terms: worst 34 u in a value, 173 u in dk, where two "
        "terms of the size of |X| cancel; rms 6 u and 17 u",
    ),
    torch.bfloat16: Tolerance(
        torch.float32, 2**-8, 16, 24, 1.5, 2.5,
        "the state is rounded before the read, and so is the result; if m channels cancel in the "
        "compressor, the first error grows: worst 5.6 u. Gradients are rounded at every tensor "
        "they pass: worst 8.2 u; rms 0.6 u and 1.2 u",
    ),
    torch.float16: Tolerance(
        torch.float32, 2**-11, 16, 24, 1.5, 2.5,
        "as bfloat16, with an eight times smaller u: worst 4.8 u and 7.4 u; rms 0.6 u and 1.0 u",
    ),
}
# fmt: on


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that operators compute in for a state of this type."""
    return TOLERANCES[dtype].compute


def bounds(dtype: torch.dtype, *, gradient: bool = False) -> tuple[float, float]:
    """Return the largest max error and rms error allowed for storage in `dtype`."""
    row = TOLERANCES[dtype]
    if gradient:
        return row.max_gradient * row.u, row.rms_gradient * row.u
    return row.max_forward * row.u, row.rms_forward * row.u


def errors(actual: Tensor, expected: Tensor, scale: float | None = None) -> tuple[float, float]:
    """Return max and rms error of finite tensors, relative to `scale`, by default of `expected`."""
    a, e = actual.double(), expected.double()
    if e.numel() == 0:
        return 0.0, 0.0
    rms = e.square().mean().sqrt() if scale is None else e.new_tensor(scale)
    difference = (a - e).abs()
    if not difference.any():
        return 0.0, 0.0  # avoids 0/0 if zeros are expected
    largest = (difference / torch.maximum(rms, e.abs())).max()
    return largest.item(), (difference.square().mean().sqrt() / rms).item()


def assert_close(
    name: str,
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    gradient: bool = False,
    scale: float | None = None,
    depth: int = 1,
) -> None:
    """Fail, naming the tensor, unless `actual` equals `expected` up to the roundings of `dtype`.

    dtype: the coarsest storage type on the way to `actual`. gradient: use the bounds of a backward
    pass. scale: the scale of errors, if `expected` is mathematically zero (without it only zeros
    equal an expected tensor of zeros). depth: the number of operators in sequence; their errors
    add. NaN and infinities must be at the same positions in both.
    """
    shapes = tuple(actual.shape), tuple(expected.shape)
    assert shapes[0] == shapes[1], f"{name}: shape {shapes[0]}, expected {shapes[1]}"
    a, e = actual.detach().double(), expected.detach().double()
    finite = e.isfinite()
    wild_equal = torch.equal(a[~finite].nan_to_num(nan=7.0), e[~finite].nan_to_num(nan=7.0))
    assert torch.equal(a.isfinite(), finite), f"{name}: NaN or Inf at unexpected places"
    assert wild_equal, f"{name}: NaN, Inf or -Inf, expected another of them"
    a, e = a[finite], e[finite]
    max_error, rms_error = errors(a, e, scale)
    max_bound, rms_bound = (depth * bound for bound in bounds(dtype, gradient=gradient))
    report = f"{name}: max error {max_error:.2e} of scale (allowed {max_bound:.2e})"
    assert max_error <= max_bound, report
    if e.numel() >= LEAST_FOR_RMS:
        report += f", rms error {rms_error:.2e} (allowed {rms_bound:.2e})"
        assert rms_error <= rms_bound, report
