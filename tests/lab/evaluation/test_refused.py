"""`ddl eval` raises InputError for invalid input, and without data or network."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import datasets
import huggingface_hub
import safetensors.torch
from lm_eval.tasks import TaskManager

import ddl.hf
from ddl.errors import InputError
from ddl.lab import cli
from ddl.lab.evaluation import subject, tasks
from ddl.lab.load import load_for_transformers
from ddl.models.tokenizers import ByteTokenizer
from tests.support.eval_cases import datasets_in, fill, make, paper_index, write_run
from tests.support.eval_reference import TASKS

KINDS = (
    "a run directory of `ddl train`, a Hugging Face directory with a model of ddl, a Hugging Face"
    " directory with a converted decoder or a Hugging Face"
    " directory with another model"
)
NOWHERE = "http://127.0.0.1:9"  # a closed port


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "ddl-cc", make("ddl-cc"))


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `run`, exported for Hugging Face."""
    path = tmp_path_factory.mktemp("hf") / "ddl-cc"
    ddl.hf.save(make("ddl-cc"), ByteTokenizer(), path)
    return path


@pytest.fixture(scope="module")
def index() -> TaskManager:
    return paper_index()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--num-fewshot -1", "`--num-fewshot` must be an integer of at least 0, got -1"),
        ("--tasks ,", "`--tasks` must be at least one name, got ','"),
        ("--limit 0", "`--limit` must be an integer of at least 1, got 0"),
        ("--batch-size 0", "`--batch-size` must be an integer of at least 1, got 0"),
        (
            "--include-path /nowhere --tasks x",
            "`--include-path` must be a directory with YAML files, got /nowhere",
        ),
        (
            "--out /nowhere/x.json",
            "`--out` must be in a directory that can be written to, got /nowhere/x.json",
        ),
        (
            "--out {run}/config.json",
            "`--out` must be a new file, got {run}/config.json, which exists",
        ),
    ],
)
def test_one_sentence(
    run: Path, options: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(run.iterdir())
    assert cli.main(["eval", str(run), *options.format(run=run).split()]) == 1
    assert capsys.readouterr().err == f"ddl eval: {sentence.format(run=run)}\n"
    assert set(run.iterdir()) == before


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(tmp_path / "no")]) == 1
    assert capsys.readouterr().err == (
        f"ddl eval: `MODEL` must be {KINDS}, got {tmp_path}/no: No such file or directory\n"
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert cli.main(["eval", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"ddl eval: `MODEL` must be a directory with *.safetensors or *.bin, got {tmp_path}\n"
    )


def test_half_a_model(hf_directory: Path, tmp_path: Path) -> None:
    """transformers would draw missing weights at random, and load without a tokenizer."""
    whole = safetensors.torch.load_file(hf_directory / "model.safetensors")
    shutil.copytree(hf_directory, tmp_path / "a")
    del whole["model.trunk.sublayers.0.c_q.weight"]
    safetensors.torch.save_file(whole, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"^`model` must have all .* with no model\.trunk\.sub"):
        load_for_transformers(tmp_path / "a", "cpu", argument="model")
    shutil.copytree(hf_directory, tmp_path / "b")
    sentence = re.escape(
        f"`model` must have a tokenizer, got {tmp_path / 'b'} without tokenizer.json: save the "
        "tokenizer of the model's training there, by `tokenizer.save_pretrained`"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "b" / name).unlink()
        with pytest.raises(InputError, match=f"^{sentence}$"):
            load_for_transformers(tmp_path / "b", "cpu", argument="model")


def test_more_than_the_config_has(hf_directory: Path, tmp_path: Path) -> None:
    """transformers would drop unexpected weights, and only part of the model would be scored."""
    shutil.copytree(hf_directory, tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"num_layers": fields["num_layers"] - 1}))
    with pytest.raises(InputError, match=r"^`model` must have the weights of its config, got .*"):
        load_for_transformers(tmp_path / "a", "cpu", argument="model")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"]
)
def test_a_file_cut_short(name: str, hf_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    shutil.copytree(hf_directory, path)
    if name == "pytorch_model.bin":
        (path / "model.safetensors").rename(path / name)
    (path / name).write_bytes((path / name).read_bytes()[:-4])
    with pytest.raises(InputError, match=r"^`model` must be a model and a tokenizer "):
        load_for_transformers(path, "cpu", argument="model")


def test_a_config_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(
        InputError, match=f"^`model` must be {KINDS}, got .*: its config.json cannot"
    ):
        subject.check(tmp_path)


def test_a_checkpoint_of_the_papers_code(tmp_path: Path) -> None:
    """A checkpoint of the paper's code has no reliable tokenizer."""
    (tmp_path / "config.json").write_text('{"model_type": "nanogpt-pro"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    kind = "a checkpoint of nanoGPT or of the paper's code, for `ddl import`"
    sentence = f"`model` must be {KINDS}, got {tmp_path}, {kind}"
    with pytest.raises(InputError, match=f"^{sentence}$"):
        subject.check(tmp_path)


def test_unknown_tasks_and_what_comes_near(index: TaskManager) -> None:
    with pytest.raises(InputError) as refusal:
        tasks.resolve(["piqa", "arc_hard"], index)
    near = str(refusal.value)
    assert near.startswith("`tasks` must name tasks that lm-eval finds, got 'arc_hard', which is")
    assert {"arc_easy", "arc_challenge"} & set(near.split("near ")[1].split(", "))
    with pytest.raises(
        InputError, match=r"finds, got 'xyzzy'; --include-path DIR finds tasks of your own$"
    ):
        tasks.resolve(["xyzzy"], index)
    assert tasks.resolve(["sciq", "arc_[ce]*y", "sciq"], index) == ["sciq", "arc_easy"]


def test_a_task_that_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "task: bad\ndataset_path: json\ndataset_kwargs:\n  data_files: nothing.jsonl\n"
        "output_type: loglikelihood_rolling\ntest_split: train\ndoc_to_target: text\n"
    )
    with pytest.raises(InputError, match=r"^`tasks` bad could not be loaded: .*nothing\.jsonl"):
        tasks.load(["bad"], tasks.index(["bad"], tmp_path))


# --- without network ------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


@pytest.mark.usefixtures("empty_cache")
def test_what_to_fetch(index: TaskManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as refusal:
        tasks.load(["arc_easy", "sciq"], index)
    sentence = str(refusal.value)
    assert "HF_DATASETS_OFFLINE is set" in sentence
    assert "arc_easy (allenai/ai2_arc, ARC-Easy); sciq (allenai/sciq)" in sentence
    assert f"HF_HOME, to {huggingface_hub.constants.HF_HOME}" in sentence
    assert "\n" not in sentence
    (code,) = re.findall(r'python -c "(.*?)"', sentence)
    called: list[Any] = []
    monkeypatch.setattr(TaskManager, "__init__", lambda self, include_path=None: None)
    monkeypatch.setattr(TaskManager, "load", lambda self, names: called.extend(names))
    exec(code, {})
    assert called == ["arc_easy", "sciq"]


def test_half_of_a_dataset(
    index: TaskManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ARC's easy questions are cached; the hard ones, of the same dataset, are not."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(tasks, "_hub_answers", lambda: False)
    fill(tmp_path, index, "arc_easy")
    expected = (
        r"^`tasks` need data .* \(it does not answer\): arc_challenge \(allenai/ai2_arc, ARC-C"
    )
    with pytest.raises(InputError, match=expected):
        tasks.load(["arc_easy", "arc_challenge"], index)
    assert len(tasks.load(["arc_easy"], index)) == 1


@pytest.mark.usefixtures("empty_cache")
def test_the_hub_is_asked_for_what_is_missing(
    index: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is asked for missing data and nothing else, if it answers."""
    asked = []

    def download(path: str, **options: Any) -> Any:
        if datasets.config.HF_HUB_OFFLINE and path != "json":
            raise ConnectionError("Couldn't reach the Hub")
        asked.append(path)
        files = {"train": "openbookqa_train", "validation": "openbookqa_train"}
        files |= {"test": "openbookqa_test"}
        paths = {split: str(TASKS / f"{name}.jsonl") for split, name in files.items()}
        return load_dataset("json", data_files=paths)

    load_dataset = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", download)
    monkeypatch.setattr(tasks, "_hub_answers", lambda: True)
    (task,) = tasks.load(["openbookqa"], index)
    assert asked == ["allenai/openbookqa"]
    assert len(task.test_docs()) == 6
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.usefixtures("empty_cache")
def test_a_hub_that_fails_after_all(index: TaskManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **options: Any) -> None:
        raise ConnectionError("no such thing\nat all")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(tasks, "_hub_answers", lambda: True)
    with pytest.raises(
        InputError, match=r"^`tasks` must be in the cache or on the Hub, got sciq: no such thing$"
    ):
        tasks.load(["sciq"], index)


def test_no_route(run: Path, tmp_path: Path) -> None:
    """A new process without a route soon prints one line and leaves no files."""
    environment = os.environ | {
        **{"HF_HOME": str(tmp_path), "HF_ENDPOINT": NOWHERE, "OMP_NUM_THREADS": "1"},
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "https_proxy", "http_proxy"), NOWHERE),
    }
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "NO_PROXY", "no_proxy"):
        environment.pop(name, None)
    before = set(run.iterdir())
    command = [sys.executable, "-m", "ddl", "eval", str(run), "--tasks", "sciq", "piqa"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("ddl eval: `--tasks` need data that is not cached, and the Hugg")
    assert "sciq (allenai/sciq); piqa (baber/piqa)" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Retry" not in done.stderr
    assert set(run.iterdir()) == before


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    assert not tasks._hub_answers()


def test_a_hub_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local server answers HEAD with 404, which counts as an answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        code = 404

        def do_HEAD(self) -> None:
            self.send_response(self.code)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        assert tasks._hub_answers()
        Handler.code = 503
        assert not tasks._hub_answers()
        server.shutdown()


# --- without the extra ----------------------------------------------------------------------------


def test_without_lm_eval(run: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['lm_eval'] = None\n"
        "from ddl.lab.cli import main\n"
        f"sys.exit(main(['eval', {str(run)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    expected = "ddl eval: `ddl eval` needs the `eval` extra: pip install 'ddl-rs[eval]'\n"
    assert done.stderr == expected
