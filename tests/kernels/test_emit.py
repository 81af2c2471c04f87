"""Whole programs: entry functions walk the plan, address views, choose kernels and report errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError, PlanError
from qcompiler.kernels.cpu import entry
from qcompiler.kernels.cpu.emit import emit_kernel, emit_program, scratch_bytes
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    Copy,
    DeviceSlot,
    EntryPoint,
    Event,
    Launch,
    Plan,
    Record,
    Select,
    SelectCase,
    Stream,
    Symbol,
    TensorSig,
    View,
    Wait,
)

N = 10


def scale(name: str, factor: float, extent: Dim) -> KernelSpec:
    """y = x * factor."""
    ops = (
        ScalarOp(result="c", op="arith.constant", dtype="f32", value=factor.hex()),
        ScalarOp(result="r", op="arith.mulf", dtype="f32", args=("a", "c")),
    )
    body = LoopKernel(
        extents=(extent,),
        iterators=("parallel",),
        accesses=(AffineAccess(offset=0, coefficients=(1,)),) * 2,
        body=ScalarProgram(inputs=(("a", "f32"), ("b", "f32")), ops=ops, yields=("r",)),
    )
    operands = (
        Operand(name="x", dtype="f32", access="r", shape=(extent,), strides=(1,)),
        Operand(name="y", dtype="f32", access="w", shape=(extent,), strides=(1,)),
    )
    symbols = ("n",) if isinstance(extent, str) else ()
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body, serves=f"layer.{name}\nx \\")


def take() -> KernelSpec:
    x = Operand(name="x", dtype="f32", access="r", shape=(1, 4, 1), strides=(4, 1, 1))
    index = Operand(name="index", dtype="i64", access="r", shape=("n",), strides=(1,))
    out = Operand(name="out", dtype="f32", access="w", shape=(1, "n", 1), strides=("n", 1, 1))
    body = GatherKernel(mode="take", outer=1, length=4, count="n", inner=1)
    return KernelSpec(name="take", symbols=("n",), operands=(x, index, out), body=body)


def view(buffer: str, dtype: str = "f32", offset: Dim = 0, shape: tuple[Dim, ...] = ("n",)) -> View:
    return View(buffer=buffer, dtype=dtype, shape=shape, strides=(1,) * len(shape), offset=offset)  # type: ignore[arg-type]


def plan() -> Plan:
    """init: table = 100 * constants. main: tmp = copy of x[1:], then 2 or 3 times that (by n), then + a gather."""
    arenas = (
        Arena(name="weights", device="cpu", kind="constants", nbytes=64),
        Arena(name="init", device="cpu", kind="init", nbytes=64),
        Arena(name="scratch[0]", device="cpu", kind="activations", nbytes=256, entry="main[n<=10]"),
        Arena(name="x", device="cpu", kind="input", nbytes=128, entry="main[n<=10]"),
        Arena(name="ids", device="cpu", kind="input", nbytes=128, entry="main[n<=10]"),
        Arena(name="y", device="cpu", kind="output", nbytes=128, entry="main[n<=10]"),
        Arena(name="z", device="cpu", kind="output", nbytes=128, entry="main[n<=10]"),
    )
    buffers = tuple(
        Buffer(name=name, arena=arena, offset=offset, nbytes=64)
        for name, arena, offset in [
            ("w", "weights", 0), ("table", "init", 0), ("tmp", "scratch[0]", 64), ("x", "x", 0), ("ids", "ids", 0),
            ("y", "y", 0), ("z", "z", 0),
        ]
    )  # fmt: skip
    cases = (SelectCase(max=4, kernel="double"), SelectCase(max=None, kernel="triple"))
    steps = (
        Copy(stream="s0", source=view("x", offset=1), target=view("tmp")),
        Record(stream="s0", event="e"),
        Wait(stream="s0", event="e"),
        Select(on="n", cases=cases, stream="s0", operands=(view("tmp"), view("y"))),
        Launch(kernel="take", stream="s0", operands=(view("table"), view("ids", "i64"), view("z"))),
    )
    main = EntryPoint(
        name="main[n<=10]",
        symbols=(Symbol(name="n", min=0, max=N),),
        inputs=(
            TensorSig(name="x", arena="x", dtype="f32", shape=("n + 1",)),
            TensorSig(name="ids", arena="ids", dtype="i64", shape=("n",)),
        ),
        outputs=(
            TensorSig(name="y", arena="y", dtype="f32", shape=("n",)),
            TensorSig(name="z", arena="z", dtype="f32", shape=("n",)),
        ),
        steps=steps,
    )
    hundred = Launch(kernel="hundred", stream="s0", operands=(view("w", shape=(4,)), view("table", shape=(4,))))
    return Plan(
        devices=(DeviceSlot(name="cpu", kind="cpu"),),
        streams=(Stream(name="s0", device="cpu"),),
        events=(Event(name="e"),),
        arenas=arenas,
        buffers=buffers,
        kernels=(scale("hundred", 100.0, 4), scale("double", 2.0, "n"), scale("triple", 3.0, "n"), take()),
        entries=(main,),
        init=EntryPoint(name="init", symbols=(), inputs=(), outputs=(), steps=(hundred,)),
    )


class Program:
    """The compiled plan with its arenas as byte arrays."""

    def __init__(self, compiled: Callable[..., Any], context: type, isa: str) -> None:
        self.library = compiled(emit_program(plan(), isa), isa)
        self.arenas = [np.zeros(a.nbytes, np.uint8) for a in plan().arenas]
        self.context = context(None, None, None, 0, 1, 0, 0, 0, -1, 0)

    def call(self, name: str, *symbols: int) -> int:
        bases = (ctypes.c_void_p * len(self.arenas))(*(a.ctypes.data for a in self.arenas))
        values = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        self.context.error_code, self.context.error_kernel = 0, -1
        return int(self.library[name](ctypes.byref(self.context), bases, values))


@pytest.fixture(scope="module")
def program(harness: Any, build_folder: Path, isa: str) -> Program:
    def compiled(source: str, isa: str) -> ctypes.CDLL:
        library: ctypes.CDLL = harness.compile_source(source, isa, build_folder)
        return library

    program = Program(compiled, harness.Context, isa)
    program.arenas[0].view(np.float32)[:4] = [1, 2, 3, 4]
    assert program.call("qe_init") == 0
    return program


@pytest.mark.parametrize(("n", "factor"), [(0, 2), (1, 2), (4, 2), (5, 3), (10, 3)])
def test_entry_point_walks_its_plan(program: Program, n: int, factor: int) -> None:
    x = program.arenas[3].view(np.float32)
    x[: N + 1] = np.arange(1, N + 2)
    program.arenas[4].view(np.int64)[:N] = np.arange(N) % 8 - 4
    program.arenas[4].view(np.int64)[N - 2 :] = 0
    y, z = program.arenas[5].view(np.float32), program.arenas[6].view(np.float32)
    y[:] = z[:] = -7
    assert program.call("qe_0", n) == 0
    assert (y[:n] == factor * x[1 : n + 1]).all()
    ids = program.arenas[4].view(np.int64)[:n]
    assert (z[:n] == np.array([100, 200, 300, 400])[ids]).all()
    assert (y[n:] == -7).all()
    assert (z[n:] == -7).all()


def test_error_names_the_kernel_of_the_plan(program: Program) -> None:
    program.arenas[4].view(np.int64)[:N] = 0
    program.arenas[4].view(np.int64)[2] = 4
    assert program.call("qe_0", 5) == 1
    context = program.context
    assert (context.error_kernel, context.error_value, context.error_limit) == (3, 4, 4)
    assert program.call("qe_0", 2) == 0


def test_text_is_a_readable_walk_of_the_plan() -> None:
    text = emit_program(plan(), "x86-64-v4")
    assert "// 0 on s0: copy x to tmp" in text
    assert "// 1 on s0: record e" in text
    assert "// 3 on s0: loop for layer.double x, by n" in text
    assert "if (chooser <= 4) {" in text
    assert text.count("#pragma once") == 0
    assert '#include "' not in text
    assert text.count("struct qc_ctx {") == 1


def test_comments_cannot_break_out_of_their_line() -> None:
    """`serves` comes from the model: a newline or a trailing backslash must not reach the compiler."""
    text = emit_kernel(scale("k", 2.0, "n"), "x86-64-v4")
    head = text.splitlines()[0]
    assert head == "// qk_k: loop for layer.k x"


def test_headers_that_no_kernel_needs_stay_out() -> None:
    assert "qc_pack_keys" not in emit_program(plan(), "x86-64-v4")


def test_same_plan_same_text() -> None:
    assert emit_program(plan(), "x86-64-v3") == emit_program(plan(), "x86-64-v3")


def test_entries_whose_names_look_alike_are_told_apart() -> None:
    original = plan()
    twin = msgspec.structs.replace(original.entries[0], name="main[n<=10)")
    text = emit_program(msgspec.structs.replace(original, entries=(*original.entries, twin)), "x86-64-v4")
    assert text.count("int32_t qe_0(") == text.count("int32_t qe_1(") == 1


def test_the_last_case_of_a_select_takes_what_is_left() -> None:
    """The verifier refuses a select whose last case ends too early, so that no size can come past it."""
    original = plan()
    steps = tuple(
        msgspec.structs.replace(step, cases=tuple(msgspec.structs.replace(c, max=c.max or 10) for c in step.cases))
        if isinstance(step, Select)
        else step
        for step in original.entries[0].steps
    )
    bounded = msgspec.structs.replace(
        original, entries=(msgspec.structs.replace(original.entries[0], steps=steps), *original.entries[1:])
    )
    assert emit_program(bounded, "x86-64-v3") == emit_program(original, "x86-64-v3")
    with pytest.raises(PlanError, match="is not in the plan"):
        entry.emit_entry(original, bounded.entries[0])


def test_unknown_isa_is_refused() -> None:
    with pytest.raises(KernelSelectionError, match="avx9"):
        emit_kernel(scale("k", 2.0, 4), "avx9")


def test_scratch_is_known_without_shapes() -> None:
    body = NormKernel(kind="rms", rows="r", cols=8, eps=1e-6, has_weight=False, has_bias=False)
    x = Operand(name="x", dtype="f32", access="r", shape=("r", 8), strides=(8, 1))
    spec = KernelSpec(name="n", symbols=("r",), operands=(x, x), body=body)
    assert scratch_bytes(spec, "x86-64-v3") == 0
