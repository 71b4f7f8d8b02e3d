"""The helper of all other tests passes rounding errors and fails everything larger."""

from __future__ import annotations

import pytest
import torch

from tests.support.tolerances import TOLERANCES, assert_close, bounds, compute_dtype

DTYPES = list(TOLERANCES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rounding_to_the_storage_type_passes(dtype: torch.dtype) -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    assert_close("x", exact.to(dtype), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_systematic_error_of_two_percent_fails(dtype: torch.dtype, gradient: bool) -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"^dk: max error .*rms error|^dk: max error"):
        assert_close("dk", (1.02 * exact).to(dtype), exact, dtype, gradient=gradient)


def test_one_wrong_element_among_a_million_fails() -> None:
    exact = torch.randn(1_000_000)
    wrong = exact.clone()
    wrong[123_456] += 0.1
    with pytest.raises(AssertionError, match=r"^X: max error .* of scale"):
        assert_close("X", wrong, exact, torch.bfloat16)


def test_elements_near_zero_are_held_to_the_scale_of_the_tensor() -> None:
    exact = torch.tensor([1.0, -1.0, 0.0])
    assert_close("x", exact + 1e-6, exact, torch.float32)
    with pytest.raises(AssertionError):
        assert_close("x", exact + 1e-4, exact, torch.float32)


def test_zeros_must_be_zero_unless_a_scale_is_given() -> None:
    zeros, tiny = torch.zeros(3), torch.full((3,), 1e-7)
    assert_close("x", zeros, zeros, torch.float32)
    assert_close("x", tiny, zeros, torch.float32, scale=1.0)
    with pytest.raises(AssertionError):
        assert_close("x", tiny, zeros, torch.float32)


def test_nan_and_inf_must_be_at_the_same_places() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, inf, -inf])
    assert_close("x", x, x, torch.float32)
    for other in ([1.0, nan, inf, inf], [1.0, inf, inf, -inf], [nan, nan, inf, -inf]):
        with pytest.raises(AssertionError, match="x: NaN"):
            assert_close("x", torch.tensor(other), x, torch.float32)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"x: shape \(3,\), expected \(3, 1\)"):
        assert_close("x", torch.zeros(3), torch.zeros(3, 1), torch.float32)


def test_an_empty_tensor_passes() -> None:
    assert_close("x", torch.zeros(0, 3), torch.zeros(0, 3), torch.float32)


def test_the_table_is_ordered() -> None:
    """Coarser types allow larger errors; so do gradients than values, and maxima than rms."""
    for dtype in DTYPES:
        (max_f, rms_f), (max_g, rms_g) = bounds(dtype), bounds(dtype, gradient=True)
        assert rms_f < max_f < max_g
        assert rms_f < rms_g < max_g
        assert compute_dtype(dtype) in (torch.float32, torch.float64)
    fine_to_coarse = [bounds(d)[0] for d in (torch.float64, torch.float32)]
    fine_to_coarse += [bounds(d)[0] for d in (torch.float16, torch.bfloat16)]
    assert fine_to_coarse == sorted(fine_to_coarse)
