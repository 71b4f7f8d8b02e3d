"""Instructions that not every x86-64 processor has lie in functions that `dispatch` chooses.

Elsewhere one of them ends the process of a user whose processor is older than the machine that
built the wheel. The extension of `make setup` has the functions' names; that of a wheel does not.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from ddl import _native

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files"),
    pytest.mark.skipif(not shutil.which("objdump"), reason="objdump comes with binutils"),
]

# Of AVX and later: all that begin with v or work on masks. SSE3 to SSE4.2, and on bits.
VECTORS = r"v\w+|k(?:add|and|mov|not|or|shift|test|unpck|xnor|xor)\w*"
SSE = (
    r"addsubp\w|blend\w+|crc32\w?|dpp\w|extractps|haddp\w|hsubp\w|insertps|lddqu|movddup|"
    r"movs[hl]dup|mpsadbw|pabs\w|palignr|pblend\w+|pcmp[ei]str\w|pcmpeqq|pcmpgtq|pextr[bdq]|"
    r"ph\w+|pinsr[bdq]|pmaddubsw|pmax(?:sb|sd|ud|uw)|pmin(?:sb|sd|ud|uw)|pmov[sz]x\w+|pmuldq|"
    r"pmulhrsw|pmulld|pshufb|psign\w|ptest|round[ps][ds]"
)
BITS = r"andn|bextr|bls\w+|bzhi|cmpxchg16b|lzcnt|movbe|mulx|pdep|pext|popcnt|rorx|s[ah][lr]x"
BEYOND = re.compile(rf"^\t(?:{VECTORS}|{SSE}|{BITS})\b", re.M)
OF_AVX512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(?:1[6-9]|2\d|3[01])\b")
DISPATCHED = ("vectorize_avx2", "vectorize_avx512", "__fearless_simd_kernel")


@pytest.fixture(scope="module")
def functions() -> list[tuple[str, str]]:
    """Each function's name and instructions."""
    with Path(_native.__file__).open("rb") as file:
        if ELFFile(file).get_section_by_name(".debug_info"):
            pytest.skip("an extension that is not optimised calls functions of one instruction")
    command = ["objdump", "-d", "--no-show-raw-insn", "--no-addresses", _native.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"^<(.+)>:$", text, flags=re.M)
    found = list(zip(parts[::2], parts[1::2], strict=True))
    assert len(found) > 1000, "the extension has no names of functions: make setup"
    return found


def test_only_dispatched_functions_have_instructions_beyond_sse2(
    functions: list[tuple[str, str]],
) -> None:
    beyond = {name: found[0] for name, code in functions if (found := BEYOND.search(code))}
    dispatched = {name for name in beyond if any(part in name for part in DISPATCHED)}
    assert {name: beyond[name].strip() for name in beyond.keys() - dispatched} == {}
    assert len(dispatched) > 100, "or they would not be seen at all"


def test_functions_for_avx2_have_nothing_of_avx512(functions: list[tuple[str, str]]) -> None:
    of_avx2 = [(name, code) for name, code in functions if "vectorize_avx2" in name]
    assert [name for name, code in of_avx2 if OF_AVX512.search(code)] == []
    of_avx512 = [code for name, code in functions if "vectorize_avx512" in name]
    assert any(OF_AVX512.search(code) for code in of_avx512)
