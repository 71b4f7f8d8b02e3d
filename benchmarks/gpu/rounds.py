"""Training steps in turns: a process for each, started at the beginning of a call.

All compile side by side while the smoke tests run. Then one step runs at a time: in every block of
rounds each gets its turn, the additive ones too, so that the machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpu.log import Line, PieceError, fault
from gpu.work import LIMIT, Worker

ADDITIVE = "additive float32"


def named(case: Line) -> str:
    """The name of a step, such as "ddl-tc bfloat16 N=1 erase=none"."""
    n, erase = case["anchor_every"], case["erase"]
    words = [f"N={n}"] * (n is not None) + [f"erase={erase}"] * (erase != "tied")
    return " ".join([case["residual"], case["stream_dtype"], *words])


class Crew:
    """The processes of the training steps. As a piece, it waits until all have compiled."""

    name, limit = "compiled", 240.0

    def __init__(self, device: str, sizes: Line) -> None:
        self.device, self.sizes = device, sizes
        self.workers: dict[str, Worker] = {}
        self.ready: dict[str, Line] = {}
        self.lock = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with the crew)

    def start(self, case: Line) -> None:
        """Have a case compile in a process of its own, which is not waited for."""
        if named(case) not in self.workers:
            worker = self.workers[named(case)] = Worker(self.device)
            arguments = {"case": case, "sizes": self.sizes, "lock": self.lock.name}
            worker.send("compiled_step", arguments)

    def lines(self, limit: float) -> Iterator[Line]:
        deadline = time.monotonic() + limit
        for name in list(self.workers):
            line = self.answer(name, deadline - time.monotonic())
            if fault(line) is None:
                self.ready[name] = line
            yield {"what": name} | line

    def answer(self, name: str, limit: float = LIMIT) -> Line:
        """The line of a worker's job, or one with an error, after which there is no worker."""
        try:
            (line,) = self.workers[name].answers(limit)
        except PieceError as error:
            self.workers.pop(name).close()
            self.ready.pop(name, None)
            return {"error": str(error)}
        return line

    def close(self) -> None:
        for worker in self.workers.values():
            worker.process.kill()
        for worker in self.workers.values():
            worker.close()
        self.lock.close()


@dataclass
class Rounds:
    """Times some steps in turns, and compares each with the additive ones among them."""

    name: str
    crew: Crew
    cases: list[Line]
    blocks: int  # at most, while there is time
    rounds: int  # in each block, behind a step that is not timed
    profiles: bool = False
    limit: float = 120.0

    def lines(self, limit: float) -> Iterator[Line]:
        end, ready = time.monotonic() + limit, self.crew.ready
        names = [named(case) for case in self.cases if named(case) in ready]
        taken: dict[str, Line] = {name: {"copies": [], "seconds": []} for name in names}
        for block in range(self.blocks):
            for name in [x for x in (names[::-1] if block % 2 else names) if x in ready]:
                if time.monotonic() > end:
                    break
                self.crew.workers[name].send("timed_step", {"rounds": self.rounds})
                line = self.crew.answer(name)
                if "error" in line:
                    yield {"what": name} | line
                for field, values in taken[name].items():
                    values += line.get(field, [])
        for name in [name for name in names if name in ready and taken[name]["seconds"]]:
            line = {"what": name} | ready[name] | taken[name] | self.compare(name, taken)
            if self.profiles and time.monotonic() < end:  # last: the profiler may stay attached
                self.crew.workers[name].send("profiled_step", {})
                profile = self.crew.answer(name)
                line |= {"profile": profile["error"]} if "error" in profile else profile
            yield line

    def compare(self, name: str, taken: dict[str, Line]) -> Line:
        """Times and ratios to the additive steps, in float32 and in the step's own dtype."""
        from ddl.lab.timing import ratio, ratio_interval  # imports torch

        ready, seconds = self.crew.ready, taken[name]["seconds"]
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
        line: Line = {"median": statistics.median(seconds), "quartiles": quartiles[::2]}
        same = f"additive {ready[name]['stream_dtype']}"
        for base, prefix in ((ADDITIVE, ""), (same, "same_")):
            if base in ready and taken.get(base, {}).get("seconds"):
                additive = taken[base]["seconds"]
                line[f"{prefix}ratio"] = ratio(additive, seconds)
                line[f"{prefix}interval"] = ratio_interval(additive, seconds)
                if least := ready[base].get("peak_bytes"):
                    line[f"{prefix}memory_factor"] = ready[name]["peak_bytes"] / least
        if "ratio" in line:  # floor: the ratio if each boundary moved its bytes at a copy's rate
            copy = statistics.median(taken[ADDITIVE]["copies"])
            step = statistics.median(taken[ADDITIVE]["seconds"])
            line["floor"] = step / (step + ready[name]["beyond"] * copy)
        return line
