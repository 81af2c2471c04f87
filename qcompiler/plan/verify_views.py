"""The part of the verifier that checks one view: its buffer exists and contains it, and holds values of its type.

verify.py describes the whole, docs/schedule.md the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from qcompiler import formats
from qcompiler.errors import ScheduleError
from qcompiler.plan.dims import Dim, Range, dim, never_negative, product
from qcompiler.plan.kernel import ITEMSIZE, Operand
from qcompiler.plan.kernel_body import FLOATS
from qcompiler.plan.lookup import PlanIndex
from qcompiler.plan.plan import Arena, Buffer, EntryPoint, View, WeightEntry
from qcompiler.plan.sizes import check_view_sizes
from qcompiler.plan.view_regions import Region, is_packed, proven_at_most, region_of, whole

_NOT_AT_INIT = ("state", "input", "output")


@dataclass
class EntryViews:
    """The views of one entry point. `truths` says of each buffer that any entry views whether it holds truth values."""

    program: PlanIndex
    entry: EntryPoint
    ranges: Mapping[str, Range]
    is_init: bool
    truths: dict[str, bool]
    _regions: dict[tuple[str, tuple[Dim, ...], tuple[Dim, ...], Dim], Region] = field(default_factory=dict, init=False)
    _wholes: dict[int, Region] = field(default_factory=dict, init=False)

    def arena_of(self, view: View) -> Arena:
        buffer = self.program.buffers.get(view.buffer)
        if buffer is None:
            raise ScheduleError(f"the plan declares no buffer '{view.buffer}'", rule="unknown-buffer")
        arena = self.program.arenas[buffer.arena]
        if arena.entry is not None and arena.entry != self.entry.name:
            raise ScheduleError(
                f"buffer '{buffer.name}' lies in arena '{arena.name}', which belongs to the entry '{arena.entry}'",
                rule="foreign-arena",
            )
        if self.is_init and arena.kind in _NOT_AT_INIT:
            raise ScheduleError(
                f"buffer '{buffer.name}' lies in the {arena.kind} arena '{arena.name}', which has no memory when the "
                "init entry runs",
                rule="init-arena",
            )
        return arena

    def region(self, view: View) -> Region:
        """The region of a view, after all checks: it lies in its buffer for every value of the symbols."""
        arena = self.arena_of(view)
        buffer = self.program.buffers[view.buffer]
        if arena.kind == "constants":
            self._match_weight(buffer, view)
        self._check_truth(buffer, view)
        if is_packed(view):
            if arena.kind in ("input", "output"):
                raise ScheduleError(
                    f"buffer '{buffer.name}' of the {arena.kind} arena '{arena.name}' is viewed as "
                    f"{storage(view)}; arguments and results are plain values",
                    rule="packed-argument",
                )
            nbytes = self._packed_bytes(buffer, arena, view)
            if nbytes > buffer.nbytes:
                raise ScheduleError(
                    f"the packed view of buffer '{buffer.name}' takes {nbytes} bytes, the buffer has {buffer.nbytes}",
                    rule="packed-size",
                )
            return self._wholes.setdefault(nbytes, whole(nbytes))
        region = self._strided(view)
        if region.min < 0 or region.max > buffer.nbytes:
            raise ScheduleError(
                f"the view of buffer '{buffer.name}' covers bytes {region.low} to {region.high}, that is {region.min} "
                f"to {region.max} over the symbols' ranges, but the buffer has {buffer.nbytes}",
                rule="view-outside-buffer",
            )
        weight = self.program.weight_of(buffer) if arena.kind == "constants" else None
        if weight is not None and region.max > weight.nbytes:
            self._refuse_weight(buffer, weight, f"{region.max} bytes", f"{weight.nbytes} bytes")
        if arena.kind in ("input", "output"):
            self._check_caller_memory(buffer, arena, view, region)
        return region

    def _check_truth(self, buffer: Buffer, view: View) -> None:
        """ScheduleError if a buffer is viewed as i1 and as another type. Kernels rely on a truth value's byte being 0
        or 1."""
        known = self.truths.setdefault(buffer.name, view.dtype == "i1")
        if known != (view.dtype == "i1"):
            raise ScheduleError(
                f"buffer '{buffer.name}' is viewed as {view.dtype}, and elsewhere as "
                f"{'i1' if known else 'another type'}; truth values have buffers of their own",
                rule="truth-values",
            )

    def _check_caller_memory(self, buffer: Buffer, arena: Arena, view: View, region: Region) -> None:
        """ScheduleError unless the view lies in the caller's array. That array has the size of the call, while the
        arena has the largest size."""
        sig = next((sig for sig in (*self.entry.inputs, *self.entry.outputs) if sig.arena == arena.name), None)
        if sig is None:
            raise ScheduleError(
                f"buffer '{buffer.name}' lies in the {arena.kind} arena '{arena.name}', which holds no {arena.kind} of "
                "this entry",
                rule="signature-arena",
            )
        if ITEMSIZE[view.dtype] > ITEMSIZE[sig.dtype] or (view.dtype == "i1") != (sig.dtype == "i1"):
            raise ScheduleError(
                f"buffer '{buffer.name}' is viewed as {view.dtype}, and the {arena.kind} '{sig.name}' holds "
                f"{sig.dtype}: the caller's array is aligned, and its values are, as its own type asks for",
                rule="argument-dtype",
            )
        end, size = region.high + buffer.offset, product(sig.shape) * ITEMSIZE[sig.dtype]
        if end != size and not proven_at_most(end, size, self.ranges):
            raise ScheduleError(
                f"the view of buffer '{buffer.name}' ends at byte {end} of the {arena.kind} '{sig.name}', which has "
                f"{size}; not all of it is there at every size",
                rule="view-outside-buffer",
            )

    def _strided(self, view: View) -> Region:
        key = (view.dtype, view.shape, view.strides, view.offset)
        region = self._regions.get(key)
        if region is not None:
            return region
        if len(view.shape) != len(view.strides):
            raise ScheduleError(
                f"the view of buffer '{view.buffer}' has rank {len(view.shape)} but {len(view.strides)} strides",
                rule="view-rank",
            )
        self.check_symbols((*view.shape, *view.strides, view.offset), f"the view of buffer '{view.buffer}'")
        for extent in view.shape:
            if not (extent >= 0 if isinstance(extent, int) else never_negative(dim(extent), self.ranges)):
                raise ScheduleError(
                    f"the extent '{extent}' of the view of buffer '{view.buffer}' can be negative",
                    rule="negative-extent",
                )
        check_view_sizes(view.dtype, view.shape, view.strides, view.offset, self.ranges)
        region = self._regions[key] = region_of(view.dtype, view.shape, view.strides, view.offset, self.ranges)
        return region

    def check_symbols(self, dims: Sequence[Dim], what: str) -> None:
        for each in dims:
            unknown = dim(each).symbols() - self.ranges.keys() if isinstance(each, str) else ()
            if unknown:
                raise ScheduleError(
                    f"{what} uses the symbol '{min(unknown)}', which the entry does not have", rule="unbound-symbol"
                )

    def _packed_bytes(self, buffer: Buffer, arena: Arena, view: View) -> int:
        """The number of bytes of a packed view: the weight's, or those of its format's canonical layout."""
        if len(view.shape) != 2 or view.strides or view.offset != 0:
            raise ScheduleError(
                f"the packed view of buffer '{buffer.name}' must have the shape (rows, cols), no strides and no offset",
                rule="view-rank",
            )
        if arena.kind == "constants":
            weight = self.program.weight_of(buffer)
            assert weight is not None  # `_match_weight` has seen it
            return weight.nbytes
        if view.format is None or view.layout not in (None, "canonical"):
            raise ScheduleError(
                f"buffer '{buffer.name}' of the {arena.kind} arena '{arena.name}' is viewed in the layout "
                f"'{view.layout}', which only weights have",
                rule="operand-storage",
            )
        rows, cols = view.shape
        if not isinstance(rows, int) or not isinstance(cols, int) or min(rows, cols) < 1:
            raise ScheduleError(
                f"the packed view of buffer '{buffer.name}' has the shape {list(view.shape)}; packed values have a "
                "fixed one",
                rule="view-rank",
            )
        return int(formats.get(view.format.name, **view.format.params).nbytes(rows, cols))

    def _match_weight(self, buffer: Buffer, view: View) -> None:
        """ScheduleError unless a view of a constant has the weight's dtype and storage and, if packed, its shape. The
        dtype of a packed view is the float that its elements decode to: the bytes do not depend on it."""
        weight = self.program.weight_of(buffer)
        if weight is None or weight.nbytes > buffer.nbytes:
            raise ScheduleError(
                f"buffer '{buffer.name}' at offset {buffer.offset} of arena '{buffer.arena}' holds no weight of the "
                "directory",
                rule="unknown-weight",
            )
        wanted = FLOATS if is_packed(view) else (weight.dtype,)
        if view.dtype not in wanted or not same_bytes(view, weight):
            self._refuse_weight(buffer, weight, f"{view.dtype} {storage(view)}", f"{weight.dtype} {storage(weight)}")
        if is_packed(view) and tuple(view.shape) != weight.shape:
            self._refuse_weight(buffer, weight, f"shape {view.shape}", f"shape {weight.shape}")

    @staticmethod
    def _refuse_weight(buffer: Buffer, weight: WeightEntry, seen: str, stored: str) -> NoReturn:
        raise ScheduleError(
            f"buffer '{buffer.name}' is viewed as {seen}, but the weight '{weight.name}' is stored as {stored}",
            rule="weight-mismatch",
        )


# --- comparing views -------------------------------------------------------------------------------------------------


def same_dims(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """Whether two shapes are equal as expressions."""
    return a == b or (len(a) == len(b) and all(x == y or dim(x) == dim(y) for x, y in zip(a, b, strict=True)))


def same_bytes(a: View | Operand | WeightEntry, b: View | Operand | WeightEntry) -> bool:
    """Whether two tensors have the same format and layout."""
    return a.format == b.format and (a.layout or "canonical") == (b.layout or "canonical")


def same_storage(a: View | Operand | WeightEntry, b: View | Operand | WeightEntry) -> bool:
    """Whether two tensors have the same dtype, format and layout."""
    return a.dtype == b.dtype and same_bytes(a, b)


def storage(of: View | Operand | WeightEntry) -> str:
    if of.format is None:
        return f"plain values in layout '{of.layout or 'canonical'}'"
    params: Mapping[str, object] = of.format.params
    text = ", ".join(f"{key}={value}" for key, value in sorted(params.items()))
    return f"{of.format.name}({text}) in layout '{of.layout or 'canonical'}'"
