"""A call on processors without AVX-512, and without any AVX, as QEMU emulates them.

torch itself needs AVX for some of its functions, so a stand-in takes its place. The instructions of
the whole extension are looked at in tests/repository/test_instructions.py.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tests.support import stand_in_torch
from tests.support.op_cases import inputs, parameters

QEMU = "qemu-x86_64"

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates processors of x86-64"),
    pytest.mark.skipif(not shutil.which(QEMU), reason="QEMU (qemu-user) is not installed"),
]


@pytest.mark.parametrize("processor", ["Westmere", "Haswell"])
def test_a_call_on(processor: str, tmp_path: Path) -> None:
    """Westmere has no AVX, Haswell no AVX-512. An instruction that is missing ends the process."""
    library = stand_in_torch.build(tmp_path, "2.13")
    arguments = inputs((3,), 67, 4) | parameters(67, 4, "channel")
    arguments |= {"eps_k": 0.1, "norm_eps": 1e-5}
    stand_in_torch.assert_right(library, arguments, emulator=[QEMU, "-cpu", processor])
