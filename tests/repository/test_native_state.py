"""Native code has no global state without a lock: docs/decisions/free-threading.md.

Rust refuses a static that threads could race for. These are the two ways around that.
"""

from __future__ import annotations

import re

from tests.support import ROOT

# Types that their authors declare safe for threads, and why they are.
DECLARED = {
    "src/cpu/buffer.rs: Buffer<A>": "owns its elements, as a vector does",
    "src/cuda/device/gpu.rs: Gpu": "any thread may use a context's handle that it makes current",
    "src/tensor/view.rs: Tensor": "a view: each thread gets rows of its own to write",
}
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "src").rglob("*.rs")
}


def found(pattern: str) -> set[str]:
    return {f"{name}: {one}" for name, text in SOURCES.items() for one in re.findall(pattern, text)}


def test_nothing_is_declared_safe_for_threads_but_these():
    assert found(r"unsafe impl[^{]*\b(?:Send|Sync) for ([^{]+) \{\}") == set(DECLARED)


def test_no_static_is_mutable():
    assert found(r"static mut \w+") == set()
    assert found(r"\bstatic (\w+)"), "and there are some"


def test_the_module_needs_no_lock():
    assert re.search(r"#\[pymodule\(gil_used = false\)\]", SOURCES["src/python/mod.rs"])
