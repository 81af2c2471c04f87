"""Loop kernels on a GPU device: the nests of tests/kernels, random ones, and what is particular to CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError, SimulationError
from qcompiler.kernels.cuda.emit import emit_kernel, geometry
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.weights import NUMPY_DTYPES

pointwise = load("tests/kernels/test_loop.py")
reductions = load("tests/kernels/test_loop_reduce.py")
nests = load("tests/kernels/test_loop_random.py")
RANDOM = nests.NESTS[:40]
WIDE = [nests.random_nest(seed) for seed in range(1000, 1240)]
SEEDS = (0, 11)


def op(result: str, name: str, dtype: str, *args: str, **extra: Any) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **extra)  # type: ignore[arg-type]


def run_twice(module: Any, name: str, operands: Sequence[np.ndarray], symbols: Any, partial: bool) -> list[np.ndarray]:
    """Two orders of execution must give equal bits."""
    first, second = (module.run(name, operands, symbols, seed=seed, partial=partial) for seed in SEEDS)
    for a, b in zip(first, second, strict=True):
        assert a.tobytes() == b.tobytes(), f"{name} depends on the order of its threads"
    results: list[np.ndarray] = first
    return results


# --- pointwise --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module([case.spec for case in pointwise.CASES])


@pytest.mark.parametrize("case", pointwise.CASES, ids=lambda c: c.name)
def test_loop_matches_numpy(kernels: Any, case: Any) -> None:
    rng = np.random.default_rng(7)
    count = len(case.accesses) - len(case.yields)
    inputs = [case.memory(i, rng) for i in range(count)]
    blank = [np.zeros_like(case.memory(i, rng)) for i in range(count, len(case.accesses))]
    want = case.reference(*(case.view(i, x) for i, x in enumerate(inputs)))
    expectations, partial = [], False
    for i, expected in enumerate(want if isinstance(want, tuple) else (want,), start=count):
        expectation, covered = blank[i - count].copy(), np.zeros(blank[i - count].shape, bool)
        case.view(i, expectation)[...] = expected
        if covered.itemsize == expectation.itemsize:
            case.view(i, covered)[...] = True
        else:
            flat = np.zeros_like(expectation)
            case.view(i, flat)[...] = 1
            covered = flat.astype(bool)
        partial |= not covered.all()
        expectations.append(expectation)
    done = run_twice(kernels, case.name, [*inputs, *blank], dict(case.symbols), partial)
    for got, expectation in zip(done, expectations, strict=True):
        if case.exact:
            assert got.tobytes() == expectation.tobytes()
        else:
            np.testing.assert_allclose(got, expectation, rtol=2e-6, atol=1e-7)


def test_pointwise_kernel_may_run_in_place(kernels: Any) -> None:
    x, y = (np.random.default_rng(i).normal(size=1003).astype(np.float32) for i in range(2))
    (got,) = kernels.run("add_1d", [x, y, x])
    assert got.tobytes() == (x + y).tobytes()


def test_harness_notices_what_a_kernel_leaves_out_or_adds(kernels: Any) -> None:
    """What all other kernel tests rely on: unwritten outputs and writes beside them fail a test."""
    x = np.ones(1003, np.float32)
    with pytest.raises(AssertionError, match="unwritten"):
        kernels.run("add_1d", [x, x.copy(), np.zeros(1004, np.float32)])
    with pytest.raises((AssertionError, SimulationError), match=r"outside its operand|out-of-bounds|undeclared"):
        kernels.run("add_1d", [x, x.copy(), np.zeros(1002, np.float32)])


def shifted_add(dtype: DType) -> KernelSpec:
    """``y[o + i] = x[o + i] + x[o + i]`` for rows of n elements: `o` decides whether wide accesses are allowed."""
    access = AffineAccess(offset="o", coefficients=("n", 1))
    name = f"shifted_{dtype}"
    body = LoopKernel(
        extents=("m", "n"),
        iterators=("parallel", "parallel"),
        accesses=(access, AffineAccess(offset="o", coefficients=("n + 8", 1))),
        body=ScalarProgram(
            inputs=(("a", dtype), ("r", dtype)), ops=(op("s", "arith.addf", dtype, "a", "a"),), yields=("s",)
        ),
    )
    x, y = (Operand(name=n, dtype=dtype, access=a, shape=()) for n, a in (("x", "r"), ("y", "w")))  # type: ignore[arg-type]
    return KernelSpec(name=name, symbols=("m", "n", "o"), operands=(x, y), body=body)


@pytest.fixture(scope="module")
def shifted(sim_module: Callable[..., Any]) -> Any:
    return sim_module([shifted_add("f32"), shifted_add("bf16"), shifted_add("f64")])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize(("m", "n", "o"), [(3, 64, 0), (3, 64, 1), (3, 64, 8), (2, 37, 0), (2, 3, 0), (0, 5, 0)])
def test_wide_accesses_only_where_addresses_allow(shifted: Any, dtype: str, m: int, n: int, o: int) -> None:
    """Misaligned wide accesses are errors of the device: every alignment of base and rows has to take its own path."""
    x = np.random.default_rng(o).normal(size=o + m * n + 1).astype(NUMPY_DTYPES[dtype])
    y = np.zeros(o + m * (n + 8) + 1, x.dtype)
    (got,) = shifted.run(f"shifted_{dtype}", [x, y], {"m": m, "n": n, "o": o}, partial=True)
    want = y.copy()
    for row in range(m):
        part = x[o + row * n :][:n]
        want[o + row * (n + 8) :][:n] = part + part
    assert got.tobytes() == want.tobytes()


# --- reductions -------------------------------------------------------------------------------------------------------


def reduction(name: str, **changes: Any) -> Any:
    return reductions.Case(name, **{"yields": ("s",), "init": ("0x0p+0",), "reference": reductions.total, **changes})


def fold(kind: str, dtype: str) -> tuple[ScalarOp, ...]:
    return (op("s", f"arith.{kind}", dtype, "in0", "acc0"),)


OWN = [
    reduction("block_of_few", shape=(3, 5000), axes=(1,), ops=reductions.SUM, tolerance=2e-4),
    reduction("odd_block", shape=(1, 3001), axes=(1,), ops=reductions.SUM, tolerance=2e-4),
    reduction("two_reductions", shape=(3, 40, 2, 50), axes=(1, 3), ops=reductions.SUM, tolerance=2e-5),
    reduction("columns_behind_rows", shape=(3, 40, 50, 9), axes=(1, 3), ops=reductions.SUM, tolerance=2e-5),
    reduction("bf16_accumulator", shape=(9, 64), axes=(1,), ops=fold("maximumf", "bf16"), init=("-inf",), dtype="bf16",
              out=("bf16",), reference=lambda x, a: x.max(a)),
    *(reduction(f"max_{d}", shape=(9, 70), axes=(1,), ops=fold("maxsi", d), init=("-100",), dtype=d, out=(d,),
                reference=lambda x, a: x.max(a)) for d in ("i64", "i32")),
    reduction("product", shape=(12, 30), axes=(0,), ops=fold("mulf", "f32"), init=("0x1p+0",), tolerance=1e-3,
              reference=lambda x, a: x.astype(np.float64).prod(a)),
    reduction("sum_of_positions", shape=(9, 70), axes=(1,), dtype="i64", out=("i64",), init=("0",),
              ops=(op("i", "linalg.index", "index", axis=1), op("k", "arith.index_cast", "i64", "i"),
                   op("p", "arith.muli", "i64", "k", "in0"), op("s", "arith.addi", "i64", "p", "acc0")),
              reference=lambda x, a: (x * np.arange(70)).sum(a)),
]  # fmt: skip
REDUCTIONS = [*reductions.CASES, *OWN]
FORMS = {
    "rows": "32 threads per output", "block_of_few": "256 threads per output", "everything": "256 threads per output",
    "columns": "a warp covers 32 outputs", "middle": "a warp covers 32 outputs", "argmax": "in order",
    "sum_i64": "32 threads per output", "rows_short": "in order", "outer_and_last": "32 threads per output",
}  # fmt: skip


@pytest.fixture(scope="module")
def reducers(sim_module: Callable[..., Any]) -> Any:
    return sim_module([case.spec for case in REDUCTIONS])


@pytest.mark.parametrize("case", REDUCTIONS, ids=lambda c: c.name)
def test_reduction_matches_numpy(reducers: Any, case: Any) -> None:
    x = reductions.values(case)
    shape = [case.shape[a] for a in case.kept]
    done = run_twice(reducers, case.name, [x, *(np.ones(shape, NUMPY_DTYPES[d]) for d in case.out)], {}, False)
    want = case.reference(x, case.axes)
    for got, expected in zip(done, want if isinstance(want, tuple) else (want,), strict=True):
        if case.tolerance == 0:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_form_of_a_reduction(name: str, form: str) -> None:
    case = next(c for c in REDUCTIONS if c.name == name)
    assert form in emit_kernel(case.spec, "sm_80").text


def test_maximum_keeps_nan(reducers: Any) -> None:
    for name in ("max_rows", "max_columns"):
        case = next(c for c in REDUCTIONS if c.name == name)
        x = reductions.values(case)
        x[17, 30] = np.nan
        (y,) = reducers.run(name, [x, np.zeros(case.shape[case.kept[0]], np.float32)])
        assert np.isnan(y).sum() == 1


# --- random nests -----------------------------------------------------------------------------------------------------


def check_random(module: Any, nest: Any) -> None:
    rng = np.random.default_rng(99)
    arrays = []
    for dtype, offset, strides in nest.operands:
        size = offset + 1 + sum((n - 1) * s for n, s in zip(nest.sizes, strides, strict=True))
        arrays.append(rng.normal(size=size).astype(NUMPY_DTYPES[dtype]))
    x = [
        nests.view(a, o, s, nest.sizes).astype(np.float32) for a, (_, o, s) in zip(arrays, nest.operands, strict=True)
    ][:-1]
    value = x[0] + x[1] * x[2] if len(x) == 3 else x[0] + x[1] if len(x) == 2 else x[0]
    if nest.reduced:
        value = value.max(nest.reduced) if nest.maximum else value.astype(np.float64).sum(nest.reduced)
    want = arrays[-1] = np.zeros_like(arrays[-1])
    want = want.copy()
    _, offset, strides = nest.operands[-1]
    kept = len(nest.sizes) - len(nest.reduced)
    nests.view(want, offset, strides[:kept], nest.sizes[:kept])[...] = value
    (got,) = run_twice(module, nest.spec.name, arrays, nests.SYMBOLS, True)
    if nest.reduced and not nest.maximum:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-3)
    else:
        assert got.tobytes() == want.tobytes()


@pytest.fixture(scope="module")
def random_kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module([nest.spec for nest in RANDOM])


@pytest.mark.parametrize("nest", RANDOM, ids=lambda n: n.spec.name)
def test_random_nest_matches_numpy(random_kernels: Any, nest: Any) -> None:
    check_random(random_kernels, nest)


@pytest.fixture(scope="module")
def wide_kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module([nest.spec for nest in WIDE])


@pytest.mark.slow
@pytest.mark.parametrize("nest", WIDE, ids=lambda n: n.spec.name)
def test_more_random_nests(wide_kernels: Any, nest: Any) -> None:
    check_random(wide_kernels, nest)


def test_the_nests_reach_every_form(random_kernels: Any) -> None:
    """The seeds are worth their time: each form of loop kernel stands in the source."""
    for note in ("// a thread computes", "// 32 x 32 tiles", "// 32 threads per output", "// a warp covers"):
        assert note in random_kernels.source, note


# --- text and resources ----------------------------------------------------------------------------------------------

SELECTION = [
    *(c.spec for c in pointwise.CASES if c.name in ("add_symbolic", "add_transposed", "transpose_bf16", "two_outputs",
                                                    "f64_sum", "gelu", "heads_to_rows", "i8_to_f32")),
    *(c.spec for c in REDUCTIONS if c.name in ("rows", "columns", "everything", "argmax", "bf16_rows", "any",
                                               "sum_and_squares", "two_reductions")),
]  # fmt: skip


def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    """Groups live in registers: an index that the compiler cannot resolve would put them into local memory."""
    for name, used in nvrtc(SELECTION, arch).items():
        assert not used.uses_local_memory, (name, used)
        assert used.registers <= 64, (name, used)


@pytest.mark.slow
def test_every_nest_compiles_without_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    specs = [c.spec for c in pointwise.CASES] + [c.spec for c in REDUCTIONS] + [n.spec for n in RANDOM]
    assert not [name for name, used in nvrtc(specs, arch).items() if used.uses_local_memory]


def test_indices_are_narrow_only_where_nothing_can_overflow() -> None:
    case = next(c for c in pointwise.CASES if c.name == "add_1d")
    assert " int64_t " not in emit_kernel(case.spec, "sm_80").text
    wide = pointwise.Case("wide", (2**31,), ((("f32"), 0, (1,)),) * 3, pointwise.ADD, ("s",), None)
    assert "const int64_t unit = (int64_t)blockIdx.x" in emit_kernel(wide.spec, "sm_80").text
    far = pointwise.Case("far", (2, 5), (("f32", 0, (2**30, 1)),) * 3, pointwise.ADD, ("s",), None)
    assert "const int64_t i0" in emit_kernel(far.spec, "sm_80").text


def test_grid_covers_more_than_two_to_the_31_elements() -> None:
    extents: tuple[Dim, ...] = ("b", "s", 384)
    access = ("f32", 0, ("384*s", 384, 1))
    case = pointwise.Case("huge", extents, (access,) * 3, pointwise.ADD, ("s",), None, symbols=(("b", 1), ("s", 1)))
    where = geometry(case.spec, "sm_80")
    assert where.at({"b": 2**10, "s": 2**17})[0] * where.threads * 4 == 2**27 * 384


def test_operand_may_be_called_like_a_word_of_the_kernel() -> None:
    case = next(c for c in pointwise.CASES if c.name == "add_1d")
    import msgspec

    named = zip(case.spec.operands, ("unit", "double", "y"), strict=True)
    spec = msgspec.structs.replace(
        case.spec, operands=tuple(msgspec.structs.replace(operand, name=name) for operand, name in named)
    )
    text = emit_kernel(spec, "sm_80").text
    assert "const float* const operand0" in text
    assert "const float* const operand1" in text


def test_unknown_op_is_an_error_that_names_it() -> None:
    case = pointwise.pointwise("strange", "f32", [op("a", "math.tgamma", "f32", "in0")], "a", None)
    with pytest.raises(KernelSelectionError, match=r"math\.tgamma"):
        emit_kernel(case.spec, "sm_80")
