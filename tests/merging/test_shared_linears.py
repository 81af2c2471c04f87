"""Linears of several formats that read the same rows, in one launch on a GPU: q and k in one format, v in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.passes.pipeline import parse_passes
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.linears import LinearsKernel

SLOW = pytest.mark.slow
K = 256
MIXED = {"*.v": "q6_K"}


class Attention(nn.Module):
    """A norm, the three linears that read it, and attention of four heads."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(K, K, bias=bias) for bias in (False, False, True, True))
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        heads = (each(n).view(1, -1, 4, K // 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return (n if self.keeps else x) + self.o(mixed.transpose(1, 2).reshape(-1, K))


class Model(nn.Module):
    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.layer = Attention(keeps=keeps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def compiled(model: nn.Module, x: torch.Tensor, device: str, separate: tuple[str, ...] = (), **recipe: Any) -> Any:
    config = qc.QuantConfig("q4_K", rules=MIXED, separate=separate, promise_bits=None, **recipe)
    return qc.qcompile(model, (x,), quant=config, device=device)


def groups(program: qc.Program) -> list[LinearsKernel]:
    return [spec.body for spec in program.plan.kernels if isinstance(spec.body, LinearsKernel)]


def launches(program: qc.Program) -> int:
    return len(program.plan.entries[0].steps)


def near(ours: Any, theirs: Any, tolerance: float) -> None:
    assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


@pytest.mark.parametrize(
    ("m", "dtype", "keeps"),
    [
        (1, torch.float32, False),
        pytest.param(7, torch.bfloat16, False, marks=SLOW),
        (8, torch.float32, True),
        pytest.param(1, torch.bfloat16, True, marks=SLOW),
    ],
)
def test_two_formats_take_one_launch_on_a_gpu(m: int, dtype: torch.dtype, keeps: bool) -> None:
    """Both linears begin with the norm. Where other ops read it, one of them keeps its rows."""
    torch.manual_seed(0)
    model, x = Model(keeps=keeps).eval().to(dtype), torch.randn(m, K).to(dtype)
    one, apart = (compiled(model, x, "sim:0", separate) for separate in ((), ("*.v",)))
    (launch,) = groups(one)
    assert [each.norm is not None for each in launch.linears] == [True, True]
    assert [each.keeps for each in launch.linears].count(True) == keeps
    assert not groups(apart) and launches(one) == launches(apart) - 1
    near(one(x), apart(x), 1e-6 if dtype == torch.float32 else 1e-2)
    (said,) = [c for c in one.report().choices if c.stage == "merge-launches" and "linears_0" in c.what]
    assert "2 linears of one kernel read the same rows" in said.why


def test_the_rows_of_int8_are_made_for_both() -> None:
    torch.manual_seed(1)
    model, x = Model().eval(), torch.randn(3, K)
    config = {"rules": {"*.v": "int8"}, "activations": "int8", "promise_bits": None}
    one = qc.qcompile(model, (x,), quant=qc.QuantConfig("int4", **config), device="sim:0")
    on_cpu = qc.qcompile(model, (x,), quant=qc.QuantConfig("int4", **config))
    (launch,) = groups(one)
    assert all(each.rows is not None and each.norm is not None for each in launch.linears)
    near(one(x), on_cpu(x), 2.0**-8)  # on a CPU attention rounds its factors, by so much


def test_replays_of_a_captured_step_see_new_input() -> None:
    torch.manual_seed(2)
    model, x = Model().eval(), torch.randn(1, K)
    program = compiled(model, x, "sim:0")
    graph = program.capture(x)
    for each in (x, x * -3, torch.randn(1, K)):
        near(graph.replay(each), program(each), 0)


@pytest.mark.parametrize(("device", "m"), [("cpu", 1), ("sim:0", 9)])
def test_a_cpu_and_more_than_eight_rows_keep_their_launches(device: str, m: int) -> None:
    torch.manual_seed(3)
    model, x = Model().eval(), torch.randn(m, K)
    program = compiled(model, x, device)
    assert not groups(program)
    bodies = [spec.body for spec in program.plan.kernels if isinstance(spec.body, LinearKernel)]
    assert len(bodies) == 3  # q and k are one, v, o


def test_the_option_is_text() -> None:
    (made,) = parse_passes('merge-launches{separate="*.v"}')
    assert made.separate == ("*.v",)  # type: ignore[attr-defined]
