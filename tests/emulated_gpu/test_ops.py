"""The CUDA kernels on the emulated GPU, against the reference in float64: outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ddl import functional, reference
from tests.emulator.memory import guarded_copy
from tests.ops import test_ops, test_overflow
from tests.ops.test_ops import compare, run
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.helpers import by_name, present
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.sampling import sampled
from tests.support.tolerances import assert_close

pytestmark = needs_emulator
REWRITE = ("state", "direction", "value", "gate")
DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


# These tests of the CPU kernels run here unchanged. The larger ones have fewer cases below, because
# every size and dtype needs another kernel.
test_parameters_may_be_absent = test_ops.test_parameters_may_be_absent
test_any_mix_of_storage_types = sampled(test_ops.test_any_mix_of_storage_types)
test_any_batch_shape = test_ops.test_any_batch_shape
test_a_narrow_context = test_ops.test_a_narrow_context_does_not_narrow_what_is_read
test_halo = test_ops.test_batch_elements_do_not_see_each_other_through_the_halo
test_non_contiguous_inputs = test_ops.test_non_contiguous_inputs
test_beta_zero = test_ops.test_beta_zero_returns_the_state_bit_for_bit
test_read_options = sampled(test_ops.test_read_options, 1)
test_nan_and_inf = test_ops.test_nan_and_inf_propagate_within_their_token
test_nan_in_bfloat16 = test_ops.test_nan_reaches_the_state_in_bfloat16
test_extreme_directions = test_ops.test_extreme_directions_keep_their_unit_length
test_no_tokens = test_ops.test_no_tokens_of_any_width
test_overflow = test_overflow.test_nan_spreads_as_in_the_reference


SIZES = pytest.mark.parametrize("d", [1, 63, 100, 384, 768])
READS = pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (4, "token")])
EPS_OF_ONE = {"eps_k": 1.0, "norm_eps": 1.0}  # for d = 1: k̂ and x̂ are ±1, so gradients cancel


def tokens(d: int) -> int:
    return 70 if d < 384 else 9


@pytest.mark.table
@DTYPES
@SIZES
@READS
def test_rewrite_read(dtype, d, m, compress):
    tensors = inputs((2, tokens(d)), d, m) | parameters(d, m, compress)
    compare("rewrite_read", tensors, dtype, **EPS_OF_ONE if d == 1 else {"eps_k": 0.1})


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize(
    ("m", "compress"),
    [*((m, "channel") for m in (1, 2, 3, 8, 16)), *((m, "token") for m in (1, 2, 5))],
)
def test_value_channels(dtype, m, compress):
    compare("rewrite_read", inputs((2, 40), 64, m) | parameters(64, m, compress), dtype, eps_k=0.1)


@pytest.mark.table(1)
@DTYPES
@SIZES
@pytest.mark.parametrize("m", [1, 4])
def test_rewrite(dtype, d, m):
    compare("rewrite", inputs((2, tokens(d)), d, m), dtype, eps_k=1.0 if d == 1 else 0.1)


@pytest.mark.table(1)
@DTYPES
@SIZES
@READS
def test_read(dtype, d, m, compress):
    tensors = {"state": inputs((2, tokens(d)), d, m)["state"]} | parameters(d, m, compress)
    compare("read", tensors, dtype, norm_eps=1.0 if d == 1 else 1e-5)


@pytest.mark.table(1)
@DTYPES
@pytest.mark.parametrize(("m", "taps"), [(1, 0), (4, 0), (3, 1), (4, 4), (8, 5), (2, 12)])
def test_expand(dtype, m, taps):
    expand(dtype, 100, m, taps)


@pytest.mark.table(1)
@DTYPES
@SIZES
@pytest.mark.parametrize("taps", [0, 4])
def test_expand_of_any_size(dtype, d, taps):
    expand(dtype, d, 4, taps)


def expand(dtype, d, m, taps):
    tensors = {"x": torch.randn(2, tokens(d), d, dtype=F64)}
    if taps:
        tensors["weight"] = torch.randn(d, m, taps, dtype=F64)
    compare("expand", tensors, dtype, value_channels=m)


@pytest.mark.parametrize("x", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("weight", [F32, BF16, F16], ids=str)
def test_any_mix_of_types_of_an_expansion(x, weight):
    drawn = {
        "x": torch.randn(2, 9, 63, dtype=F64).to(x),
        "weight": torch.randn(63, 4, 3, dtype=F64).to(weight),
    }
    narrow = {n: t.requires_grad_() for n, t in drawn.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in drawn.items()}
    state = functional.expand(**narrow, value_channels=4)
    expected = reference.expand(**exact, value_channels=4)
    incoming = torch.randn_like(expected)
    state.backward(incoming.to(state.dtype))
    expected.backward(incoming.to(state.dtype).double())
    assert_close("state", state, expected, state.dtype)
    for name, tensor in narrow.items():
        expected, dtype = exact[name].grad, tensor.dtype
        assert_close(f"gradient of {name}", tensor.grad, expected, dtype, gradient=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("d", [2048, 2049])
def test_conversions_round_to_nearest_even(dtype, d):
    check_conversions(dtype, d)


def check_conversions(dtype, d):
    """Random bits, ties, subnormals, infinities and NaN, through a read that only converts them."""
    bits = torch.randint(-(2**31), 2**31, (8, d))
    bits[::2] &= ~0xFFF  # ties, in either format
    state = bits.to(torch.int32).view(F32)
    state[0, :2] = torch.tensor([float("inf"), float("nan")])
    context = functional.read(state.unsqueeze(-1), norm_eps=None, context_dtype=dtype).context
    expected = state.to(dtype)
    nan = expected.isnan()
    assert torch.equal(context.isnan(), nan)
    same = context.view(torch.int16)[~nan] == expected.view(torch.int16)[~nan]
    assert same.all(), (state[~nan][~same], context[~nan][~same])


# --- every plan ----------------------------------------------------------------------------------

SUMS = {"registers": {"SUMS": 0}, "shared": {"SUMS": 1}} | {
    f"separate-{memory}": {"SUMS": 3, "SEPARATE_SUMS": number}
    for number, memory in enumerate(["registers", "shared", "global"])
}


def every_plan(test):
    """Decorate a test to be called with the parameters of `plan_of`."""
    for name, values in {
        "compress": ["channel", "token"], "keep": [0, 1], "window": [0, 1, 2], "sums": SUMS
    }.items():  # fmt: skip
        test = pytest.mark.parametrize(name, values, ids=f"{name}-{{}}".format)(test)
    return test


def plan_of(compress, keep, window, sums):
    windows = {"WINDOW": window} if compress == "token" else {}  # no other read has one
    return {"KEEP_IN_REGISTERS": keep, "CHUNK": 7, "FEATURES": 2} | windows | SUMS[sums]


@pytest.mark.table
@every_plan
@pytest.mark.parametrize("threads", [32, 96])
def test_any_plan(compress, keep, window, sums, threads):
    with emulated(plan=plan_of(compress, keep, window, sums) | {"THREADS": threads}):
        tensors = inputs((3, 11), 100, 4) | parameters(100, 4, compress, 3)
        compare("rewrite_read", tensors, F64, eps_k=0.1)


STAGES = pytest.mark.parametrize(
    "plan",
    [{"KEEP_IN_REGISTERS": keep, "STAGES": stages} for keep in (0, 1) for stages in (0, 1, 2)],
    ids=lambda plan: f"keep{plan['KEEP_IN_REGISTERS']}-stages{plan['STAGES']}",
)


@pytest.mark.table(1)
@STAGES
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@READS
def test_rows_that_travel_ahead(dtype, m, compress, plan):
    with emulated(plan=plan | {"THREADS": 32, "CHUNK": 7}):
        tensors = inputs((3, 11), 100, m) | parameters(100, m, compress, 3)
        compare("rewrite_read", tensors, dtype, eps_k=0.1)
        compare("read", {n: t for n, t in tensors.items() if n not in REWRITE[1:]}, dtype)
        compare("rewrite", {n: tensors[n] for n in REWRITE}, dtype, eps_k=0.1)


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@READS
def test_loads_ahead_change_no_bit(dtype, m, compress):
    tensors = inputs((3, 11), 100, m) | parameters(100, m, compress, 3)
    results = []
    for load_ahead in (0, 1, 2):
        leaves = {n: None if t is None else t.to(dtype) for n, t in tensors.items()}
        real = F64 if dtype == F64 else F32
        leaves |= {n: tensors[n].to(real) for n in ("value", "gate")}
        with emulated(plan={"THREADS": 32, "CHUNK": 7, "STAGES": 0, "LOAD_AHEAD": load_ahead}):
            results.append(present(functional.rewrite_read(**leaves, eps_k=0.1)))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.table(1)
@STAGES
@pytest.mark.parametrize("used", ["state", "context"])
def test_rows_that_travel_ahead_to_a_gradient_that_is_zero(used, plan):
    tensors = inputs((3, 11), 100, 4) | parameters(100, 4, "token", 3)
    gradients = []
    for module in (functional, reference):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        with emulated(plan=plan | {"CHUNK": 7}):
            outputs = module.rewrite_read(**leaves, eps_k=0.1)
            getattr(outputs, used).square().sum().backward()
        gradients.append({name: t.grad for name, t in leaves.items()})
    for name, expected in gradients[1].items():
        actual = gradients[0][name]
        if expected is None:
            assert actual is None or not actual.any(), name
        else:
            assert_close(name, actual, expected, F64, gradient=True)


@pytest.mark.table(1)
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(("dtype", "m", "features"), [(F64, 1, 1), (BF16, 4, 2), (F32, 9, 2)])
def test_any_plan_of_an_expansion(dtype, m, features, chunk, keep):
    with emulated(
        plan={"KEEP_IN_REGISTERS": keep, "CHUNK": chunk, "THREADS": 32, "FEATURES": features}
    ):
        tensors = {"x": torch.randn(7, 19, 70, dtype=F64)}  # more chunks than blocks
        compare("expand", tensors, dtype, value_channels=m)
        for taps in (3, 8, 17):
            weight = torch.randn(70, m, taps, dtype=F64)
            compare("expand", tensors | {"weight": weight}, dtype, value_channels=m)


@pytest.mark.table(1)
@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 100])
@pytest.mark.parametrize("taps", [1, 2, 4, 9, 20])
def test_halos_of_any_length(chunk, taps):
    with emulated(plan={"CHUNK": chunk}):
        tensors = inputs((3, 11), 10, 2) | parameters(10, 2, "token", taps)
        compare("rewrite_read", tensors, F64, eps_k=0.1)
        weight = torch.randn(10, 2, taps, dtype=F64)
        x = torch.randn(3, 11, 10, dtype=F64)
        compare("expand", {"x": x, "weight": weight}, F64, value_channels=2)


@pytest.mark.table(1)
@pytest.mark.parametrize("warps", [1, 2, 3, 7, 8, 9, 12, 16, 20, 32])
@pytest.mark.parametrize(("dtype", "m"), [(F64, 1), (F32, 9), (BF16, 33)], ids=str)
def test_blocks_of_any_number_of_warps(dtype, m, warps):
    with emulated(plan={"THREADS": 32 * warps}):
        tensors = inputs((2, 3), 1056, m) | parameters(1056, m, "channel")
        compare("rewrite_read", tensors, dtype, eps_k=0.1)


@pytest.mark.table(1)
@pytest.mark.parametrize("features", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_packets_of_any_length(dtype, features):
    with emulated(plan={"FEATURES": features}):
        tensors = inputs((2, 9), 104, 3) | parameters(104, 3, "token")
        compare("rewrite_read", tensors, dtype, eps_k=0.1)


@pytest.mark.table(1)
@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize(("d", "m"), [(4096, 4), (4096, 8), (8192, 1), (8192, 4), (1024, 16)])
def test_wide_states(d, m, compress):
    with emulated(shared_per_block=227 * 1024):
        test_ops.test_wide_states(d, m, compress)


@pytest.mark.table(0)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("absent", "norm_eps"), [((), 1e-5), (("norm_weight", "gate_bias"), 1e-5), ((), None)]
)
def test_separate_parameter_sums(dtype, absent, norm_eps):
    with emulated(plan={"SUMS": 3, "CHUNK": 7}):
        for compress, d in (("channel", 100), ("token", 600)):
            tensors = inputs((2, 9), d, 4) | parameters(d, 4, compress) | dict.fromkeys(absent)
            compare("rewrite_read", tensors, dtype, eps_k=0.1, norm_eps=norm_eps)
            read = {name: t for name, t in tensors.items() if name not in REWRITE[1:]}
            compare("read", read, dtype, norm_eps=norm_eps, value_from="compressed")


def test_little_shared_memory_moves_sums_and_windows_elsewhere():
    with emulated(shared_per_block=4096):
        tensors = inputs((2, 9), 384, 4) | parameters(384, 4, "token")
        compare("rewrite_read", tensors, F32, eps_k=0.1)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.table(1)
@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize(("d", "m", "dtype"), [(63, 3, F32), (100, 4, BF16), (64, 4, F16)])
def test_no_access_outside_of_the_inputs(compress, d, m, dtype):
    tensors = {}
    for name, t in (inputs((2, 13), d, m) | parameters(d, m, compress)).items():
        kept = F32 if name in ("value", "gate") else dtype
        aligned = 16 if t.nbytes % 16 == 0 else kept.itemsize
        tensors[name] = guarded_copy(t.to(kept), aligned).requires_grad_()
    outputs = present(functional.rewrite_read(**tensors, eps_k=0.1))
    sum(output.float().sum() for output in outputs).backward()


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_unaligned_views(dtype):
    tensors = inputs((2, 9), 64, 4) | parameters(64, 4, "token")
    plain, shifted = {}, {}
    for name, t in tensors.items():
        kept = torch.float64 if dtype == F64 else F32
        plain[name] = t.to(kept if name in ("value", "gate") else dtype)
        padded = torch.cat([plain[name].new_zeros(1), plain[name].flatten()])
        shifted[name] = padded[1:].view(t.shape)
        assert shifted[name].data_ptr() % 16 != 0
    expected, actual = map(gradients_in_place, (plain, shifted))
    for name in expected:
        assert_close(name, actual[name], expected[name], dtype, gradient=True)


def gradients_in_place(tensors):
    """Outputs and gradients by name, computed on the tensors' own memory."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = by_name(functional.rewrite_read(**leaves, eps_k=0.1))
    sum(output.double().square().sum() for output in outputs.values()).backward()
    return {f"new {n}": t for n, t in outputs.items()} | {n: t.grad for n, t in leaves.items()}


# --- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["identity", "channel", "token"])
def test_results_do_not_depend_on_the_order_of_threads(compress, monkeypatch):
    check_any_order(compress, monkeypatch)


def check_any_order(compress, monkeypatch):
    """Check that outputs and gradients have the same bits in any order of threads and blocks."""
    m = 1 if compress == "identity" else 4
    drawn = inputs((2, 50), 96, m) | parameters(96, m, compress)
    tensors = {name: None if t is None else t.float() for name, t in drawn.items()}
    runs = []
    for order, threads in (("0", "1"), ("1", "1"), ("7", "2"), ("8", "1")):
        monkeypatch.setenv("DDL_EMULATOR_ORDER", order)
        monkeypatch.setenv("DDL_EMULATOR_THREADS", threads)
        runs.append(run(functional, "rewrite_read", tensors, F32, eps_k=0.1))
    for run_again in runs[1:]:
        for expected, actual in zip(runs[0], run_again, strict=True):
            assert actual.keys() == expected.keys()
            for name in expected:
                assert torch.equal(actual[name], expected[name]), name
