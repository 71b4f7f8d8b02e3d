"""The arrays of ddl.lab.analysis.spectra: any strides, read in parts; threads, numpy itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from ddl.lab.analysis import spectra
from tests.lab.analysis.test_spectra import Rewrites, rewrites
from tests.ops.test_ops_threads import runs_beside


def all_figures(given: Rewrites, threads: int | None = None) -> list[np.ndarray]:
    k, beta, _, X0 = given
    norms = np.linalg.norm(np.ascontiguousarray(k), axis=-1)
    eigenvalues = spectra.eigenvalues(beta, with_depth_first(norms), threads=threads)
    survival = spectra.write_survival(*given, threads=threads)
    figures = [
        eigenvalues,
        spectra.determinants(eigenvalues, threads=threads),
        spectra.coherence(k, threads=threads),
        spectra.effective_rank(X0, threads=threads),
        spectra.product_singular_values(k, beta, threads=threads),
        *survival,
    ]
    if len(k):
        shares = spectra.regime_shares(eigenvalues, threads=threads)
        figures += [
            np.array(list(shares.values())),
            spectra.coherence_matrix(k, threads=threads),
            *spectra.write_survival(*given, mean=True, threads=threads),
        ]
    return figures


def assert_same(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def with_depth_first(array: np.ndarray) -> np.ndarray:
    """(N, L, …) as a view of memory in the order (L, N, …)."""
    return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)


def reversed_in_memory(array: np.ndarray) -> np.ndarray:
    backwards = tuple(slice(None, None, -1) for _ in array.shape)
    return np.ascontiguousarray(array[backwards])[backwards]


def every_second(array: np.ndarray) -> np.ndarray:
    return np.repeat(np.repeat(array, 2, 0), 2, -1)[::2, ..., ::2]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


VIEWS = [with_depth_first, reversed_in_memory, every_second, read_only, np.asfortranarray]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_strides(view, dtype):
    given = rewrites(5, 4, 9, 4, dtype=dtype)
    assert_same(all_figures(Rewrites(*map(view, given))), all_figures(given))


def test_broadcast_tokens_and_mixed_dtypes():
    one = rewrites(1, 4, 9, 4, dtype=np.float32)
    many = Rewrites(*(np.broadcast_to(array, (6, *array.shape[1:])) for array in one))
    assert_same(all_figures(many)[:7], [np.repeat(a, 6, 0) for a in all_figures(one)[:7]])
    mixed = one._replace(gates=one.gates.astype(np.float64), values=one.values.astype(np.float64))
    assert_same(all_figures(mixed)[4:7], all_figures(one)[4:7])


@pytest.mark.parametrize("sizes", [(0, 4, 6, 2), (0, 1, 1, 1)], ids=str)
def test_no_tokens(sizes):
    _, L, d, _ = sizes
    shapes = [figure.shape for figure in all_figures(rewrites(*sizes))]
    expected = [(0, L), (0,), (0, L - 1), (0,), (0, min(L, d)), (0, L + 1, L + 1), (0, L + 1)]
    assert shapes == expected


def test_the_number_of_threads_changes_no_bit():
    given = rewrites(700, 6, 24, 3)
    one = all_figures(given, threads=1)
    for threads in (2, 5, 64):
        assert_same(all_figures(given, threads=threads), one)


def test_two_python_threads_at_once():
    given = rewrites(200, 12, 64, 4)
    expected, got = all_figures(given, threads=2), {}

    def work(name: str) -> None:
        got[name] = [all_figures(given, threads=2) for _ in range(5)]

    workers = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(got) == {"a", "b"}
    for figures in (figures for runs in got.values() for figures in runs):
        assert_same(figures, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: spectra.product_singular_values(g.directions, g.gates, threads=1),
        lambda g: spectra.write_survival(*g, mean=True, threads=1),
        lambda g: spectra.coherence_matrix(g.directions, threads=1),
    ],
    ids=["product", "survival", "coherence"],
)
def test_pythons_lock_is_released(call: Callable):
    one = rewrites(1, 24, 768, 4, hard=False)
    many = Rewrites(*(np.broadcast_to(array, (2000, *array.shape[1:])) for array in one))
    assert runs_beside(lambda: call(many))


LIMITED = """
import resource, sys
import numpy as np
from ddl.lab.analysis import spectra

N, L, d, m = {sizes}
with open(sys.argv[1], "wb") as file:
    file.truncate(4 * N * (L * d + d * m))
k = np.memmap(sys.argv[1], np.float32, "r", 0, (L, N, d)).swapaxes(0, 1)
X = np.memmap(sys.argv[1], np.float32, "r", 4 * N * L * d, (N, d, m))
beta, v = np.ones((N, L), np.float32), np.ones((N, L, m), np.float32)
assert k.nbytes > 2**28 and X.nbytes > 2**26
for _ in range(2):  # buffers of numpy's linear algebra
    spectra.write_survival(k[:9], beta[:9], v[:9], X[:9], threads=1)
    spectra.product_singular_values(k[:9], beta[:9], threads=1)
status = open("/proc/self/status").read()
data = 1024 * int(status.split("VmData:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (data + 2**26, resource.RLIM_INFINITY))
try:
    np.ones(2**27, np.uint8)
except MemoryError:
    pass
else:
    sys.exit("the limit does not hold")
assert not spectra.coherence_matrix(k, threads=1).any()
assert not spectra.coherence(k, threads=1).any()
assert not spectra.effective_rank(X, threads=1).any()
assert (spectra.product_singular_values(k, beta, threads=1) == 1).all()
assert not spectra.write_survival(k, beta, v, X, mean=True, threads=1).norms.any()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits private memory as Linux does")
def test_a_memory_map_is_read_in_parts(tmp_path):
    """320 MiB of read-only, transposed maps, in a process that may allocate 64 MiB more."""
    code = LIMITED.format(sizes=(24_000, 4, 700, 1))
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "sparse")], check=True)


def test_the_extension_alone_imports_no_numpy():
    code = "import sys, ddl._native; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_numpy_it_says_so():
    code = "import sys; sys.modules['numpy'] = None; import ddl.lab.analysis.spectra"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = (
        "ModuleNotFoundError: `ddl.lab.analysis.spectra` needs numpy: pip install 'ddl-rs[train]'"
    )
    assert done.stderr.splitlines()[-1].startswith(said)  # Python 3.15 guesses at another module
