"""grouped_linear: a linear that multiplies each row with the weight of one MoE expert, chosen by an index."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import PlanError
from qcompiler.formats.int8_rows import row_bytes
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel_body import (
    ANY,
    COUNTED_IN_32_BITS,
    FLOATS,
    INDICES,
    ROW_ALIGNMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    once,
    value_of,
)
from qcompiler.plan.operands import Operand, ScalarProgram
from qcompiler.plan.scalar_types import check_program

PANEL = 16
"""Rows of a panel of weights. Where a kernel combines rows of an expert, or its experts, these are whole panels."""


class GroupedLinearKernel(RoleKernel, frozen=True, tag="grouped_linear"):
    """``out[p, j] = sum_k x[p // repeat, k] * decode(w)[index[p] * n + j, k]``, summed in fp32 and rounded once.

    Operands: x (rows, k), w (experts * n, k) plain or packed, index (rows * repeat; i64 or i32), out (rows * repeat,
    n). x has unit stride along k, and out along n. x is rounded to w's dtype where that is narrower; decoded weights
    are rounded to it, or stay in fp32. Only the experts that `index` selects are read. The CPU kernel reports an index
    outside [0, experts) as an error and gives zeros; on CUDA such an index gives NaN.

    With `pairs`, an expert has two halves of rows, and out (rows * repeat, n / 2) is ``epilogue(sum[p, j],
    sum[p, n / 2 + j])`` of the fp32 sums. With `top`, the results of `top` consecutive pairs are one row of out
    (rows * repeat / top, n). The operands between index and out are then weights (rows * repeat / top, top) and the
    epilogue's extras, of out's shape:

        total = 0; for t in 0 … top - 1: total = mix(sum[r * top + t, j], weights[r, t], total)
        out[r, j] = epilogue(total, extras[r, j]…)

    In both forms the number of rows is known, and halves, or experts, are whole panels.

    With `codes`, x holds int8 rows (rows, row_bytes(k)), w is packed, and the kernel multiplies codes as integers, with
    the results of qcompiler/formats/integer_product.py for sums.
    """

    rows: Dim
    repeat: int
    experts: int
    n: int
    k: int
    pairs: bool = False
    top: int = 0
    mix: ScalarProgram | None = None
    epilogue: ScalarProgram | None = None
    codes: bool = False

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.pairs else self.n

    @property
    def combines(self) -> bool:
        """Whether the kernel does more than products."""
        return self.pairs or self.top > 0

    def contract(self, operands: int) -> Contract:
        if min(self.repeat, self.experts, self.n, self.k) < 1:
            raise PlanError(
                f"a grouped linear has {self.experts} experts of {self.n}x{self.k} and {self.repeat} pairs per row; "
                "all must be positive"
            )
        pairs = (dim(self.rows) * self.repeat).to_dim()
        extras = self._check_form(operands, pairs)
        rows = int(pairs) // self.top if self.top else pairs
        x = Role("x", (self.rows, self.k), unit=True)
        if self.codes:
            x = Role("x", (self.rows, row_bytes(self.k)), dtypes=("i8",), unit=True, align=ROW_ALIGNMENT)
        return Contract(
            (
                x,
                Role("w", (self.experts * self.n, self.k), packed=True),
                Role("index", (pairs,), dtypes=INDICES),
                *([Role("weights", (rows, self.top))] if self.top else []),
                *(Role(f"extra{i}", (rows, self.n), dtypes=ANY) for i in range(extras)),
                Role("out", (rows, self.columns), "w", unit=True),
            ),
            work=(pairs, self.n, self.k),
            extents=(self.rows, pairs),
            positive=(self.repeat, self.experts, self.n, self.k),
            at_most=((pairs, COUNTED_IN_32_BITS),),
        )

    def _check_form(self, operands: int, pairs: Dim) -> int:
        """How many extras there are. PlanError for regions, sizes and operands that do not fit each other."""
        extras = operands - 4 - (self.top > 0)
        inputs = 0 if self.epilogue is None else len(self.epilogue.inputs)
        if extras != (inputs - 1 if self.top else 0):
            raise PlanError(
                f"a grouped linear has {operands} operands, which do not fit its epilogue of {inputs} inputs"
            )
        if (self.pairs and self.top) or self.top < 0:
            raise PlanError(f"a grouped linear combines pairs of rows, or {self.top} experts, not both")
        if (self.mix is not None) != (self.top > 0) or (self.epilogue is not None) != self.combines:
            raise PlanError("a grouped linear has an epilogue where it combines something, and a mix where experts")
        unit = 2 * PANEL if self.pairs else PANEL
        if not self.combines:
            return 0
        if self.n % unit or not isinstance(pairs, int) or pairs % max(self.top, 1):
            raise PlanError(
                f"a grouped linear combines the sums of {pairs} pairs, with {self.n} rows in an expert; the rows must "
                f"be a multiple of {unit}, and the pairs a known multiple of {max(self.top, 1)}"
            )
        return extras

    def check_operands(self, operands: Sequence[Operand]) -> None:
        """PlanError unless the regions take what they are given, and give one float, and unless codes are multiplied
        with those of a packed weight."""
        if self.codes and operands[1].format is None:
            raise PlanError("a grouped linear multiplies rows of int8 with a packed weight; this one is plain")
        given: dict[str, tuple[ScalarProgram | None, tuple[str, ...]]] = {}
        if self.pairs:
            given["its epilogue"] = (self.epilogue, ("f32", "f32"))
        if self.top:
            extras = tuple(operand.dtype for operand in operands[4:-1])
            given["its mix"] = (self.mix, ("f32", operands[3].dtype, "f32"))
            given["its epilogue"] = (self.epilogue, ("f32", *extras))
        for what, (program, wanted) in given.items():
            assert program is not None  # by the contract
            found = tuple(dtype for _, dtype in program.inputs)
            if found != wanted or len(program.yields) != 1:
                raise PlanError(f"{what} takes {found} and gives {len(program.yields)} values, not {wanted}, 1")
            made = check_program(program, 0)[program.yields[0]]
            if made not in (("f32",) if what == "its mix" else FLOATS):
                raise PlanError(f"{what} gives {made}")

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        return 2 * value_of(self.rows, symbols) * self.repeat * self.n * self.k

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Only the selected experts of w are read."""
        if operand.name == "w":
            pairs = value_of(self.rows, symbols) * self.repeat
            return stored * min(pairs, self.experts) // max(self.experts, 1)
        return once(operand, stored)
