"""The operators that import knows, in use: tables of small functions, many of which share one program.

A function takes `d`, the inputs by name: `f, g` floats, `p` floats in (0, 1), `i, j` integers, `n` integers in [0, 5),
`b` booleans, all (rows, 6); `x` images (rows, 4, 8, 6).  `GROUPS` says with which inputs and bounds a table is checked.
Operators that no function of torch reaches by itself are called by their ATen name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

aten = torch.ops.aten
INF = float("inf")
Case = Callable[[Any], Any]
Table = dict[str, Case]

# --- inputs ----------------------------------------------------------------------------------------------------------


def inputs(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Distinct floats, so that orders are unique; small integers."""
    made = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        spread = (torch.randperm(count, generator=made).reshape(shape) - count / 2 + 0.25) * (5 / count)
        return spread.to(dtype)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, 6), generator=made)

    return {
        "f": floats(rows, 6), "g": floats(rows, 6), "p": torch.rand(rows, 6,
        generator=made).mul(0.9).add(0.05).to(dtype), "i": integers(-5, 6), "j": integers(-5, 6), "n": integers(0, 5),
        "b": torch.rand(rows, 6, generator=made) > 0.5, "x": floats(rows, 4, 8, 6),
    }  # fmt: skip


class Functions(nn.Module):
    """Every function of a table on the same inputs: one export and one program for all."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: function(SimpleNamespace(**tensors)) for name, function in self.table.items()}


class Layers(nn.Module):
    """Modules with parameters, each on the inputs that its function picks."""

    def __init__(self, layers: dict[str, tuple[nn.Module, Case]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: layer for name, (layer, _) in layers.items()})
        self.pick = {name: pick for name, (_, pick) in layers.items()}
        for each in (*self.parameters(), *self.buffers()):
            if each.is_floating_point():
                each.data = torch.rand_like(each) * 0.5 + 0.2

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: layer(self.pick[name](SimpleNamespace(**tensors))) for name, layer in self.layers.items()}


@dataclass(frozen=True)
class Group:
    """A table with the inputs it reads, and how close results must be (relative L2; integers are exact).

    `rows`: the first one is the example, and with `dynamic` the others are run, too (the dimension is then dynamic).
    """

    table: Table = field(default_factory=dict)
    reads: tuple[str, ...] = ("f", "g", "p")
    dynamic: bool = True
    rows: tuple[int, ...] = (5, 1, 11)
    tolerance: float = 2e-6
    dtype: torch.dtype = torch.float32
    layers: Callable[[], dict[str, tuple[nn.Module, Case]]] | None = None

    def module(self) -> nn.Module:
        built = Functions(self.table) if self.layers is None else Layers(self.layers())
        return built.eval()

    def tensors(self, rows: int) -> dict[str, torch.Tensor]:
        made = inputs(rows, seed=rows, dtype=self.dtype)
        return {name: made[name] for name in self.reads}

    def dynamic_shapes(self) -> Any:
        return ({name: {0: ("b", 1, 16)} for name in self.reads},) if self.dynamic else None


# --- one element at a time -------------------------------------------------------------------------------------------

POINTWISE: Table = {
    "abs": lambda d: d.f.abs(), "neg": lambda d: -d.f, "sign": lambda d: d.f.sign(), "sgn": lambda d: d.f.sgn(),
    "square": lambda d: d.f.square(), "reciprocal": lambda d: d.f.reciprocal(), "exp": lambda d: d.f.exp(), "exp2":
    lambda d: d.f.exp2(), "expm1": lambda d: d.f.expm1(), "log": lambda d: d.p.log(), "log2": lambda d: d.p.log2(),
    "log10": lambda d: d.p.log10(), "log1p": lambda d: d.p.log1p(), "sin": lambda d: d.f.sin(), "cos": lambda d:
    d.f.cos(), "tan": lambda d: d.f.tan(), "asin": lambda d: d.p.asin(), "acos": lambda d: d.p.acos(), "atan": lambda
    d: d.f.atan(), "sinh": lambda d: d.f.sinh(), "cosh": lambda d: d.f.cosh(), "tanh": lambda d: d.f.tanh(), "asinh":
    lambda d: d.f.asinh(), "acosh": lambda d: (d.p + 1).acosh(), "atanh": lambda d: d.p.atanh(), "erf": lambda d:
    d.f.erf(), "erfc": lambda d: d.f.erfc(), "erfinv": lambda d: d.p.erfinv(), "ceil": lambda d: d.f.ceil(), "floor":
    lambda d: d.f.floor(), "trunc": lambda d: d.f.trunc(), "round": lambda d: d.f.round(), "round decimals": lambda d:
    (d.f.round(decimals=1), d.f.round(decimals=-1)), "sqrt": lambda d: d.p.sqrt(), "rsqrt": lambda d: d.p.rsqrt(),
    "frac": lambda d: d.f.frac(), "signbit": lambda d: d.f.signbit(), "isnan": lambda d: (d.f / (d.f - d.f)).isnan(),
    "isfinite": lambda d: (d.f / 0).isfinite(), "isinf": lambda d: (d.f / 0).isinf(), "isposinf": lambda d:
    torch.isposinf(d.f / 0), "isneginf": lambda d: torch.isneginf(d.f / 0), "nan_to_num": lambda d: (d.f /
    0).nan_to_num(1.0, 2.0, 3.0), "sigmoid": lambda d: d.f.sigmoid(), "logit": lambda d: d.p.logit(), "sinc": lambda d:
    d.f.sinc(), "deg2rad": lambda d: torch.deg2rad(d.f), "positive": lambda d: +d.f, "add number": lambda d: d.f + 1.1,
    "rsub": lambda d: 3 - d.f, "add alpha": lambda d: torch.add(d.f, d.g, alpha=0.3), "sub": lambda d: d.f - d.g,
    "mul": lambda d: d.f * d.g, "div": lambda d: d.f / d.p, "div number": lambda d: d.f / 3, "pow 3": lambda d: d.f**3,
    "pow -2": lambda d: (d.f + 9) ** -2, "pow 0.5": lambda d: d.p**0.5, "pow 1.7": lambda d: d.p**1.7, "2 ** x": lambda
    d: 2**d.f, "x ** y": lambda d: d.p**d.f, "float_power": lambda d: torch.float_power(d.p, 2).float(), "ldexp":
    lambda d: torch.ldexp(d.f, d.g.round()), "floor divide": lambda d: d.f // 0.7, "floor divide tensor": lambda d: d.f
    // d.g, "trunc divide": lambda d: torch.div(d.f, d.p, rounding_mode="trunc"), "remainder": lambda d: d.f % 0.7,
    "remainder tensor": lambda d: d.f % d.g, "remainder of number": lambda d: 3.5 % d.g, "fmod": lambda d:
    torch.fmod(d.f, 0.7), "fmod tensor": lambda d: torch.fmod(d.f, d.g), "maximum": lambda d: torch.maximum(d.f, d.g),
    "minimum": lambda d: torch.minimum(d.f, d.g), "fmax": lambda d: torch.fmax(d.f / (d.f - d.f), d.g), "fmin": lambda
    d: torch.fmin(d.g, d.f / (d.f - d.f)), "clamp": lambda d: d.f.clamp(-1, 0.5), "clamp min": lambda d:
    d.f.clamp(min=0.1), "clamp max": lambda d: d.f.clamp_max(0.1), "clamp tensor": lambda d: d.f.clamp(d.g, d.p + 5),
    "clamp max tensor": lambda d: torch.clamp(d.f, max=d.g), "where": lambda d: torch.where(d.f > 0, d.f, -2.5),
    "where tensor": lambda d: torch.where(d.f > d.g, d.f, d.g), "masked fill": lambda d: d.f.masked_fill(d.f < 0,
    -INF), "masked fill tensor": lambda d: d.f.masked_fill(d.f < 0, d.g[0, 0]), "compare": lambda d: (d.f > 0.1) & (d.f
    <= 2) | ~(d.f != d.f.floor()) ^ (d.f == 0), "compare tensor": lambda d: ((d.f > d.g) | (d.f >= d.p)) ^ ((d.f < d.p)
    & (d.f <= d.g)), "isclose": lambda d: torch.isclose(d.f, d.f + 1e-9), "logical": lambda d: torch.logical_and(d.f >
    0, torch.logical_not(d.f > 1)), "logical floats": lambda d: (torch.logical_or(d.f, d.g),
    torch.logical_xor(d.f.round(), d.g.round())), "copysign": lambda d: torch.copysign(d.p, d.f), "copysign number":
    lambda d: torch.copysign(d.f, -1.0), "atan2": lambda d: torch.atan2(d.f, d.g), "hypot": lambda d: torch.hypot(d.f,
    d.g), "addcmul": lambda d: torch.addcmul(d.f, d.g, d.p, value=0.5), "addcdiv": lambda d: torch.addcdiv(d.f, d.g,
    d.p, value=0.5), "lerp": lambda d: torch.lerp(d.f, d.g, 0.3), "lerp tensor": lambda d: torch.lerp(d.f, d.g, d.p),
    "xlogy": lambda d: torch.xlogy(d.f, d.p), "logaddexp": lambda d: torch.logaddexp(d.f, d.g), "heaviside": lambda d:
    torch.heaviside(d.f, d.g), "to int": lambda d: d.f.to(torch.int32), "to bool": lambda d: d.f.round().bool(),
    "to uint8": lambda d: (d.p * 9).to(torch.uint8), "to half": lambda d: d.f.half(), "to bf16": lambda d:
    d.f.to(torch.bfloat16), "to f64": lambda d: d.f.double() / 3, "fill": lambda d: torch.fill(d.f, 2.0), "dropout":
    lambda d: F.dropout(d.f, 0.5, training=False),
}  # fmt: skip

ACTIVATIONS: Table = {
    "by name": lambda d: (aten.rsub.Tensor(d.f, d.g), aten.sub.Scalar(d.f, 0.5), aten.clamp_max.Tensor(d.f, d.g),
    aten.div.Scalar_mode(d.f, 0.7, rounding_mode="trunc"), aten.floor_divide.Scalar(d.f, 0.7),
    aten.hardshrink.default(d.f, 0.4), aten.softshrink.default(d.f, 0.4), aten._prelu_kernel.default(d.f, d.p),
    aten.native_dropout.default(d.f, 0.5, False)[0]), "relu": lambda d: d.f.relu(), "relu6": lambda d: F.relu6(d.f *
    3), "silu": lambda d: F.silu(d.f), "mish": lambda d: F.mish(d.f), "gelu": lambda d: F.gelu(d.f), "gelu tanh":
    lambda d: F.gelu(d.f, approximate="tanh"), "elu": lambda d: F.elu(d.f, 0.7), "selu": lambda d: F.selu(d.f), "celu":
    lambda d: F.celu(d.f, 0.7), "softplus": lambda d: F.softplus(d.f * 9, 2, 10), "leaky_relu": lambda d:
    F.leaky_relu(d.f, 0.2), "hardtanh": lambda d: F.hardtanh(d.f, -1, 2), "hardsigmoid": lambda d: F.hardsigmoid(d.f),
    "hardswish": lambda d: F.hardswish(d.f), "softshrink": lambda d: F.softshrink(d.f), "hardshrink": lambda d:
    F.hardshrink(d.f), "tanhshrink": lambda d: F.tanhshrink(d.f), "softsign": lambda d: F.softsign(d.f), "logsigmoid":
    lambda d: F.logsigmoid(d.f), "threshold": lambda d: F.threshold(d.f, 0.1, 2.0), "glu": lambda d: F.glu(d.f),
    "rrelu": lambda d: F.rrelu(d.f), "prelu": lambda d: F.prelu(d.f, d.p[0]), "prelu one": lambda d: F.prelu(d.f,
    d.p[0, :1]), "feature dropout": lambda d: F.alpha_dropout(d.f, training=False), "softmin": lambda d: F.softmin(d.f,
    1), "mse": lambda d: F.mse_loss(d.f, d.g), "smooth l1": lambda d: F.smooth_l1_loss(d.f, d.g), "huber": lambda d:
    F.huber_loss(d.f, d.g), "kl": lambda d: F.kl_div(d.f, d.p, reduction="sum"), "bce": lambda d:
    F.binary_cross_entropy(d.p, d.p), "bce logits": lambda d: F.binary_cross_entropy_with_logits(d.f, d.p), "l1":
    lambda d: F.l1_loss(d.f, d.g), "ndtr": lambda d: torch.special.ndtr(d.f), "entr": lambda d:
    torch.special.entr(d.p), "xlog1py": lambda d: torch.special.xlog1py(d.f, d.p),
}  # fmt: skip

INTEGER: Table = {
    "by name": lambda d: (aten.bitwise_and.Scalar(d.i, 6), aten.bitwise_or.Scalar(d.i, 6), aten.bitwise_xor.Scalar(d.i,
    6), aten.bitwise_or.Scalar_Tensor(3, d.i), aten.bitwise_xor.Scalar_Tensor(3, d.i), aten.bitwise_xor.Tensor(d.i,
    d.n), aten.bitwise_left_shift.Tensor_Scalar(d.i, 2), aten.bitwise_right_shift.Tensor(d.i, d.n)), "floor divide":
    lambda d: d.i // 3, "floor divide by negative": lambda d: d.i // -3, "floor divide tensor": lambda d: d.i // (d.n +
    1), "number floor divide": lambda d: 7 // (d.n + 1), "remainder": lambda d: d.i % 3, "remainder by negative":
    lambda d: d.i % -3, "remainder of number": lambda d: 7 % (d.n + 1), "fmod": lambda d: torch.fmod(d.i, 3),
    "fmod tensor": lambda d: torch.fmod(d.i, d.n + 1), "true division": lambda d: d.i / 3, "trunc divide": lambda d:
    torch.div(d.i, 3, rounding_mode="trunc"), "pow": lambda d: d.i**3, "pow tensor": lambda d: d.i**d.n, "abs": lambda
    d: d.i.abs(), "neg": lambda d: -d.i, "sign": lambda d: d.i.sign(), "bitwise": lambda d: (d.i & 6) | (d.i ^ 3),
    "bitwise tensor": lambda d: (d.i & d.n) | (d.i ^ d.j), "bitwise of number": lambda d: torch.bitwise_and(3, d.i),
    "not": lambda d: ~d.i, "not bool": lambda d: ~d.b, "shift left": lambda d: (d.n << d.n, d.i << 2, 2 << d.n),
    "shift right": lambda d: (d.i >> d.n, d.i >> 1, -64 >> d.n), "shift too far": lambda d: (d.i << 64, d.i >> 70),
    "bitwise shifts": lambda d: (torch.bitwise_left_shift(d.i, d.n), torch.bitwise_right_shift(d.i, 1)),
    "in place logic": lambda d: (d.i.clone().__ilshift__(1), d.b.__and__(d.b), d.i.__or__(1), d.i.__xor__(d.n)),
    "sqrt": lambda d: (d.n + 9).sqrt(), "round": lambda d: (d.i.floor(), d.i.ceil(), d.i.trunc()), "mixed": lambda d:
    d.i + 0.5, "maximum": lambda d: torch.maximum(d.i, d.n), "fmax": lambda d: torch.fmax(d.i, d.n), "clamp": lambda d:
    d.i.clamp(-2, 3), "where": lambda d: torch.where(d.b, d.i, d.n), "masked fill": lambda d: d.i.masked_fill(d.b, 7),
    "compare": lambda d: (d.i > d.n, d.i == 2, d.b < (d.i > 0)), "compare with float": lambda d: d.i > 0.5, "isin":
    lambda d: torch.isin(d.i, torch.tensor([1, 2])), "signbit": lambda d: d.i.signbit(), "to types": lambda d:
    (d.i.to(torch.int8), d.i.to(torch.int16), d.b.to(torch.int32), d.n.to(torch.uint8)), "bits": lambda d:
    (d.i.to(torch.int32).view(torch.float32).view(torch.int32), d.i.to(torch.int8).view(torch.uint8)), "sum": lambda d:
    d.i.sum(), "bool sum": lambda d: d.b.sum(1), "prod": lambda d: d.i.prod(1), "mean of cast": lambda d:
    d.i.float().mean(1), "sum as float": lambda d: d.i.sum(1, dtype=torch.float32), "cumsum": lambda d: d.i.cumsum(1),
    "cumsum of bool": lambda d: d.b.cumsum(0), "cumprod": lambda d: d.i.cumprod(1), "argmax": lambda d: d.i.argmax(1),
    "argmin": lambda d: d.i.argmin(1), "max": lambda d: d.i.max(1).values, "any": lambda d: (d.i > 4).any(1), "all":
    lambda d: (d.i > -5).all(0), "any of ints": lambda d: d.i.any(1), "all of ints": lambda d: d.i.all(1), "amax":
    lambda d: d.i.amax(1), "count_nonzero": lambda d: torch.count_nonzero(d.i, 1), "sort": lambda d: d.i.sort(dim=1,
    descending=True, stable=True), "sort of bool": lambda d: d.b.sort(dim=1, stable=True), "one hot": lambda d:
    F.one_hot(d.n, 5), "diff": lambda d: torch.diff(d.i, dim=1), "unravel": lambda d: torch.unravel_index(d.n, (2, 3)),
    "bucketize": lambda d: torch.bucketize(d.i, torch.tensor([-3, 0, 2])), "median": lambda d: d.i.median(1).values,
    "cummax": lambda d: d.i.cummax(1), "dot": lambda d: d.i[0] @ d.n[0], "matmul": lambda d: d.i @ d.n.t(),
    "batched matmul": lambda d: d.i[:, None].expand(-1, 2, -1) @ d.n.t().to(torch.int64),
}  # fmt: skip

# --- reductions, norms, matmuls --------------------------------------------------------------------------------------

REDUCE: Table = {
    "sum": lambda d: d.f.sum(), "sum dim": lambda d: d.f.sum(0), "sum keepdim": lambda d: d.f.sum((0, 1),
    keepdim=True), "mean": lambda d: d.f.mean(), "mean dim": lambda d: d.f.mean(0), "mean last": lambda d: d.f.mean(-1,
    keepdim=True), "var": lambda d: d.f.var(1), "std": lambda d: d.f.std(1), "var biased": lambda d: d.f.var(0,
    unbiased=False), "var_mean": lambda d: torch.var_mean(d.f, 1), "std_mean": lambda d: torch.std_mean(d.f, 1),
    "amax": lambda d: d.f.amax(1), "amin": lambda d: d.f.amin(0), "aminmax": lambda d: torch.aminmax(d.f, dim=1),
    "max": lambda d: d.f.max(), "min": lambda d: d.f.min(), "max dim": lambda d: d.f.max(1), "min dim": lambda d:
    d.f.min(0, keepdim=True), "prod": lambda d: d.p.prod(1), "prod all": lambda d: d.p.prod(), "nansum": lambda d: (d.f
    / d.f.relu()).nansum(1).isfinite(), "nanmean": lambda d: d.f.nanmean(1), "logsumexp": lambda d: d.f.logsumexp(1),
    "norm": lambda d: d.f.norm(dim=1), "norm 1": lambda d: d.f.norm(p=1), "norm 3": lambda d: d.f.norm(p=3, dim=1),
    "norm 0": lambda d: torch.linalg.vector_norm(d.f, 0, dim=1), "norm inf": lambda d: (torch.linalg.vector_norm(d.f,
    INF), torch.linalg.vector_norm(d.f, -INF, dim=0)), "matrix norm": lambda d: torch.linalg.matrix_norm(d.f),
    "normalize": lambda d: F.normalize(d.f, dim=1), "renorm": lambda d: torch.renorm(d.f, 2, 0, 1.0), "cosine": lambda
    d: F.cosine_similarity(d.f, d.g, dim=1), "pairwise": lambda d: F.pairwise_distance(d.f, d.g), "dist": lambda d:
    torch.dist(d.f, d.g), "any": lambda d: (d.f > 2).any(), "any dim": lambda d: (d.f > 2).any(1), "any dims": lambda
    d: torch.any(d.f > 2, dim=(0, 1)), "all": lambda d: (d.f > -9).all(), "all dims": lambda d: torch.all(d.f > -9,
    dim=(0, 1)), "softmax": lambda d: d.f.softmax(0), "softmax last": lambda d: d.f.softmax(-1), "softmax f64": lambda
    d: (d.f.softmax(1, dtype=torch.float32)), "log_softmax": lambda d: d.f.log_softmax(0), "argmax": lambda d:
    d.f.argmax(), "argmin": lambda d: d.f.argmin(1, keepdim=True), "trapezoid": lambda d: torch.trapezoid(d.f, dim=1),
    "layer_norm": lambda d: F.layer_norm(d.f, (6,)), "rms_norm": lambda d: F.rms_norm(d.f, (6,)), "group_norm": lambda
    d: F.group_norm(d.f, 2), "instance_norm": lambda d: F.instance_norm(d.f[None]), "cdist": lambda d: torch.cdist(d.f,
    d.g), "cdist 1": lambda d: torch.cdist(d.f, d.g, p=1), "cdist inf": lambda d: torch.cdist(d.f, d.g[:1], p=INF),
    "cdist 3": lambda d: torch.cdist(d.f, d.g, p=3), "native norms": lambda d: (aten.native_layer_norm(d.f, [6], None,
    None, 1e-5)[0], aten.native_group_norm(d.f, None, None, d.f.shape[0], 6, 1, 3, 1e-5)[0], aten._fused_rms_norm(d.f,
    [6], None, 1e-5)[0]), "native softmax": lambda d: (aten._softmax(d.f, 1, False), aten._log_softmax(d.f, 1, False)),
}  # fmt: skip

MATMUL: Table = {
    "mm": lambda d: d.f @ d.g.t(), "matmul broadcast": lambda d: d.f[None, None] @ d.g.t().expand(2, 1, 6, -1),
    "vector": lambda d: d.f @ d.g[0], "left vector": lambda d: d.f[0] @ d.g.t(), "dot": lambda d: d.f[0] @ d.g[0],
    "vdot": lambda d: torch.vdot(d.f[0], d.g[0]), "inner": lambda d: torch.inner(d.f, d.g), "addmm": lambda d:
    torch.addmm(d.f[:, :1], d.f, d.g.t() * 0.1, beta=0.5, alpha=2), "addmv": lambda d: torch.addmv(d.f[:, 0], d.f,
    d.g[0], beta=0.5, alpha=2), "addr": lambda d: torch.addr(d.f, d.f[:, 0], d.g[0]), "bmm": lambda d:
    torch.bmm(d.f[None], d.g.t()[None]), "baddbmm": lambda d: torch.baddbmm(d.f[None, :, :1], d.f[None],
    d.g.t()[None]), "addbmm": lambda d: torch.addbmm(d.f[:, :1], d.f.expand(2, -1, -1), d.g.t().expand(2, -1, -1),
    beta=0.5, alpha=2), "einsum": lambda d: torch.einsum("ij,ij,kj->ik", d.f, d.g, d.f), "tensordot": lambda d:
    torch.tensordot(d.f, d.g, dims=([1], [1])), "outer": lambda d: torch.outer(d.f[:, 0], d.g[0]), "bilinear": lambda
    d: F.bilinear(d.f, d.g, d.p[0].expand(3, 6, 6)), "linear of inputs": lambda d: F.linear(d.f, d.g, d.g[:, 0]),
    "linear of a vector": lambda d: F.linear(d.f, d.g[0]), "matrix power": lambda d: torch.matrix_power(d.f.t() @ d.f,
    3), "cross": lambda d: torch.linalg.cross(d.f[:, :3], d.g[:, :3]), "attention": lambda d:
    F.scaled_dot_product_attention(d.f[None], d.g[None], d.p[None]),
}  # fmt: skip

# --- views, joins, tensors made from nothing -------------------------------------------------------------------------


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:3] = 7
    y[:, 0] += 1
    return y


VIEWS: Table = {
    "transpose": lambda d: d.f.t(), "swapaxes": lambda d: d.f.swapaxes(0, 1), "mT": lambda d: d.f.mT, "permute": lambda
    d: d.f[None].permute(2, 0, 1), "movedim": lambda d: d.f[None].movedim(0, 2), "reshape": lambda d: d.f.reshape(-1,
    3), "flatten": lambda d: d.f.flatten(), "unflatten": lambda d: d.f.unflatten(1, (2, 3)), "squeeze": lambda d:
    d.f[:, None].squeeze(1), "squeeze dims": lambda d: d.f[None, :, None].squeeze((0, 2)), "negative slice": lambda d:
    d.f[:, -3:-1], "strided slice": lambda d: d.f[:, ::2], "select": lambda d: d.f[:, -2], "first": lambda d: d.f[0],
    "narrow": lambda d: d.f.narrow(1, 2, 3), "cat": lambda d: torch.cat([d.f, d.g * 2], 0), "cat last": lambda d:
    torch.cat([d.f, d.g[:, :2]], 1), "cat types": lambda d: torch.cat([d.f, d.f.int()], 1), "stack": lambda d:
    torch.stack([d.f, -d.g], 1), "hstack": lambda d: torch.hstack([d.f, d.g]), "column_stack": lambda d:
    torch.column_stack([d.f[:, 0], d.g]), "split": lambda d: d.f.split(4, 1), "split sizes": lambda d: d.f.split([1, 2,
    3], 1), "chunk": lambda d: d.f.chunk(4, 1), "tensor_split": lambda d: d.f.tensor_split(4, 1), "unbind": lambda d:
    d.f.unbind(1), "expand": lambda d: d.f[:, None].expand(-1, 3, -1), "expand_as": lambda d: d.f[:1].expand_as(d.g),
    "repeat": lambda d: d.f.repeat(2, 3), "tile": lambda d: d.f.tile(1, 2), "repeat_interleave": lambda d:
    d.f.repeat_interleave(2, 1), "flip": lambda d: d.f.flip(0, 1), "rot90": lambda d: d.f.rot90(), "roll": lambda d:
    d.f.roll(2, 1), "roll rows": lambda d: d.f.roll(1, 0), "pad": lambda d: F.pad(d.f, (1, 2, 3, 0), value=0.5),
    "pad cut": lambda d: F.pad(d.f, (-1, 2)), "triu": lambda d: d.f.triu(1), "tril": lambda d: d.f.tril(),
    "diag_embed": lambda d: d.f.diag_embed(), "block_diag": lambda d: torch.block_diag(d.f, d.g), "unfold": lambda d:
    d.f.unfold(1, 3, 2), "diagonal": lambda d: d.f[:, :, None].expand(-1, -1, 4).diagonal(1, 1, 2), "trace": lambda d:
    (d.f.t() @ d.f).trace(), "diagonal_scatter": lambda d: (d.f[:, :, None] * d.g[:, None]).diagonal_scatter(d.p[:,
    :4], -2, 1, 2), "arange": lambda d: d.f + torch.arange(6), "arange step": lambda d: d.f + torch.arange(3, 9, 1.0),
    "arange of size": lambda d: d.f[:, 0] * torch.arange(d.f.shape[0]), "arange from size": lambda d:
    torch.arange(d.f.shape[0], 2 * d.f.shape[0]), "full of size": lambda d: torch.full((2,), d.f.shape[0]) + d.f[0,
    :2], "size": lambda d: d.f * d.f.shape[0], "zeros_like": lambda d: torch.zeros_like(d.f) + d.f, "ones": lambda d:
    (torch.ones_like(d.f), torch.ones(2, 3), d.f.new_ones(2)), "zeros": lambda d: (torch.zeros(2, 3),
    d.f.new_zeros(2)), "full": lambda d: (torch.full_like(d.f, 2.5), d.f.new_full((2,), 3.0),
    torch.scalar_tensor(2.5)), "empty": lambda d: (torch.empty_like(d.f).shape[0] * d.f, torch.empty(2).fill_(1.0),
    d.f.new_empty(2).zero_()), "eye": lambda d: d.f @ torch.eye(6), "linspace": lambda d: d.f + torch.linspace(0, 1,
    6), "logspace": lambda d: d.f + torch.logspace(0, 1, 6), "meshgrid": lambda d: torch.meshgrid(d.f[:, 0], d.g[:, 1],
    indexing="ij"), "cartesian": lambda d: torch.cartesian_prod(d.f[0], d.g[0]), "vander": lambda d:
    torch.vander(d.p[0]), "tril_indices": lambda d: torch.tril_indices(4, 3) + d.f[0, 0], "triu_indices": lambda d:
    torch.triu_indices(4, 3) + d.f[0, 0], "write slice": lambda d: _written(d.f * 1), "select_scatter": lambda d:
    d.f.select_scatter(d.g[:, 1], 1, 3), "slice_scatter": lambda d: d.f.slice_scatter(d.g[:, :2], 1, 1, 5, 2),
    "gradient": lambda d: torch.gradient(d.f[0])[0], "diff": lambda d: torch.diff(d.f, dim=1), "copies": lambda d:
    (d.f.contiguous(), d.f.clone(), d.f.detach(), d.f.type_as(d.g)), "native": lambda d: (aten.copy(d.f, d.g),
    aten.alias(d.f), aten._to_copy(d.f), aten.lift_fresh_copy(d.f), aten.empty_permuted([2, 3], [1, 0]).zero_(),
    aten._unsafe_view(d.f, [-1]), aten.unsafe_split(d.f, 4, 1)),
}  # fmt: skip

# Fixed rows: these read row numbers, or strides.
VIEWS_OF_FIXED: Table = {
    "slice": lambda d: d.f[1:, ::2], "as_strided": lambda d: d.f.as_strided((3, 4), (6, 1), 2),
    "as_strided overlapping": lambda d: d.f.as_strided((4, 3, 2), (2, 1, 5), 1), "squeeze all": lambda d: d.f[None, :,
    None].squeeze(), "diag": lambda d: (d.f[0].diag(), d.f.diag()), "diagonal": lambda d: d.f.diagonal(-1), "hsplit":
    lambda d: d.f.hsplit(2), "index of a range": lambda d: d.f[torch.arange(2, 4)[:, None], torch.arange(6)],
    "index two": lambda d: d.f[torch.tensor([0, 1, -1]), torch.tensor([-2, 0, 3])], "index broadcast": lambda d:
    d.f[torch.tensor([0, 1, 2])[:, None], torch.tensor([1, 2])], "index rows": lambda d: d.f[torch.tensor([[0, 1], [2,
    -1]])], "index apart": lambda d: d.f[:, None][torch.tensor([0, 1]), :, torch.tensor([2, 3])],
    "embedding of values": lambda d: F.embedding(torch.tensor([[0, 2], [1, 1]]), d.f), "take_along": lambda d:
    torch.take_along_dim(d.f, d.f.argmax(1, keepdim=True), 1), "take": lambda d: d.f.take(torch.tensor([0, 7, -1])),
    "put": lambda d: d.f.put(torch.tensor([0, 7, 0]), d.g[0, :3]), "put accumulate": lambda d: d.f.put(torch.tensor([0,
    7, 0]), d.g[0, :3], accumulate=True), "index_put": lambda d: d.f.index_put((torch.tensor([0, 2]), torch.tensor([1,
    -1])), d.g[0, :2]), "index_put rows": lambda d: d.f.index_put((torch.tensor([[0], [2]]),), d.g[0]),
    "index_put accumulate": lambda d: d.f.index_put((torch.tensor([0, 0, 2]),), d.g[:3], accumulate=True),
    "index_put apart": lambda d: aten.index_put(d.f[:, None].expand(-1, 2, -1), [torch.tensor([0, 1]), None,
    torch.tensor([2, 3])], d.g[:2, :2]), "index_add": lambda d: d.f.index_add(0, torch.tensor([0, 0, 1]), d.g[:3],
    alpha=2), "index_reduce": lambda d: d.f.index_reduce(0, torch.tensor([0, 0, 1]), d.g[:3], "amax"),
    "index_reduce mean": lambda d: d.f.index_reduce(0, torch.tensor([0, 0, 1]), d.g[:3], "mean", include_self=False),
    "scatter part": lambda d: d.f.scatter(1, torch.tensor([[0, 2], [5, 1]]), d.g), "scatter_add part": lambda d:
    d.f.scatter_add(0, torch.tensor([[0, 2], [0, 1]]), d.g), "histc": lambda d: torch.histc(d.f, 5, -1, 1), "dot":
    lambda d: d.f[0] @ d.f[1], "quantile": lambda d: d.f.quantile(0.3, 1), "searchsorted rows": lambda d:
    torch.searchsorted(d.f.sort(1).values, d.g), "gather part": lambda d: d.f.gather(1, torch.tensor([[1], [0]])),
    "unsafe index put": lambda d: aten._unsafe_index_put(d.f, [None, torch.tensor([1, 2])], d.g[:, :2]), "fold": lambda
    d: F.fold(F.unfold(d.f[None, None, :4], 2, stride=2), (4, 6), 2, stride=2), "kron": lambda d: torch.kron(d.f, d.g),
    "chain": lambda d: torch.linalg.multi_dot([d.f, d.g.t(), d.f]), "unfold rows": lambda d: d.f.unfold(0, 2, 3),
    "empty cat": lambda d: torch.cat([d.f[:0], d.f, d.g[5:]]),
}  # fmt: skip

# --- picking, placing, ordering --------------------------------------------------------------------------------------


def _put(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, torch.tensor([1, 4])] = torch.tensor([5.0, 6.0])
    return y


INDEX: Table = {
    "index one": lambda d: d.f[:, torch.tensor([3, -1, 0])], "index ranges": lambda d:
    d.f[torch.arange(d.f.shape[0])[:, None, None], torch.arange(6)], "index ranges swapped": lambda d:
    d.f[torch.arange(d.f.shape[0]), torch.arange(6)[:, None]], "range and vector": lambda d:
    d.f[torch.arange(d.f.shape[0]), d.f.argmax(1)], "index by values": lambda d: d.f[:, d.n], "gather": lambda d:
    d.f.gather(1, d.n), "gather order": lambda d: d.f.gather(1, d.f.argsort(1)[:, :2]), "index_select": lambda d:
    d.f.index_select(1, torch.tensor([1, 1, 5])), "index_copy": lambda d: d.f.index_copy(1, torch.tensor([4, 0]),
    d.g[:, :2] * 2), "index_fill": lambda d: d.f.index_fill(1, torch.tensor([0, 2]), 3.0), "index_put": lambda d:
    _put(d.f * 1), "index_put mask": lambda d: d.f.index_put((d.b,), torch.tensor(1.0)), "masked_scatter": lambda d:
    d.f.masked_scatter(d.b, d.g), "scatter": lambda d: d.f.scatter(1, d.f.argmax(1, keepdim=True), 9.0), "scatter src":
    lambda d: d.f.scatter(1, d.f.argsort(1), d.g), "scatter add": lambda d: d.f.scatter(1, d.n, d.g, reduce="add"),
    "scatter multiply": lambda d: d.f.scatter(1, d.n, 2.0, reduce="multiply"), "scatter_add": lambda d:
    d.f.scatter_add(1, torch.zeros_like(d.n[:, :3]), d.g), "scatter_reduce": lambda d: [d.f.scatter_reduce(1, d.n, d.g,
    kind) for kind in ("sum", "prod", "mean", "amax", "amin")], "scatter_reduce anew": lambda d: [d.f.scatter_reduce(1,
    d.n, d.g, k, include_self=False) for k in ("sum", "prod", "mean", "amax", "amin")], "embedding_bag": lambda d:
    [F.embedding_bag(d.n, d.p[0].expand(5, 6), mode=k) for k in ("sum", "mean", "max")], "embedding_bag weights":
    lambda d: F.embedding_bag(d.n, d.p[0].expand(5, 6), mode="sum", per_sample_weights=d.f), "embedding_bag padding":
    lambda d: F.embedding_bag(d.n, d.p[0].expand(5, 6), padding_idx=2), "native bag": lambda d:
    aten._embedding_bag(d.p[0].expand(5, 6), d.n[0], torch.tensor([0, 4]))[0], "cross entropy": lambda d:
    F.cross_entropy(d.f, d.n[:, 0], label_smoothing=0.1), "nll": lambda d: F.nll_loss(d.f, d.n[:, 0],
    reduction="none"), "unsafe index": lambda d: aten._unsafe_index(d.f, [None, d.n[0]]),
}  # fmt: skip

ORDER: Table = {
    "sort": lambda d: d.f.sort(1), "sort down": lambda d: d.f.sort(0, descending=True), "sort stable": lambda d:
    torch.sort(d.f, stable=True, dim=0), "msort": lambda d: torch.msort(d.f), "argsort": lambda d: d.f.argsort(1),
    "argsort stable": lambda d: torch.argsort(d.f, dim=0, descending=True, stable=True), "topk": lambda d: d.f.topk(3,
    1), "topk small": lambda d: d.f.topk(2, largest=False), "topk unsorted": lambda d: d.f.topk(2,
    sorted=False).values.sum(-1), "kthvalue": lambda d: d.f.kthvalue(2, 1), "median": lambda d: d.f.median(1),
    "median all": lambda d: d.f.median(), "median nan": lambda d: torch.where(d.b, d.f, float("nan")).median(0),
    "nanmedian": lambda d: torch.where(d.b | (torch.arange(6) == 2), d.f, float("nan")).nanmedian(1), "nanmedian all":
    lambda d: d.f.nanmedian(), "cumsum": lambda d: d.f.cumsum(0), "cumprod": lambda d: d.f.cumprod(1), "logcumsumexp":
    lambda d: d.f.logcumsumexp(0), "cummax": lambda d: d.f.cummax(0), "cummin": lambda d: d.f.cummin(1), "bucketize":
    lambda d: torch.bucketize(d.f, torch.tensor([-1.0, 0.0, 0.25, 1.0])), "bucketize right": lambda d:
    torch.bucketize(d.f.round(), torch.tensor([-1.0, 0.0, 1.0]), right=True, out_int32=True), "bucketize number":
    lambda d: torch.bucketize(0.3, d.p[0].sort().values), "searchsorted": lambda d:
    torch.searchsorted(d.f.sort(1).values, d.g), "searchsorted right": lambda d:
    torch.searchsorted(d.f[0].sort().values, d.f, side="right"), "searchsorted number": lambda d:
    torch.searchsorted(d.f[0].sort().values, 0.1), "argmax keepdim": lambda d: d.f.argmax(1, keepdim=True),
    "sort of f64": lambda d: d.f.double().sort(1).indices, "sort of bf16": lambda d: torch.sort(d.f.bfloat16(),
    stable=True, dim=1), "histc": lambda d: torch.histc(d.f, 5, -1, 1), "ranks of one": lambda d: (d.f[0, 0].sort(),
    d.f[0, 0].cumsum(0)), "median of one": lambda d: (d.f[0, 0].median(0), d.f[0, 0].kthvalue(1), d.f[0, 0].topk(1),
    d.f[0, 0].cummax(0)),
}  # fmt: skip

# --- images ----------------------------------------------------------------------------------------------------------

POOL: Table = {
    "max 3d positions": lambda d: F.max_pool3d(d.x, 2, return_indices=True), "max": lambda d: F.max_pool2d(d.x, 3, 2,
    1), "max positions": lambda d: F.max_pool2d(d.x, 3, 1, 1, return_indices=True), "max ceil": lambda d:
    F.max_pool2d(d.x, 3, 2, ceil_mode=True), "max dilated": lambda d: F.max_pool2d(d.x, 2, 1, dilation=2), "max 1d":
    lambda d: F.max_pool1d(d.x[:, 0], 2), "max 3d": lambda d: F.max_pool3d(d.x, 2, padding=1), "average": lambda d:
    F.avg_pool2d(d.x, 3, 2, 1), "average inside": lambda d: F.avg_pool2d(d.x, 3, 2, 1, count_include_pad=False),
    "average ceil": lambda d: F.avg_pool2d(d.x, 3, 2, 1, ceil_mode=True), "average divisor": lambda d:
    F.avg_pool2d(d.x, 2, divisor_override=3), "average 1d": lambda d: F.avg_pool1d(d.x[:, 0], (4,)), "average 3d":
    lambda d: F.avg_pool3d(d.x, 2), "lp": lambda d: F.lp_pool2d(d.x, 2, 2), "adaptive": lambda d:
    F.adaptive_avg_pool2d(d.x, (3, 5)), "adaptive blocks": lambda d: F.adaptive_avg_pool2d(d.x, (4, 3)),
    "adaptive one": lambda d: F.adaptive_avg_pool2d(d.x, 1), "adaptive 1d": lambda d: F.adaptive_avg_pool1d(d.x[:, 0],
    5), "adaptive 3d": lambda d: F.adaptive_avg_pool3d(d.x, 3), "adaptive max": lambda d: F.adaptive_max_pool2d(d.x,
    3), "adaptive max blocks": lambda d: F.adaptive_max_pool2d(d.x, (4, 3)), "adaptive max 1d": lambda d:
    F.adaptive_max_pool1d(d.x[:, 0], 5), "adaptive max 3d": lambda d: F.adaptive_max_pool3d(d.x, 3), "unpool": lambda
    d: F.max_unpool2d(*F.max_pool2d(d.x, 2, return_indices=True), 2), "local response": lambda d:
    F.local_response_norm(d.x, 2), "native": lambda d: (aten.max_pool1d(d.x[:, 0], [2]), aten.max_pool2d(d.x, [2, 2]),
    aten.max_pool3d(d.x, [2, 2, 2]), aten.adaptive_avg_pool1d(d.x[:, 0], [3])), "instance norm": lambda d:
    F.instance_norm(d.x), "group norm": lambda d: F.group_norm(d.x, 2), "channel shuffle": lambda d:
    F.channel_shuffle(d.x, 2), "channel dropout": lambda d: F.dropout2d(d.x, 0.5, training=False),
}  # fmt: skip

RESIZE: Table = {
    "by name": lambda d: (aten._upsample_bicubic2d_aa.default(d.x, [3, 3], False),
    aten._upsample_bilinear2d_aa.default(d.x, [3, 9], False), aten.upsample_bilinear2d.default(d.x, [5, 5], False),
    aten.upsample_bicubic2d.default(d.x, [5, 5], True)), "nearest": lambda d: F.interpolate(d.x, scale_factor=2),
    "nearest 1.5": lambda d: F.interpolate(d.x, scale_factor=1.5), "nearest size": lambda d: F.interpolate(d.x,
    size=(5, 11)), "nearest exact": lambda d: F.interpolate(d.x, scale_factor=1.5, mode="nearest-exact"),
    "nearest exact 3": lambda d: F.interpolate(d.x, scale_factor=3, mode="nearest-exact"), "nearest 1d": lambda d:
    F.interpolate(d.x[:, 0], scale_factor=2), "nearest 3d": lambda d: F.interpolate(d.x[None], scale_factor=2),
    "exact 1d": lambda d: F.interpolate(d.x[:, 0], size=7, mode="nearest-exact"), "exact 3d": lambda d:
    F.interpolate(d.x[None], size=(4, 3, 7), mode="nearest-exact"), "bilinear": lambda d: F.interpolate(d.x, size=(9,
    9), mode="bilinear"), "bilinear aligned": lambda d: F.interpolate(d.x, size=(9, 4), mode="bilinear",
    align_corners=True), "bilinear 2": lambda d: F.interpolate(d.x, scale_factor=2, mode="bilinear"), "linear": lambda
    d: F.interpolate(d.x[:, 0], scale_factor=2, mode="linear"), "trilinear": lambda d: F.interpolate(d.x[None],
    scale_factor=2, mode="trilinear"), "bicubic": lambda d: F.interpolate(d.x, size=(9, 9), mode="bicubic"),
    "bicubic 1.3": lambda d: F.interpolate(d.x, scale_factor=1.3, mode="bicubic"), "antialiased": lambda d:
    F.interpolate(d.x, size=(3, 9), mode="bilinear", antialias=True), "antialiased bicubic": lambda d:
    F.interpolate(d.x, size=(5, 3), mode="bicubic", antialias=True), "native": lambda d: (aten.upsample_nearest2d(d.x,
    [16, 12]), aten.upsample_bilinear2d(d.x, [5, 5], False), aten.upsample_nearest1d(d.x[:, 0], [16]),
    aten.upsample_nearest3d(d.x[None], [4, 16, 12]), aten._upsample_nearest_exact1d(d.x[:, 0], [5]),
    aten._upsample_nearest_exact2d(d.x, [5, 5]), aten._upsample_nearest_exact3d(d.x[None], [4, 5, 5]),
    aten.upsample_linear1d(d.x[:, 0], [5], True), aten.upsample_trilinear3d(d.x[None], [3, 5, 5], True),
    aten.upsample_bicubic2d(d.x, [5, 5], True)), "pixel shuffle": lambda d: F.pixel_shuffle(d.x, 2), "pixel unshuffle":
    lambda d: F.pixel_unshuffle(d.x, 2), "reflect": lambda d: F.pad(d.x, (1, 2, 1, 0), mode="reflect"), "replicate":
    lambda d: F.pad(d.x, (1, 2, 1, 0), mode="replicate"), "circular": lambda d: F.pad(d.x, (1, 2, 1, 0),
    mode="circular"), "constant": lambda d: F.pad(d.x, (1, 2, 0, 1)), "reflect 1d": lambda d: F.pad(d.x[:, 0], (1, 2),
    mode="reflect"), "reflect 3d": lambda d: F.pad(d.x, (1, 2, 1, 0, 2, 2), mode="reflect"), "replicate 1d": lambda d:
    F.pad(d.x[:, 0], (1, 2), mode="replicate"), "replicate 3d": lambda d: F.pad(d.x, (1, 2, 1, 0, 2, 2),
    mode="replicate"), "im2col": lambda d: F.unfold(d.x, 3), "grid sample": lambda d: F.grid_sample(d.x,
    torch.tanh(d.x[:, :2, :5].permute(0, 2, 3, 1)), align_corners=False), "grid sample nearest": lambda d:
    F.grid_sample(d.x, torch.tanh(d.x[:, :2, :5].permute(0, 2, 3, 1)), mode="nearest", padding_mode="border",
    align_corners=True), "affine grid": lambda d: F.affine_grid(d.x[:, 0, :2, :3], (d.x.shape[0], 1, 3, 4)),
}  # fmt: skip


def layers() -> dict[str, tuple[nn.Module, Case]]:
    """Modules whose operators read parameters."""
    image, rows, steps = (lambda d: d.x), (lambda d: d.f), (lambda d: d.x[:, 0, :3])  # torch traces each step
    return {
        "linear": (nn.Linear(6, 4), rows), "linear without bias": (nn.Linear(6, 4, bias=False), rows), "embedding":
        (nn.Embedding(5, 4), lambda d: d.n), "layer norm": (nn.LayerNorm(6), rows), "rms norm": (nn.RMSNorm(6), rows),
        "batch norm 1d": (nn.BatchNorm1d(6), rows), "batch norm": (nn.BatchNorm2d(4), image), "group norm":
        (nn.GroupNorm(2, 4), image), "instance norm": (nn.InstanceNorm2d(4, affine=True), image), "prelu":
        (nn.PReLU(4), image), "conv": (nn.Conv2d(4, 6, 3, 2, 1), image), "conv grouped": (nn.Conv2d(4, 4, 3, groups=4),
        image), "conv 1d": (nn.Conv1d(8, 3, 3, padding=1), lambda d: d.x[:, 0]), "conv transposed":
        (nn.ConvTranspose2d(4, 3, 2, 2), image), "lstm": (nn.LSTM(6, 4, batch_first=True), steps), "gru":
        (nn.GRU(6, 4, batch_first=True, bidirectional=True), steps), "rnn cell": (nn.RNNCell(6, 4),
        rows), "attention": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), lambda d: d.x[:, 0]),
    }  # fmt: skip


GROUPS: dict[str, Group] = {
    "pointwise": Group({**POINTWISE, **ACTIVATIONS}, tolerance=4e-7),
    "integer": Group(INTEGER, reads=("i", "j", "n", "b"), tolerance=1e-7),
    "reduce": Group({**REDUCE, **MATMUL}),
    "views": Group(VIEWS),
    "fixed": Group(VIEWS_OF_FIXED, dynamic=False, rows=(5,)),
    "index": Group({**INDEX, **ORDER}, reads=("f", "g", "p", "n", "b")),
    "pool": Group(POOL, reads=("x",)),
    "resize": Group(RESIZE, reads=("x",)),
    "layers": Group(layers=layers, reads=("f", "n", "x")),
}
