"""Forms are recognised at batch 1 and at one token as they are at any other size."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import main_func
from qcompiler.passes.pipeline import run_pipeline, upto

HEADS, GROUPS, DEPTH = 4, 2, 8
HIDDEN = HEADS * DEPTH


class RmsNorms(nn.Module):
    """Root mean square norms as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.float()
        llama = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        gemma = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)
        divided = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / HIDDEN + 1e-6)
        return llama, gemma, divided, F.rms_norm(x, (HIDDEN,), self.weight, 1e-6)


class LayerNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        by_hand = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * self.norm.weight.float()
        return self.norm(x), by_hand


def half_turned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., DEPTH // 2 :], x[..., : DEPTH // 2]), dim=-1)


def pairs_turned(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


class Ropes(nn.Module):
    """Rotary embeddings of heads and of rows, of halves and of pairs."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(40.0), 1e4 ** -(torch.arange(0, DEPTH, 2) / DEPTH))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = (each[: x.shape[1]].to(x.dtype)[None] for each in (self.cos, self.sin))
        rows = x.view(x.shape[0], x.shape[1], HEADS, DEPTH)
        heads = rows.transpose(1, 2)
        return (
            heads * cos[:, None] + half_turned(heads) * sin[:, None],
            heads * cos[:, None] + pairs_turned(heads) * sin[:, None],
            rows * cos[:, :, None] + half_turned(rows) * sin[:, :, None],
        )


class Attentions(nn.Module):
    """Grouped heads, causal: by two products around a softmax, and by torch's own operator."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, s = x.shape[:2]
        q = x.view(b, s, HEADS, DEPTH).transpose(1, 2)
        k = x[..., : GROUPS * DEPTH].reshape(b, s, GROUPS, DEPTH).transpose(1, 2)
        repeated = k[:, :, None].expand(b, GROUPS, HEADS // GROUPS, s, DEPTH).reshape(b, HEADS, s, DEPTH)
        scores = q @ repeated.transpose(2, 3) / DEPTH**0.5
        scores = scores + torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return weights @ repeated, F.scaled_dot_product_attention(q, repeated, repeated, is_causal=True)


class Gates(nn.Module):
    """SwiGLU and GeGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.ups = (nn.ModuleList(nn.Linear(HIDDEN, 48, bias=False) for _ in "ab") for _ in "ab")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        swiglu = F.silu(self.gates[0](x)) * self.ups[0](x)
        return swiglu, F.gelu(self.gates[1](x), approximate="tanh") * self.ups[1](x)


class Softmaxes(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shifted = torch.exp(x - x.amax(-1, keepdim=True))
        return shifted / shifted.sum(-1, keepdim=True), x.softmax(-1)


class Masks(nn.Module):
    """Causal and sliding masks: a stored triangle, positions that are compared, and numbers that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triangle", torch.ones(40, 40, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, s = x.shape[:2]
        q = x.view(b, s, HEADS, DEPTH).transpose(1, 2)
        at = torch.arange(s)
        seen = at[None, :] <= at[:, None]
        near = seen & (at[:, None] - at[None, :] < 3)
        added = torch.zeros(s, s, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        every = (self.triangle[:s, :s][None, None], near[None, None], added[None, None].expand(b, 1, s, s))
        return tuple(F.scaled_dot_product_attention(q, q, q, attn_mask=mask) for mask in every)


class Routes(nn.Module):
    """Three choices of experts: a softmax, and its largest divided by their sum (Mixtral); the largest as they are
    (Qwen 3); a softmax of the largest scores (gpt-oss)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.gate(x.reshape(-1, HIDDEN))
        weights, experts = torch.topk(torch.softmax(logits.float(), -1), 3, -1)
        scores, chosen = torch.topk(logits, 2, -1)
        joined = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        shares = torch.topk(torch.softmax(logits * 2, -1, dtype=torch.float32), 3, -1)
        return joined, experts, *shares, torch.softmax(scores, -1), chosen


FORMS: dict[str, tuple[type[nn.Module], str, dict[str, int], tuple[str, ...]]] = {
    "rms norm": (RmsNorms, "fuse-elementwise", {"qc.rms_norm": 4}, ("reduction",)),
    "layer norm": (LayerNorms, "fuse-elementwise", {"qc.layer_norm": 2}, ("reduction",)),
    "rope": (Ropes, "raise-idioms", {"qc.rope": 3}, ("tensor.concat",)),
    "attention": (
        Attentions, "fuse-elementwise", {"qc.attention": 2},
        ("qc.batch_matmul", "qc.softmax", "linalg.broadcast", "linalg.generic"),
    ),
    "gates": (Gates, "fuse-elementwise", {"qc.linear": 4}, ("linalg.generic",)),
    "masks": (Masks, "hoist-constant-masks", {"qc.attention": 3}, ("linalg.generic", "qc.softmax")),
    "routes": (Routes, "fuse-routing", {"qc.route": 3}, ("qc.softmax", "qc.topk")),
    "softmax": (Softmaxes, "fuse-elementwise", {"qc.softmax": 2}, ("linalg.generic",)),
}  # fmt: skip
"""Form -> module, last stage, the ops that must be there, what must not be there."""

SIZES = tuple(itertools.product((1, 3), (1, 7)))
DYNAMIC = ("", "batch", "length")


def cases() -> list[Any]:
    """A size that is dynamic is traced above 1; batch 1, one token and both stand in the short run."""
    found = []
    for (batch, length), dynamic, dtype in itertools.product(SIZES, DYNAMIC, ("float32", "bfloat16")):
        if (dynamic == "batch" and batch == 1) or (dynamic == "length" and length == 1):
            continue
        quick = dtype == "float32" and batch == 1 and not dynamic
        marks = () if quick else pytest.mark.slow
        name = f"{batch}x{length}-{dynamic + '-' if dynamic else ''}{dtype}"
        found.append(pytest.param(batch, length, dynamic, dtype, id=name, marks=marks))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "length", "dynamic", "dtype"), cases())
def test_forms_are_recognised_at_every_size(form: str, batch: int, length: int, dynamic: str, dtype: str) -> None:
    build, last, wanted, unwanted = FORMS[form]
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    x = torch.randn(batch, length, HIDDEN, dtype=kind)
    dims = {"batch": {"x": {0: ("b", 1, 4)}}, "length": {"x": {1: ("s", 1, 37)}}}.get(dynamic)
    imported = import_torch(build().eval().to(kind), (), {"x": x}, dynamic_shapes=dims)
    ctx = QCContext.default(weights=imported.weights)
    run_pipeline(imported.module, ctx, stages=upto(last))
    ops = list(main_func(imported.module).body.block.ops)
    counts = Counter(op.name for op in ops)
    counts["reduction"] = sum('"reduction"' in str(op) or "#linalg.iterator_type<reduction>" in str(op) for op in ops)
    assert {name: counts[name] for name in wanted} == wanted, f"{counts}\n{imported.module}"
    assert {name: counts[name] for name in unwanted} == dict.fromkeys(unwanted, 0), f"{counts}\n{imported.module}"
    for op in ops:
        if form == "attention" and op.name == "qc.attention":
            assert op.operands[1].type.get_shape()[1] == GROUPS, "repeated heads are read where they lie"
        if form == "masks" and op.name == "qc.attention":
            assert op.mask is None, f"a mask that its positions say is stored\n{imported.module}"
