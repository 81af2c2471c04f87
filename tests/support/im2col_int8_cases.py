"""Cases of windows of images of int8 rows times the codes of a weight, on every target, and the bits that they must
give. Their taps are gathered by loops, which share no code with `formats/int8_rows.py`'s `windows`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qcompiler import formats
from qcompiler.config import parse_format, resolve_format
from qcompiler.formats import int8_rows, integer_product
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, Window
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel

Array = np.ndarray
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
SIZES = ((1, 7, 7), (3, 9, 11), (2, 14, 8))
"""Images, their height and width. Of several images, one is zero and one has a NaN."""


@dataclass(frozen=True)
class Case:
    """`gap` are bytes between neighbouring pixels. The result has a bias."""

    format: str
    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    n: int = 37
    dtype: DType = "f32"
    m_class: str = "large"
    gap: int = 0
    layout: str = ""

    @property
    def name(self) -> str:
        return f"w{zlib.crc32(repr(self).encode()):08x}"

    @property
    def k(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.channels

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Windows down and across."""
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        given = zip((height, width), self.padding, reach, self.strides, strict=True)
        down, across = ((extent + 2 * border - far) // step + 1 for extent, border, far, step in given)
        return down, across

    @property
    def packed(self) -> formats.PackedTensor:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        weight = rng.standard_normal((self.n, self.k)).astype(np.float32)
        weight[0] = np.where(np.arange(self.k) % 2, 1.0, -1.0)  # codes at both ends
        return resolve_format(self.format).encode(weight)

    @property
    def weight(self) -> Array:
        """The bytes that the kernel reads."""
        packed = self.packed
        return layouts.get(self.layout).pack(packed.format, "f32", packed.rows, packed.cols, packed.data)

    @property
    def spec(self) -> KernelSpec:
        """Sizes are symbols: b images of h x w, r x q windows each."""
        width = int8_rows.row_bytes(self.channels)
        step = width + self.gap
        window = Window(
            image=("b", "h", "w", self.channels), size=("r", "q"), kernel=self.kernel, strides=self.strides,
            padding=self.padding, dilation=self.dilation,
        )  # fmt: skip
        operands = (
            Operand(name="x", dtype="i8", access="r", shape=("b", "h", "w", width),
                    strides=(f"{step}*h*w", f"{step}*w", step, 1)),
            Operand(name="w", dtype="f32", access="r", shape=(self.n, self.k), format=parse_format(self.format),
                    layout=self.layout),
            Operand(name="bias", dtype="f32", access="r", shape=(self.n,), strides=(1,)),
            Operand(name="out", dtype=self.dtype, access="w", shape=("b*q*r", self.n), strides=(self.n, 1)),
        )  # fmt: skip
        body = LinearKernel(
            m="b*q*r", n=self.n, k=self.k, m_class=self.m_class, has_bias=True, codes=True, window=window  # type: ignore[arg-type]
        )  # fmt: skip
        return KernelSpec(name=self.name, symbols=("b", "h", "w", "r", "q"), operands=operands, body=body)

    def image(self, batch: int, height: int, width: int) -> Array:
        """int8 rows (b, h, w, row_bytes + gap), with bytes between the pixels that nothing may read."""
        x = pixels(batch, height, width, self.channels)
        rows = int8_rows.row_bytes(self.channels)
        wide = np.full((batch, height, width, rows + self.gap), 99, np.int8)
        wide[..., :rows] = int8_rows.quantise(x, "image", 0.0, None, magnitudes(x))
        return wide

    @property
    def bias(self) -> Array:
        return np.random.default_rng(1).standard_normal(self.n).astype(np.float32)

    def taps(self, codes: Array, size: tuple[int, int]) -> Array:
        """The codes (b * r * q, K) of every window, tap after tap."""
        (top, left), (dy, dx), (sy, sx) = self.padding, self.dilation, self.strides
        border = np.pad(codes, ((0, 0), (top, top), (left, left), (0, 0)))
        found = [
            border[:, y * dy : y * dy + (size[0] - 1) * sy + 1 : sy, x * dx : x * dx + (size[1] - 1) * sx + 1 : sx]
            for y in range(self.kernel[0])
            for x in range(self.kernel[1])
        ]
        return np.concatenate(found, axis=-1).reshape(-1, self.k)

    def expected(self, image: Array) -> Array:
        """The result (b * r * q, n), by formats/integer_product.py."""
        height, width = image.shape[1:3]
        rows = np.ascontiguousarray(image[..., : int8_rows.row_bytes(self.channels)])
        size = self.size(height, width)
        codes = self.taps(int8_rows.codes_of(rows, self.channels), size)
        scales = np.repeat(int8_rows.scales_of(rows, self.channels)[:, 0, 0], size[0] * size[1])
        sums = integer_product.multiply(codes, scales, self.packed) + self.bias
        return sums.astype(DTYPES[self.dtype])


def pixels(batch: int, height: int, width: int, channels: int, dtype: DType = "f32") -> Array:
    """(b, h, w, c) of several magnitudes. The second image is zero, the last of three has a NaN."""
    rng = np.random.default_rng(batch * 1000 + height * width + channels)
    x = rng.standard_normal((batch, height, width, channels)).astype(np.float32)
    x *= np.logspace(-2, 1, height, dtype=np.float32)[:, None, None]
    x[0, 0, 0, 0] = -40.0
    if batch > 1:
        x[1] = 0.0
    if batch > 2:
        x[2, height // 2, width // 2, channels // 2] = np.nan
    return x.astype(DTYPES[dtype])


def magnitudes(x: Array) -> Array:
    """The largest of each image, NaN where it has one."""
    return np.abs(x.astype(np.float32)).reshape(len(x), -1).max(axis=1)


def quantize_spec(dtype: DType, channels: int) -> KernelSpec:
    """The pixels of b images of e pixels as int8 rows."""
    row = int8_rows.row_bytes(channels)
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=("b*e", channels), strides=(channels + 3, 1)),
        Operand(name="largest", dtype="f32", access="r", shape=("b",), strides=(1,)),
        Operand(name="out", dtype="i8", access="w", shape=("b*e", row), strides=(row + 16, 1)),
    )
    body = QuantizeRowsKernel(rows="b*e", cols=channels, kind="image", images="b", each="e")
    return KernelSpec(name=f"q_{dtype}_{channels}", symbols=("b", "e"), operands=operands, body=body)


CASES = (
    Case("int8", 32, (3, 3), padding=(1, 1)),  # a tap is half of a line
    Case("int8", 96, (2, 3), (2, 1), (0, 2), n=16),  # a line and a half
    Case("int8:symmetric=False", 17, (3, 2), (1, 2), (2, 1), (2, 3), dtype="bf16"),
    Case("int4", 32, (7, 7), (2, 2), (3, 3), n=130),
    Case("q4_K", 64, (2, 2), padding=(4, 5), gap=32),  # some windows see nothing of the image
    Case("mxfp4", 160, (1, 3), padding=(0, 1), m_class="2-8", dtype="f16"),
)
"""One of each way of multiplying and of each way of copying."""

OTHERS = (
    Case("int8", 64, (1, 1), (2, 2)),
    Case("int8", 5, (7, 7), (2, 2), (3, 3)),
    Case("int8", 130, (3, 3), padding=(1, 1), gap=16),
    Case("int8", 1, (5, 1), padding=(2, 0)),
    Case("int8", 31, (1, 3)),  # K = 93: three columns of the last step are in no tap
    Case("int8", 63, (3, 1)),
    Case("int8", 24, (2, 4)),  # K = 192: the last line of a window ends behind the window, and no room is left there
    Case("int8", 512, (3, 3), padding=(1, 1), n=32),
    Case("int8:group=64", 64, (3, 3), dilation=(2, 2), padding=(2, 2)),
    Case("int4:group=64,symmetric=False", 64, (3, 3), padding=(1, 1)),
    Case("int3", 32, (3, 3), padding=(1, 1)),
    Case("int2", 96, (3, 3), padding=(1, 1)),
    Case("llm_int8", 33, (3, 3), padding=(1, 1)),
    Case("q8_0", 32, (3, 3), padding=(1, 1)),
    Case("q4_1", 32, (3, 3), padding=(1, 1)),
    Case("q6_K", 64, (4, 4), padding=(1, 1)),
    Case("tq2_0", 64, (2, 2)),
    Case("iq4_xs", 128, (2, 2)),
    Case("nvfp4", 16, (3, 3), padding=(1, 1)),  # groups of 16 columns
)


def odd_sizes(case: Case) -> list[tuple[int, int, int]]:
    """Images of a pixel, of a line, and of fewer lines than the kernel has: those of which a case has windows."""
    every = ((1, 1, 1), (2, 1, 9), (3, 8, 1), (1, 3, 2), (2, 2, 70))
    return [size for size in every if min(case.size(*size[1:])) > 0]
