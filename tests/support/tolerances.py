"""The one table of tolerances of the project, and the one helper that uses it.

Errors are relative to the scale of the whole tensor, so that elements near zero do not count for
more than they weigh:

    max error = max_i |a_i - e_i| / max(rms(e), |e_i|)        every tensor
    rms error = rms(a - e) / rms(e)                           tensors of 64 elements or more

The maximum has to allow for the unluckiest of millions of roundings. The rms does not, so it is
several times tighter, and it is what catches a formula that is wrong by a percent in bfloat16.

Bounds are multiples of u, half the spacing of numbers at one in the *storage* type. Computation is
in float64 for float64 and in float32 for all others. Worst cases in the reasons were measured with
the reference in the type at hand against itself in float64, rewrite_read over d = 8 ... 4096,
m = 1 ... 16, all compressions; each bound is two to six times the worst case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_FOR_RMS = 64  # below, an rms error is as erratic as a maximum


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
        "a rounding of the state before the read and one of the result; where m channels cancel in "
        "the compressor the first grows: worst 5.6 u. Gradients are rounded at every tensor they "
        "pass: worst 8.2 u; rms 0.6 u and 1.2 u",
    ),
    torch.float16: Tolerance(
        torch.float32, 2**-11, 16, 24, 1.5, 2.5,
        "as bfloat16, u being eight times smaller: worst 4.8 u and 7.4 u; rms 0.6 u and 1.0 u",
    ),
}
# fmt: on


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that operators compute in, given the type of the state."""
    return TOLERANCES[dtype].compute


def bounds(dtype: torch.dtype, *, gradient: bool = False) -> tuple[float, float]:
    """Largest max error and largest rms error allowed for storage in `dtype`."""
    row = TOLERANCES[dtype]
    if gradient:
        return row.max_gradient * row.u, row.rms_gradient * row.u
    return row.max_forward * row.u, row.rms_forward * row.u


def errors(actual: Tensor, expected: Tensor, scale: float | None = None) -> tuple[float, float]:
    """Max and rms error of finite tensors, relative to the scale of `expected` (or to `scale`)."""
    a, e = actual.double(), expected.double()
    if e.numel() == 0:
        return 0.0, 0.0
    rms = e.square().mean().sqrt() if scale is None else e.new_tensor(scale)
    difference = (a - e).abs()
    if not difference.any():
        return 0.0, 0.0  # 0/0 where zero is expected
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
    pass. scale: what errors are relative to, where the mathematics says that `expected` vanishes
    (against an expected tensor of zeros and no scale, only zeros pass). depth: how many operators
    in sequence `actual` went through; their errors add. NaN and infinities have to be at the same
    places in both.
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
