"""The `qc` ops that read along, or order, an axis.

positions   rope  embedding  gather  scatter  index_update
scans       cumsum  sort  topk  argmax  top_p  route  sample
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import BoolAttr, IntegerAttr, StringAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import AnyAttr, irdl_op_definition, operand_def, opt_prop_def, prop_def, result_def, traits_def
from xdsl.traits import Pure

from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel_body import FLOATS
from qcompiler.plan.kinds.route import MOST_CHOSEN, MOST_EXPERTS, SCORES, Scores
from qcompiler.plan.kinds.sample import WORDS
from qcompiler.plan.kinds.top_p import MOST_COLUMNS

SCATTERS = ("none", "add", "mul", "max", "min")
SCANS = ("add", "mul", "max", "min", "logaddexp")

# --- positions -------------------------------------------------------------------------------------------------------


@irdl_op_definition
class RopeOp(QCOp):
    """Rotary embedding of `x (B, H, S, D)` by `cos, sin (B|1, 1, S, D)`: `x*cos + rotate(x)*sin`.

    `rotate` swaps the two halves and negates the first; if `interleaved`, it does so for adjacent pairs.
    """

    name = "qc.rope"
    x = operand_def(TensorType)
    cos = operand_def(TensorType)
    sin = operand_def(TensorType)
    interleaved = opt_prop_def(UnitAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self, x: SSAValue, cos: SSAValue, sin: SSAValue, type_: Attribute, *, interleaved: bool = False
    ) -> None:
        properties = {"interleaved": UnitAttr() if interleaved else None}
        super().__init__(operands=[x, cos, sin], properties=properties, result_types=[type_])

    def verify_op(self) -> None:
        x, cos = shape_of(self.x.type), shape_of(self.cos.type)
        self.expect(len(x) == len(cos) == 4, f"x and cos need rank 4, not {len(x)} and {len(cos)}")
        self.expect_shape(self.sin, cos, "sin")
        fits = cos[0] in (1, x[0]) and cos[1] == 1 and cos[2:] == x[2:]
        self.expect(fits, f"cos of shape {cos} does not fit x of shape {x}; wanted (B or 1, 1, S, D)")
        self.expect(isinstance(x[3], int) and x[3] % 2 == 0, f"the head dim {x[3]} must be even")
        self.expect_shape(self.result, x)


@irdl_op_definition
class EmbeddingOp(QCOp):
    """Rows of `table (V, D)` (plain or quantised) picked by `ids` of any rank."""

    name = "qc.embedding"
    ids = operand_def(TensorType)
    table = operand_def(AnyAttr())
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, ids: SSAValue | Operation, table: SSAValue | Operation, type_: Attribute) -> None:
        super().__init__(operands=[ids, table], result_types=[type_])

    def verify_op(self) -> None:
        table = shape_of(self.table.type)
        wanted = (*shape_of(self.ids.type), table[1])
        self.expect(shape_of(self.result.type) == wanted, f"the result must have shape {wanted}")
        self.expect(tensor_dtype(self.ids.type) in ("i64", "i32"), "ids must be i32 or i64")


@irdl_op_definition
class GatherOp(QCOp):
    """Picks along `axis`. In mode "take", an index of any rank replaces the axis (numpy.take). In mode "along", the
    index has x's rank (numpy.take_along_axis). Negative indices count from the end."""

    name = "qc.gather"
    x = operand_def(TensorType)
    index = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    mode = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, index: SSAValue, type_: Attribute, *, axis: int, mode: str = "take") -> None:
        properties = {"axis": IntegerAttr(axis, i64), "mode": StringAttr(mode)}
        super().__init__(operands=[x, index], properties=properties, result_types=[type_])

    def verify_op(self) -> None:
        x, index, axis = shape_of(self.x.type), shape_of(self.index.type), self.axis.value.data
        self.expect(self.mode.data in ("take", "along"), 'mode must be "take" or "along"')
        self.expect_axis(axis, x)
        wanted = index if self.mode.data == "along" else (*x[:axis], *index, *x[axis + 1 :])
        self.expect(shape_of(self.result.type) == wanted, f"the result must have shape {wanted}")


@irdl_op_definition
class ScatterOp(QCOp):
    """`out = x; out[…, index[…], …] = src` along `axis`, in the order of the index (the last of equal indices wins).

    `reduce` other than "none" folds instead of replacing: "add", "mul", "max", "min" (NaN wins). Each step rounds to
    x's type. `index` may be smaller than x along the other dims. Negative indices count from the end.
    """

    name = "qc.scatter"
    x = operand_def(TensorType)
    index = operand_def(TensorType)
    src = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    reduce = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self, x: SSAValue, index: SSAValue, src: SSAValue, type_: Attribute, *, axis: int, reduce: str = "none"
    ) -> None:
        properties = {"axis": IntegerAttr(axis, i64), "reduce": StringAttr(reduce)}
        super().__init__(operands=[x, index, src], properties=properties, result_types=[type_])

    def verify_op(self) -> None:
        x, index, src = (shape_of(v.type) for v in (self.x, self.index, self.src))
        self.expect(self.reduce.data in SCATTERS, f"reduce must be one of {SCATTERS}, not '{self.reduce.data}'")
        self.expect(len(x) == len(index) == len(src), f"ranks {len(x)}, {len(index)} and {len(src)} must be equal")
        self.expect_axis(self.axis.value.data, x)
        for other, name in ((src, "src"), (x, "x")):
            for n, (i, s) in enumerate(zip(index, other, strict=True)):
                free = name == "x" and n == self.axis.value.data
                inside = free or not (isinstance(i, int) and isinstance(s, int)) or i <= s
                self.expect(inside, f"index of shape {index} is larger than {name} of shape {other}")
        _expect_index(self, self.index)
        self.expect(tensor_dtype(self.x.type) == tensor_dtype(self.src.type), "x and src differ in element type")
        self.expect(self.result.type == self.x.type, "the result must have x's type")


@irdl_op_definition
class IndexUpdateOp(QCOp):
    """`out = x; out[:, …, index[i], …] = src[:, …, i, …]` along `axis`; index has rank 1 (torch.index_copy).

    A negative index is out of range.
    """

    name = "qc.index_update"
    x = operand_def(TensorType)
    index = operand_def(TensorType)
    src = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, index: SSAValue, src: SSAValue, type_: Attribute, *, axis: int) -> None:
        properties = {"axis": IntegerAttr(axis, i64)}
        super().__init__(operands=[x, index, src], properties=properties, result_types=[type_])

    def verify_op(self) -> None:
        x, index, axis = shape_of(self.x.type), shape_of(self.index.type), self.axis.value.data
        self.expect(len(index) == 1, f"index needs rank 1, not {len(index)}")
        self.expect_axis(axis, x)
        self.expect_shape(self.src, (*x[:axis], index[0], *x[axis + 1 :]), "src")
        _expect_index(self, self.index)
        self.expect(tensor_dtype(self.x.type) == tensor_dtype(self.src.type), "x and src differ in element type")
        self.expect(self.result.type == self.x.type, "the result must have x's type")


# --- scans and orders ------------------------------------------------------------------------------------------------


@irdl_op_definition
class CumsumOp(QCOp):
    """Inclusive running sum along `axis`, or another fold: `reduce` = "mul", "max", "min" (NaN wins), "logaddexp"."""

    name = "qc.cumsum"
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    reduce = opt_prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, type_: Attribute, *, axis: int, reduce: str = "add") -> None:
        properties = {"axis": IntegerAttr(axis, i64), "reduce": None if reduce == "add" else StringAttr(reduce)}
        super().__init__(operands=[x], properties=properties, result_types=[type_])

    @property
    def fold(self) -> str:
        """The fold: one of `SCANS`."""
        return "add" if self.reduce is None else self.reduce.data

    def verify_op(self) -> None:
        self.expect(self.fold in SCANS, f"reduce must be one of {SCANS}, not '{self.fold}'")
        self.expect_axis(self.axis.value.data, shape_of(self.x.type))
        self.expect_shape(self.result, shape_of(self.x.type))


@irdl_op_definition
class SortOp(QCOp):
    """Stable sort along `axis`: values and i64 indices."""

    name = "qc.sort"
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    descending = prop_def(BoolAttr)
    values = result_def(TensorType)
    indices = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, types: Sequence[Attribute], *, axis: int, descending: bool) -> None:
        properties = {"axis": IntegerAttr(axis, i64), "descending": IntegerAttr.from_bool(descending)}
        super().__init__(operands=[x], properties=properties, result_types=list(types))

    def verify_op(self) -> None:
        self.expect_axis(self.axis.value.data, shape_of(self.x.type))
        _verify_order(self, self.x, self.values, self.indices, shape_of(self.x.type))


@irdl_op_definition
class TopkOp(QCOp):
    """The `k` largest along `axis`, in descending order, ties by lower index: values and i64 indices."""

    name = "qc.topk"
    x = operand_def(TensorType)
    k = prop_def(IntegerAttr)
    axis = prop_def(IntegerAttr)
    values = result_def(TensorType)
    indices = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, types: Sequence[Attribute], *, k: int, axis: int) -> None:
        properties = {"k": IntegerAttr(k, i64), "axis": IntegerAttr(axis, i64)}
        super().__init__(operands=[x], properties=properties, result_types=list(types))

    def verify_op(self) -> None:
        x, axis, k = shape_of(self.x.type), self.axis.value.data, self.k.value.data
        self.expect_axis(axis, x)
        size = x[axis]
        self.expect(k >= 1 and (isinstance(size, str) or k <= size), f"k = {k} does not fit an axis of size {size}")
        _verify_order(self, self.x, self.values, self.indices, (*x[:axis], k, *x[axis + 1 :]))


@irdl_op_definition
class ArgmaxOp(QCOp):
    """Index (i64) of the first maximum along `axis`, which is dropped."""

    name = "qc.argmax"
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, type_: Attribute, *, axis: int) -> None:
        super().__init__(operands=[x], properties={"axis": IntegerAttr(axis, i64)}, result_types=[type_])

    def verify_op(self) -> None:
        x, axis = shape_of(self.x.type), self.axis.value.data
        self.expect_axis(axis, x)
        self.expect_shape(self.result, (*x[:axis], *x[axis + 1 :]))
        self.expect(tensor_dtype(self.result.type) == "i64", "the result must be i64")


@irdl_op_definition
class TopPOp(QCOp):
    """Draws an index (i64) from each row of probabilities `x (…, n)`, among those that make up the first `top` of it.

    Kept is the smallest number of entries, largest first, whose sum reaches `top` (…) of the row's; entries equal to
    the last kept one are kept as well, at least one always.  Of these the first one is taken at which the running sum,
    in the order of the row, goes beyond `draw` (…), a share from [0, 1).  `top` and `draw` are f32, one of each a row.

    Sums are integers (qcompiler/plan/kinds/top_p.py), so that one draw gives one index wherever it is computed.  What
    is no positive number counts as 0; a row of such entries gives 0.
    """

    name = "qc.top_p"
    x = operand_def(TensorType)
    top = operand_def(TensorType)
    draw = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, top: SSAValue, draw: SSAValue, type_: Attribute) -> None:
        super().__init__(operands=[x, top, draw], result_types=[type_])

    def verify_op(self) -> None:
        x = shape_of(self.x.type)
        self.expect(len(x) >= 1, "x must have a rank of at least 1")
        count = x[-1]
        fits = isinstance(count, str) or 1 <= count <= MOST_COLUMNS
        self.expect(fits, f"a row has {count} entries; it must have 1 to {MOST_COLUMNS}")
        for name, value in (("top", self.top), ("draw", self.draw)):
            self.expect_shape(value, x[:-1], name)
            self.expect(tensor_dtype(value.type) == "f32", f"{name} must be f32")
        self.expect_shape(self.result, x[:-1])
        self.expect(tensor_dtype(self.result.type) == "i64", "the result must be i64")


@irdl_op_definition
class RouteOp(QCOp):
    """The `k` experts of each row of scores `x (…, n)`, best first, and their weights: (…, k), and i64 indices.

    `scores = "all"`: p is the softmax of a row; its `k` largest entries are the weights.  `scores = "chosen"`: the `k`
    largest entries of x are chosen, and the weights are their softmax.  With `normalise` the weights of a row are
    divided by their sum, added up from the largest one.  All is computed in fp32, also where x is narrower, and the
    weights are rounded once.  The order is that of `qc.topk`: NaN is the largest value, ties by lower index.
    """

    name = "qc.route"
    x = operand_def(TensorType)
    k = prop_def(IntegerAttr)
    scores = prop_def(StringAttr)
    normalise = opt_prop_def(UnitAttr)
    weights = result_def(TensorType)
    indices = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self, x: SSAValue, types: Sequence[Attribute], *, k: int, scores: str, normalise: bool = False
    ) -> None:
        properties = {
            "k": IntegerAttr(k, i64), "scores": StringAttr(scores), "normalise": UnitAttr() if normalise else None,
        }  # fmt: skip
        super().__init__(operands=[x], properties=properties, result_types=list(types))

    @property
    def kind_of_scores(self) -> Scores:
        """`scores`, which `verify_op` has checked."""
        return next(each for each in SCORES if each == self.scores.data)

    def verify_op(self) -> None:
        x, k = shape_of(self.x.type), self.k.value.data
        self.expect(len(x) >= 1, "x must have a rank of at least 1")
        count = x[-1]
        fits = isinstance(count, int) and 1 <= count <= MOST_EXPERTS
        self.expect(fits, f"a row has {count} scores; it must have 1 to {MOST_EXPERTS}")
        assert isinstance(count, int)
        self.expect(1 <= k <= min(count, MOST_CHOSEN), f"k = {k} must be 1 to {min(count, MOST_CHOSEN)}")
        self.expect(self.scores.data in SCORES, f"scores must be one of {', '.join(SCORES)}")
        again = self.normalise is not None and self.scores.data == "chosen"
        self.expect(not again, "weights of chosen scores sum to 1: normalise does not apply")
        for name, value in (("weights", self.weights), ("indices", self.indices)):
            self.expect_shape(value, (*x[:-1], k), name)
        for name, kind in (("x", self.x.type), ("weights", self.weights.type)):
            self.expect(tensor_dtype(kind) in FLOATS, f"{name} must be one of {', '.join(FLOATS)}")
        self.expect(tensor_dtype(self.indices.type) == "i64", "indices must be i64")


@irdl_op_definition
class SampleOp(QCOp):
    """Draws a token (i64) for each sequence from a row of logits `x (rows, n)`, as `how (b, 10)` i64 says.

    Penalties for the tokens that `tallies (b, n)` f32 counts and `bias (b, n)` f32 change the logits; temperature,
    top-k, top-p and min-p cut the set; a number of 64 bits draws.  plan/kinds/sample.py has the words of `how` and the
    negative results, plan/sample_rule.py the definition.  Sums are integers, so that a token is the same wherever it is
    computed.
    """

    name = "qc.sample"
    x = operand_def(TensorType)
    how = operand_def(TensorType)
    tallies = operand_def(TensorType)
    bias = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, how: SSAValue, tallies: SSAValue, bias: SSAValue, type_: Attribute) -> None:
        super().__init__(operands=[x, how, tallies, bias], result_types=[type_])

    def verify_op(self) -> None:
        x, how = shape_of(self.x.type), shape_of(self.how.type)
        self.expect(len(x) == 2, f"x must be (rows, n), not of rank {len(x)}")
        fits = isinstance(x[1], str) or 1 <= x[1] <= MOST_COLUMNS
        self.expect(fits, f"a row has {x[1]} entries; it must have 1 to {MOST_COLUMNS}")
        self.expect(len(how) == 2 and how[1] == WORDS, f"how must have {WORDS} words for each sequence")
        for name, value, dtype in (
            ("how", self.how, "i64"),
            ("tallies", self.tallies, "f32"),
            ("bias", self.bias, "f32"),
        ):
            self.expect(tensor_dtype(value.type) == dtype, f"{name} must be {dtype}")
        for name, value in (("tallies", self.tallies), ("bias", self.bias)):
            self.expect_shape(value, (how[0], x[1]), name)
        self.expect_shape(self.result, how[:1])
        self.expect(tensor_dtype(self.result.type) == "i64", "the result must be i64")


def _expect_index(op: QCOp, index: SSAValue) -> None:
    op.expect(tensor_dtype(index.type) in ("i64", "i32"), "index must be i32 or i64")


def _verify_order(op: QCOp, x: SSAValue, values: SSAValue, indices: SSAValue, wanted: Sequence[Dim]) -> None:
    op.expect_shape(values, wanted, "values")
    op.expect_shape(indices, wanted, "indices")
    op.expect(tensor_dtype(values.type) == tensor_dtype(x.type), "values and x differ in element type")
    op.expect(tensor_dtype(indices.type) == "i64", "indices must be i64")
