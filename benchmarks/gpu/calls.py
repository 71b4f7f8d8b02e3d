"""The three calls of a day on a GPU: which parts each has, with how much time, in which order.

    1   does everything work?  machine, smoke, capture, tests, large, sanitize
    2   operators beside a copy.  machine, copy, compile, ops, trace, launch, plain, plain-compiled,
        others
    3   models and plans.  machine, compile-models, train, prefill, decode, plans, counters,
        train-compiled
    prepare
        before, without a GPU: the kernels of calls 2 and 3, into DDL_CACHE_DIR

Nothing here imports torch: where it cannot be imported, the records should say so.
"""

from __future__ import annotations

import sys
from typing import Any

from gpu.checks import ROOT, TOOLS, counters, pytest, sanitizer
from gpu.libraries import LIBRARIES, Missing, why_skipped
from gpu.log import Part
from gpu.plans import CHOICES
from gpu.work import Job, Workers

FULL: dict[str, Any] = {
    "sizes": (768, 2048, 4096),
    "channels": (4, 1),
    "shape": {"batch": 32, "time": 1024},
    "smoke": ((64, (1, 4)), (768, (1, 4)), (4096, (4,))),
    "rounds": 10,
    "calls": 200,
    "storage": ("bfloat16", "float32"),
    # Sequences of 1,024 tokens that a GPU of 80 GB has memory for.
    "models": {"small": {"batch": 32}, "medium": {"batch": 16}},
    "precisions": ("autocast", "bfloat16"),
    "prompts": (1, 16),
    "decode": {"batches": (1, 16), "prompt": 64, "tokens": 32},
    "backend": "inductor",
}
# Where there is no GPU, to show that everything runs.
SMALL = FULL | {
    "sizes": (32,),
    "shape": {"batch": 2, "time": 12},
    "smoke": ((64, (4,)),),
    "rounds": 2,
    "calls": 3,
    "storage": ("bfloat16",),
    "models": {
        "tiny": {"batch": 2, "layers": 1, "block_size": 12, "residuals": ("additive", "ddl-tc")}
    },
    "prompts": (1,),
    "decode": {"batches": (2,), "prompt": 4, "tokens": 3},
    "backend": "aot_eager",
}
FORMS = {
    "rewrite_read": {1: ("identity", "token"), 4: ("channel", "token")},
    "rewrite": {1: ("",), 4: ("",)},
    "read": {1: ("identity", "token"), 4: ("channel", "token")},
    "expand": {1: ("conv",), 4: ("repeat", "conv")},
}  # the most important first
SMOKE = {"batch": 2, "time": 256}


def parts(
    call: str, device: str, workers: Workers, commit: str | None, authors: str | None = None
) -> list[Part]:
    """The parts of a call in their order. authors: a folder with the authors' code."""
    sizes = FULL if device == "cuda" or call == "prepare" else SMALL
    begin = Job(
        "start", "machine", workers, {"commit": commit}, limit=120
    )  # torch from a cold disk
    made = {"1": checks, "2": operators, "3": models, "prepare": prepare}[call]
    found = [Part("machine", 20, 0, [begin]), *made(device, sizes, workers)]
    return [*found, others(device, sizes, workers, authors)] if call == "2" else found


def case(op: str, form: str, d: int, m: int, shape: dict[str, int], state: str) -> dict[str, Any]:
    return {"op": op, "form": form, "d": d, "m": m, **shape, "state": state}


def named(case: dict[str, Any]) -> str:
    sizes = f"{case['op']} {case['form']} d={case['d']} m={case['m']} {case['state']}"
    return sizes.replace("  ", " ")


def checks(device: str, sizes: dict[str, Any], workers: Workers) -> list[Part]:
    """Call 1. A first launch has a process of its own. Clusters, which could hang, come last."""
    shape = SMOKE if device == "cuda" else sizes["shape"]
    smoke = [
        case("rewrite_read", form, d, m, shape, "bfloat16")
        for d, channels in sizes["smoke"]
        for m in channels
        for form in FORMS["rewrite_read"][m]
    ]
    smoke.insert(-2, case("expand", "conv", smoke[0]["d"], 4, shape, "bfloat16"))
    captured = [
        case("rewrite_read", form, d, 4, shape, "bfloat16")
        for d, form in ((768, "channel"), (4096, "token"))
    ]

    def jobs(job: str, cases: list[dict[str, Any]]) -> list[Job]:
        return [Job(named(c), job, workers, {"case": c}, fresh=True) for c in cases]

    return [
        Part("smoke", 80, 8, jobs("smoke", smoke)),
        Part("capture", 20, 8, jobs("capture", captured)),
        Part("tests", 190, 10, tests(device)),
        Part("large", 30, 15, [
            pytest("2^31 elements", "tests/gpu/test_memory.py", "-k", "two_to_the_31",
                   limit=60, parallel=False),
        ]),
        Part("sanitize", 110, 25, [sanitizer(tool, 90) for tool in TOOLS]),
    ]  # fmt: skip


def tests(device: str) -> list[Any]:
    """The tests of a GPU, those of clusters last; without one, a few of the same operators."""
    if device != "cuda":
        file, chosen = {
            "cpu": ("tests/ops/test_ops.py", "test_expand and float32"),
            "emulated": ("tests/emulated_gpu/test_ops.py", "test_unaligned_views and bfloat16"),
        }[device]
        return [pytest("operators", file, "-k", chosen, limit=60, parallel=False)]
    folder = "tests/gpu/"
    every = "--all"  # case of their tables
    return [
        pytest("streams and memory", f"{folder}test_streams.py", f"{folder}test_memory.py",
               every, "-k", "not two_to_the_31", limit=60, parallel=True),
        pytest("operators", f"{folder}test_ops.py", every,
               "-k", "float64 or bfloat16", limit=80, parallel=True),
        pytest("models", f"{folder}test_models.py", every, "-k", "not compiled",
               limit=120, parallel=True),
        pytest("operators in clusters", f"{folder}test_ops.py", every,
               "-k", "test_rewrite_read and bfloat16", plan="CLUSTER=2", limit=60, parallel=True),
    ]  # fmt: skip


def cases(sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Every operator at every size, the most important first."""
    return [
        case(op, form, d, m, sizes["shape"], state)
        for op, forms in FORMS.items()
        for state in sizes["storage"]
        for m in sizes["channels"]
        for form in forms[m]
        for d in sizes["sizes"]
    ]


def operators(device: str, sizes: dict[str, Any], workers: Workers) -> list[Part]:
    """Call 2."""
    timed = {"rounds": sizes["rounds"]}
    every = cases(sizes)

    def ops(forms: str) -> list[Job]:
        timing = timed | {"forms": forms, "backend": sizes["backend"]}
        return [Job(named(c), "operators", workers, timing | {"case": c}) for c in every]

    traced = [c for c in every if c["op"] == "rewrite_read" and c["state"] == "bfloat16"]
    splits = [
        Job(named(c), "split", workers, {"case": c, "calls": sizes["calls"] // 20 + 1})
        for c in traced
    ]
    overhead = Job("launch", "launch", workers, timed | {"calls": sizes["calls"]})
    return [
        Part("copy", 10, 3, [Job("copy", "copies", workers, timed)]),
        Part("compile", 30, 20, [kernels(sizes, workers)]),
        Part("ops", 165, 2, ops("fused")),
        Part("trace", 15, 2, splits),
        Part("launch", 15, 10, [overhead]),
        Part("plain", 90, 2, ops("eager")),
        Part("plain-compiled", 50, 10, ops("compiled")),
    ]


def others(device: str, sizes: dict[str, Any], workers: Workers, authors: str | None) -> Part:
    """The end of call 2: other libraries, a process each, which compile their kernels in it."""
    shape = sizes["shape"]
    cases = [case("rewrite_read", "channel", d, 4, shape, "bfloat16") for d in sizes["sizes"]]
    given = {name: sizes[name] for name in ("rounds", "calls")}
    given |= {"cases": cases, "folder": authors}
    pieces: list[Any] = []
    for name, library in LIBRARIES.items():
        if reason := why_skipped(name, device, authors):
            pieces.append(Missing(library.title, reason))
        else:
            arguments = given | {"library": name}
            fresh = name != "ours"
            pieces.append(Job(library.title, "between", workers, arguments, fresh=fresh, limit=300))
    return Part("others", 40, 10, pieces)


def models(device: str, sizes: dict[str, Any], workers: Workers) -> list[Part]:
    """Call 3."""
    eager = settings(sizes)
    halves = [setting for setting in eager if setting["precision"] == "bfloat16"]
    compiled = [
        s | {"mode": "compiled", "backend": sizes["backend"], "main": True} for s in eager[:1]
    ]
    timed = {"rounds": sizes["rounds"]}

    def jobs(job: str, settings: list[dict[str, Any]], **given: Any) -> list[Job]:
        return [
            Job(f"{s['preset']} {s['precision']}", job, workers, {"setting": s, **timed, **given},
                limit=120)
            for s in settings
        ]  # fmt: skip

    counted = [case("rewrite_read", *rest, sizes["shape"], "bfloat16")
               for rest in (("identity", 768, 1), ("channel", 768, 4))]  # fmt: skip
    return [
        Part("compile-models", 25, 20, [models_kernels(sizes, workers)]),
        Part("train", 100, 20, jobs("training", eager)),
        Part("prefill", 20, 8, jobs("prompts", halves, batches=sizes["prompts"])),
        Part("decode", 25, 10, jobs("generation", halves, **sizes["decode"])),
        Part("plans", 120, 8, plans(sizes, workers)),
        Part("counters", 30, 15, [counters(named(c), c, "rewrite_read_bwd", 45) for c in counted]),
        Part("train-compiled", 60, 90, jobs("training", compiled)),
    ]


def settings(sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """The models: the papers' two sizes in two precisions."""
    return [
        {"preset": preset, **given, "precision": precision}
        for preset, given in sizes["models"].items()
        for precision in sizes["precisions"]
    ]


def prepare(device: str, sizes: dict[str, Any], workers: Workers) -> list[Part]:
    """Fills the cache for sm_90. DDL_PLAN needs a driver, so for plans there is a stand-in."""
    sys.path.append(str(ROOT))
    from tests.support import stand_ins

    folder = ROOT / "build" / "stand-in"
    folder.mkdir(parents=True, exist_ok=True)
    driver = stand_ins.build("stand_in_driver.c", "cuda.h", "libcuda.so.1", folder)
    pretended = Workers("cpu", ahead=False, LD_LIBRARY_PATH=str(driver), STAND_IN_CAPABILITY="90")
    return [
        Part("compile", 300, 0, [kernels(sizes, workers)]),
        Part("compile-models", 300, 0, [models_kernels(sizes, workers)]),
        Part("compile-plans", 300, 0, [
            Job(x.name, "kernels", pretended, {"case": x.arguments["case"]}, x.plan, fresh=True)
            for x in plans(sizes, workers)
        ]),
    ]  # fmt: skip


def kernels(sizes: dict[str, Any], workers: Workers) -> Job:
    return Job("kernels", "compiled", workers, {"cases": cases(sizes)}, limit=300)


def models_kernels(sizes: dict[str, Any], workers: Workers) -> Job:
    return Job("kernels", "compiled_models", workers, {"settings": settings(sizes)}, limit=300)


def plans(sizes: dict[str, Any], workers: Workers) -> list[Job]:
    """Each problem under the planner's own choice, then under the others; a process for each."""
    made = []
    for choice in CHOICES:
        chosen = case(choice.op, choice.form, choice.d, choice.m, sizes["shape"], "bfloat16")
        for plan in ("", *choice.plans):
            arguments = {"case": chosen, "rounds": sizes["rounds"], "aim": choice.aim}
            name = f"{named(chosen)} {plan or 'planned'}"
            made.append(Job(name, "planned", workers, arguments, plan=plan, fresh=True))
    return made
