"""Small plans for the verifier, made by code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qcompiler.plan.kernel import Access, KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.plan import (
    Arena,
    ArenaKind,
    Buffer,
    DeviceSlot,
    EntryPoint,
    Event,
    Launch,
    Plan,
    Step,
    Stream,
    TensorSig,
    View,
)

sys.path.insert(0, str(Path(__file__).parent))

WORDS = 16
"""Elements of every buffer: 64 bytes."""


class PlanMaker:
    """Plans over one device whose buffers all hold 16 floats."""

    nothing = LoopKernel(extents=(), iterators=(), accesses=(), body=ScalarProgram(inputs=(), ops=(), yields=()))

    def kernel(self, accesses: Sequence[Access], name: str | None = None) -> KernelSpec:
        operands = tuple(
            Operand(name=f"p{i}", dtype="f32", access=access, shape=(WORDS,), strides=(1,))
            for i, access in enumerate(accesses)
        )
        return KernelSpec(name=name or "k_" + "_".join(accesses), symbols=(), operands=operands, body=self.nothing)

    def view(self, buffer: str, offset: int = 0, count: int = WORDS, step: int = 1) -> View:
        return View(buffer=buffer, dtype="f32", shape=(count,), strides=(step,), offset=offset)

    def launch(self, stream: str, **operands: Access) -> Launch:
        """`launch("s0", x="r", y="w")`"""
        views = tuple(self.view(buffer) for buffer in operands)
        return Launch(kernel="k_" + "_".join(operands.values()), stream=stream, operands=views)

    def plan(
        self,
        steps: Sequence[Step],
        offsets: dict[str, int],
        *,
        streams: int = 2,
        events: int = 8,
        kind: str = "cuda",
        outputs: bool = True,
    ) -> Plan:
        """Input buffer x, output buffer y (scratch without `outputs`), and activation buffers at the given offsets."""
        last: ArenaKind = "output" if outputs else "activations"
        names = {step.kernel for step in steps if isinstance(step, Launch)}
        end = max([offset + 4 * WORDS for offset in offsets.values()], default=0)
        sig = TensorSig(name="y", arena="out", dtype="f32", shape=(WORDS,))
        entry = EntryPoint(
            name="main",
            symbols=(),
            inputs=(TensorSig(name="x", arena="in", dtype="f32", shape=(WORDS,)),),
            outputs=(sig,) if outputs else (),
            steps=tuple(steps),
        )
        return Plan(
            devices=(DeviceSlot(name="d", kind=kind),),  # type: ignore[arg-type]
            streams=tuple(Stream(name=f"s{i}", device="d") for i in range(streams)),
            events=tuple(Event(name=f"e{i}") for i in range(events)),
            arenas=(
                Arena(name="in", device="d", kind="input", nbytes=4 * WORDS, entry="main"),
                Arena(name="out", device="d", kind=last, nbytes=4 * WORDS, entry="main"),
                Arena(name="act", device="d", kind="activations", nbytes=end, entry="main"),
            ),
            buffers=(
                Buffer(name="x", arena="in", offset=0, nbytes=4 * WORDS),
                Buffer(name="y", arena="out", offset=0, nbytes=4 * WORDS),
                *(Buffer(name=n, arena="act", offset=o, nbytes=4 * WORDS) for n, o in offsets.items()),
            ),
            kernels=tuple(self.kernel(name.removeprefix("k_").split("_"), name) for name in sorted(names)),  # type: ignore[arg-type]
            entries=(entry,),
        )


@pytest.fixture(scope="session")
def maker() -> PlanMaker:
    return PlanMaker()


@pytest.fixture(scope="session")
def schedules():
    """The hand-written schedules of tests/rt as plans, by name."""
    from xdsl.parser import Parser

    from qcompiler.ir.context import QCContext
    from qcompiler.ir.rt_plan import plan_from_rt, skeleton_kernels
    from qcompiler.plan.plan import Plan as PlanType

    folder = Path(__file__).parents[1] / "rt" / "files" / "accepted"
    ctx = QCContext.default()
    for key, shape in (("scale", (32,)), ("layer1.weight", (16, 16)), ("layer2.weight", (16, 16))):
        ctx.weights.add_array(key, np.zeros(shape, np.float32))

    def read(name: str) -> PlanType:
        module = Parser(ctx, (folder / f"{name}.mlir").read_text()).parse_module()
        return plan_from_rt(module, skeleton_kernels(module), ctx.weights)

    return read
