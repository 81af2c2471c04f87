"""Linears that begin with a norm on a GPU: the bits of the norm's kernel and the linear's, and no spills."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import emit, linear
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, RowCodes

swiglu = load("tests/cuda/test_linear_pairs.py").swiglu
support = load("tests/support/norm_prologue_cases.py")
LAYOUT = "cuda_t16_v1"
BOUNDS = {"f32": 2e-6, "bf16": 2e-2, "f16": 2e-3}
Module = Callable[..., Any]


def check_all(sim_module: Module, arch: str, cases: Sequence[Any]) -> None:
    module = sim_module([spec for case in cases for spec in case.specs], arch)
    for case in cases:
        operands = case.given(case.body.m)
        run = lambda spec, given: module.run(spec.name, given)[-1]  # noqa: E731
        found = module.run(case.fused.name, operands)[-case.written :]
        apart = case.apart(run, operands)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in apart], case.fused.name
        expected = case.expected(operands)
        error = np.linalg.norm(found[-1].astype(np.float64) - expected) / (np.linalg.norm(expected) + 1e-30)
        assert error <= BOUNDS[case.fused.operands[0].dtype], (case.fused.name, error)


MORE = pytest.param(("int4", "q4_K", "q6_K", "fp8", "tq"), marks=pytest.mark.slow)
TARGETS = [
    ("sm_80", "bf16"),
    ("sm_80", "f32"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("sm_75", "f16"), ("sm_75", "bf16"), ("sm_90a", "bf16"))
    ),
]


@pytest.mark.parametrize("names", [("nf4", "plain", "nf4_across_rows", "int8"), MORE])
@pytest.mark.parametrize(("arch", "dtype"), TARGETS)
def test_a_linear_with_a_norm_has_the_bits_of_both_kernels(
    sim_module: Module, arch: str, dtype: str, names: tuple[str, ...]
) -> None:
    cases = list(support.cases(LAYOUT, [dtype], names))
    wanted = "few_fma" if dtype == "f32" or (arch, dtype) == ("sm_75", "bf16") else "few_mma"
    assert {linear.decision_of(case.fused, arch).key for case in cases} == {wanted}
    check_all(sim_module, arch, cases)


@pytest.mark.parametrize(("arch", "dtype"), TARGETS)
def test_a_norm_that_is_added_to_a_residual_and_a_norm_of_the_sum(sim_module: Module, arch: str, dtype: str) -> None:
    made = list(support.added_cases(LAYOUT, [dtype], ("nf4", "plain")))
    made += [
        support.make(LAYOUT, "plain", dtype, norm, m, "1" if m == 1 else "2-8", rows=18, cols=cols, keeps=True,
                     added=added)
        for cols, added, norm, m in ((1, "rms", "layer", 1), (513, "layer", "rms", 3), (4096, "rms", "rms", 8))
    ]  # fmt: skip
    check_all(sim_module, arch, made)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_that_the_norm_shares_among_more_warps_than_the_linear_has(sim_module: Module, dtype: str) -> None:
    """A row of up to 512 columns is one warp's, a longer one that of up to 32; x comes in chunks where it is long."""
    made = [
        support.make(LAYOUT, "plain", dtype, norm, m, "1" if m == 1 else "2-8", rows=18, cols=cols, keeps=cols % 2 == 0)
        for cols, norm, m in (
            (1, "rms", 1), (2, "layer", 2), (511, "layer", 1), (512, "rms", 3), (513, "layer", 2), (1024, "rms", 1),
            (1219, "layer", 8), (4096, "rms", 8), (8200, "layer", 1), (17000, "rms", 1),
        )
    ]  # fmt: skip
    check_all(sim_module, "sm_80", made)


CODES = (
    ("int8", "rms", 1, "token", 101), ("int8", None, 7, "token", 64), ("int4", "layer", 3, "tensor", 96),
    ("int4", None, 1, "tensor", 4096), ("int8", "layer_bare", 8, "token", 333), ("int8", "rms", 2, "token", 1),
    ("int8", "rms", 1, "token", 4096), ("int8", None, 2, "token", 16384), ("int4", "rms_bare", 5, "token", 2048),
)  # fmt: skip
"""One row, and several; columns that fill no run, that stay in a thread's registers, and that are made twice."""


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "f32"), ("sm_75", "f16"), ("sm_70", "f32"), ("sm_90a", "bf16")])
def test_rows_of_int8_are_made_in_the_linear_with_the_bits_of_their_kernels(
    sim_module: Module, arch: str, dtype: str
) -> None:
    """Every second one keeps them for other readers, with gaps between them."""
    made = [
        support.make_codes(LAYOUT, fmt, dtype, norm, m, kind, cols=cols, m_class="2-8", keeps=number % 2 == 0)
        for number, (fmt, norm, m, kind, cols) in enumerate(CODES if arch == "sm_80" else CODES[:4])
    ]
    check_codes(sim_module, arch, made, 0)


def check_codes(sim_module: Module, arch: str, made: Sequence[Any], row: int) -> None:
    """The bits of the kernels apart, also where one row is zero, or not a number."""
    module = sim_module([spec for case in made for spec in (case.fused, *case.steps)], arch)
    for case in made:
        operands = case.given(case.m)
        for value in (1.0, 0.0, np.nan):
            operands[0][min(row, case.m - 1)] *= value
            found = module.run(case.fused.name, operands)[-case.written :]
            apart = case.apart(lambda spec, given: module.run(spec.name, given)[-1], operands)
            for ours, theirs in zip(found, apart, strict=True):
                np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


MANY = (
    ("int8", "rms", 17, "token", 64), ("int8", None, 32, "token", 1), ("int4", "layer", 33, "tensor", 96),
    ("int8", "layer_bare", 64, "token", 512), ("int8", None, 9, "token", 3640), ("int8", "layer", 12, "token", 1100),
    ("int4", None, 50, "tensor", 640), ("int8", "rms_bare", 41, "token", 333), ("int4", "rms", 16, "token", 2048),
)  # fmt: skip
"""A part of a block of 32 rows, a whole one, and two; a row made by 4 to 32 threads, in registers and twice."""


OLDER = [("sm_80", "f32"), ("sm_75", "f16"), ("sm_70", "f32")]


@pytest.mark.parametrize(
    ("arch", "dtype"), [("sm_90a", "bf16"), *(pytest.param(*each, marks=pytest.mark.slow) for each in OLDER)]
)
def test_blocks_make_their_own_rows_of_many(sim_module: Module, arch: str, dtype: str) -> None:
    made = [
        support.make_codes(LAYOUT, fmt, dtype, norm, m, kind, cols=cols, m_class="9-64", keeps=number % 2 == 0)
        for number, (fmt, norm, m, kind, cols) in enumerate(MANY)
    ]
    made += [support.make_codes(LAYOUT, "int8", dtype, "rms", 3, "token", cols=77, m_class="9-64", keeps=True)]
    check_codes(sim_module, arch, made, 63)


def test_more_rows_of_int8_than_a_kernel_makes_are_refused() -> None:
    case = support.make_codes(LAYOUT, "int8", "f32", "rms", 65, "token", cols=64, m_class="9-64")
    with pytest.raises(KernelSelectionError, match=r"make up to 64 rows of int8.*there are 65"):
        emit.emit_kernel(case.fused, "sm_80")


def test_an_engine_of_many_rows_refuses_a_norm() -> None:
    case = support.make(LAYOUT, "nf4", "bf16", "rms", 8, "2-8")
    wrong = msgspec.structs.replace(case.fused, body=msgspec.structs.replace(case.body, m_class="9-64"))
    with pytest.raises(KernelSelectionError, match="takes no norm as its prologue"):
        emit.emit_kernel(wrong, "sm_80")


def _added(dtype: Any, name: str, m: int, pairs: bool) -> KernelSpec:
    """A linear of Gemma 3 4 B that begins with a norm, its residual and a norm of the sum, which it keeps."""
    ref = FormatRef(name=name, params={"block": 64} if name == "nf4" else {})
    n, k = 20480 if pairs else 4096, 2560
    columns = n // 2 if pairs else n

    def plain(name: str, *shape: int, access: Any = "r") -> Operand:
        return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=(*shape[1:], 1))

    w = Operand(
        name="w", dtype=dtype, access="r", shape=(n, k), format=ref, layout="cuda_t16_pairs_v1" if pairs else LAYOUT
    )
    affine = (plain("residual_weight", k), plain("residual", m, k), plain("norm_weight", k))
    written = (plain("rows", m, k, access="w"), plain("out", m, columns, access="w"))
    first = msgspec.structs.replace(support.NORMS["rms"], keeps=True, has_residual=True)
    body = LinearKernel(
        m=m, n=n, k=k, m_class="1" if m == 1 else "2-8", has_bias=False, epilogue=swiglu(dtype) if pairs else None,
        norm=support.NORMS["rms"], added=first, pairs=pairs,
    )  # fmt: skip
    operands = (plain("x", m, k), w, *affine, *written)
    return KernelSpec(name=f"added_{name}_{m}_{pairs}", symbols=(), operands=operands, body=body)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_no_kernel_spills_at_sizes_of_models(nvrtc: Callable[..., Any], arch: str) -> None:
    """q, k and v of an 8 B model as one, with one token and several, both kinds of norm, and rows that are kept."""
    dtype: Any = "f16" if arch == "sm_75" else "bf16"
    specs = [_added(dtype, *each) for each in itertools.product(("nf4", "q4_K"), (1, 7), (True,))]
    made = [*itertools.product(("nf4", "q4_K", "int4"), (1, 7), ("rms", "layer"), (False,))]
    for name, m, norm, keeps in (*made, *itertools.product(("nf4", "q4_K", "int4"), (1, 7), ("layer",), (True,))):
        ref = FormatRef(name=name, params={"block": 64} if name == "nf4" else {})
        vectors = [
            Operand(name=each, dtype=dtype, access="r", shape=(4096,), strides=(1,))
            for each in support.NORMS[norm].names
        ]
        operands = (
            Operand(name="x", dtype=dtype, access="r", shape=(m, 4096), strides=(4096, 1)),
            Operand(name="w", dtype=dtype, access="r", shape=(6144, 4096), format=ref, layout=LAYOUT),
            *vectors,
            *[Operand(name="rows", dtype=dtype, access="w", shape=(m, 4096), strides=(4096, 1))] * keeps,
            Operand(name="out", dtype=dtype, access="w", shape=(m, 6144), strides=(6144, 1)),
        )
        record = msgspec.structs.replace(support.NORMS[norm], keeps=keeps)
        body = LinearKernel(m=m, n=6144, k=4096, m_class="1" if m == 1 else "2-8", has_bias=False, norm=record)
        specs.append(KernelSpec(name=f"{name}_{m}_{norm}_{keeps}", symbols=(), operands=operands, body=body))
    for name, used in nvrtc(specs, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)


def _with_codes(spec: KernelSpec, fmt: FormatRef) -> KernelSpec:
    """The same on rows of int8 that it makes itself, with another weight."""
    body = msgspec.structs.replace(spec.body, codes=True, rows=RowCodes(kind="token"))
    x, w, *rest = spec.operands
    operands = (x, msgspec.structs.replace(w, format=fmt), *rest)
    return msgspec.structs.replace(spec, name=f"{fmt.name}_{spec.name}", operands=operands, body=body)


@pytest.mark.parametrize(
    "arch",
    [
        "sm_90a",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("sm_70", "sm_75", "sm_80", "sm_100", "sm_120")),
    ],
)
def test_no_kernel_that_makes_rows_of_int8_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    dtype: Any = "bf16" if arch not in ("sm_70", "sm_75") else "f16"
    specs = [
        _with_codes(_added(dtype, "nf4", m, pairs=False), fmt)
        for m in (1, 7) for fmt in (FormatRef(name="int8"), FormatRef(name="int4", params={"group": 64}))
    ]  # fmt: skip
    alone = [
        msgspec.structs.replace(
            spec, name=f"alone_{spec.name}", operands=(*spec.operands[:2], spec.operands[-1]),
            body=msgspec.structs.replace(spec.body, norm=None, added=None),
        )
        for spec in specs
    ]  # fmt: skip
    many = [
        support.make_codes(LAYOUT, fmt, dtype, norm, m, "token", cols=k, m_class="9-64", keeps=m < 32).fused
        for fmt, norm, m, k in (
            ("int8", "layer", 17, 768), ("int4", "layer", 42, 768), ("int8", None, 10, 3072), ("int8", "rms", 64, 512),
        )
    ]  # fmt: skip
    for name, used in nvrtc([*specs, *alone, *many], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)
