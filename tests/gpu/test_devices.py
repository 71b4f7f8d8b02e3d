"""Every GPU of a machine, used alternately in one process: those of one type, and of several."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from ddl import DeltaResidual, cuda
from tests.ops.test_ops import gradient_scale
from tests.support.gpu_device import Tensors, arguments, backward, cotangents, forward
from tests.support.tolerances import assert_close

F32, BF16 = torch.float32, torch.bfloat16
READS = pytest.mark.parametrize("compress", ["channel", "token"])
CPU = torch.device("cpu")


def gpus() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def one_of_each_type() -> list[torch.device]:
    """The first GPU of every compute capability; skips the test if there is only one."""
    chosen = {torch.cuda.get_device_capability(gpu): gpu for gpu in reversed(gpus())}
    if len(chosen) < 2:
        found = ", ".join(f"{major}.{minor}" for major, minor in chosen)
        pytest.skip(f"needs GPUs of two compute capabilities, and all here have {found}")
    return list(chosen.values())


def moved(tensors: Tensors, device: torch.device, dtype: torch.dtype | None = None) -> Tensors:
    return {n: t.detach().to(device, dtype or t.dtype) for n, t in tensors.items()}


def leaves_of(tensors: Tensors) -> Tensors:
    return {n: t.requires_grad_() for n, t in tensors.items()}


def results(leaves: Tensors, incoming: Tensors) -> tuple[Tensors, Tensors]:
    """Outputs and gradients, both on the device of the arguments."""
    outputs = forward(leaves)
    grads = backward(outputs, leaves, incoming)
    device = leaves["state"].device
    assert {t.device for t in (*outputs.values(), *grads.values())} == {device}
    return outputs, grads


def there_and_back(devices: list[torch.device]) -> Iterable[torch.device]:
    return (*devices, *reversed(devices))


def check_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name].to(CPU), expected[name].to(CPU)), name


@READS
def test_gpus_of_one_type_agree_bit_for_bit(compress: str) -> None:
    """Also on a device that is not the current one, and on two alternately."""
    name = torch.cuda.get_device_name(0)
    alike = [gpu for gpu in gpus() if torch.cuda.get_device_name(gpu) == name]
    if len(alike) < 2:
        pytest.skip(f"needs two GPUs of one type, and there is one {name}")
    first = arguments((2, 65), 96, 4, compress, F32)
    incoming = cotangents(forward(first))
    every = {gpu: leaves_of(moved(first, gpu)) for gpu in alike}
    expected = results(first, incoming)
    for gpu in there_and_back(alike):
        for actual, wanted in zip(results(every[gpu], moved(incoming, gpu)), expected, strict=True):
            check_equal(actual, wanted)


@READS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("d", [96, 4096])
def test_gpus_of_different_types(d: int, dtype: torch.dtype, compress: str) -> None:
    """Clusters and shared memory differ, and so does the order of sums: no bits are compared."""
    check_against_float64(one_of_each_type(), d, dtype, compress)


def check_against_float64(
    devices: list[torch.device], d: int, dtype: torch.dtype, compress: str
) -> None:
    """Compare each device with the CPU in float64, and with itself after the others' turns."""
    first = arguments((2, 65), d, 4, compress, dtype, devices[0])
    incoming = cotangents(forward(first))
    exact = leaves_of(moved(first, CPU, torch.float64))
    expected, grads = results(exact, moved(incoming, CPU, torch.float64))
    every = {device: leaves_of(moved(first, device)) for device in devices}
    before: dict[torch.device, tuple[Tensors, Tensors]] = {}
    for device in there_and_back(devices):
        actual = results(every[device], moved(incoming, device))
        for same, again in zip(before.setdefault(device, actual), actual, strict=True):
            check_equal(again, same)
        for n, t in actual[0].items():
            assert_close(f"{device}: {n}", t.to(CPU), expected[n], dtype)
        for n, t in actual[1].items():
            scale = gradient_scale(n, grads)
            label = f"{device}: gradient of {n}"
            assert_close(label, t.to(CPU), grads[n], dtype, gradient=True, scale=scale)


def test_each_type_gets_code_of_its_own() -> None:
    for device in one_of_each_type():
        major, minor = torch.cuda.get_device_capability(device)
        x, context = torch.zeros(2, 8, device=device), torch.zeros(2, 8, device=device)
        kernels = cuda.warmup(DeltaResidual(8).to(device), x, x, context=context)
        (architecture,) = {kernel.architecture for kernel in kernels}
        kind, number = architecture.split("_")
        assert int(number) <= 10 * major + minor
        assert kind == "compute" or int(number) // 10 == major
