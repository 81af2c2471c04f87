"""Products of warpgroups on the simulated GPU: each misuse is found, and the same kernel without it gives the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

KERNEL = """extern "C" __global__ void qk_try(float* y) {
    QC_SHARED(uint4, tile, 0, 64 * 8);
    const int t = threadIdx.x;
    const uint32_t one = 0x3f803f80u;
    for (int i = t; i < 64 * 8; i += 128) tile[i] = make_uint4(one, one, one, one);
    qc_fence_async();
    __syncthreads();
    uint32_t a[4] = {one, one, one, one};
    float d[8][4] = {};
    qc_wgmma_fence();
    qc_wgmma_16(d, a, qc_place(tile), qc_bf16());
    qc_wgmma_commit();
    __syncthreads();
    qc_wgmma_wait<0>();
    y[t] = d[7][3];
}
"""
AT_WAIT = "    __syncthreads();\n    qc_wgmma"
"""The barrier between the product and its wait, behind which each of these is planted."""
B_CHANGES = """    __syncthreads();
    if (t == 0) tile[0] = make_uint4(2, 2, 2, 2);
    qc_fence_async();
    __syncthreads();
    qc_wgmma"""
SUMS_CHANGE = """    d[0][0] = 1;
    qc_wgmma_fence();
    qc_wgmma_16(d, a, qc_place(tile), qc_bf16());
    qc_wgmma"""
PLANTED = {
    "a store without a proxy's fence": ("    qc_fence_async();\n", "", "without fence.proxy.async"),
    "no fence before a product": ("    qc_wgmma_fence();\n", "", "no wgmma.fence"),
    "an operand in registers changes": (AT_WAIT, "    a[0] = t;\n    qc_wgmma", "operand a"),
    "an operand in shared memory changes": (AT_WAIT, B_CHANGES, "operand b"),
    "accumulators change": (AT_WAIT, SUMS_CHANGE, "accumulators are written"),
    "a tile that begins off its pattern": ("qc_place(tile)", "qc_place(tile) + 128", "no multiple of 32 bytes"),
    "warps of a group multiply different tiles": (
        "qc_place(tile)", "qc_place(tile) + (t < 32 ? 0 : 32)", "different products",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", [*PLANTED])
def test_misuse_of_a_product_is_found(compile_cuda: Callable[..., Any], what: str) -> None:
    old, new, message = PLANTED[what]
    assert old in KERNEL
    cuda = compile_cuda(KERNEL.replace(old, new), arch=900)
    more: dict[str, Any] = {"block": 128, "shared": 8192, "y": ("w", np.zeros(128, np.float32))}
    assert message in cuda.finds("wgmma-order", "try", **more)


def test_sums_arrive_at_the_wait_and_not_before(compile_cuda: Callable[..., Any]) -> None:
    more: dict[str, Any] = {"block": 128, "shared": 8192, "y": ("w", np.zeros(128, np.float32))}
    assert (compile_cuda(KERNEL, arch=900).run("try", **more)[0] == 16).all()
    early = KERNEL.replace("    qc_wgmma_wait<0>();\n", "").replace("d[7][3];\n", "d[7][3];\n    qc_wgmma_wait<0>();\n")
    assert np.isnan(compile_cuda(early, arch=900).run("try", **more)[0]).all()
