"""The workflows name what exists, pin what is not ours, and may do no more than they have to.

`make check` lints them; here is what linters do not know.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support import ROOT

# The files that steps make, by their first folder.
MADE = {"dist", "first", "another", "notes.md", "site"}
# All that a job may do besides checking out.
RIGHTS = {
    "docs.yml": {"publish": {"pages": "write", "id-token": "write"}},
    "release.yml": {
        "pypi": {"id-token": "write", "attestations": "write"},
        "github": {"contents": "write"},
    },
}
READS = {"contents": "read"}
PINNED = re.compile(r"uses: ([\w./-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+$", re.MULTILINE)
RELEASING = (ROOT / "docs" / "releasing.md").read_text("utf-8")

pytestmark = pytest.mark.skipif(
    not (ROOT / ".github").is_dir(), reason="the sdist is without workflows"
)


def load(file: Path) -> dict[str, Any]:
    """Load a workflow with all scalars as text: YAML takes `on` for true and 3.10 for 3.1."""
    return yaml.load(file.read_text("utf-8"), yaml.BaseLoader)


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def missing(step: dict[str, Any]) -> Iterator[str]:
    """The make targets and files that a step names and that are not there."""
    script = step.get("run", "")
    for target in set(re.findall(r"\bmake ([a-z][\w-]*)", script)) - make_targets():
        yield f"the Makefile has no target {target}"
    words = [*shlex.split(script, comments=True), step.get("working-directory", "")]
    words += [str(value) for value in step.get("with", {}).values()]
    for word in words:
        is_file = re.fullmatch(r"[\w.-]+(/[\w.*-]+)+/?|[\w-]+\.(lock|md|py|sh|toml|txt)", word)
        if is_file and word.split("/")[0] not in MADE and not (ROOT / word).exists():
            yield f"there is no {word}"


def unpinned(text: str, github: Path) -> Iterator[str]:
    """Actions of others without a hash and its version, and workflows of ours that do not exist."""
    for line in re.findall(r"uses:.*", text):
        ours = re.fullmatch(r"uses: \$/\.github/(\S+)", line)
        if ours and not (github / ours[1]).is_file():
            yield f"there is no {ours[1]}"
        if not ours and not PINNED.match(line):
            yield f"not pinned: {line}"


def rights(name: str, workflow: dict[str, Any]) -> Iterator[str]:
    """Permissions of jobs beyond the table, and secrets or environments where none belong."""
    if workflow.get("permissions") != {}:
        yield "the workflow gives every job permissions"
    for job, content in workflow["jobs"].items():
        allowed = RIGHTS.get(name, {}).get(job, READS)
        if content.get("permissions") != allowed:
            yield f"{job} has permissions {content.get('permissions')}, expected {allowed}"
        publishes = "id-token" in allowed
        if publishes != ("environment" in content):
            yield f"{job} has the wrong environment"
        if publishes and any("run" in s or "checkout" in s["uses"] for s in content["steps"]):
            yield f"{job} can publish and runs more than actions"


def scripts_of_bash(workflow: dict[str, Any]) -> Iterator[str]:
    for script in (step["run"] for step in steps(workflow) if "run" in step):
        parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        if parsed.returncode:
            yield parsed.stderr
        if "${{" in script:
            yield f"an expression is pasted into a script: {script}"


def faults(github: Path) -> list[str]:
    found, pins = [], set()
    for file in sorted((github / "workflows").iterdir()):
        text, workflow = file.read_text("utf-8"), load(file)
        here = [fault for step in steps(workflow) for fault in missing(step)]
        here += [*unpinned(text, github), *rights(file.name, workflow), *scripts_of_bash(workflow)]
        if re.search(r"\bsecrets\b|password", text):
            here.append("a long-lived secret")
        found += [f"{file.name}: {fault}" for fault in here]
        pins |= set(PINNED.findall(text))
    twice = [name for name, number in Counter(name for name, _ in pins).items() if number > 1]
    return found + [f"two versions of {name}" for name in twice]


def test_the_workflows_have_no_fault():
    assert faults(ROOT / ".github") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("wheels.yml", "run: make wheels", "run: make wheel", "no target wheel"),
        ("checks.yml", "run: .ci/run", "run: .ci/go", "no .ci/go"),
        ("checks.yml", "tests/nn", "tests/modules", "no tests/modules"),
        ("checks.yml", "requirements-dev.lock", "requirements.lock", "no requirements.lock"),
        ("release.yml", "$/.github/workflows/wheels.yml", "$/.github/workflows/w.yml", "no work"),
        ("release.yml", "notes.py", "note.py", "no release/note.py"),
        ("checks.yml", "# v7.0.1", "", "not pinned"),
        ("wheels.yml", "@3e5f45b2cfb9172054b4087a40e8e0b5a5461e7c", "@v8.0.1", "not pinned"),
        ("release.yml", "@3d3c42e5", "@3d3c42e6", "two versions of actions/checkout"),
        ("release.yml", "${{ github.token }}", "${{ secrets.PYPI }}", "a long-lived secret"),
        ("checks.yml", "permissions: {}", "permissions: {contents: read}", "every job"),
        ("checks.yml", "contents: read", "contents: write", "gate has permissions"),
        ("wheels.yml", "contents: read", "id-token: write", "linux has permissions"),
        (
            "release.yml",
            "    environment:\n      name: pypi",
            "    env:\n      name: pypi",
            "wrong",
        ),
        (
            "release.yml",
            "          attestations: true\n",
            "          attestations: true\n      - run: ls\n",
            "runs more",
        ),
        ("checks.yml", "run: .ci/run", "run: (.ci/run", "syntax error"),
        ("release.yml", '"$GITHUB_REF_NAME" >', '"${{ github.ref_name }}" >', "pasted"),
    ],
)
def test_a_planted_fault_is_seen(tmp_path, file, old, new, fault):
    github = shutil.copytree(ROOT / ".github", tmp_path / ".github")
    path = github / "workflows" / file
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    added = set(faults(github)) - set(faults(ROOT / ".github"))
    assert any(fault in one for one in added), added


def versions(name: str) -> list[str]:
    """Every version of `name` that a workflow installs, as rows of a matrix or alone."""
    text = "".join(file.read_text("utf-8") for file in (ROOT / ".github/workflows").iterdir())
    return re.findall(rf'\b{name}(?:-version)?: "([\d.]+)"', text)


def test_the_versions_are_those_of_the_package():
    """Wheels are tested with the oldest and the newest torch that `make check-wheel` knows."""
    metadata = importlib.metadata.metadata("ddl-rs")
    requirements = map(Requirement, metadata.get_all("Requires-Dist"))
    torch = next(requirement for requirement in requirements if requirement.name == "torch")
    for python in versions("python"):
        assert f"Programming Language :: Python :: {python}" in metadata.get_all("Classifier")
    assert f">={min(versions('python'), key=Version)}" == metadata["Requires-Python"]
    known = re.findall(r'"(\d+\.\d+\.\d+)"', (ROOT / "release/check_wheel.py").read_text("utf-8"))
    extremes = [min(known, key=Version), max(known, key=Version)]
    assert sorted(set(versions("torch")), key=Version) == extremes
    assert extremes[0] == f"{str(torch.specifier).removeprefix('>=')}.0"


def test_one_rust_builds_and_checks_everything():
    texts = [(ROOT / ".github/workflows" / f"{n}.yml").read_text() for n in ("checks", "wheels")]
    (rust,) = {re.search(r'RUSTUP_TOOLCHAIN: "([\d.]+)"', text)[1] for text in texts}
    least = re.search(r'^rust-version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    assert Version(rust) >= Version(least)


def test_the_page_on_releases_names_what_exists():
    named = set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", RELEASING, re.MULTILINE))
    assert {"wheels", "check-wheel"} <= named
    assert named <= make_targets()
    links = re.findall(r"\]\(([^)#:]+)\)", RELEASING)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    publisher = load(ROOT / ".github/workflows/release.yml")["jobs"]["pypi"]
    assert f"`{publisher['environment']['name']}`" in RELEASING
    assert "`release.yml`" in RELEASING
