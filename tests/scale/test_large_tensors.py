"""Tensors of more than 2**31 elements: kernels find their elements, offsets in plans and emitted text are 64 bits wide.

The tensors are zeroed memory that the system hands out page by page: only the places that a test touches are there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from by_path import load

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import emit
from qcompiler.kernels.layouts.base import views
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel

ROWS, COLS = 34_000_000, 64
"""2.2e9 elements: beyond the positive 32-bit integers."""
IDS = np.array([ROWS - 1, 0, 33_554_433, ROWS - 17, 16], np.int64)
"""Rows whose elements lie on both sides of 2**31 = 33_554_432 * 64."""
STEP = (1 << 31) + 64


def plain(name: str, dtype: Any, access: Any, *shape: int, strides: tuple[int, ...] | None = None) -> Operand:
    steps = strides or tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=steps)


def embedding(layout: str) -> KernelSpec:
    table = Operand(
        name="t", dtype="f32", access="r", shape=(ROWS, COLS), format=FormatRef(name="int8", params={}), layout=layout
    )
    operands = (plain("ids", "i64", "r", len(IDS)), table, plain("out", "f32", "w", len(IDS), COLS))
    body = EmbeddingKernel(count=len(IDS), rows=ROWS, cols=COLS)
    return KernelSpec(name=f"embedding_{layout}", symbols=(), operands=operands, body=body)


def gather() -> KernelSpec:
    operands = (
        plain("x", "i8", "r", 1, ROWS, COLS), plain("index", "i64", "r", len(IDS)),
        plain("out", "i8", "w", 1, len(IDS), COLS),
    )  # fmt: skip
    body = GatherKernel(mode="take", outer=1, length=ROWS, count=len(IDS), inner=COLS)
    return KernelSpec(name="gather", symbols=(), operands=operands, body=body)


def update() -> KernelSpec:
    operands = (
        plain("x", "i8", "rw", 1, ROWS, COLS), plain("index", "i64", "r", len(IDS)),
        plain("src", "i8", "r", 1, len(IDS), COLS),
    )  # fmt: skip
    body = IndexUpdateKernel(outer=1, length=ROWS, count=len(IDS), inner=COLS)
    return KernelSpec(name="update", symbols=(), operands=operands, body=body)


def loop() -> KernelSpec:
    """Reads rows that lie more than 2**31 elements apart."""
    body = LoopKernel(
        extents=(2, COLS),
        iterators=("parallel", "parallel"),
        accesses=(AffineAccess(offset=0, coefficients=(STEP, 1)), AffineAccess(offset=0, coefficients=(COLS, 1))),
        body=ScalarProgram(inputs=(("a", "i8"), ("b", "i8")), ops=(), yields=("a",)),
    )
    operands = (plain("x", "i8", "r", 2, COLS, strides=(STEP, 1)), plain("out", "i8", "w", 2, COLS))
    return KernelSpec(name="loop", symbols=(), operands=operands, body=body)


SPECS = [embedding("canonical"), embedding("cpu_p16_v2"), gather(), update(), loop()]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load("tests/kernels/conftest.py").Kernels(SPECS, "x86-64", tmp_path_factory.mktemp("large"))


def some_rows() -> npt.NDArray[np.int8]:
    return np.random.default_rng(4).integers(-127, 128, (len(IDS), COLS)).astype(np.int8)


def test_gather_update_and_loops_reach_behind_2_to_the_31(kernels: Any) -> None:
    table, rows = np.zeros((ROWS, COLS), np.int8), some_rows()
    kernels.run("update", [table, IDS, rows])
    assert np.array_equal(table[IDS], rows)
    assert not table[-2].any() and not table[33_554_432].any() and not table[1].any()
    out = np.zeros_like(rows)
    kernels.run("gather", [table, IDS, out])
    assert np.array_equal(out, rows)
    flat = table.reshape(-1)
    flat[STEP : STEP + COLS] = rows[2]
    two = np.zeros((2, COLS), np.int8)
    kernels.run("loop", [flat, two])
    assert np.array_equal(two, [flat[:COLS], rows[2]])


@pytest.mark.parametrize("layout", ["canonical", "cpu_p16_v2"])
def test_embeddings_of_more_than_2_to_the_31_elements(kernels: Any, layout: str) -> None:
    """The rows' blocks of 16 are packed by themselves, and put where the layout of the whole table has them."""
    fmt, kind = formats.get("int8"), layouts.get(layout)
    data = np.zeros(kind.nbytes(fmt, "f32", ROWS, COLS), np.uint8)
    assert kind.sections(fmt, "f32", ROWS, COLS)[0].nbytes > 1 << 31
    whole = views(data, kind.sections(fmt, "f32", ROWS, COLS))
    wanted = np.zeros((len(IDS), COLS), np.float32)
    for i, row in enumerate(IDS):
        values = np.random.default_rng(i).standard_normal((16, COLS)).astype(np.float32)
        packed = fmt.encode(values)
        few = kind.sections(fmt, "f32", 16, COLS)
        block = views(kind.pack(fmt, "f32", 16, COLS, packed.data), few)
        for section in few:
            per_block = whole[section.name].shape[0] * 16 // -(-ROWS // 16) // 16  # 16 of rows, 1 of panels
            at = int(row) // 16 * per_block
            whole[section.name][at : at + per_block] = block[section.name]
        wanted[i] = fmt.decode(packed)[row % 16]
    out = np.zeros_like(wanted)
    kernels.run(f"embedding_{layout}", [IDS, data, out])
    assert np.array_equal(out, wanted)


NARROW = re.compile(r"\b(?:int|unsigned|int32_t|uint32_t)\s+\w+\s*=\s*[^;]*")
MULTIPLIED = re.compile(r"(?<!\(int64_t\))blockIdx\.[xyz]\s*\*|\*\s*blockIdx\.[xyz]")
"""A block's number as a factor; alone, or divided by an int64_t, it is widened as it is read."""
CHOSEN = "({kind})blockIdx.x * "
BOUNDED = {"loop.py": CHOSEN, "loop_reduce.py": CHOSEN, "linear_mma.cuh": "blockIdx.y * gridDim.x"}
"""Products whose type was chosen from the largest offset (`index_type`), or that a test of the grid's size precedes."""
CUDA = Path(emit.__file__).resolve().parent


@pytest.mark.parametrize("spec", [gather(), update(), loop(), embedding("canonical")], ids=lambda spec: spec.name)
def test_emitted_cuda_counts_blocks_and_elements_in_64_bits(spec: KernelSpec) -> None:
    text = emit.emit_kernel(spec, "sm_90a").text
    assert "int64_t" in text and "blockIdx" in text
    assert not MULTIPLIED.search(text)
    narrow = [found.group() for found in NARROW.finditer(text) if re.search(r"\d{8,}|blockIdx", found.group())]
    assert not narrow, f"narrow variables hold what grows with the tensor: {narrow}"


def test_no_cuda_template_multiplies_a_block_number_in_32_bits() -> None:
    files = [*CUDA.glob("*.py"), *CUDA.glob("*.cuh")]
    assert len(files) > 20
    texts = {file.name: file.read_text().replace(BOUNDED.get(file.name, "\0"), "") for file in files}
    assert not [name for name, text in texts.items() if MULTIPLIED.search(text)]
    for text in ("int64_t i = blockIdx.x * 64;", "first = 64 * blockIdx.x"):
        assert MULTIPLIED.search(text), "the check finds what it is there for"
