"""The builders make verified IR; reshapes are grouped as finely as the dims allow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.builder import Builder
from xdsl.dialects import arith, func, tensor
from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.errors import QCompilerError
from qcompiler.ir import build, types
from qcompiler.plan.dims import product


def function(*arguments: types.TensorType) -> tuple[ModuleOp, Builder, list[SSAValue]]:
    block = Block(arg_types=list(arguments))
    f = func.FuncOp("main", FunctionType.from_lists(list(arguments), []), Region(block))
    return ModuleOp([f]), Builder(InsertPoint.at_end(block)), list(block.args)


@pytest.mark.parametrize(
    ("source", "target", "groups"),
    [
        (("b", "s", 384), ("b", "s", 12, 32), [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2, 4))]),
        (("b", "s", 384), ("b*s", 384), [((0, 2), (0, 1)), ((2, 3), (1, 2))]),
        (("b*s", 12), ("b", "12*s"), [((0, 2), (0, 2))]),
        (("b", 1, "s"), ("b", "s"), [((0, 2), (0, 1)), ((2, 3), (1, 2))]),
        (("b", "s"), ("b", 1, 1, "s"), [((0, 1), (0, 3)), ((1, 2), (3, 4))]),
        ((1, "b", 1, 4), ("b", 4), [((0, 3), (0, 1)), ((3, 4), (1, 2))]),
        (("b", 1, 8), ("b", 1, 2, 4), [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2, 4))]),
        ((6, 4), (4, 6), [((0, 2), (0, 2))]),
        ((2, 3, 4), (2, 3, 4, 1), [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2, 4))]),
        ((1, 1), (1, 1, 1), [((0, 1), (0, 1)), ((1, 2), (1, 3))]),
    ],
)
def test_reshape_keeps_untouched_axes_apart(source: tuple, target: tuple, groups: list) -> None:
    assert build.reshape_groups(source, target) == groups


def test_reshape_refuses_another_element_count() -> None:
    with pytest.raises(QCompilerError, match="element counts differ"):
        build.reshape_groups(("b", 3), ("b", 4))


dims = st.sampled_from([1, 2, 3, 4, 6, "b", "s"])


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple, tuple]:
    """Two groupings of one list of factors."""
    factors = draw(st.lists(dims, min_size=1, max_size=6))

    def group() -> tuple:
        shape, i = [], 0
        while i < len(factors):
            n = draw(st.integers(1, 3))
            shape.append(product(factors[i : i + n]).to_dim())
            i += n
            if draw(st.booleans()):
                shape.append(1)
        return tuple(shape)

    return group(), group()


@settings(max_examples=150, deadline=None)
@given(two_shapes())
def test_reshape_of_any_two_shapes_verifies(shapes: tuple[tuple, tuple]) -> None:
    source, target = shapes
    module, builder, (x,) = function(types.tensor(source, "f32"))
    y = build.reshape(builder, x, target)
    builder.insert(func.ReturnOp())
    module.verify()
    assert types.shape_of(y.type) == target
    views = [op for op in module.walk() if isinstance(op, tensor.CollapseShapeOp | tensor.ExpandShapeOp)]
    assert len(views) <= 2


def test_every_builder_makes_verified_ops() -> None:
    module, b, (x, y) = function(types.tensor(("b", 3), "f32"), types.tensor(("b", 1), "f32"))
    total = build.pointwise(b, [x, y], ("b", 3), "f32", lambda i, a: i.insert(arith.AddfOp(a[0], a[1])))
    for kind in ("add", "mul", "max", "min"):
        build.reduce(b, total, [1], kind)
    t = build.transpose(b, total, [1, 0])
    w = build.broadcast_in(b, y, ("b", 2, 3), [0, 2])
    build.extract_slice(b, w, [0, 1, 0], ["b", 1, 2], [1, 1, 2])
    build.concat(b, [t, t], 1)
    scalar = build.fill(b, 1.0, (), "bf16")
    ones = build.reshape(b, scalar, (1, 1))
    assert types.shape_of(build.reshape(b, ones, ()).type) == ()
    b.insert(func.ReturnOp())
    module.verify()


def test_with_path_stamps_what_computes() -> None:
    """Sizes, scalars and views carry no path: it would only make the text longer."""
    module, b, (x,) = function(types.tensor(("b", 3), "f32"))
    stamped = build.with_path(b.insertion_point, "encoder.layer.0")
    build.pointwise(stamped, [x], ("b", 3), "f32", lambda i, s: i.insert(arith.NegfOp(s[0])))
    build.transpose(stamped, x, [1, 0])
    b.insert(func.ReturnOp())
    paths = {op.name: op.attributes["qc.path"].data for op in module.walk() if "qc.path" in op.attributes}
    assert paths == {"linalg.generic": "encoder.layer.0"}
