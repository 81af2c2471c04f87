"""The `qc` op of recurrences with a matrix as their state. Import it from `qcompiler.ir.qc`."""

from __future__ import annotations

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor, tensor_dtype


@irdl_op_definition
class LinearAttentionOp(QCOp):
    """Linear attention with decay: each token decays a state, adds to it, and reads it. All of it is f32.

    `state` (slots, H, P, N) has a matrix S for each head of a sequence; sequence b of the B uses slot b. `query` and
    `key` are (B, T, G, N), where head h uses group h // (H / G); `value` is (B, T, H, P). `decay` (B, T, H, 1 or N) is
    the logarithm of what the state keeps, times `rate` (H, N) if there is one. For token t of the `counts` (B) i64
    tokens that a sequence reads, with k, q, v, d of that token and head:

        S = S * exp(d)                  u = v
        S = S + u kᵀ                    with `beta` (B, T, H):  u = beta * (v - S k), the delta rule
        out = S q

    A sequence whose `first` (B) i64 position is 0 begins with zeros; one that reads no token keeps its state. The
    results are the states after the last token, and `out` (B, T, H, P), which is 0 from token `counts` on. The new
    states are written into the memory of the old ones.

    Mamba has P = 1, G = 1 and a rate; Mamba 2 has a decay per head; gated delta nets have beta (Gu and Dao, 2023; Dao
    and Gu, "Transformers are SSMs", 2024; Yang et al., "Gated Delta Networks", 2024).
    """

    name = "qc.linear_attention"
    state = operand_def(TensorType)
    query = operand_def(TensorType)
    key = operand_def(TensorType)
    value = operand_def(TensorType)
    decay = operand_def(TensorType)
    first = operand_def(TensorType)
    counts = operand_def(TensorType)
    rate = opt_operand_def(TensorType)
    beta = opt_operand_def(TensorType)
    after = result_def(TensorType)
    out = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        state: SSAValue,
        query: SSAValue,
        key: SSAValue,
        value: SSAValue,
        decay: SSAValue,
        first: SSAValue,
        counts: SSAValue,
        *,
        rate: SSAValue | None = None,
        beta: SSAValue | None = None,
    ) -> None:
        types = [tensor(shape_of(each.type), "f32") for each in (state, value)]
        optional = [[each] if each is not None else [] for each in (rate, beta)]
        super().__init__(operands=[state, query, key, value, decay, first, counts, *optional], result_types=types)

    def verify_op(self) -> None:
        for name, value, rank in (("state", self.state, 4), ("query", self.query, 4), ("value", self.value, 4)):
            self.expect(len(shape_of(value.type)) == rank, f"{name} must have rank {rank}")
        slots, heads, width, depth = shape_of(self.state.type)
        batch, steps, groups, _ = shape_of(self.query.type)
        fixed = all(isinstance(size, int) and size > 0 for size in (slots, heads, width, depth, groups))
        self.expect(fixed, "slots, heads, groups and the sizes of a state must be constants above 0")
        assert isinstance(heads, int) and isinstance(groups, int) and isinstance(slots, int)
        self.expect(heads % groups == 0, f"{heads} heads cannot share {groups} groups of queries and keys")
        self.expect(not isinstance(batch, int) or batch <= slots, f"{batch} sequences have {slots} slots")
        self.expect_shape(self.query, (batch, steps, groups, depth), "query")
        self.expect_shape(self.key, (batch, steps, groups, depth), "key")
        self.expect_shape(self.value, (batch, steps, heads, width), "value")
        decay = shape_of(self.decay.type)
        self.expect(len(decay) == 4 and decay[3] in (1, depth), f"decay must have a last dim of 1 or {depth}")
        self.expect_shape(self.decay, (batch, steps, heads, decay[3]), "decay")
        if self.rate is not None:
            self.expect(decay[3] == 1, "with a rate, decay has a last dim of 1")
            self.expect_shape(self.rate, (heads, depth), "rate")
        if self.beta is not None:
            self.expect_shape(self.beta, (batch, steps, heads), "beta")
        for name, value in (("first", self.first), ("counts", self.counts)):
            self.expect_shape(value, (batch,), name)
            self.expect(tensor_dtype(value.type) == "i64", f"{name} must be i64")
        self.expect_shape(self.after, shape_of(self.state.type), "after")
        self.expect_shape(self.out, shape_of(self.value.type), "out")
        plain = (self.state, self.query, self.key, self.value, self.decay, self.rate, self.beta, self.after, self.out)
        self.expect(all(tensor_dtype(each.type) == "f32" for each in plain if each is not None), "all but ids are f32")
