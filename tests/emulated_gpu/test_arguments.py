"""The host lays out the kernels' arguments field by field as the kernels do."""

from __future__ import annotations

import shutil

from ddl import _native, functional
from tests.emulator.build import KERNELS
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import inputs, parameters

pytestmark = needs_emulator

STRUCTURES = {
    "rewrite_read_bwd": ("RewriteRead", "Gradients", "Link", "Chain", "Backward"),
    "reduce": ("Reduce",),
    "expand": ("Expand", "ExpandBackward"),
}


def assertions(name: str, size: int, fields: list[tuple[str, int, int]]) -> str:
    """C++ that compiles only if the structure has this size, and its fields these places."""
    place = "static_assert(__builtin_offsetof({0}, {1}) == {2} && sizeof({0}::{1}) == {3});"
    lines = [f"static_assert(sizeof({name}) == {size});"]
    return "\n".join(lines + [place.format(name, *field) for field in fields]) + "\n"


def test_every_field_of_an_argument_lies_where_the_kernel_looks_for_it(tmp_path):
    layouts = {layout[0]: layout for layout in _native.argument_layouts()}
    assert {*layouts} == {name for names in STRUCTURES.values() for name in names}
    kernels = shutil.copytree(KERNELS, tmp_path / "kernels")
    for file, names in STRUCTURES.items():
        with (kernels / f"{file}.cu").open("a", encoding="utf-8") as text:
            text.writelines(assertions(*layouts[name]) for name in names)
    tensors = inputs((1, 2), 8, 2) | parameters(8, 2, "channel")
    leaves = {n: None if t is None else t.float().requires_grad_() for n, t in tensors.items()}
    with emulated(kernels=kernels):
        functional.rewrite_read(**leaves, eps_k=0.1).state.sum().backward()
        functional.expand(leaves["direction"], value_channels=2).sum().backward()
