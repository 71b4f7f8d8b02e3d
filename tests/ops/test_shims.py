"""torch's C shims: their list in docs/decisions/native-registration.md, and how they are used.

ABI checkers read a library's undefined symbols. These names are looked up while it runs.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from ddl import _native
from tests.support import ROOT, stand_in_torch
from tests.support.op_cases import inputs, parameters

PAGE = ROOT / "docs" / "decisions" / "native-registration.md"
SINCE = {  # name → the version of torch that brought it
    name: Version(version)
    for version, names in re.findall(r"^\| (2\.\d+)[^|]*\|(.+)\|$", PAGE.read_text("utf-8"), re.M)
    for name in re.findall(r"`(\w+)`", names)
}
OF_CUDA = {"aoti_torch_get_current_cuda_stream"}
OF_CPP = {"_ZdlPv"}


def test_the_page_lists_what_the_sources_look_up() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "src" / "torch").glob("*.rs")]
    tables = [table for text in sources for table in re.findall(r"(?ms)^functions! \{.+?^\}", text)]
    names = {name for table in tables for name in re.findall(r"\bfn (\w+)\(", table)}
    assert names - OF_CPP == set(SINCE)


def test_the_extension_has_no_other_name_of_a_shim() -> None:
    binary = Path(_native.__file__).read_bytes()
    known = tuple(name.encode() for name in SINCE)
    # Rust's strings follow each other without an end.
    found = re.finditer(rb"aoti_torch_|(?<!lib)(?<!aoti_)torch_[a-z]+_", binary)
    begun = [binary[each.start() : each.start() + 60] for each in found]
    assert [text for text in begun if not text.startswith(known)] == []
    assert all(name in binary for name in known)


def test_the_installed_torch_has_those_of_its_version() -> None:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    folder = Path(torch.__file__).parent / "lib"
    files = [folder / f"{library}.{suffix}" for library in ("libtorch_cpu", "libtorch_cuda")]
    libraries = [ctypes.CDLL(str(file)) for file in files if file.exists()]
    looked_for = set(SINCE) - (OF_CUDA if len(libraries) < 2 else set())
    release = Version(Version(torch.__version__).base_version)
    has = {name for name in looked_for if any(hasattr(library, name) for library in libraries)}
    assert has == {name for name in looked_for if SINCE[name] <= release}


# --- with a stand-in for torch --------------------------------------------------------------------

ABI_2_10 = 0x020A_0000_0000_0000


@pytest.fixture(scope="module", params=["2.10", "2.13"])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def library(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_torch.build(tmp_path_factory.mktemp("stand-in"), version)


def test_a_call_returns_numbers_and_deletes_what_torch_gave_it(library: Path) -> None:
    """Words of optionals are deleted by the shim, and by C++'s operator before torch had it."""
    arguments = inputs((3,), 19, 4) | parameters(19, 4, "channel")
    arguments |= {"eps_k": 0.1, "norm_eps": 1e-5}
    done = stand_in_torch.assert_right(library, arguments)
    assert done["words"] == 0
    assert done["tensors"] == len(done["outputs"])


def test_kernels_are_registered_for_the_oldest_torch(library: Path) -> None:
    """The version of the running torch could change how arguments lie on the stack."""
    done = stand_in_torch.call(library, "rewrite", inputs((1,), 4, 2) | {"eps_k": 0.1})
    assert done["version"] == ABI_2_10


def reason(version: str, message: str) -> str:
    return f": {message}" if version == "2.13" else "; the lines above say why"


def test_a_refused_registration_says_why(library: Path, version: str) -> None:
    done = stand_in_torch.call(library, "rewrite", {}, STAND_IN_REFUSES="CUDA")
    refused = 'torch refused the "CUDA" kernel of "rewrite"'
    why = reason(version, "the stand-in has no such key")
    assert done["error"] == f"ddl-rs needs a torch of version 2.10 or newer: {refused}{why}"


def test_a_failed_copy_says_why(library: Path, version: str) -> None:
    arguments = inputs((1,), 4, 2) | {"state": torch.zeros(1, 2, 4).mT, "eps_k": 0.1}
    done = stand_in_torch.call(library, "rewrite", arguments)
    expected = "torch could not copy a tensor" + reason(version, "the stand-in copies nothing")
    assert done["refusal"] == expected
    assert (done["words"], done["tensors"]) == (0, 0)
