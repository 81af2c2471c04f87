"""Several linears in one launch, as CUDA C++: each has a range of the blocks, and a block one panel of its weight.

    if (blockIdx.x < panels of linear 0) { linear 0; return; }
    linear 1, of the panels behind those

A block has all rows of x, of which there are up to eight. All blocks have as many warps as the linear that takes the
fewest, or the four that products of integers need, and shared memory and registers for the linear that needs most.
Warps share the columns, so a linear that has another number of warps in a launch of its own adds the same products in
another order there.
"""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import linear
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry
from qcompiler.kernels.cuda.panel_text import PANEL, Launch, PanelText
from qcompiler.kernels.cuda.signature import parameters, signature
from qcompiler.kernels.linears import linear_specs, places
from qcompiler.kernels.paired import in_panels
from qcompiler.kernels.text import header_comment, indent
from qcompiler.plan.kernel import KernelSpec

ENGINES = CUDA_CORES


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of a launch on `arch`."""
    specs = tuple(map(in_panels, linear_specs(spec)))
    texts = _texts(specs, arch)
    panels = [_panels(text) for text in texts]
    (threads,) = {text.geometry.threads for text in texts}
    names = [name for _, name in parameters(spec)]
    lines = [f"int64_t {PANEL} = blockIdx.x;"]
    for each, own, count in zip(specs, places(specs), panels, strict=True):
        arguments = [*(names[place] for place in own), *names[len(spec.operands) :], PANEL]
        call = f"qk_{each.name}({', '.join(arguments)});"
        if each is specs[-1]:
            lines.append(call)
        else:
            lines += [f"if ({PANEL} < {count}) {{", *indent([call, "return;"]), "}", f"{PANEL} -= {count};"]
    note = f"{len(specs)} linears, each with blocks of its own"
    head = header_comment(spec, note, f"{threads} threads a block, {sum(panels)} blocks")
    waits = not all(text.waits for text in texts)
    opened = signature(spec, threads, min(text.resident for text in texts), waits=waits)
    parts = [text.part(each) for text, each in zip(texts, specs, strict=True)]
    geometry = Geometry((sum(panels), 1, 1), (threads, 1, 1), max(text.geometry.shared for text in texts))
    engine = "mma" if any(text.engine == "mma" for text in texts) else "fma"
    return CudaKernel("\n".join([*parts, head, opened, *indent(lines), "}\n"]), geometry, engine, (note,))


def _texts(specs: tuple[KernelSpec, ...], arch: str) -> list[PanelText]:
    """The text of each linear, for blocks of equally many warps."""
    alone = [_text(spec, arch) for spec in specs]
    blocks = sum(map(_panels, alone))
    together = [_text(spec, arch, Launch(blocks)) for spec in specs]
    fewest = min(text.geometry.threads for text in together) // 32
    warps = max(fewest, *(text.least_warps for text in together))
    return [_text(spec, arch, Launch(blocks, warps)) for spec in specs]


def _text(spec: KernelSpec, arch: str, launch: Launch | None = None) -> PanelText:
    text = linear.few_rows(spec, arch, launch)
    if text is None:  # the contract has few rows and weights in panels
        raise KernelSelectionError(f"kernel '{spec.name}' ({spec.serves}): its kernel is not one of few rows")
    return text


def _panels(text: PanelText) -> int:
    """Blocks of a linear, which each take all rows of x."""
    panels, *others = text.geometry.grid
    assert isinstance(panels, int) and others == [1, 1]
    return panels
