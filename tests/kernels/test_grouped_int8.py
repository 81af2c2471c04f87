"""Int8 rows times the codes of chosen experts on the CPU, to the bit what formats/integer_product.py says."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from combined_cases import codes
from grouped_int8_cases import Case
from kernel_cases import same_bits

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.emit import emit_kernel as emit

LAYOUT = "cpu_p16_v2"
CASES = [
    Case("int8", 5, 19, 101, repeat=2, layout=LAYOUT),  # experts begin inside of panels
    Case("int4", 3, 240, 256, layout=LAYOUT),  # 15 panels, an odd part of which is a task's
    Case("q4_K", 4, 35, 512, repeat=3, index="i32", dtype="bf16", layout=LAYOUT),
    Case("q6_K", 2, 48, 256, layout=LAYOUT),  # codes in planes, which are unpacked once for many rows
    Case("mxfp4", 8, 16, 96, index="i32", dtype="f16", layout=LAYOUT),
]
OTHERS = [
    Case(each, 3, 19, k, repeat=2, layout=LAYOUT)
    for each, k in (
        ("int8:group=64", 192), ("int8:symmetric=False", 101), ("int4:group=64,symmetric=False", 128), ("int3", 96),
        ("int2", 96), ("llm_int8", 70), ("q4_0", 64), ("q4_1", 64), ("q5_0", 96), ("q5_1", 64), ("q8_0", 64),
        ("q2_K", 512), ("q3_K", 256), ("q5_K", 256), ("tq1_0", 256), ("tq2_0", 256), ("iq4_nl", 96), ("iq4_xs", 256),
        ("mxfp4_ggml", 64), ("nvfp4", 96),
    )
]  # fmt: skip


def routings(case: Case) -> list[list[int]]:
    """One row; fewer pairs than experts; any; more rows of one expert than a task holds."""
    rng, last, repeat = np.random.default_rng(3), case.experts - 1, case.repeat
    return [
        [int(e) for e in rng.integers(0, case.experts, repeat)],
        [last, 0, last] if repeat == 1 else [last, 0, last][:repeat],
        [int(e) for e in rng.integers(0, case.experts, 30 * repeat)],
        [last] * (110 * repeat),
    ]


def check(kernels: Any, case: Case) -> None:
    for chosen in routings(case):
        made = kernels.run_both(case.name, lambda c=chosen: case.operands(c), [len(chosen) // case.repeat])
        out = made[-1]
        assert (out[:, case.n] == 7).all(), f"{case} wrote beside its columns"
        assert same_bits(out[:, : case.n], case.expected(made[0], chosen)), (case, chosen[:8])


def test_sums_have_the_bits_of_their_definition(build: Callable[..., Any], isa: str) -> None:
    kernels = build([case.spec for case in CASES], isa)
    for case in CASES:
        check(kernels, case)


@pytest.mark.slow
def test_rare_engines_have_the_bits_of_the_definition(int8_engine: Callable[..., Any]) -> None:
    kernels = int8_engine([case.spec for case in CASES])
    for case in CASES:
        check(kernels, case)
    if "QC_AMX_MODEL 1" in kernels.source:
        assert ctypes.c_int64.in_dll(kernels.library, "amx_dots").value > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.format)
def test_every_format_has_the_bits_of_its_definition(build: Callable[..., Any], isa: str, case: Case) -> None:
    check(build([case.spec], isa), case)


def test_an_expert_that_does_not_exist_gives_zeros_and_is_reported(build: Callable[..., Any], isa: str) -> None:
    case, chosen = CASES[1], [0, 7, 2, -1]
    operands = case.operands(chosen)
    context = build([each.spec for each in CASES], isa).run(case.name, operands, [4], threads=2)
    assert (context.error_code, context.error_limit) == (1, 3) and context.error_value in (7, -1)
    assert (operands[-1][[1, 3], : case.n] == 0).all()
    expected = case.expected(operands[0], chosen)
    assert same_bits(operands[-1][[0, 2], : case.n], expected[[0, 2]])


def test_weights_whose_codes_cannot_be_multiplied_are_refused() -> None:
    spec = Case("nf4", 2, 16, 64, layout=LAYOUT).spec
    with pytest.raises(KernelSelectionError, match="nf4 has no integer product"):
        emit(spec, "x86-64-v4")
    plain = msgspec.structs.replace(spec.operands[1], format=None, layout=None, strides=(64, 1))
    operands = (spec.operands[0], plain, *spec.operands[2:])
    with pytest.raises(KernelSelectionError, match="multiplies rows of int8 with a packed weight"):
        emit(msgspec.structs.replace(spec, operands=operands), "x86-64-v4")


@pytest.mark.slow
def test_sums_stay_in_registers(build: Callable[..., Any], build_folder: Path) -> None:
    """As a part of the loop over experts, the microkernel stored each sum in each step, and took twice the time."""
    combined = [case.spec for case in codes(LAYOUT) if case.spec.operands[1].format.name == "int8"]  # type: ignore
    kernels = build([CASES[0].spec, *combined], "x86-64-v4")
    harness = sys.modules[type(kernels).__module__]
    library = harness.compile_source(kernels.source + harness.PARALLEL, "x86-64-v4", build_folder, "-O3")._name
    found = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    products = [each for each in re.split(r"\n(?=[0-9a-f]+ <)", found.stdout) if "vpdpbusd" in each]
    assert products
    for text in products:
        stores = re.findall(r"vmov\w+\s+%zmm\d+,-?(?:0x[0-9a-f]+)?\(%r[bs]p\)", text)
        assert len(stores) <= 0.1 * len(re.findall("vpdpbusd", text)), text.partition("\n")[0]
