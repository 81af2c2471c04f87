"""Experts whose sums are combined in the kernel, on the CPU, against float64: a SwiGLU, and a sum over experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from combined_cases import Case, cases, check, codes, make, routings
from kernel_cases import Array, aligned, same_bits

from qcompiler.errors import KernelSelectionError, QCompilerError
from qcompiler.kernels.cpu.emit import emit_kernel

LAYOUT = "cpu_p16_v2"


def results(kernels: Any, every: list[Case]) -> Iterator[tuple[Case, Array, Array]]:
    """Each case under each of its routings: what the kernel gives, on one thread and on several, and float64."""
    for case in every:
        case.weight = aligned(case.weight)
        for chosen in routings(case):
            inputs = case.inputs(chosen)
            out = kernels.run_both(case.spec.name, lambda inputs=inputs: [*inputs[:-1], inputs[-1].copy()])[-1]
            yield case, out, case.expected(chosen, inputs)


def test_combined_sums_equal_float64(build: Callable[..., Any], isa: str) -> None:
    """On one thread and on several to the same bits."""
    every = cases(LAYOUT)
    for case, out, expected in results(build([case.spec for case in every], isa), every):
        check(case, out, expected)


@pytest.mark.parametrize(
    "weight",
    ["nf4", "q4_K", *(pytest.param(w, marks=pytest.mark.slow) for w in ("int8", "q6_K", "fp8_e4m3", "panels"))],
)
def test_factors_are_rounded_to_bf16(build: Callable[..., Any], isa: str, weight: str) -> None:
    """x wherever the weight decodes to bf16, and its elements at most once; the sums over a row's experts are fp32."""
    n, more = 64, {"factors": "bf16"}
    every = [
        make(LAYOUT, weight, 5, n, 256, rows=1, repeat=2, **more), make(LAYOUT, weight, 3, n, 256, rows=8, **more),
        make(LAYOUT, weight, 5, n, 256, rows=2, top=2, **more),
    ]  # fmt: skip
    for case, out, expected in results(build([case.spec for case in every], isa), every):
        error = np.linalg.norm(out - expected, axis=1) / np.linalg.norm(expected, axis=1)
        exact = case.body.top > 0 or isa != "x86-64-v4"
        assert error.max() < (3e-6 if exact else 6e-3)


def check_codes(kernels: Any, every: list[Case]) -> None:
    for case, out, expected in results(kernels, every):
        check(case, out, expected)
    for case in every:
        if case.body.top and case.spec.operands[-1].dtype == "f32":
            chosen = routings(case)[0]
            inputs = case.inputs(chosen)
            out = kernels.run_both(case.spec.name, lambda inputs=inputs: [*inputs[:-1], inputs[-1].copy()])[-1]
            sums = case.sums(chosen, inputs[0]).reshape(-1, case.body.top, case.body.n)
            total = np.zeros_like(sums[:, 0])
            for place in range(case.body.top):
                total = total + sums[:, place] * inputs[3][:, place, None]
            assert same_bits(out, total + inputs[4])


def test_combined_sums_of_codes_are_those_of_their_definition(build: Callable[..., Any], isa: str) -> None:
    """A sum over a row's experts in fp32, to the bit."""
    every = codes(LAYOUT)
    check_codes(build([case.spec for case in every], isa), every)


@pytest.mark.slow
def test_rare_engines_combine_sums_of_codes(int8_engine: Callable[..., Any]) -> None:
    every = codes(LAYOUT)
    check_codes(int8_engine([case.spec for case in every]), every)


def test_an_expert_that_does_not_exist_is_reported(build: Callable[..., Any], isa: str) -> None:
    """Its rows of a GLU are zero; it adds nothing to a row of several experts."""
    every = [*cases(LAYOUT), *codes(LAYOUT)]
    kernels = build([case.spec for case in every], isa)
    for glu, mixed in ((every[0], every[4]), tuple(each for each in codes(LAYOUT) if each.body.experts == 5)):
        inputs = glu.inputs([4, 9])
        context = kernels.run(glu.spec.name, [*inputs[:1], aligned(glu.weight), *inputs[2:]], ())
        assert (context.error_code, context.error_value, context.error_limit) == (1, 9, 5)
        assert not inputs[-1][1].any() and inputs[-1][0].all()
        inputs = mixed.inputs([-1, 3])
        context = kernels.run(mixed.spec.name, [*inputs[:1], aligned(mixed.weight), *inputs[2:]], ())
        assert (context.error_code, context.error_limit) == (1, 5)
        alone = mixed.sums([-1, 3], inputs[0])[1] * inputs[3][0, 1] + inputs[4][0]
        np.testing.assert_allclose(inputs[-1][0], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("change", "message"), [
    ({"n": 40}, "multiple of 32"), ({"rows": "t"}, "known multiple"),
    ({"epilogue": None}, "epilogue"),
    ({"top": 2}, "not both|do not fit"), ({"pairs": False}, "epilogue where"),
])  # fmt: skip
def test_what_fits_no_kernel_is_refused(change: dict[str, Any], message: str) -> None:
    spec = make(LAYOUT, "nf4", 5, 64, 97, rows=1, repeat=2).spec
    broken = msgspec.structs.replace(spec, body=msgspec.structs.replace(spec.body, **change), symbols=("t",))
    with pytest.raises(QCompilerError, match=message):
        emit_kernel(broken, "x86-64-v3")


def test_a_weight_without_panels_is_refused() -> None:
    spec = make(LAYOUT, "panels", 2, 32, 77, rows=3, top=1).spec
    w = msgspec.structs.replace(spec.operands[1], layout=None, strides=(77, 1))
    broken = msgspec.structs.replace(spec, operands=(spec.operands[0], w, *spec.operands[2:]))
    with pytest.raises(KernelSelectionError, match="in panels"):
        emit_kernel(broken, "x86-64-v3")
