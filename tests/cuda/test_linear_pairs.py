"""Linears that combine pairs of rows on a GPU: every engine gives the bits of its plain linear's sums, combined."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from by_path import load

from qcompiler.kernels.cuda import emit, linear
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.linear import LinearKernel

support = load("tests/support/pair_cases.py")
LAYOUT = "cuda_t16_pairs_v1"
MS = {"1": (1, 3), "2-8": (1, 5, 8), "9-64": (9, 33, 64), "large": (65, 130)}
KNOWN = {"1": 1, "2-8": 7, "9-64": 33, "large": 130}
"""A number of tokens that has the class where it is known when the program is compiled."""
Module = Callable[..., Any]


def check(module: Any, case: Any, m: int) -> None:
    symbols = {"m": m} if case.paired.symbols else {}
    paired, plain = case.given(m)
    sums = module.run(case.plain.name, plain, symbols)[-1]
    found = module.run(case.paired.name, paired, symbols)[-1]
    assert found.tobytes() == case.combined(sums, m).tobytes(), (case.paired.name, m)


def check_all(sim_module: Module, cases: list[Any], arch: str, ms: dict[str, tuple[int, ...]]) -> None:
    module = sim_module([spec for case in cases for spec in (case.paired, case.plain)], arch)
    for case in cases:
        known = case.paired.operands[0].shape[0]
        for m in (known,) if isinstance(known, int) else ms[case.paired.body.m_class]:
            check(module, case, m)


MORE = pytest.param(("int4", "int8", "q4_K", "q6_K", "tq"), marks=pytest.mark.slow)
TARGETS = [
    ("sm_80", "bf16"),
    ("sm_80", "f32"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("sm_75", "f16"), ("sm_75", "bf16"), ("sm_90a", "bf16"))
    ),
]


@pytest.mark.parametrize("names", [("nf4", "plain"), MORE])
@pytest.mark.parametrize(("arch", "dtype"), TARGETS)
def test_every_engine_gives_the_bits_of_its_sums(sim_module: Module, arch: str, dtype: str, names: Any) -> None:
    cases = list(support.cases(LAYOUT, [dtype], names, MS))
    engines = {linear.decision_of(case.paired, arch).key for case in cases}
    tensor_cores = {"few_mma", "mma"} | ({"wgmma"} if arch == "sm_90a" else set())
    assert engines == {"few_fma", "fma"} if dtype == "f32" or (arch, dtype) == ("sm_75", "bf16") else tensor_cores
    check_all(sim_module, cases, arch, MS)


def test_tiles_of_a_known_number_of_rows(sim_module: Module) -> None:
    """16, 32 and 64 tokens, a class that splits K, and large tiles over 6-bit codes."""
    made = [
        ("nf4", "9-64", 13, 40), ("int4", "9-64", 30, 37), ("nf4", "9-64", 50, 72), ("nf4", "large", 129, 130),
        ("q6_K", "large", 70, 8),
    ]  # fmt: skip
    cases = [
        support.make(LAYOUT, name, "bf16", m_class, columns=columns, has_bias=True, m=m)
        for name, m_class, m, columns in made
    ]
    check_all(sim_module, cases, "sm_80", MS)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_integer_products_of_pairs(sim_module: Module, arch: str) -> None:
    cases = [
        support.make(LAYOUT, name, "f32", m_class, columns=columns, has_bias=m_class == "9-64", codes=True)
        for name, columns in (("int8", 37), ("int4", 24))
        for m_class in ("2-8", "9-64", "large")
    ]
    check_all(sim_module, cases, arch, {"2-8": (1, 8), "9-64": (9, 40), "large": (65, 70)})


def test_pairs_take_the_blocks_of_the_plain_linear() -> None:
    """Geometry and engine are those of the same rows without pairs: nothing is computed twice."""
    for case in support.cases(LAYOUT, ["bf16"], ["nf4"], MS):
        paired, plain = (emit.emit_kernel(spec, "sm_90a") for spec in (case.paired, case.plain))
        assert paired.engine == plain.engine
        if case.columns % 8 == 0:
            assert paired.geometry == plain.geometry


def swiglu(dtype: Any) -> ScalarProgram:
    """sum / (1 + exp(-sum)) * other."""
    ops = [
        ScalarOp(result="n", op="arith.negf", dtype="f32", args=("g",)),
        ScalarOp(result="e", op="math.exp", dtype="f32", args=("n",)),
        ScalarOp(result="one", op="arith.constant", dtype="f32", value=(1.0).hex()),
        ScalarOp(result="d", op="arith.addf", dtype="f32", args=("e", "one")),
        ScalarOp(result="q", op="arith.divf", dtype="f32", args=("g", "d")),
        ScalarOp(result="y", op="arith.mulf", dtype="f32", args=("q", "u")),
        ScalarOp(result="z", op="arith.truncf", dtype=dtype, args=("y",)),
    ]
    return ScalarProgram(inputs=(("g", "f32"), ("u", "f32")), ops=tuple(ops), yields=("z",))


@pytest.mark.parametrize(
    "arch",
    [
        "sm_75",
        "sm_80",
        "sm_90a",
        *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_86", "sm_89", "sm_100", "sm_120")),
    ],
)
def test_no_kernel_spills_at_sizes_of_models(nvrtc: Callable[..., Any], arch: str) -> None:
    """Every class, with tokens known and unknown, of a gate and an up projection of 14336 rows."""
    dtype: Any = "f16" if arch == "sm_75" else "bf16"
    specs = []
    for name, m_class, known in itertools.product(("nf4", "q4_K"), MS, (False, True)):
        m = KNOWN[m_class] if known else "m"
        ref = FormatRef(name=name, params={"block": 64} if name == "nf4" else {})
        operands = (
            Operand(name="x", dtype=dtype, access="r", shape=(m, 4096), strides=(4096, 1)),
            Operand(name="w", dtype=dtype, access="r", shape=(28672, 4096), format=ref, layout=LAYOUT),
            Operand(name="out", dtype=dtype, access="w", shape=(m, 14336), strides=(14336, 1)),
        )
        body = LinearKernel(m=m, n=28672, k=4096, m_class=m_class, has_bias=False, epilogue=swiglu(dtype), pairs=True)  # type: ignore[arg-type]
        spec = f"{name}_{m_class.replace('-', '_')}_{m}"
        specs.append(KernelSpec(name=spec, symbols=("m",) if m == "m" else (), operands=operands, body=body))
    for name, used in nvrtc(specs, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)
