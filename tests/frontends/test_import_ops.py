"""Roundings of bf16, attention and layers, imported and interpreted, against eager torch; see test_operators.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

X = (5, 6)


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def _ints(*shape: int, low: int = -5, high: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


POINTWISE: dict[str, Callable[[torch.Tensor], Any]] = {
    "abs": torch.abs, "neg": torch.neg, "sign": torch.sign, "square": torch.square, "reciprocal": torch.reciprocal,
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": lambda x: torch.log(x.abs() + 0.1),
    "log2": lambda x: torch.log2(x.abs() + 0.1), "log10": lambda x: torch.log10(x.abs() + 0.1),
    "log1p": lambda x: torch.log1p(x.abs()), "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "asin": lambda x: torch.asin(x / 10), "acos": lambda x: torch.acos(x / 10), "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh, "acosh": lambda x: torch.acosh(x.abs() + 1),
    "atanh": lambda x: torch.atanh(x / 10), "erf": torch.erf, "erfc": torch.erfc, "ceil": torch.ceil,
    "floor": torch.floor, "trunc": torch.trunc, "round": torch.round, "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1), "isnan": torch.isnan, "isfinite": torch.isfinite,
    "isinf": torch.isinf, "add number": lambda x: x + 1.1, "rsub": lambda x: 3 - x, "add alpha":
    lambda x: torch.add(x, x, alpha=0.3), "div number": lambda x: x / 3, "pow 3": lambda x: x**3, "pow -2":
    lambda x: (x + 9) ** -2, "pow 0.5": lambda x: x.abs() ** 0.5, "pow 1.7": lambda x: x.abs() ** 1.7,
    "2 ** x": lambda x: 2**x, "x ** x": lambda x: x.abs() ** x, "floor divide": lambda x: x // 0.7,
    "trunc divide": lambda x: torch.div(x, 0.7, rounding_mode="trunc"), "remainder": lambda x: x % 0.7,
    "fmod": lambda x: torch.fmod(x, 0.7), "clamp": lambda x: x.clamp(-1, 0.5), "clamp min": lambda x: x.clamp(min=0.1),
    "clamp tensor": lambda x: torch.clamp(x, max=x.roll(1, 1)), "where": lambda x: torch.where(x > 0, x, -2.5),
    "masked fill": lambda x: x.masked_fill(x < 0, float("-inf")), "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "compare": lambda x: (x > 0.1) & (x <= 2) | ~(x != x.floor()) ^ (x == 0), "logical": lambda x:
    torch.logical_and(x > 0, torch.logical_not(x > 1)), "copysign": lambda x: torch.copysign(x.exp(), x), "atan2":
    lambda x: torch.atan2(x, x + 1), "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5), "addcdiv":
    lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.5), "lerp": lambda x: torch.lerp(x, x + 1, 0.3), "nan_to_num":
    lambda x: torch.nan_to_num(x / 0), "to int": lambda x: x.to(torch.int32), "to bool": lambda x: x.round().bool(),
    "to uint8": lambda x: x.abs().to(torch.uint8), "to half and back": lambda x: x.half().to(x.dtype), "to bf16":
    lambda x: x.to(torch.bfloat16), "hypot": lambda x: torch.hypot(x, x + 1), "sinc": torch.sinc, "xlogy":
    lambda x: torch.xlogy(x, x.abs() + 1), "logit": lambda x: torch.logit(x.sigmoid()), "glu": F.glu,
    "softplus": F.softplus, "gelu": F.gelu, "frac": torch.frac, "heaviside": lambda x: torch.heaviside(x, x),
}  # fmt: skip

REDUCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(), "sum dim": lambda x: x.sum(0), "sum keepdim": lambda x: x.sum((0, 1), keepdim=True),
    "mean": lambda x: x.mean(), "mean dim": lambda x: x.mean(0), "mean last": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(1), "std": lambda x: x.std(0), "var biased": lambda x: x.var(1, unbiased=False),
    "var_mean": lambda x: torch.var_mean(x, 1), "amax": lambda x: x.amax(1), "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(), "max dim": lambda x: x.max(1), "min dim": lambda x: x.min(0, keepdim=True),
    "prod": lambda x: x.prod(1), "logsumexp": lambda x: x.logsumexp(1), "norm": lambda x: x.norm(dim=1),
    "normalize": lambda x: F.normalize(x, dim=1), "softmax": lambda x: x.softmax(0), "log_softmax":
    lambda x: x.log_softmax(0), "cumsum": lambda x: x.cumsum(0), "topk": lambda x: x.topk(3, 1), "argmax":
    lambda x: x.argmax(), "argmin": lambda x: x.argmin(1, keepdim=True), "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)), "cosine": lambda x: F.cosine_similarity(x, x + 1, dim=1), "any":
    lambda x: (x > 2).any(), "group_norm": lambda x: F.group_norm(x, 2),
}  # fmt: skip


class _Table(nn.Module):
    """Every function of a table on one input: one export for all."""

    def __init__(self, table: dict[str, Callable[[torch.Tensor], Any]]) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {name: function(x) for name, function in self.table.items()}


def _without(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: function for name, function in table.items() if name not in names}


# What torch's own composition rounds in more places than one, or what differs by torch's vector lanes.
LOOSE_IN_BF16 = (
    "erfc", "sinc", "hypot", "xlogy", "logit", "lerp", "tan", "add alpha", "to half and back", "nan_to_num",
    "heaviside", "2 ** x", "copysign", "asinh", "rsqrt",
)  # fmt: skip


def test_pointwise_operators_round_bf16_where_torch_does(check: Any) -> None:
    check(_Table(_without(POINTWISE, *LOOSE_IN_BF16)), _floats(*X).bfloat16(), tolerance=5e-5)


def test_reductions_in_bf16_round_once(check: Any) -> None:
    table = {name: REDUCE[name] for name in ("sum", "sum dim", "mean dim", "amax", "cumsum", "softmax", "layer_norm")}
    check(_Table(table), _floats(*X).bfloat16(), tolerance=2e-3)


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_attention_equals_torch(options: dict[str, Any], check: Any) -> None:
    check(_Attention(**options), _floats(2, 3, 5, 8), _floats(2, 3, 5, 8, seed=1), _floats(2, 3, 5, 4, seed=2))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (2, 3, 1, 7), (3, 5, 7)])
def test_attention_with_a_mask_equals_torch(kind: str, shape: tuple[int, ...], check: Any) -> None:
    mask = _floats(*shape, seed=4)
    if kind == "bool":
        mask = mask > -1
        mask[..., 0] = True
    check(_Attention(), _floats(2, 3, 5, 8), _floats(2, 3, 7, 8, seed=1), _floats(2, 3, 7, 8, seed=2), mask)


def test_attention_of_rank_3_and_5_equals_torch(check: Any) -> None:
    check(_Attention(), _floats(2, 5, 8), _floats(2, 7, 8, seed=1), _floats(2, 7, 8, seed=2))
    check(_Attention(), _floats(2, 2, 3, 5, 8), _floats(2, 2, 3, 7, 8, seed=1), _floats(2, 2, 3, 7, 8, seed=2))


def test_grouped_query_attention_equals_torch(check: Any) -> None:
    model = _Attention(enable_gqa=True)
    check(model, _floats(2, 6, 5, 8), _floats(2, 2, 5, 8, seed=1), _floats(2, 2, 5, 8, seed=2))


@pytest.mark.parametrize(("q", "k", "v", "mask"), [
    ((2, 4), (2, 1), (2, 1), ()),  # multi-query: one key head
    ((2, 4), (1, 4), (1, 1), (2, 1)),  # keys and values of the whole batch
    ((1, 1), (2, 4), (2, 4), (4,)),
    ((3, 2, 4), (2, 1), (1, 2, 1), (2, 4)),  # more batch dims, in front
], ids=str)  # fmt: skip
def test_attention_broadcasts_batch_and_heads_as_torch_does(q: Any, k: Any, v: Any, mask: Any, check: Any) -> None:
    operands = _floats(*q, 5, 8), _floats(*k, 7, 8, seed=1), _floats(*v, 7, 8, seed=2), _floats(*mask, 5, 7, seed=4)
    check(_Attention(), *operands)


def test_attention_of_rank_3_has_a_dynamic_batch(check: Any) -> None:
    dims = ({0: ("b", 1, 8)},) * 3
    check(_Attention(), *(_floats(3, n, 8, seed=n) for n in (5, 7, 7)), dynamic=dims)


@pytest.mark.parametrize("mask", [None, (5, 7), (2, 3, 1, 7), (3, 5, 7)], ids=str)
def test_heads_whose_number_is_not_fixed_are_a_batch(mask: Any, check: Any) -> None:
    """Inkling 2 attends over its layers, at each position: the tokens stand where heads do."""
    operands = [_floats(2, 3, n, 8, seed=n) for n in (5, 7, 7)]
    heads = {1: ("s", 1, 8)}
    given = [] if mask is None else [_floats(*mask, seed=4)]
    dims = (heads,) * 3 if mask is None else (*(heads,) * 3, {len(mask) - 3: ("s", 1, 8)} if len(mask) > 2 else None)
    check(_Attention(), *operands, *given, dynamic=dims)


@pytest.mark.parametrize("layer", [
    nn.Linear(6, 4), nn.Linear(6, 4, bias=False), nn.LayerNorm(6), nn.RMSNorm(6), nn.BatchNorm1d(6),
    nn.LayerNorm((5, 6)), nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), nn.GroupNorm(2, 6),
], ids=str)  # fmt: skip
def test_layers_equal_torch(layer: nn.Module, check: Any) -> None:
    torch.manual_seed(0)
    for parameter in (*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())):
        parameter.data = torch.rand_like(parameter) + 0.2
    check(layer, _floats(*X), tolerance=2e-6)


def test_multihead_attention_and_transformer_layers_equal_torch(check: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    others = ((_floats(1, 1, 16),), (_floats(3, 11, 16),))
    check(layer, _floats(2, 5, 16), dynamic=({0: ("b", 1, 8), 1: ("s", 1, 32)},), others=others, tolerance=2e-6)
