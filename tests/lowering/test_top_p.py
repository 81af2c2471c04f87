"""A softmax and a draw through the whole pipeline: on the CPU and on the simulated GPU what the interpreter draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from top_p_cases import drawn, rows, shares
from xdsl.builder import Builder
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from qcompiler.errors import QCompilerError
from qcompiler.ir import build, interpreter, qc
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.qc_index import TopPOp
from qcompiler.ir.types import tensor
from qcompiler.passes.pipeline import run_pipeline
from qcompiler.plan.plan import Signature
from qcompiler.runtime import LoadedProgram
from qcompiler.runtime.image import ProgramTarget, build_image

SIGNATURE = Signature(
    inputs={
        "args": {"kind": "tuple", "items": [{"kind": "leaf", "index": i} for i in range(3)]},
        "kwargs": {"kind": "dict", "keys": [], "items": []},
    },
    outputs={"kind": "leaf", "index": 0},
)
TARGETS = {"cpu": Target("cpu", "generic"), "sim:0": Target("cuda", "sm_80")}


def draw_from(make: Any, cols: int, *, softmax: bool, turned: bool = False) -> ModuleOp:
    """x (b, cols), or (cols, b) if `turned`; top (b); draw (b)."""

    def body(b: Builder, a: Sequence[SSAValue]) -> Sequence[SSAValue]:
        x = build.transpose(b, a[0], [1, 0]) if turned else a[0]
        if softmax:
            x = b.insert(qc.SoftmaxOp(x, tensor(("b", cols), "f32"), axis=1)).result
        return [b.insert(TopPOp(x, a[1], a[2], tensor(("b",), "i64"))).result]

    shape: tuple[Any, ...] = (cols, "b") if turned else ("b", cols)
    module: ModuleOp = make([(shape, "f32"), (("b",), "f32"), (("b",), "f32")], {"b": (1, 16)}, body)
    return module


def compiled(bench: Any, module: ModuleOp, device: str) -> LoadedProgram:
    target = TARGETS[device]
    devices = ("cpu" if device == "cpu" else "cuda:0",)
    context = QCContext.default(weights=bench.ctx.weights.copy(), target=target, devices=devices)
    run_pipeline(module.clone(), context)
    assert context.emitted is not None
    kind: Any = target.kind
    image = build_image(
        context.emitted.plan, SIGNATURE, context.weights, target=ProgramTarget(kind=kind, isa=target.isa)
    )
    return LoadedProgram.from_image(image, device)


@pytest.mark.parametrize("device", TARGETS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("cols", [1, 13, 256])
def test_a_compiled_draw_is_the_defined_one(bench: Any, device: str, turned: bool, cols: int) -> None:
    program = compiled(bench, draw_from(bench.module, cols, softmax=False, turned=turned), device)
    for count in (1, 9):
        x, (top, draw) = rows("f32", cols)[:count], shares(count)
        given = np.ascontiguousarray(x.T) if turned else x
        assert np.array_equal(np.asarray(program(given, top, draw)), drawn(x, top, draw))


@pytest.mark.parametrize("device", TARGETS)
def test_logits_become_tokens(bench: Any, device: str) -> None:
    """Softmax rounds apart on each target; draws away from the borders between tokens are the same."""
    module = draw_from(bench.module, 64, softmax=True)
    logits = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32) * 3
    top, draw = np.full(16, 0.9, np.float32), np.linspace(0.02, 0.98, 16).astype(np.float32)
    (wanted,) = interpreter.run(module, bench.ctx.weights.copy(), [logits, top, draw])
    program = compiled(bench, module, device)
    assert np.array_equal(np.asarray(program(logits, top, draw)), wanted)


def test_more_columns_than_sums_can_hold_are_refused(bench: Any) -> None:
    def body(b: Builder, a: Sequence[SSAValue]) -> Sequence[SSAValue]:
        return [b.insert(TopPOp(a[0], a[1], a[1], tensor((2,), "i64"))).result]

    module = bench.module([((2, "n"), "f32"), ((2,), "f32")], {"n": (1, 2**22 + 1)}, body)
    with pytest.raises(QCompilerError, match="the count 'n' may be above 4194304"):
        compiled(bench, module, "cpu")
