"""Reading the hand-written schedules under files/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from qcompiler import formats
from qcompiler.ir.context import QCContext
from qcompiler.ir.rt_plan import plan_from_rt, skeleton_kernels
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.plan import Plan
from qcompiler.plan.weights import StoredTensor

FILES = Path(__file__).parent / "files"


class Files:
    """The files, and a context whose weight store holds every constant that they name."""

    def __init__(self) -> None:
        self.ctx = QCContext.default()
        rng = np.random.default_rng(3)
        self.ctx.weights.add_array("scale", rng.standard_normal(32).astype(np.float32))
        self.ctx.weights.add_array("layer1.weight", rng.standard_normal((16, 16)).astype(np.float32))
        self.ctx.weights.add_array("layer2.weight", rng.standard_normal((16, 16)).astype(np.float32))
        fmt = formats.get("int8")
        packed = fmt.encode(rng.standard_normal((64, 64)).astype(np.float32))
        ref = FormatRef(name=fmt.name, params=dict(fmt.params))
        self.ctx.weights.add(StoredTensor("proj.weight", "f32", (64, 64), np.asarray(packed.data), ref))

    def module(self, text: str) -> ModuleOp:
        module = Parser(self.ctx, text).parse_module()
        module.verify()
        return module

    def read(self, path: Path | str) -> ModuleOp:
        return self.module((FILES / path).read_text())

    def plan(self, path: Path | str) -> Plan:
        module = self.read(path)
        return plan_from_rt(module, skeleton_kernels(module), self.ctx.weights)


@pytest.fixture
def files() -> Files:
    return Files()
