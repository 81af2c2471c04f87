"""Every scalar op on a GPU device: the cases of tests/kernels/test_scalar.py against NumPy, and NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import emit_module, header
from qcompiler.kernels.scalar import SCALAR_TABLE
from qcompiler.plan.kernel import DType, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.weights import NUMPY_DTYPES

scalar = load("tests/kernels/test_scalar.py")
Case = scalar.Case
ULPS = {
    "math.powf": 4, "math.erfc": 5, "math.tan": 4, "math.atan2": 4, "math.sinh": 3, "math.asinh": 3, "math.acosh": 4,
    "math.atanh": 3,
}  # fmt: skip
"""Where a function of CUDA's is less exact than 2 ulp (CUDA C++ Programming Guide, "Mathematical Functions")."""


ARCHS = [
    pytest.param(a, marks=[] if a in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow]) for a in signature.ARCHS
]


def saturate(dtype: DType) -> Any:
    kept = np.dtype(f"u{NUMPY_DTYPES[dtype].name}") if dtype != "ui8" else np.dtype(np.uint8)
    low, high = 0, int(np.iinfo(kept).max)

    def apply(x: np.ndarray) -> np.ndarray:
        numbers = (0 if np.isnan(v) else max(low, min(high, int(max(-1e30, min(1e30, v))))) for v in x.tolist())
        return np.array(list(numbers), kept).view(NUMPY_DTYPES[dtype])

    return apply


def unsigned(function: Any) -> Any:
    """`function` on the bits as unsigned numbers."""

    def apply(*x: np.ndarray) -> np.ndarray:
        words = [a.view(f"u{a.dtype.name}") if a.dtype.kind == "i" else a for a in x]
        result = function(*words)
        return result.view(x[0].dtype)

    return apply


MORE = [
    *(Case("arith.fptoui", ("f32",), d, saturate(d)) for d in ("i32", "i64", "i8", "ui8")),
    *(Case("arith.fptoui", ("f64",), d, saturate(d)) for d in ("i32", "i64")),
    *(Case("arith.fptosi", ("f32",), d, scalar.saturate(-(2 ** (b - 1)), 2 ** (b - 1) - 1))
      for d, b in (("i8", 8), ("i16", 16))),
    Case("arith.index_castui", ("i32",), "i64", lambda x: x.view(np.uint32).astype(np.int64), domain="wide"),
    *(Case("arith.muli", (d, d), d, np.multiply, domain="wide") for d in ("i16", "ui8")),
    *(Case("arith.divui", (d, d), d, unsigned(lambda x, y: np.where(y == 0, 0, x // np.where(y == 0, 1, y)
           ).astype(x.dtype))) for d in ("i64", "i8", "ui8")),
    *(Case(f"arith.{n}", (d, d), d, unsigned(f)) for d in ("i64", "i8", "i16")
      for n, f in (("maxui", np.maximum), ("minui", np.minimum))),
    *(Case(f"arith.{n}", ("f16", "f16"), "f16", f) for n, f in (("maximumf", scalar.exact_maximum),
                                                               ("minimumf", scalar.exact_minimum))),
    *(Case(f"arith.{n}", ("f64", "f64"), "f64", f) for n, f in (("maxnumf", np.fmax), ("minnumf", np.fmin))),
    *(Case("arith.cmpf", ("f64", "f64"), "i1", f, predicate=p)
      for p, f in (("olt", np.less), ("oge", np.greater_equal), ("une", np.not_equal))),
    Case("arith.bitcast", ("f64",), "i64", lambda x: x.view(np.int64)),
    Case("arith.bitcast", ("i64",), "f64", lambda x: x.view(np.float64)),
    Case("arith.truncf", ("f64",), "bf16", lambda x: x.astype(np.float32).astype(NUMPY_DTYPES["bf16"])),
    Case("math.sqrt", ("bf16",), "bf16", lambda x: np.sqrt(x.astype(np.float32)).astype(x.dtype)),
    Case("math.powf", ("f64", "f64"), "f64", np.power, ulps=4),
    Case("math.atan2", ("f64", "f64"), "f64", np.arctan2, ulps=4),
    Case("math.copysign", ("f64", "f64"), "f64", np.copysign),
    Case("math.absi", ("i64",), "i64", np.abs, domain="wide"),
]  # fmt: skip
CASES = [*{case.name: case for case in [*scalar.CASES, *MORE]}.values()]


def _ops(case: Any, result: str, names: tuple[str, ...]) -> list[ScalarOp]:
    """The case's op; a cast to or from an index comes in pairs, since nothing stores an index."""
    if not case.op.startswith("arith.index_cast"):
        return [ScalarOp(result=result, op=case.op, dtype=case.out, args=names, predicate=case.predicate)]
    index = ScalarOp(result=f"{result}_index", op=case.op, dtype="index", args=names)
    return [index, ScalarOp(result=result, op=case.op, dtype=case.out, args=(index.result,))]


@dataclass(frozen=True)
class Batch:
    """Cases on the same inputs: one kernel with an output for each, element by element (it compiles four times faster
    than with groups, which tests/cuda/test_loop.py covers)."""

    cases: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.cases[0].name

    @property
    def spec(self) -> KernelSpec:
        first, size = self.cases[0], scalar.SIZE
        operands = [Operand(name=f"x{i}", dtype=d, access="r", shape=(size,)) for i, d in enumerate(first.inputs)]
        operands += [Operand(name=f"y{i}", dtype=c.out, access="w", shape=(size,)) for i, c in enumerate(self.cases)]
        names = [name for name, _ in first.program.inputs]
        ops = [op for i, case in enumerate(self.cases) for op in _ops(case, f"r{i}", tuple(names))]
        body = LoopKernel(
            extents=(size,),
            iterators=("parallel",),
            accesses=(AffineAccess(offset=0, coefficients=(2,)),) * len(operands),
            body=ScalarProgram(
                inputs=(*first.program.inputs, *((f"out{i}", c.out) for i, c in enumerate(self.cases))),
                ops=tuple(ops),
                yields=tuple(f"r{i}" for i in range(len(self.cases))),
            ),
        )
        return KernelSpec(name=self.name, symbols=(), operands=tuple(operands), body=body)


def batches(most: int = 8) -> list[Batch]:
    """All cases, by their inputs."""
    groups: dict[Any, list[Any]] = {}
    for case in CASES:
        groups.setdefault((case.inputs, case.domain), []).append(case)
    return [Batch(tuple(each[i : i + most])) for each in groups.values() for i in range(0, len(each), most)]


BATCHES = batches()


def spread(values: np.ndarray) -> np.ndarray:
    """The same values, every other element of their memory: kernels then compute one element a thread."""
    memory = np.zeros(2 * values.size, values.dtype)
    memory[::2] = values
    return memory[::2]


@pytest.fixture(scope="module")
def outputs(sim_module: Callable[..., Any]) -> dict[str, np.ndarray]:
    """What each case's op gave, by the case's name."""
    module = sim_module([batch.spec for batch in BATCHES])
    results = {}
    for batch in BATCHES:
        inputs = [spread(batch.cases[0].values(i)) for i in range(len(batch.cases[0].inputs))]
        blank = [spread(np.zeros(scalar.SIZE, NUMPY_DTYPES[case.out])) for case in batch.cases]
        for case, got in zip(batch.cases, module.run(batch.name, [*inputs, *blank]), strict=True):
            results[case.name] = got.copy()
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_op_matches_numpy(outputs: dict[str, np.ndarray], case: Any) -> None:
    inputs = [case.values(i) for i in range(len(case.inputs))]
    got, kept = outputs[case.name], NUMPY_DTYPES[case.out]
    with np.errstate(all="ignore"):
        want = np.asarray(case.reference(*inputs))
    if case.ulps is None:
        bad = ~scalar.same_bits(got, want.astype(kept))
        assert not bad.any(), (case.name, [x[bad][:4] for x in inputs], got[bad][:4], want[bad][:4])
        return
    with np.errstate(all="ignore"):
        step = np.spacing(np.abs(want.astype(kept))).astype(np.float64)
        ulps = max(case.ulps, ULPS.get(case.op, 0))
        close = (np.abs(got.astype(np.float64) - want) <= ulps * step) | (got == want.astype(kept))
    close |= np.isnan(got) & np.isnan(want)
    assert close.all(), (case.name, inputs[0][~close][:4], got[~close][:4], want[~close][:4])


def test_the_table_is_covered() -> None:
    """Every op with a C++ form is run by some case, apart from those that need attributes."""
    assert set(SCALAR_TABLE) <= {case.op for case in CASES} | {"arith.constant", "linalg.index"}


def constants() -> KernelSpec:
    """Literals of every kind: special floats, the least and greatest integers."""
    values = [
        ("f32", "inf"), ("f32", "-inf"), ("f32", "nan"), ("f32", (0.1).hex()), ("f32", "-0x0p+0"), ("f64", "-inf"),
        ("f64", "nan"), ("f64", (0.1).hex()), ("f64", (1e300).hex()), ("f64", (5e-324).hex()), ("f32", (1e-45).hex()),
        ("bf16", (0.1).hex()), ("f16", (0.1).hex()), ("f16", (1e9).hex()), ("i64", str(-(2**63))),
        ("i64", str(2**63 - 1)), ("i32", str(-(2**31))), ("i32", str(2**31 - 1)), ("i16", "-32768"), ("i8", "-128"),
        ("ui8", "255"), ("i1", "true"), ("i1", "0"),
    ]  # fmt: skip
    ops = [
        ScalarOp(result=f"c{i}", op="arith.constant", dtype=d, value=text)  # type: ignore[arg-type]
        for i, (d, text) in enumerate(values)
    ]
    operands = [Operand(name=f"y{i}", dtype=d, access="w", shape=(1,)) for i, (d, _) in enumerate(values)]  # type: ignore[arg-type]
    body = LoopKernel(
        extents=(1,),
        iterators=("parallel",),
        accesses=(AffineAccess(offset=0, coefficients=(1,)),) * len(values),
        body=ScalarProgram(
            inputs=tuple((f"a{i}", d) for i, (d, _) in enumerate(values)),  # type: ignore[misc]
            ops=tuple(ops),
            yields=tuple(o.result for o in ops),
        ),
    )
    return KernelSpec(name="constants", symbols=(), operands=tuple(operands), body=body)


def test_constants_arrive_exactly(sim_run: Callable[..., Any]) -> None:
    spec = constants()
    done = sim_run(spec, [np.zeros(1, NUMPY_DTYPES[o.dtype]) for o in spec.operands])
    assert isinstance(spec.body, LoopKernel)
    for op, got in zip(spec.body.body.ops, done, strict=True):
        assert op.value is not None
        if op.dtype in ("f32", "f64", "bf16", "f16"):
            value = float(op.value) if op.value.lstrip("-") in ("inf", "nan") else float.fromhex(op.value)
            with np.errstate(over="ignore"):
                want = np.array([value], np.float64).astype(NUMPY_DTYPES[op.dtype])
        else:
            want = np.array([op.value == "true" if op.dtype == "i1" else int(op.value)], NUMPY_DTYPES[op.dtype])
        assert scalar.same_bits(got, want).all(), (op.dtype, op.value, got, want)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_op_compiles_for_every_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    specs = [batch.spec for batch in BATCHES] + [constants()]
    assert set(nvrtc(specs, arch)) == {spec.name for spec in specs}


def test_headers_need_no_library() -> None:
    """NVRTC has no standard headers, and the project ships none."""
    assert "#include" not in emit_module([constants()], "sm_80")
    assert "std::" not in header("scalar.cuh") + header("loop.cuh")
