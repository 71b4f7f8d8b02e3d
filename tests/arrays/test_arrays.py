"""`ddl.arrays` computes the bits of `ddl.functional` on a CPU, and refuses with its sentences."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddl import arrays, functional
from tests.ops import test_delta_rule_refused, test_refused
from tests.support import delta_rule_cases
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.refused_cases import Case, refused
from tests.support.refused_cases import arguments as valid_arguments

DTYPES = {"float32": F32, "float64": F64, "float16": F16, "bfloat16": BF16}
BATCH, D, M = (2, 7), 37, 4
STARTS = torch.arange(BATCH[1]).eq(3).expand(BATCH)
READ = ("context", "new_value", "new_gate")
RESULTS = {
    "rewrite": ("new_state",),
    "read": READ,
    "rewrite_read": ("new_state", *READ),
    "expand": ("state",),
    "delta_rule": ("y", "final_state"),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN: a number that no operator writes is seen in every comparison."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, np.nan, dtype))


# --- results and gradients ------------------------------------------------------------------------


def rewriting(n: int | None = None, **options: Any) -> dict[str, Any]:
    return inputs(BATCH, D, M, n) | {"eps_k": 0.1} | options


def reading(compress: str, n: int | None = None, **options: Any) -> dict[str, Any]:
    state = torch.randn(*BATCH, D, M, dtype=F64)
    return {"state": state} | parameters(D, M, compress, 3, n) | options


def expanding(taps: int, **options: Any) -> dict[str, Any]:
    weight = torch.randn(D, M, taps, dtype=F64) if taps else None
    x = torch.randn(*BATCH, D, dtype=F64)
    return {"x": x, "weight": weight, "value_channels": M} | options


PROBLEMS = {
    "rewrite": lambda: rewriting(),
    "rewrite, several": lambda: rewriting(3, erase="none"),
    "read": lambda: reading("channel", norm_eps=None, context_dtype=F16),
    "read, several": lambda: reading("token", 2, value_scale=2.0, value_from="compressed"),
    "read, documents": lambda: reading(
        "token", document_starts=STARTS, value_weight=None, value_bias=None
    ),
    "rewrite_read": lambda: reading("token", document_starts=STARTS) | rewriting(),
    "rewrite_read, several": lambda: reading("channel", 2) | rewriting(2),
    "expand": lambda: expanding(0),
    "expand, documents": lambda: expanding(3, document_starts=STARTS),
    "delta_rule": lambda: delta_rule_cases.problem(g=None, state=False),
    "delta_rule, several": lambda: delta_rule_cases.problem(
        "steps", T=70, g="feature", documents=True
    ),
}


def rounded(name: str, x: Any, dtype: torch.dtype) -> Any:
    """An argument in the dtype; parameters are float32 beside float16."""
    if name == "context_dtype":
        return F64 if dtype == F64 else x
    if not isinstance(x, Tensor) or x.dtype == torch.bool:
        return x
    return x.to(F32 if dtype == F16 and name in parameters(D, M, "channel") else dtype)


def as_array(x: Any) -> Any:
    """A tensor as the array on its memory, a dtype by its name."""
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return x.view(torch.int16).numpy().view("bfloat16") if x.dtype == BF16 else x.numpy()


def assert_same_bits(got: Any, expected: Tensor) -> None:
    expected = as_array(expected)
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_bits_of_torch(problem: str, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    torch.manual_seed(0)
    operator = problem.split(",")[0]
    given = {name: rounded(name, x, DTYPES[dtype]) for name, x in PROBLEMS[problem]().items()}
    leaves = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.dtype != torch.bool}
    converted = {name: as_array(x) for name, x in given.items()}

    got = getattr(arrays, operator)(**converted)
    for leaf in leaves.values():
        leaf.requires_grad_()
    expected = getattr(functional, operator)(**given)
    if isinstance(expected, Tensor):
        got, expected = (got,), (expected,)
    else:
        assert type(got) is type(expected)
    outputs = {}
    for name, array, output in zip(RESULTS[operator], got, expected, strict=True):
        if output is None:
            assert array is None
        else:
            assert_same_bits(array, output)
            outputs[name] = output

    cotangents = {name: torch.randn_like(output) for name, output in outputs.items()}
    for names in (list(outputs), list(outputs)[-1:]):
        grads = torch.autograd.grad(
            [outputs[name] for name in names],
            list(leaves.values()),
            [cotangents[name] for name in names],
            retain_graph=True,
            materialize_grads=True,
        )
        incoming = {f"grad_{name}": as_array(cotangents[name]) for name in names}
        found = getattr(arrays, f"{operator}_vjp")(**converted, **incoming)
        assert {name for name, grad in found.items() if grad is not None} == leaves.keys()
        for name, grad in zip(leaves, grads, strict=True):
            assert_same_bits(found[name], grad)


def test_arrays_with_strides_and_scalars() -> None:
    given = {name: as_array(x) for name, x in rewriting().items()}
    memory = np.zeros(given["value"].nbytes + 1, np.uint8)
    misaligned = memory[1:].view("f8").reshape(given["value"].shape)
    misaligned[:] = given["value"]
    strided = given | {
        "state": np.asfortranarray(given["state"]),
        "direction": np.repeat(given["direction"], 2, axis=-1)[..., ::2],
        "value": misaligned,
    }
    assert not strided["direction"].flags.c_contiguous
    expected, got = arrays.rewrite(**given), arrays.rewrite(**strided)
    assert got.tobytes() == expected.tobytes()
    one = {"state": given["state"][0, 0], "direction": given["direction"][0, 0]}
    one |= {"value": given["value"][0, 0], "gate": given["gate"][0, 0], "eps_k": 0.1}
    assert arrays.rewrite(**one).tobytes() == expected[0, 0].tobytes()


# --- refusals -------------------------------------------------------------------------------------


def has_counterpart(case: Case) -> bool:
    """Whether NumPy can express it: not float8; and a dtype's name is a dtype."""
    return not any(
        isinstance(bad, np.ndarray)
        or getattr(bad, "dtype", None) == torch.float8_e4m3fn
        or (name == "context_dtype" and not isinstance(bad, torch.dtype))
        for name, bad in case.change.items()
    )


CASES = [*test_refused.ARGUMENTS, *test_refused.TENSORS, *test_delta_rule_refused.CASES]


@pytest.mark.parametrize("case", [*filter(has_counterpart, CASES)], ids=str)
def test_sentences_of_torch(case: Case) -> None:
    given = {name: as_array(x) for name, x in valid_arguments(case.name, case.change).items()}
    sentence = case.sentence.replace("a torch.Tensor", "a numpy.ndarray").replace("torch.", "")
    with refused(case.error, sentence):
        getattr(arrays, case.name)(**given)


READING = {name: as_array(x) for name, x in valid_arguments("read", {}).items()}


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            {"grad_context": np.zeros(3, "f4")},
            ValueError,
            "`grad_context` must have shape (2, 5, 4), got (3,)",
        ),
        (
            {"grad_new_gate": np.zeros((2, 5), "f2")},
            TypeError,
            "`grad_new_gate` must have dtype float32, got float16",
        ),
        ({"grad_state": 1}, TypeError, "got an unexpected keyword argument 'grad_state'"),
    ],
)
def test_gradients_that_do_not_fit(
    change: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with refused(error, sentence):
        arrays.read_vjp(**READING, **change)


def test_a_gradient_that_is_left_out_is_zero() -> None:
    assert not arrays.expand_vjp(np.ones(3), value_channels=2)["x"].any()


def test_another_byte_order() -> None:
    with refused(
        TypeError, "`state` must have dtype float32, float64, bfloat16 or float16, got >f4"
    ):
        arrays.read(READING["state"].astype(">f4"))


# --- the process ----------------------------------------------------------------------------------


def test_other_threads_run_meanwhile() -> None:
    began = threading.Event()
    q = np.ones((1, 40_000, 1, 256), "f4") / 256  # about a third of a second

    def compute() -> None:
        began.set()
        arrays.delta_rule(q, q, q, q[..., 0])

    worker, ticks = threading.Thread(target=compute), 0
    worker.start()
    began.wait()
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 20


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_torch_is_not_loaded() -> None:
    done = run(
        "import sys, numpy as np; from ddl import arrays\n"
        "print(arrays.expand(np.ones((64, 1000)), value_channels=4).sum(), 'torch' in sys.modules)"
    )
    assert (done.stdout, done.returncode) == ("256000.0 False\n", 0), done.stderr


def test_without_numpy() -> None:
    done = run("import sys; sys.modules['numpy'] = None; import ddl.arrays")
    assert (
        "ModuleNotFoundError: `ddl.arrays` needs numpy: pip install 'ddl-rs[arrays]'" in done.stderr
    )
