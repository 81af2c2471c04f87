"""Random small models: from a seed, the same model with inputs of every size in its ranges.

A model is a chain of steps. Each step is drawn among those that fit what the steps before it have made; to know shapes,
the generator runs what it has built on tensors of the prime sizes B and S. A dimension that neither divides is static.
Every step is scaled by a power of two so that values stay near unit size, and an error is not hidden by small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from qcompiler.config import QuantConfig

B, S = 7, 13
WIDTHS = (1, 3, 8, 16, 17, 24, 31, 32, 33, 48, 64, 66, 96, 100, 128, 160, 288, 401, 512)  # no multiples of B or S
LARGEST = 50_000
"""Elements of a value at B x S; what would be larger is not made."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (None, "nf4", "int4", "int8")
VOCABULARY = 37

Function = Callable[..., torch.Tensor]

POINTWISE: dict[str, Function] = {
    "relu": torch.relu, "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "elu": functional.elu,
    "leaky": functional.leaky_relu, "hardswish": functional.hardswish, "softplus": functional.softplus,
    "mish": functional.mish, "sine": torch.sin, "cosine": torch.cos, "erf": torch.erf, "abs": torch.abs,
    "bell": lambda x: torch.exp(-x * x), "root": lambda x: torch.sqrt(x * x + 0.5), "clamp": lambda x: x.clamp(-1, 0.7),
    "inverse": lambda x: x / (1 + x * x), "rsqrt": lambda x: x * torch.rsqrt(x * x + 1), "neg": lambda x: 0.3 - x,
    "log": lambda x: torch.log1p(x.abs()), "power": lambda x: (x.abs() + 0.5).pow(1.5),
    "wide": lambda x: (x.float() * 1.1).tanh().to(x.dtype),
}  # fmt: skip

MAKERS = {
    "linear": 6, "mlp": 3, "attention": 6, "pointwise": 6, "norm": 4, "softmax": 3, "reduction": 4, "binary": 4,
    "permutation": 2, "slice": 3, "concat": 3, "split": 2, "flatten": 3, "matmul": 3, "masked": 2, "lookup": 2,
    "positions": 1, "scan": 1, "tied_head": 2,
}  # fmt: skip
"""How often each kind of step is tried."""


@dataclass(frozen=True)
class Step:
    """`apply(model, *values)` of the values numbered `inputs`, times `scale`."""

    name: str
    apply: Function
    inputs: tuple[int, ...]
    scale: float = 1.0


def is_static(size: int) -> bool:
    """Whether a dimension of a probe is the same at every size."""
    return size % B != 0 and size % S != 0


class RandomModel(nn.Module):
    """Steps over the inputs x (b, s, width), ids (b, s) and mask (b, s); returns the last value and a few others."""

    def __init__(self, seed: int, count: int, needs_groups: bool) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.layers = nn.ModuleList()
        self.steps: list[Step] = []
        self.unquantised: list[str] = []
        """Layers that int4 cannot hold, since K is not a multiple of its groups."""
        self.needs_groups = needs_groups
        self.width = self.pick((32, 48, 64, 96, 33))
        self.table = nn.Embedding(VOCABULARY, self.width)
        self._scaled(self.table)
        generator = torch.Generator().manual_seed(seed)
        self.probes = list(self.inputs(B, S, generator))
        self.first = len(self.probes)
        with torch.no_grad():
            self.add("embedding", lambda m, x, ids: m.table(ids) + x, 0, 1)
            makers = [name for name, weight in MAKERS.items() for _ in range(weight)]
            while len(self.steps) < count:
                getattr(self, f"make_{self.pick(makers)}")(self.recent())
        used = {i for step in self.steps for i in step.inputs}
        self.outputs = [i for i in range(self.first, len(self.probes)) if i not in used]

    def inputs(self, b: int, s: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        x = torch.randn((b, s, self.width), generator=generator)
        ids = torch.randint(0, VOCABULARY, (b, s), generator=generator)
        lengths = torch.randint(1, s + 1, (b, 1), generator=generator)
        return x, ids, (torch.arange(s)[None] < lengths).long()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, ids, mask]
        for step in self.steps:
            value = step.apply(self, *(values[i] for i in step.inputs))
            values.append(value if step.scale == 1.0 else value * step.scale)
        return tuple(values[i] for i in self.outputs)

    # --- drawing ---

    def pick(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def recent(self) -> int:
        """A value with dimensions, mostly one of the last."""
        fit = [i for i in range(self.first, len(self.probes)) if self.probes[i].ndim]
        return fit[-min(int(self.rng.geometric(0.6)), len(fit))]

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.probes[i].shape)

    def rows(self, i: int) -> bool:
        """(b, s, a static width)."""
        return self.shape(i)[:2] == (B, S) and len(self.shape(i)) == 3 and is_static(self.shape(i)[2])

    def add(self, name: str, apply: Function, *inputs: int) -> int:
        """A step, if its value is of a fair size. The number of its value, or of its first input."""
        value = apply(self, *(self.probes[i] for i in inputs))
        if value.numel() > LARGEST or value.ndim > 5:
            return inputs[0]
        assert bool(value.isfinite().all()), name
        size = float(value.square().mean().sqrt())
        scale = 2.0 ** -round(np.log2(max(size, 1e-3))) if not 0.4 < size < 2.5 else 1.0
        self.steps.append(Step(name, apply, inputs, scale))
        self.probes.append(value * scale)
        return len(self.probes) - 1

    def _scaled(self, module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        with torch.no_grad():
            for parameter in module.parameters():
                spread, mean = (1.5 / parameter.shape[-1] ** 0.5, 0.0) if parameter.ndim > 1 else (0.3, 0.7)
                parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))

    def layer(self, module: nn.Module) -> int:
        self._scaled(module)
        self.layers.append(module)
        return len(self.layers) - 1

    def linear(self, x: int, n: int) -> int:
        """x @ w.T (+ bias), of its own layer."""
        number = self.layer(nn.Linear(self.shape(x)[-1], n, bias=self.chance(0.5)))
        y = self.add(f"linear{n}", lambda m, x: m.layers[number](x), x)
        if y != x and self.needs_groups and self.shape(x)[-1] % 32:
            self.unquantised.append(f"layers.{number}")
        return y

    # --- steps: one method each ---

    def make_linear(self, x: int) -> None:
        if is_static(self.shape(x)[-1]):
            y = self.linear(x, self.pick(WIDTHS))
            if self.chance(0.4):
                self.make_pointwise(y)
            if self.chance(0.3) and self.shape(y) == self.shape(x):
                self.add("residual", lambda m, x, y: x + y, x, y)

    def make_mlp(self, x: int) -> None:
        width = self.shape(x)[-1]
        if not is_static(width):
            return
        inner, gated = self.pick(WIDTHS[6:]), self.chance(0.5)
        up = self.linear(self.make_norm(x) if self.chance(0.5) else x, inner)
        if gated:
            gate = self.linear(x, inner)
            middle = self.add("gate", lambda m, a, b: functional.silu(a) * b, gate, up)
        else:
            middle = self.add("gelu", lambda m, a: functional.gelu(a), up)
        down = self.linear(middle, width)
        self.add("residual", lambda m, x, y: x + y, x, down)

    def make_tied_head(self, x: int) -> None:
        if self.shape(x)[-1] == self.width:
            self.add("tied_head", lambda m, x: functional.linear(x, m.table.weight), x)

    def make_pointwise(self, x: int) -> None:
        name = self.pick(sorted(POINTWISE))
        self.add(name, lambda m, x: POINTWISE[name](x), x)

    def make_norm(self, x: int) -> int:
        width = self.shape(x)[-1]
        if not is_static(width) or width < 3:
            return x
        kind = self.pick(("layer", "rms", "plain", "by_hand"))
        if kind == "plain":
            return self.add("layer_norm", lambda m, x: functional.layer_norm(x, (width,), eps=1e-3), x)
        if kind == "by_hand":
            return self.add("rms", lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3), x)
        make: Any = nn.LayerNorm if kind == "layer" else nn.RMSNorm
        number = self.layer(make(width, eps=1e-3))
        return self.add(kind, lambda m, x: m.layers[number](x), x)

    def make_softmax(self, x: int) -> None:
        axis, log = self.pick(range(len(self.shape(x)))), self.chance(0.3)
        function = torch.log_softmax if log else torch.softmax
        self.add(f"softmax{axis}", lambda m, x: function(x, axis), x)

    def make_reduction(self, x: int) -> None:
        rank = len(self.shape(x))
        if rank < 2:
            return
        axes = tuple(sorted(self.rng.permutation(rank)[: int(self.rng.integers(1, min(rank, 3)))].tolist()))
        kind, keep = self.pick(("sum", "mean", "amax", "amin", "var", "norm")), self.chance(0.6)
        functions: dict[str, Function] = {
            "sum": lambda x: x.sum(axes, keepdim=keep), "mean": lambda x: x.mean(axes, keepdim=keep),
            "amax": lambda x: x.amax(axes, keepdim=keep), "amin": lambda x: x.amin(axes, keepdim=keep),
            "var": lambda x: x.var(axes, keepdim=keep, unbiased=False),
            "norm": lambda x: (x.square().sum(axes, keepdim=keep) + 0.1).sqrt(),
        }  # fmt: skip
        y = self.add(f"{kind}{axes}", lambda m, x: functions[kind](x), x)
        if keep and y != x and self.chance(0.7):
            self.add("minus", lambda m, x, y: x - y, x, y)

    def make_binary(self, x: int) -> None:
        """With any value that it broadcasts with, without making both larger."""
        y = self.pick(range(self.first, len(self.probes)))
        try:
            shape = tuple(torch.broadcast_shapes(self.shape(x), self.shape(y)))
        except RuntimeError:
            return
        if shape in (self.shape(x), self.shape(y)):
            functions: dict[str, Function] = {
                "add": torch.add, "mul": torch.mul, "sub": torch.sub,
                "maximum": torch.maximum, "minimum": torch.minimum,
                "over": lambda x, y: x / (y * y + 0.5),
            }  # fmt: skip
            name = self.pick(sorted(functions))
            self.add(name, lambda m, x, y: functions[name](x, y), x, y)

    def make_permutation(self, x: int) -> None:
        order = tuple(int(a) for a in self.rng.permutation(len(self.shape(x))))
        y = self.add(f"permute{order}", lambda m, x: x.permute(order), x)
        if self.chance(0.5):
            z = self.add("contiguous", lambda m, x: torch.tanh(x), y)
            back = tuple(int(a) for a in np.argsort(order))
            self.add(f"permute{back}", lambda m, x: x.permute(back), z)

    def make_slice(self, x: int) -> None:
        shape = self.shape(x)
        axis = self.pick(range(len(shape)))
        size = shape[axis]
        if not is_static(size) or size < 4 or self.chance(0.2):
            place = self.pick((0, -1))
            if self.chance(0.5):
                self.add(f"select{axis}", lambda m, x: x.select(axis, place), x)
            else:
                begin = 0 if place == 0 else size - 1
                if is_static(size) or place == 0:
                    self.add(f"narrow{axis}", lambda m, x: x.narrow(axis, begin, 1), x)
                else:
                    self.add(f"last{axis}", lambda m, x: x.select(axis, -1).unsqueeze(axis), x)
            return
        start, step = int(self.rng.integers(0, size // 2)), self.pick((1, 1, 2, 3))
        stop = int(self.rng.integers(start + 1, size + 1))
        cut = (*(slice(None),) * axis, slice(start, stop, step))
        if not is_static(len(range(start, stop, step))):
            return
        self.add(f"slice{axis}", lambda m, x: x[cut], x)

    def make_concat(self, x: int) -> None:
        shape = self.shape(x)
        axis = self.pick(range(len(shape)))
        others = [
            i for i in range(self.first, len(self.probes))
            if len(self.shape(i)) == len(shape)
            and all(a == b for n, (a, b) in enumerate(zip(shape, self.shape(i), strict=True)) if n != axis)
            and is_static(self.shape(i)[axis]) == is_static(shape[axis])
        ]  # fmt: skip
        if axis == 0 and not is_static(shape[0]):
            others = [x]
        y = self.pick(others)
        if self.chance(0.3) and self.shape(y) == shape:
            self.add(f"stack{axis}", lambda m, x, y: torch.stack((x, y), axis), x, y)
        elif is_static(shape[axis] + self.shape(y)[axis]) == is_static(shape[axis]):
            self.add(f"cat{axis}", lambda m, x, y: torch.cat((x, y), axis), x, y)

    def make_split(self, x: int) -> None:
        width = self.shape(x)[-1]
        if is_static(width) and width % 2 == 0:
            if self.chance(0.5):
                self.add("glu", lambda m, x: functional.glu(x, dim=-1), x)
            else:
                self.add("rotate", lambda m, x: torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1), x)

    def make_flatten(self, x: int) -> None:
        shape = self.shape(x)
        if len(shape) >= 3 and self.chance(0.5):
            start = self.pick(range(len(shape) - 1))
            self.add(f"flatten{start}", lambda m, x: x.flatten(start, start + 1), x)
        elif len(shape) < 4 and is_static(shape[-1]) and shape[-1] % 4 == 0:
            self.add("unflatten", lambda m, x: x.unflatten(-1, (4, -1)), x)
        elif len(shape) < 4:
            axis = self.pick(range(len(shape) + 1))
            self.add(f"unsqueeze{axis}", lambda m, x: x.unsqueeze(axis), x)

    def make_matmul(self, x: int) -> None:
        """x @ y for every pair of values whose inner sizes agree, transposed where that helps."""
        shape = self.shape(x)
        if len(shape) < 2:
            return
        y = self.pick([i for i in range(self.first, len(self.probes)) if len(self.shape(i)) >= 2])
        other = self.shape(y)
        if not all(a == b or 1 in (a, b) for a, b in zip(shape[-3::-1], other[-3::-1], strict=False)):
            return
        if shape[-1] == other[-1]:
            self.add("matmul_t", lambda m, x, y: x @ y.transpose(-1, -2), x, y)
        elif shape[-1] == other[-2]:
            self.add("matmul", lambda m, x, y: x @ y, x, y)

    def make_attention(self, x: int) -> None:
        if not self.rows(x):
            return
        heads, dim = self.pick((1, 2, 3, 4)), self.pick((5, 8, 16, 24, 32, 64))
        groups = self.pick([g for g in (1, 2, 3, 4) if heads % g == 0])
        value_dim = dim if self.chance(0.7) else self.pick((8, 16, 48))
        kind = self.pick(("none", "causal", "padding", "padding_float", "triangle", "both", "alibi"))
        by_hand, last = self.chance(0.3), self.chance(0.15) and kind in ("none", "padding", "padding_float")
        q = self.linear(x, heads * dim)
        k, v = self.linear(x, groups * dim), self.linear(x, groups * value_dim)

        def apply(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            b, s = q.shape[:2]
            q, k, v = (
                t.view(b, s, n, d).transpose(1, 2)
                for t, n, d in ((q, heads, dim), (k, groups, dim), (v, groups, value_dim))
            )
            q = q[:, :, :1] if last else q
            y = attention(q, k, v, attention_mask(kind, mask, heads, q.dtype), kind == "causal", by_hand)
            return y.transpose(1, 2).reshape(b, -1, heads * value_dim)

        y = self.add(f"attention_{kind}", apply, q, k, v, 2)
        if self.chance(0.5):
            y = self.linear(y, self.shape(x)[-1])
            if self.shape(y) == self.shape(x):
                self.add("residual", lambda m, x, y: x + y, x, y)

    def make_masked(self, x: int) -> None:
        if not self.rows(x):
            return
        if self.chance(0.5):
            self.add("pool", lambda m, x, k: (x * k[..., None]).sum(1) / k.sum(1, keepdim=True).to(x.dtype), x, 2)
        else:
            self.add("masked_fill", lambda m, x, k: x.masked_fill(k[..., None] == 0, -0.5), x, 2)

    def make_lookup(self, x: int) -> None:
        kind = self.pick(("embedding", "positions", "gather"))
        if kind == "embedding":
            self.add(kind, lambda m, ids: m.table(ids), 1)
        elif kind == "positions" and self.rows(x):
            number = self.layer(nn.Embedding(160, self.shape(x)[2]))
            self.add(kind, lambda m, x: x + m.layers[number](torch.arange(x.shape[1])), x)
        elif kind == "gather" and self.rows(x) and self.shape(x)[2] >= VOCABULARY:
            self.add(kind, lambda m, x, ids: x.gather(2, ids[..., None]), x, 1)

    def make_positions(self, x: int) -> None:
        """A rope-like table that depends on sizes alone: computed once, at load."""
        if self.rows(x):
            width = self.shape(x)[2]

            def apply(m: Any, x: torch.Tensor) -> torch.Tensor:
                angles = torch.arange(x.shape[1])[:, None] * (10.0 ** (-torch.arange(width) / width))[None]
                return x * angles.cos().to(x.dtype)

            self.add("rope", apply, x)

    def make_scan(self, x: int) -> None:
        axis = self.pick(range(len(self.shape(x))))
        self.add(f"cumsum{axis}", lambda m, x: x.cumsum(axis), x)


def attention_mask(kind: str, mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor | None:
    """(b or 1, heads or 1, s or 1, s): boolean, or added to the scores."""
    s = mask.shape[1]
    padding = mask[:, None, None, :] != 0
    if kind == "padding":
        return padding
    if kind == "padding_float":
        return (1.0 - mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min
    if kind == "triangle":
        return torch.full((s, s), float("-inf"), dtype=dtype).triu(1)
    if kind == "both":
        return padding & torch.ones(s, s, dtype=torch.bool).tril()
    if kind == "alibi":
        distance = torch.arange(s)[None, :] - torch.arange(s)[:, None]
        return -distance.abs().to(dtype) * (0.5 ** torch.arange(heads))[:, None, None].to(dtype)
    return None


def attention(q: Any, k: Any, v: Any, mask: torch.Tensor | None, causal: bool, by_hand: bool) -> torch.Tensor:
    """By torch's function, or spelt out as models do."""
    if not by_hand:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, torch.finfo(q.dtype).min)
    result: torch.Tensor = scores.float().softmax(-1).to(q.dtype) @ v
    return result


@dataclass(frozen=True)
class Case:
    """A model in its dtype with a recipe, and the ranges of its sizes (a range of one size is no range)."""

    seed: int
    model: RandomModel
    dtype: torch.dtype
    quant: QuantConfig | None
    b: tuple[int, int]
    s: tuple[int, int]

    def inputs(self, b: int, s: int, seed: int) -> tuple[torch.Tensor, ...]:
        x, ids, mask = self.model.inputs(b, s, torch.Generator().manual_seed(1000 * self.seed + seed))
        return x.to(self.dtype), ids, mask

    @property
    def dynamic_shapes(self) -> Any:
        dims = {axis: (name, *r) for axis, (name, r) in enumerate((("b", self.b), ("s", self.s))) if r[0] < r[1]}
        return tuple(dims for _ in range(3)) if dims else None

    def sizes(self, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The wanted sizes, each moved into the ranges."""
        clipped = [(min(max(b, self.b[0]), self.b[1]), min(max(s, self.s[0]), self.s[1])) for b, s in wanted]
        return list(dict.fromkeys(clipped))

    def __str__(self) -> str:
        quant = self.quant.preset if self.quant else "float"
        steps = " ".join(f"{s.name}{list(s.inputs)}" for s in self.model.steps)
        return f"seed {self.seed} {quant} {self.dtype} b={self.b} s={self.s}: {steps} -> {self.model.outputs}"


def random_case(seed: int, steps: int = 12) -> Case:
    """The case of a seed: formats and dtypes take turns, the rest is drawn."""
    rng = np.random.default_rng(100_000 + seed)
    preset, dtype = FORMATS[seed % 4], DTYPES[seed // 4 % 3]
    model = RandomModel(seed, steps, preset == "int4")
    rules = dict.fromkeys(model.unquantised)
    quant = None if preset is None else QuantConfig(preset, rules=rules, promise_bits=None)
    both, few, single, fixed = ((1, 4), (1, 130)), ((2, 2), (1, 96)), ((1, 150), (1, 1)), ((3, 3), (5, 5))
    ranges = (both, both, both, few, single, fixed)
    b, s = ranges[int(rng.integers(len(ranges)))]
    return Case(seed, model.to(dtype).eval(), dtype, quant, b, s)
