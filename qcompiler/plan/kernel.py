"""KernelSpec: everything that decides what a kernel does, and nothing about how a target writes it.

A spec is data (strict JSON): the runtime can emit and compile it again on a machine without torch and without xdsl.
Two launches with equal specs share one kernel; `KernelSpec.digest` is that identity.

Shapes and strides are `Dim`s over the program's symbols.  Strides count elements; the byte offset of an operand inside
its buffer belongs to the launch, not to the spec, so that identical layers share kernels.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from qcompiler.plan.dims import Dim

Access = Literal["r", "w", "rw"]
DType = Literal["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "ui8", "i1"]
"""Element types under MLIR's names. `i1` is stored as one byte, 0 or 1."""

ITEMSIZE: dict[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "ui8": 1, "i1": 1,
}  # fmt: skip


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all plan records: immutable, keyword-only, unknown JSON fields refused."""


class FormatRef(Strict, frozen=True):
    """A storage format by name and parameters: ``nf4`` with ``{"block": 64}``. `qcompiler.formats.get` resolves it."""

    name: str
    params: dict[str, int | bool | str] = {}


class Operand(Strict, frozen=True):
    """One pointer argument of a kernel.

    A packed operand (`format` given) has the logical shape (rows, cols), no strides, and the dtype its values decode to
    (rounded to that dtype); its bytes are those of `layout`.
    """

    name: str
    dtype: DType
    access: Access
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...] = ()
    format: FormatRef | None = None
    layout: str | None = None


# --- scalar programs: bodies of loops and epilogues ------------------------------------------------------------------


class ScalarOp(Strict, frozen=True):
    """One SSA op of a scalar body, under its MLIR name (`arith.addf`, `math.exp`, `arith.constant`, …).

    `args` are names of earlier results or of body inputs; `dtype` is the type of the result ("index" for
    `linalg.index`).  `value` belongs to `arith.constant` (floats as `float.hex()` text or "inf"/"-inf"/"nan"),
    `predicate` to `arith.cmpf`/`arith.cmpi` (MLIR's words: "olt", "sge", …), `axis` to `linalg.index`.
    """

    result: str
    op: str
    dtype: DType | Literal["index"]
    args: tuple[str, ...] = ()
    value: str | None = None
    predicate: str | None = None
    axis: int | None = None


class ScalarProgram(Strict, frozen=True):
    """Straight-line scalar code. `inputs` name the arguments in order (with dtypes), `yields` the results."""

    inputs: tuple[tuple[str, DType], ...]
    ops: tuple[ScalarOp, ...]
    yields: tuple[str, ...]


# --- kernel bodies: a tagged union, one record per template ----------------------------------------------------------


class AffineAccess(Strict, frozen=True):
    """Element offset of an operand in a loop nest: ``offset + sum(coefficients[i] * iteration[i])``."""

    offset: Dim
    coefficients: tuple[Dim, ...]


class LoopKernel(Strict, frozen=True, tag="loop"):
    """A `linalg.generic`: pointwise or reducing loops over operands at affine offsets.

    Operands are the inputs, then the outputs; `accesses` match them one to one.  `body.inputs` are one scalar per
    operand (an output's argument is its accumulator, meaningful for reductions only).  With reduction iterators each
    output starts from `init` (one constant per output, `float.hex()` text): a loop never reads an output's old bytes.
    Parallel iterators come first.
    """

    extents: tuple[Dim, ...]
    iterators: tuple[Literal["parallel", "reduction"], ...]
    accesses: tuple[AffineAccess, ...]
    body: ScalarProgram
    init: tuple[str, ...] = ()


class Window(Strict, frozen=True):
    """How a linear reads the windows of an image (batch, height, width, channels): the product of a convolution.

    Row m is the window (b, i, j), m = (b * size[0] + i) * size[1] + j; column k is the tap (y, x) and the channel c,
    k = (y * kernel[1] + x) * channels + c.  There lies image[b, i * strides[0] + y * dilation[0] - padding[0],
    j * strides[1] + x * dilation[1] - padding[1], c], or zero where that is outside of the image.
    """

    image: tuple[Dim, Dim, Dim, int]
    size: tuple[Dim, Dim]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class LinearKernel(Strict, frozen=True, tag="linear"):
    """``out[m, n] = epilogue(sum_k x[m, k] * decode(w)[n, k] + bias[n], extras[m, n]…)``, fp32 accumulation.

    Operands: x (m, k), w (n, k) plain or packed, bias (n) if `has_bias`, the epilogue's extra inputs (m, n; stride 0
    broadcasts), out (m, n).  x has unit stride along k and out unit stride along n.  Decoded weights are rounded to the
    packed operand's dtype before use.  The first epilogue input is the fp32 accumulator (bias added); the rest are the
    extras.  `m_class` is the range of M the kernel is built for.  With a `window`, x is an image and the rows are its
    windows.  With `codes`, x are rows of int8 (m, row_bytes(k)) and codes are multiplied as integers, in the order and
    with the bits of qcompiler/formats/integer_product.py.
    """

    m: Dim
    n: int
    k: int
    m_class: Literal["1", "2-8", "9-64", "large"]
    has_bias: bool
    epilogue: ScalarProgram | None = None
    window: Window | None = None
    codes: bool = False


class QuantizeRowsKernel(Strict, frozen=True, tag="quantize_rows"):
    """Rows of int8 (qcompiler/formats/int8_rows.py) of x; operands x (rows, cols), [columns (cols), i1], out (rows,
    row_bytes(cols)), i8.

    `kind` "token", "tensor" (`value` is the clip) or "outliers" (`value` is the threshold; codes are 0 in `columns`).
    """

    rows: Dim
    cols: int
    kind: Literal["token", "tensor", "outliers"]
    value: float = 0.0


class GroupedLinearKernel(Strict, frozen=True, tag="grouped_linear"):
    """``out[p, j] = sum_k x[p // repeat, k] * decode(w)[index[p] * n + j, k]``, fp32 accumulation, rounded once.

    Operands: x (rows, k), w (experts * n, k) plain or packed, index (rows * repeat; i64 or i32), out (rows * repeat,
    n).  x has unit stride along k and out unit stride along n.  Decoded weights are rounded to the packed operand's
    dtype before use.  Of w only the experts that `index` names are read.  An index outside [0, experts) gives zeros and
    is reported (on CUDA: it gives NaN).
    """

    rows: Dim
    repeat: int
    experts: int
    n: int
    k: int


class RecurrentKernel(Strict, frozen=True, tag="recurrent"):
    """One direction of one recurrent layer over all its steps: `qc.recurrent` (ir/qc_recurrent.py has the equations).

    Operands: x (steps, batch, gates * hidden), w (gates * hidden, width) plain or packed, [projection (width, hidden)
    plain or packed], [bias (gates * hidden)], start (batch, width), [cell_start (batch, hidden)], out (steps, batch,
    width), [cell (batch, hidden)], [room (batch, hidden), f32].  `gates` is 4 for "lstm", 3 for "gru", else 1; only an
    LSTM has cells.  width = hidden unless the layer `projects`, as an LSTM may; then `room` ends as the last step's
    hidden state before its projection.  `reverse` takes the steps from the last one to the first.

    Sums in fp32.  out is rounded at each step and the next step reads it so; the same holds of the cell state, which
    lies in `cell` from step to step.  Decoded weights are rounded to the packed operand's dtype before use.
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
        """Blocks of `hidden` rows of w, one below the other."""
        return GATES[self.kind]


GATES: dict[str, int] = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
"""Gates of each kind of recurrent layer, in torch's order: input, forget, cell, output; reset, update, new."""


class BatchMatmulKernel(Strict, frozen=True, tag="batch_matmul"):
    """``out[b…, m, n] = sum_k a[b…, m, k] * b[b…, k, n]`` over strided operands of equal rank, fp32 accumulation."""

    batch: tuple[Dim, ...]
    m: Dim
    n: Dim
    k: Dim


class AttentionKernel(Strict, frozen=True, tag="attention"):
    """``softmax(q kᵀ * scale + mask) v`` per head; operands q, k, v, [mask], [last], out.

    All but `last` have the dims (batch, heads, length, dim).  k and v may have fewer heads (heads % kv_heads == 0:
    grouped queries).  A boolean mask keeps where true; a float mask is added; mask strides of 0 broadcast.  `causal`:
    query i sees keys j <= i (torch's top-left alignment).  `window`: query i sees keys j > i - window.  With `last`, an
    integer operand (batch, q_len), query i counts as number last[b, i] in both and sees keys j <= last[b, i]; keys past
    the last one of a block of queries are not read.  `softcap`: scaled scores x become softcap * tanh(x / softcap),
    before any mask.  A row that sees no key gives zeros.  The last dim of q, k, v, out has unit stride.
    """

    batch: Dim
    heads: int
    kv_heads: int
    q_len: Dim
    kv_len: Dim
    head_dim: int
    value_dim: int
    scale: float
    causal: bool
    mask: Literal["none", "bool", "float"]
    window: int | None = None
    softcap: float | None = None
    last: bool = False


class NormKernel(Strict, frozen=True, tag="norm"):
    """Layer or RMS norm over the last dim; operands x (rows, cols), [weight (cols)], [bias (cols)], out (rows, cols).

    Statistics in fp32 over two passes; ``(x - mean) / sqrt(var + eps)`` with the biased variance, or
    ``x / sqrt(mean(x²) + eps)``; rounded once.
    """

    kind: Literal["layer", "rms"]
    rows: Dim
    cols: int
    eps: float
    has_weight: bool
    has_bias: bool


class SoftmaxKernel(Strict, frozen=True, tag="softmax"):
    """Softmax over the last dim, operands x (rows, cols), out (rows, cols), fp32 inside, rounded once."""

    rows: Dim
    cols: Dim


class EmbeddingKernel(Strict, frozen=True, tag="embedding"):
    """``out[i, :] = decode(table)[ids[i], :]``; operands ids (count), table (rows, cols) plain or packed, out.

    An id outside [0, rows) is an error that the kernel reports through the context; on CUDA it gives a row of NaN.
    """

    count: Dim
    rows: int
    cols: int


class GatherKernel(Strict, frozen=True, tag="gather"):
    """`take`: ``out[o, i, n] = x[o, index[i], n]``; `along`: ``out[o, i, n] = x[o, index[o, i, n], n]``.

    Operands x (outer, length, inner), index, out. Negative indices count from the end; those out of range are reported
    (on CUDA: they give NaN, or the lowest integer).
    """

    mode: Literal["take", "along"]
    outer: Dim
    length: Dim
    count: Dim
    inner: Dim


class IndexUpdateKernel(Strict, frozen=True, tag="index_update"):
    """In place ``x[o, index[i], n] = src[o, i, n]``; operands x (rw; outer, length, inner), index (count), src.

    Indices are in [0, length): others, negative ones included, are reported (on CUDA: they write nothing).
    """

    outer: Dim
    length: Dim
    count: Dim
    inner: Dim


class ScanKernel(Strict, frozen=True, tag="scan"):
    """Running sum (or another fold) along the middle dim of (outer, length, inner); operands x, out."""

    outer: Dim
    length: Dim
    inner: Dim
    fold: Literal["add", "mul", "max", "min", "logaddexp"] = "add"


class ScatterKernel(Strict, frozen=True, tag="scatter"):
    """In place ``out[o, index[o, i, n], n] = src[o, i, n]``, or folded into what stands there, i in ascending order.

    Operands index (outer, count, inner), src (outer, count, inner), out (rw; outer, length, inner).  Negative indices
    count from the end; those out of range are reported (on CUDA: they write nothing).  Each fold rounds to out's type.
    """

    outer: Dim
    length: Dim
    count: Dim
    inner: Dim
    fold: Literal["none", "add", "mul", "max", "min"]


class OrderKernel(Strict, frozen=True, tag="order"):
    """The first `count` entries along the middle dim in sorted order: sort (count = length) and top-k.

    Operands x (outer, length, inner), values and indices (i64), both (outer, count, inner).  NaN counts as the largest
    value; equal values keep their order.
    """

    outer: Dim
    length: Dim
    count: Dim
    inner: Dim
    descending: bool


class ArgmaxKernel(Strict, frozen=True, tag="argmax"):
    """The position of the first maximum along the middle dim; operands x (outer, length, inner), out (outer, inner).

    The first NaN counts as the maximum.
    """

    outer: Dim
    length: Dim
    inner: Dim


KernelBody = (
    LoopKernel | LinearKernel | GroupedLinearKernel | BatchMatmulKernel | AttentionKernel | NormKernel | SoftmaxKernel
    | EmbeddingKernel | GatherKernel | IndexUpdateKernel | ScanKernel | ScatterKernel | OrderKernel | ArgmaxKernel
    | QuantizeRowsKernel | RecurrentKernel
)  # fmt: skip


class KernelSpec(Strict, frozen=True):
    """One kernel: its C name, the symbols it takes at run time (in order), its operands and its body.

    `serves` tells the reader which op and place in the model it was emitted for first; it is no part of the identity.
    """

    name: str
    symbols: tuple[str, ...]
    operands: tuple[Operand, ...]
    body: KernelBody
    serves: str = ""

    @property
    def digest(self) -> str:
        """sha256 of everything but the name and `serves`."""
        bare = msgspec.structs.replace(self, name="", serves="")
        return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()

    @property
    def template(self) -> str:
        return str(type(self.body).__struct_config__.tag)
