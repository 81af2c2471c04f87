"""Linears on CUDA cores, and with few rows of x, against NumPy in float64: formats, types, classes of M, odd shapes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import gelu, gelu_program, residual_program, stored_weight

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import linear, linear_fma
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]
BOUNDS = {"f32": 2e-6, "bf16": 3e-3, "f16": 4e-4}
"""Relative L2 error: fp32 sums, and half an ulp of the result's type."""

CLASSES = ("1", "2-8", "9-64", "large")
FEW_CLASSES: tuple[Any, ...] = ("1", "2-8")
MS = {"1": (1, 2), "2-8": (2, 5, 8, 9), "9-64": (9, 33, 64, 70), "large": (1, 70)}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("nf4", {"block": 64}),
    "nf4_128": ("nf4", {"block": 128}),
    "nf4_flat": ("nf4", {"block": 64}),
    "nf4_flat128": ("nf4", {"block": 128}),
    "nf4_deep": ("nf4", {"block": 64}),
    "int8": ("int8", {}),
    "int4": ("int4", {"group": 32}),
    "int4_zeros": ("int4", {"group": 64, "symmetric": False}),
    "int4_128": ("int4", {"group": 128}),
    "int4_zeros32": ("int4", {"group": 32, "symmetric": False}),
    "int8_deep": ("int8", {}),
}
SHAPES = {  # (N, K). "deep": several warps, several chunks of x where there are 8 rows
    "nf4": (35, 192), "nf4_128": (17, 256), "nf4_flat": (37, 97), "nf4_flat128": (21, 145), "nf4_deep": (18, 2304),
    "int8": (33, 101), "int4": (35, 96), "int4_zeros": (19, 320), "int4_128": (16, 128), "int4_zeros32": (5, 160),
    "int8_deep": (7, 4201), "tiles": (35, 77), "rows": (41, 61), "columns": (40, 45),
}  # fmt: skip
DECODED = ("nf4", "nf4_flat", "nf4_flat128", "int8", "int4", "int4_zeros", "int4_zeros32")


@dataclass
class Case:
    """One kernel: its spec, the weight's bytes, and the weight as float64."""

    spec: KernelSpec
    weight: Array
    values: Array
    epilogue: str

    @property
    def body(self) -> LinearKernel:
        return linear.linear_body(self.spec)


def weight_operand(kind: str, dtype: Any) -> tuple[Operand, Array, Array]:
    """(operand, array to give the kernel, values that it must multiply with, float64)."""
    n, k = SHAPES[kind]
    rng = np.random.default_rng(zlib.crc32(f"{kind} {dtype}".encode()))
    w = rng.standard_normal((n, k)).astype(np.float32) / np.float32(math.sqrt(k))
    how = {"tiles": "layout", "rows": "wide", "columns": "columns"}.get(kind) or FormatRef(*FORMATS[kind])
    operand, data, values = stored_weight(w, how, dtype, linear.LAYOUT)
    given = {"tiles": lambda: data.view(values.dtype), "rows": lambda: data[:, :k], "columns": lambda: data.T}
    return operand, given.get(kind, lambda: data)(), values.astype(np.float64)


def make_case(
    name: str, kind: str, m_class: Any, x: Any, w: Any, epilogue: str, *, has_bias: bool, m: int | str = "b*s"
) -> Case:
    n, k = SHAPES[kind]
    weight, data, values = weight_operand(kind, w)
    operands = [Operand(name="x", dtype=x, access="r", shape=(m, k), strides=(k + 5, 1)), weight]
    if has_bias:
        operands.append(Operand(name="bias", dtype=x, access="r", shape=(n,), strides=(1,)))
    body = None
    if epilogue == "gelu":
        body = gelu_program(x)
    elif epilogue == "residual":
        body = residual_program(x)
        operands.append(Operand(name="r", dtype=x, access="r", shape=(m, n), strides=(n, 1)))
        strides: tuple[Any, Any] = {"1": (0, 2), "2-8": (1, 0), "9-64": (0, 0), "large": (0, 1)}[m_class]
        operands.append(Operand(name="s", dtype=x, access="r", shape=(m, n), strides=strides))
    operands.append(Operand(name="out", dtype=x, access="w", shape=(m, n), strides=(n + 1, 1)))
    kernel = LinearKernel(m=m, n=n, k=k, m_class=m_class, has_bias=has_bias, epilogue=body)
    symbols = ("s", "b") if isinstance(m, str) else ()
    return Case(KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=kernel), data, values, epilogue)


def arguments(case: Case, m: int) -> tuple[list[Array], Array]:
    """(operands for M = m, the result in float64)."""
    x_operand = case.spec.operands[0]
    dtype, n, k = NUMPY_DTYPES[x_operand.dtype], case.body.n, case.body.k
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k + 5)).astype(dtype)[:, :k]
    bias, r = rng.standard_normal(n).astype(dtype), rng.standard_normal((m, n)).astype(dtype)
    expected = x.astype(np.float64) @ case.values.T
    operands = [x, case.weight]
    if case.body.has_bias:
        expected = expected + bias.astype(np.float64)
        operands.append(bias)
    if case.epilogue == "gelu":
        expected = gelu(expected)
    elif case.epilogue == "residual":
        down, right = (int(d) for d in case.spec.operands[-2].strides)
        content = rng.standard_normal(2 * n + m).astype(dtype)
        scale = np.lib.stride_tricks.as_strided(content, (m, n), (down * content.itemsize, right * content.itemsize))
        expected = expected + r.astype(np.float64) * scale.astype(np.float64)
        operands += [r, scale]
    return [*operands, np.zeros((m, n + 1), dtype)[:, :n]], expected


def check(module: Any, case: Case, m: int, **options: Any) -> Array:
    operands, expected = arguments(case, m)
    symbols = {"s": m, "b": 1} if case.spec.symbols else {}
    (out,) = module.run(case.spec.name, operands, symbols, **options)
    error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected)
    bound = BOUNDS[case.spec.operands[0].dtype]
    assert error <= bound, f"{case.spec.name} at M = {m}: relative error {error:.2e}"
    result: Array = out
    return result


def cases(x: Any, w: Any, kinds: Sequence[str], arch: str) -> list[Case]:
    """Every kind with every class that this engine serves on `arch`, the epilogues in turn."""
    made: list[Case] = []
    for kind in kinds:
        for m_class in CLASSES:
            number = len(made)
            epilogue = ("none", "gelu", "residual")[(number + number // 4) % 3]
            name = f"{kind}_{m_class.replace('-', '_')}_{x}_{w}"
            case = make_case(name, kind, m_class, x, w, epilogue, has_bias=number % 2 == 0)
            if linear.engine_of(case.spec, arch) == "fma":
                made.append(case)
    return made


def check_all(module: Any, made: Sequence[Case]) -> None:
    for case in made:
        for m in MS[case.body.m_class]:
            check(module, case, m)


# --- numbers ---------------------------------------------------------------------------------------------------------

SETS = [
    ("sm_80", "f32", "f32", ("nf4", "nf4_flat", "int8", "int4_zeros", "tiles", "columns")),
    ("sm_80", "bf16", "bf16", ("nf4", "nf4_flat", "int8", "int4", "tiles")),
    ("sm_70", "f16", "f16", ("nf4_128", "int4_zeros32", "rows", "tiles")),
]


@pytest.mark.parametrize(("arch", "x", "w", "kinds"), SETS, ids=lambda v: v if isinstance(v, str) else "")
def test_linear_equals_float64_for_every_format_class_and_m(
    sim_module: Callable[..., Any], arch: str, x: str, w: str, kinds: tuple[str, ...]
) -> None:
    made = cases(x, w, kinds, arch)
    check_all(sim_module([case.spec for case in made], arch), made)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize(("x", "w"), [("f32", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("f32", "bf16")])
def test_every_combination_equals_float64(sim_module: Callable[..., Any], arch: str, x: str, w: str) -> None:
    for kind in SHAPES:
        made = cases(x, w, [kind], arch)
        check_all(sim_module([case.spec for case in made], arch), made)


def several(arch: str) -> list[Case]:
    """Kernels of several tests, compiled together: deep ones, of fixed M, with mixed types."""
    return [
        make_case("deep_1", "nf4_deep", "1", "bf16", "bf16", "gelu", has_bias=True, m=1),
        make_case("deep_8", "nf4_deep", "2-8", "f32", "f32", "residual", has_bias=False),
        make_case("deep_3", "int8_deep", "2-8", "f16", "f16", "none", has_bias=True, m=3),
        make_case("deep_int8", "int8_deep", "2-8", "bf16", "bf16", "none", has_bias=False),
        make_case("mixed_1", "nf4", "1", "bf16", "f32", "none", has_bias=True),
        make_case("mixed_64", "int4", "9-64", "f16", "bf16", "none", has_bias=True),
    ]


def test_warps_and_chunks_share_k_without_losing_a_tile(sim_module: Callable[..., Any]) -> None:
    made = several("sm_80")
    module = sim_module([case.spec for case in made], "sm_80")
    for case in made:
        m = case.body.m if isinstance(case.body.m, int) else {"1": 1, "2-8": 8, "9-64": 33}[case.body.m_class]
        check(module, case, m)
    shapes = [
        linear_fma.few_shape(
            case.spec,
            linear.weight_of(case.spec.name, case.spec.operands[1]),
            mma=linear.decision_of(case.spec, "sm_80").key == "few_mma",
        )
        for case in made[:4]
    ]
    assert all(shape.warps > 1 for shape in shapes)
    assert any(shape.chunk * shape.warps * 64 < 2304 for shape in shapes[:2]), "one case must reload x"


def test_two_orders_of_execution_give_the_same_bits(sim_module: Callable[..., Any]) -> None:
    made = several("sm_80")
    module = sim_module([case.spec for case in made], "sm_80")
    for case in (made[0], made[1], made[5]):
        m = 1 if case.body.m == 1 else 7
        first, second = (check(module, case, m, seed=seed) for seed in (1, 2))
        assert first.tobytes() == second.tobytes(), case.spec.name


def test_decoded_weights_equal_the_format_to_the_bit(sim_module: Callable[..., Any]) -> None:
    """x = identity: each output is one weight times 1, plus zeros, so rounding cannot hide a different decode."""
    made = [
        make_case(
            f"{kind}_{m_class.replace('-', '_')}_{dtype}_as_is", kind, m_class, dtype, dtype, "none", has_bias=False
        )
        for kind in DECODED
        for m_class, dtype in (("2-8", "f32"), ("2-8", "bf16"), ("large", "f32"))
    ]
    made += [
        make_case(f"{kind}_narrow", kind, m_class, "f32", "bf16", "none", has_bias=False)
        for kind, m_class in (("nf4_flat", "2-8"), ("int4_zeros", "large"), ("int8", "2-8"))
    ]
    module = sim_module([case.spec for case in made], "sm_80", checked=False)
    for case in made:
        n, k = case.values.shape
        dtype = NUMPY_DTYPES[case.spec.operands[0].dtype]
        x = np.zeros((k, k + 5), dtype)
        x[:, :k] = np.eye(k)
        (out,) = module.run(
            case.spec.name, [x[:, :k], case.weight, np.zeros((k, n + 1), dtype)[:, :n]], {"s": k, "b": 1}
        )
        assert (out == case.values.T.astype(dtype)).all(), case.spec.name


def test_no_depth_gives_the_bias(sim_module: Callable[..., Any]) -> None:
    made = []
    for m_class in ("1", "large"):
        case = make_case(f"empty_{m_class}", "tiles", m_class, "f32", "f32", "none", has_bias=True)
        x, w, bias, out = case.spec.operands
        x, w = msgspec.structs.replace(x, shape=("b*s", 0)), msgspec.structs.replace(w, shape=(35, 0))
        body = msgspec.structs.replace(case.body, k=0)
        made.append(msgspec.structs.replace(case.spec, operands=(x, w, bias, out), body=body))
    module = sim_module(made, "sm_80")
    bias = np.arange(35, dtype=np.float32)
    for spec in made:
        operands = [
            np.zeros((3, 5), np.float32)[:, :0],
            np.zeros(0, np.float32),
            bias,
            np.zeros((3, 36), np.float32)[:, :35],
        ]
        (out,) = module.run(spec.name, operands, {"s": 3, "b": 1})
        assert (out == bias).all()


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lookup"), [("nf4", True), ("int4", False), ("int4_zeros", False), ("int8", False)])
def test_consecutive_code_values_need_no_table(kind: str, lookup: bool) -> None:
    weight = linear.weight_of("k", weight_operand(kind, "bf16")[0])
    assert weight.lookup == lookup
    assert ("code_value" in weight.definitions) == lookup


def test_tensor_cores_take_what_they_can_multiply() -> None:
    def engine(arch: str, x: str, w: str, m_class: str, kind: str = "nf4") -> tuple[str, str]:
        spec = make_case("k", kind, m_class, x, w, "none", has_bias=False).spec
        chosen = linear.engine_of(spec, arch)
        return chosen, emit_kernel(spec, arch).engine if chosen == "fma" else "mma"

    assert engine("sm_80", "bf16", "bf16", "large") == ("mma", "mma")
    assert engine("sm_75", "bf16", "bf16", "large") == ("fma", "fma")
    assert engine("sm_75", "f16", "f16", "9-64") == ("mma", "mma")
    assert engine("sm_70", "f16", "f16", "1") == ("fma", "fma")
    assert engine("sm_90a", "f32", "bf16", "large") == ("fma", "fma")
    assert engine("sm_90a", "bf16", "bf16", "large", "rows") == ("fma", "fma")
    assert engine("sm_90a", "bf16", "bf16", "1") == ("fma", "mma")  # few rows: this engine's kernel, with tensor cores


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_86", "sm_90a"])
def test_a_block_stays_within_its_shared_memory(arch: str) -> None:
    for kind in ("nf4", "int8", "tiles"):
        for m_class in CLASSES[:2]:
            for dtype in ("f32", "bf16", "f16"):
                for n, k in ((64, 65536), (65536, 65536), (4096, 192)):
                    case = make_case("k", kind, m_class, dtype, dtype, "none", has_bias=False)
                    x, w, out = case.spec.operands
                    x = msgspec.structs.replace(x, shape=(x.shape[0], k), strides=(k, 1))
                    w = msgspec.structs.replace(w, shape=(n, k))
                    out = msgspec.structs.replace(out, shape=(out.shape[0], n), strides=(n, 1))
                    body = msgspec.structs.replace(case.body, n=n, k=k)
                    spec = msgspec.structs.replace(case.spec, operands=(x, w, out), body=body)
                    geometry = emit_kernel(spec, arch).geometry
                    assert geometry.shared <= SHARED_LIMIT[int(arch[3:].rstrip("a"))]
                    assert geometry.at({"s": 1, "b": 1})[0] == -(-n // 16)


def test_more_rows_than_a_grid_has_are_looped_over() -> None:
    spec = make_case("k", "nf4", "1", "f32", "f32", "none", has_bias=False).spec
    assert emit_kernel(spec, "sm_80").geometry.at({"s": 2**20, "b": 2**10}) == (3, 65535, 1)


def test_unknown_layouts_types_and_strides_are_refused() -> None:
    case = make_case("refused", "nf4", "large", "f32", "f32", "residual", has_bias=False)
    x, w = case.spec.operands[:2]

    def refuse(match: str, *operands: Operand) -> None:
        spec = msgspec.structs.replace(case.spec, operands=(*operands, *case.spec.operands[len(operands) :]))
        with pytest.raises(KernelSelectionError, match=match):
            emit_kernel(spec, "sm_80")

    refuse("packed in layout 'canonical'; CUDA reads 'cuda_t16_v1'", x, msgspec.structs.replace(w, layout="canonical"))
    refuse("lies in layout 'cpu_p16_v1'", x, msgspec.structs.replace(w, format=None, layout="cpu_p16_v1"))
    refuse("'w' is f64", x, msgspec.structs.replace(w, dtype="f64"))
    refuse("'x' needs unit stride", msgspec.structs.replace(x, strides=(1, 64)))
    refuse("'x' is i64", msgspec.structs.replace(x, dtype="i64"))
    spec = msgspec.structs.replace(case.spec, operands=(x, w, case.spec.operands[-1]))
    with pytest.raises(KernelSelectionError, match="takes 2 extra inputs, 0 are given"):
        emit_kernel(spec, "sm_80")


# --- resources -------------------------------------------------------------------------------------------------------


def check_resources(nvrtc: Callable[..., Any], made: Sequence[Case], arch: str) -> None:
    specs = {case.spec.name: case.spec for case in made}
    for name, used in nvrtc(list(specs.values()), arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)
        threads = emit_kernel(specs[name], arch).geometry.threads
        assert used.registers * threads <= 65536, (name, arch, used.registers, threads)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_no_kernel_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    made = [
        make_case("few_1", "nf4", "1", "bf16", "bf16", "none", has_bias=False),
        make_case("few_8", "nf4", "2-8", "f16", "f16", "gelu", has_bias=True),
        make_case("few_8_fma", "int4_zeros32", "2-8", "f32", "f32", "residual", has_bias=True),
        make_case("tiled", "nf4_flat", "large", "f32", "f32", "gelu", has_bias=True),
    ]
    check_resources(nvrtc, made, arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_no_kernel_of_any_format_spills(nvrtc: Callable[..., Any], arch: str, dtype: str) -> None:
    check_resources(nvrtc, cases(dtype, dtype, tuple(SHAPES), arch), arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_loop_over_few_rows_at_full_size_spills(nvrtc: Callable[..., Any], arch: str, dtype: Any) -> None:
    """Blocks of 256 threads, of which several share a multiprocessor; any M, so that values live from pass to pass."""
    specs = [
        KernelSpec(
            name=f"{name}_{m_class.replace('-', '_')}",
            symbols=("m",),
            operands=(
                Operand(name="x", dtype=dtype, access="r", shape=("m", 4096), strides=(4096, 1)),
                Operand(
                    name="w", dtype=dtype, access="r", shape=(4096, 4096), format=FormatRef(name=name),
                    layout=linear.LAYOUT,
                ),
                Operand(name="out", dtype=dtype, access="w", shape=("m", 4096), strides=(4096, 1)),
            ),
            body=LinearKernel(m="m", n=4096, k=4096, m_class=m_class, has_bias=False),
        )
        for name in formats.names()
        for m_class in FEW_CLASSES
    ]  # fmt: skip
    blocks = {emit_kernel(spec, arch).text.partition("__launch_bounds__(256, ")[2][0] for spec in specs}
    assert blocks >= ({"2", "3"} if dtype != "f32" else {"2"})
    for name, used in nvrtc(specs, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)


def test_results_in_fp32_are_stored_16_bytes_at_a_time(nvrtc_functions: Callable[..., Any]) -> None:
    """By the tiled product, whose threads have four results of a row; the others serve what ends off 16 bytes."""
    made = [make_case("tiled", "nf4", "large", "f32", "f32", "gelu", has_bias=True)]
    (function,) = nvrtc_functions([case.spec for case in made], "sm_90a").values()
    stores = {each.modifiers for each in function.instructions if each.opcode == "STG"}
    assert stores == {("E",), ("E", "128")}
