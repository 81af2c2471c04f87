"""Prints a `Rows` for CUDA: which threads share a row, and whether they keep it in registers.

A row of up to 512 columns belongs to one warp (no barrier), a longer one to a block. Thread `lane` of the T threads
that share a row takes columns lane, lane + T, …, so adjacent threads read adjacent elements. Up to 16 columns per
thread are kept in registers, so the row is read once. Longer rows, and rows of symbolic length, are read again by every
pass, and what the form would keep is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qcompiler.kernels.cuda.geometry import MAX_THREADS, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.items import by_role
from qcompiler.kernels.rows import Fold, Keep, Rows, Value, expression, names_of, row_indices
from qcompiler.kernels.scalar import SCALAR_FORM
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec, Operand

WARP = 32
KEPT = 16
"""Columns per thread that stay in registers."""

WARPS_PER_BLOCK = 4
"""Rows per block if one warp owns a row."""

_SYMBOLIC_THREADS = 256
_PER_THREAD = 8
"""Target columns per thread if a block owns a row: enough loads in flight, and still many threads."""


def address(name: str, operand: Operand) -> str:
    """The address of the element in a row (its int64_t indices) and column `j`, or of element `j` of a vector."""
    terms = [name]
    for index, stride in zip(row_indices(operand), operand.strides, strict=False):
        if stride != 0:
            terms.append(index if stride == 1 else f"{index} * {c_dim(stride)}")
    if operand.strides[-1] != 0:
        terms.append("j" if operand.strides[-1] == 1 else f"(int64_t)j * {c_dim(operand.strides[-1])}")
    return " + ".join(terms)


@dataclass(frozen=True)
class RowWalk:
    """`threads` threads share a row and keep `per_thread` columns each (None: every pass reads the row again)."""

    rows: Dim
    cols: Dim
    threads: int
    per_thread: int | None

    @staticmethod
    def of(rows: Dim, cols: Dim) -> RowWalk:
        if not isinstance(cols, int):
            return RowWalk(rows, cols, _SYMBOLIC_THREADS, None)
        threads = WARP
        if cols > WARP * KEPT:
            threads = min(MAX_THREADS, 1 << (-(-cols // _PER_THREAD) - 1).bit_length())
        per_thread = -(-cols // threads)
        return RowWalk(rows, cols, threads, per_thread if per_thread <= KEPT else None)

    @property
    def by_warp(self) -> bool:
        return self.threads == WARP

    @property
    def block(self) -> int:
        """Threads per block."""
        return self.threads * WARPS_PER_BLOCK if self.by_warp else self.threads

    def geometry(self) -> Geometry:
        """One block per row, or per `WARPS_PER_BLOCK` rows."""
        rows = dim(self.rows)
        blocks = (rows + (WARPS_PER_BLOCK - 1)) // WARPS_PER_BLOCK if self.by_warp else rows
        return Geometry((blocks.to_dim(), 1, 1), (self.block, 1, 1), self.shared().nbytes)

    def shared(self) -> SharedMemory:
        memory = SharedMemory()
        if not self.by_warp:
            memory.add("partial", "float", self.threads // WARP, 4)
        return memory

    def reduce(self, kind: str, value: str) -> str:
        """`value` reduced ("sum" or "max") over the threads of the row; every one of them gets the result."""
        if self.by_warp:
            return f"qc_warp_{kind}({value})"
        return f"qc_block_{kind}<{self.threads // WARP}>({value}, partial)"

    def each(self, lines: Sequence[str], *, guard: bool = True) -> list[str]:
        """A loop over this thread's columns: `j` is the column, `i` its index among the kept ones.

        Without `guard`, kept columns past the end of the row are visited too.
        """
        if self.per_thread is None:
            return [f"for (int64_t j = lane; j < {c_dim(self.cols)}; j += {self.threads}) {{", *indent(lines), "}"]
        tail = isinstance(self.cols, int) and self.cols % self.threads != 0
        skip = [f"if (j >= {self.cols}) continue;"] if guard and tail else []
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {self.per_thread}; i++) {{",
            *indent([f"const int j = lane + {self.threads} * i;", *skip, *lines]),
            "}",
        ]

    def load(self, address: str) -> list[str]:
        """Reads the row into `kept`, with zeros past its end. Nothing if the row is not kept."""
        if self.per_thread is None:
            return []
        assert isinstance(self.cols, int)
        value = f"qc_load({address})"
        if self.cols % self.threads:
            value = f"j < {self.cols} ? {value} : 0.0f"
        return [f"float kept[{self.per_thread}];", *self.each([f"kept[i] = {value};"], guard=False)]

    def value(self, address: str) -> str:
        """The element of the loop's column."""
        return f"qc_load({address})" if self.per_thread is None else "kept[i]"

    def around(self, lines: Sequence[str]) -> list[str]:
        """The kernel's body: `row` and `lane`, then `lines` if the row exists."""
        if not self.by_warp:
            return [
                *self.shared().declarations(),
                "const int64_t row = blockIdx.x;",
                "const int lane = (int)threadIdx.x;",
                *lines,
            ]
        return [
            f"const int64_t row = (int64_t)blockIdx.x * {WARPS_PER_BLOCK} + threadIdx.x / {WARP};",
            f"const int lane = (int)threadIdx.x % {WARP};",
            f"if (row < {c_dim(self.rows)}) {{  // whole warps",
            *indent(lines),
            "}",
        ]

    def note(self) -> str:
        """The geometry in words."""
        share = f"a warp per row, {WARPS_PER_BLOCK} rows per block" if self.by_warp else "a block per row"
        kept = "read again by every pass" if self.per_thread is None else f"{self.per_thread} columns per thread kept"
        return f"{share}, {self.block} threads, {kept}"


def write(spec: KernelSpec, form: Rows) -> CudaKernel:
    """The kernel for any architecture."""
    walk, operands = RowWalk.of(form.rows, form.cols), by_role(spec)
    lines = walk.around(_row(form, operands, walk))
    head = header_comment(spec, form.note, walk.note())
    text = "\n".join([head, signature(spec, walk.block, names=list(operands)), *indent(lines), "}\n"])
    return CudaKernel(text, walk.geometry())


def _row(form: Rows, operands: Mapping[str, Operand], walk: RowWalk) -> list[str]:
    """The passes of one thread over its columns."""
    lines, result = row_statements(form, {name: each for name, each in operands.items() if name != "out"}, walk)
    out = address("out", operands["out"])
    return [*form.places(), *lines, *walk.each([f"qc_store({out}, {result});"])]


def row_statements(form: Rows, operands: Mapping[str, Operand], walk: RowWalk) -> tuple[list[str], str]:
    """The statements of one thread that read and fold a row, and the expression of its result in column `j`.

    `names` are the texts that equations read."""
    places = {name: address(name, operand) for name, operand in operands.items()}
    names = form.literals() | {name: f"qc_load({place})" for name, place in places.items()}
    names["x"] = walk.value(places["x"])
    lines, kept = walk.load(places["x"]), ""  # `kept` is the name of what the next pass holds in registers
    for step in form.steps:
        if isinstance(step, Value):
            lines.append(f"const float {step.name} = {expression(step.of, names, SCALAR_FORM)};")
        elif isinstance(step, Keep):
            names[step.name] = expression(step.of, names, SCALAR_FORM)
            kept = step.name if walk.per_thread is not None else ""
            continue
        else:
            hold: list[str] = []
            if kept and kept in names_of(step.of):
                hold = [f"kept[i] = {names[kept]};"]
                names[kept], kept = "kept[i]", ""
            lines += _fold(step, expression(step.of, names, SCALAR_FORM), hold, walk)
        names[step.name] = step.name
    return lines, expression(form.result, names, SCALAR_FORM)


def _fold(fold: Fold, value: str, hold: list[str], walk: RowWalk) -> list[str]:
    """The statements that fold a row: this thread's columns, then those of all its threads."""
    name = fold.name
    each = {
        "sum": [f"{name} += {value};"],
        "squares": [f"const float each = {value};", f"{name} = fmaf(each, each, {name});"],
        "max": [f"{name} = fmaxf({name}, {value});"],
    }[fold.kind]
    start, kind = ("-INFINITY", "max") if fold.kind == "max" else ("0.0f", "sum")
    return [
        f"float {name} = {start};",
        *walk.each([*hold, *each]),
        f"{name} = {walk.reduce(kind, name)};",
    ]
