"""Embedding rows against the formats' decoders, bit for bit, from every layout; ids out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import ROWS, TABLES, Array, embedding, table

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.plan.kernel import DType, Operand
from qcompiler.plan.weights import NUMPY_DTYPES

DTYPES: tuple[DType, ...] = ("f32", "bf16", "f16")


def all_tables() -> dict[str, tuple[Operand, Array, Array]]:
    return {
        f"{kind}_{dtype}_{layout}": table(kind, dtype, layout)
        for kind in TABLES
        for dtype in DTYPES
        for layout in ("canonical", "cpu_p16_v2")
    }


def build_all(build: Callable[..., Any], isa: str, made: dict[str, tuple[Operand, Array, Array]]) -> Any:
    """Every table with i64 ids, and one with i32 ids, in one library."""
    specs = [embedding(name, operand, unused=("unused",)) for name, (operand, _, _) in made.items()]
    return build([*specs, embedding("ids32", made["int8_f32_canonical"][0], "i32")], isa)


def test_rows_equal_the_decoder_to_the_bit(build: Callable[..., Any], isa: str) -> None:
    made = all_tables()
    kernels = build_all(build, isa, made)
    ids = np.random.default_rng(0).integers(0, ROWS, 600)
    ids[:2] = 0, ROWS - 1
    for name, (operand, data, values) in made.items():
        cols = values.shape[1]
        codes = np.concatenate([data, np.zeros(64, np.uint8)])  # an odd size: reads past the end would be seen
        codes = codes[: data.size].copy()
        out = kernels.run_both(
            name,
            lambda t=codes, c=cols, o=operand: [ids, t, np.full((600, c + 1), 7, NUMPY_DTYPES[o.dtype])],
            (2, 300, 0),
        )[2]
        wanted = values[ids].astype(NUMPY_DTYPES[operand.dtype])
        assert out[:, :cols].tobytes() == wanted.tobytes(), name
        assert (out[:, cols] == 7).all(), f"{name} wrote beside its columns"


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1])
def test_an_id_out_of_range_is_reported_and_gives_zeros(build: Callable[..., Any], isa: str, bad: int) -> None:
    made = all_tables()
    kernels = build_all(build, isa, made)
    _, data, values = made["int8_f32_canonical"]
    ids = np.array([3, bad, 5], np.int32)
    out = np.full((3, 46), 7, np.float32)
    context = kernels.run("ids32", [ids, data, out], (1, 3))
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
    operand, _, _ = table("nf4", "f32", "canonical")
    with pytest.raises(KernelSelectionError, match="'ids' is f32"):
        emit(embedding("floats", operand, "f32"), "x86-64-v4")
