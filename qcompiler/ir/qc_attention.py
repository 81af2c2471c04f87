"""`qc.attention` and `qc.join_attention`: softmax over the products of queries and keys, times the values."""

from __future__ import annotations

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, TensorType, UnitAttr, f64, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

from qcompiler.formats import cache_rows
from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import FLOATS


@irdl_op_definition
class AttentionOp(QCOp):
    """`softmax(q kᵀ * scale + mask) v` on (B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv); H % Hkv == 0.

    A boolean mask keeps where it is true; a float mask is added. Mask dims are equal to (B, H, S, T) or 1.

    `causal`: query i sees keys j <= i. `window`: query i sees keys j > i - window. `last` (B or 1, S or 1), integers,
    is device data: the position of query i of batch b is last[b, i] in both rules, and it sees keys j <= last[b, i].
    With it, attention over a partly filled cache only does work for the filled part. `softcap`: scaled scores x become
    softcap * tanh(x / softcap), before any mask. A row that sees no key gives zeros.

    `sinks` (B or 1, H or 1, S or 1, 1), floats: one more score of each query, of a key without a value. It is a term of
    the sum that the weights are divided by, and it is neither scaled nor capped nor masked (-inf: none). As in
    gpt-oss (Xiao, Tian, Chen, Han and Lewis, "Efficient streaming language models with attention sinks", 2024).

    `ring`, with `last` and `window` and without a mask: k and v are a ring of T >= window + S - 1 rows. Row r holds the
    key of the latest position p <= last[b, i] with p % T == r, if p >= 0; the window counts positions.

    `cache`: k and v are rows of that kind (`qc.quantize_cache`), i8 (B, Hkv, T, row_bytes(D, cache)) and
    (…, row_bytes(Dv, cache)).

    `compute`, "bf16": q, k, v and the weights exp(score - largest) are rounded to bf16 before they are multiplied; the
    total of the weights and all sums are fp32. Codes of int8 and fp8 rows are not rounded: their scales are factors
    outside. A kernel may leave out any of these roundings.

    `parts`: the keys are divided into so many parts, and the result is f32 (B, H, S, parts, Dv + 2): of each part and
    query the sum of exp(score - top) times the value, in Dv columns, then `top`, the largest score, and the sum of
    exp(score - top). A part in which the query sees no key has zeros, -inf and 0. Each key that a query sees is in one
    part, and so is its sink if it sees any. In which one is left to the kernel, so `qc.join_attention` alone may read
    them.
    """

    name = "qc.attention"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    mask = opt_operand_def(TensorType)
    last = opt_operand_def(TensorType)
    sinks = opt_operand_def(TensorType)
    scale = prop_def(FloatAttr)
    causal = opt_prop_def(UnitAttr)
    window = opt_prop_def(IntegerAttr)
    softcap = opt_prop_def(FloatAttr)
    ring = opt_prop_def(UnitAttr)
    cache = opt_prop_def(StringAttr)
    compute = opt_prop_def(StringAttr)
    parts = opt_prop_def(IntegerAttr)
    result = result_def(TensorType)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(Pure())

    def __init__(
        self,
        q: SSAValue | Operation,
        k: SSAValue | Operation,
        v: SSAValue | Operation,
        mask: SSAValue | Operation | None,
        type_: Attribute,
        *,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        last: SSAValue | Operation | None = None,
        sinks: SSAValue | Operation | None = None,
        ring: bool = False,
        cache: str | None = None,
        compute: str | None = None,
        parts: int | None = None,
    ) -> None:
        super().__init__(
            operands=[q, k, v, *([each] if each is not None else [] for each in (mask, last, sinks))],
            properties={
                "scale": FloatAttr(scale, f64),
                "causal": UnitAttr() if causal else None,
                "window": None if window is None else IntegerAttr(window, i64),
                "softcap": None if softcap is None else FloatAttr(softcap, f64),
                "ring": UnitAttr() if ring else None,
                "cache": None if cache is None else StringAttr(cache),
                "compute": None if compute is None else StringAttr(compute),
                "parts": None if parts is None else IntegerAttr(parts, i64),
            },
            result_types=[type_],
        )

    def verify_op(self) -> None:
        q, k, v, out = (shape_of(t) for t in (self.q.type, self.k.type, self.v.type, self.result.type))
        if self.parts is not None:
            self._verify_parts()
            out = (*out[:3], self.value_dim)
        self.expect(len(q) == len(k) == len(v) == 4, "q, k and v need rank 4")
        self.expect(q[0] == k[0] == v[0], "batch dims differ")
        self.expect(k[1] == v[1] and k[2] == v[2], "q, k and v do not fit together")
        if self.rows_of is None:
            self.expect(q[3] == k[3], "q, k and v do not fit together")
            self.expect(out == (*q[:3], v[3]), f"the result must have shape {(*q[:3], v[3])}, not {out}")
        else:
            self.expect(self.rows_of in cache_rows.KINDS, f"cache is one of {', '.join(cache_rows.KINDS)}")
            kind = cache_rows.kind_of(self.rows_of)
            self.expect(len(out) == 4 and out[:3] == q[:3], f"the result has the dims {q[:3]} and that of a value")
            for name, stored, size in (("k", self.k, q[3]), ("v", self.v, out[3])):
                self.expect(tensor_dtype(stored.type) == "i8", f"{name} holds the rows of a cache, i8")
                self.expect_shape(stored, (*shape_of(stored.type)[:3], cache_rows.row_bytes(int(size), kind)), name)
        self.expect(int(q[1]) % int(k[1]) == 0, f"{q[1]} heads are not a multiple of {k[1]} kv heads")
        if self.mask is not None:
            mask, full = shape_of(self.mask.type), (q[0], q[1], q[2], k[2])
            fits = len(mask) == 4 and all(m in (f, 1) for m, f in zip(mask, full, strict=True))
            self.expect(fits, f"mask of shape {mask} does not broadcast to {full}")
        if self.last is not None:
            last, rows = shape_of(self.last.type), (q[0], q[2])
            fits = len(last) == 2 and all(m in (f, 1) for m, f in zip(last, rows, strict=True))
            self.expect(fits, f"last of shape {last} does not broadcast to {rows}")
            self.expect(tensor_dtype(self.last.type) in ("i64", "i32"), "last must be i32 or i64")
            self.expect(self.causal is None, "causal and last exclude each other: last says which keys are seen")
        if self.sinks is not None:
            sinks, one = shape_of(self.sinks.type), (*q[:3], 1)
            fits = len(sinks) == 4 and all(m in (f, 1) for m, f in zip(sinks, one, strict=True))
            self.expect(fits, f"sinks of shape {sinks} do not broadcast to {one}")
            self.expect(tensor_dtype(self.sinks.type) in FLOATS, f"sinks are one of {', '.join(FLOATS)}")
        self.expect(self.keys_back is None or self.keys_back >= 1, "a window shows at least one key")
        self.expect(self.cap is None or self.cap > 0, "softcap must be positive")
        self.expect(self.rounds_to in (None, "bf16"), "compute is bf16, if it is there")
        if self.ring is not None:
            is_whole = self.last is not None and self.keys_back is not None and self.mask is None
            self.expect(is_whole, "a ring needs last and a window, and takes no mask")
            if isinstance(k[2], int) and isinstance(q[2], int):
                least = (self.keys_back or 1) + q[2] - 1
                self.expect(k[2] >= least, f"a ring of {k[2]} rows is shorter than window + queries - 1 = {least}")

    def _verify_parts(self) -> None:
        parts, out = self.divided_into, shape_of(self.result.type)
        self.expect(parts is not None and parts >= 1, "parts is at least 1")
        fits = len(out) == 5 and out[3] == parts and isinstance(out[4], int) and out[4] > 2
        self.expect(fits, f"the result in parts is (B, H, S, {parts}, Dv + 2), not {out}")
        self.expect(tensor_dtype(self.result.type) == "f32", "the result in parts is f32")
        ends = JoinAttentionOp.name, "rt.yield"  # the latter in the region of a kernel
        joined = all(use.operation.name in ends for use in self.result.uses)
        self.expect(joined, "only qc.join_attention reads a result in parts")

    def rebuilt(
        self,
        q: SSAValue,
        k: SSAValue,
        v: SSAValue,
        mask: SSAValue | None,
        last: SSAValue | None,
        sinks: SSAValue | None,
        type_: Attribute | None = None,
        parts: int | None = None,
    ) -> AttentionOp:
        """The same attention on other operands, or in `parts`, without attributes such as the path."""
        return AttentionOp(
            q,
            k,
            v,
            mask,
            self.result.type if type_ is None else type_,
            scale=self.scale.value.data,
            causal=self.causal is not None,
            window=self.keys_back,
            softcap=self.cap,
            last=last,
            sinks=sinks,
            ring=self.ring is not None,
            cache=self.rows_of,
            compute=self.rounds_to,
            parts=self.divided_into if parts is None else parts,
        )

    @property
    def divided_into(self) -> int | None:
        """`parts` as a number."""
        return None if self.parts is None else self.parts.value.data

    @property
    def value_dim(self) -> Dim:
        """Columns of a value: those of the result, without the two behind the sums of a part."""
        last = shape_of(self.result.type)[-1]
        return last if self.parts is None else int(last) - 2

    @property
    def rows_of(self) -> str | None:
        """`cache` as a string."""
        return None if self.cache is None else self.cache.data

    @property
    def rounds_to(self) -> str | None:
        """`compute` as a string."""
        return None if self.compute is None else self.compute.data

    @property
    def keys_back(self) -> int | None:
        """`window` as a number."""
        return None if self.window is None else self.window.value.data

    @property
    def cap(self) -> float | None:
        """`softcap` as a number."""
        return None if self.softcap is None else self.softcap.value.data


@irdl_op_definition
class JoinAttentionOp(QCOp):
    """The result (B, H, S, Dv) of an attention in parts, f32 (B, H, S, P, Dv + 2):

        top = max_p top_p        out = sum_p exp(top_p - top) sum_p[:] / sum_p exp(top_p - top) total_p

    in the order of the parts, where columns Dv and Dv + 1 of part p are top_p and total_p. A query without a key in any
    part gives zeros. Computed in fp32 and rounded once (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context
    inference", 2023).
    """

    name = "qc.join_attention"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue | Operation, type_: Attribute) -> None:
        super().__init__(operands=[x], result_types=[type_])

    def verify_op(self) -> None:
        x = shape_of(self.x.type)
        self.expect(len(x) == 5 and isinstance(x[4], int) and x[4] > 2, "x has the shape (B, H, S, P, Dv + 2)")
        self.expect(isinstance(x[3], int) and x[3] >= 1, "x has a known number of parts")
        self.expect(tensor_dtype(self.x.type) == "f32", "x is f32")
        self.expect_shape(self.result, (*x[:3], int(x[4]) - 2))
        self.expect(tensor_dtype(self.result.type) in FLOATS, f"the result is one of {', '.join(FLOATS)}")


__all__ = ["AttentionOp", "JoinAttentionOp"]
