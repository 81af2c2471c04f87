"""recurrent: one direction of one layer of an LSTM, a GRU or a plain recurrent network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qcompiler.errors import PlanError
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import COUNTED_IN_32_BITS, Contract, Role, RoleKernel, Symbols, once, value_of, volume
from qcompiler.plan.operands import Operand

GATES: dict[str, int] = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
"""The number of gates of each kind of layer. torch's order: input, forget, cell, output; reset, update, new."""


class RecurrentKernel(RoleKernel, frozen=True, tag="recurrent"):
    """One direction of one recurrent layer over all its steps. ir/qc_recurrent.py has the equations.

    Operands: x (steps, batch, gates * hidden), w (gates * hidden, width) plain or packed, [projection (width, hidden)
    plain or packed], [bias (gates * hidden)], start (batch, width), [cell_start (batch, hidden)], out (steps, batch,
    width), [cell (batch, hidden)], [room (batch, hidden), f32].

    `gates` is 4 for "lstm", 3 for "gru", else 1. Only an LSTM has a cell state and may project its hidden state
    (`projects`); without a projection, width = hidden. With one, `room` holds a step's hidden state before the
    projection. `reverse` processes the steps from last to first.

    Sums are fp32. Each step rounds its row of out, and the next step reads the rounded row. The cell state is rounded
    in the same way; `cell` holds it between steps. Decoded weights are rounded to w's dtype before the product.
    """

    kind: Literal["lstm", "gru", "tanh", "relu"]
    steps: Dim
    batch: Dim
    hidden: int
    width: int
    reverse: bool = False
    projects: bool = False
    has_bias: bool = False

    @property
    def gates(self) -> int:
        """The number of gates. w has `hidden` rows for each."""
        return GATES[self.kind]

    def contract(self, operands: int) -> Contract:
        lstm = self.kind == "lstm"
        if min(self.hidden, self.width) < 1 or (not self.projects and self.width != self.hidden):
            raise PlanError(
                f"a recurrent kernel has {self.hidden} hidden units and states of {self.width}; both must be positive, "
                "and equal without a projection"
            )
        if self.projects and not lstm:
            raise PlanError(f"a recurrent kernel of the kind '{self.kind}' has a projection, which only an LSTM has")
        steps, batch, rows, cells = self.steps, self.batch, self.gates * self.hidden, (self.batch, self.hidden)
        inputs = [
            Role("x", (steps, batch, rows), unit=True),
            Role("w", (rows, self.width), packed=True),
            *([Role("projection", (self.width, self.hidden), packed=True)] if self.projects else []),
            *([Role("bias", (rows,), unit=True)] if self.has_bias else []),
            Role("start", (batch, self.width), unit=True, like="out"),
            *([Role("cell_start", cells, unit=True, like="cell")] if lstm else []),
        ]
        outputs = [
            Role("out", (steps, batch, self.width), "w", unit=True),
            *([Role("cell", cells, "w", unit=True)] if lstm else []),
            *([Role("room", cells, "w", dtypes=("f32",), unit=True)] if self.projects else []),
        ]
        most = (batch, COUNTED_IN_32_BITS)
        return Contract(
            (*inputs, *outputs),
            work=(steps, batch, rows, self.width + self.hidden * self.projects),
            extents=(steps, batch),
            positive=(self.hidden, self.width),
            at_most=(most, (rows, COUNTED_IN_32_BITS), (self.width, COUNTED_IN_32_BITS)),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        columns = self.gates * self.width + (self.width if self.projects else 0)
        return 2 * volume([self.steps, self.batch], symbols) * self.hidden * columns

    def moved(self, operand: Operand, stored: int, symbols: Symbols) -> int:
        """Each step reads the weights again."""
        if operand.name in ("w", "projection"):
            return stored * value_of(self.steps, symbols)
        return once(operand, stored)
