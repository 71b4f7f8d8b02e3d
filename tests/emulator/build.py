"""Compile kernels for the CPU, and the runtime that they share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .source import REPOSITORY, translation_unit

_HERE = Path(__file__).resolve().parent
_OLDEST_COMPILER = 12
KERNELS = REPOSITORY / "kernels"

# For the runtime and the kernels.
_FLAGS = ["-std=c++17", "-fPIC", "-shared", "-fno-gnu-unique"]

# Kernels want the runtime's thread-local variables in static TLS. It has to ask for that itself: if
# a kernel without them loaded it first, they would be elsewhere, and later kernels refused.
_RUNTIME_FLAGS = ["-O2", "-pthread", "-ftls-model=initial-exec"]
_RUNTIME_MACROS = {
    "": [],
    "asan": ["-DEMULATOR_ASAN"],
    "tsan": ["-DEMULATOR_TSAN"],
    "traffic": ["-DEMULATOR_TRAFFIC"],
}

# Kernels are compiled once per specialisation, so these flags save time: no start-up code of the C
# and C++ libraries, no exception tables, no warnings.
_KERNEL_FLAGS = [
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Werror=return-type",
    "-nostartfiles",
    "-nodefaultlibs",
    "-fno-sanitize-recover=all",
]
# Checks that cost little to compile; runtime/undefined.cpp has their handlers.
_CHECKS = "-fsanitize=alignment,bounds,shift,integer-divide-by-zero"
_MORE_CHECKS = "-fsanitize=signed-integer-overflow,pointer-overflow,null,bool"
_DEBUG = ["-g1", "-fno-omit-frame-pointer"]
_SANITIZER_FLAGS = {
    "": ["-O1", _CHECKS, "-Wl,-z,defs"],
    "asan": ["-O1", *_DEBUG, _CHECKS, _MORE_CHECKS, "-fsanitize=address"],
    "tsan": ["-O1", *_DEBUG, _CHECKS, "-fsanitize=thread"],
    # -fsanitize=thread inserts calls before accesses; runtime/traffic.cpp defines them.
    "traffic": ["-O1", _CHECKS, "-fsanitize=thread", "-Wl,-z,defs"],
}


class BuildError(RuntimeError):
    """The compiler rejected a kernel; the message is the compiler's."""


def unsupported() -> str | None:
    """Return the reason why this machine cannot run the emulator, or None if it can."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return "the CUDA emulator switches stacks with x86-64 code for Linux"
    if not shutil.which("g++"):
        return "the CUDA emulator compiles kernels with g++, which was not found"
    version = _compiler_output("g++", "-dumpversion").strip()
    if int(version.split(".")[0]) < _OLDEST_COMPILER:
        return f"the CUDA emulator needs g++ {_OLDEST_COMPILER} for _Float16, found {version}"
    return None


def build(source: Path | str, defines: Sequence[str] = (), sanitizer: str = "") -> Path:
    """Compile a kernel file for the CPU, or return the cached result.

    source: a .cu file, or the name of one in kernels/ ("rewrite_read_fwd").
    defines: the specialisation's macros, as NVRTC's -D takes them: "D=768".
    sanitizer: "", "asan" or "tsan". A process that loads the last two must have been started
        with `sanitizer_environment`. "traffic" counts bytes (traffic.py).

    Returns a shared object with, for each kernel NAME of the file,

        int ddl_emulated_NAME(const unsigned grid[3], const unsigned block[3],
                              size_t shared_bytes, void** parameters,
                              char* error, size_t error_bytes);
        size_t ddl_emulated_NAME_argument_bytes();

    where `parameters` is as for cuLaunchKernel. The first returns 0, or 1 with a reason in `error`.

    Raises BuildError if the compiler rejects the kernel, SourceError if the emulator does.
    """
    path = source if isinstance(source, Path) else KERNELS / f"{source}.cu"
    text = translation_unit(path, sorted(defines))
    runtime = build_runtime(sanitizer)
    flags = [*_FLAGS, *_KERNEL_FLAGS, *_SANITIZER_FLAGS[sanitizer], f"-I{_HERE / 'device'}"]
    # Kernels find the runtime beside them, so the cache may be moved.
    libraries = [str(runtime), "-Wl,-rpath,$ORIGIN", "-lm", "-lc", "-lgcc"]
    return _compile(path.stem, text, flags, libraries)


def sanitizer_environment(sanitizer: str) -> dict[str, str]:
    """Return environment variables for a process that runs kernels built with this sanitizer.

    Its library must be loaded first, so a running Python cannot load it. ASan and TSan end the
    process with a report; errors that the emulator itself finds still fail the launch.

    Raises FileNotFoundError if g++ came without the library.
    """
    library = _compiler_output("g++", f"-print-file-name=lib{sanitizer}.so").strip()
    if not Path(library).is_absolute():
        raise FileNotFoundError(f"g++ came without {library}: install its sanitizer libraries.")
    return {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # allocations that Python keeps at exit would be reported
        "TSAN_OPTIONS": "halt_on_error=1",
    }


def build_runtime(sanitizer: str) -> Path:
    """Build the library with fibers, blocks and launches."""
    sources = sorted((_HERE / "runtime").glob("*.cpp"))
    headers = sorted([*(_HERE / "runtime").glob("*.h"), *(_HERE / "device").glob("*.h")])
    content = "".join(path.read_text(encoding="utf-8") for path in [*sources, *headers])
    # One translation unit, because most of the compile time goes into the standard headers. The
    # digest in the first line gives each version of the sources, and its kernels, a new cache key.
    lines = [f"// {_digest(content)}", *(f'#include "{path.name}"' for path in sources)]
    flags = [*_FLAGS, *_RUNTIME_FLAGS, *_RUNTIME_MACROS[sanitizer], f"-I{_HERE / 'runtime'}"]
    return _compile(f"lib{sanitizer}runtime", "\n".join(lines) + "\n", flags, [])


def _compile(stem: str, text: str, flags: Sequence[str], libraries: Sequence[str]) -> Path:
    """Compile a translation unit, unless it is cached; return the shared object."""
    key = repr((text, flags, libraries, _compiler_output("g++", "--version")))
    name = f"{stem}-{_digest(key)}"
    output = _cache_directory() / f"{name}.so"
    if output.exists():
        return output
    with _locked(output.with_suffix(".lock")):
        if output.exists():  # built by the process that held the lock
            return output
        unfinished = output.with_suffix(f".{os.getpid()}")
        # Kernels find the runtime by its soname; without one they would record its path.
        link = ["-x", "none", *libraries, f"-Wl,-soname,{output.name}", "-o", str(unfinished)]
        command = ["g++", *flags, "-x", "c++", "-", *link]
        result = subprocess.run(
            command,
            input=text,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            unfinished.unlink(missing_ok=True)
            raise BuildError(f"g++ did not compile {stem}:\n{result.stderr}")
        unfinished.replace(output)
    return output


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file while building it: parallel test workers need the same ones."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _cache_directory() -> Path:
    directory = os.environ.get("DDL_EMULATOR_CACHE")
    path = Path(directory) if directory else REPOSITORY / "build" / "emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _compiler_output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
