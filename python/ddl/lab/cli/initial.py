"""The option `init_from` of `ddl train` and `ddl sweep`: the model's options come from there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ddl.errors import InputError
from ddl.fields import NAMED_BY_TEXT, expand_paths
from ddl.lab.config import GPTConfig
from ddl.paths import at_home, is_run, require_kind

from .command import parse
from .recipe import HELP

if TYPE_CHECKING:
    from ddl.models import GPT
    from ddl.models.tokenizers import Tokenizer

NAMES = ("--init-from", "--init_from")


@dataclass(frozen=True)
class _Options:
    """The options on which it depends where the model's come from."""

    init_from: Annotated[str | None, NAMED_BY_TEXT] = None
    resume: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        expand_paths(self)


def take_initial(options: list[str], **tyro: Any) -> tuple[str, GPTConfig] | None:
    """Return the path that `--init-from` among the options names, and the options of its model.

    tyro: further arguments of `parse`. None without the option. Raises InputError if the path
    names no model.
    """
    if not any(option.split("=")[0] in NAMES for option in options):
        return None
    read = [option for option in options if option not in HELP]
    chosen, _ = parse(_Options, read, return_unknown_args=True, **tyro)
    if chosen.init_from is None:
        return None
    begun = chosen.out if chosen.resume == "auto" else None
    return chosen.init_from, model_at(chosen.init_from, begun)


def model_at(source: str, run: Path | None) -> GPTConfig:
    """The options of the model at `source`.

    run: a directory with a run that may have begun from there; then it goes on without the source.
    """
    if run is not None and is_run(run):
        from ddl.lab.train.runs import load_config

        stored = load_config(run)
        if stored.init_from == source:
            return stored.model
    return _load(source)[0].config


def load_initial(source: str) -> tuple[GPT, Tokenizer | None]:
    """Load the model at `source`, on the CPU, once more if it was handed out before."""
    try:
        return _load(source)
    finally:
        _load.cache_clear()  # the caller alone holds the weights


@lru_cache(maxsize=1)
def _load(source: str) -> tuple[GPT, Tokenizer | None]:
    from ddl.lab.load import OURS, load
    from ddl.models import GPT

    path, papers = at_home(source, argument="init_from"), "a checkpoint of the paper's code"
    require_kind(path, *OURS, argument="init_from", checkpoint=papers)
    model, tokenizer = load(path, "cpu", argument="init_from")
    if not isinstance(model, GPT):
        raise InputError(
            "init_from",
            "be a model that `ddl train` can train",
            f"{source} with nanoGPT's modules: go on in nanoGPT's own train.py",
        )
    return model, tokenizer
