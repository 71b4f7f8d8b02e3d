"""Machine code of compiled kernels: nvdisasm's text, and the waits that its control words encode.

nvdisasm comes with triton. A load sets one of six scoreboards; an instruction that needs its result
waits until the scoreboard is clear, which is when all loads that share it have arrived.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddl.cuda import Kernel

LINE = re.compile(r"\s*(?:/\*[0-9a-f]+\*/\s+(.*?);\s*)?/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"(\.L_\w+):")


@dataclass
class Instruction:
    """One instruction; scoreboards are numbers from 0 to 5."""

    opcode: str
    operands: str
    sets: int | None  # the scoreboard that is set until the instruction's result is there
    waits: frozenset[int]  # scoreboards that have to be clear before it is issued
    labels: list[str]

    def writes(self) -> range:
        """Return the registers that it may write: up to four from its first operand on."""
        found = re.match(r"R(\d+)\b", self.operands)
        first = int(found[1]) if found else 0
        return range(first, first + (4 if found else 0))

    def is_barrier(self) -> bool:
        """Return whether a block, or a cluster, waits here for its threads."""
        return self.opcode.startswith(("BAR.", "SYNCS"))


def nvdisasm() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm"
    return path if path.exists() else None


needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm comes with triton")


def machine_code(kernel: Kernel) -> list[Instruction]:
    """Return the instructions of a kernel that was compiled into `DDL_CACHE_DIR`."""
    cache = Path(os.environ["DDL_CACHE_DIR"])
    options = {f"-D{macro}" for macro in kernel.macros.split()}
    for path in cache.glob("*.kernel"):
        text, elf, image = path.read_bytes().partition(b"\x7fELF")
        key = text.decode(errors="replace").splitlines()
        if any(line.endswith(kernel.name) for line in key) and any(
            options <= set(line.split()) for line in key
        ):
            cubin = cache / "disassembled.cubin"
            cubin.write_bytes(elf + image)
            return disassembled(cubin)
    raise LookupError(f"{kernel.name} is not in {cache}")


def disassembled(cubin: Path) -> list[Instruction]:
    command = [str(nvdisasm()), "--print-code", "--print-instruction-encoding", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[Instruction] = []
    labels: list[str] = []
    written = ""
    for line in text.splitlines():
        if label := LABEL.match(line.strip()):
            labels.append(label[1])
        elif found := LINE.match(line):
            if found[1]:
                written = found[1]
            elif written:  # the second half of an instruction's 16 bytes
                instructions.append(decoded(written, int(found[2], 16), labels))
                written, labels = "", []
    return instructions


def decoded(written: str, upper: int, labels: list[str]) -> Instruction:
    """Decode the control bits in the upper half of an instruction (Volta and newer)."""
    control = upper >> 41
    sets = control >> 5 & 7
    waits = frozenset(i for i in range(6) if control >> 11 + i & 1)
    opcode, _, operands = re.sub(r"^@!?U?P\w+\s+", "", written).partition(" ")
    return Instruction(opcode, operands, None if sets == 7 else sets, waits, labels)


def longest_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the body of the longest loop: the one over a block's tokens, or over rows."""
    places = {label: n for n, each in enumerate(code) for label in each.labels}
    loops = [
        code[places[target[0]] : n + 1]
        for n, each in enumerate(code)
        if each.opcode.startswith("BRA")
        and (target := re.search(r"\.L_\w+", each.operands))
        and places.get(target[0], n + 1) <= n
    ]
    return max(loops, key=len)


def loads(code: Iterable[Instruction], *kinds: str) -> list[int]:
    """Return the places of loads with these kinds: EF for streaming, CONSTANT for parameters."""
    wanted = set(kinds)
    return [
        n
        for n, each in enumerate(code)
        if each.opcode.startswith("LDG.")
        and set(each.opcode.split(".")) & {"EF", "CONSTANT"} == wanted
    ]
