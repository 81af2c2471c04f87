"""What a module leaves out of the headers changes no instruction of its kernels."""

from __future__ import annotations

import struct

import pytest
from by_path import load

from qcompiler.kernels.cuda import emit
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime import nvrtc

resources = load("benchmarks/kernel_resources.py")
SPECS: dict[str, KernelSpec] = {spec.name: spec for part in resources.PARTS for spec in resources.specs(part)}
QUICK = (
    "linear_nf4_bf16_1",
    "linear_q4_K_bf16_9_64",
    "linear_int8_f32_large",
    "norm_layer_f32",
    "attention_decode_f16",
)


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The section `.text.<kernel>` of every kernel (ELF64, little-endian)."""
    start, size, count, names_at = struct.unpack_from("<Q10xHHH", cubin, 40)[0], *struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = heads[names_at][4]
    found = {}
    for head in heads:
        begin = names + head[0]
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[head[4] : head[4] + head[5]]
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in SPECS]
)
def test_leaving_definitions_out_changes_no_instruction(name: str) -> None:
    spec = SPECS[name]
    whole = "\n".join([*(emit.header(each) for each in emit.HEADERS), emit.emit_kernel(spec, "sm_90a").text])
    module = emit.emit_module([spec], "sm_90a")
    assert len(module) < 0.7 * len(whole)
    code, expected = (machine_code(nvrtc.compile_cubin(text, "sm_90a").read()) for text in (module, whole))
    assert list(code) == list(expected) == [f"qk_{spec.name}"]
    ours, theirs = code.popitem()[1], expected.popitem()[1]
    changed = sum(ours[i : i + 16] != theirs[i : i + 16] for i in range(0, max(len(ours), len(theirs)), 16))
    # A table's address lies in a bank of constants, at an offset that tables of other kernels move; two loads read it.
    assert changed <= 2 * module.count("__device__ const ")


@pytest.mark.parametrize(("name", "most"), [("norm_layer_f32", 0.1), ("linear_nf4_bf16_1", 0.5)])
def test_a_module_has_the_share_of_lines_that_the_page_says(name: str, most: float) -> None:
    everything = "".join(emit.header(each) for each in emit.HEADERS)
    kept = "\n".join(emit.prelude([emit.emit_kernel(SPECS[name], "sm_90a").text]))
    assert 0 < kept.count("\n") < most * everything.count("\n")
