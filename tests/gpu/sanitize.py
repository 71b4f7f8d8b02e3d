"""Run some of this folder's tests under NVIDIA's compute-sanitizer, one tool at a time.

    make sanitize                                # or, if only the wheel is installed:
    python tests/gpu/sanitize.py                # memcheck, racecheck, initcheck, synccheck
    python tests/gpu/sanitize.py memcheck --choose "test_expand and float32"

The tests are small, because instrumented kernels run 10 to 100 times slower: minutes per tool.
Exit status 1 means that a tool reported something or a test failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Every read and every location of sums and windows; rows that fill a block and rows that do not;
# the ends of sequences and chunks; no tokens; a window longer than a sequence; accesses of two
# bytes; clusters.
CHOSEN = (
    "test_rewrite_read and (float32 or bfloat16) and (1-identity-63 or 4-channel-63"
    " or 4-token-63 or 4-channel-384 or 4-token-384 or 16-channel-384)"
    " or test_expand and 4-4-torch or test_any_batch_shape or test_token_compression_longer"
    " or test_unaligned_views and (63-state or 63--) and bfloat16"
    " or test_wide_states and (4096-4-channel or 4096-4-token)"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="*", metavar="tool", help=f"{', '.join(TOOLS)}; all")
    parser.add_argument("--choose", default=CHOSEN, help="tests, as pytest's -k")
    args = parser.parse_args(arguments)
    for tool in args.tools:
        if tool not in TOOLS:
            parser.error(f"a tool must be one of {', '.join(TOOLS)}, got {tool!r}")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "compute-sanitizer was not found on the PATH or in /usr/local/cuda/bin: it comes with "
            "NVIDIA's CUDA toolkit",
            file=sys.stderr,
        )
        return 1
    if not torch.cuda.is_available():
        print("compute-sanitizer needs an NVIDIA GPU, and torch finds none", file=sys.stderr)
        return 1
    failed = [tool for tool in args.tools or TOOLS if not passes(sanitizer, tool, args.choose)]
    print(f"sanitize: {', '.join(failed)} failed" if failed else "sanitize: nothing reported")
    return 1 if failed else 0


def find_sanitizer() -> str | None:
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which("compute-sanitizer", path=places)


def passes(sanitizer: str, tool: str, chosen: str) -> bool:
    """Return whether a tool reports nothing about our kernels, and the tests pass."""
    print(f"sanitize: {tool}", flush=True)
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    if tool != "initcheck":  # which has to see torch initialise what our kernels read
        # Kernels with mangled names belong to torch and its libraries; ours are extern "C".
        command += ["--kernel-name-exclude", "kernel_substring=_Z"]
    command += [sys.executable, "-m", "pytest", "-v", "--all", "-p", "no:cacheprovider"]
    command += ["-k", chosen]
    # Every tensor gets its own allocation, so the tool sees accesses beyond its end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run([*command, str(HERE)], env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
