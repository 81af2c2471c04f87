"""The report says which idioms stand where, and why something that looks like one is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.inspect.report import Choice, idioms_text
from qcompiler.ir.context import QCContext
from qcompiler.passes.pipeline import run_pipeline, upto

X = torch.randn(2, 3, 5, 8)


class Form(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(x)


def decided(form: Callable[..., Any], *inputs: torch.Tensor) -> list[tuple[str, str]]:
    imported = import_torch(Form(form).eval(), inputs or (X,))
    ctx = QCContext.default(weights=imported.weights)
    run_pipeline(imported.module, ctx, stages=upto("raise-idioms"))
    return [(d.what, d.why) for d in ctx.report.of("raise-idioms")]


def halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


LOOKALIKES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "mean over another dim": (
        lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6), "a norm", "not the mean over the last dim"),
    "a sum and no mean": (
        lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6), "a norm", "not the mean over the last dim"),
    "over two dims": (
        lambda x: x * torch.rsqrt((x * x).mean((-2, -1), keepdim=True) + 1e-6), "a norm", "not the mean over the last"),
    "no eps": (lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True)), "a norm", "no constant is added"),
    "of cubes": (
        lambda x: x * torch.rsqrt((x * x * x).mean(-1, keepdim=True) + 1e-6), "a norm", "not of squares"),
    "of something else": (
        lambda x: x.sin() * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), "a norm", "not the tensor whose"),
    "no maximum": (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "a softmax", "no maximum is subtracted"),
    "another maximum": (
        lambda x: (x - x.amax(1, keepdim=True)).exp() / (x - x.amax(1, keepdim=True)).exp().sum(-1, keepdim=True),
        "a softmax", "do not run along the same dim"),
    "another sum": (
        lambda x: (x - x.amax(-1, keepdim=True)).exp() / (x * x).exp().sum((-1, -2), keepdim=True),
        "a softmax", "does not run along one dim"),
    "thirds": (
        lambda x: x * 2 + torch.cat((-x[..., 3:], x[..., :3]), -1), "a rotary embedding", "not the two halves"),
    "of rank 3": (lambda x: x[0] * 2 + halves(x[0]) * 3, "a rotary embedding", "not (batch, heads, sequence, depth)"),
    "a difference": (lambda x: x.cos() - halves(x) * x.sin(), "a rotary embedding", "no sum of x * cos"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_looks_like_an_idiom_and_is_none_says_why(name: str) -> None:
    form, what, why = LOOKALIKES[name]
    said = decided(form)
    assert any(text == f"looks like {what} and stays" and why in reason for text, reason in said), said


def test_a_product_of_a_softmax_that_is_no_attention_says_why() -> None:
    said = decided(lambda x: x.softmax(-1) @ x.transpose(-1, -2))
    assert (
        "softmax between two matmuls stays",
        "its scores are not a matmul that is scaled, capped and masked",
    ) in said


def test_idioms_are_named_and_nothing_else_looks_like_one() -> None:
    def forms(x: torch.Tensor) -> Any:
        rms = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return rms, nn.functional.layer_norm(x, (8,)), x.softmax(-1), x.sigmoid() / x.exp(), x.sum(-1).sqrt()

    said = decided(forms)
    assert sorted(what for what, _ in said if "stays" not in what) == [
        "found qc.layer_norm", "found qc.softmax", "raised qc.rms_norm",
    ]  # fmt: skip
    assert not [what for what, _ in said if "stays" in what]


def test_the_report_has_a_ledger_of_idioms() -> None:
    choices = [
        Choice("raise-idioms", "layers.0.norm", "raised qc.rms_norm", "it was written out in parts"),
        Choice("raise-idioms", "layers.1.norm", "found qc.rms_norm", "the model calls it by its name"),
        Choice("raise-idioms", "head.norm", "looks like a norm and stays", "no constant is added"),
        Choice("fuse-epilogues", "head", "something else", ""),
    ]
    assert idioms_text(choices).splitlines() == [
        "Idioms",
        "  rms_norm: 2, 1 of them written out in parts  [layers.0.norm and 1 more]",
        "  looks like a norm and stays  [head.norm]",
        "      no constant is added",
    ]
