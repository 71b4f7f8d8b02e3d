"""The tables of docs/results.md and study/README.md, made from records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddl.lab.analysis.student import interval

from . import corpus
from .pictures import BASELINE, Variants, spelled
from .records import Trained

# In the order of the tables.
ORDER = (
    "additive", "additive-wider", "additive-widest", "additive-conv", "attention-residual", "gated",
    "hc", "mhc", "independent-hc", "expanded", "ddl", "cc-noec", "cc", "cc-separate", "cc-none",
    "tc-one", "tc-noec", "tc", "tc-separate", "tc-none", "tc-eight", "tc-heads4", "tc-heads8",
)  # fmt: skip
# In the records alone: no later commit than ddl.options.LAST_COMMIT can train them.
GONE = ("cc-separate", "tc-separate", "tc-heads4", "tc-heads8")
AUDITED = ("cc", "tc", "tc-separate")
# What is asked of two variants: the first one's loss less the second one's, and in which sweep.
QUESTIONS = {
    "Erase nothing instead of what is written over": (
        ("main", "tc-none", "tc"), ("depth", "tc-none", "tc"), ("main", "cc-none", "cc"),
    ),
    "Erase by a gate of its own": (("main", "tc-separate", "tc"), ("main", "cc-separate", "cc")),
    "A convolution without a stream of rewrites": (("main", "additive-conv", "additive"),),
    "The stream beyond that convolution": (
        ("main", "tc-one", "additive-conv"), ("main", "tc", "additive-conv"),
        ("main", "tc-none", "additive-conv"), ("depth", "tc-none", "additive-conv"),
    ),
    "Rewrites that can erase more": (
        ("main", "tc-heads4", "tc"), ("main", "tc-heads8", "tc"), ("main", "tc-eight", "tc"),
    ),
}  # fmt: skip
SMALLER = (
    "default", "value-starts-at-0", "eps-of-the-papers", "eps-tenfold", "every-state-stored",
    "default-bf16", "stream-bf16",
)  # fmt: skip


def comparison(variants: Variants) -> str:
    """Final losses, and their differences from the baseline, seed by seed.

    A difference is bold if even the wider interval of Bonferroni's correction, for as many
    comparisons as the table has, does not contain 0.
    """
    comparisons, seeds = len(variants) - 1, len(variants[BASELINE])
    rows = [
        f"| variant | parameters | learning rate | validation loss, {seeds} seeds "
        f"| difference from {BASELINE} | 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in variants.items():
        first = next(iter(runs.values())).record
        rows.append(
            f"| {spelled(name)} | {first['parameters']:,} | {first['config']['optim']['lr']:g} "
            f"| {_mean(runs)} "
            f"| {_difference(variants[BASELINE], runs, comparisons)} |"
        )
    return "\n".join(rows)


def questions(sweeps: Mapping[str, Variants]) -> str:
    """Differences between two variants, seed by seed; bold as in the comparison."""
    asked = [
        (why, *each)
        for why, pairs in QUESTIONS.items()
        for each in pairs
        if each[1] in sweeps[each[0]]
    ]
    rows = ["| question | sublayers | difference | of | 95 % interval |", "|---|---|---|---|---|"]
    for at, (why, sweep, name, base) in enumerate(asked):
        found = sweeps[sweep]
        cells = _difference(found[base], found[name], len(asked)).split(" | ")
        shown = why if at == 0 or asked[at - 1][0] != why else ""
        layers = next(iter(found[name].values())).record["config"]["model"]["num_layers"]
        pair = f"{spelled(name)} − {spelled(base)}"
        rows.append(f"| {shown} | {2 * layers} | {cells[0]} | {pair} | {cells[1]} |")
    return "\n".join(rows)


def deep(variants: Variants) -> str:
    """Final losses of the deeper models, and their differences from the baseline."""
    rows = [
        f"| variant | parameters | validation loss | difference from {BASELINE} | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for name, runs in ordered(variants).items():
        parameters = next(iter(runs.values())).record["parameters"]
        difference = _difference(variants[BASELINE], runs)
        rows.append(f"| {spelled(name)} | {parameters:,} | {_mean(runs)} | {difference} |")
    return "\n".join(rows)


def equal(main: Variants, flops: Variants, seconds: Variants, times: Mapping[str, float]) -> str:
    """Differences from the baseline's 2,000 steps at equal tokens, FLOPs and seconds."""
    rows = [
        "| variant | equal tokens | steps of equal FLOPs | | time of a step "
        "| steps of equal seconds | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ordered(flops):
        cells = []
        for found in (main[name], flops[name], seconds[name]):
            mean, interval = _difference(main[BASELINE], found).split(" | ")
            cells.append(f"{mean} ({interval})")
        steps = [
            next(iter(found[name].values())).record["config"]["steps"] for found in (flops, seconds)
        ]
        rows.append(
            f"| {spelled(name)} | {cells[0]} | {steps[0]:,} | {cells[1]} | {times[name]:.2f} "
            f"| {steps[1]:,} | {cells[2]} |"
        )
    return "\n".join(rows)


def audit(variants: Variants) -> str:
    """What each sublayer's rewrites erase in the end, and what the loss rises by without that."""
    rows: list[str] = []
    for name in (name for name in AUDITED if name in variants):
        depths = [run.record["depth"] for run in variants[name].values()]
        count = len(depths[0]["beta"])
        if not rows:
            heads = " | ".join(str(number) for number in range(count))
            rows = [f"| variant | sublayer | {heads} | all |", "|---" * (count + 3) + "|"]
        given = {
            "β": [[mean for mean, _ in each["beta"]] for each in depths],
            "α": [each.get("alpha") for each in depths],
            "erased later": [
                [row[at] - row[-1] for at, row in enumerate(each["survival"][1:], 1)]
                for each in depths
            ],
            "loss without": [
                [loss - each["without_erasing"][0] for loss in each["without_erasing"][1:]]
                for each in depths
            ],
        }
        if None in given["α"]:  # newer records, where α is β
            del given["α"]
        for what, values in given.items():
            means = [statistics.mean(column) for column in zip(*values, strict=True)]
            digits = 3 if what == "loss without" else 2
            cells = [f"{mean:.{digits}f}" for mean in means] + [""] * (count + 1 - len(means))
            rows.append(
                f"| {spelled(name) if what == 'β' else ''} | {what} | {' | '.join(cells)} |"
            )
    return "\n".join(rows)


def devices(main: Variants, cpu: Variants) -> str:
    """How far the losses of two devices are apart, where all options are the same."""
    rows = ["| variant | mean, GPU − CPU | largest |", "|---|---|---|"]
    for name, runs in ordered(cpu).items():
        apart = [
            main[name][seed].loss - run.loss
            for seed, run in runs.items()
            if seed in main[name] and _same_model(main[name][seed], run)
        ]
        if apart:
            largest = max(apart, key=abs)
            rows.append(
                f"| {spelled(name)} | {_signed(statistics.mean(apart))} | {_signed(largest)} |"
            )
    return "\n".join(rows)


def _same_model(one: Trained, other: Trained) -> bool:
    """Whether parameters and learning rates are the same."""
    a, b = one.record, other.record
    rates = [each["config"]["optim"]["lr"] for each in (a, b)]
    return a["parameters"] == b["parameters"] and rates[0] == rates[1]


def tuning(variants: Variants) -> str:
    """Losses by learning rate, the lowest of each variant in bold."""
    found: dict[str, dict[float, float]] = {}
    for name, runs in variants.items():
        variant, rate = name.rsplit("-lr", 1)
        loss = statistics.mean(run.loss for run in runs.values())
        found.setdefault(variant, {})[float(rate)] = loss
    rates = sorted({rate for losses in found.values() for rate in losses})
    rows = [
        "| variant | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for variant, losses in ordered(found).items():
        best = min(losses.values())
        cells = [_cell(losses.get(rate), best) for rate in rates]
        rows.append(f"| {spelled(variant)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def smaller(variants: Variants) -> str:
    """Final losses of the smaller questions, and their differences from `default`."""
    rows = [
        "| ddl-cc | validation loss | difference from default | 95 % interval |",
        "|---|---|---|---|",
    ]
    for name, runs in ordered(variants, SMALLER).items():
        base = variants["default-bf16" if name.endswith("bf16") else "default"]
        rows.append(f"| {name} | {_mean(runs)} | {_difference(base, runs)} |")
    return "\n".join(rows)


def normalisation(kinds: Mapping[str, Variants]) -> str:
    """Final losses by how k is normalised, and their differences from the operator's own way."""
    rows = [
        "| precision | k̂ | validation loss | difference from ours | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for precision in ("float32", "bfloat16"):
        for kind, variants in kinds.items():
            runs, base = variants.get(precision, {}), kinds["ours"].get(precision, {})
            if len(runs) > 1:
                rows.append(f"| {precision} | {kind} | {_mean(runs)} | {_difference(base, runs)} |")
    return "\n".join(rows)


def provenance(runs: Sequence[Trained]) -> str:
    """What all runs had in common: the text, the tokens made of it, and the versions."""

    def of_all(values: Iterable[str]) -> str:
        return ", ".join(sorted(set(values)))

    versions = [run.record["versions"] for run in runs]
    on = Counter(run.record.get("processor", "a CPU that was not named") for run in runs)
    return "\n".join(
        [
            f"| of all {len(runs)} runs | |",
            "|---|---|",
            f"| corpus, SHA-256 | `{corpus.SHA256}` |",
            f"| tokens, digest of `ddl train` | `{of_all(run.record['data'] for run in runs)}` |",
            f"| torch | {of_all(each['torch'] for each in versions)} |",
            f"| Python | {of_all(each['python'] for each in versions)} |",
            f"| trained on | {', '.join(f'{name} ({on[name]})' for name in sorted(on))} |",
        ]
    )


def redrawn(record: Mapping[str, Any]) -> str:
    """The run that was drawn: its loss in the record and the second time, to the last digit."""
    loss, on, same = record["loss"], record["processor"], all(record["equal"].values())
    return "\n".join(
        [
            "| drawn | recorded | again | all that was recorded of it |",
            "|---|---|---|---|",
            f"| {record['name']} | {loss['recorded']!r} ({on['recorded']}) "
            f"| {loss['again']!r} ({on['again']}) | {'is the same' if same else 'differs'} |",
        ]
    )


def _mean(runs: Mapping[int, Trained]) -> str:
    """Mean and standard deviation over the seeds."""
    losses = [run.loss for run in runs.values()]
    return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def _cell(loss: float | None, best: float) -> str:
    if loss is None:
        return "–"
    return f"**{loss:.4f}**" if loss == best else f"{loss:.4f}"


def _difference(
    base: Mapping[int, Trained], runs: Mapping[int, Trained], comparisons: int | None = None
) -> str:
    """Two cells: the mean of the paired differences, and its 95 % interval."""
    if base is runs:
        return "– | –"
    differences = [runs[seed].loss - base[seed].loss for seed in sorted(runs.keys() & base.keys())]
    if not any(differences):
        return "0 | the same numbers"
    found, mean = interval(differences), _signed(statistics.mean(differences))
    if comparisons is not None:
        wider = interval(differences, 1 - 0.05 / comparisons)
        mean = mean if wider.low <= 0 <= wider.high else f"**{mean}**"
    return f"{mean} | {_signed(found.low)} to {_signed(found.high)}"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def ordered(found: Mapping[str, Any], order: Sequence[str] = ORDER) -> dict[str, Any]:
    """The variants in this order, others behind."""
    rank = {name: number for number, name in enumerate(order)}
    return dict(sorted(found.items(), key=lambda item: rank.get(item[0], len(order))))
