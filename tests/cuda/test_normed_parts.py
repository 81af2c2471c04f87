"""Parts with a norm on the device: the bits of the norm's kernel and the loop's, in registers, without spills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler.kernels.cuda.emit import emit_kernel

CASES = load("tests/support/normed_parts_cases.py")
BOUNDS = {"f32": 2e-6, "bf16": 2e-2, "f16": 2e-3}


def check(sim_module: Callable[..., Any], cases: Sequence[Any]) -> None:
    module = sim_module([spec for case in cases for spec in (case.fused, case.norm, case.moved)])
    for case in cases:
        for rows in (1, 7):
            given = case.given(rows)
            x, affine = case.heads(given[0]), given[1 : 1 + len(case.affine)]
            tables = given[1 + len(case.affine) :]
            out, symbols = case.empty(CASES.HEADS, rows, case.cols), {"n": rows}
            (found,) = module.run(case.fused.name, [x, *affine, *tables, out], symbols)
            (normed,) = module.run(case.norm.name, [x, *affine, case.empty(*x.shape)], symbols)
            (apart,) = module.run(case.moved.name, [*(normed,) * case.reads, *tables, out], symbols)
            assert found.tobytes() == apart.tobytes(), (case.name, rows)
            want = case.expected(given).transpose(1, 0, 2)
            error = np.linalg.norm(found.astype(np.float64) - want) / (np.linalg.norm(want) + 1e-30)
            assert error <= BOUNDS[case.dtype], (case.name, error)


def test_a_part_with_a_norm_has_the_bits_of_both_kernels(sim_module: Callable[..., Any]) -> None:
    check(sim_module, CASES.SHORT)


@pytest.mark.slow
def test_every_size_of_heads_has_the_bits_of_both_kernels(sim_module: Callable[..., Any]) -> None:
    check(sim_module, CASES.cases(quick=False))


READS = {
    ("halves", 64): "kept[(i + 1) % 2]", ("halves", 128): "kept[(i + 2) % 4]", ("halves", 256): "kept[(i + 4) % 8]",
    ("pairs", 128): "__shfl_xor_sync(QC_ALL_LANES, kept[i], 1)",
    ("halves", 16): "__shfl_xor_sync(QC_ALL_LANES, kept[0], 8)",
    ("halves", 80): "qc_kept(kept, ",
}  # fmt: skip


@pytest.mark.parametrize(("turn", "cols"), READS)
def test_the_other_half_comes_from_a_register_where_it_can(turn: str, cols: int) -> None:
    """Halves of whole warps stay in a lane; pairs take one exchange; other halves are looked for in the warp."""
    text = emit_kernel(CASES.Case(cols, "bf16", turn, "rms").fused, "sm_80").text
    assert f"v_in1 = {READS[turn, cols]}" in text and f"v_in0 = kept[{0 if cols == 16 else 'i'}]" in text
    assert "__shared__" not in text and "__syncthreads" not in text


def test_a_block_has_a_wide_row_and_exchanges_sums_alone() -> None:
    kernel = emit_kernel(CASES.Case(3072, "f32", "copy", "layer").fused, "sm_80")
    assert kernel.geometry.block == (512, 1, 1) and kernel.geometry.shared == 4 * 512 // 32
    assert "v_in0 = kept[i];" in kernel.text and "__shfl" not in kernel.text.split("qk_fused_")[1]


@pytest.mark.slow
def test_every_architecture_compiles_it_without_spills(nvrtc: Any, arch: str) -> None:
    cases = [case for case in CASES.cases(quick=False) if case.cols in (64, 80, 128, 256, 513, 8192)]
    for name, taken in nvrtc([case.fused for case in cases], arch).items():
        assert not taken.uses_local_memory, name
