"""Find lm-evaluation-harness tasks by name, and load them without waiting for a network."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import huggingface_hub
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

from ddl.errors import InputError, first_line

PATIENCE = 5.0  # seconds to wait for the Hugging Face Hub to answer


def index(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return lm-eval's index of tasks, or that of `include_path` alone if it has all the names.

    Reading lm-eval's more than ten thousand task files takes seconds. For equal names, a file in
    `include_path` wins over lm-eval's. Raises InputError if `include_path` is no directory.
    """
    if include_path is None:
        return TaskManager()
    if not include_path.is_dir():
        raise InputError("include_path", "be a directory with YAML files", include_path)
    own = TaskManager(include_path=str(include_path), include_defaults=False)
    matches = [own.match_tasks([name]) for name in names]
    if all(found and set(found) <= set(own.all_subtasks) for found in matches):
        return own
    return TaskManager(include_path=str(include_path))


def resolve(names: Sequence[str], manager: TaskManager) -> list[str]:
    """Replace patterns like `arc_*` by the names that they match.

    Raises InputError for a name that is not in the index, with similar names.
    """
    found: dict[str, None] = {}  # an ordered set
    for name in names:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            own = "; --include-path DIR finds tasks of your own"
            hint = f", which is near {', '.join(near)}" if near else own
            raise InputError("tasks", "name tasks that lm-eval finds", f"{name!r}{hint}")
        found |= dict.fromkeys(matches)
    return list(found)


def load(names: Sequence[str], manager: TaskManager) -> list[Any]:
    """Load lm-eval's tasks and groups of these names, with their data.

    Cached data is used without asking the Hub. Missing data is fetched only if the Hub answers,
    because the library retries each unreachable dataset for half a minute. Otherwise raises
    InputError, which says what to fetch and how.
    """
    forbidden = huggingface_hub.constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE
    loaded: dict[str, list[Any]] = {}
    missing = []
    with _offline():
        for name in names:
            try:
                loaded[name] = _load(name, manager)
            except _NotCachedError:
                missing.append(name)
    if missing and (forbidden or not _hub_answers()):
        why = "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" if forbidden else "it does not answer"
        raise InputError.sentence(_what_to_fetch(missing, manager, why), ("tasks",))
    for name in missing:
        try:
            loaded[name] = _load(name, manager)
        except _NotCachedError as error:
            raise InputError(
                "tasks", "be in the cache or on the Hub", f"{name}: {error}"
            ) from error
    return [task for name in names for task in loaded[name]]


class _NotCachedError(Exception):
    """The data of a task is not in the cache, and there is no network."""


def _load(name: str, manager: TaskManager) -> list[Any]:
    """Load a group, a task, or the tasks of a tag."""
    try:
        built = manager.load([name])
    except Exception as error:  # a task file can contain code, so it may raise anything
        missing = isinstance(error, ConnectionError) or "find cache for" in str(error)
        if missing:
            raise _NotCachedError(first_line(error)) from error
        kind = type(error).__name__
        raise InputError.sentence(
            f"`tasks` {name} could not be loaded: {kind}: {first_line(error)}", ("tasks",)
        ) from error
    if name in built["groups"]:
        return [built["groups"][name]]
    return list(built["tasks"].values())


@contextmanager
def _offline() -> Iterator[None]:
    """Forbid network access: cached data loads, everything else fails at once."""
    homes: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    before = [home.HF_HUB_OFFLINE for home in homes]
    for home in homes:
        home.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for home, value in zip(homes, before, strict=True):
            home.HF_HUB_OFFLINE = value


def _hub_answers() -> bool:
    """Return whether the Hub answers, through the environment's proxies."""
    try:
        session = huggingface_hub.get_session()  # its HTTP library depends on its version
        answer = session.head(huggingface_hub.constants.ENDPOINT, timeout=PATIENCE)
    except Exception:
        return False
    return not answer.is_server_error


def _what_to_fetch(names: Sequence[str], manager: TaskManager, why: str) -> str:
    listed = "; ".join(_with_dataset(name, manager) for name in names)
    include = manager.include_path
    options = f"include_path={include!r}" if include else ""
    command = f"TaskManager({options}).load({list(names)!r})"
    return (
        f"`tasks` need data that is not cached, and the Hugging Face Hub is out of reach ({why}):"
        f" {listed}. Where there is network, run"
        f' python -c "from lm_eval.tasks import TaskManager; {command}"'
        f" and copy the cache it fills, HF_HOME, to {huggingface_hub.constants.HF_HOME}"
    )


def _with_dataset(name: str, manager: TaskManager) -> str:
    entry = manager.task_index.get(name)
    config = (entry.cfg if entry else None) or {}
    parts = [config[key] for key in ("dataset_path", "dataset_name") if config.get(key)]
    return f"{name} ({', '.join(parts)})" if parts else name
