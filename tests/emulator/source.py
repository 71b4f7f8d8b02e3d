"""The C++ translation unit made from a kernel file.

Kernel text is C++ but for `__shared__` declarations, which no macro can turn into C++: they become
references to memory that the runtime hands out. Headers may hold such declarations too, so they
are put in place of their `#include` lines; `#line` keeps messages at the original lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class SourceError(ValueError):
    """The kernel's text holds something that the emulator does not understand."""


_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(\S.*?)[ \t]*$", re.M)

_ALIGNMENT = r"(?:(?:__align__|alignas)\s*\([^()]*\)\s*)?"
_DYNAMIC_SHARED = re.compile(
    rf"\bextern\s+__shared__\s+{_ALIGNMENT}(?P<type>[\w:<>\s]+?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_STATIC_SHARED = re.compile(
    rf"(?<!\bextern )\b__shared__\s+{_ALIGNMENT}(?P<type>[\w:<>,\s]+?)\s+(?P<name>\w+)"
    r"\s*(?P<sizes>(?:\[[^\];]+\]\s*)*);"
)

_BALANCED = r"(?:[^()]|\([^()]*\))*"
_KERNEL = re.compile(
    r'\bextern\s+"C"\s+__global__\s+(?:void\s+)?'
    rf"(?P<cluster>(?:__cluster_dims__\s*\({_BALANCED}\)|[A-Z][A-Z_]*)\s+)?"
    rf"(?:__launch_bounds__\s*\((?P<bounds>{_BALANCED})\)\s*)?(?:void\s+)?(?P<name>\w+)\s*\("
)
_MOST_THREADS = "1024"
# Behind the kernels __cluster_dims__, an attribute until then, stands for its arguments.
_AFTERWARDS = ("#undef __cluster_dims__", "#define __cluster_dims__(...) __VA_ARGS__")


def translation_unit(kernel: Path, defines: Sequence[str]) -> str:
    """The C++ for the kernels in one file.

    kernel: the .cu file; what it includes lies beside it.
    defines: macros as NVRTC's -D takes them, "NAME" or "NAME=value".

    Raises SourceError for includes in angle brackets and for files without a kernel.
    """
    text = _inlined(kernel, set())
    kernels = list(_KERNEL.finditer(text))
    if not kernels:
        raise SourceError(f'{kernel.name} has no `extern "C" __global__` function.')
    exports = [
        f"EMULATOR_EXPORT({k['name']}, EMULATOR_FIRST({k['bounds'] or _MOST_THREADS}), "
        f"EMULATOR_CLUSTER({(k['cluster'] or '').strip()}))"
        for k in kernels
    ]
    # The macros come after our own headers, which need not mind names as short as D and M.
    lines = ['#include "cuda_on_cpu.h"', *map(_definition, defines), text, *_AFTERWARDS, *exports]
    return "\n".join(lines) + "\n"


def _definition(define: str) -> str:
    name, equals, value = define.partition("=")
    return f"#define {name} {value if equals else '1'}"


def _inlined(path: Path, seen: set[Path]) -> str:
    """The text of a file with its includes in place and its shared arrays rewritten.

    Every header is taken as if it began with `#pragma once`.
    """
    seen.add(path)
    text = _COMMENT_OR_STRING.sub(_without_comment, path.read_text(encoding="utf-8"))
    text = _DYNAMIC_SHARED.sub(_dynamic_shared, text)
    text = _STATIC_SHARED.sub(_static_shared, text)

    def include(match: re.Match[str]) -> str:
        name = match[1]
        if not (name.startswith('"') and name.endswith('"')):
            raise SourceError(
                f"{path.name} includes {name}, but NVRTC is given no include path: "
                "kernels may include the project's own headers only."
            )
        header = path.parent / name[1:-1]
        if header in seen:
            return ""
        next_line = match.string.count("\n", 0, match.end()) + 2
        return f"{_inlined(header, seen)}\n{_line(next_line, path)}"

    return f"{_line(1, path)}\n{_INCLUDE.sub(include, text)}"


def _line(number: int, path: Path) -> str:
    """Says that the next line is `number` of `path`, which compiler and runtime messages repeat."""
    shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    return f'#line {number} "{shown}"'


def _without_comment(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)


def _dynamic_shared(match: re.Match[str]) -> str:
    kind, name = match["type"], match["name"]
    return _keep_lines(
        match, f"{kind}* const {name} = static_cast<{kind}*>(emulator::dynamic_shared());"
    )


def _static_shared(match: re.Match[str]) -> str:
    name = match["name"]
    array = f"emulator_{name}_array"
    return _keep_lines(
        match,
        f"typedef {match['type']} {array}{match['sizes']}; "
        f"{array}& {name} = emulator::shared_array<{array}>([] {{}});",
    )


def _keep_lines(match: re.Match[str], replacement: str) -> str:
    return " ".join(replacement.split()) + "\n" * match[0].count("\n")
