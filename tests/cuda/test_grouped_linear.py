"""Products with chosen experts on the device against float64: formats, both kernels, routings of every kind."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from grouped_cases import Case
from kernel_cases import Array, stored_weight

from qcompiler.config import parse_format, resolve_format
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import FORMATS
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import grouped_linear
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.weights import LAYOUT
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

BOUNDS = {"f32": 2e-6, "bf16": 4e-3, "f16": 6e-4}
"""Relative L2 error of a row: fp32 sums, and half an ulp of the result's type."""


def make_case(
    weight: str, experts: int, n: int, k: int, *, rows: int | str, dtype: DType = "f32", repeat: int = 1,
    index: DType = "i64", pad: int = 5,
) -> Case:  # fmt: skip
    """`weight`: the text of a format, "tiles" or "rows"; `rows`: a number for the kernel of few pairs, or a symbol.

    `pad`: elements between rows of x."""
    name = f"g{zlib.crc32(f'{weight} {experts} {n} {k} {rows} {dtype} {repeat} {index} {pad}'.encode()):08x}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    total = experts * n
    w = (rng.standard_normal((total, k)) / np.sqrt(k)).astype(np.float32)
    how = {"tiles": "layout", "rows": "rows"}.get(weight) or parse_format(weight)
    operand, data, values = stored_weight(w, how, dtype, LAYOUT)
    data = data.view(values.dtype) if weight == "tiles" else data
    pairs: int | str = rows * repeat if isinstance(rows, int) else f"{repeat}*{rows}" if repeat > 1 else rows
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=(rows, k), strides=(k + pad, 1)),
        operand,
        Operand(name="index", dtype=index, access="r", shape=(pairs,), strides=(1 if index == "i64" else 3,)),
        Operand(name="out", dtype=dtype, access="w", shape=(pairs, n), strides=(n + 1, 1)),
    )
    body = GroupedLinearKernel(rows=rows, repeat=repeat, experts=experts, n=n, k=k)
    symbols = (rows,) if isinstance(rows, str) else ()
    spec = KernelSpec(name=name, symbols=symbols, operands=operands, body=body)
    return Case(spec, data, values.astype(np.float64).reshape(experts, n, k))


def run(module: Any, case: Case, chosen: Sequence[int], **options: Any) -> tuple[Array, Array]:
    """The result, and what float64 says of the pairs whose expert exists."""
    body, (x_operand, _, index_operand, _) = case.body, case.spec.operands
    dtype, count = NUMPY_DTYPES[x_operand.dtype], len(chosen)
    rng = np.random.default_rng(count)
    x = rng.standard_normal((count // body.repeat, int(x_operand.strides[0]))).astype(dtype)[:, : body.k]
    index = np.full((count, 3), -(2**30), np.int64 if index_operand.dtype == "i64" else np.int32)[:, 0]
    index = np.ascontiguousarray(index) if index_operand.dtype == "i64" else index
    index[:] = chosen
    expected = np.full((count, body.n), np.nan)
    for p, expert in enumerate(chosen):
        if 0 <= expert < body.experts:
            expected[p] = case.values[expert] @ x[p // body.repeat].astype(np.float64)
    out = np.zeros((count, body.n + 1), dtype)[:, : body.n]
    symbols = {name: len(x) for name in case.spec.symbols}
    (result,) = module.run(case.spec.name, [x, case.weight, index, out], symbols, **options)
    return result, expected


def check(module: Any, case: Case, chosen: Sequence[int], **options: Any) -> Array:
    result, expected = run(module, case, chosen, **options)
    error = np.linalg.norm(result.astype(np.float64) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    bound = 2 * BOUNDS[case.spec.operands[0].dtype]
    assert error.max() <= bound, f"{case.spec.operands[1].format}, {len(chosen)} pairs: {error.max():.2e} in a row"
    return result


FEW = [
    make_case("nf4", 5, 19, 97, rows=2, repeat=2), make_case("int8", 4, 35, 101, rows=1, repeat=3, index="i32"),
    make_case("q4_K", 3, 16, 512, rows=3), make_case("tiles", 5, 19, 77, rows=2),
]  # fmt: skip
ANY = [
    make_case("nf4", 5, 19, 97, rows="t", repeat=2), make_case("q4_0", 3, 35, 96, rows="t", index="i32"),
    make_case("rows", 4, 19, 61, rows="t", repeat=2), make_case("tiles", 3, 40, 70, rows="t"),
]  # fmt: skip


def routings(case: Case, count: int) -> list[list[int]]:
    last, rng = case.body.experts - 1, np.random.default_rng(count)
    return [
        [int(e) for e in rng.integers(0, last + 1, count)],
        [last] * count,
        [int(e) for e in rng.choice([1, last], count)],
    ]


def test_few_pairs_equal_float64(sim_module: Callable[..., Any]) -> None:
    module = sim_module([case.spec for case in FEW], "sm_80")
    for case in FEW:
        assert isinstance(case.body.rows, int)
        for chosen in routings(case, case.body.rows * case.body.repeat):
            check(module, case, chosen)


def test_any_number_of_pairs_equals_float64(sim_module: Callable[..., Any]) -> None:
    """More than 64 rows of one expert, and more than 256 pairs, take several lists."""
    module = sim_module([case.spec for case in ANY], "sm_80")
    for case in ANY:
        for count in (1, 70):
            for chosen in routings(case, count * case.body.repeat):
                check(module, case, chosen)
    for chosen in (routings(ANY[0], 2 * 150)[0], [4] * 300):
        check(module, ANY[0], chosen)


def test_the_order_of_execution_changes_no_bit(sim_module: Callable[..., Any]) -> None:
    module, case = sim_module([case.spec for case in ANY], "sm_80"), ANY[0]
    chosen = routings(case, 2 * 40)[0]
    first = check(module, case, chosen)
    assert all(check(module, case, chosen, seed=seed).tobytes() == first.tobytes() for seed in (1, 2))


def test_narrow_types_round_once(sim_module: Callable[..., Any]) -> None:
    cases = [
        make_case("int4", 3, 19, 96, rows="t", dtype="bf16", repeat=2),
        make_case("tiles", 4, 19, 70, rows=5, dtype="f16"), make_case("nf4", 3, 19, 128, rows=2, dtype="bf16"),
    ]  # fmt: skip
    module = sim_module([case.spec for case in cases], "sm_80")
    for case in cases:
        rows = case.body.rows if isinstance(case.body.rows, int) else 9
        for chosen in routings(case, rows * case.body.repeat):
            check(module, case, chosen)


def test_an_expert_that_does_not_exist_gives_nan_in_its_row_alone(sim_module: Callable[..., Any]) -> None:
    for cases, case, chosen in ((FEW, FEW[0], [0, 5, -1, 4]), (ANY, ANY[0], [0, 5, -1, 4, 2**40, 2])):
        result, expected = run(sim_module([each.spec for each in cases], "sm_80"), case, chosen)
        wrong = np.isnan(expected).all(1)
        assert wrong.sum() == len(chosen) - sum(0 <= e < 5 for e in chosen)
        assert np.isnan(result[wrong]).all()
        np.testing.assert_allclose(result[~wrong], expected[~wrong], rtol=1e-4, atol=1e-5)


# --- tensor cores -----------------------------------------------------------------------------------------------------

SAMPLE = ("nf4", "q4_K", "int8", "fp8_e4m3")
"""Formats of the short run: a stream whose blocks straddle rows, entries per 32 columns, entries per row, floats."""


def mma_cases(names: Sequence[str], dtype: DType = "bf16") -> list[Case]:
    """Experts of 24 rows, so that every other one begins inside of a panel; K = 256, or 97 where formats take it."""
    short = {name for name in names if FORMATS[name]().declaration.blocking == "flat"}
    return [
        make_case(name, 3, 24, 97 if name in short else 256, rows="t", dtype=dtype, repeat=2, pad=5 * (name in short))
        for name in names
    ]


def check_mma(sim_module: Callable[..., Any], cases: list[Case], arch: str, counts: Sequence[int]) -> None:
    assert {grouped_linear.decision_of(case.spec, arch).key for case in cases} == {"mma"}
    module = sim_module([case.spec for case in cases], arch)
    for case in cases:
        for count in counts:
            for chosen in routings(case, count * case.body.repeat):
                check(module, case, chosen)


def test_tensor_cores_multiply_the_rows_that_chose_an_expert(sim_module: Callable[..., Any]) -> None:
    """1 row, some, and more than a tile's 64."""
    check_mma(sim_module, mma_cases(SAMPLE), "sm_80", (1, 20, 70))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "bf16"), ("sm_75", "f16")])
def test_tensor_cores_multiply_every_format(sim_module: Callable[..., Any], arch: str, dtype: DType) -> None:
    for name in FORMATS:
        check_mma(sim_module, mma_cases([name], dtype), arch, (1, 20, 70))


@pytest.mark.parametrize("rows", [100, 600])
def test_known_numbers_of_pairs_take_other_tiles(sim_module: Callable[..., Any], rows: int) -> None:
    """Few rows per expert: eight warps split K. Many: 128 at a time."""
    case = make_case("int4", 2, 40, 160, rows=rows, dtype="bf16", pad=0)
    assert grouped_linear.decision_of(case.spec, "sm_90a").key == "mma"
    module = sim_module([case.spec], "sm_90a")
    for chosen in routings(case, rows)[:2]:
        check(module, case, chosen)


def test_tensor_cores_give_nan_to_missing_experts_alone_and_keep_their_bits(sim_module: Callable[..., Any]) -> None:
    case = mma_cases(["nf4"])[0]
    module = sim_module([each.spec for each in mma_cases(SAMPLE)], "sm_80")
    chosen = [0, 3, -1, 2, 2**40, 1, 1, 2]
    result, expected = run(module, case, chosen)
    wrong = np.isnan(expected).all(1)
    assert wrong.tolist() == [not 0 <= e < 3 for e in chosen]
    assert np.isnan(result[wrong].astype(np.float32)).all()
    assert np.isfinite(result[~wrong].astype(np.float32)).all()
    assert all(run(module, case, chosen, seed=seed)[0].tobytes() == result.tobytes() for seed in (1, 2))


def test_one_token_reads_the_bytes_of_its_experts_alone(sim_module: Callable[..., Any]) -> None:
    """Codes of experts that nobody chose may be anything, and scales NaN: not a bit of the result changes."""
    case = make_case("int8", 6, 32, 160, rows=1, dtype="bf16", repeat=2)
    assert grouped_linear.decision_of(case.spec, "sm_80").key == "few_mma"
    module, chosen = sim_module([case.spec], "sm_80"), [1, 4]
    before = check(module, case, chosen)
    fmt = resolve_format("int8")
    values = np.random.default_rng(3).standard_normal((6, 32, 160)).astype(np.float32)
    packed = fmt.encode(values.reshape(192, 160))
    other = layouts.get(LAYOUT).pack(fmt, "bf16", 192, 160, packed.data)
    kept = np.zeros(6 * 32, bool).reshape(6, 32)
    kept[chosen] = True
    mixed = case.weight.copy()
    for section in layouts.get(LAYOUT).sections(fmt, "bf16", 192, 160):
        size = int(np.prod(section.shape)) * section.dtype.itemsize
        old, new = mixed[section.offset :][:size].reshape(12, -1), other[section.offset :][:size].reshape(12, -1)
        if old.size:  # panels of 16 rows follow one another in every section of this format
            rows = ~kept.reshape(12, 16).any(1)
            old[rows] = np.where(section.name == "codes", new[rows], 255)
    assert not (mixed == case.weight).all()
    changed = Case(case.spec, mixed, case.values)
    assert check(module, changed, chosen).tobytes() == before.tobytes()
    spec_geometry = emit_kernel(case.spec, "sm_90a").geometry
    assert spec_geometry.grid == (2, 2, 1)


def test_a_token_of_a_large_mixture_fills_a_gpu() -> None:
    """Mixtral's shapes: a block per panel and pair, warps for 16 KiB of codes under way in each."""
    for n, k in ((14336, 4096), (4096, 14336)):
        index = Operand(name="index", dtype="i64", access="r", shape=(2,), strides=(1,))
        w = Operand(name="w", dtype="bf16", access="r", shape=(8 * n, k), format=parse_format("nf4"), layout=LAYOUT)
        x = Operand(name="x", dtype="bf16", access="r", shape=(1, k), strides=(k, 1))
        out = Operand(name="out", dtype="bf16", access="w", shape=(2, n), strides=(n, 1))
        body = GroupedLinearKernel(rows=1, repeat=2, experts=8, n=n, k=k)
        geometry = emit_kernel(
            KernelSpec(name="g", symbols=(), operands=(x, w, index, out), body=body), "sm_90a"
        ).geometry
        assert geometry.grid == (n // 16, 2, 1)
        assert geometry.threads == 256
        assert 3 * geometry.shared <= 228 * 1024


def test_both_kernels_compile_for_every_architecture(
    nvrtc: Callable[[Sequence[KernelSpec], str], dict[str, Any]],
) -> None:
    for arch in ("sm_75", "sm_90a"):
        table = nvrtc([FEW[0].spec, ANY[0].spec, ANY[2].spec], arch)
        assert len(table) == 3


def test_wrong_operands_are_named() -> None:
    spec = make_case("rows", 2, 3, 4, rows="t").spec
    for place, change, message in (
        (2, {"dtype": "f32"}, "'index' is f32"), (0, {"dtype": "i32"}, "'x' is i32"),
        (3, {"strides": (1, 6)}, "'out' needs unit stride"),
    ):  # fmt: skip
        operands = list(spec.operands)
        fields = {f: getattr(operands[place], f) for f in operands[place].__struct_fields__}
        operands[place] = Operand(**{**fields, **change})
        broken = KernelSpec(name=spec.name, symbols=spec.symbols, operands=tuple(operands), body=spec.body)
        with pytest.raises(KernelSelectionError, match=message):
            emit_kernel(broken, "sm_80")
