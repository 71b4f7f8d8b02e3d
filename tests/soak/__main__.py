"""`make soak`: solve many random problems with a progress bar, and say how to repeat a failure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

from rich.progress import track

from tests.soak.check import check
from tests.soak.problem import draw

MOST_FAILURES = 10


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--problems", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other problems (0)")
    parser.add_argument("--only", type=int, metavar="I", help="problem number I alone")
    return parser.parse_args(arguments)


def failures(seed: int, numbers: Iterable[int], conditions: list[float]) -> Iterator[str]:
    """Yield a paragraph about each problem that fails; append the others' conditions."""
    for number in numbers:
        problem = draw(seed, number)
        try:
            conditions.append(check(problem))
        except Exception as error:  # any: the problem's description is what helps
            again = f"{sys.executable} -m tests.soak --seed {seed} --only {number}"
            yield f"{type(error).__name__}: {error}\n  {problem}\n  repeat it: {again}"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a problem failed."""
    options = parse(arguments)
    only = options.only
    numbers = range(options.problems) if only is None else range(only, only + 1)
    conditions: list[float] = []
    found = []
    bar = track(numbers, "Random problems", disable=only is not None)
    for failure in failures(options.seed, bar, conditions):
        found.append(failure)
        print(failure, flush=True)
        if len(found) == MOST_FAILURES:
            print("That many failures are enough.")
            break
    ill = sum(condition > 1 for condition in conditions)
    print(
        f"seed {options.seed}: {len(conditions)} problems solved, {ill} of them judged by their "
        f"condition number; {len(found)} failed"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
