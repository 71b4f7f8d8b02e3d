"""The directory of `ddl prepare`: a new one is begun, an interrupted one is checked."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ddl._native import __version__
from ddl.errors import InputError
from ddl.files import checksum, names_in, unfinished, write_text, writing
from ddl.lab.config import PrepareConfig
from ddl.models.tokenizers import Tokenizer, describe

from .shards import INDEX, PARTS, TOKENIZER, Index, read_index, tokenizer_sum
from .sources import Source, reading

SHARD = re.compile(rf"({'|'.join(PARTS)})-\d{{5,}}\.(bin|starts)")


def refuse_foreign_files(out: Path) -> None:
    """Raise InputError unless `out` is new, empty, or has nothing but files of `ddl prepare`."""
    names = names_in(out)
    begun = INDEX in names
    ours = (INDEX, TOKENIZER) if begun else ()
    others = [
        name
        for name in names
        if not (name in ours or _is_temporary(name) or (begun and SHARD.fullmatch(name)))
        or (out / name).is_dir()
    ]
    if others:
        what = "the directory " if (out / others[0]).is_dir() else ""
        raise InputError(
            "out",
            "be new, empty or a directory that `ddl prepare` began",
            f"{out}, which has {what}{others[0]}",
        )


def made_of(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    token: int | None,
    found: list[Source],
    workers: int,
) -> dict[str, Any]:
    """Return versions, options and sources, on which the files depend, as JSON values.

    token: the document token, None for none. workers: threads that hash the sources. Raises
    InputError if a source cannot be read.
    """
    library = {"file": "tokenizers", "gpt2": "tiktoken"}.get(tokenizer.kind)
    versions = {"ddl": __version__} | ({library: version(library)} if library else {})
    with ThreadPoolExecutor(workers) as pool:  # hashing releases the GIL
        sums = list(pool.map(_checksum, found))
    return {
        "versions": versions,
        "options": {
            "tokenizer": tokenizer_sum(tokenizer),
            "document_token": token,
            "text_field": config.text_field,
            "separator": config.separator,
            "validation": config.validation,
            "shard_tokens": config.shard_tokens,
        },
        "sources": [
            {"name": source.path.name, "bytes": size, "sha256": digest}
            for source, (size, digest) in zip(found, sums, strict=True)
        ],
    }


def _checksum(source: Source) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    with reading(source.path):
        return source.path.stat().st_size, checksum(source.path)


def _is_temporary(name: str) -> bool:
    """Whether an earlier call was writing one of our files under this name."""
    final = unfinished(name)
    return final in (INDEX, TOKENIZER) or bool(final and SHARD.fullmatch(final))


def begin(out: Path, fresh: Index, tokenizer: Tokenizer) -> Index:
    """Write `fresh` as the first index, or read that of an earlier call and check its shards.

    Returns the index to go on with. Raises InputError if the earlier call had other options,
    versions or sources, or its files are missing or changed.
    """
    index = read_index(out, argument="out") if (out / INDEX).exists() else fresh
    if index.next == fresh.next:  # nothing is done yet, so it may be begun in another way
        index = fresh
    _refuse_other_origin(out, index.made_of, fresh.made_of)
    files: dict[str, str] = {}
    for shard in (shard for part in PARTS for shard in index.shards[part]):
        files |= shard.files
    for name, expected in files.items():
        if _sum(out / name) != expected:
            raise InputError(
                "out",
                f"have the shards of its {INDEX}",
                f"{out}, whose {name} is missing or was changed: remove the directory",
            )
    with writing(out):
        for name in os.listdir(out):
            if _is_temporary(name) or (SHARD.fullmatch(name) and name not in files):
                (out / name).unlink()  # the interrupted step left it; the index does not list it
    if index is fresh:
        index.write(out)
    write_text(out / TOKENIZER, json.dumps(describe(tokenizer)))
    return index


def _sum(path: Path) -> str | None:
    """SHA-256 of a shard; None if it is no readable file."""
    try:
        return checksum(path)
    except OSError:
        return None


def _refuse_other_origin(out: Path, begun: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InputError if the earlier call had other options, versions or sources."""
    for section in ("options", "versions"):
        for name, value in now[section].items():
            before = begun[section].get(name)
            if before != value:
                raise InputError(
                    "out",
                    f"be new or a directory that was begun with the same {section}",
                    f"{out}, begun with {name} = {before!r} instead of {value!r}",
                )
    if begun["sources"] != now["sources"]:
        others = [source["name"] for source in now["sources"] if source not in begun["sources"]]
        got = f"{others[0]}, which is another one or has changed" if others else "others"
        raise InputError("inputs", f"be the files with which {out} was begun, in their order", got)


def clear(out: Path) -> None:
    """Remove all files of a preparation, the index last."""
    with writing(out):
        for name in os.listdir(out) if out.exists() else ():
            if SHARD.fullmatch(name) or _is_temporary(name) or name == TOKENIZER:
                (out / name).unlink()
        (out / INDEX).unlink(missing_ok=True)
