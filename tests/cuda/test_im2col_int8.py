"""Windows of images of int8 rows times codes on the device, to the bit what formats/integer_product.py says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from im2col_int8_cases import CASES, DTYPES, OTHERS, SIZES, Case, magnitudes, odd_sizes, pixels, quantize_spec
from kernel_cases import same_bits

from qcompiler.formats import int8_rows
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.weights import LAYOUT

FAST = [replace(CASES[0], layout=LAYOUT)]
FEW = [replace(CASES[4], layout=LAYOUT, m_class="2-8"), replace(OTHERS[2], layout=LAYOUT, m_class="2-8", gap=0)]
SLOW = [replace(case, layout=LAYOUT) for case in (*CASES[1:], *OTHERS[:11], replace(OTHERS[-1], m_class="9-64"))] + FEW


def check(module: Any, case: Case, sizes: Any = SIZES) -> None:
    row = int8_rows.row_bytes(case.channels)
    for batch, height, width in sizes:
        image = case.image(batch, height, width)
        symbols = dict(zip("bhwrq", (batch, height, width, *case.size(height, width)), strict=True))
        wanted = case.expected(image)
        out = np.full_like(wanted, 7)
        (found,) = module.run(case.name, [image[..., :row], case.weight, case.bias, out], symbols)
        assert same_bits(found, wanted), (case, batch, height, width)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_sums_have_the_bits_of_their_definition(sim_module: Callable[..., Any], arch: str) -> None:
    module = sim_module([case.spec for case in FAST], arch)
    for case in FAST:
        check(module, case, SIZES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_70"])
def test_every_geometry_and_format_has_the_bits_of_its_definition(sim_module: Callable[..., Any], arch: str) -> None:
    module = sim_module([case.spec for case in (*FAST, *SLOW)], arch)
    for case in (*FAST, *SLOW):
        check(module, case, (*SIZES, *odd_sizes(case)))


@pytest.mark.slow
def test_pixels_have_the_scale_of_their_image(sim_module: Callable[..., Any]) -> None:
    kinds: Any = [("f32", 33), ("bf16", 64), ("f16", 5)]
    module = sim_module([quantize_spec(*each) for each in kinds], "sm_80")
    for dtype, channels in kinds:
        for batch, height, width in SIZES:
            x, row = pixels(batch, height, width, channels, dtype), int8_rows.row_bytes(channels)
            wide = np.zeros((batch * height * width, channels + 3), DTYPES[dtype])
            wide[:, :channels] = x.reshape(-1, channels)
            held = np.full((len(wide), row + 16), 99, np.int8)
            given = [wide[:, :channels], magnitudes(x), held[:, :row]]
            (found,) = module.run(f"q_{dtype}_{channels}", given, [batch, height * width])
            wanted = int8_rows.quantise(x, "image", 0.0, None, magnitudes(x))
            assert np.array_equal(found, wanted.reshape(-1, row)), (dtype, channels, batch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_every_architecture_compiles_them_without_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    specs = [case.spec for case in (*FAST, *SLOW)]
    resources = nvrtc(specs, arch)
    for spec in specs:
        assert emit_kernel(spec, arch).engine == "mma"
        assert resources[spec.name].spill_stores == 0, (spec.name, resources[spec.name])
