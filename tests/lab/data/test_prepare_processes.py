"""`ddl prepare` in several processes, or killed: it writes the same bytes, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddl.errors import InputError
from ddl.lab.data.prepare import Progress, prepare
from ddl.lab.data.shards import read_index
from tests.support.prepare_cases import FORMATS, SEPARATOR, configuration, contents, documents

KILLED = """
import sys
from pathlib import Path
from ddl.lab.data import sources
from ddl.lab.cli import main
if __name__ == "__main__":  # the workers import this file
    sources.UNIT = 4096
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each format, in a directory that `ddl prepare` takes as a whole."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "notes.md").write_text("is left out")
    for number, (name, write) in enumerate(FORMATS.items()):
        write(folder / name, documents(400, seed=number))
    return folder


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bytes_for_any_number_of_workers(
    workers: int, inputs: Path, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    for number in (1, workers):
        out = tmp_path / str(number)
        options = {"tokenizer": str(tokenizer), "shard_tokens": 7000, "workers": number}
        prepare(configuration(inputs, out, **options))
    assert contents(tmp_path / "1") == contents(tmp_path / str(workers))
    assert len(contents(tmp_path / "1")) > 20
    assert multiprocessing.active_children() == []


def command(inputs: Path, out: Path, tokenizer: Path, workers: int) -> list[str]:
    options = f"--shard-tokens 3000 --validation 0.2 --workers {workers}".split()
    options += ["--separator", SEPARATOR, "--tokenizer", str(tokenizer)]
    return ["prepare", str(inputs), "--out", str(out), *options]


def start(script: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    script.write_text(KILLED)
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.table(0)
@pytest.mark.parametrize("workers", [2, 1])
def test_a_killed_preparation_goes_on(
    workers: int, inputs: Path, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    """It is killed after some shards, again and again; the files are those of one call."""
    options = {"tokenizer": str(tokenizer), "shard_tokens": 3000}
    prepare(configuration(inputs, tmp_path / "whole", **options))
    out, choose = tmp_path / "out", random.Random(workers)
    last = len(read_index(tmp_path / "whole").shards["train"])
    shards, kills, kept = -1, 0, dict[Path, int]()
    while True:
        process = start(tmp_path / "run.py", command(inputs, out, tokenizer, workers))
        goal = shards + choose.randrange(last // 8, last // 4)
        while process.poll() is None:
            done = len(list(out.glob("train-*.bin")))
            if done >= goal and done < last:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.001)
        _, said = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said
        kills += 1
        shards = len(list(out.glob("train-*.bin")))
        if (out / "index.json").exists():
            listed = [out / f"{shard.name}.bin" for shard in read_index(out).shards["train"]]
            kept |= {file: file.stat().st_mtime_ns for file in listed}
        if kills == 2:  # what a kill within a step leaves behind
            (out / ".train-00099.bin.0123abcd.tmp").write_bytes(b"half")
            (out / "validation-00099.starts").write_bytes(b"")
    assert kills >= 3
    assert len(kept) >= 3
    assert {file: file.stat().st_mtime_ns for file in kept} == kept  # they were not written again
    assert contents(out) == contents(tmp_path / "whole")


def test_workers_end_with_a_killed_parent(inputs: Path, tmp_path: Path, tokenizer: Path) -> None:
    process = start(tmp_path / "run.py", command(inputs, tmp_path / "out", tokenizer, 2))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("reads Linux's /proc")
    found: list[str] = []
    while len(found) < 3 and process.poll() is None:  # a tracker of resources and two workers
        found = children.read_text().split()
        time.sleep(0.001)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while left := [int(pid) for pid in found if _runs(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail("workers outlive their parent")
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_is_reported_in_a_sentence(
    inputs: Path, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    config = configuration(inputs, tmp_path / "out", tokenizer=str(tokenizer), workers=2)

    def kill_one(progress: Progress) -> None:
        children = multiprocessing.active_children()
        if children and children[0].pid:
            with suppress(ProcessLookupError):  # it was killed in the call before
                os.kill(children[0].pid, signal.SIGKILL)

    expected = (
        "`workers` must fit on this machine, got 2, one of which was ended from outside, perhaps"
        " for lack of memory"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        prepare(config, kill_one)
    prepare(config)
    prepare(configuration(inputs, tmp_path / "whole", tokenizer=str(tokenizer)))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_complete_directory_stays_as_it_is(inputs: Path, tmp_path: Path) -> None:
    config = configuration(inputs, tmp_path / "out")
    assert not prepare(config).was_complete
    before = contents(tmp_path / "out")
    assert prepare(config).was_complete
    assert contents(tmp_path / "out") == before


def test_progress_reaches_the_end(inputs: Path, tmp_path: Path, small_units: None) -> None:
    seen: list[Progress] = []
    index = prepare(configuration(inputs, tmp_path / "out"), seen.append).index
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total == sum((inputs / name).stat().st_size for name in FORMATS)
    assert seen[-1].tokens == index.tokens("train") + index.tokens("validation")


# --- memory ---------------------------------------------------------------------------------------

PEAK = """
import re, sys
from pathlib import Path
from ddl.lab.cli import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""


@pytest.mark.table(0)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "one.txt", "a.parquet"])
def test_memory_does_not_grow_with_the_input(name: str, tmp_path: Path) -> None:
    """44 MB take as much memory as 4."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads Linux's /proc")
    peaks = []
    for millions in (4, 44):
        texts = [f"{i} " + "word " * 200 for i in range(1000 * millions)]
        if name == "one.txt":
            (tmp_path / name).write_text("\n".join(texts))
            (tmp_path / "b.txt").write_text("held out")
        elif name == "a.parquet":
            _large_row_group(tmp_path / name, texts)
        else:
            FORMATS[name](tmp_path / name, texts)
        inputs = [tmp_path / name, *([tmp_path / "b.txt"] if name == "one.txt" else [])]
        separator = [] if name == "one.txt" else ["--separator", SEPARATOR]
        script = [sys.executable, "-c", PEAK, "prepare", *map(str, inputs), "--validation", "0.5"]
        options = ["--tokenizer", "bytes", "--workers", "1", *separator]
        out = ["--out", str(tmp_path / f"out-{millions}")]
        done = subprocess.run([*script, *options, *out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 20, f"{peaks} MiB"


def _large_row_group(path: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, row_group_size=len(texts), use_dictionary=False)
