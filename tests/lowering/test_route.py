"""qc.route through the whole pipeline, over scores of three dims and scores that lie the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from route_cases import FORMS, close, routed, rows
from xdsl.builder import Builder
from xdsl.ir import SSAValue

from qcompiler.ir import build
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.qc_index import RouteOp
from qcompiler.ir.types import tensor
from qcompiler.passes.pipeline import run_pipeline
from qcompiler.plan.plan import Signature
from qcompiler.runtime import LoadedProgram
from qcompiler.runtime.image import ProgramTarget, build_image

SIGNATURE = Signature(
    inputs={
        "args": {"kind": "tuple", "items": [{"kind": "leaf", "index": 0}]},
        "kwargs": {"kind": "dict", "keys": [], "items": []},
    },
    outputs={"kind": "tuple", "items": [{"kind": "leaf", "index": 0}, {"kind": "leaf", "index": 1}]},
)
TARGETS = {"cpu": Target("cpu", "generic"), "sim:0": Target("cuda", "sm_80")}


@pytest.mark.parametrize("device", TARGETS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_compiled_routing_is_the_defined_one(bench: Any, device: str, turned: bool) -> None:
    form = FORMS[1]

    def body(b: Builder, a: Sequence[SSAValue]) -> Sequence[SSAValue]:
        x = build.transpose(b, a[0], [2, 0, 1]) if turned else a[0]
        kinds = [tensor(("b", 3, 4), "f32"), tensor(("b", 3, 4), "i64")]
        return b.insert(RouteOp(x, kinds, k=4, scores=form[0], normalise=form[1])).results

    shape: tuple[Any, ...] = (3, 13, "b") if turned else ("b", 3, 13)
    target = TARGETS[device]
    context = QCContext.default(
        weights=bench.ctx.weights.copy(), target=target, devices=("cpu" if device == "cpu" else "cuda:0",)
    )
    run_pipeline(bench.module([(shape, "f32")], {"b": (1, 16)}, body), context)
    assert context.emitted is not None
    kind: Any = target.kind
    image = build_image(
        context.emitted.plan, SIGNATURE, context.weights, target=ProgramTarget(kind=kind, isa=target.isa)
    )
    program = LoadedProgram.from_image(image, device)
    for count in (1, 3):
        x = rows("f32", 13)[: 3 * count]
        given = np.ascontiguousarray(x.reshape(count, 3, 13).transpose(1, 2, 0)) if turned else x.reshape(count, 3, 13)
        weights, indices = (np.asarray(each).reshape(-1, 4) for each in program(given))
        wanted, places = routed(x, 4, form)
        assert np.array_equal(indices, places)
        close(weights, wanted)
