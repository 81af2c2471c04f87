"""The text of a linear whose blocks each have one panel of the weight: a kernel, or a part of a launch of several.

a kernel    extern "C" __global__ … qk_3(…) {            a part    QC_DEVICE void qk_3_linear1(…, int64_t panel) {
                const int64_t panel = blockIdx.x;                      …
                …
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.signature import part_signature, signature
from qcompiler.kernels.text import header_comment, indent
from qcompiler.plan.kernel import KernelSpec

PANEL = "panel"
"""The variable that the statements read: the number of the block's panel."""


@dataclass(frozen=True)
class Launch:
    """A launch that a linear shares: all its blocks, and the warps of each, once they are known."""

    blocks: int
    warps: int | None = None


@dataclass(frozen=True)
class PanelText:
    """What a kernel needs before it (`definitions`), its statements, and how it is launched. `resident` is the minimum
    of blocks per multiprocessor, which limits registers; `least_warps` are the fewest that a block may have.  Where
    `waits`, the statements wait for the kernels before, behind their loads of the weight."""

    definitions: str
    lines: tuple[str, ...]
    geometry: Geometry
    notes: tuple[str, ...]
    engine: str
    resident: int
    least_warps: int = 1
    waits: bool = False

    def kernel(self, spec: KernelSpec) -> CudaKernel:
        """A launch of its own."""
        head = [header_comment(spec, *self.notes), self.definitions]
        opened = signature(spec, self.geometry.threads, self.resident, waits=not self.waits)
        lines = [f"const int64_t {PANEL} = blockIdx.x;", *self.lines]
        text = "\n".join([*head, opened, *indent(lines), "}\n"])
        return CudaKernel(text, self.geometry, self.engine, self.notes)

    def part(self, spec: KernelSpec) -> str:
        """A function that computes one panel."""
        head = [header_comment(spec, *self.notes), self.definitions]
        return "\n".join([*head, part_signature(spec, (), PANEL), *indent(self.lines), "}\n"])
