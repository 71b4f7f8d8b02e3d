"""docs/papers.md: its names exist, and its tables agree with the code."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import torch

from ddl.lab.config import PUBLISHED, GPTConfig, paper_code
from ddl.lab.config.presets import PRESETS
from ddl.models import GPT
from ddl.paper import revert
from ddl.paper.options import FIXED, SCALAR
from tests.paper.test_paper import VARIANTS
from tests.support import ROOT

TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def rows(section: str) -> list[list[str]]:
    """The cells of every row of a section's tables, without heads."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] and not set("".join(row)) <= {"-"}]


def written(residual: str, **options: Any) -> dict[str, Any]:
    with torch.device("meta"):
        model = GPT(paper_code(PRESETS["tiny"], {"residual": residual, **options}).model)
        return revert(model.config, model.state_dict(), layout="o_proj")[0]


def test_every_variant_has_its_row() -> None:
    named = [row for row in rows("Names of the variants") if row[0] != "here"]
    assert {row[0].strip("`") for row in named} == set(PUBLISHED)
    assert len(named) == len(PUBLISHED)
    files = {
        row[0].strip("`"): re.findall(r"`[\w-]*?((?:-TC|-CC)?(?:-EC)?)`", row[4]) for row in named
    }
    for kind, residual in VARIANTS.items():
        if kind not in ("additive", "ddl"):
            assert f"-{kind.upper()}" in files[residual]


def test_the_published_options_are_those_that_an_export_writes() -> None:
    table = [row for row in rows("Options of the published config.json") if row[0] != "published"]
    theirs = {row[0].strip("`") for row in table}
    ours = {row[1].strip("`") for row in table}
    assert ours <= {field.name for field in fields(GPTConfig)}
    keys: set[str] = set()
    for residual in PUBLISHED:
        mlp = {"gate": "mlp"} if residual != "additive" else {"mlp_size": 3}
        scaled = {"parameterization": "completep", "base_width": 64, "base_layers": 1}
        keys |= written(residual, **mlp, **scaled).keys()
    fixed = {"model_type", "use_qk_rmsnorm", "rope_ratio"}  # have no option here
    assert keys - fixed - set(SCALAR.values()) == theirs
    assert all(f"`{name}`" in TEXT for name in (*SCALAR.values(), *FIXED))


def test_the_differences_are_the_recipes() -> None:
    named = {
        name
        for row in rows("The recipe of the published code")
        if len(row) == 4
        for name in re.findall(r"`([\w.]+)`", row[3])
    }
    usual, recipe = PRESETS["small"], paper_code(PRESETS["small"])
    changed = {n for n, value in vars(recipe.model).items() if value != getattr(usual.model, n)}
    assert recipe.optim.decay != usual.optim.decay
    assert named == changed | {"optim.decay", "value_scale", "value_init"}
