"""Files and directories are written atomically."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import ddl
from ddl.errors import InputError
from ddl.files import (
    alone_in,
    append_line,
    atomic_directory,
    atomic_file,
    is_locked,
    make_directory,
    remove,
    write_text,
)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_changes_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with atomic_file(path) as temporary:
        temporary.write_text("ne")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path  # only there is a rename atomic
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_the_old_file_stays_if_writing_fails(raised: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with suppress(raised), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise raised
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_permissions_as_after_open(tmp_path: Path) -> None:
    """Permissions are as after open, even if the writer replaces the file by a private one."""
    plain = tmp_path / "plain"
    plain.write_text("")
    path = tmp_path / "a.json"
    with atomic_file(path) as temporary:
        temporary.unlink()
        temporary.touch(0o600)
    assert mode(path) == mode(plain) == 0o640
    path.chmod(0o604)
    write_text(path, "again")
    assert mode(path) == 0o604
    with atomic_directory(tmp_path / "folder") as folder:
        (folder / "private").touch(0o600)
    assert mode(tmp_path / "folder" / "private") == 0o640
    assert mode(tmp_path / "folder") == 0o750


def test_a_link_is_written_through_and_removed_alone(tmp_path: Path) -> None:
    for name in ("file", "folder"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
    write_text(tmp_path / "to-file", "new")
    with atomic_directory(tmp_path / "to-folder") as folder:
        (folder / "a").write_text("new")
    for name in ("to-file", "to-folder"):
        assert (tmp_path / name).is_symlink()
        remove(tmp_path / name)
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "a").read_text() == "new"


def test_a_sentence_that_names_the_argument(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a.json"
    sentence = f"^`plot` must be writable, got {path}: Not a directory$"
    with pytest.raises(InputError, match=sentence), atomic_file(path, argument="plot"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"^`out` must be writable, got .*: Is a directory$"):
        write_text(tmp_path / "folder", "")
    assert names(tmp_path) == ["file", "folder"]


FULL_DISK = """
import resource, sys, torch, safetensors.torch
from pathlib import Path
from ddl.files import atomic_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with atomic_file(Path(sys.argv[1])) as temporary:
    safetensors.torch.save_model(torch.nn.Linear(100, 100), str(temporary))
"""


def test_a_disk_that_is_full_for_safetensors(tmp_path: Path) -> None:
    """For a full disk safetensors raises its own error instead of OSError."""
    path = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True
    )
    sentence = f"`out` must be writable, got {path}: .*File too large"
    assert re.search(sentence, done.stderr.splitlines()[-1]), done.stderr
    assert names(tmp_path) == []


def test_a_directory_appears_in_one_step(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with atomic_directory(out) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
    assert names(out) == ["a"]
    assert names(out.parent) == ["out"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    """It may be the root of a file system, onto which no directory can be renamed."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    inode = mounted.stat().st_ino
    with atomic_directory(mounted) as temporary:
        assert temporary.parent == mounted
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("new")
    assert mounted.stat().st_ino == inode
    assert [path.name for path in mounted.iterdir()] == ["inner"]
    assert (mounted / "inner" / "file").read_text() == "new"


def test_files_of_other_names_stay(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "notes").write_text("mine")
    with suppress(ZeroDivisionError), atomic_directory(tmp_path) as folder:
        (folder / "a").write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_text() == "old"
    with atomic_directory(tmp_path) as folder:
        (folder / "a").write_text("new")
        (folder / "b").write_text("new")
        assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a", "b", "notes"]
    assert (tmp_path / "a").read_text() == "new"
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_line_follows_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "one")
    with path.open("a") as file:
        file.write("tw")
    append_line(path, "β")
    assert path.read_text(encoding="utf-8") == "one\ntw\nβ\n"
    with pytest.raises(InputError, match=r"^`out` must be writable, got .*: Is a directory$"):
        append_line(tmp_path, "one")
    with pytest.raises(InputError, match=r"^`out` must be writable, got .*: (File|Not)"):
        make_directory(path)


WRITES = re.compile(
    r"\.write_(text|bytes)\(|\.save(_pretrained)?\(|\.savefig\(|\.save_(file|model)\(|\.mkdir\("
    r"|open\([^)]*[\"'][wax+]|\.rename\(|os\.replace\(|shutil|tempfile"
)
# Variables for paths that atomic_file and atomic_directory yield, and transformers' own argument.
WHOLE = re.compile(r"\b(temporary|folder|save_directory)\b")
# RunDirectory.save is atomic, and files of /proc and /dev are none.
ALLOWED = (
    'setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115',
    'Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident size',
    "self.saver.save(self.evaluated, self.logged, self.clock.total)",
    "state_dict_saver.save(",
    "candidate.run.save(candidate.trainer.model)",
)


def test_no_other_module_writes() -> None:
    root = Path(ddl.__file__).parent
    lines = {
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if path != root / "files.py" and WRITES.search(line) and not WHOLE.search(line)
    }
    assert {line for line in lines if not line.endswith(ALLOWED)} == set()


def test_who_is_alone_in_a_directory_is_seen(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is False
    with alone_in(tmp_path):
        assert is_locked(tmp_path) is True
        assert is_locked(tmp_path) is True  # the first call leaves the lock alone
    assert is_locked(tmp_path) is False
    with alone_in(tmp_path):  # and keeps nobody out afterwards
        pass
    assert is_locked(tmp_path / "missing") is False
    assert names(tmp_path) == []
