"""`ddl doctor`: what it says of a sound installation and of broken ones, and what it never says."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.lab import cli
from ddl.lab.doctor import selftest
from ddl.lab.doctor.examine import SECTIONS, examine, text
from ddl.lab.doctor.report import Report


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of ours but a cache directory of the test's own."""
    for name in list(os.environ):
        if name.startswith(("DDL_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DDL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test runs in this process, which saves the time to import torch again."""
    monkeypatch.setattr(selftest, "failure", selftest.check)


def doctor(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["doctor", "--json", *options]) == status
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


def sentences(document: dict[str, Any], level: str = "error") -> list[str]:
    return [f"{p['what']}: {p['fix']}" for p in document["problems"] if p["level"] == level]


def in_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `ddl doctor --json` after `code` in a new process."""
    script = (
        f"import sys\n{code}\nfrom ddl.lab.cli import main\nsys.exit(main(['doctor', '--json']))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | variables
    )


# --- a sound installation -------------------------------------------------------------------------


def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    """With the self-test in a process of its own, as users run it."""
    document = doctor(capsys)
    assert list(document) == ["ok", "problems", *SECTIONS]
    assert document["ok"]
    assert sentences(document) == []
    assert document["versions"]["torch"] == torch.__version__
    assert document["selftest"]["cpu"] == "passed"
    assert document["operators"] == {"registered": "11 for CPU, 8 for CUDA", "cpu": "native"}
    assert not any("failed" in document[section] for section in SECTIONS)


@pytest.mark.usefixtures("no_process")
def test_the_text_has_every_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDL_SIMD", "sse9")
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    headings = [line for line in said.splitlines() if line and not line.startswith(" ")]
    assert headings[: len(SECTIONS)] == [name.replace("_", " ") for name in SECTIONS]
    assert "Everything" in headings[-1]
    assert "  cpu: native\n" in said
    assert "  DDL_SIMD: sse9\n" in said
    assert "\nwarning: `DDL_SIMD` must be portable or avx2, got sse9: it is ignored" in said


@pytest.mark.usefixtures("no_process")
def test_it_tells_nothing_private(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No other variable, and neither the user's nor the machine's name."""
    home = tmp_path / "home-of-somebody"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DDL_CACHE_DIR", str(home / "kernels"))
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH_OF_MINE"):
        monkeypatch.setenv(name, "a-secret-value")
    monkeypatch.setenv("DDL_" + "TOKEN", "a-secret-value")  # of ours by its first letters only
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = json.dumps(doctor(capsys))
    assert cli.main(["doctor"]) == 0
    said += capsys.readouterr().out
    assert "a-secret-value" not in said
    assert "home-of-somebody" not in said
    assert "~/kernels" in said
    assert "OMP_NUM_THREADS" in said
    assert platform.node() not in said or len(platform.node()) < 4
    user = getpass.getuser()
    assert f"/{user}/" not in said


@pytest.mark.usefixtures("no_process")
def test_without_the_train_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tyro", "rich", "numpy", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert doctor(capsys)["ok"]
    assert cli.main(["doctor"]) == 0
    assert "Everything" in capsys.readouterr().out
    assert cli.main(["doctor", "--help"]) == 1  # tyro writes the help
    sentence = "ddl doctor: `ddl doctor` needs the `train` extra: pip install 'ddl-rs[train]'\n"
    assert capsys.readouterr().err == sentence


# --- broken installations -------------------------------------------------------------------------


def test_a_probe_that_fails_costs_its_section_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("flux")

    monkeypatch.setattr("ddl.lab.doctor.examine.SECTIONS", dict.fromkeys(SECTIONS, broken))
    document = doctor(capsys, status=1)
    assert sentences(document)[0] == (
        "`versions` could not be examined (KeyError: 'flux'): fix what it names, or open an issue"
        " with this report"
    )
    assert len(sentences(document)) == len(SECTIONS)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.count("failed: 'flux'") == len(SECTIONS)


def test_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    done = in_process(f"sys.path.insert(0, {str(tmp_path)!r})", PYTHONPATH=python_path(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    said = sentences(document)
    assert said[0] == (
        "torch cannot be imported (libcudart.so.13: no such file): install it as"
        " https://pytorch.org says, in the environment of ddl-rs"
    )
    assert any(s.startswith("the operators fail on cpu (ImportError: libcudart") for s in said)
    assert document["kernel_cache"]["writable"]


def python_path(first: Path) -> str:
    import ddl

    return os.pathsep.join([str(first), str(Path(ddl.__file__).parents[1])])


def test_without_the_native_extension() -> None:
    done = in_process("sys.modules['ddl._native'] = None")
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert sentences(document)[0].startswith("the native extension of ddl-rs cannot be loaded (")
    assert document["versions"]["torch"] == torch.__version__


@pytest.mark.skipif(platform.system() != "Linux", reason="NVRTC is for Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs it, which is an error")
def test_without_nvrtc(tmp_path: Path) -> None:
    """Nothing is wrong: nobody needs it without a GPU."""
    code = "from ddl import _native; _native.search_nvrtc_in([])"  # the first call counts
    done = in_process(code, LD_LIBRARY_PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["gpus"]["nvrtc"]
    if found.startswith("none"):  # else the system has one
        assert "CUDA kernels are compiled by NVRTC, which was found neither" in found


@pytest.mark.usefixtures("no_process")

# --- GPUs -----------------------------------------------------------------------------------------


class Properties:
    name, major, minor, multi_processor_count = "NVIDIA H100", 9, 0, 132
    total_memory = 80 * 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[Properties]:
    """torch seems to have a GPU; nothing runs on it."""

    class Own(Properties):
        pass

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Own)
    monkeypatch.setattr(selftest, "failure", lambda device: None)
    return Own


def test_a_gpu_with_kernels(
    gpu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddl import cuda

    kernel = cuda.Kernel("read_fwd", "sm_90", "D=768", 64, 0, 1024, 0.1, False)
    monkeypatch.setattr(cuda, "why_unavailable", lambda index: None)
    monkeypatch.setattr(cuda, "warmup", lambda *_: [kernel])
    document = doctor(capsys)
    assert document["gpus"]["cuda:0"] == "NVIDIA H100, 9.0, 80.0 GiB; CUDA kernels"
    assert document["operators"]["cuda:0"] == "CUDA kernels"
    assert document["operators"]["read_fwd (sm_90)"] == "D=768"
    assert document["selftest"] == {"cpu": "passed", "cuda:0": "passed"}
    assert "read_fwd (sm_90): D=768" in text(examine())


@pytest.mark.parametrize(("major", "level"), [(9, "error"), (7, "warning")])
def test_a_gpu_without_kernels(
    gpu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, major: int,
    level: str,
) -> None:  # fmt: skip
    """An old one is no fault of the installation; a new one is."""
    from ddl import cuda

    gpu.major = major
    monkeypatch.setattr(cuda, "why_unavailable", lambda index: "NVRTC is too old")
    document = doctor(capsys, status=int(level == "error"))
    (sentence,) = [s for s in sentences(document, level) if s.startswith("cuda:0")]
    assert sentence.startswith("cuda:0 runs as plain PyTorch (NVRTC is too old): ")
    plain = "plain PyTorch (ddl.reference)"
    assert document["operators"]["cuda:0"] == plain
    assert document["selftest"] == {"cpu": "passed"}


def test_kernels_that_do_not_compile(
    gpu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddl import cuda

    def fails(*_: Any) -> Any:
        raise RuntimeError("kernel.cu(3): error: no such type\nand more")

    monkeypatch.setattr(cuda, "why_unavailable", lambda index: None)
    monkeypatch.setattr(cuda, "warmup", fails)
    (sentence,) = sentences(doctor(capsys, status=1))
    assert sentence.startswith(
        "the CUDA kernels of this GPU cannot be compiled (kernel.cu(3): error: no such type): run"
    )


@pytest.mark.usefixtures("no_process")
def test_a_driver_that_torch_cannot_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddl.lab.doctor.hardware.nvidia_smi", lambda *_: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, said in (("13.0", "torch cannot use a GPU"), (None, "built for the CPU alone")):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.version, "hip", None)
        assert any(said in sentence for sentence in sentences(doctor(capsys), "warning"))


# --- the self-test --------------------------------------------------------------------------------


def test_a_wrong_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddl import functional

    assert selftest.check("cpu") is None
    right = functional.rewrite_read

    def wrong(**given: Any) -> Any:
        value = given.pop("value")
        return right(value=value.detach() + 1.01 * (value - value.detach()), **given)

    monkeypatch.setattr(functional, "rewrite_read", wrong)
    said = selftest.check("cpu")
    assert said is not None
    assert said.startswith("grad of value is off by ")
    assert " in float64, allowed " in said
    monkeypatch.setattr(selftest, "failure", selftest.check)
    report = Report()
    assert selftest.selftest(report)["cpu"] == said
    assert report.problems[0].what == f"the operators fail on cpu ({said})"
    assert not report.ok


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was ended by signal 4"),
        ("raise SystemExit('no such device')", "no such device"),
        ("print('noise')", "it says nothing"),
        ("print('[1]')", "it says nothing"),
        ("import time; time.sleep(60)", "no answer within 1 seconds"),
    ],
)
def test_a_process_that_ends_badly(code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(selftest, "SECONDS", 1)
    monkeypatch.setattr(
        selftest.subprocess, "run", lambda _, **kwargs: run([sys.executable, "-c", code], **kwargs)
    )
    assert said in str(selftest.failure("cpu"))
