"""Walks over tokens without arithmetic (roof.cu), as shares of a copy's rate.

They say what a channel read owes to the order of tokens and to the kind of its loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import gb_per_second, interleave
from gpu.log import Line

SOURCE = Path(__file__).with_name("roof.cu").read_text("utf-8")
D, M = 768, 4
VECTOR = 16  # bytes
# Of a channel read: the rows read and the bytes of an element of X.
SHAPES = {"forward float32": (1, 4), "forward bfloat16": (1, 2), "backward float32": (2, 4)}
LOADS = {"plain loads": (0, 128, 4), "cp.async": (3, 128, 2)}  # stages, threads, blocks


def walks(tokens: int, multiprocessors: int) -> Iterator[tuple[str, dict[str, int], int]]:
    """Name, macros and number of blocks of every walk."""
    for shape, (reads, size) in SHAPES.items():
        for loads, (stages, threads, blocks) in LOADS.items():
            grid = blocks * multiprocessors
            for order, chunk in (("every n-th token", 0), ("contiguous", -(-tokens // grid))):
                macros = {"READS": reads, "STAGES": stages, "THREADS": threads, "CHUNK": chunk}
                macros |= {"WIDE": D * M * size // VECTOR, "NARROW": D * 2 // VECTOR}
                yield f"{shape}, {loads}, {order}", macros, grid


def options(macros: dict[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros.items()]


def roof(clock: Clock, tokens: int, rounds: int) -> Iterator[Line]:
    from torch.utils import cpp_extension  # needs setuptools

    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or "/usr"  # headers that nothing includes
    multiprocessors = torch.cuda.get_device_properties(clock.device).multi_processor_count
    for name, macros, grid in walks(tokens, multiprocessors):
        kernel = torch.cuda._compile_kernel(SOURCE, "roof", nvcc_options=options(macros))
        reads, rows = macros["READS"], [macros["WIDE"], macros["NARROW"]]
        shared = macros["STAGES"] * reads * sum(rows) * VECTOR
        kernel.set_shared_memory_config(shared)
        shapes = [(tokens * vectors * VECTOR // 8,) for vectors in rows]
        inputs = [torch.randint(2**62, shape, device=clock.device) for shape in 2 * shapes]
        outputs = [torch.zeros_like(tensor) for tensor in inputs[:2]]
        launch = ((grid, 1, 1), (macros["THREADS"], 1, 1), [*inputs, *outputs, tokens], shared)
        kernel(*launch)
        pairs = zip(inputs[:2], inputs[2:], outputs, strict=True)
        right = all(torch.equal(out, a ^ b if reads == 2 else a) for a, b, out in pairs)
        line: Line = {"what": name, "gate": {"red": None if right else "another result"}}
        if right:
            walk = clock.timed(lambda kernel=kernel, launch=launch: kernel(*launch))
            copies, walked = zip(*interleave({"": walk}, rounds)[""], strict=True)
            rate = gb_per_second((reads + 1) * sum(rows) * VECTOR * tokens, walked)
            line |= {"gb_s": rate, "of_copy": rate / gb_per_second(clock.copied_bytes, copies)}
        yield line
