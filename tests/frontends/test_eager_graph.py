"""The graph of a model runs in eager torch, whatever layouts torch's operators give there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qcompiler.config import QuantConfig
from qcompiler.frontends.quantise.insert_qdq import insert_qdq
from qcompiler.frontends.torch.capture.export import export_model


class Of(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), (call,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call[0](self.layers, x)


WIDE = (2, 5, 8)
IMAGE = (2, 6, 5, 8)
MODELS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "transpose, conv1d, group norm": (
        WIDE,
        lambda: Of(lambda m, x: m[1](m[0](x.transpose(1, 2))), nn.Conv1d(8, 6, 3), nn.GroupNorm(2, 6)),
    ),
    "transpose, conv1d, reshape": (
        WIDE,
        lambda: Of(lambda m, x: m[0](x.transpose(1, 2)).reshape(2, -1), nn.Conv1d(8, 6, 3)),
    ),
    "channels last, conv2d, group norm": (
        IMAGE,
        lambda: Of(lambda m, x: m[1](m[0](x.permute(0, 3, 1, 2))), nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4)),
    ),
    "channels last, conv2d, reshape": (
        IMAGE,
        lambda: Of(lambda m, x: m[0](x.permute(0, 3, 1, 2)).reshape(2, -1), nn.Conv2d(8, 4, 3)),
    ),
    "channels last, depthwise, pool, reshape": (
        IMAGE,
        lambda: Of(
            lambda m, x: F.max_pool2d(m[0](x.permute(0, 3, 1, 2)), 2).reshape(2, -1),
            nn.Conv2d(8, 8, 3, groups=8, padding=1),
        ),
    ),
    "transposed convolution, instance norm": (
        WIDE,
        lambda: Of(
            lambda m, x: m[1](m[0](x.transpose(1, 2))).flatten(), nn.ConvTranspose1d(8, 6, 3), nn.InstanceNorm1d(6)
        ),
    ),
    "attention, reshape": (
        IMAGE,
        lambda: Of(lambda m, x: F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(2, 5, -1).reshape(-1)),
    ),
    "interpolate of channels last, reshape": (
        IMAGE,
        lambda: Of(
            lambda m, x: F.interpolate(m[0](x.permute(0, 3, 1, 2)), scale_factor=2.0).reshape(2, -1), nn.Conv2d(8, 4, 1)
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quant", [None, QuantConfig("int8", promise_bits=None)])
def test_the_oracle_runs_where_eager_torch_lays_out_otherwise_than_the_trace(
    name: str, quant: QuantConfig | None
) -> None:
    shape, make = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(shape)
    oracle = insert_qdq(export_model(model, (x,)), quant).module
    with torch.no_grad():
        assert torch.allclose(oracle(x), model(x), atol=1e-5 if quant is None else 0.1)
