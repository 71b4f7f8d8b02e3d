"""The parts of each call, in the order of what they decide.

    day     at most 9 minutes: are the results right, and what do steps and operators take?
    tests   at most 4 minutes: the tests of tests/gpu that no GPU has run yet
    prepare before both, without a GPU: compiles the kernels of the day into DDL_CACHE_DIR

Nothing here imports torch: where it cannot be imported, the records should say so.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.log import Line, Part
from gpu.plans import CHAIN_PLANS, CHOICES
from gpu.rounds import Crew, Rounds
from gpu.work import Job, counters, pytest

ROOT = Path(__file__).resolve().parents[2]
MINUTES = {"day": 8.5, "tests": 3.8, "prepare": 30.0}
READS, STATES = ("channel", "token"), ("float32", "bfloat16")


def step(residual: str, stream: str = "float32", n: int | None = None, erase: str = "tied") -> Line:
    return {"residual": residual, "stream_dtype": stream, "anchor_every": n, "erase": erase}


def streams(dtype: str) -> list[Line]:
    residuals = ("additive", "ddl", "ddl-cc", "ddl-tc")
    return [*(step(residual, dtype) for residual in residuals), step("ddl-tc", dtype, None, "none")]


ADDITIVE, WIDE = step("additive"), ("ddl-cc", "ddl-tc")
FULL: dict[str, Any] = {
    "shape": {"batch": 32, "time": 1024},
    "smoke": {"batch": 2, "time": 256},
    "sizes": (768, 2048, 4096),
    "rounds": 10,
    "calls": 200,
    "links": (0, 1, 3, 7),
    "tokens": 128,
    "model": {"preset": "small", "batch": 32, "backend": "inductor"},
    "steps": streams("float32"),
    "decode": streams("float32")[:4],
    "anchors": [
        ADDITIVE,
        *(step(residual, n=n) for n in (1, 2, 8) for residual in WIDE),
        step("ddl-tc", n=1, erase="none"),
    ],
    "bfloat16": [
        ADDITIVE,
        *streams("bfloat16"),
        *(step(residual, "bfloat16", 1) for residual in WIDE),
        step("ddl-tc", "bfloat16", 1, "none"),
    ],
}
# Where there is no GPU, to show that everything runs.
SMALL = FULL | {
    "shape": {"batch": 2, "time": 12},
    "smoke": {"batch": 1, "time": 12},
    "sizes": (64,),
    "rounds": 2,
    "calls": 3,
    "links": (0, 2),
    "tokens": 6,
    "model": {
        "preset": "tiny",
        "batch": 2,
        "backend": "aot_eager",
        "changes": {"num_layers": 1, "block_size": 12},
    },
    "steps": [ADDITIVE, step("ddl-tc")],
    "decode": [ADDITIVE, step("ddl-tc")],
    "anchors": [],
    "bfloat16": [ADDITIVE, step("additive", "bfloat16")],
}


def parts(call: str, device: str, crew: Crew, commit: str | None) -> list[Part]:
    begin = Part("machine", 60, [Job("start", "machine", device, {"commit": commit})])
    return [begin, *{"day": day, "tests": tests, "prepare": prepare}[call](device, crew)]


def sizes_of(device: str) -> dict[str, Any]:
    return FULL if device == "cuda" else SMALL


def case(form: str, d: int, m: int, shape: Line, state: str) -> Line:
    return {"op": "rewrite_read", "form": form, "d": d, "m": m, **shape, "state": state}


def title(case: Line, *more: str) -> str:
    return " ".join([case["form"], f"d={case['d']}", f"m={case['m']}", case["state"], *more])


def day(device: str, crew: Crew) -> list[Part]:
    sizes = sizes_of(device)
    shape, narrow, rounds = sizes["shape"], sizes["sizes"][0], {"rounds": sizes["rounds"]}

    def job(name: str, case: Line, plan: str = "", **arguments: Any) -> Job:
        return Job(title(case, plan), name, device, {"case": case, **arguments}, plan)

    def turns(name: str, blocks: int) -> Part:
        piece = Rounds(name, crew, sizes[name], blocks, rounds=3, profiles=name == "steps")
        return Part(name, 90, [piece])

    cases = [
        case(form, d, m, shape, state)
        for d in sizes["sizes"]
        for form, m in (("channel", 4), ("token", 4), ("identity", 1))
        for state in STATES
        if (d, m) != (4096, 1)
    ]
    smoke = [c | sizes["smoke"] for c in cases if c["state"] == "bfloat16"]  # clusters come last
    reads = [case(form, narrow, 4, shape, state) for form in READS for state in STATES]
    small = [c | sizes["smoke"] for c in reads]
    plans, chains = [], []
    for form, d, m, state, _, plan in CHOICES:
        c = case(form, d if device == "cuda" else narrow, m, shape, state)
        plans.append(job("operators", c, plan, **rounds))
    for c in reads:
        for plan in dict.fromkeys(("", CHAIN_PLANS.get(c["form"], ""))):
            chains.append(job("chains", c, plan, links=sizes["links"], **rounds))
    if device != "cuda":
        smoke, plans, chains = smoke[:1], plans[:1], chains[:1]
    decode = {"cases": sizes["decode"], "sizes": sizes["model"], "tokens": sizes["tokens"]}
    decode["rounds"] = min(3, sizes["rounds"])
    counted = zip(("rewrite_read_fwd", "rewrite_read_bwd"), reads[:2], strict=True)
    return [
        Part("smoke", 60, [job("operators", c, rounds=0) for c in smoke]),
        Part("bits", 40, [job("chains", c, rounds=0, links=(1, 3)) for c in small]),
        Part("compiled", 240, [crew]),
        turns("steps", 5),
        turns("anchors", 3),
        Part("roof", 30, [Job("roof", "roof", device, {"tokens": 2**15, **rounds})]),
        Part("operators", 100, [job("operators", c, **rounds) for c in cases]),
        Part("plans", 90, plans),
        Part("chains", 50, chains),
        turns("bfloat16", 3),
        Part("counters", 60, [counters(title(c), c, kernel) for kernel, c in counted]),
        Part("generation", 60, [Job("decode", "decode", device, decode)]),
        Part("launch", 20, [Job("launch", "launch", device, {"calls": sizes["calls"], **rounds})]),
    ]


TESTS = (  # a file of tests/gpu, and -k; flash-linear-attention compiles for minutes
    ("models", "training_steps_follow and compiled and (mhc or independent-hc or gated)"),
    ("delta_rule", "kernels_agree and feature and torch.float16"),
    ("delta_rule", "kernels_agree and feature and torch.bfloat16"),
)


def tests(device: str, crew: Crew) -> list[Part]:
    folder = ROOT / "tests" / "gpu"
    return [Part("tests", 240, [pytest(folder / f"test_{x}.py", words) for x, words in TESTS])]


def prepare(device: str, crew: Crew) -> list[Part]:
    """The kernels of the day for sm_90. DDL_PLAN needs a driver, for which there is a stand-in."""
    sys.path.append(str(ROOT))
    from tests.support import stand_ins

    folder = ROOT / "build" / "stand-in"
    folder.mkdir(parents=True, exist_ok=True)
    driver = stand_ins.build("stand_in_driver.c", "cuda.h", "libcuda.so.1", folder)
    os.environ |= {"LD_LIBRARY_PATH": str(driver), "STAND_IN_CAPABILITY": "90"}
    jobs = [
        replace(piece, job="kernels", device="cpu", limit=300)
        for part in day("cuda", crew)
        for piece in part.pieces
        if isinstance(piece, Job) and "case" in piece.arguments
    ]
    models = [
        Job(case["residual"], "kernels_of_step", "cpu", {"case": case, "sizes": FULL["model"]})
        for case in FULL["steps"] + FULL["anchors"] + FULL["bfloat16"]
        if case["residual"] != "additive"
    ]
    return [Part("compile", 1800, [*jobs, *models])]
