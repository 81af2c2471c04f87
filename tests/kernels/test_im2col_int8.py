"""Windows of images of int8 rows times codes on the CPU, to the bit what formats/integer_product.py says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from im2col_int8_cases import CASES, DTYPES, OTHERS, SIZES, Case, magnitudes, odd_sizes, pixels, quantize_spec
from kernel_cases import same_bits

from qcompiler.config import resolve_format
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import int8_rows
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.plan.kernel import DType

LAYOUT = "cpu_p16_v2"
FAST = [replace(case, layout=LAYOUT) for case in CASES[:2]]
SLOW = [replace(case, layout=LAYOUT) for case in (*CASES[2:], *OTHERS)]


def check(kernels: Any, case: Case, sizes: Iterable[tuple[int, int, int]] = SIZES) -> None:
    for batch, height, width in sizes:
        image = case.image(max(batch, 1), height, width)[:batch]
        symbols = (batch, height, width, *case.size(height, width))
        wanted = case.expected(image)
        given = (image, case.weight, case.bias)
        made = kernels.run_both(case.name, lambda g=given, w=wanted: [*g, np.full_like(w, 7)], symbols)
        assert same_bits(made[-1], wanted), (case, batch, height, width)


def test_sums_have_the_bits_of_their_definition(build: Callable[..., Any], isa: str) -> None:
    kernels = build([case.spec for case in FAST], isa)
    for case in FAST:
        check(kernels, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case.format}-{case.channels}")
def test_every_geometry_and_format_has_the_bits_of_its_definition(
    build: Callable[..., Any], isa: str, case: Case
) -> None:
    check(build([case.spec], isa), case)


@pytest.mark.slow
def test_rare_engines_have_the_bits_of_the_definition(int8_engine: Callable[..., Any]) -> None:
    chosen = [*FAST, *SLOW]
    kernels = int8_engine([case.spec for case in chosen])
    for case in chosen:
        check(kernels, case)


@pytest.mark.slow
def test_images_smaller_than_the_kernel(build: Callable[..., Any], isa: str) -> None:
    chosen = [case for case in (*FAST, *SLOW) if odd_sizes(case)]
    kernels = build([case.spec for case in chosen], isa)
    for case in chosen:
        check(kernels, case, [*odd_sizes(case), (0, 7, 7)])


@pytest.mark.slow
def test_images_smaller_than_the_kernel_on_rare_engines(int8_engine: Callable[..., Any]) -> None:
    chosen = [case for case in (*FAST, *SLOW) if odd_sizes(case)]
    kernels = int8_engine([case.spec for case in chosen])
    for case in chosen:
        check(kernels, case, [*odd_sizes(case), (0, 7, 7)])


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "edge"), [(512, 8), (544, 11)], ids=["copied", "row made first"])
def test_sums_that_no_quantisation_makes_wrap(build: Callable[..., Any], isa: str, channels: int, edge: int) -> None:
    """Rows may come with a call, and hold any sums: the product with their lowest code leaves 32 bits. The sanitisers
    (docs/security.md) find it where it does not wrap."""
    case = Case("int8", channels, (edge, edge), n=16, layout=LAYOUT)
    image = case.image(1, edge, edge)
    image[..., :channels] = 0
    end = int8_rows.padded(channels)
    image[..., end : end + 4] = np.array([1.0], "<f4").view(np.int8)
    image[..., end + 16 : end + 16 + channels // 16].view("<i2")[:] = 32767
    kernels = build([case.spec], isa)
    given = (image, case.weight, np.zeros(16, np.float32))
    made = kernels.run_both(case.name, lambda: [*given, np.zeros((1, 16), np.float32)], (1, edge, edge, 1, 1))[-1]
    slopes = np.abs(resolve_format(case.format).decode(case.packed)).max(axis=1) / 127
    sums = [min(case.k - k, 65536) // 32 * 32767 for k in range(0, case.k, 65536)]
    wrapped = sum(float(np.int64(-128 * each).astype(np.int32)) for each in sums)
    assert np.allclose(made[0], wrapped * slopes, rtol=1e-5)


PIXELS: list[tuple[DType, int]] = [("f32", 33), ("bf16", 64), ("f16", 5)]


@pytest.mark.slow
def test_pixels_have_the_scale_of_their_image(build: Callable[..., Any], isa: str) -> None:
    kernels = build([quantize_spec(*each) for each in PIXELS], isa)
    for dtype, channels in PIXELS:
        for batch, height, width in SIZES:
            x, row = pixels(batch, height, width, channels, dtype), int8_rows.row_bytes(channels)
            wide = np.zeros((batch * height * width, channels + 3), DTYPES[dtype])
            wide[:, :channels] = x.reshape(-1, channels)
            given, out = (wide, magnitudes(x)), np.full((len(wide), row + 16), 99, np.int8)
            made = kernels.run_both(
                f"q_{dtype}_{channels}", lambda g=given, o=out: [*g, o.copy()], (batch, height * width)
            )[-1]
            wanted = int8_rows.quantise(x, "image", 0.0, None, magnitudes(x))
            assert (made[:, row:] == 99).all()
            assert np.array_equal(made[:, :row], wanted.reshape(-1, row)), (dtype, channels, batch)


def test_a_window_has_the_codes_of_its_taps_and_zeros_outside() -> None:
    """formats/int8_rows.py's `windows` beside loops over the taps."""
    for case in (*FAST, *SLOW):
        image = replace(case, gap=0).image(3, 9, 11)
        rows = int8_rows.windows(
            image, case.channels, kernel=case.kernel, strides=case.strides, padding=(*case.padding, *case.padding),
            dilation=case.dilation,
        )  # fmt: skip
        size = case.size(9, 11)
        codes = int8_rows.codes_of(rows, case.k)
        assert np.array_equal(codes.reshape(-1, case.k), case.taps(image[..., : case.channels], size)), case
        scales = int8_rows.scales_of(rows, case.k)
        wanted = int8_rows.scales_of(image, case.channels)[:, :1, :1]
        assert np.array_equal(scales, np.broadcast_to(wanted, (3, *size)), equal_nan=True)
        end = int8_rows.padded(case.k)
        runs = np.ascontiguousarray(rows[..., end + 16 : end + 16 + end // 16]).view("<i2")
        assert np.array_equal(runs.sum(axis=-1), codes.sum(axis=-1, dtype=np.int64))


def test_windows_of_codes_that_no_kernel_can_read_are_refused() -> None:
    case = FAST[0]
    with pytest.raises(KernelSelectionError, match="nf4 has no integer product"):
        emit(replace(case, format="nf4").spec, "x86-64-v4")
    image = msgspec.structs.replace(case.spec.operands[0], shape=("b", "h", "w", 80))
    with pytest.raises(KernelSelectionError, match="operand 'x'"):
        emit(msgspec.structs.replace(case.spec, operands=(image, *case.spec.operands[1:])), "x86-64-v4")
