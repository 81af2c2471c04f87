"""Selects the kernel for an op: candidates with preconditions in order of preference, and why others were refused.

A linear whose number of rows M is only known at run time gets several *cases*, one per range of M. The plan holds them
as one explicit `select` step. The spec and the architecture then decide which engine a CUDA kernel uses (tensor cores
or not): kernels/cuda/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu import emit as cpu
from qcompiler.kernels.cpu import linear_int8 as linear_int8_cpu
from qcompiler.kernels.cpu.weights import PANEL_LAYOUTS
from qcompiler.kernels.cuda import emit as cuda
from qcompiler.kernels.cuda import int8_product as linear_int8_cuda
from qcompiler.kernels.layouts import pairs
from qcompiler.plan.dims import Range
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.pairs import PAIR_LAYOUTS

MClass = Literal["1", "2-8", "9-64", "large"]
FLOATS: tuple[DType, ...] = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class LinearQuery:
    """What selection knows about a linear: the range of M, the weight's shape, element types, format and target."""

    m: Range
    n: int
    k: int
    x_dtype: DType
    out_dtype: DType
    format: FormatRef | None
    constant_weight: bool
    kind: str
    isas: tuple[str, ...]
    """All instruction sets or architectures that the plan must serve."""
    codes: bool = False
    """Whether x is int8 rows, so that the kernel multiplies codes."""
    pairs: bool = False
    """Whether the epilogue combines rows of the weight's two halves, which needs a layout of its own."""


@dataclass(frozen=True)
class Candidate:
    """A kernel for M in `m` (inclusive; None: no upper bound).

    `refuses` returns why it cannot serve an op on an instruction set; None if it can.
    """

    name: str
    m_class: MClass
    m: tuple[int, int | None]
    refuses: Callable[[LinearQuery, str], str | None]


@dataclass(frozen=True)
class Case:
    """Use `m_class` when M <= `max` (None: always)."""

    max: int | None
    m_class: MClass


@dataclass(frozen=True)
class KernelChoice:
    """The cases in ascending order of `max`, the weight's layout, and why other candidates were refused."""

    cases: tuple[Case, ...]
    layout: str | None
    rejected: tuple[tuple[str, str], ...]


def _refuses_types(query: LinearQuery, isa: str) -> str | None:
    for what, dtype in (("x", query.x_dtype), ("the result", query.out_dtype)):
        if dtype not in FLOATS:
            return f"{what} is {dtype}; it takes {', '.join(FLOATS)}"
    return None


def _refuses_gemv(query: LinearQuery, isa: str) -> str | None:
    if query.m != (1, 1):
        return f"M is in {list(query.m)}, it needs M = 1 by the entry point's ranges"
    return _refuses_types(query, isa)


LINEAR_CPU: tuple[Candidate, ...] = (
    Candidate("linear.gemv", "1", (1, 1), _refuses_gemv),
    Candidate("linear.small", "2-8", (1, 8), _refuses_types),
    Candidate("linear.large", "large", (9, None), _refuses_types),
)
"""`small` decodes in registers and never stores a panel. `large` decodes each panel once for many rows."""

LINEAR_CUDA: tuple[Candidate, ...] = (
    Candidate("linear.gemv", "1", (1, 1), _refuses_gemv),
    Candidate("linear.small", "2-8", (1, 8), _refuses_types),
    Candidate("linear.medium", "9-64", (9, 64), _refuses_types),
    Candidate("linear.large", "large", (65, None), _refuses_types),
)
"""`medium` splits K over the warps of a block, since few rows give few blocks. `large` has enough blocks."""

LINEAR: dict[str, tuple[Candidate, ...]] = {"cpu": LINEAR_CPU, "cuda": LINEAR_CUDA}
"""Candidates by kind of target."""

LAYOUTS: dict[str, tuple[str, ...]] = {"cpu": PANEL_LAYOUTS, "cuda": ("cuda_t16_v1",)}
"""Layouts of constant weights by kind of target. A later one has other bytes only for formats that it makes smaller."""


def weight_layout(kind: str, *refs: FormatRef | None) -> str:
    """The layout of a target's constant weights in a format (None: plain ones), or of several weights in theirs: the
    first in LAYOUTS, unless a later one lets entries share bytes that do not there."""
    first, *later = LAYOUTS[kind]
    fields = [f for ref in refs if ref is not None for f in formats.get(ref.name, **ref.params).declaration.fields]
    joins = (name for name in later if any(f.covers != 1 and f.bits in layouts.in_panels(name).JOINS for f in fields))
    return next(joins, first)


def _refuses_result(query: LinearQuery, isa: str) -> str | None:
    return None if query.out_dtype in FLOATS else f"the result is {query.out_dtype}; it takes {', '.join(FLOATS)}"


INT8: dict[str, tuple[Candidate, ...]] = {
    "cpu": (Candidate("linear.int8", "large", (1, None), _refuses_result),),
    "cuda": (
        Candidate("linear.int8.few", "2-8", (1, 8), _refuses_result),
        Candidate("linear.int8.medium", "9-64", (9, 64), _refuses_result),
        Candidate("linear.int8.large", "large", (65, None), _refuses_result),
    ),
}
"""Candidates for products of codes (`LinearQuery.codes`). The kernel chooses the instruction: see `engines`."""


def engines(query: LinearQuery) -> list[tuple[str, str]]:
    """The ways of multiplying codes that were passed over on the query's targets, with the reason, best first."""
    passed_over = linear_int8_cpu.passed_over if query.kind == "cpu" else linear_int8_cuda.passed_over
    found: dict[str, list[str]] = {}
    for isa in query.isas:
        for name, reason in passed_over(isa):
            found.setdefault(f"linear.int8.{name}", []).append(f"{isa}: {reason}")
    return [(name, "; ".join(reasons)) for name, reasons in found.items()]


def _served(low: int, high: int, covered: int, last: int | None) -> str:
    """Why a candidate that could run has no M left: `covered` is the largest M that has a kernel."""
    if last is not None and last < low:
        return f"it serves M <= {last}, M is at least {low}"
    top = min(covered, high)
    return f"M = {low} is already served" if top == low else f"M in [{low}, {top}] is already served"


def choose_linear(query: LinearQuery) -> KernelChoice:
    """The kernels that together cover the query's range of M. KernelSelectionError with every reason if none do.

    All instruction sets of the query share the plan, so a kernel that one of them cannot run is refused for all.
    """
    low, high = query.m
    rejected: list[tuple[str, str]] = []
    cases: list[Case] = []
    covered = low - 1  # M values up to here have a kernel
    candidates = LINEAR[query.kind]
    if query.codes:
        candidates = INT8[query.kind]
    for candidate in candidates:
        first, last = candidate.m
        reason = _refusal(candidate, query)
        if reason is None and (covered >= high or (last is not None and last <= covered)):
            reason = _served(low, high, covered, last)
        if reason is None and first > high:
            reason = f"it serves M >= {first}, M is at most {high}"
        if reason is not None:
            rejected.append((candidate.name, reason))
            continue
        covered = high if last is None else last
        cases.append(Case(None if covered >= high else last, candidate.m_class))
    if covered < high or not cases:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise KernelSelectionError(f"no linear kernel covers M in [{low}, {high}] ({reasons})")
    layout = weight_layout(query.kind, query.format) if query.constant_weight else None
    if query.pairs:
        layout = pairs_layout(query)
    rejected += engines(query) if query.codes else []
    return KernelChoice(tuple(cases), layout, tuple(rejected))


def pairs_layout(query: LinearQuery) -> str:
    """The layout in which rows of both halves share panels. KernelSelectionError if the weight cannot have it."""
    fmt = None if query.format is None else formats.get(query.format.name, **query.format.params)
    why = pairs.obstacle(fmt, query.k) if query.constant_weight else "it is computed by the program"
    if why is not None:
        raise KernelSelectionError(
            f"a linear combines pairs of rows, and its weight cannot be put in their order: {why}; "
            "turn the pass fuse-glu off for it with QuantConfig(separate=…)"
        )
    return next(name for name, plain in PAIR_LAYOUTS.items() if plain == weight_layout(query.kind, query.format))


def _refusal(candidate: Candidate, query: LinearQuery) -> str | None:
    """Why a candidate cannot serve all of the query's instruction sets; None if it can."""
    reasons = {isa: reason for isa in query.isas if (reason := candidate.refuses(query, isa)) is not None}
    if len(set(reasons.values())) == 1 and len(reasons) == len(query.isas):
        return next(iter(reasons.values()))
    return "; ".join(f"on {isa}: {reason}" for isa, reason in reasons.items()) or None


def templates(kind: str) -> tuple[str, ...]:
    """The templates that a kind of target has kernels for."""
    return cpu.TEMPLATES if kind == "cpu" else cuda.TEMPLATES
