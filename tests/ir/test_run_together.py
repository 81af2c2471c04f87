"""run_together: several inputs op by op, with constants that whoever watches gives, and may change between two uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import Float32Type
from xdsl.dialects.linalg.ops import IndexOp
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineMap

from qcompiler.ir import build, qc, types
from qcompiler.ir.interpreter import Watch, run_together
from qcompiler.plan.weights import NoBytes, StoredTensor, WeightStore


def test_constants_are_asked_for_at_each_use_and_where_a_body_reads_them(module_of: Callable[..., Any]) -> None:
    """x + t, with t read inside of the body, then two linears of one w. No value comes from the store."""
    weights, ops = WeightStore(), []
    weights.add(StoredTensor("t", "f32", (2,), NoBytes(8)))
    weights.add(StoredTensor("w", "f32", (2, 2), NoBytes(16)))

    def body(b: Builder, args: Any) -> Any:
        table = b.insert(qc.ConstOp("t", types.tensor((2,), "f32"))).result
        w = b.insert(qc.ConstOp("w", types.tensor((2, 2), "f32"))).result

        def scalars(i: Builder, s: Sequence[SSAValue]) -> Any:
            entry = i.insert(tensor.ExtractOp(table, [i.insert(IndexOp(1)).result], Float32Type()))
            return i.insert(arith.AddfOp(s[0], entry.result))

        maps = [AffineMap.identity(2)] * 2
        x = build.generic(b, args, maps, ("b", 2), "f32", ["parallel"] * 2, scalars)
        for _ in range(2):
            ops.append(b.insert(qc.LinearOp(x, w, None, types.tensor(("b", 2), "f32"))))
            x = ops[-1].result
        return [x]

    module = module_of([(("b", 2), "f32")], body)
    values: dict[str, Any] = {"t": np.array([1, 2], np.float32), "w": np.eye(2, dtype=np.float32)}
    seen: list[list[Any]] = []

    def see(op: Any, x: list[Any]) -> None:
        assert op is ops[len(seen)]
        seen.append(x)
        values["w"] = 10 * values["w"]

    inputs = [[np.full((rows, 2), rows, np.float32)] for rows in (1, 3)]
    run_together(module, weights, inputs, Watch(lambda op: values[op.key], {op: op.x for op in ops}, see))
    for number, (given,) in enumerate(inputs):
        np.testing.assert_array_equal(seen[0][number], given + values["t"])
        np.testing.assert_array_equal(seen[1][number], 10 * (given + values["t"]))
