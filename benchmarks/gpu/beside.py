"""Times our operator and another library's in the same rounds, beside a copy, and at one row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import MismatchError, interleave
from ddl.lab.bench.ops import PLAIN_TOLERANCES, Form, stages
from ddl.lab.bench.problems import TOLERANCES, Case, check
from ddl.lab.bench.row import time_stages
from gpu.between import BETWEEN, Between, bytes_of
from gpu.launch import host_time, ways
from gpu.libraries import LIBRARIES, version_of
from gpu.log import Line
from gpu.ops import storage

ONE_ROW = ("no grad", "forward + backward")


@dataclass
class Entry:
    """One library: its check, and what is timed if that was passed at both sizes."""

    form: Form
    whole: Between | None = None
    row: Between | None = None  # a state of one token


def compare(
    clock: Clock, case: Case, library: str, rounds: int, calls: int, folder: str | None
) -> list[Line]:
    """A line of ours and one of `library`; what differs from its reference is not timed."""
    clock.release()
    names = dict.fromkeys(("ours", library))
    entries = {name: checked(name, case, clock, folder) for name in names}
    # One set of arguments: on a GPU a state that is timed is larger than the cache.
    timed = {
        name: stages([entry.whole.problem], entry.whole.op)
        for name, entry in entries.items()
        if entry.whole is not None
    }
    for name, taken in time_stages(timed, clock, rounds, f"{library} d={case.d}").items():
        entries[name].form.seconds = taken
    rows = one_row(entries, clock, rounds, calls)
    return [line(name, case, library, entries[name].form, rows.get(name)) for name in names]


def checked(name: str, case: Case, clock: Clock, folder: str | None) -> Entry:
    """The operator at both sizes, after its outputs and gradients were compared."""
    entry = Entry(Form((clock.copied_bytes, *bytes_of(case))))
    allowed = TOLERANCES if name == "ours" else PLAIN_TOLERANCES
    started = time.perf_counter()
    found = []
    try:
        for size in (replace(case, batch=1, time=1), case):
            torch.manual_seed(0)
            found.append(made := BETWEEN[name](size, clock.device, folder))
            entry.form.worst = check(size, made.problem, made.op, allowed, exact=made.exact)
    except torch.OutOfMemoryError:
        raise
    except MismatchError as difference:
        entry.form.red = str(difference)
    except Exception as error:  # another library may raise anything
        entry.form.red = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    else:
        entry.row, entry.whole = found
    entry.form.check_seconds = time.perf_counter() - started
    return entry


def one_row(
    entries: Mapping[str, Entry], clock: Clock, rounds: int, calls: int
) -> dict[str, dict[str, float]]:
    """Microseconds of the host per call on a state of one token, by kind of call."""
    kinds = {name: ways(x.row.problem, x.row.op) for name, x in entries.items() if x.row}
    timed = {
        f"{name} {kind}": host_time(each[kind], calls, clock)
        for name, each in kinds.items()
        for kind in ONE_ROW
    }
    seconds = interleave(timed, rounds, what="one row") if timed else {}
    return {
        name: {
            kind: 1e6 * statistics.median(once for (once,) in seconds[f"{name} {kind}"])
            for kind in ONE_ROW
        }
        for name in kinds
    }


def line(name: str, case: Case, library: str, form: Form, row: dict[str, float] | None) -> Line:
    """beside: the library that ran in the same rounds."""
    made = {
        "what": f"{LIBRARIES[name].title} d={case.d}",
        "library": name,
        "beside": library,
        "version": version_of(name),
        **{key: getattr(case, key) for key in ("d", "m", "batch", "time")},
        "state": storage(case),
        "check_s": round(form.check_seconds, 3),
        **form.to_json(),
    }
    return made | ({"one_row_us": row} if row else {})
