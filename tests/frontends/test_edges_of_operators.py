"""Truth values, rank 0, nothing at all, infinities: the edges of operators, which other tables do not reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import qcompiler as qc
from qcompiler.errors import QCompilerError
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.interpreter import run

INF, NAN = float("inf"), float("nan")
INPUTS = {
    "b": torch.tensor([[True, True, False], [True, True, True], [False, False, False]]),
    "f": torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0], [2.0, 2.0, 2.0]]),
    "s": torch.tensor(2.5), "n": torch.tensor(3), "t": torch.tensor(True), "zero": torch.tensor(0),
    "odd": torch.tensor([INF, -INF, NAN, 0.0]), "more": torch.tensor([NAN, 1.0, -INF, NAN]),
    "at": torch.tensor([[0, 0, 1], [1, 1, 0], [2, 2, 2]]), "one": torch.tensor([0]),
    "i": torch.arange(1, 33).reshape(1, 4, 8),
    "h": (torch.arange(1, 400) * 0.37).bfloat16(), "g": (torch.arange(1, 400) % 7 + 0.3).bfloat16(),
}  # fmt: skip

CASES: dict[str, Callable[[Any], Any]] = {
    "bool amax amin": lambda d: (d.b.amax(1), d.b.amin(1), d.b.amax(), d.b.amin(0, keepdim=True)),
    "bool max min": lambda d: (d.b.max(), d.b.min(), *d.b.max(1), *d.b.min(0)),
    "bool argmax": lambda d: (d.b.int().argmax(1), d.b.any(1), d.b.all(0), d.b.sum(1), d.b.prod(1)),
    "bool cummax": lambda d: (*d.b.cummax(1), *d.b.cummin(0)),
    "bool scatter_reduce": lambda d: (
        torch.zeros_like(d.b).scatter_reduce(1, d.at, d.b, "amax"),
        torch.ones_like(d.b).scatter_reduce(1, d.at, d.b, "amin"),
        d.b.scatter_reduce(1, d.at, d.b, "amax", include_self=False),
        d.b.scatter_reduce(1, d.at, d.b, "amin", include_self=False),
    ),
    "bool and other numbers": lambda d: (
        d.b.masked_fill(d.f > 1, 10), torch.full((2, 3), 7, dtype=torch.bool), torch.full_like(d.b, -1),
        torch.full_like(d.b, 0.5), d.b.index_fill(1, d.one, 3),
    ),
    "flip of no dims": lambda d: (d.f.flip(()), d.b.flip(()), d.s.flip(())),
    "squeeze of no dims": lambda d: d.f[:1].squeeze(()),
    "var over nothing": lambda d: (
        d.f[:, :0].var(1), d.f[:, :0].std(1), d.f[:, :1].var(1), d.f[:, :1].std(1), d.f.var((0, 1), correction=20),
        *torch.var_mean(d.f[:0]), d.s.var(), d.s.std(), d.s.var(correction=0),
    ),
    "hypot of infinities": lambda d: (torch.hypot(d.odd, d.more), torch.hypot(d.more, d.odd)),
    "reductions of rank 0": lambda d: (
        d.s.sum(), d.s.sum(0), d.s.mean(), d.s.mean(-1), d.s.prod(), d.s.amax(), d.s.amin(0), d.s.max(), *d.s.min(0),
        d.s.argmax(), d.s.argmin(0), d.s.any(), d.t.all(0), d.s.norm(), d.s.logsumexp(0), d.n.sum(), d.n.max(),
        d.t.sum(), d.t.amax(), d.s.softmax(0), d.s.log_softmax(0), d.s.cumsum(0), *d.s.sort(), d.s.median(),
        torch.linalg.vector_norm(d.s), d.s.count_nonzero(), d.s.nansum(), d.s.aminmax(),
    ),
    "picking from rank 0": lambda d: (
        d.s.gather(0, d.zero), d.s.gather(0, d.one), d.s.index_select(0, d.one), d.s.index_select(0, d.zero),
        d.s.take(d.zero), d.s.take(d.one), d.f.take(d.zero), d.f.gather(1, d.at)[0, 0].gather(0, d.zero),
        d.f.index_select(1, d.zero),
    ),
    "writing to rank 0": lambda d: (
        d.s.index_copy(0, d.one, d.s * 2), d.s.index_copy(0, d.zero, d.s * 3), d.s.index_fill(0, d.zero, 4.0),
        d.s.index_add(0, d.one, d.s), d.s.scatter(0, d.zero, d.s * 5), d.s.scatter_add(0, d.zero, d.s),
    ),
    "no indices": lambda d: (
        d.f[d.one[:0]], d.f.index_select(1, d.one[:0]), d.f.gather(1, d.at[:, :0]), d.f.take(d.one[:0]),
        d.f.index_copy(0, d.one[:0], d.f[:0]), d.f.index_add(0, d.one[:0], d.f[:0]), d.f.index_fill(0, d.one[:0], 1.0),
        d.f.scatter(1, d.at[:, :0], d.f), d.f.scatter_add(1, d.at[:, :0], d.f), d.f[0].gather(0, d.at[:, :0]),
    ),
    "steps of narrow floats": lambda d: (
        torch.div(d.h, d.g, rounding_mode="trunc"), torch.div(d.h, 0.3, rounding_mode="trunc"),
        torch.div(d.h, d.g[:1], rounding_mode="trunc"), torch.div(d.h, d.g, rounding_mode="floor"),
        (d.h * d.g).floor(), (d.h * d.g).long(), (d.h / d.g).round(), (d.h / d.g).trunc(), (d.h - d.g).ceil(),
        torch.histc(d.h, 20, 0.0, 100.0), torch.histc(d.h - d.g, 7, -1.0, 60.3),
    ),
}  # fmt: skip


class Every(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: CASES[name](SimpleNamespace(**tensors)) for name in self.names}


@functools.cache
def wanted() -> list[tuple[str, torch.Tensor]]:
    with torch.no_grad():
        results = Every(tuple(CASES))(INPUTS)
    return [(name, leaf) for name, tree in results.items() for leaf in pytree.tree_leaves(tree)]


def from_numpy(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def differing(found: list[Any]) -> dict[str, Any]:
    bad: dict[str, Any] = {}
    assert len(found) == len(wanted())
    for (name, value), each in zip(wanted(), found, strict=True):
        other = each if isinstance(each, torch.Tensor) else from_numpy(each)
        alike = value.shape == other.shape and value.dtype == other.dtype
        if not (alike and torch.allclose(value.double(), other.double(), rtol=1e-5, atol=1e-6, equal_nan=True)):
            bad.setdefault(name, []).append((value, other))
    return bad


def test_the_interpreter_agrees_with_torch() -> None:
    result = import_torch(Every(tuple(CASES)), (INPUTS,))
    given = [to_numpy(tensor) for tensor in INPUTS.values()]
    used = {spec.name for spec in result.inputs}
    assert len(used) == len(given)
    assert differing(run(result.module, result.weights, given)) == {}


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)])
def test_kernels_agree_with_torch(device: str) -> None:
    program = qc.qcompile(Every(tuple(CASES)), (INPUTS,), device=device)
    assert differing(pytree.tree_leaves(program(INPUTS))) == {}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_of_integers_is_refused_with_a_way_out(groups: int) -> None:
    class Convolves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.conv1d(x, torch.ones(4, 4 // groups, 3, dtype=torch.int64), groups=groups)

    with pytest.raises(QCompilerError, match=r"\.float\(\)"):
        qc.qcompile(Convolves(), (INPUTS["i"],), weights="none")


def test_a_graph_that_torch_cannot_take_apart_is_refused_with_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's run_decompositions asserts of some graphs with operators in place, batch norms among them."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.mean[1:]
            self.mean.add_(1.0)  # a view from before sees it: torch makes that functional
            return x + before.sum()

    def fails(*_: Any) -> Any:
        raise AssertionError("expected compiled_fn to be GraphModule\nand more")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fails)
    with pytest.raises(QCompilerError, match=r"GraphModule\); replace its operators in place .aten\.add_\.Tensor"):
        qc.qcompile(Writes(), (torch.ones(3),), weights="none")
