"""A module with a cache of its own in int8: attention reads the rows; other readers get what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import qcompiler as qc
from qcompiler.errors import KernelSelectionError
from qcompiler.formats.cache_rows import row_bytes
from qcompiler.frontends.torch.qc_ops import torch_cache  # noqa: F401  (registers the operators)
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.dequantize_cache import DequantizeCacheKernel

HEADS, LENGTH = 2, 16


class Attends(nn.Module):
    """Self-attention over a cache of `LENGTH` tokens."""

    def __init__(
        self,
        dim: int,
        *,
        rows: tuple[bool, bool] = (True, True),
        reads: bool = False,
        written_out: bool = False,
        kind: str = "int8",
    ) -> None:
        super().__init__()
        self.dim, self.rows, self.reads, self.written_out, self.kind = dim, rows, reads, written_out, kind
        self.linears = nn.ModuleList(nn.Linear(8, HEADS * dim) for _ in "qkv")
        for name, quantised in zip(("keys", "values"), rows, strict=True):
            width, dtype = (row_bytes(dim, kind), torch.int8) if quantised else (dim, torch.float32)
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, width, dtype=dtype))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        q, k, v = (each(x).view(1, -1, HEADS, self.dim).transpose(1, 2) for each in self.linears)
        keys, values = (
            self._kept(kept, new, at, quantised)
            for kept, new, quantised in ((self.keys, k, self.rows[0]), (self.values, v, self.rows[1]))
        )
        seen = torch.arange(LENGTH)[None, :] <= at[:, None]
        if self.written_out:  # with a soft cap, as Gemma 2 does
            scores = torch.tanh(q @ keys.transpose(2, 3) * self.dim**-0.5 / 2) * 2
            return scores.masked_fill(~seen, -3e38).softmax(-1) @ values
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None])
        return (out, keys.amax(-1)) if self.reads else out

    def _kept(self, kept: torch.Tensor, new: torch.Tensor, at: torch.Tensor, quantised: bool) -> torch.Tensor:
        if not quantised:
            return kept.index_copy_(2, at, new)
        kept.index_copy_(2, at, torch.ops.qc.quantize_cache(new, self.kind))
        values: torch.Tensor = torch.ops.qc.dequantize_cache(kept, self.kind, new.shape[-1], new.dtype)
        return values


def compiled(module: nn.Module, **how: Any) -> qc.Program:
    shapes = {"x": {0: ("s", 1, 8)}, "at": {0: ("s", 1, 8)}}
    return qc.qcompile(module.eval(), (torch.randn(3, 8), torch.arange(3)), dynamic_shapes=shapes, **how)


def kinds(program: qc.Program) -> set[type]:
    return {type(kernel.body) for kernel in program.plan.kernels}


def caches(program: qc.Program) -> set[str | None]:
    return {kernel.body.cache for kernel in program.plan.kernels if isinstance(kernel.body, AttentionKernel)}


@pytest.mark.parametrize(
    ("dim", "device", "written_out", "kind"),
    [
        (20, "cpu", False, "int8"),
        (20, "cpu", False, "fp8"),
        (64, "cpu", False, "int4"),
        pytest.param(20, "sim:0", False, "int4", marks=pytest.mark.slow),
        (64, "sim:0", False, "int8"),
        (64, "sim:0", False, "fp8"),
        (64, "cpu", True, "int8"),
        pytest.param(64, "cpu", False, "int8", marks=pytest.mark.slow),
        pytest.param(20, "sim:0", True, "int8", marks=pytest.mark.slow),
        pytest.param(20, "sim:0", True, "fp8", marks=pytest.mark.slow),
    ],
)
def test_attention_reads_the_rows(dim: int, device: str, written_out: bool, kind: str) -> None:
    torch.manual_seed(0)
    module = Attends(dim, written_out=written_out, kind=kind)
    program = compiled(module, device=device, verify_each="numerics")
    assert caches(program) == {kind} and DequantizeCacheKernel not in kinds(program)
    session, x = program.session(), torch.randn(7, 8)
    begin = 0
    for count in (4, 1, 1, 1):  # a prompt, then tokens one by one
        part, at = x[begin : begin + count], torch.arange(begin, begin + count)
        with torch.no_grad():
            wanted = module(part, at)
        torch.testing.assert_close(torch.as_tensor(session(part, at)).cpu(), wanted, rtol=1e-4, atol=1e-5)
        begin += count


@pytest.mark.parametrize(
    "how",
    [
        {"rows": (True, False)},
        {"rows": (False, True)},
        {"reads": True},
        {"reads": True, "kind": "fp8"},
        pytest.param({"reads": True, "kind": "int4"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_readers_get_the_values(how: dict[str, Any]) -> None:
    """Attention that has rows of keys alone, and a second reader."""
    torch.manual_seed(0)
    module = Attends(20, **how)
    program = compiled(module)
    assert DequantizeCacheKernel in kinds(program)
    kind = how.get("kind", "int8")
    assert caches(program) == ({kind} if "reads" in how else {None})
    assert f"a cache of {kind} is decoded to 1x2x16x20 numbers" in str(program.report())
    x, at = torch.randn(3, 8), torch.arange(3)
    with torch.no_grad():
        wanted = module(x, at)
    leaves = torch.utils._pytree.tree_leaves
    for ours, theirs in zip(leaves(program.session()(x, at)), leaves(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Makes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch.ops.qc.quantize_cache(x, "int8")
        return rows


class Reads(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.ops.qc.dequantize_cache(rows, "int8", 64, torch.float32)
        return values


@pytest.mark.parametrize(
    ("module", "given", "what"),
    [(Makes(), torch.zeros(2, 64), "makes the rows of a cache, which are returned"),
     (Reads(), torch.zeros(2, 80, dtype=torch.int8), "reads the rows of a cache from an input")],
    ids=["made", "read"],
)  # fmt: skip
def test_rows_stay_in_the_programs_memory(module: nn.Module, given: torch.Tensor, what: str) -> None:
    with pytest.raises(KernelSelectionError, match=f"{what}.*docs/state.md"):
        qc.qcompile(module, (given,))
