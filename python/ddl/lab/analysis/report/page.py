"""The page of `ddl report`: read runs, fill the template, write the file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from ddl.errors import InputError, reason_of
from ddl.files import atomic_file
from ddl.lab.config import ReportConfig
from ddl.paths import is_run

from ..compare import Comparison, compare
from ..cost import CAPTION, without
from ..options import options_of
from ..paired import Paired, pair
from ..runs import Run
from ..tables import merge, sections
from .charts import Chart, depth_charts, thinned, training_chart
from .curves import SYMBOLS, legend, losses
from .rewrites import Depth, read_depth, read_training
from .text import visible

__all__ = ["write_report"]

OPENING = b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n' + (
    b'<meta name="generator" content="ddl report">\n'
)  # of every report, by which one is recognised
MOST_NAMED = 3  # runs that the title names
MOST_SAMPLES = 30  # steps whose samples are shown
NOT_INSPECTED = Markup("It was not inspected: <code>ddl inspect</code> measures its sublayers.")
NOT_RECORDED = Markup("It recorded nothing over training: <code>--record-every</code> does.")


class Inside(NamedTuple):
    """The heat maps of a run, and sentences about those that it lacks."""

    number: int
    run: Run
    depth: Depth | None
    charts: list[Chart]
    missing: list[Markup]


class Samples(NamedTuple):
    """Samples by step: each a run's name and the text. left_out: how many steps are not shown."""

    shown: list[tuple[int, list[tuple[str, str]]]]
    left_out: int


def write_report(config: ReportConfig) -> list[str]:
    """Write the page; return the comparison's notes. The same runs give the same bytes.

    Raises InputError if a path is no run, a file of a run is damaged, or `out` cannot be written or
    is another file.
    """
    _refuse_other_file(config)
    compared = compare(config.runs)
    paired = pair(compared.runs, config.baseline) if config.paired else None
    page = render(compared, paired)
    with atomic_file(config.out) as temporary:
        temporary.write_bytes(page)
    return compared.notes + ([] if paired is None else paired.notes)


def render(compared: Comparison, paired: Paired | None = None) -> bytes:
    """The page as UTF-8.

    Raises InputError if an inspection or the recordings of a run are damaged.
    """
    keys = legend(compared.runs)
    curves = losses(compared.runs, keys)
    inside = [_inside(number, run) for number, run in enumerate(compared.runs)]
    charts = ([curves] if curves else []) + [chart for part in inside for chart in part.charts]
    plotly, script = _script(get_plotlyjs()), _script(_resource("page.js"))
    environment = Environment(
        autoescape=True,
        finalize=_only_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.from_string(_resource("page.html")).render(
        title=_title(compared.runs),
        policy=_policy(plotly, script),
        style=Markup(_resource("style.css")),
        tables=merge(sections(compared, paired), width=10**9),
        notes=compared.notes + ([] if paired is None else paired.notes),
        losses=curves,
        caption=CAPTION,
        unplaced=without(compared.runs, "seconds"),
        legend=keys,
        symbols=SYMBOLS,
        inside=inside,
        samples=_samples(compared.runs),
        options=options_of(compared.runs),
        charts=_json({chart.id: chart.figure for chart in charts}),
        plotly=plotly,
        script=script,
    )
    return text.encode("utf-8")


def _refuse_other_file(config: ReportConfig) -> None:
    """Raise InputError unless `out` is new, a report, or a file that may be overwritten."""
    out = config.out
    try:
        if not out.exists():
            return
        with out.open("rb") as file:
            known = file.read(len(OPENING)) == OPENING
    except OSError as error:
        raise InputError("out", "be a file", f"{out}: {reason_of(error)}") from error
    if not (known or config.overwrite):
        raise InputError(
            "out",
            "be a new file or an earlier report",
            f"{out}, another file: choose another or add --overwrite",
        )


# --- parts of the page ----------------------------------------------------------------------------


def _title(runs: Sequence[Run]) -> str:
    names = ", ".join(run.name for run in runs[:MOST_NAMED])
    rest = len(runs) - MOST_NAMED
    return f"Report: {names}" + (f" and {rest} more" if rest > 0 else "")


def _inside(number: int, run: Run) -> Inside:
    depth = read_depth(run.path)
    training = read_training(run.path) if is_run(run.path) else None
    charts = depth_charts(depth, f"depth-{number}") if depth else []
    over_training = training_chart(training, f"training-{number}") if training else None
    charts += [over_training] if over_training else []
    missing = [] if depth else [NOT_INSPECTED]
    if run.config is not None and over_training is None:
        missing.append(NOT_RECORDED)
    return Inside(number, run, depth, charts, missing)


def _samples(runs: Sequence[Run]) -> Samples:
    found: dict[int, dict[str, str]] = {}
    for run in runs:
        for record in run.records:
            if isinstance(record.get("sample"), str):
                found.setdefault(record["step"], {})[run.name] = record["sample"]
    shown = thinned(sorted(found), MOST_SAMPLES)
    return Samples([(step, list(found[step].items())) for step in shown], len(found) - len(shown))


# --- HTML -----------------------------------------------------------------------------------------


def _only_visible(value: Any) -> Any:
    """Pass every text of the template through `visible`; our own markup stays as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _script(text: str) -> Markup:
    """A script as HTML's parser hands it on, so that its checksum is the browser's."""
    return Markup(text.replace("\r\n", "\n").replace("\r", "\n"))


def _policy(*scripts: Markup) -> str:
    """A Content-Security-Policy: these scripts alone run, and nothing is fetched.

    plotly.js makes styles, and images of heat maps and for downloads.
    """
    sums = [hashlib.sha256(str(script).encode()).digest() for script in scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(found).decode()}'" for found in sums)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _json(values: Any) -> Markup:
    """JSON inside a script element, which `</script` or `<!--` in a text must not end."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
