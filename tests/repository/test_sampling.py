"""The samples of `make test` cover what tests/support/sampling.py documents."""

from __future__ import annotations

import itertools

import pytest

from tests.support.sampling import covering_sample

CASES = [
    dict(zip("abc", values, strict=True))
    for values in itertools.product(range(4), range(5), range(3))
]


def combinations(cases, strength):
    return {
        names for case in cases for names in itertools.combinations(sorted(case.items()), strength)
    }


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_is_kept(strength):
    chosen = [CASES[number] for number in covering_sample(CASES, strength)]
    assert combinations(chosen, strength) == combinations(CASES, strength)


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 26)])
def test_few_cases_are_enough(strength, most):
    assert len(covering_sample(CASES, strength)) <= most


def test_a_table_of_one_parameter_is_kept_whole():
    assert covering_sample([{"a": 0}, {"a": 1}, {"a": 2}], 2) == {0, 1, 2}


def test_a_run_leaves_cases_out_unless_told(pytester: pytest.Pytester):
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.table
        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize("b", range(4))
        @pytest.mark.parametrize("c", range(4))
        def test_table(a, b, c):
            pass

        @pytest.mark.exhaustive
        def test_long():
            pass
        """
    )
    sampled = pytester.runpytest("-q", "-p", "no:cacheprovider").parseoutcomes()
    assert 16 <= sampled["passed"] <= 20
    assert sampled["passed"] + sampled["deselected"] == 65
    assert pytester.runpytest("-q", "-p", "no:cacheprovider", "--all").parseoutcomes() == {
        "passed": 65
    }


def test_an_imported_test_has_a_sample_of_its_own(pytester: pytest.Pytester):
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        """
        import pytest
        from tests.support.sampling import sampled

        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize("b", range(4))
        def test_quick(a, b, factor=2):
            assert factor == 2

        test_slow = sampled(test_quick, 1)
        """
    )
    for options, cases in (((), 16 + 4), (("--all",), 16 + 16)):
        run = pytester.runpytest("-q", "-p", "no:cacheprovider", *options)
        assert run.parseoutcomes()["passed"] == cases
