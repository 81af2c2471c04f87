"""int8, int4, int3, int2: integer codes with a scale per group of a row or per row, and a zero point when asymmetric.

    value = (code - zero) * scale          code = clip(zero + rint(w / scale))

The formats differ in the width of the codes, the number of elements that share a scale, whether there is a zero point,
and the type of the stored scales.  Scales are the exact quotient rounded once to the stored type, and codes are rounded
against the stored scale.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatValueError
from qcompiler.formats.base import (
    Declaration,
    Encoding,
    Field,
    Format,
    Numerics,
    PackedTensor,
    Parameter,
    ParamValue,
    refuse_nonfinite,
)
from qcompiler.formats.declaration import Kind
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.packing import stream

GROUPS = (32, 64, 128)
ROW_STEP = 32
"""K must be a multiple of this if codes of less than a byte have one scale per row: 32 codes of any width fill words.
"""

Run = int | Literal["row"]
"""Elements that share an entry: this many, or a whole row."""

LARGEST_FP16 = 65504.0
_FLOAT32_MAX = np.finfo(np.float32).max
LARGEST_SCALE = np.nextafter(_FLOAT32_MAX / np.float32(127), np.float32(0))
"""One step below fp32's maximum / 127, so that the code 127 never decodes to infinity."""

MAY_OVERFLOW = np.float32(_FLOAT32_MAX / 4)
"""Groups with larger weights are decoded during encoding, since rounding may carry a value past fp32's maximum."""

_SCALE_KINDS: dict[ParamValue, tuple[Kind, int]] = {"fp16": ("f16", 16), "bf16": ("bf16", 16), "fp32": ("f32", 32)}

_ASYMMETRIC_REFERENCE = (
    "codes as ONNX QuantizeLinear defines them (division, ties to even, zero point added after rounding); scales are "
    "torchao 0.18's choose_qparams_affine (ASYMMETRIC) in float64. Where they disagree: torchao multiplies by "
    "1 / scale, compressed-tensors adds the zero point before it rounds; both move codes only at ties. "
    "Zero points come from the stored scale, torchao's from the exact one"
)


def _parameters(group: ParamValue, scale: str, *, later: tuple[str, ...] = ()) -> tuple[Parameter, ...]:
    """The family's parameters with these defaults; `later` names those that older saved programs lack."""
    return tuple(
        Parameter(name, default, choices, meaning, later=name in later)
        for name, default, choices, meaning in (
            (
                "group",
                group,
                (*GROUPS, "row"),
                'consecutive elements of a row that share a scale; "row": all of them',
            ),
            ("symmetric", True, (True, False), "False adds a zero point (uint8) per group"),
            ("scale", scale, ("fp16", "bf16", "fp32"), "type of the stored scales"),
        )
    )


class IntegerFormat(Format):
    """Group-wise or row-wise integers of `bits` bits. Codes are rounded against the stored scale."""

    bits: ClassVar[int]

    @property
    def largest(self) -> int:
        """The highest code, counted from zero: 15 for four bits."""
        return (1 << self.bits) - 1

    @property
    def half(self) -> int:
        """The code of zero in the symmetric form, and the scale's divisor: 8 for four bits."""
        return 1 << (self.bits - 1)

    @property
    def signed(self) -> bool:
        """Whether codes are stored as signed integers around 0: symmetric int8."""
        return self.bits == 8 and bool(self.setting("symmetric"))

    def group_size(self, cols: int) -> int:
        """Elements that share a scale in rows of `cols` elements."""
        group = self.setting("group")
        return group if isinstance(group, int) else cols

    # --- the declaration ---

    def declare(self) -> Declaration:
        group, symmetric = self.setting("group"), bool(self.setting("symmetric"))
        covers: Run = group if isinstance(group, int) else "row"
        block: Run = covers if isinstance(covers, int) or self.bits == 8 else ROW_STEP
        kind, width = _SCALE_KINDS[self.setting("scale")]
        if self.bits == 8:
            codes = Field("codes", "int" if symmetric else "uint", 8)
        else:
            packing = stream(3, int(block)) if self.bits == 3 else None
            codes = Field("codes", "uint", self.bits, packing=packing)
        fields = (codes, Field("scales", kind, width, covers=covers))
        zero = "codes" if self.signed else f"(codes - {self.half})" if symmetric else "(codes - zeros)"
        return Declaration(
            summary=self._summary(),
            block=block,
            blocking="row",
            tail="short" if block == "row" else "refuse",
            fields=fields if symmetric else (*fields, Field("zeros", "uint", 8, covers=covers)),
            decode=Equation(f"{zero} * scales"),
            numerics=self._numerics(),
            reference=self._reference(),
        )

    def _summary(self) -> str:
        per = "per row" if self.setting("group") == "row" else "per group of a row"
        width = "signed 8-bit" if self.signed else f"{self.bits}-bit"
        scale = self.setting("scale")
        if not self.setting("symmetric"):
            return f"{width} codes, one {scale} scale and one uint8 zero point {per}"
        return f"{width} codes, one {scale} scale {per}" + ("" if self.signed else f", zero at code {self.half}")

    def _numerics(self) -> Numerics:
        scale, top = self.setting("scale"), self.largest
        kept = "" if scale == "fp16" else "; a code whose value would pass fp32's range moves one step towards zero"
        clamp = (
            "none; a group whose scale would exceed fp16's 65504 is an error"
            if scale == "fp16"
            else "a scale is at most fp32's maximum / 127"
            if self.signed and scale == "fp32"
            else "none"
        )
        widened = "" if scale == "fp32" else ", widened to fp32"
        if not self.setting("symmetric"):
            return Numerics(
                ties="to even: code = zero + rint(w / scale)",
                zero_block=f"code 0, zero 0; a scale that rounds to 0 in {scale} is stored as 1",
                scale_clamp=f"{clamp}. Codes are clipped to 0…{top}{kept}",
                zero_point=f"0…{top}, no bias: rint(-low / scale); scale = (high - low) / {top}, low <= 0 <= high",
                reciprocal=f"divides by the stored {scale} scale{widened}",
            )
        if self.signed:
            small = " (zero row, or absmax below 9e-44)" if not self.params else ""
            return Numerics(
                ties="to even (rint)",
                zero_block=f"codes 0; a scale that rounds to 0 in {scale}{small} is stored as 1",
                scale_clamp=f"{clamp}; codes are clipped to ±127 (-128 is never used){'' if scale == 'fp32' else kept}",
                zero_point="none (symmetric)",
                reciprocal=f"divides by the stored {scale} scale{widened}",
            )
        return Numerics(
            ties=f"to even: code = {self.half} + rint(w / scale)",
            zero_block=f"code {self.half}; a scale that rounds to 0 in {scale} is stored as 1",
            scale_clamp=f"{clamp}. Codes are clipped to 0…{top}{kept}",
            zero_point=f"{self.half}, fixed; scale = (signed extreme) / -{self.half}, and of two equal extremes the "
            "negative one",
            reciprocal=f"divides by the stored {scale} scale{widened}",
        )

    def _reference(self) -> str:
        if not self.setting("symmetric"):
            return _ASYMMETRIC_REFERENCE
        if self.signed:
            return "per-channel symmetric int8 as in torch.ao and ONNX QuantizeLinear, with range ±127"
        if self.bits == 4:
            return "the scale of ggml's q4_0 (groups of 32), with codes rounded against the stored scale"
        return f"int4's rule with {self.bits} bits: the scale maps the signed extreme to the lowest code"

    def _shape_message(self, cols: int) -> str:
        if self.setting("group") == "row":
            return f"{self} needs K to be a multiple of {ROW_STEP}, and K = {cols} is not; nf4 and int8 take any K"
        fitting = [str(g) for g in GROUPS if cols % g == 0]
        way_out = f"group = {' or '.join(fitting)} would fit" if fitting else f"no group of {self.name} fits"
        return (
            f"{self} needs K to be a multiple of its group, and K = {cols} is not; {way_out}; nf4 and int8 take any K"
        )

    # --- the encoder ---

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        size = self.group_size(job.packed.cols)
        groups = tile.reshape(-1, size)
        # NumPy reduces short rows slowly; a copy with groups side by side is faster.
        turned = np.ascontiguousarray(groups.T) if size <= max(GROUPS) else groups.T
        low, high = turned.min(axis=0), turned.max(axis=0)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            refuse_nonfinite(self, job.weights, tile, start)
        first = start // size
        if self.setting("symmetric"):
            scale = self._store_scales(self._symmetric_scales(low, high), job.packed, first)
            zero = np.full(len(groups), 0 if self.signed else self.half, np.float32)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            # float64 cannot overflow here, so only the rounding to the stored type matters.
            scale = self._store_scales((high.astype(np.float64) - low) / self.largest, job.packed, first)
            zero = np.clip(np.rint(-low / scale), 0, self.largest)
            job.packed.section("zeros").reshape(-1)[first : first + len(groups)] = zero.astype(np.uint8)
        codes = groups / scale[:, None]
        np.rint(codes, out=codes)
        if not self.signed:
            codes += zero[:, None]
        # A denormal scale is coarse and a clamped scale is small, so codes may lie outside the range.
        np.clip(codes, -127 if self.signed else 0, 127 if self.signed else self.largest, out=codes)
        if max(-low.min(), high.max()) > MAY_OVERFLOW:
            _keep_finite(codes, zero[:, None], scale[:, None])
        self._store_codes(job.packed, start, codes.reshape(-1))

    def _symmetric_scales(self, low: Float32, high: Float32) -> npt.NDArray[np.float64]:
        if self.signed:
            return np.maximum(-low, high).astype(np.float64) / 127
        return np.where(-low >= high, low, high).astype(np.float64) / -self.half

    def _store_scales(self, exact: npt.NDArray[np.float64], packed: PackedTensor, first: int) -> Float32:
        """Stores scales in their type; returns them as fp32. `first` is the group of `exact[0]`."""
        out = packed.section("scales").reshape(-1)[first : first + exact.size]
        if self.signed and self.setting("scale") == "fp32":
            exact = np.minimum(exact, LARGEST_SCALE)
        with np.errstate(over="ignore"):
            out[:] = exact
        out[out == 0] = 1
        scales = out.astype(np.float32)
        if not np.isfinite(scales).all():
            index = int(np.flatnonzero(~np.isfinite(scales))[0])
            size = self.group_size(packed.cols)
            row, group = divmod(first + index, packed.cols // size)
            raise FormatValueError(
                f"row {row}, columns {group * size}…{group * size + size - 1}: the scale {exact[index]:g} exceeds "
                f"fp16's largest value {LARGEST_FP16:g}, in which {self} stores it; nf4 and int8 have fp32 scales, "
                f"and so has {self.name} with scale=fp32"
            )
        return scales

    def _store_codes(self, packed: PackedTensor, start: int, codes: Float32) -> None:
        field = self.declaration.codes
        if field.bits == 8:
            packed.section("codes").reshape(-1)[start : start + codes.size] = codes.astype(field.dtype)
            return
        raw = field.pack(codes.astype(np.uint8))
        first = start * field.bits // 8
        packed.section("codes").reshape(-1)[first : first + raw.size] = raw


def _keep_finite(codes: Float32, zero: Float32, scale: Float32) -> None:
    """Moves codes, in place, towards zero until ``(code - zero) * scale`` is finite in fp32: at most two steps."""
    with np.errstate(over="ignore"):
        while (beyond := ~np.isfinite((codes - zero) * scale)).any():
            codes[beyond] -= np.sign((codes - zero)[beyond])


class Int8(IntegerFormat):
    """int8; without parameters symmetric per row with fp32 scales: ``scale = absmax / 127``."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    parameters: ClassVar[tuple[Parameter, ...]] = _parameters("row", "fp32", later=("group", "symmetric", "scale"))


class Int4(IntegerFormat):
    """int4; without parameters symmetric in groups of 32 with fp16 scales."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    parameters: ClassVar[tuple[Parameter, ...]] = _parameters(32, "fp16", later=("scale",))


class Int3(IntegerFormat):
    """int3: codes are a stream of three bits each, lowest bits first."""

    name: ClassVar[str] = "int3"
    bits: ClassVar[int] = 3
    parameters: ClassVar[tuple[Parameter, ...]] = _parameters(32, "fp16")


class Int2(IntegerFormat):
    """int2: four codes per byte, the first in the lowest bits."""

    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2
    parameters: ClassVar[tuple[Parameter, ...]] = _parameters(32, "fp16")
