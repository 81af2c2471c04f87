"""Decides whether other views wrote every byte that a view reads. Strided views with holes are decided exactly.

A view at given shapes is a `Lattice`: its first byte, and axes of (extent, stride) in bytes. A run of bytes is an axis
of stride 1. Two axes that together step through bytes evenly are merged, so a contiguous tensor has one axis.

*Given shapes* (`covers`) are decided exactly, without listing bytes. Let P be the largest stride among the views. Every
lattice is cut into rows that lie P bytes apart. A write covers the same part of row i for long runs of i, so one
question decides each run, and that question has smaller strides than P. At the end all strides are 1, and intervals are
compared. The work is limited: a question that needs more than `MAX_WORK` pieces is answered with no.

*All shapes at once* (`Coverage.proves`) are decided by the same idea on expressions. A proof is one write of the same
bytes, or solid writes that follow each other, or equal rows of which each is covered. What this does not prove is
tested at sample shapes (`sample_bindings`): at every shape if there are few, else at the ends of the ranges and at some
points between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qcompiler.errors import DimError
from qcompiler.plan.dims import Expr, dim
from qcompiler.plan.view_regions import Ranges, Region, proven_at_most

MAX_WORK = 100_000
"""The most pieces that one question may be cut into, which takes about half a second. Plans of real models need
tens."""

_MAX_SAMPLES = 16
_Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Lattice:
    """The bytes ``low + sum(i * stride)`` for all i < extent of each axis. Axes are sorted by falling stride, and all
    extents are above 1."""

    low: int
    axes: _Axes

    @property
    def high(self) -> int:
        return self.low + 1 + sum((extent - 1) * stride for extent, stride in self.axes)

    @property
    def pitch(self) -> int:
        """The largest stride."""
        return self.axes[0][1] if self.axes else 1

    @property
    def is_solid(self) -> bool:
        return self.pitch == 1

    def moved(self, by: int) -> Lattice:
        return Lattice(self.low + by, self.axes) if by else self


def lattice(low: int, axes: Iterable[tuple[int, int]]) -> Lattice | None:
    """The lattice with these (extent, stride) axes, in any order. Strides must not be negative. None if it has no
    byte."""
    wanted = list(axes)
    if any(extent <= 0 for extent, _ in wanted):
        return None
    merged: list[tuple[int, int]] = []  # by rising stride
    for extent, stride in sorted(wanted, key=lambda axis: axis[1]):
        if extent == 1 or stride == 0:
            continue
        if merged and stride % merged[-1][1] == 0 and stride // merged[-1][1] <= merged[-1][0]:
            inner, step = merged[-1]
            merged[-1] = (inner + (extent - 1) * (stride // step), step)
        else:
            merged.append((extent, stride))
    return Lattice(low, tuple(reversed(merged)))


def sample_bindings(ranges: Ranges) -> tuple[dict[str, int], ...]:
    """Values of the symbols to test, the largest first. If there are few, these are all values. Otherwise they are the
    ends of the ranges and some points between. With up to three symbols every corner is tested; with more, all symbols
    at one end, and each symbol alone at the other end."""
    names = list(ranges)
    largest = [high for _, high in ranges.values()]
    smallest = [low for low, _ in ranges.values()]
    points: list[Sequence[int]] = [largest, smallest]
    count = 1
    for low, high in ranges.values():
        count = min(count * (high - low + 1), _MAX_SAMPLES + 1)
    if count <= _MAX_SAMPLES:
        points += itertools.product(*(range(low, high + 1) for low, high in ranges.values()))
    else:
        if len(names) <= 3:
            points += itertools.product(*ranges.values())
        else:
            points += [[*largest[:i], smallest[i], *largest[i + 1 :]] for i in range(len(names))]
            points += [[*smallest[:i], largest[i], *smallest[i + 1 :]] for i in range(len(names))]
        pairs = list(zip(smallest, largest, strict=True))
        points.append([(low + high) // 2 for low, high in pairs])
        points.append([min(low + 1 + i, high) for i, (low, high) in enumerate(pairs)])
        points.append([max(high - 1 - i, low) for i, (low, high) in enumerate(pairs)])
    return tuple(dict(zip(names, point, strict=True)) for point in dict.fromkeys(map(tuple, points)))


# --- given shapes ----------------------------------------------------------------------------------------------------


def covers(read: Lattice | None, writes: Iterable[Lattice | None]) -> bool:
    """Whether every byte of `read` is a byte of some write. Exact; False for a question beyond `MAX_WORK`."""
    if read is None:
        return True
    try:
        return _Question().covers(read, frozenset(write for write in writes if write is not None))
    except _TooMuchWorkError:
        return False


class _TooMuchWorkError(Exception):
    pass


class _Question:
    def __init__(self) -> None:
        self.work = 0
        self.known: dict[tuple[Lattice, frozenset[Lattice]], bool] = {}

    def spend(self, amount: int) -> None:
        self.work += amount
        if self.work > MAX_WORK:
            raise _TooMuchWorkError

    def covers(self, read: Lattice, writes: frozenset[Lattice]) -> bool:
        if read in writes:
            return True
        self.spend(1 + len(writes))
        low, high = read.low, read.high
        near = frozenset(write for write in writes if write.low < high and low < write.high)
        if any(write.is_solid and write.low <= low and high <= write.high for write in near):
            return True
        if not near:
            return False
        pitch = max(read.pitch, *(write.pitch for write in near))
        if pitch == 1:
            return intervals_cover(low, high, [(write.low, write.high) for write in near])
        # Positions relative to the read's first byte give equal questions about different rows one key.
        read, near = read.moved(-low), frozenset(write.moved(-low) for write in near)
        key = read, near
        if key not in self.known:
            rows = [row for write in near for row in _rows(write, pitch)]
            self.known[key] = all(self._covers_rows(row, rows, pitch) for row in _rows(read, pitch))
        return self.known[key]

    def _covers_rows(self, read: tuple[int, Lattice], writes: Sequence[tuple[int, Lattice]], pitch: int) -> bool:
        """Whether every row of the read is covered. Row i of the read may overlap row i + d of a write for some d."""
        count, first = read
        low, high = first.low, first.high
        begins: dict[int, list[Lattice]] = {0: []}
        ends: dict[int, list[Lattice]] = {}
        for height, row in writes:
            least = (low - row.high) // pitch + 1
            most = -((row.low - high) // pitch) - 1
            for d in range(max(least, -count + 1), min(most, height - 1) + 1):
                self.spend(1)
                moved = row.moved(d * pitch)
                begins.setdefault(max(0, -d), []).append(moved)
                ends.setdefault(min(count, height - d), []).append(moved)
        active: dict[Lattice, int] = {}
        for i in sorted(begins.keys() | ends.keys()):
            for moved in ends.get(i, ()):
                active[moved] -= 1
                if not active[moved]:
                    del active[moved]
            for moved in begins.get(i, ()):
                active[moved] = active.get(moved, 0) + 1
            if i < count and not self.covers(first, frozenset(active)):
                return False
        return True


def _rows(of: Lattice, pitch: int) -> list[tuple[int, Lattice]]:
    """The lattice as groups of (count, first row), with rows `pitch` apart. The lattice's strides are at most
    `pitch`."""
    if not of.axes:
        return [(1, of)]
    (extent, stride), *rest = of.axes
    if stride == pitch:
        return [(extent, Lattice(of.low, tuple(rest)))]
    if pitch % stride or extent * stride <= pitch:
        return [(1, of)]
    width = pitch // stride
    count, left = divmod(extent, width)
    rows = [(count, _checked(of.low, [(width, stride), *rest]))]
    if left:
        rows.append((1, _checked(of.low + count * pitch, [(left, stride), *rest])))
    return rows


def _checked(low: int, axes: list[tuple[int, int]]) -> Lattice:
    return Lattice(low, tuple(axis for axis in axes if axis[0] > 1))


def intervals_cover(low: int, high: int, intervals: Sequence[tuple[int, int]]) -> bool:
    """Whether [low, high) lies in the union of the intervals."""
    for begin, end in sorted(intervals):
        if begin > low:
            break
        low = max(low, end)
    return low >= high


# --- all shapes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """A lattice whose numbers are expressions. Axes have no order; they are merged where that is valid at all
    shapes."""

    low: Expr
    axes: tuple[tuple[Expr, Expr], ...]

    @property
    def is_solid(self) -> bool:
        return not self.axes or (len(self.axes) == 1 and self.axes[0][1] == 1)

    @property
    def is_static(self) -> bool:
        return all(value.is_static for value in (self.low, *itertools.chain.from_iterable(self.axes)))

    @property
    def high(self) -> Expr:
        """The end of the last byte if no extent is 0. For a solid shape also if an extent is 0."""
        high = self.low + 1
        for extent, stride in self.axes:
            high = high + (extent - 1) * stride
        return high

    def rows(self, pitch: Expr, counts: Iterable[Expr] = ()) -> tuple[Expr, _Shape] | None:
        """The shape as (count, first row), with rows `pitch` apart. An axis of that stride gives the rows, or a finer
        axis that can be cut into one of `counts` rows."""
        for i, (extent, stride) in enumerate(self.axes):
            if stride == pitch:
                return extent, _Shape(self.low, self.axes[:i] + self.axes[i + 1 :])
        for i, (extent, stride) in enumerate(self.axes):
            try:
                width = pitch.divide_exact(stride)
            except DimError:
                continue
            for count in counts:
                if count * width == extent:
                    return count, _Shape(self.low, (*self.axes[:i], (width, stride), *self.axes[i + 1 :]))
        return None


def _shape(region: Region) -> _Shape:
    axes = [*region.axes, (dim(region.size), dim(1))]
    while True:
        for outer, inner in itertools.permutations(axes, 2):
            if outer[1] == inner[0] * inner[1] and inner[1] != 0:
                axes.remove(outer)
                axes[axes.index(inner)] = (outer[0] * inner[0], inner[1])
                break
        else:
            return _Shape(region.low, tuple(axis for axis in axes if axis[0] != 1))


class Coverage:
    """Decides coverage over one entry's symbols. Answers are cached, since an entry has few regions and shares them."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.bindings = sample_bindings(ranges)
        self.exhaustive = math.prod(high - low + 1 for low, high in ranges.values()) <= _MAX_SAMPLES
        self._shapes: dict[int, tuple[Region, _Shape]] = {}  # by id(region), which the reference keeps alive
        self._lattices: dict[tuple[int, int], Lattice | None] = {}
        self._verdicts: dict[tuple[int, ...], Mapping[str, int] | None] = {}

    def hole(self, read: Region, written: Iterable[Region]) -> Mapping[str, int] | None:
        """Symbol values at which the read has a byte that no region of `written` has. None if there is no such byte:
        this is proven for all values, or holds at each of `bindings`."""
        regions = list(written)
        key = (id(read), *map(id, regions))
        if key not in self._verdicts:
            self._verdicts[key] = self._find_hole(read, regions)
        return self._verdicts[key]

    def proven(self, read: Region, writes: Iterable[Region]) -> bool:
        """Whether the writes are proven to hold every byte of the read at every size. Samples alone are no proof."""
        regions = list(writes)
        wanted, shapes = self._shape(read), [self._shape(region) for region in regions]
        is_static = wanted.is_static and all(shape.is_static for shape in shapes)
        if not is_static and self.proves(wanted, shapes):
            return True
        if not is_static and not self.exhaustive:
            return False
        bindings = range(1 if is_static else len(self.bindings))
        return all(covers(self._at(read, k), [self._at(region, k) for region in regions]) for k in bindings)

    def _find_hole(self, read: Region, regions: Sequence[Region]) -> Mapping[str, int] | None:
        wanted, shapes = self._shape(read), [self._shape(region) for region in regions]
        is_static = wanted.is_static and all(shape.is_static for shape in shapes)
        if not is_static and self.proves(wanted, shapes):
            return None
        for k, binding in enumerate(self.bindings[:1] if is_static else self.bindings):
            if not covers(self._at(read, k), [self._at(region, k) for region in regions]):
                return binding
        return None

    def _shape(self, region: Region) -> _Shape:
        known = self._shapes.get(id(region))
        if known is None:
            known = self._shapes[id(region)] = (region, _shape(region))
        return known[1]

    def _at(self, region: Region, k: int) -> Lattice | None:
        key = id(region), k
        if key not in self._lattices:
            binding = self.bindings[k]
            axes = [(extent.evaluate(binding), stride.evaluate(binding)) for extent, stride in region.axes]
            self._lattices[key] = lattice(region.low.evaluate(binding), [*axes, (region.size, 1)])
        return self._lattices[key]

    # --- proofs ---

    def proves(self, read: _Shape, writes: Sequence[_Shape]) -> bool:
        """Whether the writes hold every byte of the read for all values of the symbols, as far as this can tell."""
        if any(_same(read, write) for write in writes) or self._continues(read, writes):
            return True
        pitches = dict.fromkeys(stride for write in writes for _, stride in write.axes if stride != 1)
        return any(self._proves_rows(read, writes, pitch) for pitch in pitches)

    def _continues(self, read: _Shape, writes: Sequence[_Shape]) -> bool:
        """Writes without holes reach from the read's first byte to its last, each from where those before it end."""
        solid = sorted(
            (write for write in writes if write.is_solid), key=lambda write: write.low.evaluate(self.bindings[0])
        )
        reached = read.low
        for write in solid:
            if self._at_most(write.low, reached) and self._at_most(reached, write.high):
                reached = write.high
        return reached is not read.low and self._at_most(read.high, reached)

    def _proves_rows(self, read: _Shape, writes: Sequence[_Shape], pitch: Expr) -> bool:
        """Whether row i of the read is covered by the rows i of writes that have at least as many rows."""
        along = [rows for write in writes if (rows := write.rows(pitch)) is not None]
        counts = list(dict.fromkeys(count for count, _ in along))
        wanted = read.rows(pitch, counts)
        if wanted is None:
            return False
        others = [write.rows(pitch, [wanted[0]]) for write in writes if write.rows(pitch) is None]
        enough = [row for count, row in [*along, *filter(None, others)] if self._at_most(wanted[0], count)]
        return bool(enough) and self.proves(wanted[1], enough)

    def _at_most(self, a: Expr, b: Expr) -> bool:
        return a == b or proven_at_most(a, b, self.ranges)


def _same(a: _Shape, b: _Shape) -> bool:
    return a.low == b.low and (a.axes == b.axes or sorted(map(str, a.axes)) == sorted(map(str, b.axes)))
