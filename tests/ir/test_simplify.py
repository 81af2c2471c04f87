"""canonicalize, cse and dce remove what they may and keep every bit of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp

from qcompiler.ir import build, qc, types
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.types import ELEMENT_TYPES
from qcompiler.passes.canonicalize import CanonicalizePass
from qcompiler.passes.cse import CsePass
from qcompiler.passes.dce import DcePass
from qcompiler.plan.torch_regions import TorchOp, TorchRegion
from qcompiler.plan.weights import WeightStore

ModuleOf = Callable[..., ModuleOp]
CTX = QCContext.default()


def names(module: ModuleOp) -> list[str]:
    return [op.name for op in module.body.block.first_op.body.block.ops if op.name != "func.return"]


def simplified(module: ModuleOp, *passes: Any) -> list[str]:
    """Op names after the passes; the answer on random inputs must stay equal to the bit."""
    rng, function = np.random.default_rng(1), module.body.block.first_op
    sizes = {"b": 2, "s": 3}
    inputs = [
        rng.standard_normal([sizes.get(d, d) for d in types.shape_of(a.type)]).astype(np.float32)
        for a in function.body.block.args
    ]
    before = run(module, WeightStore(), inputs)
    for each in passes or (CanonicalizePass(), CsePass(), DcePass()):
        each.apply(CTX, module)
        module.verify()
    after = run(module, WeightStore(), inputs)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    return names(module)


X = [(("b", "s", 12), "f32")]


def test_transposes_cancel(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        return [build.transpose(b, build.transpose(b, a[0], [2, 0, 1]), [1, 2, 0])]

    assert simplified(module_of(X, body)) == []


def test_transposes_merge(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        return [build.transpose(b, build.transpose(b, a[0], [2, 0, 1]), [0, 2, 1])]

    assert simplified(module_of(X, body)) == ["qc.dim", "qc.dim", "tensor.empty", "linalg.transpose"]


def test_reshape_there_and_back_goes(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        return [build.reshape(b, build.reshape(b, a[0], ("b*s", 12)), ("b", "s", 12))]

    assert simplified(module_of(X, body)) == []


def test_reshapes_merge_into_one(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        flat = build.reshape(b, a[0], ("12*b*s",))
        return [build.reshape(b, flat, ("b", "s", 3, 4))]

    assert simplified(module_of(X, body)) == ["qc.dim", "qc.dim", "tensor.expand_shape"]


def test_a_reshape_that_needs_two_ops_stays(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        return [build.reshape(b, a[0], ("b", 4, "3*s"))]

    assert simplified(module_of(X, body)).count("tensor.collapse_shape") == 1


def test_broadcasts_merge(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        row = build.reduce(b, build.reduce(b, a[0], [2], "add"), [1], "max")
        return [build.broadcast_in(b, build.broadcast_in(b, row, ("b", 5), [0]), (7, "b", 5), [1, 2])]

    assert simplified(module_of(X, body)).count("linalg.broadcast") == 1


def test_unused_ops_and_inputs_go(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        build.transpose(b, a[0], [2, 1, 0])
        doubled = build.transpose(b, a[0], [0, 2, 1])
        again = build.transpose(b, doubled, [0, 2, 1])
        return [
            build.pointwise(
                b, [a[0], again], ("b", "s", 12), "f32", lambda i, s: i.insert(arith.AddfOp(s[0], s[0]))
            )
        ]  # fmt: skip

    module = module_of(X, body)
    assert simplified(module) == ["qc.dim", "qc.dim", "tensor.empty", "linalg.generic"]
    generic = next(op for op in module.walk() if op.name == "linalg.generic")
    assert len(generic.inputs) == 1


def test_an_input_that_alone_gives_a_loops_size_stays(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        from xdsl.ir.affine import AffineDimExpr, AffineMap

        maps = [AffineMap.identity(1), AffineMap(1, 0, ())]
        init = build.fill(b, 0.0, (), "f32")

        def count(i: Builder, s: Any) -> Any:
            return i.insert(arith.AddfOp(s[1], build.scalar(i, 1.0, "f32")))

        assert AffineDimExpr(0) in maps[0].results
        return [build.generic(b, a, maps, (), "f32", ["reduction"], count, init=init)]

    module = module_of([(("b",), "f32")], body)
    simplified(module)
    assert run(module, WeightStore(), [np.zeros(5, np.float32)])[0] == 5


def test_equal_ops_are_shared_whatever_their_path(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        both = []
        for path in ("left", "right"):
            stamped = build.with_path(b.insertion_point, path)
            both.append(
                build.pointwise(
                    stamped, [a[0]], ("b", "s", 12), "f32", lambda i, s: i.insert(arith.MulfOp(s[0], s[0]))
                )
            )  # fmt: skip
        return both

    assert simplified(module_of(X, body), CsePass()) == ["qc.dim", "qc.dim", "tensor.empty", "linalg.generic"]


def test_different_bodies_are_not_shared(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        return [
            build.pointwise(b, [a[0]], ("b", "s", 12), "f32", lambda i, s, k=k: i.insert(k(s[0], s[0])))
            for k in (arith.AddfOp, arith.MulfOp)
        ]

    assert simplified(module_of(X, body)).count("linalg.generic") == 2


def test_state_reads_are_not_shared_but_removed_when_unused(module_of: ModuleOf) -> None:
    def body(b: Builder, a: Any) -> Any:
        b.insert(qc.StateOp("kv", types.tensor((2,), "f32")))
        region = TorchRegion(inputs=1, ops=(TorchOp(target="aten.foo.default", args=({"v": 0},)),), outputs=(1,))
        b.insert(qc.TorchCallOp(region, [a[0]], [a[0].type]))  # what torch runs is functional
        b.insert(qc.StateUpdateOp("kv", a[0]))
        return [a[0]]

    module = module_of(X, body)
    DcePass().apply(CTX, module)
    assert names(module) == ["qc.state_update"]


@pytest.mark.parametrize(
    ("expression", "ops"),
    [
        (lambda i, x: i.insert(arith.MulfOp(x, build.scalar(i, 1.0, "f32"))).result, 0),
        (lambda i, x: i.insert(arith.AddfOp(x, build.scalar(i, -0.0, "f32"))).result, 0),
        (lambda i, x: i.insert(arith.AddfOp(x, build.scalar(i, 0.0, "f32"))).result, 2),  # turns -0.0 into 0.0
        (lambda i, x: i.insert(arith.TruncFOp(
            i.insert(arith.ExtFOp(x, ELEMENT_TYPES["f64"])).result, ELEMENT_TYPES["f32"])).result, 0),
        (lambda i, x: i.insert(arith.ExtFOp(
            i.insert(arith.TruncFOp(x, ELEMENT_TYPES["bf16"])).result, ELEMENT_TYPES["f32"])).result, 2),
        (lambda i, x: i.insert(arith.MulfOp(x, i.insert(arith.AddfOp(
            build.scalar(i, 0.1, "f32"), build.scalar(i, 0.2, "f32"))).result)).result, 2),
    ],
    ids=["x*1", "x+-0", "x+0", "truncf(extf)", "extf(truncf)", "constants"],
)  # fmt: skip
def test_scalar_identities(module_of: ModuleOf, expression: Any, ops: int) -> None:
    def body(b: Builder, a: Any) -> Any:
        from xdsl.dialects.math import ExpOp

        return [
            build.pointwise(b, [a[0]], ("b", "s", 12), "f32", lambda i, s: i.insert(ExpOp(expression(i, s[0]))))
        ]  # fmt: skip

    module = module_of(X, body)
    simplified(module)
    generic = next(op for op in module.walk() if op.name == "linalg.generic")
    assert len(list(generic.body.block.ops)) - 2 == ops  # math.exp and linalg.yield


def test_a_nest_that_only_copies_goes(module_of: ModuleOf) -> None:
    module = module_of(X, lambda b, a: [build.pointwise(b, a, ("b", "s", 12), "f32", lambda _i, s: s[0])])
    assert simplified(module) == []
