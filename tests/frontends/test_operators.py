"""Every operator that import knows: torch, the interpreter and the compiled program agree; the page is up to date."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.errors import DataDependentShapeError, UnsupportedOperatorError
from qcompiler.frontends.torch import frontend, operators
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.importer import BUILDERS, ImportResult

cases = load("tests/frontends/operator_cases.py")

QUICK = ("fixed", "index", "pool")
"""Tables that are also compiled in `make test`; all of them are in `make test-full`."""


@functools.cache
def imported(name: str) -> ImportResult:
    if name in QUICK:
        return compiled(name)[1]
    group = cases.GROUPS[name]
    return import_torch(group.module(), (group.tensors(group.rows[0]),), {}, None, group.dynamic_shapes())


@functools.cache
def compiled(name: str) -> tuple[qc.Program, ImportResult]:
    """A program, and a copy of what was imported for it: passes change the module that they are given."""
    group, kept = cases.GROUPS[name], []

    def kept_import(*args: Any, **options: Any) -> ImportResult:
        result = import_torch(*args, **options)
        kept.append(dataclasses.replace(result, module=result.module.clone(), weights=result.weights.copy()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "import_torch", kept_import)
        example = group.tensors(group.rows[0])
        program = qc.qcompile(group.module(), (example,), dynamic_shapes=group.dynamic_shapes())
    return program, kept[0]


def compare(
    group: Any, run: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]], distance: Callable[[Any, Any], float]
) -> None:
    """Each result of `run` against eager torch, at every number of rows; what differs is named by its case."""
    module = group.module()
    for rows in group.rows:
        given = group.tensors(rows)
        with torch.no_grad():
            wanted = module(given)
        names = [name for name, value in wanted.items() for _ in pytree.tree_leaves(value)]
        found = run(given)
        assert len(found) == len(names)
        bad: dict[str, Any] = {}
        for name, value, expected in zip(names, found, pytree.tree_leaves(wanted), strict=True):
            bound = group.tolerance if expected.is_floating_point() else 0.0
            error = distance(value, expected)
            if not error <= bound:
                bad[name] = error
        assert not bad, (rows, bad)


@pytest.mark.parametrize("name", cases.GROUPS)
def test_the_interpreter_equals_torch(name: str, interpreted: Any, distance: Any) -> None:
    result = imported(name)
    compare(cases.GROUPS[name], lambda given: interpreted(result, *given.values()), distance)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in cases.GROUPS]
)
def test_compiled_programs_equal_torch(name: str, distance: Any) -> None:
    program, _ = compiled(name)
    compare(cases.GROUPS[name], lambda given: pytree.tree_leaves(program(given)), distance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "pool", "resize"])
def test_the_simulated_gpu_equals_torch(name: str, distance: Any) -> None:
    group = dataclasses.replace(cases.GROUPS[name], dynamic=False, rows=(5,))
    program = qc.qcompile(group.module(), (group.tensors(5),), device="sim:0")
    compare(group, lambda given: pytree.tree_leaves(program(given)), distance)


aten = torch.ops.aten
TAKEN_APART_WHILE_TRACING = {
    aten.alpha_dropout.default, aten.chunk.default, aten.contiguous.default, aten.dropout.default,
    aten.flatten.using_ints, aten.hardshrink.default, aten.lift_fresh_copy.default, aten.reshape.default,
    aten.rrelu_with_noise.default, aten.softshrink.default, aten.to.dtype, aten.to.dtype_layout,
    aten.unflatten.int, aten.upsample_bicubic2d.default, aten.upsample_bilinear2d.default,
}  # fmt: skip
"""torch.export of this release never leaves these in a graph (their functions have cases); other releases may."""


def test_every_operator_of_the_table_has_a_case() -> None:
    reached: set[Any] = {operator.getitem}
    for name, group in cases.GROUPS.items():
        reached |= {node.target for node in imported(name).quantized.exported.program.graph.nodes}
        if group.layers is not None:  # insert-qdq rewrites products, convolutions and norms
            exported = export_model(group.module(), (group.tensors(group.rows[0]),), {}, group.dynamic_shapes())
            reached |= {node.target for node in exported.graph.nodes}
    missing = sorted(str(op) for op in set(BUILDERS) - reached - TAKEN_APART_WHILE_TRACING)
    assert not missing, f"no case in operator_cases.py reaches {missing}"


def test_the_page_of_operators_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    assert page.read_text(encoding="utf-8") == operators.markdown(), "run `make docs`"


class Function(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda x: x.nonzero(), DataDependentShapeError, "use a mask"),
        (lambda x: x.masked_select(x > 0), DataDependentShapeError, "use a mask"),
        (lambda x: x.unique(), DataDependentShapeError, "use a mask"),
        (nn.Sequential(nn.Unflatten(0, (2, 3)), nn.BatchNorm1d(3)), UnsupportedOperatorError, "call model.eval"),
        (lambda x: x + torch.randn_like(x), UnsupportedOperatorError, "aten.randn_like"),
        (torch.lgamma, UnsupportedOperatorError, "aten.lgamma"),
        (torch.histc, UnsupportedOperatorError, "give min and max"),
        (lambda x: torch.searchsorted(x, x, sorter=x.argsort()), UnsupportedOperatorError, "sort the sequence first"),
    ],
)
def test_what_cannot_lower_says_what_to_do(function: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        import_torch(Function(function), (torch.randn(6),))
