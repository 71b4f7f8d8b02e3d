"""A comparison as tables for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddl.lab.config.paper_tasks import METRICS, PAPER
from ddl.lab.output import one_line

from .compare import Comparison, name_of
from .paired import Difference, Paired
from .runs import Evaluation, Point, Run

if TYPE_CHECKING:
    from .measured import Measured, Ratio

GAP = 2  # characters between columns
LEAST_NAME = 16  # characters of a run's name before it is broken
SHORT = dict(
    zip(PAPER, ("ARC-C", "ARC-E", "HellaS", "OBQA", "PIQA", "SciQ", "SIQA", "WinoG"), strict=True)
)  # tasks in a heading
NONE = "–"


class Column(NamedTuple):
    """A heading, and a cell for each row."""

    heading: str
    cells: list[str]


class Section(NamedTuple):
    """Columns that belong together, and a title; the first column has the names."""

    title: str
    names: Column
    columns: list[Column]


# --- columns --------------------------------------------------------------------------------------


def sections(comparison: Comparison, paired: Paired | None = None) -> list[Section]:
    """The tables of a comparison; columns without any number are left out."""
    runs = comparison.runs
    names = Column("run", [run.name for run in runs])
    loss = [
        Column("step", [_step(run) for run in runs]),
        _column("val. loss", [_loss(run.final) for run in runs], _four),
        _column("best", [_loss(run.best) for run in runs], _four),
        _column("perplexity", [run.final and run.final.perplexity for run in runs], _four),
        _column("bits/byte", [run.bits_per_byte for run in runs], _four),
    ]
    speeds, peaks = [run.tokens_per_second for run in runs], [run.peak_memory for run in runs]
    cost = [
        _column("parameters", [run.parameters for run in runs], "{:,.0f}".format),
        _column("tokens/s", speeds, "{:,.0f}".format),
        _column("speed ratio", ratios(speeds), "{:.3f}".format),
        _column("peak memory", peaks, _bytes),
        _column("memory ratio", ratios(peaks), "{:.3f}".format),
    ]
    made = [Section("", names, loss), Section("", names, cost)]
    made += [] if comparison.measured is None else _measured(runs, names, comparison.measured)
    made += [_scores(runs, names, shots) for shots in _shots(runs)]
    made += [] if paired is None else [_paired(paired)]
    told = [s._replace(columns=[c for c in s.columns if set(c.cells) != {NONE}]) for s in made]
    return [section for section in told if section.columns]


def ratios(numbers: Sequence[float | None]) -> list[float | None]:
    """Each number over the first; None without either."""
    first = numbers[0] if numbers else None
    return [n / first if n is not None and first else None for n in numbers]


def _column(
    heading: str, numbers: Sequence[float | None], written: Callable[[float], str]
) -> Column:
    return Column(heading, [NONE if n is None else written(n) for n in numbers])


def _step(run: Run) -> str:
    if run.config is None:
        return NONE
    return f"{run.step:,}" if run.finished else f"{run.step:,}/{run.config.steps:,}"


def _loss(point: Point | None) -> float | None:
    return None if point is None else point.loss


def _four(number: float) -> str:
    return f"{number:.4f}" if abs(number) < 1e4 or math.isnan(number) else f"{number:.3e}"


def _percent(number: float) -> str:
    """Two digits, and half a digit is rounded up, as in the papers: 48.555 is 48.56 there."""
    return str(Decimal(f"{number:.8f}").quantize(Decimal("0.01"), ROUND_HALF_UP))


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def _shots(runs: Sequence[Run]) -> list[int | None]:
    found = {evaluation.shots for run in runs for evaluation in run.evaluations}
    return sorted(found, key=lambda shots: -1 if shots is None else shots)


def _scores(runs: Sequence[Run], names: Column, shots: int | None) -> Section:
    """A table with a column for each task, the papers' in their order, and their average."""
    of_run: list[Evaluation | None] = [
        next((e for e in run.evaluations if e.shots == shots), None) for run in runs
    ]
    tasks = list(dict.fromkeys(task for e in of_run if e is not None for task in e.scores))
    tasks.sort(key=lambda task: PAPER.index(task) if task in PAPER else len(PAPER))
    metrics = {
        task: next(e.metrics[task] for e in of_run if e and task in e.scores) for task in tasks
    }
    columns = []
    for task in tasks:
        plain = metrics[task] in METRICS
        heading = SHORT.get(task, task) if plain else f"{task} ({metrics[task]})"
        scores = [e.scores.get(task) if e is not None else None for e in of_run]
        columns.append(_column(one_line(heading), scores, _percent if plain else _four))
    averages = [e.average if e is not None else None for e in of_run]
    columns.append(_column("mean", averages, _percent))
    title = "with as many examples as each task asks for" if shots is None else f"{shots}-shot"
    return Section(f"Newest evaluation, accuracy in percent, {title}", names, columns)


def _measured(runs: Sequence[Run], names: Column, measured: Measured) -> list[Section]:
    """Tables of the losses on a text, and of the speeds of generation."""
    scores = [measured.scores.get(run.name) for run in runs]
    speeds = [measured.speeds.get(run.name) for run in runs]
    bits = [s and s.bits_per_byte for s in scores]
    losses = [
        _column("checkpoint", [s and s.step for s in scores], "{:,.0f}".format),
        _column("loss", [s and s.loss for s in scores], _four),
        _column("bits/byte", bits, _four),
        _column("difference", _differences(bits), _signed),
        _column("predicted", [s and s.bytes / measured.bytes for s in scores], "{:.1%}".format),
    ]
    speed = [
        _column("prompt tok/s", [s and s.prefill for s in speeds], "{:,.0f}".format),
        Column("ratio", [_ratio(s and s.prefill_ratio) for s in speeds]),
        _column("new tok/s", [s and s.generated for s in speeds], "{:,.0f}".format),
        Column("ratio", [_ratio(s and s.generated_ratio) for s in speeds]),
    ]
    how = (
        f"a prompt of {measured.prompt} tokens, then {measured.tokens} new ones, medians of"
        f" {measured.rounds} rounds in turn"
    )
    return [
        Section(f"Loss of the last checkpoints on {name_of(measured.text)}", names, losses),
        Section(f"Generation on this machine: {how}", names, speed),
    ]


def _differences(numbers: Sequence[float | None]) -> list[float | None]:
    """Each number less the first one that is known."""
    first = next((n for n in numbers if n is not None), None)
    return [None if n is None or first is None else n - first for n in numbers]


def _ratio(found: Ratio | None) -> str:
    return NONE if found is None else f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def _paired(paired: Paired) -> Section:
    variants = paired.variants
    names = Column("variant", [d.variant for d in variants])
    seeds = [str(len(d.seeds)) for d in variants]
    columns = [
        Column("seeds", seeds),
        _column("val. loss", [d.loss for d in variants], _four),
        Column("difference", [_difference(d) for d in variants]),
        Column("95 % interval", [_interval(d) for d in variants]),
        _column("FLOPs", [d.flops for d in variants], "{:.3f}×".format),
        _column("seconds", [d.seconds for d in variants], "{:.3f}×".format),
    ]
    return Section(
        f"Final validation loss, and its difference from that of {paired.baseline}, seed by seed",
        names,
        columns,
    )


def _difference(difference: Difference) -> str:
    measured = difference.difference
    return NONE if measured is None else _signed(measured.mean)


def _interval(difference: Difference) -> str:
    measured = difference.difference
    if measured is None or measured.low is None or measured.high is None:
        return NONE
    return f"{_signed(measured.low)} to {_signed(measured.high)}"


def _signed(number: float) -> str:
    return f"{number:+.4f}".replace("-", "\u2212")  # as wide as the plus sign


# --- outputs --------------------------------------------------------------------------------------


def show(comparison: Comparison, console: Console, paired: Paired | None = None) -> None:
    """Print the tables, divided where they are wider than the console, and the notes."""
    blocks: list[Table | Text] = []
    for section in merge(sections(comparison, paired), console.width):
        for part in divide(section, console.width):
            blocks += (
                [Text(""), Text(part.title), _rich(part)] if part.title else [Text(""), _rich(part)]
            )
    notes = [Text(note) for note in _notes(comparison, paired)]
    for block in [*blocks[1:], *([Text("")] if notes else []), *notes]:
        console.print(block)


def merge(parts: Sequence[Section], width: int) -> list[Section]:
    """Put sections without a title beside each other where that fits the width."""
    merged: list[Section] = []
    for section in parts:
        last = merged[-1] if merged else None
        if last is not None and not (last.title or section.title):
            both = last._replace(columns=[*last.columns, *section.columns])
            if _width(both) <= width:
                merged[-1] = both
                continue
        merged.append(section)
    return merged


def divide(section: Section, width: int) -> list[Section]:
    """Divide a section into tables that fit the width, each with the names."""
    parts = [section._replace(columns=[])]
    for column in section.columns:
        longer = parts[-1]._replace(columns=[*parts[-1].columns, column])
        if parts[-1].columns and _width(longer, LEAST_NAME) > width:
            parts.append(section._replace(title="", columns=[column]))
        else:
            parts[-1] = longer
    return parts


def _width(section: Section, most_name: int | None = None) -> int:
    """Characters that a table takes; its names may be broken to `most_name`."""
    names = _widest(section.names)
    names = names if most_name is None else min(names, most_name)
    return names + sum(GAP + _widest(column) for column in section.columns)


def _widest(column: Column) -> int:
    return max(map(cell_len, (column.heading, *column.cells)))


def _rich(section: Section) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(Text(section.names.heading), overflow="fold")
    for column in section.columns:
        table.add_column(Text(column.heading), justify="right", no_wrap=True)  # no markup in names
    for row, name in enumerate(section.names.cells):
        table.add_row(Text(name), *(column.cells[row] for column in section.columns))
    return table


def markdown(comparison: Comparison, paired: Paired | None = None) -> str:
    """The tables and notes in Markdown."""
    blocks = []
    for section in merge(sections(comparison, paired), width=10**9):
        columns = [section.names, *section.columns]
        rows = [[column.heading for column in columns]]
        rows += [[column.cells[i] for column in columns] for i in range(len(section.names.cells))]
        lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
        lines.insert(1, "|" + "---|" + "---:|" * len(section.columns))
        blocks.append("\n".join([*([f"{section.title}\n"] if section.title else []), *lines]))
    return "\n\n".join(blocks + list(map(_escaped, _notes(comparison, paired))))


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\|*_`[]<$" else c for c in text)


def _notes(comparison: Comparison, paired: Paired | None) -> list[str]:
    return comparison.notes + ([] if paired is None else paired.notes)
