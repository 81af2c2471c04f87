"""Which kernel serves a linear in each format and class of rows on a machine, and why not the better one.

    kernel_table("cpu", "x86-64-v4", flags)     the CPU of this machine, or any other set of flags of /proc/cpuinfo
    kernel_table("cuda", "sm_90a")

The answers come from where a compilation has them: kernels/select.py chooses the kernel, kernels/cuda/engines.py the
engine, and formats/integer_product.py says which codes are multiplied as integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qcompiler import formats
from qcompiler.config import parse_format
from qcompiler.formats.integer_product import integer_product
from qcompiler.kernels.cpu import fp32_tiles
from qcompiler.kernels.cpu import linear as cpu_linear
from qcompiler.kernels.cpu import linear_int8 as cpu_int8
from qcompiler.kernels.cuda import engines
from qcompiler.kernels.cuda import int8_product as cuda_int8
from qcompiler.kernels.cuda import linear as cuda_linear
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.select import INT8, LINEAR, LinearQuery, MClass, choose_linear, weight_layout
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.runtime.amx import BF16_FLAGS, INT8_FLAGS
from qcompiler.runtime.isa import missing_for

N = K = 4096
"""The linear that is asked about: blocks and groups of all formats divide it."""

CLASSES: dict[str, tuple[int, int]] = {"1": (1, 1), "2-8": (2, 8), "9-64": (9, 64), "65+": (65, N)}
PLAIN = "float"
"""A weight that is not quantised."""

Compute = Literal["fp32", "bf16", "f16", "int8"]
DTYPES: dict[Compute, DType] = {"fp32": "f32", "bf16": "bf16", "f16": "f16"}


@dataclass(frozen=True)
class Served:
    """A linear with a weight in `format` on `target`, for rows of class `m`.

    `compute` is what it computes in: the model's type or the recipe's `compute`.  `kernel` is None where there is none;
    `units` are the instructions that multiply.  `why_not` names better ways, each with the reason against it.
    """

    target: str
    compute: Compute
    format: str
    m: str
    kernel: str | None
    units: str
    why_not: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "why_not": [list(each) for each in self.why_not]}


@dataclass(frozen=True)
class Asked:
    """What `QC_INT8` and `QC_BF16` ask for, and why the system refuses the tiles that the processor has."""

    int8: str
    bf16: str
    refused: str | None


def kernel_table(
    kind: Literal["cpu", "cuda"],
    isa: str,
    flags: Collection[str] | None = None,
    names: Sequence[str] | None = None,
    int8: str = "amx",
    bf16: str = "amx",
    refused: str | None = None,
) -> list[Served]:
    """A row for each way to compute, format and class of rows. `flags` are the processor's (None: not known). By
    default all formats with their default parameters, and plain weights. `int8`, `bf16`: what
    `QC_INT8` and `QC_BF16` ask for; `refused`: why the system refuses the tiles that the processor has."""
    asked = Asked(int8, bf16, refused)
    computes: tuple[Compute, ...] = ("fp32", "bf16", "int8") if kind == "cpu" else ("fp32", "bf16", "f16", "int8")
    wanted = (PLAIN, *formats.names()) if names is None else names
    return [row for compute in computes for name in wanted for row in _format(kind, isa, flags, compute, name, asked)]


def _format(
    kind: Literal["cpu", "cuda"],
    isa: str,
    flags: Collection[str] | None,
    compute: Compute,
    name: str,
    asked: Asked,
) -> Iterator[Served]:
    ref = None if name == PLAIN else parse_format(name)
    if compute == "int8" and (why := _no_integers(ref)) is not None:
        yield from (Served(isa, compute, name, m, None, "", (("products of codes", why),)) for m in CLASSES)
        return
    dtype = DTYPES.get(compute, "f32")
    operand = Operand(
        name="w", dtype=dtype, access="r", shape=(N, K), strides=() if ref is not None else (K, 1), format=ref,
        layout=weight_layout(kind, ref),
    )  # fmt: skip
    weight = weight_of("asked", operand) if kind == "cuda" else None
    for m, rows in CLASSES.items():
        (case,) = choose_linear(LinearQuery(
            m=rows, n=N, k=K, x_dtype=dtype, out_dtype=dtype, format=ref, constant_weight=True, kind=kind, isas=(isa,),
            codes=compute == "int8",
        )).cases  # fmt: skip
        candidates = INT8[kind] if compute == "int8" else LINEAR[kind]
        kernel = next(each.name for each in candidates if each.m_class == case.m_class)
        if weight is None:
            cpu = (
                _cpu_int8(isa, flags, asked)
                if compute == "int8"
                else _cpu(isa, flags, compute, operand, asked, case.m_class)
            )
            units, why_not = cpu
        else:
            units, why_not = _cuda(isa, compute, weight, case.m_class)
        yield Served(isa, compute, name, m, kernel, units, tuple(why_not))


def _no_integers(ref: FormatRef | None) -> str | None:
    """Why codes of a format are not multiplied as integers; None if they are."""
    if ref is None:
        return "a weight that is not quantised has no codes"
    found = integer_product(formats.get(ref.name, **ref.params))
    return found.replace(f"codes of {ref.name}", "its codes") if isinstance(found, str) else None


# --- the CPU ---------------------------------------------------------------------------------------------------------

VECTORS = {"x86-64-v4": "AVX-512", "x86-64-v3": "AVX2"}
PLAIN_VECTORS = "plain C++"
Reasons = list[tuple[str, str]]


def _wider(isa: str, flags: Collection[str] | None) -> Reasons:
    """Why there are no wider vectors."""
    wider = [] if isa == "x86-64-v4" else [("AVX-512", _lacks("x86-64-v4", flags))]
    return wider if isa in VECTORS else [*wider, ("AVX2", _lacks("x86-64-v3", flags))]


def _cpu(
    isa: str, flags: Collection[str] | None, compute: Compute, weight: Operand, asked: Asked, m_class: MClass
) -> tuple[str, Reasons]:
    """The instructions that multiply, and the better ones that do not."""
    vectors, wider = VECTORS.get(isa, PLAIN_VECTORS), _wider(isa, flags)
    has_tiles = flags is not None and {*BF16_FLAGS} <= {*flags}
    no_tiles = asked.refused if asked.bf16 == "amx" else "QC_BF16=dots asks for pairs"
    if compute == "fp32":
        if not has_tiles or m_class != "large" or not fp32_tiles.multiplies(weight, isa):
            return f"{vectors}, fp32", wider
        if no_tiles is None:
            return "AMX, fp32 as three numbers of bf16", wider
        return f"{vectors}, fp32", [*wider, ("AMX", no_tiles)]
    lacking = "this processor lacks avx512_bf16" if flags is not None and "avx512_bf16" not in flags else None
    x = Operand(name="x", dtype="bf16", access="r", shape=(1, K), strides=(K, 1))
    body = LinearKernel(m=1, n=N, k=K, m_class="1", has_bias=False)
    spec = KernelSpec(name="asked", symbols=(), operands=(x, weight), body=body)
    if not cpu_linear.multiplies_bf16(spec, isa):
        return f"{vectors}, fp32 of numbers in bf16", [*wider, ("pairs of bf16", "need x86-64-v4 and AVX512-BF16")]
    if (group := cpu_linear.weight_of("asked", weight).group) % 2:
        return f"{vectors}, fp32 of numbers in bf16", [("pairs of bf16", f"groups of {group} columns are not even")]
    if lacking is not None:
        return f"{vectors}, fp32 of numbers in bf16", [("pairs of bf16", lacking)]
    pairs = "AVX512-BF16, pairs of bf16"
    if not has_tiles:
        return pairs, []
    if no_tiles is None:
        return f"AMX from 2 to 6 rows on, by format, else {pairs}", []
    return pairs, [("AMX", no_tiles)]


VNNI = {"x86-64-v4": ("AVX-512 VNNI", ("avx512_vnni", "avx512vbmi")), "x86-64-v3": ("AVX-VNNI", ("avx_vnni",))}
"""The dot product of bytes of an instruction set, and the features that it needs beyond it."""

TILED = "AMX from 8 to 14 rows on, by format, else AVX-512 VNNI"


def _cpu_int8(isa: str, flags: Collection[str] | None, asked: Asked) -> tuple[str, Reasons]:
    int8, refused = asked.int8, asked.refused
    vectors, wider = VECTORS.get(isa, PLAIN_VECTORS), _wider(isa, flags)
    if isa not in VNNI:
        return f"{vectors}, integers", [*wider, *cpu_int8.passed_over(isa)]
    pairs, (vnni, needs) = f"{vectors}, pairs of integers", VNNI[isa]
    if int8 == "pairs":
        return pairs, [*wider, (vnni, "QC_INT8=pairs asks for pairs")]
    if lacks := [flag for flag in needs if flags is not None and flag not in flags]:
        return pairs, [*wider, (vnni, f"this processor lacks {', '.join(lacks)}")]
    if isa == "x86-64-v4" and flags is not None and {*INT8_FLAGS} <= {*flags}:
        if int8 == "amx" and refused is None:
            return TILED, wider
        return vnni, [*wider, ("AMX", refused if int8 == "amx" and refused else "QC_INT8=vnni asks for AVX-512 VNNI")]
    return vnni, wider


def _lacks(isa: str, flags: Collection[str] | None) -> str:
    if flags is None:
        return "this system does not tell which instructions its processor has"
    missing = missing_for(isa, flags)
    return f"this processor lacks {', '.join(missing)}" if missing else "the target has less than this processor"


# --- GPUs ------------------------------------------------------------------------------------------------------------


def _cuda(arch: str, compute: Compute, weight: Weight, m_class: MClass) -> tuple[str, Reasons]:
    if compute == "int8":
        better = [each for each in cuda_int8.passed_over(arch) if each[0] == "mma"]
        return ("CUDA cores, dp4a" if better else "tensor cores, int8"), [("tensor cores", why) for _, why in better]
    facts = cuda_linear.facts_of(DTYPES[compute], weight, m_class, windows=False)
    decision = engines.choose(cuda_linear.ENGINES, facts, arch_number(arch))
    keys = [engine.name for engine in cuda_linear.ENGINES]
    before = keys[: keys.index(decision.engine.name)]
    rows = {name: why for name, why in decision.rejected if name in before and not why.startswith("rows is")}
    return decision.engine.name, list(rows.items())


# --- as text ---------------------------------------------------------------------------------------------------------


def table_text(rows: Sequence[Served]) -> str:
    """A line for each way to compute and the formats that are served in the same way, with the reasons below it."""
    lines: list[str] = []
    for compute in dict.fromkeys(row.compute for row in rows):
        lines.append(f"linears on {rows[0].target} that compute in {compute}, by rows of x:")
        for names, own in _alike([row for row in rows if row.compute == compute]):
            kernels = {row.m: (row.kernel or "none", row.units) for row in own}
            said = "all formats" if len(names) == len(formats.names()) + 1 else ", ".join(names)
            lines += [f"  {said}", *(f"    {line}" for line in _classes(kernels))]
            reasons = dict.fromkeys(f"not {better}: {why}" for row in own for better, why in row.why_not)
            lines += [f"    {reason}" for reason in reasons]
    return "\n".join(lines)


def _alike(rows: Sequence[Served]) -> list[tuple[list[str], list[Served]]]:
    """Formats with equal rows, and the rows of the first of them."""
    groups: dict[object, tuple[list[str], list[Served]]] = {}
    for name in dict.fromkeys(row.format for row in rows):
        own = [row for row in rows if row.format == name]
        key = tuple((row.m, row.kernel, row.units, row.why_not) for row in own)
        groups.setdefault(key, ([], own))[0].append(name)
    return list(groups.values())


def _classes(kernels: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Classes of rows with equal kernels in one part: `1: linear.gemv; 2-8: linear.small (AVX-512, fp32)`."""
    for units in dict.fromkeys(units for _, units in kernels.values()):
        parts: dict[str, list[str]] = {}
        for m, (kernel, used) in kernels.items():
            if used == units:
                parts.setdefault(kernel, []).append(m)
        said = "; ".join(f"M {', '.join(classes)}: {kernel}" for kernel, classes in parts.items())
        yield said + (f" ({units})" if units else "")
