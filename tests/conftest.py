"""Every test starts from the same seed and leaves torch's global settings as it found them.

`--all` runs every case of every table; without it support/sampling.py chooses a sample. `--tier`
runs the part of it that support/tiers.py describes. `--wheels` names a folder of finished wheels
for tests/release.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.support import tiers
from tests.support.forks import keep_backwards_forkable
from tests.support.sampling import MARKERS, left_out

pytest_plugins = ["pytester"]

# The same examples on every run, so that a failure in CI repeats locally. No deadline, because the
# first call of an operator may compile or load something.
settings.register_profile("ddl", derandomize=True, database=None, deadline=None, max_examples=60)
settings.load_profile("ddl")
keep_backwards_forkable()

# Under nohup it is ignored, which processes inherit, and training then goes on as it should.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case of every table of cases")
    parser.addoption("--tier", choices=("fast", "slow"), help="run a tier of the sample")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")
    parser.addoption("--wheels", metavar="DIR", help="check the Linux wheels in this folder")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    tier, record = config.getoption("--tier"), config.getoption("--record-durations")
    if (tier or record) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(tiers.Durations(tier, record=record))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    out = left_out(items)
    if tier := config.getoption("--tier"):
        names, seconds = [item.nodeid for item in items], tiers.recorded()
        gone = tiers.stale(config.args, seconds, names)
        if gone and not config.getoption("-k"):
            raise pytest.UsageError(f"{tiers.RECORD.name} names {gone[0]}, which is gone")
        kept = tiers.in_tier(tier, names, seconds)
        out.update(item for item, keep in zip(items, kept, strict=True) if not keep)
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def pytest_collection_finish() -> None:
    """Take what the collection made out of the garbage collector's sight.

    Each full pass would look at all of 27,000 tests, and much that is tested asks for one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed 0, and restore the thread count and default dtype that a test may have changed."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
