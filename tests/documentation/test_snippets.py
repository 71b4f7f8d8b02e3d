"""Every snippet of the documentation runs: here, or in the test that its page's row names."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

# Pages whose snippets need more than an empty folder, and the tests that run them.
ELSEWHERE = {
    "bench.md": "tests/lab/bench/test_docs.py",
    "comparing.md": "tests/lab/analysis/test_docs.py",
    "data.md": "tests/lab/data/test_docs.py",
    "decoders.md": "tests/hf/decoders/test_page.py",
    "evaluation.md": "tests/lab/evaluation/test_docs.py",
    "exploring.md": "tests/lab/explore/test_docs.py",
    "huggingface.md": "tests/hf/test_docs.py",
    "inside.md": "tests/lab/analysis/test_inside_docs.py",
    "nanogpt.md": "tests/nanogpt/test_docs.py",
    "backbones.md": "tests/nanochat/test_docs.py",
    "papers.md": "tests/paper/test_docs.py",
    "parallel.md": "tests/nn/test_parallel_docs.py",
    "releasing.md": "tests/repository/test_workflows.py",
    "reports.md": "tests/lab/analysis/test_report_docs.py",
    "rewrites.md": "tests/nn/test_rewrites.py",
    "rust.md": "src/lib.rs",
    "trainers.md": "tests/documentation/test_trainers_page.py",
    "training.md": "tests/lab/train/test_docs.py",
}


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def python(page: str, names: dict) -> dict:
    """Run the Python of a page in order; return its names."""
    for number, text in enumerate(blocks(page, "python"), start=1):
        exec(compile(text, f"docs/{page}, python block {number}", "exec"), names)
    return names


HERE = [
    page
    for page in PAGES
    if page not in ELSEWHERE and page != "index.md" and blocks(page, "python")
]


@pytest.mark.parametrize("page", PAGES)
def test_a_test_runs_the_snippets(page):
    if page in ELSEWHERE:
        assert page in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
        assert any(blocks(page, language) for language in ("python", "bash", "rust")), (
            "needless row"
        )
    elif page != "index.md":
        assert blocks(page, "bash") + blocks(page, "rust") == []


@pytest.mark.parametrize("page", HERE)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = python(page, {"__name__": "__main__"})
    if page == "own-model.md":
        assert names["accuracy"] > 0.8
        regimes = names["recording"].regimes()
        assert sum(regimes.values()).allclose(torch.ones(6, dtype=torch.float64))
    if page == "generation.md":
        assert (names["text"].shape, names["cache"].length) == ((2, 24), 9)
        assert names["loss"].isfinite()


def test_these_pages_have_python():
    assert {"own-model.md", "mathematics.md", "variants.md", "generation.md"} <= set(HERE)


def commands(text: str, folder: Path) -> list[list[str]]:
    """Run a block of shell in the folder; return the `ddl` commands that it calls, without them."""
    log = folder / "commands"
    shell = f'ddl() {{ printf "%q " "$@" >> {log}; echo >> {log}; }}\n'
    subprocess.run(["bash", "-euc", shell + text], cwd=folder, check=True)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [shlex.split(line) for line in lines]


def test_the_first_page_leads_from_nothing_to_an_evaluated_model(tmp_path, monkeypatch, capsys):
    """With three steps of training instead of a minute's."""
    pytest.importorskip("lm_eval")
    from ddl.lab.cli import main
    from ddl.lab.evaluation.tasks import index, load
    from tests.support.eval_cases import datasets_in

    monkeypatch.chdir(tmp_path)
    short = {"train": ["--steps", "3", "--device", "cpu"], "inspect": ["--tokens", "256"]}
    done = []
    with datasets_in(tmp_path / "datasets"):
        for text in blocks("index.md", "bash"):
            if text.startswith("# install"):
                assert re.fullmatch(r"# install\npip install '\.\[eval,explore\]'\n", text)
                continue
            for command in commands(text, tmp_path):
                assert main([*command, *short.get(command[0], [])]) == 0, capsys.readouterr().err
                done.append(command[0])
        (task,) = load(["words"], index(["words"], tmp_path / "my_tasks"))
        assert [task.doc_to_choice(question)[0] for question in task.test_docs()] == ["the", "is"]
    assert done == ["train", "train", "compare", "sample", "inspect", "export", "eval"]
    assert "|words|" in capsys.readouterr().out.replace(" ", "")
    assert (tmp_path / "runs" / "tiny" / "inspect" / "depth.png").exists()
    assert (tmp_path / "tiny-hf" / "model.safetensors").exists()
    assert python("index.md", {})["text"].startswith("The statement")
