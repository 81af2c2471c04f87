"""How norm and softmax walk a matrix: which threads share a row, and whether they keep it in registers.

A row of up to 512 columns belongs to one warp (no barrier), a longer one to a block. Thread `lane` of the T threads
that share a row takes columns lane, lane + T, …, so adjacent threads read adjacent elements. Up to 16 columns per
thread are kept in registers, so the row is read once. Longer rows, and rows of symbolic length, are read again by every
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.kernels.cuda.geometry import MAX_THREADS, Geometry, SharedMemory
from qcompiler.kernels.text import c_dim, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import Operand

WARP = 32
KEPT = 16
"""Columns per thread that stay in registers."""

WARPS_PER_BLOCK = 4
"""Rows per block if one warp owns a row."""

_SYMBOLIC_THREADS = 256
_PER_THREAD = 8
"""Target columns per thread if a block owns a row: enough loads in flight, and still many threads."""


def element(operand: Operand, name: str, row: str, column: str) -> str:
    """The address of one element: ``x + row * stride + column * stride``, where `row` is an int64_t expression."""
    down, right = operand.strides
    terms = [name]
    if down != 0:
        terms.append(row if down == 1 else f"{row} * {c_dim(down)}")
    if right != 0:
        terms.append(column if right == 1 else f"(int64_t){column} * {c_dim(right)}")
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

    def load(self, address: str, padding: str) -> list[str]:
        """Reads the row into `kept`, with `padding` past its end. Nothing if the row is not kept."""
        if self.per_thread is None:
            return []
        assert isinstance(self.cols, int)
        value = f"qc_load({address})"
        if self.cols % self.threads:
            value = f"j < {self.cols} ? {value} : {padding}"
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
