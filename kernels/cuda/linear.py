"""The `linear` template: which engine serves a spec.

    decision_of(spec, arch)    which of `ENGINES`: "wgmma" is linear_wgmma.py, "mma" linear_mma.py, the others
                               linear_fma.py
    weight_of(name, operand)   the struct `qk_<name>_w` (weights.py), from which both engines decode tiles
    finish_of(spec)            the function `qk_<name>_finish` (linear_finish.py), which all engines end with

Nothing here depends on a format: weights.py takes codes, entries and arithmetic from its declaration.
"""

from __future__ import annotations

from typing import Literal

from qcompiler.kernels.cuda import (
    engines,
    im2col,
    linear_fma,
    linear_int8,
    linear_int8_tiles,
    linear_mma,
    linear_norm,
    linear_statistics,
    linear_wgmma,
)
from qcompiler.kernels.cuda.engines import GROUPS, IN_TILES, Engine, Mma, On, OneOf, Shared
from qcompiler.kernels.cuda.geometry import CudaKernel, check_extent
from qcompiler.kernels.cuda.linear_finish import linear_body
from qcompiler.kernels.cuda.panel_text import Launch, PanelText
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.kernels.cuda.weights import LAYOUT, Weight, weight_of
from qcompiler.kernels.paired import in_panels
from qcompiler.plan.kernel import DType, KernelSpec

__all__ = ["ENGINES", "LAYOUT", "check", "decision_of", "emit", "engine_of", "facts_of", "linear_body", "weight_of"]

ENGINES = (
    Engine("few_mma", "few rows, tensor cores", (
        OneOf("rows", ("1", "2-8")), IN_TILES, OneOf("x", ("rows",)), Mma(),
    )),
    Engine("few_fma", "few rows, CUDA cores", (OneOf("rows", ("1", "2-8")), IN_TILES, OneOf("x", ("rows",)))),
    Engine("wgmma", "Hopper's tensor cores", (
        On(90), OneOf("rows", ("large",)), IN_TILES, OneOf("x", ("rows",)), Mma(), GROUPS, Shared("wgmma shared bytes"),
    )),
    Engine("mma", "tensor cores", (
        OneOf("rows", ("9-64", "large")), IN_TILES, Mma(), GROUPS, Shared("mma shared bytes"),
    )),
    Engine("fma", "CUDA cores"),
)  # fmt: skip


def facts_of(x: DType, weight: Weight, m_class: str, *, windows: bool, reserved: int = 0) -> engines.Facts:
    """What `ENGINES` ask of a linear, which needs `reserved` bytes of shared memory beside the tiles."""
    groups, shared = linear_mma.takes(weight), linear_mma.least_shared(m_class, windows=windows) + reserved
    facts = engines.linear_facts(x, weight, m_class, windows=windows, groups=groups, shared=shared)
    return {**facts, "wgmma shared bytes": linear_wgmma.least_shared() + reserved}


def decision_of(spec: KernelSpec, arch: str) -> engines.EngineChoice:
    """The engine of a linear on `arch`, and why not the others."""
    spec = in_panels(spec)
    body, (x, w) = linear_body(spec), spec.operands[:2]
    weight, reserved = weight_of(spec.name, w), linear_statistics.reserved_by(spec)
    facts = facts_of(x.dtype, weight, body.m_class, windows=body.window is not None, reserved=reserved)
    return engines.choose(ENGINES, facts, arch_number(arch))


def engine_of(spec: KernelSpec, arch: str) -> Literal["fma", "mma", "wgmma"]:
    """The module that emits it: "wgmma" or "mma" for many rows on tensor cores, else "fma"."""
    key = decision_of(spec, arch).key
    return "wgmma" if key == "wgmma" else "mma" if key == "mma" else "fma"


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of one linear on `arch`. KernelSelectionError for operands without a kernel."""
    spec = in_panels(spec)
    few = few_rows(spec, arch)
    if few is not None:
        return few.kernel(spec)
    if linear_body(spec).codes:
        tiles = linear_int8_tiles.takes(spec, arch)
        return linear_int8_tiles.emit(spec, arch) if tiles else linear_int8.emit_many(spec, arch)
    engine = decision_of(spec, arch).key
    linear_norm.check(spec, engine)
    match engine:
        case "wgmma":
            return linear_wgmma.emit(spec, arch)
        case "mma":
            return linear_mma.emit(spec, arch)
        case _:
            return linear_fma.emit_tiled(spec)


def few_rows(spec: KernelSpec, arch: str, launch: Launch | None = None) -> PanelText | None:
    """The text of a linear with an engine for few rows, perhaps in a `launch` of several. None for other engines. The
    spec is `in_panels`."""
    if linear_body(spec).codes:
        return linear_int8.few(spec, arch, launch) if linear_body(spec).m_class in ("1", "2-8") else None
    check(spec)
    match decision_of(spec, arch).key:
        case "few_mma" | "few_fma" as engine:
            return linear_fma.few(spec, arch, mma=engine == "few_mma", launch=launch)
        case _:
            return None


def check(spec: KernelSpec) -> None:
    """KernelSelectionError for weights or im2col windows too large for the 32-bit counts of CUDA kernels."""
    body = linear_body(spec)
    check_extent(spec, spec.operands[1], 0)
    check_extent(spec, spec.operands[1], 1)
    if body.window is not None:
        im2col.check(spec, body.window)
