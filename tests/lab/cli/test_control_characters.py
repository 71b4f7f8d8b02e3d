"""No text of a file makes a terminal do something: each command shows control characters of names,
keys and values as escapes, and brackets are no markup."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddl.lab.cli import COMMANDS, main
from ddl.lab.config import PRESETS
from ddl.lab.data.prepare import prepare
from ddl.lab.exchange import export_run
from ddl.lab.output import guarded_output, make_console, unguarded
from ddl.lab.train import train
from ddl.models.tokenizers import CharTokenizer, describe
from tests.lab.analysis.cases import write_evaluation
from tests.lab.analysis.report_cases import write_inspection
from tests.support.prepare_cases import configuration
from tests.support.train_cases import quiet, short

# A window's title, a colour, the start of the line, one back; C1, which has the same sequences in
# one character each; the direction of writing.
NAME = "a\x1b]0;t\x07\x1b[3;9;53mb\rc\x08\x9b6n\x85\x7f\u202e\u2066[bold]z"
# rich writes colours, the cursor hidden and shown, lines that are cleared and gone up.
RICH = re.compile(r"\x1b\[(?!3;9;53m)([\d;]*m|\?25[lh]|\d*[AK])|\r(?=\x1b\[)")
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SHOWN = re.compile(r"\\x1b|\\u2066|\ufffd")  # escapes, or what stands for a character in a path
STEP = "run/checkpoints/step-00000002"
TEXT = "".join(f"Rewrite {i} erases what it overwrites.\n" for i in range(200))
TRAIN = ["train", "tiny", "--device", "cpu", "--out", "out"]


class Terminal(io.StringIO):
    """The output that a terminal would get."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


EXHAUSTIVE = pytest.mark.exhaustive  # seconds each


def ddl(*arguments: str) -> tuple[int | str | None, str]:
    """The exit status of `ddl …`, and what a terminal gets of it."""
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        try:
            status: int | str | None = main(arguments)
        except SystemExit as stop:
            status = stop.code
    return status, terminal.getvalue()


def obeyed(text: str) -> list[str]:
    """The sequences that the terminal would obey, besides rich's own."""
    return OBEYED.findall(RICH.sub("", text))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, an exported model, prepared tokens, a folder of nanoGPT's; no test may change it."""
    root = tmp_path_factory.mktemp("files")
    (root / "text.txt").write_text(TEXT)
    prepare(configuration(root / "text.txt", root / "prepared", separator="\n", validation=0.5))
    train(short(root, "ddl-cc", steps=2, eval_every=2, data=str(root / "text.txt")), quiet())
    export_run(root / "run", root / "hf")
    (root / "theirs").mkdir()
    for name in ("train.bin", "val.bin"):
        (root / "theirs" / name).write_bytes(bytes(2000))
    return root


@pytest.fixture(autouse=True)
def folder(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm-256color")


# --- what is planted ------------------------------------------------------------------------------


def task() -> None:
    write_evaluation(Path("run"), {0: {NAME: 60.0}})


def run_name() -> None:
    Path("run").rename(NAME)


def edit(path: str, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    values = json.loads(Path(path).read_text())
    change(values)
    Path(path).write_text(json.dumps(values))


def config_key() -> None:
    edit("run/config.json", lambda config: config.update({NAME: 1}))


def config_value() -> None:
    edit("run/config.json", lambda config: config.update(data=NAME))


def wrong_value() -> None:
    edit("run/config.json", lambda config: config["model"].update(residual=NAME))


def hf_value() -> None:
    edit("hf/config.json", lambda config: config.update(residual=NAME))


def manifest_key() -> None:
    edit(f"{STEP}/manifest.json", lambda manifest: manifest.update({NAME: 1}))


def inspection() -> None:
    write_inspection(Path("run"), format=NAME)


def index_key() -> None:
    edit("prepared/index.json", lambda index: index.update({NAME: 1}))


def characters() -> None:
    """A model's characters, which it writes; its checkpoint is of an earlier version, without the
    tokenizer's checksum."""
    edit(f"{STEP}/manifest.json", lambda manifest: manifest.pop("tokenizer"))
    table = [NAME[i % len(NAME)] for i in range(256)]
    Path("run/tokenizer.json").write_text(json.dumps(describe(CharTokenizer(table))))


def no_meta() -> None:
    Path("theirs/meta.pkl").write_bytes(b"c" + NAME.encode() + b"\nx\n.")


def checkpoint_key() -> None:
    torch.save({NAME: torch.zeros(2)}, "theirs/ckpt.pt")
    Path("theirs/config.json").write_text(json.dumps({NAME: 1, "model_type": NAME}))


def lines() -> None:
    Path(f"{NAME}.jsonl").write_text(json.dumps({"text": 1, NAME: NAME}))


def benchmark() -> None:
    Path(NAME).write_text(json.dumps({NAME: NAME}))


def local_task() -> None:
    Path(f"{NAME}.yaml").write_text("{}")


def named_task() -> None:
    """A task that a file names, as lm-eval's table then does, and `ddl compare`."""
    named = json.dumps(NAME, ensure_ascii=True).replace("\x7f", "\\u007f")  # as YAML has it
    Path("tasks").mkdir()
    Path("tasks/lines.jsonl").write_text('{"a": "ab", "b": "c"}\n')
    Path("tasks/task.yaml").write_text(
        f"task: {named}\ndataset_path: json\ntest_split: test\n"
        "dataset_kwargs: {data_files: {test: tasks/lines.jsonl}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{a}}'\ndoc_to_choice: ['x', 'y']\n"
        "doc_to_target: 0\nmetric_list: [{metric: acc}]\n"
    )


def baseline() -> None:
    """A benchmark of another machine."""
    assert main([*BENCH, "--out", "before.jsonl"]) == 0
    edit("before.jsonl", lambda record: record["machine"].update(cpu=NAME))


def sweep(text: str) -> Callable[[], None]:
    def write() -> None:
        quoted = json.dumps(NAME, ensure_ascii=True).replace("\x7f", "\\u007f")  # as TOML has it
        head = "" if "preset" in text else 'preset = "tiny"\n'
        Path("sweep.toml").write_text(head + text.replace("NAME", quoted) + "\n")

    return write


RESUME = ["train", "--resume", "run"]
SMALL = {"device": "cpu", "hidden-size": 32, "layers": 1, "time": 8, "batch": 2, "repeats": 2}
BENCH = ["bench", "ops", *(f"--{name}={value}" for name, value in SMALL.items())]
# The function plants a name in a file, which the command reads and shows.
CASES: list[tuple[Callable[[], None], list[str]]] = [
    (task, ["compare", "run"]),
    (task, ["compare", "run", "--markdown"]),
    (run_name, ["compare", NAME]),
    (run_name, ["inspect", NAME]),
    (run_name, ["report", NAME, "--out", NAME + ".html"]),
    (run_name, ["export", NAME, "--hf", NAME + ".hf"]),
    (run_name, ["train", "--resume", NAME, "--help"]),
    (config_value, RESUME),
    (characters, ["sample", "run", "--tokens", "30", "--prompt", "a"]),
    (checkpoint_key, ["import", "theirs/ckpt.pt", "out"]),
    (lines, ["prepare", f"{NAME}.jsonl", "--out", "out", "--tokenizer", "bytes"]),
    (sweep("NAME = 1"), ["sweep", "sweep.toml"]),
    (benchmark, ["bench", "--baseline", NAME]),
    pytest.param(baseline, [*BENCH, "--baseline", "before.jsonl"], marks=EXHAUSTIVE),
    (local_task, ["eval", "run", "--tasks", f"{NAME}.yaml"]),
    pytest.param(
        named_task,
        ["eval", "run", "--tasks", NAME, "--include-path", "tasks", "--device", "cpu"],
        marks=EXHAUSTIVE,
    ),
    (lambda: None, ["demo", "--steps", "1", "--out", NAME, "--device", "cpu"]),
]
# These quote what is planted, so that it is harmless in a program of somebody else's, too.
QUOTED: list[tuple[Callable[[], None], list[str]]] = [
    (config_key, ["sample", "run"]),
    (wrong_value, ["compare", "run"]),
    (wrong_value, ["report", "run", "--out", "out.html"]),
    (hf_value, ["sample", "hf"]),
    (manifest_key, RESUME),
    (inspection, ["report", "run", "--out", "out.html"]),
    (index_key, [*TRAIN, "--data", "prepared"]),
    (characters, ["inspect", "run", "--prompt", "a"]),
    (no_meta, [*TRAIN, "--data", "theirs"]),
    (sweep("seeds = NAME"), ["sweep", "sweep.toml"]),
    (sweep("preset = NAME"), ["sweep", "sweep.toml", "--list"]),
]


@pytest.mark.parametrize(("plant", "arguments"), CASES + QUOTED)
def test_a_terminal_gets_no_control_character_of_a_file(
    plant: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "demo", short(Path()))
    plant()
    status, text = ddl(*arguments)
    assert status in (0, 1, 2)
    assert not obeyed(text)
    assert SHOWN.search(text)


@pytest.mark.parametrize(("plant", "arguments"), QUOTED)
def test_what_is_quoted_needs_no_guard(
    plant: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddl.lab.output.escaped", lambda text: text)
    plant()
    text = ddl(*arguments)[1]
    assert not obeyed(text)
    assert SHOWN.search(text)


# A command requires these before it looks at another option.
REQUIRED = {
    "train": ["tiny"],
    "bench": ["ops"],
    "prepare": ["text.txt", "--out", "out", "--tokenizer", "bytes"],
    "report": ["run", "--out", "out.html"],
    "export": ["run", "--hf", "out"],
    "import": ["theirs", "out"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_argument_is_shown_with_escapes(command: str) -> None:
    for words in ([NAME], ["--help", NAME]):
        assert not obeyed(ddl(command, *words)[1])
    status, text = ddl(command, *REQUIRED.get(command, ["run"]), "--" + NAME)
    assert status != 0
    assert not obeyed(text)
    assert SHOWN.search(text)


def test_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDL_SIMD", NAME)
    status, text = ddl("doctor")
    assert status == 0
    assert "got a?]0;t" in text
    assert not obeyed(text)


def test_a_name_of_no_command() -> None:
    status, text = ddl(NAME)
    assert status == 2
    assert "\\x1b" in text
    assert not obeyed(text)


def test_an_error_that_nobody_expects_and_a_warning(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    error = RuntimeError(NAME)
    with contextlib.suppress(RuntimeError), guarded_output():
        sys.stderr.write(warnings.formatwarning(NAME, UserWarning, NAME, 1))
        raise error
    sys.excepthook(RuntimeError, error, error.__traceback__)
    text = capfd.readouterr().err
    assert text.count("a\\x1b") == 3  # text and file of the warning, then the error
    assert not obeyed(text)


def test_what_is_no_terminal_gets_its_text(tmp_path: Path) -> None:
    """A pipe gets escapes, too; only colours depend on the terminal."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), guarded_output():
        assert not sys.stdout.isatty()
        print("plain ä [bold]\ttab", NAME)
        make_console().print("[bold]", NAME)
        unguarded(sys.stdout).write("\x1b[1m")
    text = out.getvalue()
    assert text.startswith("plain ä [bold]\ttab a\\x1b]0;t")
    assert text.endswith("\x1b[1m")
    assert text.count("\x1b") == 1
