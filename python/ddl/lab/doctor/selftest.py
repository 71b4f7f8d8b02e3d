"""A tiny rewrite_read, forward and backward, against `ddl.reference` in float64.

It runs in a process of its own: a processor or a driver that does not fit the native code ends the
process, which the report then says.

    python -m ddl.lab.doctor.selftest cpu
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from .report import Facts, Report, text_of

SHAPE = (2, 7, 12, 4)  # B, T, d, m
TAPS = 3
# Largest allowed |difference| over the largest number of a tensor: some thousand units in the last
# place, because what is wrong is wrong by much more.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
SECONDS = 120
FIX = "reinstall ddl-rs and torch; if that does not help, open an issue with this report"


def selftest(report: Report) -> Facts:
    """Run the test on the CPU and on every GPU that has kernels; a problem for each that fails."""
    from .kernels import gpu_kernels

    devices = ["cpu"]
    try:
        import torch

        found = gpu_kernels(torch)
        devices += [device for device, kernel in found.items() if kernel == "CUDA kernels"]
    except Exception:  # the section of the GPUs says why
        pass
    facts: Facts = {}
    for device in devices:
        facts[device] = reason = failure(device)
        if reason is not None:
            report.error(f"the operators fail on {device} ({reason})", FIX)
    return {device: "passed" if reason is None else reason for device, reason in facts.items()}


def failure(device: str) -> str | None:
    """Why the test fails on a device; None if it passes."""
    command = [sys.executable, "-m", "ddl.lab.doctor.selftest", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS} seconds"
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    lines = done.stdout.splitlines()
    try:
        answer: Any = json.loads(lines[-1])
        return answer["failed"]
    except (IndexError, ValueError, KeyError, TypeError):
        words = done.stderr.strip().splitlines() or ["it says nothing"]
        return text_of(RuntimeError(words[-1]))


def arguments(dtype: Any, device: str) -> dict[str, Any]:
    """Random arguments of a rewrite_read with a token read, gate and value."""
    import torch

    *lead, d, m = SHAPE
    shapes = {
        "state": SHAPE, "direction": (*lead, d), "value": (*lead, m), "gate": tuple(lead),
        "compress": (d, m, TAPS), "norm_weight": (d,), "gate_weight": (d,), "gate_bias": (),
        "value_weight": (m, d), "value_bias": (m,),
    }  # fmt: skip
    g = torch.Generator().manual_seed(0)
    made = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    return {name: t.to(device, dtype).requires_grad_() for name, t in made.items()}


def computed(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Outputs and gradients by name."""
    import torch

    result = module.rewrite_read(**given, eps_k=0.1)._asdict()
    outputs = {name: out for name, out in result.items() if out is not None}
    cotangents = [
        torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out) for out in outputs.values()
    ]
    grads = torch.autograd.grad(list(outputs.values()), list(given.values()), cotangents)
    named = {name: out.detach() for name, out in outputs.items()}
    return named | {f"grad of {name}": grad for name, grad in zip(given, grads, strict=True)}


def check(device: str) -> str | None:
    """Compare the operator in float64 and float32 with the reference; the first that differs."""
    import torch

    from ddl import functional, reference

    for name, tolerance in TOLERANCES.items():
        dtype = getattr(torch, name)
        given = arguments(dtype, device)
        exact = {n: t.detach().double().cpu().requires_grad_() for n, t in given.items()}
        found, expected = computed(functional, given), computed(reference, exact)
        for what, right in expected.items():
            difference = (found[what].double().cpu() - right).abs().max().item()
            allowed = tolerance * max(1.0, right.abs().max().item())
            if not difference <= allowed:  # NaN fails as well
                return f"{what} is off by {difference:.1e} in {name}, allowed {allowed:.1e}"
    return None


if __name__ == "__main__":
    try:
        answer = check(sys.argv[1])
    except Exception as error:
        answer = f"{type(error).__name__}: {text_of(error)}"
    print(json.dumps({"failed": answer}))
