"""Test this machine's wheel of dist/ in empty environments: `make check-wheel`.

Each environment gets one torch on one Python. There the README's way from text to scores has to
work without Rust, and the tests that need no emulated GPU have to pass.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The oldest and the newest Python that each torch has wheels for. The first has the least
# transformers and lm-eval, too.
PAIRS = (
    ("2.10.0", "3.10"), ("2.10.0", "3.14"),
    ("2.11.0", "3.10"), ("2.11.0", "3.14"),
    ("2.15.0", "3.11"), ("2.15.0", "3.15"),
)  # fmt: skip
EXTRAS = "eval,explore,report"  # what the tests import
TOOLS = ("hypothesis", "peft", "pyelftools", "pytest", "pytest-xdist", "trl")
# These are about the source tree, or need an emulated or a real GPU.
NOT_OF_THE_WHEEL = (
    "benchmarks", "costs", "emulated_gpu", "emulator", "gpu", "release", "repository", "soak",
)  # fmt: skip
# The tests of what zig's linking can break; the rest is Python, or the Rust that `make test` tests.
WITH_INSTALLED_TORCH = (
    "ops/test_refusals.py", "ops/test_refused.py", "ops/test_shims.py", "ops/test_processors.py",
)  # fmt: skip
# Commands that look at the machine; doctor's exit status says whether the operators work.
LOOKS = (
    ["ddl", "doctor"],
    ["ddl", "bench", "--device", "cpu", "--hidden-size", "64", "--time", "32", "--repeats", "2"],
)
TASKS = ROOT / "tests" / "support" / "lm_eval_tasks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="default: dist/")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--pair", nargs=2, action="append", metavar=("TORCH", "PYTHON"),
        help="for example 2.11.0 3.10; may be repeated; default: all pairs of the support matrix",
    )  # fmt: skip
    choice.add_argument(
        "--installed", action="store_true",
        help="with the torch and the packages of this Python; few tests, fetches nothing",
    )  # fmt: skip
    options = parser.parse_args()
    wheel = find_wheel(options.dist)
    step(
        "contents",
        [sys.executable, "-m", "pytest", "-q", "tests/release", "--wheels", wheel.parent],
    )
    if options.installed:
        check_installed(wheel)
        return
    for torch, python in options.pair or PAIRS:
        check_pair(wheel, torch, python)


def find_wheel(dist: Path) -> Path:
    """Return the wheel in `dist` for this machine and this kind of Python, free-threaded or not."""
    system = "macosx" if sys.platform == "darwin" else "manylinux"
    abi = "abi3.abi3t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "abi3"
    wheels = list(dist.resolve().glob(f"*-{abi}-{system}*_{platform.machine()}.whl"))
    if len(wheels) != 1:
        sys.exit(
            f"`--dist` must have one wheel for this machine, {dist} has {len(wheels)}: make wheels"
        )
    return wheels[0]


def check_pair(wheel: Path, torch: str, python: str) -> None:
    """Test the wheel with one torch on one Python, with the newest of all other packages.

    The first pair has the least versions of lm-eval and of what the extra `hf` brings.
    """
    print(f"\n=== torch {torch}, Python {python}")
    uv = [sys.executable, "-m", "uv", "--no-config"]  # pyproject.toml pins torch for development
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        step(
            "environment", [*uv, "venv", "--quiet", "--no-project", "--python", python, environment]
        )
        into = [*uv, "pip", "install", "--quiet", "--python", environment]
        packages = [f"{wheel}[{EXTRAS}]", f"torch=={torch}"]
        if (torch, python) == PAIRS[0]:
            packages += ["--resolution", "lowest-direct", *least_versions()]
        step("packages", [*into, *packages])
        step("tools", [*into, *TOOLS])
        check_commands(environment, Path(folder))
        skipped = [f"--ignore=tests/{room}" for room in NOT_OF_THE_WHEEL]
        run_tests(environment, ["tests", *skipped])


def least_versions() -> list[str]:
    """Return lm-eval and what the extra `hf` brings, from their least versions on."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:hf|eval) = (\[.+\])$", text, re.MULTILINE)
    found = [requirement for text in lists for requirement in json.loads(text)]
    return [requirement for requirement in found if not requirement.startswith("ddl-rs")]


def check_installed(wheel: Path) -> None:
    """Test the wheel in an environment that borrows this Python's packages."""
    print(f"\n=== the installed torch, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        step("environment", [sys.executable, "-m", "venv", "--without-pip", environment])
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", environment]
        step("packages", [*pip, "install", "--no-deps", wheel])
        # Behind the wheel's own: this Python's ddl is not found first.
        variables = {"base": str(environment), "platbase": str(environment)}
        packages = Path(sysconfig.get_path("purelib", "venv", vars=variables))
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        check_commands(environment, Path(folder))
        run_tests(environment, [f"tests/{name}" for name in WITH_INSTALLED_TORCH])


def check_commands(environment: Path, folder: Path) -> None:
    """Examine and measure it, then the README's lines from text to scores, and no other program."""
    code = "import ddl._native; print(ddl._native.__file__)"
    where = step("import", [environment / "bin" / "python", "-c", code], cwd=folder).splitlines()
    assert Path(where[-1]).is_relative_to(environment), f"imported {where[-1]}"
    bare = {"PATH": str(environment / "bin"), "HOME": str(folder), "HF_HOME": str(folder / "hf")}
    for command in (*LOOKS, *readme_commands()):
        step(" ".join(command[:2]), command, cwd=folder, env=bare)
    [record] = (folder / "runs" / "tiny").glob("eval-*.json")
    scores = json.loads(record.read_text())["runs"][0]["results"]
    perplexity = scores["local_rolling"]["byte_perplexity,none"]
    assert 1 < perplexity < 128, (
        f"a trained model has a byte perplexity below 128, not {perplexity}"
    )


def readme_commands() -> list[list[str]]:
    """Return the README's lines from text to scores, with local tasks for those of the network."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(ddl train.*?)```", readme, re.DOTALL)[1]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    commands = [command for command in commands if command[1] != "import"]  # wants a checkpoint
    for command in commands:
        if command[1] == "eval":
            command[command.index("--tasks") + 1 :] = ["local_arc", "local_rolling"]
            command += ["--include-path", str(TASKS)]
    assert [command[1] for command in commands] == ["train", "sample", "export", "eval"], commands
    return commands


def run_tests(environment: Path, selection: list[str]) -> None:
    """Run tests of this tree on the `ddl` of the environment."""
    command = [environment / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-r", "fE"]
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    step("tests", [*command, *selection], env=os.environ | threads)


def step(name: str, command: list[str | Path], **options: object) -> str:
    """Run a command and return its output; end with the output if it fails."""
    start = time.monotonic()
    program = shutil.which(str(command[0]), path=options.get("env", os.environ)["PATH"])
    if program is None:
        sys.exit(f"{name}: `{command[0]}` was not found")
    result = subprocess.run(
        [program, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        **{"cwd": ROOT, **options},
    )  # fmt: skip
    seconds = math.ceil(time.monotonic() - start)
    if result.returncode:
        print(result.stdout)
        sys.exit(f"{name}: failed after {seconds} s: {shlex.join(map(str, command))}")
    last = result.stdout.strip().splitlines()[-1:] if "pytest" in command else []
    print(f"{name:<12} {seconds:4d} s  {' '.join(last)}", flush=True)
    return result.stdout


if __name__ == "__main__":
    main()
