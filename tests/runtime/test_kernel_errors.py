"""What a kernel reports reaches the caller in words, and the session stays usable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qcompiler.errors import IndexOutOfRangeError
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel
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
from qcompiler.runtime import LoadedProgram, build_image

ROWS, COLS = 10, 16


def embedding_plan() -> Plan:
    def operand(name: str, dtype: Any, access: Any, shape: Any, strides: Any) -> Operand:
        return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)

    def view(buffer: str, dtype: Any, shape: Any, strides: Any) -> View:
        return View(buffer=buffer, dtype=dtype, shape=shape, strides=strides)

    spec = KernelSpec(
        name="embedding_0", symbols=("s",), serves="qc.embedding at model.embed_tokens",
        operands=(
            operand("ids", "i64", "r", ("s",), (1,)),
            operand("table", "f32", "r", (ROWS, COLS), (COLS, 1)),
            operand("out", "f32", "w", ("s", COLS), (COLS, 1)),
        ),
        body=EmbeddingKernel(count="s", rows=ROWS, cols=COLS),
    )  # fmt: skip
    step = Launch(
        kernel="embedding_0", stream="s0",
        operands=(
            view("ids", "i64", ("s",), (1,)),
            view("table", "f32", (ROWS, COLS), (COLS, 1)),
            view("out", "f32", ("s", COLS), (COLS, 1)),
        ),
    )  # fmt: skip
    sizes = {"table": ROWS * COLS * 4, "ids": 64 * 8, "out": 64 * COLS * 4}
    kinds: dict[str, Any] = {"table": "constants", "ids": "input", "out": "output"}
    return Plan(
        devices=(DeviceSlot(name="cpu", kind="cpu"),), streams=(Stream(name="s0", device="cpu"),), events=(),
        arenas=tuple(
            Arena(name=n, device="cpu", kind=kinds[n], nbytes=size, entry=None if n == "table" else "main")
            for n, size in sizes.items()
        ),
        buffers=tuple(Buffer(name=n, arena=n, offset=0, nbytes=size) for n, size in sizes.items()),
        kernels=(spec,),
        entries=(
            EntryPoint(
                name="main", symbols=(Symbol(name="s", min=1, max=64),), steps=(step,),
                inputs=(TensorSig(name="input_ids", arena="ids", dtype="i64", shape=("s",)),),
                outputs=(TensorSig(name="y", arena="out", dtype="f32", shape=("s", COLS)),),
            ),
        ),
        weights=(WeightEntry(name="table", dtype="f32", shape=(ROWS, COLS), offset=0, nbytes=sizes["table"]),),
    )  # fmt: skip


@pytest.mark.parametrize("stepwise", [False, True])
def test_an_id_outside_the_table_names_the_place_and_the_limit(stepwise: bool) -> None:
    store = WeightStore()
    table = np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float32)
    store.add_array("table", table)
    leaf = {"kind": "leaf", "index": 0}
    signature = Signature(
        inputs={
            "args": {"kind": "tuple", "items": []},
            "kwargs": {"kind": "dict", "keys": ["input_ids"], "items": [leaf]},
        },
        outputs=leaf,
    )
    run = LoadedProgram.from_image(build_image(embedding_plan(), signature, store), stepwise=stepwise)
    ids = np.array([3, 0, 9])
    assert np.array_equal(run(input_ids=ids), table[ids])
    for bad in (10, -1, 1 << 40):
        with pytest.raises(IndexOutOfRangeError, match=rf"model\.embed_tokens.*index {bad}, .*outside 0…9"):
            run(input_ids=np.array([1, bad, 2]))
    with pytest.raises(IndexError):  # as torch has it
        run(input_ids=np.array([10]))
    assert np.array_equal(run(input_ids=ids), table[ids])
