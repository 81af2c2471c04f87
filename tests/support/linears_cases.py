"""Linears in one launch, each beside itself in a launch of its own: the bits must be the same.

case = beside("name", [fused, plain, …])   a launch of linears, from specs of linears that read rows of one size
case.spec                                  the launch
case.given(…), case.split(…)               the operands of all, from those of each, and back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from by_path import load

from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linears import LinearsKernel

norms, pairs = load("tests/support/norm_prologue_cases.py"), load("tests/support/pair_cases.py")
Array = Any
K = 1024
"""Columns that every format takes."""


@dataclass
class Case:
    """A launch, the linears that it has, and the operands of each, its result last."""

    spec: KernelSpec
    alone: list[KernelSpec]
    operands: list[list[Array]]
    written: list[int]
    """How many operands each linear writes, the last ones."""

    def fresh(self) -> list[Array]:
        """The operands of the launch, those that are written anew."""
        pairs = zip(self.operands, self.written, strict=True)
        return [array for own, written in pairs for array in fresh(own, written)]

    def results(self, arrays: Sequence[Array]) -> list[Array]:
        """What the linears write, of the operands of the launch."""
        found, begin = list[Array](), 0
        for own, written in zip(self.operands, self.written, strict=True):
            begin += len(own)
            found += arrays[begin - written : begin]
        return found


def fresh(operands: Sequence[Array], written: int) -> list[Array]:
    """The operands of one linear; those that it writes anew, with the same gaps between their rows."""
    made = [a.copy() if a.base is None else a.base.copy()[:, : a.shape[1]] for a in operands[-written:]]
    return [*operands[:-written], *made]


def beside(name: str, specs: Sequence[KernelSpec]) -> KernelSpec:
    """The launch of several linears."""
    operands = [
        msgspec.structs.replace(operand, name=f"{operand.name}_{number}")
        for number, spec in enumerate(specs) for operand in spec.operands
    ]  # fmt: skip
    body = LinearsKernel(linears=tuple(spec.body for spec in specs))  # type: ignore[misc]
    return KernelSpec(name=name, symbols=(), operands=tuple(operands), body=body)


def cases(layout: str, dtype: Any, ms: Sequence[int], pair_layout: str) -> list[Case]:
    """For each number of rows: formats of one and of several planes, tables and super-blocks; norms of both kinds, with
    and without rows that are kept; rows of int8 that one linear makes and another does not need, of many columns and of
    few; pairs."""
    found = []
    for m in ms:
        m_class: Any = "1" if m == 1 else "2-8"

        def normed(fmt: str, norm: str, rows: int, **more: Any) -> Any:
            return norms.make(layout, fmt, dtype, norm, m, m_class, rows=rows, cols=K, **more)  # noqa: B023

        def codes(fmt: str, norm: str | None, **more: Any) -> Any:
            return norms.make_codes(layout, fmt, dtype, norm, m, "token", cols=K, m_class=m_class, **more)  # noqa: B023

        groups = {
            "mixed": [normed("q4_K", "rms", 37), normed("q6_K", "rms", 16)],
            "kept": [normed("nf4", "layer", 37, keeps=True), normed("plain", "layer_bare", 3, has_bias=True),
                     normed("int8", "layer", 21, residual=True)],
            "added": [normed("int4", "rms", 5, added="rms", keeps=True), normed("fp8", "rms", 33, added="layer")],
            "codes": [codes("int8", "rms", keeps=True), normed("q6_K", "rms_bare", 18), codes("int4", None)],
        }  # fmt: skip
        for name, group in groups.items():
            specs = [each.fused for each in group]
            launch = beside(f"{name}_{dtype}_{m}", specs)
            written = [each.body.written for each in specs]  # type: ignore[union-attr]
            found.append(Case(launch, specs, [each.given(7 + m) for each in group], written))
        narrow = [norms.make(layout, "nf4", dtype, "rms", m, m_class, rows=21, cols=96, gap=0),
                  norms.make_codes(layout, "int8", dtype, "rms", m, "token", cols=96, m_class=m_class)]  # fmt: skip
        specs = [each.fused for each in narrow]
        found.append(Case(beside(f"narrow_{dtype}_{m}", specs), specs, [each.given(m) for each in narrow], [1, 1]))
        paired = pairs.make(pair_layout, "nf4", dtype, m_class, columns=20, has_bias=True, m=m)
        wide = norms.make(layout, "int8", dtype, "rms", m, m_class, rows=18, cols=paired.cols, gap=1)
        launch = beside(f"pairs_{dtype}_{m}", [paired.paired, wide.fused])
        found.append(Case(launch, [paired.paired, wide.fused], [paired.given(m)[0], wide.given(m)], [1, 1]))
    return found
