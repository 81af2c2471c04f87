"""Loop kernels as CUDA C++: pointwise nests here, reductions in `loop_reduce`.

    const int64_t unit = (int64_t)blockIdx.x * 256 + threadIdx.x;      a unit is a group of neighbouring elements
    if (unit >= units) return;
    load the group, compute it, store it

The operands' steps decide between two forms of a pointwise nest. *flat*: every thread computes one group of neighbours
along the last loop. *tile*: an input is contiguous along another loop (a transposition), so blocks of 32 x 32 pass
through shared memory, which makes reads and writes coalesced.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cuda import loop_reduce
from qcompiler.kernels.cuda.engines import CUDA_CORES
from qcompiler.kernels.cuda.geometry import CudaKernel, SharedMemory
from qcompiler.kernels.cuda.loop_form import (
    THREADS,
    WORDS,
    Group,
    count_of,
    index_type,
    kernel,
    live_operands,
    part,
    shared_kernel,
    up,
    used_inputs,
    value_bytes,
    value_type,
    variables,
)
from qcompiler.kernels.loop_nest import Loop, Nest, build_nest
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import c_dim, indent, needed
from qcompiler.plan.dims import Expr, product
from qcompiler.plan.kernel import KernelSpec

ENGINES = CUDA_CORES

TILE = 32
_ROWS = THREADS // TILE  # rows of a tile that a block covers at once
_SHORTEST_TILED = 16  # a transposed loop shorter than this gains nothing from tiles


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """A loop kernel for any architecture. KernelSelectionError names an op that has no C++ form."""
    del arch
    nest = build_nest(spec, WORDS)
    if "reduction" in nest.body.iterators:
        return loop_reduce.emit(nest)
    partner = _transposed_loop(nest) if nest.parallel else None
    if not nest.parallel:
        return _one_element(nest)
    return _flat(nest) if partner is None else _tile(nest, partner)


def emit_part(spec: KernelSpec) -> CudaKernel:
    """A pointwise loop as one part of a launch, always in the flat form: shared memory is a kernel's own."""
    nest = build_nest(spec, WORDS)
    return part(_flat(nest) if nest.parallel else _one_element(nest), nest)


def _body(nest: Nest, values: dict[int, str], indices: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The statements of one element, and the expressions of its outputs."""
    inputs = [values.get(i, "?") for i in range(nest.inputs)] + ["?"] * len(nest.outputs)
    statements = scalar_statements(nest.program, inputs, indices)
    return list(statements.lines), statements.results


# --- flat ------------------------------------------------------------------------------------------------------------


def _one_element(nest: Nest) -> CudaKernel:
    values = {i: f"qc_load({nest.address(i, ())})" for i in used_inputs(nest)}
    lines, results = _body(nest, values, nest.indices)
    lines += [f"qc_store({nest.address(nest.inputs + i, ())}, {r});" for i, r in enumerate(results)]
    return kernel(nest, ["one element"], Expr.constant(1), 1, lines)


def _flat(nest: Nest) -> CudaKernel:
    inner, outer = nest.parallel[-1], nest.parallel[:-1]
    group = Group.of(nest, inner, outer, live_operands(nest))
    kind = index_type(nest)
    loads: list[str] = []
    values: dict[int, str] = {}
    for i in used_inputs(nest):
        statements, values[i] = group.load(i, nest.parallel)
        loads += statements
    body, results = _body(nest, values, group.indices())
    if group.width > 1:
        arrays = [f"{value_type(o)} r{i}[{group.width}];" for i, o in enumerate(nest.outputs)]
        body += [f"r{i}[v] = {result};" for i, result in enumerate(results)]
        results = tuple(f"r{i}" for i in range(len(results)))
    else:
        arrays = []
    stores = [group.store(nest.inputs + i, nest.parallel, result) for i, result in enumerate(results)]
    work = [*loads, *arrays, *group.each(body), *stores]
    walk = [*outer, *group.walk]
    units = product(loop.extent for loop in walk)
    threads = min(THREADS, 32 * up(units, 32).value or 32) if units.is_static else THREADS
    position = needed([*variables("unit", walk, kind), *group.alignment(), *group.declarations(kind)], work)
    lines = [
        f"const {kind} units = {count_of(walk)};",
        f"const {kind} unit = ({kind})blockIdx.x * {threads} + threadIdx.x;",
        "if (unit >= units) return;",
        *position,
        *work,
    ]
    note = (
        f"a thread computes {group.width} neighbours along {inner.name}" if group.width > 1 else "an element a thread"
    )
    return kernel(nest, [note], up(units, threads), threads, lines, group.limits())


# --- tile ------------------------------------------------------------------------------------------------------------


def _transposed_loop(nest: Nest) -> int | None:
    """A loop along which some input is contiguous while its step along the last loop is larger; else None."""
    inner = nest.parallel[-1]
    if _short(inner) or inner.steps[nest.inputs] != 1:
        return None
    for i in used_inputs(nest):
        if inner.steps[i] in (0, 1):
            continue
        for position, loop in enumerate(nest.parallel[:-1]):
            if loop.steps[i] == 1 and not _short(loop):
                return position
    return None


def _short(loop: Loop) -> bool:
    return loop.extent.is_static and loop.extent.value < _SHORTEST_TILED


def _tile(nest: Nest, position: int) -> CudaKernel:
    """Blocks of 32 iterations of the partner loop by 32 of the last. Transposed inputs pass through `tile<i>`."""
    partner, inner = nest.parallel[position], nest.parallel[-1]
    rest = (*nest.parallel[:position], *nest.parallel[position + 1 : -1])
    transposed = [i for i in used_inputs(nest) if partner.steps[i] == 1 and inner.steps[i] not in (0, 1)]
    kind = index_type(nest)
    shared = SharedMemory()
    fill: list[str] = []
    values: dict[int, str] = {}
    for i in transposed:
        operand = nest.spec.operands[i]
        size = value_bytes(operand.dtype)
        pitch = TILE + max(1, 4 // size)  # an odd number of words, so that a column spreads over all banks
        shared.add(f"tile{i}", value_type(operand), TILE * pitch, size)
        corner = {partner.name: "(first + across)", inner.name: "(start + row)"}
        address = nest.address(i, (*rest, partner, inner), corner)
        fill.append(f"tile{i}[row * {pitch} + across] = qc_load({address});")
        values[i] = f"tile{i}[across * {pitch} + row]"
    work: list[str] = []
    for i in used_inputs(nest):
        source = values.get(i) or f"qc_load({nest.address(i, nest.parallel)})"
        work.append(f"const {value_type(nest.spec.operands[i])} v_{nest.names[i]} = {source};")
        values[i] = f"v_{nest.names[i]}"
    body, results = _body(nest, values, nest.indices)
    work += body
    work += [f"qc_store({nest.address(nest.inputs + i, nest.parallel)}, {r});" for i, r in enumerate(results)]
    return _tile_kernel(nest, (rest, partner, inner), fill, work, shared, kind)


def _tile_kernel(
    nest: Nest,
    loops: tuple[tuple[Loop, ...], Loop, Loop],
    fill: Sequence[str],
    work: Sequence[str],
    shared: SharedMemory,
    kind: str,
) -> CudaKernel:
    rest, partner, inner = loops
    walk = [*rest, Loop("down", up(partner.extent, TILE), (), None), Loop("chunk", up(inner.extent, TILE), (), None)]
    each_row = f"for (int row = threadIdx.x / {TILE}; row < {TILE}; row += {_ROWS})"
    lines = [
        f"const {kind} unit = blockIdx.x;",
        *variables("unit", walk, kind),
        f"const {kind} first = down * {TILE};  // of {partner.name}",
        f"const {kind} start = chunk * {TILE};  // of {inner.name}",
        f"const int across = threadIdx.x % {TILE};",
        "#pragma unroll",
        f"{each_row} {{",
        f"    if (first + across < {partner.limit} && start + row < {inner.limit}) {{",
        *indent(fill, 2),
        "    }",
        "}",
        "__syncthreads();",
        "#pragma unroll",
        f"{each_row} {{",
        f"    const {kind} {partner.name} = first + row;",
        f"    const {kind} {inner.name} = start + across;",
        f"    if ({partner.name} < {partner.limit} && {inner.name} < {inner.limit}) {{",
        *indent(work, 2),
        "    }",
        "}",
    ]
    limits = [f"const int64_t {loop.limit} = {c_dim(loop.extent)};" for loop in walk[-2:]]
    note = f"{TILE} x {TILE} tiles of {partner.name} and {inner.name} through shared memory"
    grid = product(loop.extent for loop in walk)
    return shared_kernel(nest, [note], grid, THREADS, lines, limits, shared)
