"""Calls to NVIDIA's driver, logged by a stand-in that is built from the real cuda.h.

CPU tensors pretend to be on a GPU. Nothing is computed, so only the calls are checked.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddl import _native
from tests.support import ROOT, SUPPORT, stand_ins

SCRIPT = SUPPORT / "compile_kernels.py"

pytestmark = [
    *stand_ins.needs("cuda.h"),
    pytest.mark.skipif(not hasattr(_native, "pretend_gpu"), reason="needs the feature `emulator`"),
]

TOKEN_READ = """
import torch
from ddl import _native, functional
_native.pretend_gpu({device}, stream={stream})
def numbers(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype).requires_grad_()
d, m, K = {d}, 4, 4
state, direction = numbers(2, 50, d, m), numbers(2, 50, d)
gates = numbers(2, 50, m, dtype=torch.float32), numbers(2, 50, dtype=torch.float32)
def step():
    result = functional.rewrite_read(
        state, direction, *gates, eps_k=0.1, compress=numbers(d, m, K), norm_weight=numbers(d)
    )
    torch.autograd.backward([result.state, result.context], [state, direction])
step()
"""


FORKING: dict[Path, stand_ins.Forking] = {}  # processes with torch loaded, by their driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the stand-in; return its folder, for the loader's search path."""
    folder = build(tmp_path_factory.mktemp("driver"))
    with stand_ins.forking(folder) as FORKING[folder]:
        yield folder
    del FORKING[folder]


def build(folder: Path, *flags: str) -> Path:
    return stand_ins.build("stand_in_driver.c", "cuda.h", "libcuda.so.1", folder, *flags)


def run(
    driver: Path, arguments: list[str], log: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the stand-in as its driver."""
    given = {"STAND_IN_LOG": str(log)} | variables
    if arguments[0] == "-c" and driver in FORKING:
        return FORKING[driver].run(driver / "kernels", arguments[1], **given)
    return stand_ins.run(driver, log.parent / "kernels", arguments, **given)


def calls(driver: Path, code: str, log: Path, **variables: str) -> list[list[str]]:
    """Return the stand-in's log, each line split into words."""
    result = run(driver, ["-c", code], log, **variables)
    assert result.returncode == 0, result.stderr
    return [line.split() for line in log.read_text().splitlines()]


def failure(driver: Path, gpu: str, log: Path, **variables: str) -> str:
    """Return the last line of the traceback when compiling and loading a kernel ahead fails."""
    site_packages = str(Path(torch.__file__).parents[1])
    arguments = [str(SCRIPT), _native.__file__, site_packages, gpu, "64"]
    result = run(driver, arguments, log, **variables)
    assert result.returncode == 1, result.stdout
    return result.stderr.splitlines()[-1]


def test_a_step_loads_once_and_launches_in_order(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=768, stream=0) + "step()\nprint(state.data_ptr())"
    log = tmp_path / "log"
    result = run(driver, ["-c", code], log)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[:2] for line in lines[:2]] == [["cuInit", "0"], ["cuDevicePrimaryCtxRetain", "0"]]

    loads = [line for line in lines if line[0] == "cuModuleLoadData"]
    assert loads == [["cuModuleLoadData", "code", "on", "0,", "relaxed", "for", "sm_90"]] * 3
    launches = [line for line in lines if line[0] == "cuLaunchKernel"]
    assert [line[1] for line in launches] == 2 * ["rewrite_read_fwd", "rewrite_read_bwd", "reduce"]
    for line in launches:
        words = dict(zip(line[4::4], line[5::4], strict=False))
        assert line[2:4] == ["on", "0"], "in the GPU's primary context"
        assert words["grid"] != "0"
        assert line[-1].isdigit(), line  # no `extra`, and the capture mode is restored
    (state,) = result.stdout.split()
    firsts = [line[-1] for line in launches if line[1] == "rewrite_read_fwd"]
    assert firsts == [state, state], "the first field of the argument is the state"


def test_every_kernel_goes_to_the_stream_it_is_given(driver, tmp_path):
    lines = calls(driver, TOKEN_READ.format(device=0, d=64, stream=4242), tmp_path / "log")
    launches = [line for line in lines if line[0] == "cuLaunchKernel"]
    assert [line[line.index("stream") + 1] for line in launches] == ["4242"] * 3


@pytest.mark.parametrize(
    "variables",
    [{}, {"DDL_PLAN": "CLUSTER=2 SUMS=3"}, {"STAND_IN_CAPABILITY": "80 90"}],
    ids=["planned", "by hand", "types"],
)
def test_what_was_warmed_up_is_loaded_already(driver, tmp_path, variables):
    warm = (
        "from tests.support.listing import Listing\n"
        "warmup = _native.Warmup(None, 1)\n"
        "with Listing(warmup):\n"
        "    step()\n"
        "warmup.compile()\n"
    )
    code = TOKEN_READ.format(device="None", d=64, stream=0).removesuffix("step()\n") + warm
    check_loaded(driver, tmp_path / "log", code, "_native.pretend_gpu(1)\nstep()\n", **variables)


@pytest.mark.table(0)
@pytest.mark.parametrize("residual", ["ddl", "ddl-cc"])
def test_a_training_step_loads_nothing_after_its_warmup(driver, tmp_path, residual):
    code = f"""
import torch
from ddl import _native
from ddl.cuda import warmup
from ddl.models import GPT, GPTConfig
model = GPT(GPTConfig(residual={residual!r}, num_layers=2, num_heads=2, hidden_size=64))
idx = torch.randint(50304, (2, 9))
warmup(model, idx, labels=idx)
"""
    step = "_native.pretend_gpu(0)\nmodel(idx, labels=idx)[1].backward()\n"
    check_loaded(driver, tmp_path / "log", code, step)


def check_loaded(driver: Path, log: Path, warm: str, step: str, **variables: str) -> None:
    """Check that `step` only launches kernels, all of which `warm` has loaded."""
    code = f"{warm}\nopen({str(log)!r}, 'w')\n{step}"
    lines = calls(driver, code, log, PYTHONPATH=str(ROOT), **variables)
    assert {line[0] for line in lines} == {"cuLaunchKernel"}, "a graph may be captured from here on"


def test_shared_memory_is_asked_for_before_it_is_used(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=4096, stream=0)
    lines = calls(driver, code, tmp_path / "log", STAND_IN_CAPABILITY="80")
    asked = {
        line[1]: int(line[2].removeprefix("8="))
        for line in lines
        if line[0] == "cuFuncSetAttribute" and line[2].startswith("8=")
    }
    for line in lines:
        if line[0] == "cuLaunchKernel":
            shared = int(line[line.index("shared") + 1])
            assert shared == asked.get(line[1], 0)
    assert asked["rewrite_read_bwd"] > 48 << 10


def words(line: list[str], name: str, count: int) -> list[int]:
    start = line.index(name) + 1
    return [int(word) for word in line[start : start + count]]


def backward(lines: list[list[str]], call: str) -> list[list[str]]:
    return [line for line in lines if line[:2] == [call, "rewrite_read_bwd"]]


def test_every_kernel_divides_shared_memory_and_cache(driver, tmp_path):
    lines = calls(driver, TOKEN_READ.format(device=0, d=64, stream=0), tmp_path / "log")
    carveouts = {
        line[1]: int(line[2].removeprefix("9="))
        for line in lines
        if line[0] == "cuFuncSetAttribute" and line[2].startswith("9=")
    }
    launched = [line for line in lines if line[0] == "cuLaunchKernel"]
    assert carveouts.keys() == {line[1] for line in launched}
    assert "0" in {line[line.index("shared") + 1] for line in launched}, (
        "with no dynamic memory, too"
    )
    assert all(0 < percent <= 100 for percent in carveouts.values())


def test_no_kernel_is_left_to_its_first_launch_to_load(driver, tmp_path):
    lines = calls(driver, TOKEN_READ.format(device=0, d=64, stream=0), tmp_path / "log")
    asked = set()
    for line in lines:
        if line[0] == "cuFuncGetAttribute":
            assert line[2:] == ["4", "on", "0", "relaxed"], "a stream may be captured"
            asked.add(line[1])
        elif line[0] == "cuLaunchKernel":
            assert line[1] in asked


@pytest.mark.parametrize(("occupancy", "blocks"), [("1", 125), ("3", 334), ("32", 1000)])
def test_there_are_as_many_blocks_as_the_driver_says_run_at_once(
    driver, tmp_path, occupancy, blocks
):
    code = TOKEN_READ.format(device=0, d=64, stream=0).replace("2, 50", "2, 500")
    code = code.replace("numbers(d, m, K)", "numbers(d, m)")
    lines = calls(driver, code, tmp_path / "log", STAND_IN_OCCUPANCY=occupancy)
    questions = {
        line[1]: words(line, "threads", 1) + words(line, "shared", 1)
        for line in lines
        if line[0] == "cuOccupancyMaxActiveBlocksPerMultiprocessor" and line[-1] == "relaxed"
    }
    launches = {line[1]: line for line in lines if line[0] == "cuLaunchKernel"}
    assert questions.keys() == launches.keys()
    for name, question in questions.items():
        assert question == words(launches[name], "block", 1) + words(launches[name], "shared", 1)
    assert words(launches["rewrite_read_fwd"], "grid", 1) == [blocks], "tokens in even chunks"


@pytest.mark.parametrize("most", [16, 32])
def test_no_more_blocks_are_planned_than_a_multiprocessor_has(driver, tmp_path, most):
    variables = {"STAND_IN_BLOCKS": str(most), "DDL_LOG": "debug"}
    result = run(
        driver, ["-c", TOKEN_READ.format(device=0, d=32, stream=0)], tmp_path / "log", **variables
    )
    built = [line for line in result.stderr.splitlines() if " rewrite_read_fwd for " in line]
    assert f" BLOCKS={most})" in built[0]


IN_ANOTHER_CONTEXT = "import ctypes\nctypes.CDLL('libcuda.so.1').stand_in_make_current({context})\n"
GREEN = 8  # contexts 8 and 9 are green ones of GPU 0 and GPU 1


@pytest.mark.parametrize(
    ("context", "device", "stream", "refused"),
    [
        (0, 0, 0, False),
        (GREEN, 0, 4242, False),
        (GREEN, 0, 0, True),
        (GREEN, 0, 4444, True),
        (GREEN, 1, 0, False),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                (1, 0, 0, False),
                (1, 0, 4242, False),
                (GREEN, 0, 2, True),
                (GREEN + 1, 1, 0, True),
                (GREEN + 1, 1, 4343, False),
            ]
        ),
    ],
)
def test_a_green_context_is_refused(driver, tmp_path, context, device, stream, refused):
    code = IN_ANOTHER_CONTEXT.format(context=context)
    code += TOKEN_READ.format(device=device, d=64, stream=stream)
    result = run(driver, ["-c", code], tmp_path / "log")
    assert (result.returncode != 0) == refused, result.stderr
    if refused:
        assert result.stderr.splitlines()[-1] == (
            f"RuntimeError: `rewrite_read_fwd` could not be launched on cuda:{device}: the current "
            "stream belongs to a green context, or to another one that is not the GPU's primary "
            "context: call it outside of that context"
        )


@pytest.mark.parametrize("room", [5, 9])
def test_there_are_as_many_clusters_as_find_room(driver, tmp_path, room):
    code = TOKEN_READ.format(device=1, d=4096, stream=0)
    lines = calls(driver, code, tmp_path / "log", STAND_IN_CLUSTERS=str(room))
    (question,) = backward(lines, "cuOccupancyMaxActiveClusters")
    (launch,) = backward(lines, "cuLaunchKernel")
    assert question[2:4] == launch[2:4] == ["on", "1"]
    chunks, cluster, _ = words(launch, "grid", 3)
    assert (chunks, cluster) == (room, 8), "100 tokens in chunks of 20 or 12"
    assert words(question, "grid", 3)[1] == cluster
    for name, count in (("block", 3), ("shared", 1)):
        assert words(question, name, count) == words(launch, name, count)
    assert words(question, "attributes", 1) == [0], "the kernel itself says how large they are"
    assert question[-1] == "relaxed", "as a stream may be captured"


def test_there_are_no_more_clusters_than_planned(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=4096, stream=0).replace(
        "numbers(d, m, K)", "numbers(d, m)"
    )
    lines = calls(driver, code, tmp_path / "log", STAND_IN_CLUSTERS="1000")
    (launch,) = backward(lines, "cuLaunchKernel")
    assert words(launch, "grid", 3)[0] == 50, "two tokens for each of 66 or 99"


def test_a_gpu_without_room_for_a_cluster_does_without(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=4096, stream=0)
    lines = calls(driver, code, tmp_path / "log", STAND_IN_CLUSTERS="0")
    assert len(backward(lines, "cuOccupancyMaxActiveClusters")) == 1
    (launch,) = backward(lines, "cuLaunchKernel")
    assert words(launch, "grid", 3)[1:] == [1, 1]
    assert "parameters_bwd" in {line[1] for line in lines if line[0] == "cuLaunchKernel"}


@pytest.mark.table(0)
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["-DcuOccupancyMaxActiveClusters=cuOccupancyNothing"], {}),
        ([], {"STAND_IN_CLUSTER_LAUNCH": "0"}),
        ([], {"STAND_IN_CAPABILITY": "80"}),
    ],
    ids=["driver without the function", "gpu", "architecture"],
)
def test_without_clusters_nobody_asks_for_them(tmp_path, flags, variables):
    code = TOKEN_READ.format(device=0, d=4096, stream=0)
    lines = calls(build(tmp_path / "driver", *flags), code, tmp_path / "log", **variables)
    assert backward(lines, "cuOccupancyMaxActiveClusters") == []
    (launch,) = backward(lines, "cuLaunchKernel")
    assert words(launch, "grid", 3)[1:] == [1, 1]


def test_the_context_of_a_second_gpu_is_current_for_its_calls_alone(driver, tmp_path):
    code = (
        "import ctypes\n"
        "driver = ctypes.CDLL('libcuda.so.1')\n"
        "driver.stand_in_make_current(0)\n"
        + TOKEN_READ.format(device=1, d=64, stream=0)
        + "assert driver.stand_in_current() == 0, 'what was current is current again'\n"
    )
    lines = calls(driver, code, tmp_path / "log")
    assert ["cuDevicePrimaryCtxRetain", "1"] in lines
    assert ["cuDevicePrimaryCtxRetain", "0"] not in lines
    used = {
        line[3].rstrip(",") for line in lines if line[0] in ("cuModuleLoadData", "cuLaunchKernel")
    }
    assert used == {"1"}


def test_a_gpu_newer_than_the_compiler_gets_ptx(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=64, stream=0)
    lines = calls(driver, code, tmp_path / "log", STAND_IN_CAPABILITY="990")
    assert {line[1] for line in lines if line[0] == "cuModuleLoadData"} == {"ptx"}


def test_choices_made_by_hand(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=64, stream=0)
    plan = "CLUSTER=2 CHUNK=50"
    lines = calls(driver, code, tmp_path / "log", DDL_PLAN=plan)
    (launch,) = backward(lines, "cuLaunchKernel")
    assert words(launch, "grid", 3) == [2, 2, 1]


def test_choices_made_by_hand_stay_where_registers_spill(driver, tmp_path):
    code = TOKEN_READ.format(device=0, d=4096, stream=0)
    plan = {"DDL_PLAN": "CLUSTER=1 KEEP_IN_REGISTERS=1 STAGES=0 THREADS=512", "DDL_LOG": "debug"}
    result = run(driver, ["-c", code], tmp_path / "log", **plan)
    (built,) = [line for line in result.stderr.splitlines() if " rewrite_read_bwd " in line]
    assert " 0 bytes spilled" not in built
    for choice in ("CLUSTER=1 ", "KEEP_IN_REGISTERS=1 ", "STAGES=0 ", "THREADS=512 "):
        assert choice in built


REFUSALS = [
    (
        {"DDL_PLAN": "STAGES=3"},
        "cuda:0 cannot be used: `DDL_PLAN` must have STAGES from 0 to 2, got 3",
    ),
    (
        {"STAND_IN_FAIL": "cuInit 803"},
        "NVIDIA's driver did not start (CUDA error 803, the driver's own words): check "
        "`nvidia-smi`, or keep the tensors on the CPU",
    ),
    (  # the driver's result if CUDA_VISIBLE_DEVICES excludes every GPU
        {"STAND_IN_FAIL": "cuInit 100"},
        "NVIDIA's driver knows no GPU: check CUDA_VISIBLE_DEVICES",
    ),
    ({"STAND_IN_DEVICES": "0"}, "NVIDIA's driver knows no GPU: check CUDA_VISIBLE_DEVICES"),
    (
        {"STAND_IN_CAPABILITY": "75"},
        "cuda:0 cannot be used: it is a Stand-in 0, its compute capability is 7.5, and the kernels "
        "need 8.0 or newer: move the model and its tensors to the CPU",
    ),
    (
        {"STAND_IN_FAIL": "cuDevicePrimaryCtxRetain 2"},
        "cuda:0 cannot be used: CUDA error 2, the driver's own words",
    ),
    (
        {"STAND_IN_FAIL": "cuModuleLoadData 209"},
        "`rewrite_read_fwd` could not be loaded on cuda:0: CUDA error 209, the driver's own words",
    ),
    (
        {"STAND_IN_FAIL": "cuModuleLoadData 900"},
        "`rewrite_read_fwd` could not be loaded on cuda:0: CUDA error 900, the driver's own words; "
        "before a CUDA graph is captured, call `ddl.cuda.warmup` or run it once",
    ),
]


@pytest.mark.parametrize(("variables", "sentence"), REFUSALS, ids=lambda x: str(x)[:40])
def test_what_the_driver_refuses_is_said(driver, tmp_path, variables, sentence):
    said = failure(driver, "cuda:0", tmp_path / "log", **variables)
    assert said == f"RuntimeError: {sentence}"


def test_a_gpu_that_is_not_there(driver, tmp_path):
    said = failure(driver, "cuda:2", tmp_path / "log")
    assert said == "RuntimeError: there is no cuda:2, the driver knows 2 GPUs"


def test_a_forked_process_is_told_to_spawn(driver, tmp_path):
    code = (
        "import os, torch\n"
        "from ddl import cuda\n"
        "assert cuda.why_unavailable() is None\n"
        "if os.fork() == 0:\n"
        "    print(cuda.why_unavailable(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "assert cuda.why_unavailable() is None\n"
    )
    result = run(driver, ["-c", code], tmp_path / "log")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        "this process was forked from one that had started NVIDIA's driver, which does not work in "
        "both: start it by the method `spawn`\n"
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [(1000, ", the driver's own words"), (9999, "")],
    ids=["with words", "without words"],
)
def test_a_launch_that_fails(driver, tmp_path, result, words):
    """A newer driver returns result codes that cudarc's enum lacks. None of them is success."""
    code = TOKEN_READ.format(device=0, d=64, stream=0)
    failed = run(driver, ["-c", code], tmp_path / "log", STAND_IN_FAIL=f"cuLaunchKernel {result}")
    assert failed.stderr.splitlines()[-1] == (
        "RuntimeError: `rewrite_read_fwd` could not be launched on cuda:0: "
        f"CUDA error {result}{words}"
    )


def test_a_driver_that_does_not_start_for_an_unknown_reason(driver, tmp_path):
    said = failure(driver, "cuda:0", tmp_path / "log", STAND_IN_FAIL="cuInit 1000")
    assert said.startswith("RuntimeError: NVIDIA's driver did not start (CUDA error 1000, ")


@pytest.mark.parametrize(
    "name", ["cuInit", "cuGetErrorString", "cuThreadExchangeStreamCaptureMode", "cuLaunchKernel"]
)
def test_a_driver_without_a_function_that_is_needed(tmp_path, name):
    folder = build(tmp_path, f"-D{name}={name}_something")
    assert failure(folder, "cuda:0", tmp_path / "log") == lacks(name)
    assert not (tmp_path / "log").exists(), "nothing is called before everything was found"


def lacks(name: str) -> str:
    return (
        f"RuntimeError: NVIDIA's driver is too old (libcuda.so.1 has no `{name}`): "
        "install a newer one"
    )


def test_a_library_that_is_only_called_like_the_driver(tmp_path):
    folder = decoy("libcuda.so.1", tmp_path)
    assert failure(folder, "cuda:0", tmp_path / "log") == lacks("cuInit")


def decoy(library: str, folder: Path) -> Path:
    """Build a library without any function."""
    return stand_ins.build("/dev/null", "cuda.h", library, folder, "-x", "c")


def test_a_toolkits_stub_is_not_taken_for_the_driver(tmp_path):
    folder = build(tmp_path / "libraries")
    decoy("libcuda.so", folder)
    lines = calls(folder, TOKEN_READ.format(device=0, d=64, stream=0), tmp_path / "log")
    assert "cuLaunchKernel" in {line[0] for line in lines}


def test_without_a_driver_a_sentence_says_what_to_do(tmp_path):
    # A file with the driver's name that is no library, found before any driver of the system.
    (tmp_path / "libcuda.so.1").write_text("no library")
    said = failure(tmp_path, "cuda:0", tmp_path / "log")
    assert said.startswith("RuntimeError: NVIDIA's driver was not found (")
    assert "libcuda.so.1: " in said, "the loader's reason"
    assert said.endswith("): install NVIDIA's driver, or keep the tensors on the CPU")


def test_without_a_cuda_tensor_the_driver_is_left_alone(driver, tmp_path):
    code = TOKEN_READ.format(device="None", d=64, stream=0) + "import ddl, ddl.cuda, ddl.models\n"
    result = run(driver, ["-c", code], tmp_path / "log")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "log").exists(), "no function was called that would be noted"
