"""lm-eval's own functions find the model `ddl`, and score it as `ddl eval` does."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import lm_eval
import torch
from lm_eval.api.registry import get_model

import ddl.hf
from ddl.errors import InputError
from ddl.lab.evaluation.harness import Harness
from ddl.lab.evaluation.plugin import DDL
from ddl.models import NanoGPT, NanoGPTConfig
from ddl.models.tokenizers import ByteTokenizer
from tests.support.eval_cases import datasets_in, harness, make, results, write_run
from tests.support.eval_reference import TASKS


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


def test_it_is_declared_where_lm_eval_looks() -> None:
    declared = importlib.metadata.entry_points(group="lm_eval.models")
    assert declared["ddl"].load() is DDL
    assert get_model("ddl") is DDL


@pytest.mark.table(0)
@pytest.mark.parametrize("way", ["entry point", "--plugins"])
def test_a_later_lm_eval_finds_it(way: str) -> None:
    """As its main branch does: the first is a placeholder until it is used, the second an import.

    The decorator takes the placeholder's place only if the entry point names the class itself.
    """
    declared = importlib.metadata.entry_points(group="lm_eval.models")["ddl"].value
    steps = {
        "entry point": f"registry.model_registry.register('ddl', target='{declared}')",
        "--plugins": f"importlib.import_module('{DDL.__module__}')",
    }
    code = (
        f"import importlib; from lm_eval.api import registry; {steps[way]};"
        "print(registry.get_model('ddl').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == DDL.__module__, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_scores_are_those_of_ddl_eval(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if kind == "run":
        write_run(path, make("ddl-cc"))
    else:
        ddl.hf.save(make("ddl-cc"), ByteTokenizer(), path)
    index = lm_eval.tasks.TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="ddl",
        model_args={"pretrained": str(path)},
        tasks=["local_arc"],
        task_manager=index,
        batch_size=2,
        device="cpu",
    )
    expected = results(harness(make("ddl-cc")), ["local_arc"])["results"]["local_arc"]
    for name in ("acc,none", "acc_norm,none"):
        assert found["results"]["local_arc"][name] == expected[name]


@pytest.mark.parametrize("name", ["ddl", "hf"])
def test_an_imported_model_of_nanogpt(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NanoGPT(NanoGPTConfig(vocab_size=256, block_size=96, n_layer=1, n_head=2, n_embd=32))
    ddl.hf.save(model, ByteTokenizer(), tmp_path / "model")
    index = lm_eval.tasks.TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=name,
        model_args={"pretrained": str(tmp_path / "model")}
        | ({"trust_remote_code": True} if name == "hf" else {}),
        tasks=["local_arc"],
        task_manager=index,
        batch_size=2,
        device="cpu",
    )
    adapter = Harness(ddl.hf.from_gpt(model), ddl.hf.to_fast(ByteTokenizer(), model.config), 2)
    expected = results(adapter, ["local_arc"])["results"]["local_arc"]
    for score in ("acc,none", "acc_norm,none"):
        assert found["results"]["local_arc"][score] == expected[score]


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`pretrained` must be"):
        DDL.create_from_arg_string(f"pretrained={tmp_path}", {"device": "cpu"})


def test_without_an_import_lm_eval_does_not_load_it() -> None:
    """An entry point is read when it is asked for; `import ddl` must not pull lm-eval in."""
    code = "import sys, ddl, ddl.lab.load; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_refused_path_is_shown_with_escapes() -> None:
    with pytest.raises(InputError) as refused:
        DDL("a\x1b]0;t\x07")
    assert "got a\\x1b]0;t\\x07: " in str(refused.value)
    assert refused.value.__suppress_context__
