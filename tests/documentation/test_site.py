"""The site of docs/ builds without a warning, lists every page and every public name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

from docs.scripts.hooks import on_page_markdown
from tests.support import ROOT

REPOSITORY = "https://example.org/somebody/ddl-rs"
PACKAGE = ROOT / "python" / "ddl"
# Nobody's interface, as docs/compatibility.md says, and the command line.
PRIVATE = {"ops", "lab.cli"}
LAB = PACKAGE / "lab"
ANALYSIS = [
    LAB / "analysis" / f"{name}.py" for name in ("compare", "inspection", "paired", "spectra")
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Nothing is fetched: there is no proxy at this address."""
    out = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out],
        cwd=ROOT,
        env=os.environ | nowhere | {"DOCS_REPOSITORY": REPOSITORY, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def public_names() -> set[str]:
    """The names of `__all__` in the modules that users import."""
    found = set()
    rooms = [
        path
        for wing in (PACKAGE, LAB)
        for path in (*wing.glob("*.py"), *wing.glob("*/__init__.py"))
    ]
    for path in (*rooms, *ANALYSIS):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(part for part in ("ddl", *parts) if part != "__init__")
        if module.removeprefix("ddl.") in PRIVATE:
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
    return found - {"ddl.__version__", "ddl.functional", "ddl.reference"}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert len(public_names()) > 100
    listed |= {"ddl.recording.lens"} & {
        name.removesuffix(".lens") for name in listed
    }  # a module, too
    assert sorted(public_names() - listed) == []


def test_what_the_pages_import_is_public() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = public_names()
    hidden = []
    for page in pages:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddl"):
                    full = {f"{node.module}.{alias.name}" for alias in node.names}
                    hidden += sorted(
                        f"{page.name}: {name}"
                        for name in full - names
                        if not any(known.startswith(f"{name}.") for known in names)
                    )
    assert hidden == []


def test_every_page_is_in_the_navigation_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        built = site / (page.parent if page.name == "index" else page) / "index.html"
        text = built.read_text("utf-8")
        fetched = re.findall(r"<(?:script|img)[^>]* src=\"?(https?:[^\" >]+)", text)
        fetched += re.findall(r"<link[^>]*rel=\"?stylesheet\"?[^>]*href=\"?(https?:[^\" >]+)", text)
        assert fetched == [], page
        assert 'class="md-nav__link md-nav__link--active"' in text, page


def test_links_out_of_docs_lead_to_the_repository(site: Path) -> None:
    text = (site / "performance" / "index.html").read_text("utf-8")
    assert f"{REPOSITORY}/tree/main/benchmarks/results" in text
    assert f"{REPOSITORY}/blob/main/benchmarks/LOG.md" in text


class Page:
    class file:  # noqa: N801, as mkdocs has it
        src_uri = "decisions/anchors.md"


def test_without_a_repository_a_link_out_of_docs_is_its_text(caplog) -> None:
    config = {"docs_dir": str(ROOT / "docs"), "repo_url": ""}

    def replaced(markdown: str) -> str:
        return on_page_markdown(markdown, page=Page, config=config)

    assert replaced("see [the log](../../benchmarks/LOG.md#top).") == "see the log."
    assert replaced("[a](../scale.md#x)") == "[a](../scale.md#x)"
    assert caplog.records == []
    replaced("[gone](../../benchmarks/GONE.md)")
    assert "benchmarks/GONE.md, which does not exist" in caplog.text


def test_docstrings_name_the_arguments_that_exist() -> None:
    """A docstring may explain several arguments at once: `device, dtype: of the parameters.`"""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                wrong += [f"{path.name}: {node.name}: {name}" for name in unknown_arguments(node)]
    assert wrong == []


def unknown_arguments(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """The names in the section `Args:` of a docstring that are neither arguments nor fields."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", (ast.get_docstring(node) or "") + "\n", re.M)
    if section is None:
        return set()
    heads = re.findall(r"^    (\*?\w+(?:, \*?\w+)*):", section[1], re.M)
    named = {name.lstrip("*") for head in heads for name in head.split(", ")}
    inits = [n for n in node.body if getattr(n, "name", "") in ("__init__", "forward", "__new__")]
    known = {
        argument.arg
        for function in (inits if isinstance(node, ast.ClassDef) else [node])
        for argument in ast.walk(function.args)
        if isinstance(argument, ast.arg)
    }
    known |= {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    known |= {"device", "dtype"} if "factory" in known else set()
    return named - known
