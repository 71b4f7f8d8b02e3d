"""A new stream computes the additive one, up to the ε of norms and of Sinkhorn's sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl.lab.config import GPTConfig
from ddl.models import GPT
from ddl.models.streams.attention_residual import AttentionResidualStream
from ddl.models.streams.connected import ConnectedStream
from tests.support.helpers import normal

CONFIG = GPTConfig(
    "additive", vocab_size=40, block_size=8, num_layers=3, num_heads=2, hidden_size=16
)
IDX = torch.arange(8)[None]


def logits(residual: Any, **options: Any) -> Tensor:
    """Of a new model whose maps are 0."""
    torch.manual_seed(3)
    model = GPT(replace(CONFIG, residual=residual, **options)).double()
    stream = model.trunk
    for module in stream.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 0.0
    with torch.no_grad():
        if isinstance(stream, ConnectedStream):
            for part in (*stream.connections, stream.head):
                part.map.zero_()
        if isinstance(stream, AttentionResidualStream):
            assert not any(query.any() for query in stream.queries)
        model.wte.weight.mul_(50)  # so that the ε in the norms of attention counts for little
    return model(IDX).logits


@pytest.mark.parametrize(
    ("residual", "options"),
    [
        ("mhc", {}),
        ("mhc", {"value_channels": 1}),
        ("independent-hc", {}),
        ("independent-hc", {"value_channels": 3}),
        ("attention-residual", {"sublayers_per_block": 1}),
        ("attention-residual", {"sublayers_per_block": 4}),
        ("additive-conv", {}),
    ],
)
def test_with_zeroed_maps_it_is_the_additive_stream(residual: str, options: dict[str, Any]) -> None:
    expected, found = logits("additive"), logits(residual, **options)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * scale)


def test_the_gated_residual_reads_half_of_the_mean() -> None:
    model = GPT(replace(CONFIG, residual="gated")).double()
    assert isinstance(model.trunk, ConnectedStream)
    connection = model.trunk.connections[0]
    with torch.no_grad():
        for name, parameter in connection.named_parameters():
            if "norm" not in name:
                parameter.zero_()
    x = normal(1, 2, 16)
    read, mixed, join, mix = connection(x.unsqueeze(-2).expand(1, 2, 4, 16))
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(read, unit / 2)
    torch.testing.assert_close(join, torch.ones(1, 2, 4, dtype=torch.float64))
    assert mix is None
    assert torch.equal(mixed, x.unsqueeze(-2).expand(1, 2, 4, 16))


def test_the_rank_and_the_number_of_sums_that_none_stands_for() -> None:
    """Qwen4's 320 of 2,048; at most 8 sums of outputs."""
    config = replace(CONFIG, hidden_size=2048, num_heads=16)
    assert replace(config, residual="gated").gated_size == 320
    assert replace(config, residual="gated", gated_rank=7).gated_size == 7
    sums = {
        layers: replace(CONFIG, residual="attention-residual", num_layers=layers).summed_sublayers
        for layers in (1, 4, 5, 12, 24)
    }
    assert sums == {1: 1, 4: 1, 5: 2, 12: 3, 24: 6}
