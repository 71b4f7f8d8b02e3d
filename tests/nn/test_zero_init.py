"""Zero-initialised output projections train: k is exactly 0, and gradients have the usual size.

With ε_k = 1e-5, as in the papers' code, the gradient of such a projection is multiplied by 1e5.
The default, ε_k = 0.02·√d, bounds that; the docstring of DeltaResidual gives the reason.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl import DeltaStream

D, HEADS, LAYERS, VOCABULARY = 96, 4, 4, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        split = (*h.shape[:2], 3, HEADS, D // HEADS)
        q, k, v = self.qkv(h).view(split).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(h.shape))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D, 8 * D // 3, bias=False) for _ in range(2))
        self.out = nn.Linear(8 * D // 3, D, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(h)) * self.up(h))


class LanguageModel(nn.Module):
    """Embedding, trunk, tied head; matrices start normal, std 0.5/√d, or with zero outputs."""

    def __init__(self, *, zero: bool, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        sublayers = [kind() for _ in range(LAYERS) for kind in (Attention, MLP)]
        self.stream = DeltaStream(D, sublayers, **options)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for sublayer in sublayers:
            for parameter in sublayer.parameters():
                nn.init.normal_(parameter, std=0.5 / math.sqrt(D))
            if zero:
                nn.init.zeros_(sublayer.out.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        h = self.stream(self.embedding(tokens[:, :-1]))
        logits = (h @ self.embedding.weight.mT).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make(dtype: torch.dtype, *, zero: bool, **options: Any) -> tuple[LanguageModel, Tensor]:
    torch.manual_seed(0)
    model = LanguageModel(zero=zero, **options).to(dtype)
    tokens = torch.randint(VOCABULARY, (4, 1)) + 3 * torch.arange(33)  # rows count in threes
    return model, tokens % VOCABULARY


def gradient_norm(model: nn.Module) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_finite_and_of_the_size_of_a_normal_start(m: int, dtype: torch.dtype) -> None:
    norms = []
    for zero in (False, True):
        model, tokens = make(dtype, zero=zero, value_channels=m)
        model.loss(tokens).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        norms.append(gradient_norm(model))
        outputs = [sublayer.out.weight.grad for sublayer in model.stream.sublayers]
        assert all(gradient.any() for gradient in outputs)
    normal, zero = norms
    assert normal / 30 < zero < 30 * normal


def test_the_eps_k_of_the_papers_code_does_not_pass() -> None:
    """This shows that the bound above can fail."""
    norms = []
    for eps_k in (None, 1e-5):
        model, tokens = make(torch.float32, zero=True, value_channels=4, eps_k=eps_k)
        model.loss(tokens).backward()
        norms.append(gradient_norm(model))
    assert norms[1] > 1000 * norms[0]


@pytest.mark.table(0)
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_falls(m: int, dtype: torch.dtype) -> None:
    """Clipped gradient descent: an optimiser's state could hide a gradient's size."""
    model, tokens = make(dtype, zero=True, value_channels=m)
    losses = []
    for _ in range(40):
        loss = model.loss(tokens)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.5 * parameter.grad)
        losses.append(loss.item())
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.3
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 1, losses
    assert all(sublayer.out.weight.any() for sublayer in model.stream.sublayers)
