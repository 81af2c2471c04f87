"""Linears on tensor cores against NumPy in float64: formats, types, odd shapes, views, orders of execution."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import emit, linear, linear_mma, signature
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.linear import LinearKernel

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
HALF_ULP = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Largest relative error of one rounding to the result's type."""

FORMATS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "nf4": ("nf4", {"block": 64}),
    "nf4_256": ("nf4", {"block": 256}),
    "int4_32": ("int4", {"group": 32}),
    "int4_64": ("int4", {"group": 64}),
    "int4_128": ("int4", {"group": 128}),
    "zeros_32": ("int4", {"group": 32, "symmetric": False}),
    "zeros_64": ("int4", {"group": 64, "symmetric": False}),
    "zeros_128": ("int4", {"group": 128, "symmetric": False}),
    "int8": ("int8", {}),
    "plain": None,
}
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {  # (N, K); nf4's blocks straddle rows where K is no multiple of them
    "nf4": ((33, 320), (50, 77)), "nf4_256": ((17, 512), (35, 301)), "int4_32": ((33, 96),), "int4_64": ((40, 320),),
    "int4_128": ((16, 384),), "zeros_32": ((70, 160),), "zeros_64": ((33, 192),), "zeros_128": ((20, 256),),
    "int8": ((37, 129), (64, 64)), "plain": ((35, 75), (32, 256)),
}  # fmt: skip
MS = {"9-64": (9, 16, 17, 33, 64, 65), "large": (65, 70, 129)}


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One kernel: its spec, the weight's bytes, and the weight as float64."""

    spec: KernelSpec
    weight: Array
    values: Array

    @property
    def body(self) -> LinearKernel:
        return linear.linear_body(self.spec)

    @property
    def dtype(self) -> Any:
        return DTYPES[self.spec.operands[0].dtype]


def gelu_residual(dtype: Any) -> ScalarProgram:
    """gelu(acc) + r, by the error function."""
    rows: list[tuple[str, str, tuple[str, ...]]] = [
        ("a", "arith.mulf", ("acc", "root")), ("e", "math.erf", ("a",)), ("p", "arith.addf", ("e", "one")),
        ("h", "arith.mulf", ("acc", "half")), ("g", "arith.mulf", ("h", "p")), ("w", "arith.extf", ("r",)),
        ("s", "arith.addf", ("g", "w")),
    ]  # fmt: skip
    constants = {"root": math.sqrt(0.5), "one": 1.0, "half": 0.5}
    ops = [ScalarOp(result=n, op="arith.constant", dtype="f32", value=v.hex()) for n, v in constants.items()]
    ops += [ScalarOp(result=result, op=op, dtype="f32", args=args) for result, op, args in rows]
    ops.append(ScalarOp(result="y", op="arith.truncf", dtype=dtype, args=("s",)))
    return ScalarProgram(inputs=(("acc", "f32"), ("r", dtype)), ops=tuple(ops), yields=("y",))


def weight_operand(kind: str, shape: tuple[int, int], dtype: Any) -> Operand:
    chosen = FORMATS[kind]
    ref = None if chosen is None else FormatRef(name=chosen[0], params=chosen[1])
    return Operand(name="w", dtype=dtype, access="r", shape=shape, format=ref, layout=linear.LAYOUT)


def weight_of(kind: str, shape: tuple[int, int], dtype: Any, w: Array | None) -> tuple[Array, Array]:
    """(a weight's bytes, the values that a kernel must multiply with as float64); `w` or drawn."""
    n, k = shape
    if w is None:
        rng = np.random.default_rng(zlib.crc32(f"{kind} {shape} {dtype}".encode()))
        w = rng.standard_normal((n, k)).astype(np.float32) / np.float32(math.sqrt(max(k, 1)))
    layout, chosen = layouts.get(linear.LAYOUT), FORMATS[kind]
    if chosen is None:
        plain = w.astype(DTYPES[dtype])
        data = layout.pack(None, dtype, n, k, plain.reshape(-1).view(np.uint8)).view(DTYPES[dtype])
        return data, plain.astype(np.float64)
    fmt = formats.get(chosen[0], **chosen[1])
    packed = fmt.encode(w)
    with np.errstate(over="ignore"):
        values = fmt.decode(packed).astype(DTYPES[dtype]).astype(np.float64)
    return layout.pack(fmt, dtype, n, k, packed.data), values


def make_spec(
    kind: str,
    shape: tuple[int, int],
    dtype: Any,
    m_class: Any,
    *,
    m: int | str = "s",
    x_row: int = 0,
    epilogue: bool = False,
) -> KernelSpec:
    """`x_row` elements lie between the rows of x beyond k; with `epilogue`: bias, gelu and a residual."""
    n, k = shape
    operands = [
        Operand(name="x", dtype=dtype, access="r", shape=(m, k), strides=(k + x_row, 1)),
        weight_operand(kind, shape, dtype),
    ]
    if epilogue:
        operands.append(Operand(name="bias", dtype=dtype, access="r", shape=(n,), strides=(1,)))
        operands.append(Operand(name="r", dtype=dtype, access="r", shape=(m, n), strides=(1, m)))
    operands.append(Operand(name="out", dtype=dtype, access="w", shape=(m, n), strides=(n + 3, 1)))
    body = LinearKernel(
        m=m, n=n, k=k, m_class=m_class, has_bias=epilogue, epilogue=gelu_residual(dtype) if epilogue else None
    )
    name = f"{kind}_{n}x{k}_{dtype}_{m_class.replace('-', '_')}_{m}_{x_row}_{'e' * epilogue}"
    symbols = ("s",) if isinstance(m, str) else ()
    return KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=body)


def make_case(
    kind: str, shape: tuple[int, int], dtype: Any, m_class: Any, *, w: Array | None = None, **options: Any
) -> Case:
    """The kernel of `make_spec` over a drawn weight, or over `w`."""
    return Case(make_spec(kind, shape, dtype, m_class, **options), *weight_of(kind, shape, dtype, w))


def draw(case: Case, m: int, offset: int = 0) -> list[Array]:
    """Operands for M = m; x begins `offset` elements into its memory, and holes between its rows are NaN."""
    n, k = case.body.n, case.body.k
    step = int(case.spec.operands[0].strides[0])
    rng = np.random.default_rng(m)
    memory = np.full(offset + m * step, np.nan, case.dtype)
    x = memory[offset:].reshape(m, step)[:, :k]
    x[...] = rng.standard_normal((m, k)).astype(case.dtype)
    operands = [x, case.weight]
    if case.body.has_bias:
        operands += [rng.standard_normal(n).astype(case.dtype), rng.standard_normal((n, m)).astype(case.dtype).T]
    return [*operands, np.zeros((m, n + 3), case.dtype)[:, :n]]


def check(module: Any, case: Case, m: int, *, offset: int = 0, seed: int = 0) -> Array:
    """Runs the kernel and compares each element: half an ulp of the result, and fp32 sums."""
    operands = draw(case, m, offset)
    (out,) = module.run(case.spec.name, operands, {"s": m} if case.spec.symbols else {}, seed=seed)
    x = operands[0].astype(np.float64)
    expected = x @ case.values.T
    slack = 2.0**-20 * (np.abs(x) @ np.abs(case.values).T) + 1e-6
    if case.body.has_bias:
        total = expected + operands[2].astype(np.float64)
        expected = 0.5 * total * (1 + np.vectorize(math.erf)(total / math.sqrt(2))) + operands[3].astype(np.float64)
    error = np.abs(out.astype(np.float64) - expected)
    bad = ~(error <= HALF_ULP[case.spec.operands[0].dtype] * np.abs(expected) + 2 * slack)
    assert not bad.any(), (
        f"{case.spec.name} at M = {m}: {bad.sum()} of {bad.size} wrong, rows {np.unique(np.nonzero(bad)[0])[:9]}, "
        f"columns {np.unique(np.nonzero(bad)[1])[:9]}"
    )
    result: Array = out
    return result


def run_all(sim_module: Callable[..., Any], cases: Sequence[Case], arch: str, ms: dict[str, tuple[int, ...]]) -> None:
    module = sim_module([case.spec for case in cases], arch)
    for case in cases:
        assert emit.emit_kernel(case.spec, arch).engine == "mma"
        for m in (case.body.m,) if isinstance(case.body.m, int) else ms[case.body.m_class]:
            check(module, case, m)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", ["nf4", "int4_32", "zeros_64", "int8", "plain"])
def test_linear_equals_float64_for_every_m(sim_module: Callable[..., Any], kind: str, dtype: str) -> None:
    """A shape of few tokens and one of many; the one with an epilogue changes from format to format."""
    shapes = SHAPES[kind]
    few = make_case(kind, shapes[0], dtype, "9-64", epilogue=kind in ("nf4", "plain"))
    many = make_case(kind, shapes[-1], dtype, "large", epilogue=kind in ("int4_32", "int8"))
    run_all(sim_module, [few, many], "sm_80", {"9-64": (9, 17, 64), "large": (70, 129)})


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_75", "f16"), ("sm_80", "bf16"), ("sm_80", "f16"), ("sm_90a", "bf16")])
@pytest.mark.parametrize("kind", list(SHAPES))
def test_every_combination_equals_float64(sim_module: Callable[..., Any], kind: str, arch: str, dtype: str) -> None:
    cases = [
        make_case(kind, shape, dtype, m_class, m=m, epilogue=epilogue, x_row=x_row)
        for shape in SHAPES[kind]
        for m_class, m in (("9-64", "s"), ("9-64", 13), ("9-64", 29), ("large", "s"), ("large", 200))
        for epilogue, x_row in ((False, 0), (True, 5))
    ]
    run_all(sim_module, cases, arch, MS)


def test_rings_that_go_round_and_tiles_of_known_m(sim_module: Callable[..., Any]) -> None:
    """K is several times what the ring and the registers hold, in every tile that is chosen by M and N."""
    cases = [
        make_case("nf4", (48, 2112), "bf16", "9-64", m=16),
        make_case("int4_64", (33, 3136), "bf16", "9-64", m=30),
        make_case("int8", (33, 1500), "bf16", "9-64"),
        make_case("plain", (70, 700), "bf16", "large"),
        make_case("nf4", (200, 577), "bf16", "large", m=130),
    ]
    limit = SHARED_LIMIT[80]
    tiles = [linear_mma.tile_of(case.body, 4, limit) for case in cases]
    assert [tile.tokens for tile in tiles] == [16, 32, 64, 64, 64]
    run_all(sim_module, cases, "sm_80", {"9-64": (33,), "large": (66,)})


def test_large_tile_of_128_by_128(sim_module: Callable[..., Any]) -> None:
    cases = [make_case("zeros_32", (4112, 96), "bf16", "large")]
    assert linear_mma.tile_of(cases[0].body, 4, SHARED_LIMIT[80]) == linear_mma.LARGE
    run_all(sim_module, cases, "sm_80", {"large": (129,)})


def test_groups_of_blocks_cover_every_element(sim_module: Callable[..., Any]) -> None:
    """More token blocks than a group holds, the last group not full, several row blocks."""
    case = make_case("int4_64", (130, 64), "bf16", "large")
    assert emit.geometry(case.spec, "sm_80").at({"s": 600})[:2] == (10, 3)
    check(sim_module([case.spec], "sm_80"), case, 600)


def test_f16_on_sm_75_copies_without_async_and_multiplies_in_halves(sim_module: Callable[..., Any]) -> None:
    cases = [make_case("nf4", (33, 320), "f16", "9-64"), make_case("zeros_32", (70, 160), "f16", "large")]
    run_all(sim_module, cases, "sm_75", {"9-64": (33,), "large": (70,)})


def test_views_of_x_off_16_bytes_give_the_same_bits(sim_module: Callable[..., Any]) -> None:
    """x one element into its memory, or with rows that start anywhere: the copy without cp.async. Holes hold NaN."""
    plain, odd, wide = (make_case("nf4", (50, 192), "bf16", "9-64", x_row=row) for row in (0, 3, 8))
    module = sim_module([case.spec for case in (plain, odd, wide)], "sm_80")
    first = check(module, plain, 33)
    for case, offset in ((plain, 1), (plain, 8), (odd, 0), (odd, 5), (wide, 0), (wide, 4)):
        assert check(module, case, 33, offset=offset).tobytes() == first.tobytes(), (case.spec.name, offset)


def test_two_orders_of_execution_give_the_same_bits(sim_module: Callable[..., Any]) -> None:
    cases = [make_case("nf4", (48, 2112), "bf16", "9-64", m=16), make_case("nf4", (50, 77), "bf16", "large")]
    module = sim_module([case.spec for case in cases], "sm_80")
    for case, m in zip(cases, (16, 70), strict=True):
        first, second = (check(module, case, m, seed=seed) for seed in (1, 2))
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_decoded_weights_equal_the_format_to_the_bit(sim_module: Callable[..., Any], dtype: str) -> None:
    """x = identity: an output is one weight times 1, so that no rounding of a sum can hide a different decode."""
    kinds = ("nf4", "nf4_256", "int4_32", "zeros_64", "zeros_128", "int8", "plain")
    cases = [make_case(kind, SHAPES[kind][-1], dtype, "large") for kind in kinds]
    module = sim_module([case.spec for case in cases], "sm_80", checked=False)
    for case in cases:
        n, k = case.values.shape
        operands = [np.eye(k).astype(case.dtype), case.weight, np.zeros((k, n + 3), case.dtype)[:, :n]]
        (out,) = module.run(case.spec.name, operands, {"s": k})
        assert (out.astype(np.float64) == case.values.T).all(), case.spec.name


def test_codes_past_the_last_column_are_no_weights(sim_module: Callable[..., Any]) -> None:
    """NF4's code 0 is -absmax: with an absmax that overflows f16 it would be -inf, and -inf times 0 is NaN."""
    w = np.full((16, 77), 0.5, np.float32)
    w[3, 70] = 7e4
    case = make_case("nf4", (16, 77), "f16", "9-64", w=w)
    x = np.ones((9, 77), np.float16)
    (out,) = sim_module([case.spec], "sm_80").run(
        case.spec.name, [x, case.weight, np.zeros((9, 19), np.float16)[:, :16]], {"s": 9}
    )
    assert np.isposinf(out[:, 3]).all()
    assert not np.isnan(out).any()


def test_no_depth_gives_the_bias(sim_module: Callable[..., Any]) -> None:
    case = make_case("plain", (35, 0), "bf16", "9-64", epilogue=True)
    body = msgspec.structs.replace(case.body, epilogue=None)
    x, w, bias, _, out = case.spec.operands
    spec = msgspec.structs.replace(case.spec, body=body, operands=(x, w, bias, out))
    values = np.arange(35).astype(DTYPES["bf16"])
    operands = [np.zeros((9, 0), values.dtype), np.zeros(0, values.dtype), values, np.zeros((9, 38), values.dtype)]
    (result,) = sim_module([spec], "sm_80").run(spec.name, [*operands[:3], operands[3][:, :35]], {"s": 9})
    assert (result == values).all()


# --- what is emitted -------------------------------------------------------------------------------------------------


def test_tiles_fit_the_shared_memory_of_every_architecture() -> None:
    for arch in signature.ARCHS:
        limit = SHARED_LIMIT[signature.arch_number(arch)]
        for m_class, m in (("9-64", 9), ("9-64", 20), ("9-64", "s"), ("large", "s"), ("large", 4096)):
            for n in (16, 4096, 100_000):
                body = LinearKernel(m=m, n=n, k=64, m_class=m_class, has_bias=False)
                tile = linear_mma.tile_of(body, 4, limit)
                assert tile.shared <= limit, (arch, body, tile)
                assert tile.resident(limit, straddles=False) * tile.shared <= limit


def test_the_equation_of_an_affine_format_is_one_fma() -> None:
    text = emit.emit_kernel(make_case("zeros_64", (33, 192), "bf16", "9-64").spec, "sm_80").text
    assert "return {{p.of[1], -(128.0f + p.of[0]) * p.of[1]}};" in text
    text = emit.emit_kernel(make_case("int4_32", (33, 96), "bf16", "9-64").spec, "sm_80").text
    assert "return {{p.of[0], -(136.0f) * p.of[0]}};" in text
    text = emit.emit_kernel(make_case("nf4", (33, 320), "bf16", "9-64").spec, "sm_80").text
    assert "float element(float code, const parts& p) { return (code * p.of[0]); }" in text


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in signature.ARCHS if arch != "sm_70"])
@pytest.mark.parametrize("kind", list(SHAPES))
def test_no_variant_uses_local_memory(nvrtc: Callable[..., Any], arch: str, kind: str) -> None:
    """Every tile, with K whole and odd, with and without an epilogue."""
    dtype = "f16" if arch == "sm_75" else "bf16"
    odd = [4095] if kind in ("nf4", "int8", "plain") else [96] if kind.endswith("_32") else []
    specs = [
        make_spec(kind, (n, k), dtype, m_class, m=m, epilogue=n == 768)
        for n, k in ((4096, 4096), (768, 768), *((768, k) for k in odd), *((4096, k) for k in odd))
        for m_class, m in (("9-64", 16), ("9-64", 32), ("9-64", "s"), ("large", "s"), ("large", 256))
    ]
    for name, found in nvrtc(specs, arch).items():
        assert not found.uses_local_memory, f"{name} on {arch}: {found}"
