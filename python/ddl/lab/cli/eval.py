"""`ddl eval`."""

from __future__ import annotations

from ddl.lab.config import EvalConfig

from .command import Command, parse

HELP = """Score a run, or a Hugging Face model, on tasks of lm-evaluation-harness.

ddl eval runs/ddl-tc-d256-L4-s1337 --tasks arc_easy piqa --num-fewshot 1

Without --tasks: the papers' eight benchmarks, 0-shot and 1-shot."""


def run(args: list[str]) -> None:
    config = parse(EvalConfig, args, prog="ddl eval", description=HELP, positional=True)
    from ddl.lab.evaluation import evaluate, tables

    record = evaluate(config)
    print(tables(record))
    print(f"wrote {record['out']}")


COMMAND = Command(
    "score on benchmarks: ddl eval RUN --tasks arc_easy piqa", EvalConfig, run, "eval"
)
