"""A program small enough to be written by hand: y = x + bias, with an init step and a fake native build."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    DeviceSlot,
    EntryPoint,
    Launch,
    Plan,
    Signature,
    Stream,
    Symbol,
    TensorSig,
    View,
    WeightEntry,
)
from qcompiler.plan.weights import WeightStore
from qcompiler.runtime import NativeLibrary, ProgramImage, ProgramTarget, build_image

LEDGER = {
    "totals": {
        "recipe": "nf4", "bits_per_weight": 4.5, "promise_bits": 6.5, "bytes_before": 4096, "bytes_after": 576,
    },
    "rows": [{"parameters": ["model.bias"]}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path / "cache"))


def _operand(name: str, access: str, shape: tuple[int | str, ...], strides: tuple[int, ...]) -> Operand:
    return Operand(name=name, dtype="f32", access=access, shape=shape, strides=strides)  # type: ignore[arg-type]


def _kernels() -> tuple[KernelSpec, ...]:
    flat, row = AffineAccess(offset=0, coefficients=(4, 1)), AffineAccess(offset=0, coefficients=(0, 1))
    add = ScalarOp(result="v0", op="arith.addf", dtype="f32", args=("in0", "in1"))
    body = LoopKernel(
        extents=("b", 4),
        iterators=("parallel", "parallel"),
        accesses=(flat, row, flat),
        body=ScalarProgram(inputs=(("in0", "f32"), ("in1", "f32"), ("in2", "f32")), ops=(add,), yields=("v0",)),
    )
    operands = (
        _operand("x", "r", ("b", 4), (4, 1)), _operand("t", "r", (4,), (1,)), _operand("out", "w", ("b", 4), (4, 1)),
    )  # fmt: skip
    one = ScalarOp(result="v0", op="arith.constant", dtype="f32", value=(1.0).hex())
    fill = LoopKernel(
        extents=(4,), iterators=("parallel",), accesses=(AffineAccess(offset=0, coefficients=(1,)),),
        body=ScalarProgram(inputs=(("in0", "f32"),), ops=(one,), yields=("v0",)),
    )  # fmt: skip
    return (
        KernelSpec(name="add", symbols=("b",), operands=operands, body=body, serves="linalg.generic at model"),
        KernelSpec(name="fill", symbols=(), operands=(_operand("out", "w", (4,), (1,)),), body=fill),
    )


def _view(buffer: str, shape: tuple[int | str, ...]) -> View:
    strides = (4, 1) if len(shape) == 2 else (1,)
    return View(buffer=buffer, dtype="f32", shape=shape, strides=strides)


def make_plan(first_operand: str = "x") -> Plan:
    """`first_operand="table"` makes the kernel's operands independent of the call's input."""
    sizes = {"constants": 64, "table": 64, "x": 1024, "y": 1024}
    kinds = {"constants": "constants", "table": "init", "x": "input", "y": "output"}
    arenas = tuple(
        Arena(name=name, device="cpu", kind=kind, nbytes=sizes[name], entry="main" if name in "xy" else None)  # type: ignore[arg-type]
        for name, kind in kinds.items()
    )
    add = Launch(kernel="add", stream="s0", operands=(
        _view(first_operand, ("b", 4)), _view("bias", (4,)), _view("y", ("b", 4)),
    ))  # fmt: skip
    return Plan(
        devices=(DeviceSlot(name="cpu", kind="cpu"),),
        streams=(Stream(name="s0", device="cpu"),),
        events=(),
        arenas=arenas,
        buffers=(
            Buffer(name="bias", arena="constants", offset=0, nbytes=16),
            Buffer(name="table", arena="table", offset=0, nbytes=16),
            Buffer(name="x", arena="x", offset=0, nbytes=1024),
            Buffer(name="y", arena="y", offset=0, nbytes=1024),
        ),
        kernels=_kernels(),
        entries=(
            EntryPoint(
                name="main",
                symbols=(Symbol(name="b", min=1, max=64),),
                inputs=(TensorSig(name="x", arena="x", dtype="f32", shape=("b", 4)),),
                outputs=(TensorSig(name="y", arena="y", dtype="f32", shape=("b", 4)),),
                steps=(add,),
            ),
        ),
        init=EntryPoint(
            name="init", symbols=(), inputs=(), outputs=(),
            steps=(Launch(kernel="fill", stream="s0", operands=(_view("table", (4,)),)),),
        ),
        weights=(WeightEntry(name="bias", dtype="f32", shape=(4,), offset=0, nbytes=16, parameters=("model.bias",)),),
    )  # fmt: skip


@pytest.fixture
def image(tmp_path: Path) -> ProgramImage:
    store = WeightStore()
    store.add_array("bias", np.arange(4, dtype=np.float32), ("model.bias",))
    library = tmp_path / "fake.so"
    library.write_bytes(b"not a library")
    leaf = {"kind": "leaf", "index": 0}
    signature = Signature(
        inputs={"args": {"kind": "tuple", "items": []}, "kwargs": {"kind": "dict", "keys": ["x"], "items": [leaf]}},
        outputs={"kind": "tuple", "items": [leaf]},
    )
    texts = {
        "ir/02-import.mlir": "builtin.module {\n  // x\n}\n",
        "ir/05-dce.mlir": "builtin.module {}\x1b[31m\n",
        "kernels/program.cpp": "// kernels\n",
    }
    return build_image(
        make_plan(), signature, store, target=ProgramTarget(kind="cpu", isa="x86-64-v3"), texts=texts, ledger=LEDGER,
        native=(NativeLibrary("x86-64-v3", library, "7", "g++ 12"),),
    )  # fmt: skip
