"""Stand-ins for the libraries that benchmarks/gpu times beside ours, in plain PyTorch.

They have the names, signatures, shapes, dtypes and side effects of liger-kernel 0.8.5, tile-kernels
1.0.0 and the authors' code at d1f7621.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16, F32 = torch.bfloat16, torch.float32


def install(name: str, folder: Path, patch: pytest.MonkeyPatch) -> str | None:
    """Make a library importable; the folder to give, for the authors' code."""
    for module in [module for module in sys.modules if module.partition(".")[0] == "model"]:
        patch.delitem(sys.modules, module)
    if name == "authors":
        patch.setattr(sys, "path", list(sys.path))
        for file, exported in AUTHORS.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(f"from {__name__} import {exported} as {exported}\n")
        return str(folder)
    for path, exported in MODULES.get(name, {}).items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            at = ".".join(parts[:end])
            if at not in sys.modules:
                patch.setitem(sys.modules, at, ModuleType(at))
        for function in exported:
            setattr(sys.modules[path], function, globals()[function])
    return None


# --- the authors' code ------------------------------------------------------------------------


class FusedDeepDeltaFunction:
    @staticmethod
    def apply(
        x: Tensor, k_in: Tensor, v_in: Tensor, context: Tensor, W_v: Tensor, b_v: Tensor,
        W_beta: Tensor, b_beta: Tensor, config_k_eps: float, config_v_scale: float,
    ) -> Tensor:  # fmt: skip
        assert k_in.shape == v_in.shape == context.shape == x.shape[:-1]
        k = k_in.float()
        k = k / (k.square().sum(-1, keepdim=True) + config_k_eps**2).sqrt()
        v = config_v_scale * F.linear(v_in.float(), W_v.float(), b_v.float()).sigmoid()
        beta = 2 * F.linear(context.float(), W_beta.float(), b_beta.float()).sigmoid()
        delta = v - torch.einsum("btd,btdm->btm", k, x.float())
        return (x.float() + beta.unsqueeze(-1) * k.unsqueeze(-1) * delta.unsqueeze(-2)).to(x.dtype)


class CcResidualShortConvCompressor(nn.Module):
    def __init__(
        self, config: Any, *, implementation: str = "torch", module_name: str = "DDL"
    ) -> None:
        super().__init__()
        assert implementation == "triton_required"
        kernel_size = int(getattr(config, "ddl_state_shortconv_kernel_size", 4))
        self.weight = nn.Parameter(torch.full((config.hidden_size, kernel_size), 1 / kernel_size))
        self.read = nn.Parameter(torch.full((config.ddl_value_channels,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        taps = self.weight.float().unsqueeze(1)  # (d, 1, K), over the channels
        left = (taps.shape[-1] - 1) // 2
        padded = F.pad(x.float().flatten(0, 1), (left, taps.shape[-1] - 1 - left))
        mixed = F.conv1d(padded, taps, groups=len(taps))
        return (mixed @ self.read.float()).view(x.shape[:-1]).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False,
        eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps=eps)


AUTHORS = {
    "model/DDL_utils.py": "FusedDeepDeltaFunction",
    "model/modules/ddl_shortconv.py": "CcResidualShortConvCompressor",
    "model/modules/rmsnorm.py": "RMSNorm",
}


# --- mHC --------------------------------------------------------------------------------------


def weights(
    z: Tensor, scales: list[Tensor], base: Tensor, pre_eps: float, eps: float, post: float, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of reads and writes, and the mixing: Sinkhorn's n iterations, columns first."""
    pre, joins, mix = (z[..., :4], z[..., 4:8], z[..., 8:])
    mix = (mix * scales[2] + base[8:]).unflatten(-1, (4, 4)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(n - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    pre = (pre * scales[0] + base[:4]).sigmoid() + pre_eps
    return pre, post * (joins * scales[1] + base[4:8]).sigmoid(), mix


def mapped(state: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = state.float().flatten(-2)
    return F.linear(flat, weight.float()) * (flat.square().mean(-1, keepdim=True) + eps).rsqrt()


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert x.dtype == phi.dtype == BF16, "x should be BF16/FP16 (set allow_fp32=True for FP32)"
    assert phi.shape == (x.shape[-2] * x.shape[-1], *b.shape)
    assert phi.is_contiguous(), "phi must be contiguous"
    scales = [alpha_pre, alpha_post, alpha_res]
    return weights(mapped(x, phi.mT, rms_eps), scales, b, pre_eps, sinkhorn_eps, post_mult, tmax)


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    return torch.einsum("...n,...nd->...d", h_pre, x.float()).to(x.dtype)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    mixed = torch.einsum("...oi,...id->...od", h_res, x.float())
    return (mixed + h_post.unsqueeze(-1) * f_out.float().unsqueeze(-2)).to(x.dtype)


class _Pre(torch.autograd.Function):
    """Adds its gradient to the one that the next `mhc_post` left, in place, and returns none."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, *given: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(residual, *given[:3])
        ctx.numbers = given[3:]
        return _Pre.computed(residual, *given)

    @staticmethod
    def computed(
        residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, pre_eps: float,
        sinkhorn_eps: float, post_mult_value: float, sinkhorn_repeat: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        z = mapped(residual, fn, norm_eps)
        numbers = (pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat)
        pre, post, mix = weights(z, list(scale), base, *numbers)
        read = torch.einsum("btn,btnd->btd", pre, residual.float()).to(BF16)
        return read, post.unsqueeze(-1), mix

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = _Pre.computed(*inputs, *ctx.numbers)
        of_residual, *others = torch.autograd.grad(outputs, inputs, incoming)
        storage: Any = ctx.saved_tensors[0].untyped_storage()
        storage.grad_from_mhc_post.add_(of_residual)
        del storage.grad_from_mhc_post
        return None, *others, *[None] * len(ctx.numbers)


def mhc_pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *,
    norm_weight: Tensor | None = None, norm_eps: float = 1e-6, mhc_mult: int = 4,
    post_mult_value: float = 1.0, pre_eps: float = 1e-6, sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10, n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    assert (residual.dtype, fn.dtype, scale.dtype, base.dtype) == (BF16, F32, F32, F32)
    numbers = (norm_eps, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat)
    read, post, mix = _Pre.apply(residual, fn, scale, base, *numbers)
    return read, (post, mix)


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert (x.dtype, residual.dtype) == (BF16, BF16)
    assert (post_layer_mix.dtype, comb_res_mix.dtype) == (F32, F32)
    assert post_layer_mix.shape == (*residual.shape[:-1], 1)
    mixed = torch.einsum("btio,btid->btod", comb_res_mix, residual.float())
    return (mixed + x.float().unsqueeze(-2) * post_layer_mix).to(BF16)


MODULES = {
    "liger-kernel": {
        "liger_kernel.transformers.functional": (
            "liger_mhc_coeffs", "liger_mhc_pre", "liger_mhc_post_res",
        ),
    },
    "tile-kernels": {
        "tile_kernels.modeling.mhc": ("mhc_pre",),
        "tile_kernels.modeling.mhc.ops": ("mhc_post",),
    },
}  # fmt: skip
