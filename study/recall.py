"""A task that needs overwriting: variables are assigned again and again, and asked for.

    python -m study.recall write study/recall-16.jsonl --variables 16 --span 64
    python -m study.recall score runs/study/recall study/records/recall.jsonl

A statement is four characters: `c=7 ` assigns, `c?7 ` asks and gives the answer, the value that
was assigned last. What is asked was assigned within the last `span` statements, and what is
assigned and asked is drawn at random, so that a model can only know the answer. `score` measures
finished runs on sequences of their block size that begin with nothing assigned, from another seed.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ddl.files import write_text
from ddl.lab.analysis.runs import read_run
from ddl.lab.config.stored import plain
from ddl.lab.load import load

VALUES = "0123456789ABCDEF"
ASKED = 0.3  # share of questions among the statements
DOCUMENTS, STATEMENTS = 100, 20_000  # 8 MB of text
SCORED, SCORED_SEED = 256, 1_000_003
MOST_WRITES = 8  # assignments are counted apart up to so many


def statements(r: random.Random, variables: int, span: int) -> Iterator[tuple[str, int | None]]:
    """Statements without end, and for a question how often its variable was assigned by then."""
    value: dict[str, str] = {}
    assigned: dict[str, int] = {}  # variable → statement of its last assignment
    writes: dict[str, int] = defaultdict(int)
    number = 0
    while True:
        known = sorted(name for name, at in assigned.items() if number - at <= span)
        if known and r.random() < ASKED:
            name = r.choice(known)
            yield f"{name}?{value[name]} ", writes[name]
        else:
            name = string.ascii_lowercase[r.randrange(variables)]
            value[name], assigned[name] = r.choice(VALUES), number
            writes[name] += 1
            yield f"{name}={value[name]} ", None
        number += 1


def write(out: Path, variables: int, span: int, seed: int) -> None:
    """Write a corpus for `ddl prepare`, one document per line."""
    lines = []
    for document in range(DOCUMENTS):
        source = statements(random.Random(seed + document), variables, span)
        text = "".join(next(source)[0] for _ in range(STATEMENTS))
        lines.append(json.dumps({"text": text}))
    write_text(out, "\n".join(lines) + "\n")


def score(path: Path, variables: int, span: int) -> dict[str, Any] | None:
    """How often a run's model knows the answer, over how often it was assigned before."""
    run = read_run(path, path.name)
    if not run.finished:
        return None
    model, _ = load(path, "cpu")
    block = model.config.block_size
    right: dict[int, list[bool]] = defaultdict(list)
    for number in range(SCORED):
        source = statements(random.Random(SCORED_SEED + number), variables, span)
        written = [next(source) for _ in range(block // 4)]
        tokens = torch.tensor([list("".join(text for text, _ in written).encode())])
        with torch.inference_mode():
            likeliest = model(tokens).logits[0].argmax(-1)
        for at, (_, writes) in enumerate(written):
            if writes is not None:
                known = bool(likeliest[4 * at + 1] == tokens[0, 4 * at + 2])
                right[min(writes, MOST_WRITES)].append(known)
    every = [known for group in right.values() for known in group]
    return {
        "name": path.name,
        "config": plain(run.options),
        "parameters": run.parameters,
        "loss": run.final.loss if run.final else None,
        "accuracy": sum(every) / len(every),
        "questions": len(every),
        "by_writes": {n: [sum(g) / len(g), len(g)] for n, g in sorted(right.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("write", "score"))
    parser.add_argument("paths", type=Path, nargs="+", help="write: OUT; score: RUNS OUT")
    parser.add_argument("--variables", type=int, default=16)
    parser.add_argument("--span", type=int, default=64, help="statements")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.action == "write":
        write(*args.paths, args.variables, args.span, args.seed)
        return
    runs, out = args.paths
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    names = {record["name"] for record in kept}
    folders = sorted(path.parent for path in runs.glob("*/config.json"))
    fresh = [score(path, args.variables, args.span) for path in folders if path.name not in names]
    kept += [record for record in fresh if record is not None]
    kept.sort(key=lambda record: record["name"])
    write_text(out, "".join(json.dumps(record) + "\n" for record in kept))


if __name__ == "__main__":
    main()
