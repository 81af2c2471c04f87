"""linear: a product with a weight, plain or packed, with bias and epilogue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from qcompiler.errors import PlanError
from qcompiler.formats import int8_rows
from qcompiler.plan.dims import Dim, product
from qcompiler.plan.kernel_body import (
    ANY,
    COUNTED_IN_32_BITS,
    FLOATS,
    OPERATIONS_PER_ELEMENT,
    ROW_ALIGNMENT,
    Contract,
    Role,
    RoleKernel,
    Symbols,
    same_dims,
    value_of,
)
from qcompiler.plan.operands import Access, Operand, ScalarProgram, Strict
from qcompiler.plan.pairs import PAIR_LAYOUTS
from qcompiler.plan.row_statistics import Kind, width
from qcompiler.plan.scalar_types import check_program


class Window(Strict, frozen=True):
    """im2col: how a linear reads its rows from an image (batch, height, width, channels), to compute a convolution.

    Row m is the window (b, i, j), with m = (b * size[0] + i) * size[1] + j. Column k is the tap (y, x) and the channel
    c, with k = (y * kernel[1] + x) * channels + c. The value at (m, k) is image[b, i * strides[0] + y * dilation[0] -
    padding[0], j * strides[1] + x * dilation[1] - padding[1], c], or zero if that lies outside the image.
    """

    image: tuple[Dim, Dim, Dim, int]
    size: tuple[Dim, Dim]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


MOST_NORMALISED = 32768
"""The most elements of x (rows times columns) that a prologue normalises. The norm's own kernel takes four operations
for each, and a task of a CPU is 65,536 operations: more elements are worth sharing among threads."""


STATISTICS = "statistics"
"""The role of the statistics of rows, in parts, that a linear writes, and that a norm in a prologue reads."""

MANY_ROWS = ("9-64", "large")
"""The classes of rows whose kernels write and read statistics of rows."""

RESIDUAL = "residual"
"""The role of the rows that a norm in a prologue is added to."""


ROUNDED_TO = ("f32", "bf16")
"""The types of a weight that x may differ from: kernels convert x to them. fp32 holds the values of f16 and bf16."""


class RowNorm(Strict, frozen=True):
    """A norm in the prologue of a linear: a layer or RMS norm of rows, which are rounded to the type of x.

    The equations are those of `NormKernel`, and so are the bits: every target sums in the order of its norm kernel.
    With `keeps`, the linear also writes the rows that it makes, for other readers. With `has_residual`, the rows are
    added to those of a residual, and rounded again. With `given`, the statistics of the rows are an operand, in parts
    (plan/row_statistics.py), which the linear that wrote the rows has written.
    """

    kind: Literal["layer", "rms"]
    eps: float
    has_weight: bool
    has_bias: bool
    keeps: bool = False
    has_residual: bool = False
    given: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The roles of the operands that it reads, in order."""
        first = "residual" if self.has_residual else "norm"
        read = (
            (f"{first}_weight", self.has_weight), (f"{first}_bias", self.has_bias), (RESIDUAL, self.has_residual),
            (STATISTICS, self.given),
        )  # fmt: skip
        return tuple(name for name, there in read if there)


class RowCodes(Strict, frozen=True):
    """The prologue of a linear that multiplies codes: the int8 rows of x, or of its norm, as `QuantizeRowsKernel` makes
    them. `value` is the clip of kind "tensor". With `keeps`, the linear also writes the codes for other readers."""

    kind: Literal["token", "tensor"]
    value: float = 0.0
    keeps: bool = False


class LinearKernel(RoleKernel, frozen=True, tag="linear"):
    """``out[m, n] = epilogue(sum_k x[m, k] * decode(w)[n, k] + bias[n], extras[m, n]…)``, summed in fp32.

    Operands: x (m, k), w (n, k) plain or packed, bias (n) if `has_bias`, the epilogue's extra inputs (m, n; stride 0
    broadcasts), weight and bias (k) and residual (m, k) of the norms, the rows that are kept (m, k) or the codes (m,
    row_bytes(k)), out (m, n). x has unit stride along k, and out along n. x is rounded to w's dtype where that is
    narrower; decoded weights are rounded to it or stay in fp32. The first epilogue input is the fp32 sum with the bias
    added; the others are the extras. `m_class` is the range of M that the kernel is built for. With a `window`, x is an
    image, and the rows are its windows. With `codes`, x holds int8 rows (m, row_bytes(k)), and the kernel multiplies
    codes as integers, with the results of qcompiler/formats/integer_product.py. With both, the pixels of the image are
    int8 rows (batch, height, width, row_bytes(channels)), and a window has the scale of its image's first pixel.

    With `pairs`, w has two halves of rows (n is even) in one of `plan/pairs.py`'s layouts, and out has n / 2 columns:
    ``out[m, j] = epilogue(sum[m, j], sum[m, n / 2 + j], extras[m, j]…)``.  Its first two inputs are the fp32 sums of a
    pair of rows, biases added.

    With a `norm`, the product reads the normalised rows of x, and with `rows` it reads the int8 rows that the kernel
    makes of x or of the norm.  Their number m is known then.  With an `added` norm, which has a residual, all this goes
    by `residual + added(x)` in place of x; these are the rows that it may keep.

    With `statistics`, the kernel writes those of the rows of out as well, in parts: the operand in front of out. A norm
    whose statistics are given may have any number of rows.
    """

    m: Dim
    n: int
    k: int
    m_class: Literal["1", "2-8", "9-64", "large"]
    has_bias: bool
    epilogue: ScalarProgram | None = None
    window: Window | None = None
    codes: bool = False
    pairs: bool = False
    norm: RowNorm | None = None
    rows: RowCodes | None = None
    added: RowNorm | None = None
    statistics: Kind | None = None

    @property
    def norms(self) -> tuple[RowNorm, ...]:
        """The norms of the prologue, in order."""
        return tuple(norm for norm in (self.added, self.norm) if norm is not None)

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.pairs else self.n

    @property
    def sums(self) -> int:
        """How many inputs of the epilogue are sums of products."""
        return 2 if self.pairs else 1

    @property
    def count(self) -> int:
        """How many operands the kernel has."""
        norm = sum(len(each.names) for each in self.norms)
        return 2 + self.has_bias + norm + self._wanted + self.written

    @property
    def _wanted(self) -> int:
        """Extra inputs that the epilogue takes."""
        return 0 if self.epilogue is None else len(self.epilogue.inputs) - self.sums

    def contract(self, operands: int) -> Contract:
        self._check_norm()
        norm = [name for each in self.norms for name in each.names]
        extras = operands - 2 - self.has_bias - len(norm) - self.written
        wanted = self._wanted
        if extras != wanted:
            raise PlanError(
                f"a linear kernel has {operands} operands, which do not fit its bias and epilogue: it takes {wanted} "
                f"extra inputs, {extras} are given"
            )
        self._check_pairs()
        self._check_statistics()
        x = Role("x", (self.m, self.k), unit=True)
        if self.window is not None:
            x = Role("x", self._image(self.window), unit=True)
        if self.codes and self.rows is None:
            x = self._codes("x", "r") if self.window is None else self._pixels(self.window)
        return Contract(
            (
                x,
                Role("w", (self.n, self.k), packed=True),
                *([Role("bias", (self.n,), unit=True)] if self.has_bias else []),
                *(Role(f"extra{i}", (self.m, self.columns), dtypes=ANY) for i in range(extras)),
                *(self._norm_role(name) for name in norm),
                *([Role("rows", (self.m, self.k), "w", unit=True, like="x")] if self.keeps else []),
                *([self._codes("kept_codes", "w")] if self.keeps_codes else []),
                *([self._parts(self.statistics, self.n, "w")] if self.statistics is not None else []),
                Role("out", (self.m, self.columns), "w", unit=True),
            ),
            work=(self.m, self.n, self.k),
            positive=(self.n, *((self.k,) if self._needs_columns else ()), *self._scaled_pixels),
            extents=(self.m, self.k, *((*self.window.image, *self.window.size) if self.window is not None else ())),
        )

    def operations(self, operands: Sequence[Operand], symbols: Symbols) -> int:
        rows = value_of(self.m, symbols)
        own = OPERATIONS_PER_ELEMENT * rows * (len(self.norms) * self.k + (self.statistics is not None) * self.n)
        return 2 * rows * self.n * self.k + own

    def extras(self, operands: int) -> range:
        """The places of the epilogue's extra inputs among this number of operands."""
        norm = sum(len(each.names) for each in self.norms)
        return range(2 + self.has_bias, operands - norm - self.written)

    @property
    def written(self) -> int:
        """How many operands it writes, the last ones: out, and in front of it rows that it keeps, or statistics."""
        return 1 + self.keeps + self.keeps_codes + (self.statistics is not None)

    @property
    def given(self) -> RowNorm | None:
        """The norm whose statistics are an operand."""
        return self.norm if self.norm is not None and self.norm.given else None

    @property
    def keeps(self) -> bool:
        """Whether the operand before the last is the rows that its first norm makes, which it writes."""
        return any(norm.keeps for norm in self.norms[:1])

    @property
    def keeps_codes(self) -> bool:
        """Whether the operand before the last is the rows of int8 that it makes, which it writes."""
        return self.rows is not None and self.rows.keeps

    @property
    def _needs_columns(self) -> bool:
        return self.codes or self.window is not None or bool(self.norms)

    def _check_norm(self) -> None:
        if self.rows is not None and (not self.codes or not math.isfinite(self.rows.value) or self.rows.value < 0):
            raise PlanError(f"a linear kernel makes rows of int8 with the value {self.rows.value}, to multiply codes")
        if not self.norms and self.rows is None:
            return
        if (self.added is not None and not self.added.has_residual) or (
            self.norm is not None and (self.norm.has_residual or (self.norm.keeps and self.added is not None))
        ):
            raise PlanError("a linear kernel adds one norm to a residual, and keeps the rows of its first norm alone")
        if self.keeps and self.keeps_codes:
            raise PlanError("a linear kernel keeps the rows of its norm or the codes that it makes, not both")
        if (self.codes and self.rows is None) or self.window is not None:
            raise PlanError("a linear kernel normalises rows of floats, not of int8 and not those of an image")
        if self.given is not None:
            return
        if not isinstance(self.m, int) or not 1 <= self.m * self.k <= MOST_NORMALISED:
            raise PlanError(
                f"a linear kernel normalises or quantises {self.m} rows of {self.k} columns; their number must be "
                f"known, and they must have 1 to {MOST_NORMALISED} elements"
            )

    def _check_statistics(self) -> None:
        if self.statistics is None and not any(norm.given for norm in self.norms):
            return
        alone = self.added is None and not self.keeps and not self.codes and self.rows is None and self.window is None
        if not alone or (self.pairs and self.statistics is not None) or self.m_class not in MANY_ROWS:
            raise PlanError(
                f"a linear kernel of M class {self.m_class} writes or reads statistics of rows; those of "
                f"{' and '.join(MANY_ROWS)} do, of floats, without windows, rows that are kept and a norm with a "
                "residual, and none that combines pairs writes them"
            )

    def _norm_role(self, name: str) -> Role:
        """What is required of an operand of a norm."""
        if name == RESIDUAL:
            return Role(name, (self.m, self.k), unit=True, like="x")
        if name == STATISTICS:
            assert self.norm is not None
            return self._parts(self.norm.kind, self.k, "r")
        return Role(name, (self.k,), unit=True)

    def _codes(self, name: str, access: Access) -> Role:
        width = int8_rows.row_bytes(self.k)
        return Role(name, (self.m, width), access, dtypes=("i8",), unit=True, align=ROW_ALIGNMENT)

    def _pixels(self, window: Window) -> Role:
        shape = (*window.image[:3], int8_rows.row_bytes(window.image[3]))
        return Role("x", shape, dtypes=("i8",), unit=True, align=ROW_ALIGNMENT)

    @property
    def _scaled_pixels(self) -> tuple[Dim, ...]:
        """Sizes that must not be 0, since the first pixel of an image has the scale of its windows."""
        return self.window.image[1:3] if self.codes and self.window is not None else ()

    def _parts(self, kind: Kind, columns: int, access: Access) -> Role:
        name = STATISTICS if access == "r" else "parts"
        return Role(name, (self.m, width(kind, columns)), access, dtypes=("f32",), unit=True)

    def _check_pairs(self) -> None:
        if not self.pairs:
            return
        if self.n % 2 or self.epilogue is None or self.window is not None:
            raise PlanError(
                f"a linear kernel combines pairs of {self.n} rows; their number must be even, an epilogue must combine "
                "them, and x must not be an image"
            )

    def _image(self, window: Window) -> tuple[Dim, ...]:
        """The shape of the image that the rows are read from. PlanError for a window that no kernel can read."""
        batch, _, _, channels = window.image
        numbers = (*window.kernel, *window.strides, *window.dilation, channels)
        if min(numbers) < 1:
            raise PlanError(
                f"a linear kernel reads windows {window.kernel} of {channels} channels; all must be positive"
            )
        if max(*numbers, *window.padding) > COUNTED_IN_32_BITS or min(window.padding) < 0:
            raise PlanError(
                f"a linear kernel reads windows with padding {window.padding} and numbers {numbers}; none may be "
                f"negative or above {COUNTED_IN_32_BITS}"
            )
        taps = math.prod(window.kernel) * channels
        if not same_dims((self.m, self.k), (product([batch, *window.size]).to_dim(), taps)):
            raise PlanError(
                f"a linear kernel runs over {[self.m, self.k]}, its windows are {[batch, *window.size]} rows of {taps}"
            )
        return window.image

    def check_operands(self, operands: Sequence[Operand]) -> None:
        """PlanError unless the epilogue takes the fp32 sums and the extra operands, and gives one float, unless the
        weight's rows are in the order of pairs exactly where pairs are combined, and unless kernels round x to the
        weight's type where that is another."""
        program, layout = self.epilogue, operands[1].layout
        x, w = operands[0].dtype, operands[1].dtype
        if not self.codes and x != w and w not in ROUNDED_TO:
            raise PlanError(
                f"its x is {x} and its weight {w}: kernels round x to the weight's type only where that is one of "
                f"{', '.join(ROUNDED_TO)}"
            )
        if self.pairs != (layout in PAIR_LAYOUTS):
            raise PlanError(
                f"its weight is in layout '{layout or 'canonical'}', and it {'combines' if self.pairs else 'knows no'} "
                f"pairs of rows, which {', '.join(PAIR_LAYOUTS)} hold"
            )
        if program is None:
            return
        extras = [operands[place] for place in self.extras(len(operands))]
        wanted = (*("f32",) * self.sums, *(operand.dtype for operand in extras))
        given = tuple(dtype for _, dtype in program.inputs)
        if given != wanted or len(program.yields) != 1:
            raise PlanError(f"its epilogue takes {given} and gives {len(program.yields)} values, not {wanted}, 1")
        types = check_program(program, 0)
        if types[program.yields[0]] not in FLOATS:
            raise PlanError(f"its epilogue gives {types[program.yields[0]]}, not one of {', '.join(FLOATS)}")
