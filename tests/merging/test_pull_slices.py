"""A model that is asked for some positions computes its head for these alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import main_func, path_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.pipeline import run_pipeline, upto

HIDDEN, WORDS = 32, 97


class Head(nn.Module):
    """A mixing of positions, a norm, a head with a soft cap, and a choice of positions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = x.cumsum(1)
        logits = torch.tanh(self.head(self.norm(hidden)) / 30.0) * 30.0
        if self.form == "both":
            return logits[:, -1], logits.argmax(-1)
        if self.form == "columns":
            return logits[:, :, :5]
        if self.form == "two":
            return logits[:, :2].argmax(-1)
        if self.form == "gather":
            return logits.index_select(1, torch.tensor([0]))
        if self.form == "float":
            return logits[:, -1].float().softmax(-1)
        return {"last": logits[:, -1], "kept": logits[:, -1:], "first": logits[:, 0], "one row": logits[-1:]}[self.form]


def compiled(form: str, quant: Any = "nf4", dtype: torch.dtype = torch.float32) -> qc.Program:
    torch.manual_seed(0)
    dims = {"x": {0: ("b", 1, 4), 1: ("s", 3, 37)}}
    model = Head(form).eval().to(dtype)
    return qc.qcompile(model, (torch.randn(3, 7, HIDDEN).to(dtype),), dynamic_shapes=dims, quant=quant)


def head_shape(form: str, quant: Any = "nf4", dtype: torch.dtype = torch.float32) -> str:
    """What the head's linear results in, as sizes."""
    torch.manual_seed(0)
    x = torch.randn(3, 7, HIDDEN).to(dtype)
    dims = {"x": {0: ("b", 1, 4), 1: ("s", 3, 37)}}
    imported = import_torch(Head(form).eval().to(dtype), (x,), {}, dynamic_shapes=dims, quant=quant)
    ctx = QCContext.default(weights=imported.weights)
    samples = [x.float().numpy()[:2]] if dtype == torch.float32 else None
    run_pipeline(
        imported.module, ctx, stages=upto("fuse-elementwise"), verify_each="numerics" if samples else None,
        sample_inputs=samples,
    )  # fmt: skip
    ops = [op for op in main_func(imported.module).body.block.ops if path_of(op) == "head" and op.name == "qc.linear"]
    (linear,) = ops
    sizes: list[Any] = []
    for size in shape_of(linear.results[0].type):
        sizes += [] if size == 1 else [str(size)]
    return " ".join(sizes)


@pytest.mark.parametrize(("form", "sizes"), [
    ("last", "b 97"), ("kept", "b 97"), ("first", "b 97"), ("one row", "s 97"), ("gather", "b 97"), ("float", "b 97"),
    ("both", "b s 97"), ("columns", "b s 97"), ("two", "b s 97"),
])  # fmt: skip
def test_rows_that_nothing_reads_are_not_computed(form: str, sizes: str) -> None:
    """Other readers, a cut through rows, and rows that would have to be copied first leave the head as it is."""
    assert head_shape(form).replace("b*s", "b s") == sizes


@pytest.mark.parametrize("quant", [qc.QuantConfig("int8", activations="int8"), None], ids=["w8a8", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_it_is_in_every_recipe(quant: Any, dtype: torch.dtype) -> None:
    assert head_shape("last", quant, dtype) == "b 97"


@pytest.mark.parametrize("form", ["last", "one row", "gather"])
def test_the_logits_are_those_of_eager_torch(form: str) -> None:
    program = compiled(form)
    for b, s in ((1, 3), (4, 37), (2, 9)):
        x = torch.randn(b, s, HIDDEN, generator=torch.Generator().manual_seed(b))
        torch.testing.assert_close(program(x), program.oracle(x), rtol=1e-5, atol=1e-5)


def test_the_report_says_so() -> None:
    found = [c for c in compiled("last").report().choices if c.stage == "pull-slices"]
    assert found and any("'head'" in choice.why for choice in found)
