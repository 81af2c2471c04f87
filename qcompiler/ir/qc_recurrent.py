"""The `qc` op of recurrent layers. Import it from `qcompiler.ir.qc`.

The op contains only what one step needs from the step before it. What a layer does to all steps at once is separate:
the product of the input with its weight is a `qc.linear` over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import StringAttr, TensorType, UnitAttr
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    AnyAttr,
    AttrSizedOperandSegments,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    traits_def,
    var_result_def,
)
from xdsl.traits import Pure

from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.kinds.recurrent import GATES


@irdl_op_definition
class RecurrentOp(QCOp):
    """All steps of one direction of a recurrent layer: each step reads the state of the step before it.

    `x` (T, B, G*H) is the input's contribution to the G gates of H units. `w` (G*H, R), plain or packed, multiplies the
    state; `bias` (G*H) is added to that product. `start` (B, R) is the state before the first step. The results are the
    state after each step, (T, B, R), and those in `result_names`. With g = x[t] and s = h @ wᵀ + bias, in blocks of H:

        "tanh", "relu"  h = tanh(g + s), h = relu(g + s)
        "gru"           r, z = sigmoid(g0 + s0), sigmoid(g1 + s1);  n = tanh(g2 + r * s2);  h = n + z * (h - n)
        "lstm"          i, f, o = sigmoid(g0 + s0), sigmoid(g1 + s1), sigmoid(g3 + s3);  u = tanh(g2 + s2)
                        c = f * c + i * u;  h = o * tanh(c)

    An LSTM has `cell_start` (B, H), which is c before the first step. With a `projection` (R, H), plain or packed, its
    state is h @ projectionᵀ; without one R = H. `reverse` goes from the last step to the first.

    Everything is computed in fp32. The state and the cell state are rounded to their types at each step.
    """

    name = "qc.recurrent"
    x = operand_def(TensorType)
    w = operand_def(AnyAttr())
    start = operand_def(TensorType)
    projection = opt_operand_def(AnyAttr())
    bias = opt_operand_def(TensorType)
    cell_start = opt_operand_def(TensorType)
    kind = prop_def(StringAttr)
    reverse = opt_prop_def(UnitAttr)
    outputs = var_result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        w: SSAValue | Operation,
        start: SSAValue | Operation,
        types: Sequence[Attribute],
        *,
        kind: str,
        reverse: bool = False,
        projection: SSAValue | None = None,
        bias: SSAValue | None = None,
        cell_start: SSAValue | None = None,
    ) -> None:
        optional = [[value] if value is not None else [] for value in (projection, bias, cell_start)]
        super().__init__(
            operands=[x, w, start, *optional],
            properties={"kind": StringAttr(kind), "reverse": UnitAttr() if reverse else None},
            result_types=[list(types)],
        )

    @property
    def weights(self) -> tuple[int, ...]:
        """The operands that may be packed, by number."""
        return (1,) if self.projection is None else (1, 3)

    @property
    def hidden(self) -> int:
        """The number of units."""
        return int(shape_of(self.w.type)[0]) // GATES[self.kind.data]

    @property
    def result_names(self) -> tuple[str, ...]:
        """The results in order: the states; an LSTM's last cell state (B, H); with a projection, the last hidden state
        before it, (B, H) f32, which the kernel uses as scratch memory."""
        cell = ("cell",) if self.kind.data == "lstm" else ()
        return ("out", *cell, *(("room",) if self.projection is not None else ()))

    def rebuilt(
        self,
        x: SSAValue,
        w: SSAValue,
        start: SSAValue,
        types: Sequence[Attribute],
        *,
        projection: SSAValue | None,
        bias: SSAValue | None,
        cell_start: SSAValue | None,
    ) -> RecurrentOp:
        """The same op on other operands."""
        return RecurrentOp(
            x, w, start, types, kind=self.kind.data, reverse=self.reverse is not None,
            projection=projection, bias=bias, cell_start=cell_start,
        )  # fmt: skip

    def verify_op(self) -> None:
        kind = self.kind.data
        self.expect(kind in GATES, f"kind must be one of {', '.join(GATES)}, not '{kind}'")
        x, w = shape_of(self.x.type), shape_of(self.w.type)
        self.expect(len(x) == 3 and len(w) == 2, f"x needs rank 3 and w rank 2, not {len(x)} and {len(w)}")
        gates = GATES[kind]
        self.expect(int(w[0]) % gates == 0, f"{w[0]} rows of w are not {gates} gates of one size")
        self.expect(x[2] == w[0], f"x has {x[2]} columns, w has {w[0]} rows")
        lstm, projection = kind == "lstm", self.projection
        self.expect(lstm or projection is None, f"only an LSTM has a projection, not '{kind}'")
        self.expect(lstm == (self.cell_start is not None), "an LSTM, and nothing else, has cell_start")
        if projection is None:
            self.expect(w[1] == self.hidden, f"w has {w[1]} columns, the state has {self.hidden}")
        else:
            self.expect(shape_of(projection.type) == (w[1], self.hidden), f"projection must be {(w[1], self.hidden)}")
        if self.bias is not None:
            self.expect_shape(self.bias, (w[0],), "bias")
        self.expect_shape(self.start, (x[1], w[1]), "start")
        cells = (x[1], self.hidden)
        if self.cell_start is not None:
            self.expect_shape(self.cell_start, cells, "cell_start")
        self._verify_results((x[0], x[1], w[1]), cells)

    def _verify_results(self, states: Sequence[object], cells: Sequence[object]) -> None:
        names = self.result_names
        self.expect(len(self.results) == len(names), f"there must be {len(names)} results: {', '.join(names)}")
        wanted = {"out": states, "cell": cells, "room": cells}
        kinds = {"out": self.start, "cell": self.cell_start}
        for name, value in zip(names, self.results, strict=True):
            self.expect_shape(value, wanted[name], name)  # type: ignore[arg-type]
            source = kinds.get(name)
            dtype = "f32" if source is None else tensor_dtype(source.type)
            self.expect(tensor_dtype(value.type) == dtype, f"{name} must be {dtype}, as what it begins with")
