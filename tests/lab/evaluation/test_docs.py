"""The commands of docs/evaluation.md run in order in an empty folder, and do what it says."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval._cli.harness import HarnessCLI
from lm_eval.api.registry import get_model

from ddl.lab import cli
from ddl.lab.cli.command import parse
from ddl.lab.config import EvalConfig
from tests.support import ROOT
from tests.support.eval_cases import datasets_in

PAGE = ROOT / "docs" / "evaluation.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
FILES = {".yaml": "my_tasks/capitals.yaml", ".json": "my_tasks/capitals.jsonl"}
SHORT = ["--steps", "3", "--device", "cpu"]  # options that the test adds to `ddl train`


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


def test_the_page_from_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tasks").mkdir()
    names: dict[str, Any] = {}
    for language, text in BLOCKS:
        if language == "bash":
            shell(text)
        elif language == "python":
            exec(compile(text, "docs/evaluation.md", "exec"), names)
        else:
            name = FILES[f".{language}"]
            assert f"`{name}`" in TEXT
            (tmp_path / name).write_text(text, encoding="utf-8")
    record = json.loads((tmp_path / "capitals.json").read_text(encoding="utf-8"))
    assert record["runs"] == names["record"]["runs"]
    assert 0 <= names["accuracy"] <= 1
    assert names["own"]["results"]["capitals"]["acc,none"] == names["accuracy"]
    assert names["record"]["runs"][0]["n-samples"]["capitals"]["effective"] == 3
    assert list((tmp_path / "runs" / "tiny").glob("eval-*-*.json"))
    assert capsys.readouterr().out.count("|capitals") == 2


def shell(block: str) -> None:
    """Run our commands; only parse the arguments of those that need a network or take long."""
    first, *rest = block.splitlines()
    online = first.startswith("# network")
    for line in rest if first.startswith("# ") else [first, *rest]:
        program, *arguments = shlex.split(line)
        if program == "ddl" and online:
            assert arguments.pop(0) == "eval"
            parse(EvalConfig, arguments, positional=True)
        elif program == "ddl":
            assert cli.main(arguments + (SHORT if arguments[0] == "train" else [])) == 0
        elif program == "python":
            assert arguments[0] == "-c"
            ast.parse(arguments[1])
        else:  # test_cli.py runs such a line
            assert program == "lm_eval"
            if "--plugins" in arguments:  # which the installed version may not know
                at = arguments.index("--plugins")
                _, module = arguments[at : at + 2]
                assert importlib.import_module(module).DDL is get_model("ddl")
                del arguments[at : at + 2]
            parsed = HarnessCLI()._parser.parse_args(["run", *arguments])
            assert Path(parsed.model_args["pretrained"]).is_dir()
            assert parsed.tasks == ["capitals"]
            assert parsed.model == ("ddl" if first == "# later" else "hf")
            if parsed.model == "hf":
                assert parsed.model_args["softmax_dtype"] == "float32"
                assert parsed.model_args["logits_cache"] is False


def test_fetching_is_what_the_refusal_says() -> None:
    from ddl.lab.evaluation import tasks

    class Manager:
        include_path = None
        task_index: dict[str, Any] = {}  # noqa: RUF012

    sentence = tasks._what_to_fetch(["arc_easy", "piqa"], Manager(), "")
    (command,) = re.findall(r"python -c \".*?\"", sentence)
    assert command in TEXT


def test_the_papers_eight_are_named() -> None:
    from ddl.lab.config.paper_tasks import PAPER

    words = re.sub(r"[^a-z]", "", TEXT.lower())
    for name in PAPER:
        assert name.replace("_", "") in words
