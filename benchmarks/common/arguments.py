"""The command line of a benchmark: its sizes, and small ones with --quick; a folder for records."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.record import RESULTS


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same path in small")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """The arguments, with an option for every size in `full`. All of them must be positive.

    quick: the sizes with --quick, by the same names.
    """
    for name, size in full.items():
        several = isinstance(size, list)
        parser.add_argument(
            option(name),
            type=type(size[0] if several else size),
            nargs="+" if several else None,
            help=f"{shown(size)}; quick: {shown(quick[name])}",
        )
    args = parser.parse_args(arguments)
    for name, size in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) <= 0:
            parser.error(f"{option(name)} must be positive, got {shown(given)}")
    if args.out is None and not args.quick:
        args.out = RESULTS
    return args


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def shown(size: Any) -> str:
    return " ".join(map(str, size)) if isinstance(size, list) else str(size)
