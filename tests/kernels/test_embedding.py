"""Embedding rows against the formats' decoders, bit for bit, from every layout; ids out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROWS = 37
TABLES: dict[str, tuple[str | None, dict[str, Any], int]] = {
    "plain": (None, {}, 53),
    "nf4": ("nf4", {"block": 64}, 128),
    "nf4_flat": ("nf4", {"block": 64}, 83),
    "nf4_flat_even": ("nf4", {"block": 256}, 50),
    "int8": ("int8", {}, 45),
    "int4": ("int4", {"group": 32}, 96),
    "int4_zeros": ("int4", {"group": 32, "symmetric": False}, 64),
}


def make_table(kind: str, dtype: DType, layout: str) -> tuple[Operand, Array, Array]:
    """(operand, bytes, values of `dtype`)."""
    name, params, cols = TABLES[kind]
    w = np.random.default_rng(3).standard_normal((ROWS, cols)).astype(np.float32)
    if name is None:
        plain = w.astype(DTYPES[dtype])
        data = layouts.get(layout).pack(None, dtype, ROWS, cols, plain.view(np.uint8).reshape(-1))
        strides = (cols, 1) if layout == "canonical" else ()
        return (
            Operand(name="t", dtype=dtype, access="r", shape=(ROWS, cols), strides=strides, layout=layout),
            data,
            plain,
        )
    fmt = formats.get(name, **params)
    packed = fmt.encode(w)
    data = layouts.get(layout).pack(fmt, dtype, ROWS, cols, packed.data)
    ref = FormatRef(name=name, params=params)
    operand = Operand(name="t", dtype=dtype, access="r", shape=(ROWS, cols), format=ref, layout=layout)
    return operand, data, fmt.decode(packed).astype(DTYPES[dtype])


def make_spec(name: str, table: Operand, ids: DType = "i64") -> KernelSpec:
    rows, cols = (int(d) for d in table.shape)
    operands = (
        Operand(name="ids", dtype=ids, access="r", shape=("b*s",), strides=(1,)),
        table,
        Operand(name="out", dtype=table.dtype, access="w", shape=("b*s", cols), strides=(cols + 1, 1)),
    )
    body = EmbeddingKernel(count="b*s", rows=rows, cols=cols)
    return KernelSpec(name=name, symbols=("b", "s", "unused"), operands=operands, body=body, serves="embeddings")


def all_tables() -> dict[str, tuple[Operand, Array, Array]]:
    dtypes: tuple[DType, ...] = ("f32", "bf16", "f16")
    return {
        f"{kind}_{dtype}_{layout}": make_table(kind, dtype, layout)
        for kind in TABLES
        for dtype in dtypes
        for layout in ("canonical", "cpu_p16_v1")
    }


def build_all(build: Callable[..., Any], isa: str, made: dict[str, tuple[Operand, Array, Array]]) -> Any:
    """Every table with i64 ids, and one with i32 ids, in one library."""
    specs = [make_spec(name, operand) for name, (operand, _, _) in made.items()]
    return build([*specs, make_spec("ids32", made["int8_f32_canonical"][0], "i32")], isa)


def test_rows_equal_the_decoder_to_the_bit(build: Callable[..., Any], isa: str) -> None:
    made = all_tables()
    kernels = build_all(build, isa, made)
    ids = np.random.default_rng(0).integers(0, ROWS, 600)
    ids[:2] = 0, ROWS - 1
    for name, (operand, data, values) in made.items():
        cols = values.shape[1]
        table = np.concatenate([data, np.zeros(64, np.uint8)])  # an odd size: reads past the end would be seen
        table = table[: data.size].copy()
        out = kernels.run_both(
            name, lambda t=table, c=cols, o=operand: [ids, t, np.full((600, c + 1), 7, DTYPES[o.dtype])], (2, 300, 0)
        )[2]
        assert out[:, :cols].tobytes() == values[ids].tobytes(), name
        assert (out[:, cols] == 7).all(), f"{name} wrote beside its columns"


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1])
def test_an_id_out_of_range_is_reported_and_gives_zeros(build: Callable[..., Any], isa: str, bad: int) -> None:
    made = all_tables()
    kernels = build_all(build, isa, made)
    _, data, values = made["int8_f32_canonical"]
    ids = np.array([3, bad, 5], np.int32)
    out = np.full((3, 46), 7, np.float32)
    context = kernels.run("ids32", [ids, data, out], (1, 3, 0))
    assert (context.error_code, context.error_value, context.error_limit) == (1, bad, ROWS)
    assert (out[1, :45] == 0).all()
    assert (out[[0, 2], :45] == values[[3, 5]]).all()


def test_no_ids_run_no_task(build: Callable[..., Any], isa: str) -> None:
    made = all_tables()
    kernels = build_all(build, isa, made)
    _, data, _ = made["nf4_f32_canonical"]
    out = np.full(4, 7, np.float32)
    context = kernels.run("nf4_f32_canonical", [np.zeros(1, np.int64), data, out], (0, 3, 0))
    assert context.error_code == 0 and (out == 7).all()


def test_float_ids_are_refused() -> None:
    operand, _, _ = make_table("nf4", "f32", "canonical")
    with pytest.raises(KernelSelectionError, match="'ids' is f32"):
        emit(make_spec("floats", operand, "f32"), "x86-64-v4")
