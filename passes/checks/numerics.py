"""What a pass may change in the numbers: its class attribute `numerics`, checked by `verify_each="numerics"`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp, TensorType

from qcompiler.ir import qc
from qcompiler.ir.types import dtype_of, tensor_dtype
from qcompiler.plan.kernel import DType

Array = npt.NDArray[Any]
_EPSILON = {"f32": 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10}


@dataclass(frozen=True)
class Exact:
    """Every output keeps every bit."""


@dataclass(frozen=True)
class Ulps:
    """Exact, except that the pass may delete roundings (`truncf` -> `extf` pairs). If it did, and made no other, what
    the program computes without any rounding to 16 bits keeps every bit, and its outputs are finite where they were.
    How far a deletion moves them depends on all that follows: a rounding behind it may go the other way, and so may the
    choice of an expert.

    Where the program has no such results (answers.py), or rounds in more places to some type, a deletion shifts an
    element by at most `count` units in the last place of the narrow type, of the element itself or of the output's rms,
    whichever is larger."""

    count: int


@dataclass(frozen=True)
class Reordered:
    """Sums may run in another order, or an idiom may become one op: max|new - old| <= relative * rms(old) in fp32. If
    the program holds 16-bit floats, `relative` scales with the coarsest epsilon among them instead of 2**-23."""

    relative: float


@dataclass(frozen=True)
class Permits:
    """The pass gives ops called `op` the property `attribute`, which permits roundings, and changes nothing else.

    Without that property the outputs keep every bit. How far a rounding of scores moves a softmax depends on the
    scores, so the outputs with it are bound by no number; later passes are compared with them.
    """

    op: str
    attribute: str

    def without(self, module: ModuleOp) -> ModuleOp:
        """A copy of the module without the property."""
        copy = module.clone()
        for each in copy.walk():
            if each.name == self.op:
                each.properties.pop(self.attribute, None)
        return copy


@dataclass(frozen=True)
class Finite:
    """Outputs have the types that they had, and floats are finite where they were. No pass promises so little: it is
    what remains of `Ulps` where results without roundings are compared."""


Numerics = Exact | Ulps | Reordered | Permits | Finite


def count_roundings(module: ModuleOp) -> Counter[DType]:
    """The number of places in the IR that round a value to 16 bits, by its type: `truncf`s (those to f32 as well), and
    `qc` ops with a 16-bit result."""
    count: Counter[DType] = Counter()
    for op in module.walk():
        if isinstance(op, arith.TruncFOp):
            count[dtype_of(op.result.type)] += 1
        elif isinstance(op, qc.QCOp) and not isinstance(op, _PICK) and not _rounds_in_epilogue(op):
            types = [tensor_dtype(r.type) for r in op.results if isinstance(r.type, TensorType)]
            count.update(dtype for dtype in types if dtype in ("bf16", "f16"))
    return count


def count_widenings(module: ModuleOp) -> int:
    """The number of places in the IR that read a 16-bit value as f32. When one disappears, it may have been half of a
    deleted pair whose rounding stays because it has other readers."""
    return sum(isinstance(op, arith.ExtFOp) for op in module.walk())


_PICK = (qc.ConstOp, qc.StateOp, qc.EmbeddingOp, qc.GatherOp, qc.IndexUpdateOp, qc.ScatterOp, qc.WindowsOp)
"""Ops that copy values and round nothing."""


def _rounds_in_epilogue(op: qc.QCOp) -> bool:
    return isinstance(op, qc.LinearOp) and bool(op.epilogue.blocks)


def coarsest_epsilon(module: ModuleOp) -> float:
    """The largest rounding unit of the floats in a module: 2**-7 with bf16, 2**-10 with fp16, else 2**-23.

    With two int8 quantisations it is 2**-7: if one reads what depends on the other, a last-place difference in fp32 may
    move a code by one. So it is where attention rounds its factors.
    """
    found = {"f32"}
    if any(isinstance(op, qc.AttentionOp) and op.rounds_to is not None for op in module.walk()):
        found.add("bf16")
    if sum(isinstance(op, qc.QuantizeRowsOp | qc.QuantizeCacheOp) for op in module.walk()) > 1:
        found.add("bf16")
    for op in module.walk():
        for value in op.results:
            if isinstance(value.type, TensorType):
                found.add(tensor_dtype(value.type))
    return max(_EPSILON.get(dtype, 0.0) for dtype in found)


def difference(
    old: Sequence[Array],
    new: Sequence[Array],
    numerics: Numerics,
    *,
    roundings_deleted: int,
    epsilon: float,
    steps: Mapping[int, Array] | None = None,
) -> str | None:
    """Describes how `new` breaks what `numerics` allows; None if it does not.

    `steps` has the distance of neighbouring codes for results that are quantised: where anything may change, a number
    between two codes may become either.

    Deleted roundings are independent errors, so n of them add up to about sqrt(n) times the error of one.
    """
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"result {number} was {before.dtype}{before.shape} and is {after.dtype}{after.shape}"
        if _bits_equal(before, after):
            continue
        match numerics:
            case Finite():
                if _is_float(before) and not np.array_equal(np.isfinite(_wide(before)), np.isfinite(_wide(after))):
                    return f"result {number} is finite in other places"
                continue
            case Reordered(relative):
                limit = relative * epsilon / _EPSILON["f32"]
            case Ulps(ulps) if roundings_deleted > 0:
                limit = ulps * epsilon * float(np.sqrt(roundings_deleted))
            case _:
                limit = 0.0
        step = (steps or {}).get(number) if limit > 0 else None
        found = _worst(before, after, of_elements=isinstance(numerics, Ulps), step=step)
        if not found <= limit:
            return f"result {number} differs by {found:.3g} of its rms; {numerics} allows {limit:.3g}"
    return None


def _bits_equal(a: Array, b: Array) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _is_float(x: Array) -> bool:
    return bool(np.issubdtype(x.dtype, np.floating)) or x.dtype in (ml_dtypes.bfloat16, np.float16)


def _wide(x: Array) -> npt.NDArray[np.float64]:
    return x.astype(np.float64)


def _worst(before: Array, after: Array, *, of_elements: bool, step: Array | None = None) -> float:
    """max|after - before| / rms(before), beyond one `step`. Infinite if only one of them has a NaN or an infinity at
    some place. `of_elements`: an element above the rms counts relative to itself, as its last place is larger, too."""
    if not _is_float(before):
        return float("inf")
    a, b = _wide(before), _wide(after)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    rms = float(np.sqrt(np.mean(a[finite] ** 2)))
    distance = np.abs(a[finite] - b[finite])
    if step is not None:
        distance = np.maximum(distance - 1.001 * np.broadcast_to(step, a.shape)[finite], 0)
    if of_elements and rms > 0:
        distance /= np.maximum(np.abs(a[finite]) / rms, 1)
    worst = float(np.max(distance))
    return worst / rms if rms > 0 else (0.0 if worst == 0 else float("inf"))
