"""Parts of loop kernels: index types, loop variables from a flat index, and groups of neighbours.

A thread computes a *group*: `width` neighbouring iterations of one loop. Operands that are contiguous along that loop
are accessed 16 bytes at a time if the launch's addresses allow it (one test, the same for all threads), and element by
element otherwise. Either way the same statements compute every element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import part_signature, signature
from qcompiler.kernels.loop_nest import Loop, Nest
from qcompiler.kernels.text import VALUE_TYPES, c_dim, header_comment, indent, needed
from qcompiler.plan.dims import Dim, Expr, dim, product
from qcompiler.plan.kernel import ITEMSIZE, Operand

THREADS = 256
"""Threads of a block: eight warps, a size that fills a multiprocessor of every architecture."""

WIDEST = 8
"""The most elements of a group: 16 bytes of bf16, two accesses of f32."""

_WORDS = """
across aligned block blockDim blockIdx chunk down gridDim group lane mask n other output outputs slice start
threadIdx total unit units v warp whole
"""
WORDS = frozenset(_WORDS.split()) | {f"{stem}{i}" for stem in ("tile", "partial", "other", "next") for i in range(64)}
"""Names that the emitted kernels use themselves."""


def index_type(nest: Nest) -> str:
    """`int` if no index and no offset can reach 2^31, else `int64_t`."""
    if not all(loop.extent.is_static for loop in nest.loops):
        return "int64_t"
    reaches = [product(loop.extent for loop in nest.loops)]
    for i in range(len(nest.spec.operands)):
        terms = [*((loop.extent, loop.steps[i]) for loop in nest.loops), (Expr.constant(1), nest.offsets[i])]
        if not all(step.is_static for _, step in terms):
            return "int64_t"
        reaches.append(Expr.constant(sum(extent.value * abs(step.value) for extent, step in terms)))
    return "int" if all(reach.value < 2**30 for reach in reaches) else "int64_t"


def live_operands(nest: Nest) -> list[int]:
    """Inputs that the body reads, and all outputs."""
    return [i for i in range(len(nest.spec.operands)) if i >= nest.inputs or nest.used(i)]


def used_inputs(nest: Nest) -> list[int]:
    return [i for i in range(nest.inputs) if nest.used(i)]


def value_type(operand: Operand) -> str:
    return VALUE_TYPES[operand.dtype]


def value_bytes(dtype: str) -> int:
    """Bytes of a value in registers or shared memory: bf16 and f16 are floats there."""
    return 4 if dtype in ("bf16", "f16") else ITEMSIZE[dtype]


def count_of(loops: Sequence[Loop]) -> str:
    """The number of iterations of all loops together, as C++ text."""
    return " * ".join(loop.limit for loop in loops) or "1"


def up(value: Expr | Dim, divisor: int) -> Expr:
    """value / divisor, rounded up."""
    return (dim(value) + (divisor - 1)) // Expr.constant(divisor)


def variables(flat: str, loops: Sequence[Loop], kind: str) -> list[str]:
    """Declarations that split a flat index into the loops' variables, the last loop fastest."""
    lines: list[str] = []
    for position, loop in reversed(list(enumerate(loops))):
        if position == 0:
            lines.append(f"const {kind} {loop.name} = {flat};")
            break
        rest = f"q_{position}"
        lines += [f"const {kind} {loop.name} = {flat} % {loop.limit};", f"const {kind} {rest} = {flat} / {loop.limit};"]
        flat = rest
    return lines


# --- groups ----------------------------------------------------------------------------------------------------------


def _multiple(value: Expr, divisor: int) -> bool:
    """Whether `value` is a multiple of `divisor` for all values of its symbols."""
    return value % Expr.constant(divisor) == 0


@dataclass(frozen=True)
class Group:
    """`width` neighbouring iterations of `loop`. `others` are the loops around it; `operands` are those it may
    access."""

    nest: Nest
    loop: Loop
    others: tuple[Loop, ...]
    operands: tuple[int, ...]
    width: int

    @staticmethod
    def of(nest: Nest, loop: Loop, others: Sequence[Loop], operands: Sequence[int]) -> Group:
        """The widest group for which every row allows wide accesses (as far as strides are known)."""
        contiguous = [i for i in operands if loop.steps[i] == 1]
        width = 1
        if contiguous:
            width = 4 if all(ITEMSIZE[nest.spec.operands[i].dtype] >= 4 for i in contiguous) else WIDEST
        while width > 1 and not _fits(nest, loop, others, contiguous, width):
            width //= 2
        return Group(nest, loop, tuple(others), tuple(operands), width)

    @property
    def units(self) -> Expr:
        """The number of groups in the loop."""
        return up(self.loop.extent, self.width)

    @property
    def even(self) -> bool:
        """Whether every group is full."""
        return _multiple(self.loop.extent, self.width)

    @property
    def walk(self) -> list[Loop]:
        """The loop over groups: the loop itself for single elements, none if one group covers the loop."""
        if self.width == 1:
            return [self.loop]
        return [] if self.units == 1 else [Loop("group", self.units, (), None)]

    def limits(self) -> list[str]:
        return [f"const int64_t group_end = {c_dim(self.units)};"] if self.width > 1 else []

    def declarations(self, kind: str) -> list[str]:
        """Declares the loop's variable from `group`, the number of elements, and whether wide accesses are allowed."""
        if self.width == 1:
            return []
        name = self.loop.name
        count = f"{self.width}" if self.even else f"(int)qc_min({self.width}, {self.loop.limit} - {name})"
        full = "aligned" if self.even else f"aligned && n == {self.width}"
        return [
            f"const {kind} {name} = {f'group * {self.width}' if self.walk else '0'};",
            f"const int n = {count};",
            f"const bool whole = {full};",
        ]

    def alignment(self) -> list[str]:
        """The alignment test, which has the same result for all threads of a launch."""
        if self.width == 1:
            return []
        tests = [_aligned(self.nest, i, self.others, self.width) for i in self.operands if self.loop.steps[i] == 1]
        return ["const bool aligned = " + "\n        && ".join(tests) + ";"]

    def indices(self) -> list[str]:
        """The C++ text of each axis for linalg.index, inside the loop over `v`."""
        moved = f"({self.loop.name} + v)" if self.width > 1 else self.loop.name
        return [moved if text == self.loop.name else text for text in self.nest.indices]

    def load(self, i: int, loops: Sequence[Loop]) -> tuple[list[str], str]:
        """Statements that load an input's group, and the expression of element `v`."""
        name, kind = f"v_{self.nest.names[i]}", value_type(self.nest.spec.operands[i])
        address, step = self.nest.address(i, loops), self.loop.steps[i]
        if self.width == 1 or step == 0:
            return [f"const {kind} {name} = qc_load({address});"], name
        call = f"qc_load_group({address}, whole, n, {name});"
        if step != 1:
            call = f"qc_load_strided({address}, {c_dim(step)}, n, {name});"
        return [f"{kind} {name}[{self.width}];", call], f"{name}[v]"

    def store(self, i: int, loops: Sequence[Loop], value: str) -> str:
        """The statement that writes an output. `value` is an array for a group, or one value."""
        address, step = self.nest.address(i, loops), self.loop.steps[i]
        if self.width == 1:
            return f"qc_store({address}, {value});"
        if step == 1:
            return f"qc_store_group({address}, whole, n, {value});"
        return f"qc_store_strided({address}, {c_dim(step)}, n, {value});"

    def each(self, lines: Sequence[str]) -> list[str]:
        """`lines` for every element of the group."""
        if self.width == 1:
            return list(lines)
        return ["#pragma unroll", f"for (int v = 0; v < {self.width}; v++) {{", *indent(lines), "}"]


def _access(operand: Operand, width: int) -> int:
    """Elements per access of a group: 16 bytes, or the whole group if that is less."""
    return min(width, 16 // ITEMSIZE[operand.dtype])


def _fits(nest: Nest, loop: Loop, others: Sequence[Loop], contiguous: Sequence[int], width: int) -> bool:
    """Whether groups of this width start aligned to their accesses in every row, as far as static sizes tell."""
    if others and loop.extent.is_static and not _multiple(loop.extent, width):
        return False
    if loop.extent.is_static and loop.extent.value < width:
        return False
    return all(
        not step.is_static or _multiple(step, _access(nest.spec.operands[i], width))
        for i in contiguous
        for step in (each.steps[i] for each in others)
    )


def _aligned(nest: Nest, i: int, others: Sequence[Loop], width: int) -> str:
    """The C++ test whether all rows of an operand are aligned to its accesses."""
    operand = nest.spec.operands[i]
    size, elements = ITEMSIZE[operand.dtype], _access(operand, width)
    base = nest.address(i, ())
    terms = [f"(uint64_t){base if base == nest.names[i] else f'({base})'}"]
    steps = dict.fromkeys(each.steps[i] for each in others)
    terms += [f"(uint64_t)({c_dim(step)} * {size})" for step in steps if not _multiple(step, elements)]
    joined = terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"
    return f"{joined} % {size * elements} == 0"


# --- whole kernels ---------------------------------------------------------------------------------------------------


BLOCK = "blockIdx.x"
PART_BLOCK = "block"
"""The number of a kernel's block; of a block of one part of a launch."""


def part(kernel: CudaKernel, nest: Nest) -> CudaKernel:
    """A kernel without shared memory as a function that the kernel of a launch of several parts calls.

    Its last parameter is the number of the block; threads past its own block size do not call it.
    """
    assert not kernel.geometry.shared
    own = signature(nest.spec, kernel.geometry.threads, names=nest.names)
    assert kernel.text.count(own) == 1
    text = kernel.text.replace(own, part_signature(nest.spec, nest.names, PART_BLOCK)).replace(BLOCK, PART_BLOCK)
    return CudaKernel(text, kernel.geometry, notes=kernel.notes)


def kernel(
    nest: Nest, notes: Sequence[str], grid: Expr, threads: int, lines: Sequence[str], limits: Sequence[str] = ()
) -> CudaKernel:
    """A kernel around `lines`, with a one-dimensional grid and no shared memory; see `shared_kernel`."""
    return shared_kernel(nest, notes, grid, threads, lines, limits, SharedMemory())


def shared_kernel(
    nest: Nest,
    notes: Sequence[str],
    grid: Expr,
    threads: int,
    lines: Sequence[str],
    limits: Sequence[str],
    shared: SharedMemory,
) -> CudaKernel:
    """The text: comment, head, the limits that `lines` use, `lines`."""
    kind = index_type(nest)
    declared = [line.replace("int64_t", kind, 1) for line in [*nest.limits(), *limits]]
    body = [*shared.declarations(), *needed(declared, lines), *lines]
    geometry = Geometry((grid.to_dim(), 1, 1), (threads, 1, 1), shared.nbytes)
    where = f"{threads} threads a block, {grid} blocks"
    if shared.nbytes:
        where += f", {shared.nbytes} bytes of shared memory"
    head = [header_comment(nest.spec, *notes, where), signature(nest.spec, threads, names=nest.names)]
    return CudaKernel("\n".join([*head, *indent(body), "}\n"]), geometry, notes=tuple(notes))
