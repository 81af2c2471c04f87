"""Linears whose weight, input or result has more than 2**31 elements: the right values behind that border.

Memory is sparse: of a weight only the last 16 rows are there, rows of x and of the result lie far apart.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from by_path import load

from qcompiler.kernels.cuda import emit
from qcompiler.kernels.cuda.linear import engine_of
from qcompiler.plan.kernel import KernelSpec, Operand

bench = load("tests/kernels/conftest.py")
Array = npt.NDArray[Any]


def values(rows: int, cols: int, dtype: Any) -> Array:
    return np.random.default_rng(rows).standard_normal((rows, cols)).astype(dtype)


# --- the CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8", "plain"])
def test_cpu_weights_of_more_than_2_to_the_31_elements(
    kind: str, far: Any, best_isa: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Codes, scales and flat blocks of nf4 are found behind element 2**31, plain fp32 behind byte 2**33."""
    weight = far.far_weight(kind, "f32", "cpu_p16_v2")
    assert far.ROWS * far.COLS > 1 << 31
    specs = [far.linear("one", weight.operand, 1, "1"), far.linear("many", weight.operand, 33, "large")]
    kernels = bench.Kernels(specs, best_isa, tmp_path_factory.mktemp("far_weight"))
    data = weight.bytes()
    for spec, m in zip(specs, (1, 33), strict=True):
        x, out = values(m, far.COLS, np.float32), np.ones((m, far.ROWS), np.float32)
        kernels.run(spec.name, [x, data, out], threads=2)
        far.close(out[:, -far.PANEL :], x.astype(np.float64) @ weight.values.T, "f32")
        assert not out[:, : -far.PANEL].any(), "all rows of the weight but the last 16 are zero"


N, K = 40, 64


def strided(far: Any, name: str, m_class: Any, strides: tuple[int, int], m: int = 33) -> KernelSpec:
    """x, w and the result with far strides; w plain, row by row or column by column."""
    w = Operand(name="w", dtype="f32", access="r", shape=(N, K), strides=strides)
    spec: KernelSpec = far.linear(name, w, m, m_class, step=far.FAR_STEP)
    return spec


def test_cpu_rows_and_columns_that_lie_more_than_2_to_the_31_elements_apart(
    far: Any, best_isa: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each stride of x, of the weight and of the result is multiplied by an index in 64 bits."""
    step, m = far.FAR_STEP, 33
    by_rows, by_columns = strided(far, "rows", "large", (step, 1)), strided(far, "columns", "large", (1, step))
    few = far.linear(
        "few", Operand(name="w", dtype="f32", access="r", shape=(N, K), layout="cpu_p16_v2"), m, "2-8", step=step
    )
    kernels = bench.Kernels([by_rows, by_columns, few], best_isa, tmp_path_factory.mktemp("far_strides"))
    w, x = values(N, K, np.float32), values(m, K, np.float32)
    near, outs = far.sparse((m, step), "f32"), far.sparse((m, step), "f32")
    near[:, :K] = x
    weights = {"rows": far.sparse((N, step), "f32"), "columns": far.sparse((K, step), "f32")}
    weights["rows"][:, :K], weights["columns"][:, :N] = w, w.T
    panels = np.zeros((-(-N // 16) * 16, K), np.float32)
    panels[:N] = w
    weights["few"] = np.ascontiguousarray(panels.reshape(-1, 16, K).transpose(0, 2, 1))
    assert weights["rows"].size > 1 << 31 and near.size > 1 << 31 and (m - 1) * step >= 1 << 31
    for name, data in weights.items():
        outs[:, : N + 1] = 7
        kernels.run(name, [near, data, outs], threads=2)
        far.close(outs[:, :N], x.astype(np.float64) @ w.T.astype(np.float64), "f32")
        assert (outs[:, N] == 7).all(), f"{name} wrote behind its rows"


@pytest.mark.slow
def test_cpu_inputs_of_more_than_2_to_the_31_elements(
    far: Any, best_isa: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    m, n, k = (1 << 21) + 33, 16, 1024
    w = Operand(name="w", dtype="bf16", access="r", shape=(n, k), layout="canonical", strides=(k, 1))
    kernels = bench.Kernels([far.linear("tall", w, m, "large")], best_isa, tmp_path_factory.mktemp("far_input"))
    x, weight = far.sparse((m, k), "bf16"), values(n, k, far.DTYPES["bf16"])
    assert x.size > 1 << 31
    x[-33:] = values(33, k, far.DTYPES["bf16"])
    out = np.ones((m, n), far.DTYPES["bf16"])
    kernels.run("tall", [x, weight, out], threads=2)
    far.close(out[-33:], x[-33:].astype(np.float64) @ weight.astype(np.float64).T, "bf16")
    assert not out[:-33].any()


# --- CUDA -------------------------------------------------------------------------------------------------------------

CUDA_KERNELS = [  # (format, type, rows of x, class of M, arch): each engine and class, every way to store a weight
    ("int8", "f32", 5, "2-8", "sm_80"), ("nf4", "bf16", 33, "9-64", "sm_80"),
    pytest.param("nf4", "bf16", 1, "1", "sm_80", marks=pytest.mark.slow),
    pytest.param("int8", "f32", 33, "large", "sm_80", marks=pytest.mark.slow),
    pytest.param("plain", "f32", 33, "9-64", "sm_80", marks=pytest.mark.slow),
    pytest.param("plain", "bf16", 100, "large", "sm_80", marks=pytest.mark.slow),
    pytest.param("int8", "bf16", 33, "9-64", "sm_80", marks=pytest.mark.slow),
    pytest.param("nf4", "bf16", 100, "large", "sm_90a", marks=pytest.mark.slow),
    pytest.param("plain", "bf16", 100, "large", "sm_90a", marks=pytest.mark.slow),
]  # fmt: skip
ARCH = "sm_80"
ROWS = (1 << 20) + 16
"""4.3e9 elements: 4-bit codes pass byte 2**31, 8-bit codes byte 2**32."""


def cuda_spec(far: Any, weight: Any, m: int, m_class: Any) -> KernelSpec:
    """Rows of x and of the result lie so far apart that the last one is behind element 2**31."""
    step = max(far.FAR_STEP, (1 << 32) // max(m, 1)) if m > 1 else None
    spec: KernelSpec = far.linear("far", weight.operand, m, m_class, step=step)
    return spec


SHIFT = "#define blockIdx qs_unpack(qs_block_index(), 31)"
SHIFTED = """
static unsigned qt_first[2];
#define QT_UNSEEN __attribute__((noinline, no_sanitize("thread")))  // none of the kernel's accesses
extern "C" QT_UNSEEN void qt_begin_at(unsigned x, unsigned y) { qt_first[0] = x, qt_first[1] = y; }
template <class I> QT_UNSEEN I qt_shifted(I i) {
    i.x += qt_first[0], i.y += qt_first[1];
    return i;
}
#define blockIdx qt_shifted(qs_unpack(qs_block_index(), 31))
"""


@pytest.mark.parametrize(("kind", "dtype", "m", "m_class", "arch"), CUDA_KERNELS)
def test_the_last_blocks_of_a_cuda_linear_find_what_lies_behind_2_to_the_31(
    kind: str, dtype: str, m: int, m_class: Any, arch: str, far: Any
) -> None:
    """The last blocks of the grid alone run, on the simulated GPU, with every access checked: the kernel's own text, in
    which the numbers of blocks begin at those of the last. Only the last 16 rows of the weight, the rows of x and the
    last 16 columns of the result are declared: an address that was computed in 32 bits lies in none of them."""
    from qcompiler.runtime.sim.engine import LaunchRequest, Range, compile_sim, engine

    weight = far.far_weight(kind, dtype, "cuda_t16_v1", ROWS)
    spec = cuda_spec(far, weight, m, m_class)
    source = emit.emit_sim_module([spec], arch)
    assert SHIFT in source
    path = compile_sim(source.replace(SHIFT, SHIFTED), checked=True, name="far")
    machine = engine()
    machine.reserve(0)
    library, geometry = machine.load(path), emit.geometry(spec, arch)
    by_x = m_class in ("1", "2-8")  # a block per panel along x, else blocks of rows of w along y
    grid = geometry.at({})
    first = (grid[0] - 1, 0) if by_x else (0, grid[1] - 1)
    x, item = values(m, far.COLS, far.DTYPES[dtype]), np.dtype(far.DTYPES[dtype]).itemsize
    steps = [int(spec.operands[i].strides[0]) * item for i in (0, 2)]
    addresses = [
        machine.allocate(0, (m - 1) * steps[0] + x[0].nbytes, "x"),
        machine.allocate(0, weight.nbytes, "w"),
        machine.allocate(0, (m - 1) * steps[1] + ROWS * item, "out"),
    ]
    try:
        ranges, wide = [], far.PANEL * item
        rows = [(addresses[0] + i * steps[0], row.view(np.uint8)) for i, row in enumerate(x)]
        for label, given in (("x", rows), ("w", [(addresses[1] + at, piece) for at, piece in weight.pieces])):
            for address, content in given:
                write(address, content)
                machine.mark_initialised(address, content.nbytes)
                ranges.append(Range(address, address + content.nbytes, "r", label))
        ends = [addresses[2] + i * steps[1] + ROWS * item - wide for i in range(m)]
        ranges += [Range(end, end + wide, "w", "out") for end in ends]
        begin_at(path)(*first)
        request = LaunchRequest(
            device=0, function=library.function("far"), name="far", block=geometry.block, args=addresses, ranges=ranges,
            grid=(1 if by_x else grid[0], grid[1] if by_x else 1, 1), shared_bytes=geometry.shared,
        )  # fmt: skip
        report = machine.launch(request)
        assert report.unwritten == 0
        out = np.stack([read(end, wide).view(far.DTYPES[dtype]) for end in ends])
    finally:
        for address in addresses:
            machine.free(address)
    far.close(out, x.astype(np.float64) @ weight.values.T, dtype)


def read(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def write(address: int, content: npt.NDArray[np.uint8]) -> None:
    read(address, content.nbytes)[:] = content.reshape(-1)


def begin_at(path: Any) -> Any:
    import ctypes

    return ctypes.CDLL(str(path)).qt_begin_at


NARROW = re.compile(r"\b(?:int|unsigned|int32_t|uint32_t)\s+\w+\s*=\s*[^;,]*")


@pytest.mark.parametrize("m_class", ["1", "2-8", "9-64", "large"])
@pytest.mark.parametrize(("kind", "dtype"), [("nf4", "bf16"), ("int8", "f32"), ("plain", "bf16"), ("plain", "f32")])
def test_emitted_cuda_linears_count_in_64_bits(kind: str, dtype: str, m_class: Any, far: Any) -> None:
    """In a linear's own text: section offsets, strides and rows of x. Its templates are checked with all others."""
    weight = far.far_weight(kind, dtype, "cuda_t16_v1", ROWS)
    spec = cuda_spec(far, weight, 33, m_class)
    text = emit.emit_kernel(spec, ARCH).text
    narrow = [found.group() for found in NARROW.finditer(text) if re.search(r"\d{8,}|blockIdx", found.group())]
    assert not narrow, f"narrow variables hold what grows with the tensor: {narrow}"
    assert str(max(far.FAR_STEP, (1 << 32) // 33)) in text
    assert re.search(r"int64_t m\b", text) and "int64_t n" in text
    assert engine_of(spec, ARCH) == ("mma" if dtype == "bf16" and m_class in ("9-64", "large") else "fma")


def test_chunks_of_a_cuda_weight_are_numbered_in_64_bits_before_they_become_bytes() -> None:
    """A row of 2**26 bf16 columns has 2**31 bytes of tiles: too many to run on the simulated GPU."""
    text = emit.header("linear.cuh")
    assert "qc_tile_index = typename qc_if<(W::tiles + 64 < (int64_t)1 << 25), int, int64_t>::type" in text
    assert "void load(const uint8_t* w, int64_t share, qc_tile_index<W> tile)" in text
    assert "typedef qc_tile_index<W> index_type;" in emit.header("linear_mma.cuh")
