"""Scalar programs: every op of the tables against NumPy, and the vector form against the scalar one to the bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.vector import VECTOR_TABLE, vector_obstacle, vector_statements
from qcompiler.kernels.scalar import SCALAR_TABLE, float_literal, scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES
from qcompiler.plan.kernel import DType, ScalarOp, ScalarProgram
from qcompiler.plan.weights import NUMPY_DTYPES

SIZE = 208
SPECIAL = (0, -0.0, 1, -1, 0.5, 1.5, -2.5, 2.5, 1e10, -1e10, np.inf, -np.inf, np.nan)
F64 = np.float64


@dataclass(frozen=True)
class Case:
    """One op on `inputs`, giving `out`. `ulps` is the allowed distance for floats (None: equal)."""

    op: str
    inputs: tuple[DType, ...]
    out: DType
    reference: Callable[..., Any]
    predicate: str | None = None
    ulps: float | None = None
    domain: str = "all"

    @property
    def name(self) -> str:
        return "_".join(
            [self.op.replace(".", "_"), *([self.predicate] if self.predicate else []), *self.inputs, self.out]
        )

    @property
    def program(self) -> ScalarProgram:
        names = tuple(f"in{i}" for i in range(len(self.inputs)))
        op = ScalarOp(result="r", op=self.op, dtype=self.out, args=names, predicate=self.predicate)
        return ScalarProgram(inputs=tuple(zip(names, self.inputs, strict=True)), ops=(op,), yields=("r",))

    def values(self, i: int) -> np.ndarray:
        rng = np.random.default_rng(20 + i)
        kept = NUMPY_DTYPES[self.inputs[i]]
        if self.inputs[i] == "i1":
            return rng.random(SIZE) > 0.5
        if kept.kind in "iu":
            x = rng.integers(-100, 100, SIZE) if kept.kind == "i" else rng.integers(0, 256, SIZE)
            x[::9] = np.roll(x, 1)[::9] if self.domain != "shift" else 3
            if self.domain == "shift" and i == 1:
                x = np.abs(x) % (kept.itemsize * 8)
            if self.domain == "wide":
                x = rng.integers(np.iinfo(kept).min, np.iinfo(kept).max, SIZE, kept, endpoint=True)
            return x.astype(kept)
        x = rng.normal(size=SIZE) * 3
        x = {"positive": np.abs(x) + 0.01, "unit": np.tanh(x), "above_one": np.abs(x) + 1.01}.get(self.domain, x)
        if self.domain == "all":
            x[:24] = np.resize(SPECIAL if i == 0 else [1, -0.0, 0, 2, np.nan], 24)
        with np.errstate(over="ignore"):
            return x.astype(kept)


def unary(name: str, reference: Any = None, ulps: float | None = 2, domain: str = "all") -> list[Case]:
    function = reference or getattr(np, name)
    return [
        Case(f"math.{name}", ("f32",), "f32", lambda x: function(x.astype(F64)), ulps=ulps, domain=domain),
        Case(f"math.{name}", ("f64",), "f64", function, ulps=4 if ulps else ulps, domain=domain),
    ]


def compare(name: str, ordered: Any) -> list[Case]:
    def unordered(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.isnan(x) | np.isnan(y)

    return [
        Case("arith.cmpf", ("f32", "f32"), "i1", lambda x, y: ordered(x, y) & ~unordered(x, y), predicate=f"o{name}"),
        Case("arith.cmpf", ("f32", "f32"), "i1", lambda x, y: ordered(x, y) | unordered(x, y), predicate=f"u{name}"),
    ]


def integers(
    op: str, reference: Any, dtypes: tuple[DType, ...] = ("i32", "i64", "i8"), domain: str = "all"
) -> list[Case]:
    return [Case(f"arith.{op}", (d, d), d, reference, domain=domain) for d in dtypes]


def compare_integers() -> list[Case]:
    signed = {"eq": np.equal, "ne": np.not_equal, "slt": np.less, "sle": np.less_equal, "sgt": np.greater,
              "sge": np.greater_equal}  # fmt: skip
    cases = [Case("arith.cmpi", (d, d), "i1", f, predicate=p) for p, f in signed.items() for d in ("i32", "i64", "i8")]
    words = {"ult": np.less, "ule": np.less_equal, "ugt": np.greater, "uge": np.greater_equal}
    for p, f in words.items():
        for d in ("i32", "i64", "i8"):
            kept = np.dtype(f"u{NUMPY_DTYPES[d].name}")
            cases.append(
                Case("arith.cmpi", (d, d), "i1", lambda x, y, f=f, u=kept: f(x.view(u), y.view(u)), predicate=p)
            )
    booleans = {"eq": np.equal, "ne": np.not_equal, "ult": lambda x, y: ~x & y, "slt": lambda x, y: x & ~y}
    return cases + [Case("arith.cmpi", ("i1", "i1"), "i1", f, predicate=p) for p, f in booleans.items()]


def floor_round(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def safe(function: Any) -> Any:
    """Division by zero gives what scalar.h states: quotient 0, remainder the dividend."""

    def apply(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        quotient = function(x.astype(object), np.where(y == 0, 1, y).astype(object))
        return np.where(y == 0, 0 if "div" in function.__name__ else x, quotient).astype(x.dtype)

    return apply


def truncated_div(x: Any, y: Any) -> Any:
    return np.array([abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in zip(x, y, strict=True)])


def truncated_rem(x: Any, y: Any) -> Any:
    return np.array([a - b * (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) for a, b in zip(x, y, strict=True)])


def floor_div(x: Any, y: Any) -> Any:
    return np.array([a // b for a, b in zip(x, y, strict=True)])


def ceil_div(x: Any, y: Any) -> Any:
    return np.array([-(-a // b) for a, b in zip(x, y, strict=True)])


def integer_power(x: Any, y: Any) -> Any:
    """Exact in Python's integers, then wrapped; a negative exponent truncates 1 / x^-y."""
    exact = [
        a**b if b >= 0 else 0 if abs(a) != 1 else a ** (b & 1) for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    bits = 8 * x.itemsize
    return np.array([(v + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)) for v in exact]).astype(x.dtype)


def saturate(low: int, high: int) -> Any:
    def apply(x: np.ndarray) -> np.ndarray:
        numbers = (0 if math.isnan(v) else max(low, min(high, int(max(-1e30, min(1e30, v))))) for v in x.tolist())
        return np.array(list(numbers), np.int64 if high > 2**31 else np.int32)

    return apply


def exact_maximum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    zero = (x == 0) & (y == 0)
    return np.where(zero, np.where(np.signbit(x) & np.signbit(y), -0.0, 0.0), np.maximum(x, y)).astype(x.dtype)


def exact_minimum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    zero = (x == 0) & (y == 0)
    return np.where(zero, np.where(np.signbit(x) | np.signbit(y), -0.0, 0.0), np.minimum(x, y)).astype(x.dtype)


FLOAT_BINARY = {"addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide, "remf": np.fmod,
                "maximumf": exact_maximum, "minimumf": exact_minimum}  # fmt: skip
CASES = [
    *(Case(f"arith.{n}", (d, d), d, f) for n, f in FLOAT_BINARY.items() for d in ("f32", "f64")),
    *(Case(f"arith.{n}", ("bf16", "bf16"), "bf16",
           lambda x, y, f=FLOAT_BINARY[n]: f(x.astype(np.float32), y.astype(np.float32)).astype(x.dtype))
      for n in ("addf", "subf", "mulf", "divf")),
    Case("arith.mulf", ("f16", "f16"), "f16", np.multiply),
    Case("arith.maxnumf", ("f32", "f32"), "f32", np.fmax), Case("arith.minnumf", ("f32", "f32"), "f32", np.fmin),
    Case("arith.negf", ("f32",), "f32", np.negative),
    *compare("eq", np.equal), *compare("gt", np.greater), *compare("ge", np.greater_equal), *compare("lt", np.less),
    *compare("le", np.less_equal), *compare("ne", np.not_equal),
    Case("arith.cmpf", ("f32", "f32"), "i1", lambda x, y: ~(np.isnan(x) | np.isnan(y)), predicate="ord"),
    Case("arith.cmpf", ("f32", "f32"), "i1", lambda x, y: np.isnan(x) | np.isnan(y), predicate="uno"),
    *compare_integers(),
    *(Case("arith.select", ("i1", d, d), d, np.where) for d in ("f32", "i64", "i1", "i32")),
    *integers("addi", np.add, domain="wide"), *integers("subi", np.subtract, domain="wide"),
    *integers("muli", np.multiply, domain="wide"),
    Case("arith.addi", ("i1", "i1"), "i1", np.logical_xor), Case("arith.muli", ("i1", "i1"), "i1", np.logical_and),
    *integers("andi", np.bitwise_and, ("i32", "i64", "i8", "i1")),
    *integers("ori", np.bitwise_or, ("i32", "i64", "i1")),
    *integers("xori", np.bitwise_xor, ("i32", "i64", "i1")),
    *integers("divsi", safe(truncated_div)), *integers("remsi", safe(truncated_rem)),
    *integers("floordivsi", safe(floor_div)), *integers("ceildivsi", safe(ceil_div)),
    *integers("divui", lambda x, y: np.where(y == 0, 0, x.view(np.uint32) // np.where(y == 0, 1, y).view(np.uint32))
              .astype(np.uint32).view(np.int32), ("i32",)),
    *integers("remui", lambda x, y: np.where(y == 0, x.view(np.uint32), x.view(np.uint32)
              % np.where(y == 0, 1, y).view(np.uint32)).astype(np.uint32).view(np.int32), ("i32",)),
    *integers("shli", np.left_shift, ("i32", "i64"), "shift"),
    *integers("shrsi", np.right_shift, ("i32", "i64"), "shift"),
    *integers("shrui", lambda x, y: (x.view(np.uint32) >> y.view(np.uint32)).view(np.int32), ("i32",), "shift"),
    *integers("maxsi", np.maximum), *integers("minsi", np.minimum),
    *integers("maxui", lambda x, y: np.maximum(x.view(np.uint32), y.view(np.uint32)).view(np.int32), ("i32",)),
    *integers("minui", lambda x, y: np.minimum(x.view(np.uint32), y.view(np.uint32)).view(np.int32), ("i32",)),
    Case("arith.extf", ("bf16",), "f32", lambda x: x.astype(np.float32)),
    Case("arith.extf", ("f16",), "f32", lambda x: x.astype(np.float32)),
    Case("arith.extf", ("f32",), "f64", lambda x: x.astype(F64)),
    Case("arith.truncf", ("f32",), "bf16", lambda x: x.astype(NUMPY_DTYPES["bf16"])),
    Case("arith.truncf", ("f32",), "f16", lambda x: x.astype(np.float16)),
    Case("arith.truncf", ("f64",), "f32", lambda x: x.astype(np.float32)),
    *(Case("arith.extsi", (a, ), b, lambda x, b=b: x.astype(NUMPY_DTYPES[b]))
      for a, b in (("i8", "i32"), ("i16", "i32"), ("i32", "i64"))),
    Case("arith.extsi", ("i1",), "i32", lambda x: -x.astype(np.int32)),
    Case("arith.extui", ("i1",), "i32", lambda x: x.astype(np.int32)),
    Case("arith.extui", ("i1",), "i64", lambda x: x.astype(np.int64)),
    Case("arith.extui", ("i8",), "i32", lambda x: x.view(np.uint8).astype(np.int32)),
    Case("arith.extui", ("ui8",), "i32", lambda x: x.astype(np.int32)),
    Case("arith.extui", ("i32",), "i64", lambda x: x.view(np.uint32).astype(np.int64), domain="wide"),
    Case("arith.trunci", ("i64",), "i32", lambda x: x.astype(np.int32), domain="wide"),
    Case("arith.trunci", ("i32",), "i8", lambda x: x.astype(np.int8), domain="wide"),
    Case("arith.trunci", ("i32",), "i1", lambda x: (x & 1).astype(bool)),
    *(Case("arith.sitofp", (d,), "f32", lambda x: x.astype(np.float32), domain="wide") for d in ("i8", "i32", "i64")),
    Case("arith.uitofp", ("i1",), "f32", lambda x: x.astype(np.float32)),
    Case("arith.uitofp", ("ui8",), "f32", lambda x: x.astype(np.float32)),
    Case("arith.uitofp", ("i8",), "f32", lambda x: x.view(np.uint8).astype(np.float32)),
    Case("arith.uitofp", ("i32",), "f32", lambda x: x.view(np.uint32).astype(np.float32), domain="wide"),
    Case("arith.sitofp", ("i1",), "f32", lambda x: (-x.astype(np.int32)).astype(np.float32)),
    Case("arith.fptosi", ("f32",), "i32", saturate(-(2**31), 2**31 - 1)),
    Case("arith.fptosi", ("f32",), "i64", saturate(-(2**63), 2**63 - 1)),
    Case("arith.fptosi", ("f64",), "i32", saturate(-(2**31), 2**31 - 1)),
    Case("arith.index_cast", ("i32",), "i64", lambda x: x.astype(np.int64)),
    Case("arith.bitcast", ("f32",), "i32", lambda x: x.view(np.int32)),
    Case("arith.bitcast", ("i32",), "f32", lambda x: x.view(np.float32)),
    *unary("exp"), *unary("exp2"), *unary("expm1"), *unary("log", domain="positive"), *unary("log2", domain="positive"),
    *unary("log10", domain="positive"), *unary("log1p", domain="positive"), *unary("tanh"), *unary("sin", domain="n"),
    *unary("erf", np.vectorize(math.erf), 4), *unary("erfc", np.vectorize(math.erfc), 4, "n"),
    *unary("cos", domain="n"), *unary("tan", domain="n"), *unary("sqrt"), *unary("sinh", domain="n"),
    *unary("rsqrt", lambda x: 1 / np.sqrt(x), domain="positive"), *unary("cosh", domain="n"),
    *unary("asin", np.arcsin, domain="unit"), *unary("acos", np.arccos, domain="unit"), *unary("atan", np.arctan),
    *unary("asinh", np.arcsinh), *unary("acosh", np.arccosh, domain="above_one"),
    *unary("atanh", np.arctanh, domain="unit"), *unary("cbrt"), *unary("absf", np.abs, None),
    *unary("ceil", None, None),
    *unary("floor", None, None), *unary("roundeven", np.rint, None), *unary("round", floor_round, None),
    *unary("trunc", None, None),
    Case("math.absi", ("i32",), "i32", np.abs),
    *(Case("math.ipowi", (d, d), d, integer_power) for d in ("i32", "i64", "i8")),
    Case("math.powf", ("f32", "f32"), "f32", lambda x, y: np.power(x.astype(F64), y.astype(F64)), ulps=4),
    Case("math.atan2", ("f32", "f32"), "f32", lambda x, y: np.arctan2(x.astype(F64), y.astype(F64)), ulps=4),
    Case("math.copysign", ("f32", "f32"), "f32", np.copysign),
    Case("math.fma", ("f32", "f32", "f32"), "f32",
         lambda x, y, z: (x.astype(np.longdouble) * y + z).astype(np.float32), domain="n"),
    Case("math.fma", ("f64", "f64", "f64"), "f64", 
         lambda x, y, z: (x.astype(np.longdouble) * y + z).astype(F64), ulps=4, domain="n"),
]  # fmt: skip


def functions(case: Case) -> str:
    """`s_<name>` element by element and, where there is one, `v_<name>` 16 at a time."""
    arrays = [f"const {STORAGE_TYPES[d]}* x{i}" for i, d in enumerate(case.inputs)] + [f"{STORAGE_TYPES[case.out]}* y"]
    body = scalar_statements(case.program, [f"qc_load(x{i} + j)" for i in range(len(case.inputs))])
    text = [f'extern "C" void s_{case.name}({", ".join(arrays)}) {{ for (int64_t j = 0; j < {SIZE}; j++) {{',
            *body.lines, f"qc_store(y + j, {body.results[0]}); }} }}"]  # fmt: skip
    if vector_obstacle(case.program) is None:
        body = vector_statements(case.program, [f"vload(x{i} + j)" for i in range(len(case.inputs))])
        text += [f'extern "C" void v_{case.name}({", ".join(arrays)}) {{ for (int64_t j = 0; j < {SIZE}; j += 16) {{',
                 *body.lines, f"vstore(y + j, {body.results[0]}); }} }}"]  # fmt: skip
    return "\n".join(text)


@pytest.fixture(scope="module")
def library(compile_text: Callable[[str, str, str], ctypes.CDLL], isa: str) -> ctypes.CDLL:
    return compile_text("\n".join(functions(case) for case in CASES), isa, "-O1")


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equal to the bit, any NaN being equal to any other."""
    word = np.dtype(f"u{a.dtype.itemsize}")
    equal = a.view(word) == b.view(word)
    if a.dtype.kind in "fV":
        equal |= np.isnan(a.astype(F64)) & np.isnan(b.astype(F64))
    return equal


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_op_matches_numpy_in_both_forms(library: ctypes.CDLL, case: Case) -> None:
    inputs = [case.values(i) for i in range(len(case.inputs))]
    kept = NUMPY_DTYPES[case.out]
    with np.errstate(all="ignore"):
        want = np.asarray(case.reference(*inputs))
    results = []
    for form in "sv":
        if form == "v" and vector_obstacle(case.program) is not None:
            continue
        y = np.zeros(SIZE, kept)
        library[f"{form}_{case.name}"](*(ctypes.c_void_p(a.ctypes.data) for a in (*inputs, y)))
        results.append(y)
    assert same_bits(results[0], results[-1]).all(), "the vector form differs from the scalar form"
    got = results[0]
    if case.ulps is None:
        bad = ~same_bits(got, want.astype(kept))
        assert not bad.any(), (case.name, [x[bad][:4] for x in inputs], got[bad][:4], want[bad][:4])
    else:
        with np.errstate(all="ignore"):
            step = np.spacing(np.abs(want.astype(kept))).astype(F64)
            close = (np.abs(got.astype(F64) - want) <= case.ulps * step) | (got == want.astype(kept))
        close |= np.isnan(got) & np.isnan(want)
        assert close.all(), (case.name, inputs[0][~close][:4], got[~close][:4], want[~close][:4])


def test_the_tables_are_covered() -> None:
    """Every op with a C++ form stands in a case above, apart from those that need attributes."""
    tested = {case.op for case in CASES} | {"arith.constant", "linalg.index", "arith.fptoui", "arith.index_castui"}
    assert set(SCALAR_TABLE) <= tested
    assert set(VECTOR_TABLE) <= set(SCALAR_TABLE)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [(0.5, "f32", "0.5f"), (1.0, "f32", "1.0f"), (1e-5, "f32", "1e-05f"), (0.1, "f64", "0.1"), (-0.0, "f32", "-0.0f"),
     (float("inf"), "f32", "INFINITY"), (float("-inf"), "bf16", "-INFINITY"), (1.01, "bf16", "1.0078125f"),
     (1e300, "f32", "INFINITY"), (float("nan"), "f32", "NAN")],
)  # fmt: skip
def test_float_literals_are_exact(value: float, dtype: str, text: str) -> None:
    assert float_literal(value, dtype) == text


@pytest.mark.parametrize(
    ("exponent", "text"), [(2.0, "in0 * in0;"), (3.0, "in0 * in0 * in0;"), (2.5, "vpow(in0, t_p)")]
)
def test_constant_powers_become_products(exponent: float, text: str) -> None:
    ops = (
        ScalarOp(result="p", op="arith.constant", dtype="f32", value=exponent.hex()),
        ScalarOp(result="r", op="math.powf", dtype="f32", args=("in0", "p")),
    )
    program = ScalarProgram(inputs=(("in0", "f32"),), ops=ops, yields=("r",))
    assert text in vector_statements(program, ["in0"]).lines[-1]


@pytest.mark.parametrize("write", [scalar_statements, vector_statements])
def test_what_a_store_rounds_is_not_rounded_before(write: Callable[..., Any]) -> None:
    """Except where another op reads it, which must see the rounded value, or where it is stored in another type."""
    ops = (
        ScalarOp(result="a", op="arith.addf", dtype="bf16", args=("in0", "in0")),
        ScalarOp(result="b", op="arith.mulf", dtype="bf16", args=("a", "in0")),
    )
    program = ScalarProgram(inputs=(("in0", "bf16"),), ops=ops, yields=("a", "b"))
    for stored, rounded in [(("bf16", "bf16"), [True, False]), (("bf16", "f32"), [True, True]), ((), [True, True])]:
        assert ["round_bf16" in line for line in write(program, ["x"], stored=stored).lines] == rounded


def test_missing_op_is_named() -> None:
    op = ScalarOp(result="r", op="math.ctlz", dtype="i32", args=("a",))
    program = ScalarProgram(inputs=(("a", "i32"),), ops=(op,), yields=("r",))
    with pytest.raises(KernelSelectionError, match=r"math\.ctlz"):
        vector_obstacle(program)
