"""Common parts of ggml's block formats (GGUF files): their declarations, limits and arithmetic.

A row is cut into blocks of 32 elements, or superblocks of 256 that hold 8 or 16 sub-blocks with scales of their own.
The canonical bytes are ggml's blocks one after another, which are the bytes of a tensor in a GGUF file.

The reference for the arithmetic is ggml's C source, with every operation rounded to fp32 and sums in the order of the
loops (`quantize_row_*_ref` and, with an importance, `quantize_*`, of ggml-quants.c as shipped with llama-cpp-python
0.3.36, compiled without contraction of ``a*b + c``).  A build with contraction, as in most installations, rounds some
products differently, so another of several nearly equal candidates of a search may win.  For 4096 superblocks of
normal weights (sigma 0.02; gcc 12, -march=x86-64-v3) contraction changed, in percent of superblocks / of codes: q5_K
29 / 1.9, q2_K 23 / 1.0, q4_K 6 / 0.15, q6_K 1.7 / 0.03, iq4_xs 0.2 / 0.001, q3_K none; with an importance between
0.1 / 0.001 (iq4_xs) and 3.6 / 0.2 (q5_K).  q4_0, q4_1, q5_0, q5_1, q8_0, tq1_0, tq2_0 and mxfp4 have nothing to
contract.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatValueError
from qcompiler.formats.base import Encoding, Format, refuse_nonfinite
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Equation, Float32

LARGEST_FP16 = 65504.0
LARGEST_IMPORTANCE = 1e15
"""Above this limit, sums of importance times squares may overflow, after which ggml stores zeros."""

SOURCE = "ggml-quants.c of llama.cpp (in llama-cpp-python 0.3.36)"


def quiet() -> np.errstate:
    """A context for arithmetic whose results are checked afterwards."""
    return np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore")


class GgmlFormat(Format):
    """A format of GGUF files: blocks of `block` elements of a row, stored as ggml's bytes."""

    block: ClassVar[int]
    ggml_type: ClassVar[int]
    """The number of the type in GGUF files (enum ggml_type)."""

    def _declare(
        self, summary: str, fields: tuple[Field, ...], decode: str, numerics: Numerics, reference: str, **more: Any
    ) -> Declaration:
        """The declaration, with the parts that all ggml formats have in common."""
        return Declaration(
            summary=summary, block=self.block, blocking="row", tail="refuse", fields=fields, decode=Equation(decode),
            numerics=numerics, reference=reference, **more,
        )  # fmt: skip

    def _shape_message(self, cols: int) -> str:
        fitting = "q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4_ggml, nf4 and int8" if cols % 32 == 0 else "nf4 and int8"
        return (
            f"{self} stores rows of whole blocks of {self.block}, and K = {cols} is not a multiple of it; "
            f"{fitting} take K = {cols}"
        )

    @functools.cached_property
    def reach(self) -> float:
        """The largest magnitude that the format can store; infinite if its scales are not fp16."""
        d = self.declaration
        extremes = []
        for f in d.fields:
            low, high = (-(1 << f.bits - 1), (1 << f.bits - 1) - 1) if f.kind == "int" else (0, (1 << f.bits) - 1)
            extremes.append((LARGEST_FP16,) if f.kind == "f16" else (np.inf,) if f.kind == "e8m0" else (low, high))
        values = []
        for chosen in itertools.product(*extremes):
            entries = {f.name: np.array(v) for f, v in zip(d.fields, chosen, strict=True)}
            with quiet():
                values.append(np.abs(d.decode.evaluate(entries, d.table_arrays)).max())
        return float(np.nanmax(values))

    @property
    def far(self) -> float:
        """Larger magnitudes are refused before the search: below twice `reach` only scales can overflow, above it sums
        of squares can, too."""
        return 2 * self.reach

    def _blocks(self, job: Encoding, start: int, tile: Float32) -> Float32:
        """The tile as (blocks, elements). FormatValueError for an element that is not finite, or far out of reach."""
        if not np.isfinite(tile).all():
            refuse_nonfinite(self, job.weights, tile, start)
        blocks = tile.reshape(-1, self.block)
        largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
        far = largest > self.far
        if far.any():
            with quiet():
                needed = largest * np.float32(LARGEST_FP16 / self.reach)
            self._refuse_scale(job, start, int(np.flatnonzero(far)[0]), needed, "scale")
        return blocks

    def _half(self, job: Encoding, start: int, exact: Float32, what: str) -> npt.NDArray[np.float16]:
        """Block scales (blocks,) rounded to fp16 as (blocks, 1). FormatValueError if one exceeds fp16's range."""
        with np.errstate(over="ignore"):
            half = exact.astype(np.float16)
        if not np.isfinite(half).all():
            self._refuse_scale(job, start, int(np.flatnonzero(~np.isfinite(half))[0]), exact, what)
        return half[:, None]

    def _importance(self, job: Encoding, start: int, blocks: Float32) -> Float32 | None:
        """The importance of each element of a tile's blocks, or None if the caller gave none."""
        if job.importance is None:
            return None
        if job.importance.max() > LARGEST_IMPORTANCE:
            raise FormatValueError(
                f"{self}: an importance of {job.importance.max():g} may overflow fp32 in the search; only ratios "
                f"matter: divide all by their mean (the limit is {LARGEST_IMPORTANCE:g})"
            )
        of_block = job.importance.reshape(-1, self.block)
        return of_block[(start // self.block + np.arange(len(blocks))) % len(of_block)]

    def _check_scales(self, job: Encoding, start: int, scales: Float32) -> None:
        """FormatValueError if a sub-block's scale (blocks, sub-blocks) overflowed or was lost in infinities."""
        bad = ~np.isfinite(scales).all(axis=1)
        if bad.any():
            self._refuse_scale(job, start, int(np.flatnonzero(bad)[0]), np.abs(scales).max(axis=1), "scale")

    def _refuse_scale(self, job: Encoding, start: int, block: int, exact: Float32, what: str) -> None:
        """Raises FormatValueError for block number `block` of a tile that begins at element `start`."""
        row, col = divmod(start + block * self.block, job.packed.cols)
        raise FormatValueError(
            f"row {row}, columns {col}…{col + self.block - 1}: the {what} {exact[block]:g} exceeds fp16's largest "
            f"value {LARGEST_FP16:g}, in which {self} stores it (ggml would store infinity); nf4 and int8 have fp32 "
            "scales"
        )


def reciprocal(values: Float32) -> Float32:
    """1 / values, and 0 for values that are 0. Infinite below 2.9e-39, where 1 / value exceeds fp32."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / values
    inverse[values == 0] = 0
    return inverse


def codes_of(transposed_codes: Float32, block: int) -> npt.NDArray[np.uint8]:
    """Codes (sub-block size, sub-blocks), as ggml_search returns them, as bytes (blocks, block)."""
    return transposed_codes.T.astype(np.uint8).reshape(-1, block)


def round_away(values: Float32) -> Float32:
    """C's roundf: to the nearest integer, halves away from zero."""
    size = np.abs(values)
    floor = np.floor(size)
    floor += size - floor >= np.float32(0.5)  # the difference is exact
    return np.copysign(floor, values)
