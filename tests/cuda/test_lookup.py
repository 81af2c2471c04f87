"""Embedding, gather and index_update on the device: bits of the formats' decoders, indices out of range, duplicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import ROWS, TABLES, C, I, L, O, embedding, gather, row_major, table

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.kernel import DType, KernelSpec
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = np.ndarray
DTYPES: tuple[DType, ...] = ("f32", "bf16", "f16")


# --- embedding --------------------------------------------------------------------------------------------------------


MADE = {
    f"{kind}_{dtype}_{layout}": table(kind, dtype, layout)
    for kind in TABLES
    for dtype in DTYPES
    for layout in ("canonical", "cuda_t16_v1")
}
EMBEDDINGS = [embedding(name, operand) for name, (operand, _, _) in MADE.items()]


def rows_out(count: int, cols: int, dtype: DType) -> Array:
    """A result whose rows are one element apart."""
    return np.zeros((count, cols + 1), NUMPY_DTYPES[dtype])[:, :cols]


@pytest.mark.parametrize("name", list(MADE))
def test_rows_equal_the_decoder_to_the_bit(sim_module: Callable[..., Any], name: str) -> None:
    operand, data, values = MADE[name]
    ids = np.random.default_rng(0).integers(0, ROWS, 24)
    ids[:2] = 0, ROWS - 1
    out = rows_out(24, values.shape[1], operand.dtype)
    (got,) = sim_module(EMBEDDINGS).run(name, [ids, data, out], {"b": 2, "s": 12})
    assert got.tobytes() == values[ids].tobytes()


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1])
def test_an_id_out_of_range_gives_a_row_of_nan_and_reads_nothing(sim_run: Callable[..., Any], bad: int) -> None:
    operand, data, values = MADE["int8_f32_cuda_t16_v1"]
    ids = np.array([3, bad, 5], np.int32)
    (out,) = sim_run(embedding("ids32", operand, "i32"), [ids, data, rows_out(3, 45, "f32")], {"b": 1, "s": 3})
    assert np.isnan(out[1]).all()
    assert (out[[0, 2]] == values[[3, 5]]).all()


def test_float_ids_and_layouts_of_other_targets_are_refused() -> None:
    with pytest.raises(KernelSelectionError, match="'ids' is f32"):
        emit_kernel(embedding("floats", MADE["nf4_f32_canonical"][0], "f32"), "sm_80")
    with pytest.raises(KernelSelectionError, match="layout 'cpu_p16_v1'"):
        emit_kernel(embedding("foreign", table("nf4", "f32", "cpu_p16_v1")[0]), "sm_80")


# --- gather and index_update -------


def update(name: str, src_strides: tuple[int, ...] | None = None) -> KernelSpec:
    """Sizes are symbols where rows are contiguous."""
    if src_strides is None:
        outer, length, count, inner = "o", "l", "c", "n"
        x = row_major("x", "f32", "rw", outer, length, inner, strides=("l*n", "n", 1))
        src = row_major("src", "f32", "r", outer, count, inner, strides=("c*n", "n", 1))
    else:
        outer, length, count, inner = O, L, C, I  # type: ignore[assignment]
        x, src = row_major("x", "f32", "rw", O, L, I), row_major("src", "f32", "r", O, C, I, strides=src_strides)
    body = IndexUpdateKernel(outer=outer, length=length, count=count, inner=inner)
    symbols = ("c", "l", "n", "o") if src_strides is None else ()
    return KernelSpec(
        name=name, symbols=symbols, operands=(x, row_major("index", "i64", "r", count, strides=(1,)), src), body=body
    )


SPECS = [
    gather("take", "take", "f32"), gather("take_bf16_i32", "take", "bf16", "i32"), gather("along", "along", "i64"),
    gather("take_i8", "take", "i8"), update("update"), update("update_strided", (1, O, O * C)),
]  # fmt: skip
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(SPECS)


def data(dtype: str, *shape: int) -> Array:
    return (np.random.default_rng(9).normal(size=shape) * 100).astype(NUMPY_DTYPES[dtype])


@pytest.mark.parametrize(("name", "dtype", "index"), [("take", "f32", "i64"), ("take_bf16_i32", "bf16", "i32")])
def test_take_counts_negative_indices_from_the_end(kernels: Any, name: str, dtype: str, index: str) -> None:
    x = data(dtype, O, L, I)
    where = np.array([0, 10, -1, -11, 5, 5, 3], NUMPY_DTYPES[index])
    (out,) = kernels.run(name, [x, where, np.zeros((O, C, I), x.dtype)])
    assert out.tobytes() == np.take(x, where, 1).tobytes()


def test_gather_along(kernels: Any) -> None:
    x = data("i64", O, L, I)
    where = np.random.default_rng(1).integers(-L, L, (O, C, I))
    (out,) = kernels.run("along", [x, where, np.zeros((O, C, I), np.int64)])
    np.testing.assert_array_equal(out, np.take_along_axis(x, where % L, 1))


@pytest.mark.parametrize("bad", [L, -L - 1, 2**40])
@pytest.mark.parametrize(("name", "dtype"), [("take", "f32"), ("take_i8", "i8")])
def test_an_index_out_of_range_gives_poison_and_no_neighbour(kernels: Any, name: str, dtype: str, bad: int) -> None:
    where = np.array([0, 1, bad, 9, 0, 0, 0])
    x = data(dtype, O, L, I)
    (out,) = kernels.run(name, [x, where, np.zeros((O, C, I), x.dtype)])
    assert (np.isnan(out[:, 2]) if dtype == "f32" else out[:, 2] == -128).all()
    assert (out[:, [0, 1, 3]] == x[:, [0, 1, 9]]).all()


@pytest.mark.parametrize("name", ["update", "update_strided"])
def test_index_update_last_of_equal_indices_wins_in_any_order_of_blocks(kernels: Any, name: str) -> None:
    x, where = data("f32", O, L, I), np.array([3, 10, 3, 0, 7, 7, 3])
    flat = data("f32", O * C * I)
    src = flat.reshape(O, C, I) if name == "update" else flat.reshape(I, C, O).transpose(2, 1, 0)
    want = x.copy()
    for i, at in enumerate(where):
        want[:, at] = src[:, i]
    symbols = {"o": O, "l": L, "c": C, "n": I} if name == "update" else ()
    for seed in range(3):
        (got,) = kernels.run(name, [x, where, src], symbols, seed=seed)
        assert got.tobytes() == want.tobytes()


def test_index_update_over_many_rows_and_shares(kernels: Any) -> None:
    """More indices than threads, rows longer than a block."""
    rng = np.random.default_rng(2)
    x, src = (rng.normal(size=(2, n, 700)).astype(np.float32) for n in (400, 300))
    where = rng.integers(0, 400, 300)
    want = x.copy()
    for i, at in enumerate(where):
        want[:, at] = src[:, i]
    (got,) = kernels.run("update", [x, where, src], {"o": 2, "l": 400, "c": 300, "n": 700})
    assert got.tobytes() == want.tobytes()


def test_index_update_out_of_range_writes_nothing(kernels: Any) -> None:
    x, src = data("f32", 1, 4, 3), np.ones((1, 2, 3), np.float32)
    for bad in ([4, -5], [-1, -4], [2**40, -(2**40)]):  # a negative position is none: it wrote the last slot
        (got,) = kernels.run("update", [x, np.array(bad), src], {"o": 1, "l": 4, "c": 2, "n": 3})
        assert got.tobytes() == x.tobytes()


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills_on_every_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    some = [spec for spec in EMBEDDINGS if spec.name.startswith(("nf4_flat_bf16", "int4_zeros_f32", "plain_f16"))]
    for name, used in nvrtc([*some, *SPECS], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
