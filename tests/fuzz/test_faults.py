"""The fuzz finds faults that are planted in passes, in the frontend and in the compiler's flags, within few graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphfuzz import batch, generate
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import DenseArrayBase, ModuleOp, i64
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.passes import ModulePass

from qcompiler.ir import build
from qcompiler.passes import fuse_glu
from qcompiler.passes.canonicalize import CanonicalizePass
from qcompiler.passes.fold_views import FoldViewsPass
from qcompiler.passes.fuse_elementwise import FuseElementwisePass

SIZE, MOST = 10, 200
"""Graphs in a program, and how many may be needed."""


def begin_slices_early(module: ModuleOp) -> None:
    for op in module.walk():
        if isinstance(op, tensor.ExtractSliceOp):
            offsets = [int(o) for o in op.static_offsets.get_values()]
            moved = [o - 1 if o > 0 else o for o in offsets]
            op.properties["static_offsets"] = DenseArrayBase.from_list(i64, moved)


def swap_a_subtraction(module: ModuleOp) -> None:
    """In loops of several steps only, as fusion makes them."""
    for op in module.walk():
        inside = list(op.body.block.ops) if isinstance(op, GenericOp) else []
        found = [each for each in inside if isinstance(each, arith.SubfOp)]
        if found and len(inside) > 3:
            left, right = found[0].operands
            found[0].operands = [right, left]


def compare_without_nan(module: ModuleOp) -> None:
    """`une`, which is true for NaN, becomes `one`, which is not."""
    for op in module.walk():
        if isinstance(op, arith.CmpfOp) and op.predicate.value.data == 13:
            op.properties["predicate"] = arith.CmpfOp(op.lhs, op.rhs, "one").predicate


def after(pass_: type[ModulePass], fault: Callable[[ModuleOp], None], patch: pytest.MonkeyPatch) -> None:
    plain = pass_.apply

    def apply(self: Any, ctx: Any, op: ModuleOp) -> None:
        plain(self, ctx, op)
        fault(op)

    patch.setattr(pass_, "apply", apply)


def maxima_from_zero(patch: pytest.MonkeyPatch) -> None:
    plain = build.reduction_identity
    patch.setattr(build, "reduction_identity", lambda kind, dtype: 0 if kind == "max" else plain(kind, dtype))


def count_until_found(checks: batch.Checks, profile: str | None = None) -> tuple[int, str]:
    """Graphs made until a program failed, and the component that showed it."""
    for number in range(MOST // SIZE):
        seed = 9000 + number
        sizes = generate.sizes_of(seed)
        graphs = [generate.graph_of(1000 * seed + i, sizes, profile) for i in range(SIZE)]
        report = batch.check(graphs, sizes, checks)
        if report.failures:
            return SIZE * (number + 1), report.failures[0].component
    raise AssertionError(f"{MOST} graphs did not show the fault")


UNPATCHED = batch.Checks(native=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pass_", "fault", "profile"),
    [
        (FoldViewsPass, begin_slices_early, None),
        (FuseElementwisePass, swap_a_subtraction, None),
        (CanonicalizePass, compare_without_nan, "special"),
    ],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_a_fault_in_a_pass_is_found(
    pass_: type[ModulePass], fault: Callable[[ModuleOp], None], profile: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    after(pass_, fault, monkeypatch)
    graphs, component = count_until_found(UNPATCHED, profile)
    print(f"{fault.__name__}: found after {graphs} graphs, by {component}")
    assert component == "passes"


@pytest.mark.slow
def test_a_maximum_that_starts_at_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    maxima_from_zero(monkeypatch)
    graphs, component = count_until_found(UNPATCHED)
    print(f"found after {graphs} graphs")
    assert component in ("import", "passes")


@pytest.mark.slow
def test_a_pair_whose_halves_are_exchanged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fuse_glu._sums

    def exchanged() -> Any:
        body, (first, second) = plain()
        return body, (second, first)

    monkeypatch.setattr(fuse_glu, "_sums", exchanged)
    graphs, component = count_until_found(batch.Checks(native=False, static=True), "blocks")
    print(f"found after {graphs} graphs")
    assert component == "passes"


@pytest.mark.slow
def test_kernels_compiled_with_fast_math_are_found() -> None:
    # Not -Ofast: linked with it, a library makes the whole process flush denormals when it is loaded.
    flags = "-O3 -fassociative-math -fno-signed-zeros -fno-trapping-math -ffinite-math-only -freciprocal-math"
    graphs, component = count_until_found(batch.Checks(optimise=flags), "special")
    print(f"found after {graphs} graphs")
    assert component == "native"
