"""Which steps of an entry point share a launch: small loops and updates of one row that can stand in one place.

    loop of q, loop of k, update of the keys (reads what the loop of k writes), update of the values, attention
    ->  [loop of q | loop of k, in a row of the keys | update of the values], attention

    loop of a, copy of a to the front of c, copy of b to the back of c      ->  [loop of a, in c | copy of b to c]

The walk keeps the order that the steps have by then, as a list of places.  A step joins a group if it can move up to
the group's place, or the group down to the step's: nothing between may touch what a moving step writes, or write what
it touches.  Two views of one buffer are apart where that is proven.

Linears that read the same rows share a launch in the same way (linear_groups.py); a later one moves up to the first.

A norm that one such loop alone reads moves to the loop (head_norms.py), and goes where the loop goes.  A loop that is
too large to share a launch takes its norm and then writes where its result is copied to, in a launch of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp, YieldOp
from xdsl.ir.affine import AffineMap

from qcompiler.ir import qc
from qcompiler.ir.rt import EntryOp, LaunchOp, StepOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.lowering.kinds.parts import split_strides
from qcompiler.passes.schedule.head_norms import HeadNorm, head_norms
from qcompiler.passes.schedule.linear_groups import FewRows, LinearGroup, few_rows
from qcompiler.passes.schedule.touched import Touched
from qcompiler.plan.dims import Dim, Range, contiguous_strides, product
from qcompiler.plan.plan import View
from qcompiler.plan.view_regions import is_packed

MOST_ELEMENTS = 1 << 16
"""Of one part.  With four operands of four bytes these are 1 MiB, which a GPU with 3 TB/s moves in half the time that
the start of a kernel takes (kernels/cost.py)."""

REACH = 24
"""The places before a step among which it looks for a group: about the steps of one layer."""


@dataclass(frozen=True)
class Candidate:
    """A launch of one pointwise loop, or of the update of one row (operands x, index, src)."""

    step: LaunchOp
    number: int
    device: str
    op: GenericOp | qc.IndexUpdateOp
    large: bool = False
    """Whether it has too many elements to share a launch."""
    norm: HeadNorm | None = None
    """The norm of rows that the loop reads, and nothing else."""

    @property
    def shares(self) -> bool:
        return not self.large and (self.norm is None or not self.norm.wide)

    @property
    def views(self) -> tuple[View, ...]:
        return self.step.view_records

    @property
    def numbers(self) -> list[int]:
        """The steps that it stands for."""
        return [self.number] if self.norm is None else [self.norm.number, self.number]

    @property
    def steps(self) -> list[LaunchOp]:
        return [self.step] if self.norm is None else [self.norm.step, self.step]


@dataclass
class Member:
    """One part: a loop that writes at `out`, or, if there is an update, in a row of the view `x`; or an update alone.

    `out` is what the loop writes, or what a copy of that wrote; `x` may be a part of what the update writes.
    """

    steps: list[Candidate]
    loop: Candidate | None = None
    out: View | None = None
    update: Candidate | None = None
    x: View | None = None


@dataclass
class Group:
    """The members of one launch."""

    device: str
    members: list[Member] = field(default_factory=list)

    @property
    def shares(self) -> bool:
        """Whether other parts may join."""
        return all(each.shares for member in self.members for each in member.steps)

    @property
    def steps(self) -> list[LaunchOp]:
        """The launches that this one replaces."""
        found = [each for member in self.members for each in member.steps]
        return list({id(step): step for each in found for step in each.steps}.values())

    @property
    def why(self) -> str:
        rows = sum(member.loop is not None and member.update is not None for member in self.members)
        copies = sum(
            len({each.number for each in member.steps}) > 1 and member.update is None for member in self.members
        )
        norms = sum(member.loop is not None and member.loop.norm is not None for member in self.members)
        found = [
            f"{len(self.members)} small parts that do not depend on each other" if len(self.members) > 1 else "",
            f"{rows} computed in a row that is written" if rows else "",
            f"{copies} computed where {'it was' if copies == 1 else 'they were'} copied to" if copies else "",
            f"{norms} {'reads rows that it normalises' if norms == 1 else 'read rows that they normalise'}"
            if norms
            else "",
        ]
        return "; ".join(filter(None, found))


@dataclass
class _Place:
    """A step that stays what it is, or a group; `numbers` are the steps that it stands for."""

    item: Item
    numbers: list[int]


Item = StepOp | Group | LinearGroup
"""A step that stays what it is, or several that share a launch."""


def grouped(entry: EntryOp, schedule: Schedule, most: int, separate: Sequence[str] = ()) -> list[Item]:
    """The steps in an order that they may have, with groups in place of those that share a launch."""
    steps = list(entry.steps)
    touched = Touched(steps, schedule, entry.ranges)
    norms = {norm.loop: norm for norm in head_norms(steps, schedule, touched)}
    moved: set[int] = set()
    candidates = [_candidate(step, number, schedule, entry.ranges) for number, step in enumerate(steps)]
    for number, norm in norms.items():
        candidate = candidates[number]
        if candidate is not None and (norm.along or not candidate.large):
            candidates[number] = dataclasses.replace(candidate, norm=norm)
            moved.add(norm.number)
    walk = _Walk(touched, most)
    for number, (step, candidate) in enumerate(zip(steps, candidates, strict=True)):
        linear = few_rows(step, number, schedule, separate)
        if linear is not None:
            walk.add_linear(linear)
        elif number not in moved:
            walk.add(step, number, candidate)
    return [_unless_alone(place.item) for place in walk.places]


def _unless_alone(item: Item) -> Item:
    return item.steps[0] if isinstance(item, Group | LinearGroup) and len(item.steps) == 1 else item


@dataclass
class _Walk:
    """The places so far."""

    touched: Touched
    most: int
    places: list[_Place] = field(default_factory=list)

    def add(self, step: StepOp, number: int, candidate: Candidate | None) -> None:
        """The next step: in a group before it, or at a place of its own."""
        if candidate is None:
            self.places.append(_Place(step, [number]))
            return
        for at in range(len(self.places) - 1, max(-1, len(self.places) - 1 - REACH), -1):
            group = self.places[at].item
            if isinstance(group, Group) and group.device == candidate.device and self._join(at, group, candidate):
                return
        self.places.append(_Place(Group(candidate.device, [_alone(candidate)]), candidate.numbers))

    def add_linear(self, new: FewRows) -> None:
        """The next linear: in the launch of one before it that reads the same rows, or in its own."""
        between: list[int] = []
        for place in reversed(self.places[-REACH:]):
            between += place.numbers
            if isinstance(place.item, LinearGroup) and place.item.takes(new):
                if self.touched.conflict([new.number], between):
                    break
                place.item.members.append(new)
                place.numbers.append(new.number)
                return
        self.places.append(_Place(LinearGroup([new]), [new.number]))

    def _join(self, at: int, group: Group, new: Candidate) -> bool:
        """Adds a step to the group at a place, if both can stand there or behind all places so far."""
        sources = self._sources(group, new)
        if not sources and (len(group.members) == self.most or not new.shares or not group.shares):
            return False
        own = self.places[at].numbers
        before = {number for member, _ in sources for each in member.steps for number in each.numbers}
        if self.touched.conflict(new.numbers, [number for number in own if number not in before]):
            return False
        between = [number for place in self.places[at + 1 :] for number in place.numbers]
        if self.touched.conflict(new.numbers, between):
            if self.touched.conflict(own, between):
                return False
            self.places.append(self.places.pop(at))
        own += new.numbers
        for member, view in sources:
            member.steps.append(new)
            if isinstance(new.op, GenericOp):
                member.out = view
            else:
                member.update, member.x = new, view
        if not sources:
            group.members.append(_alone(new))
        return True

    def _sources(self, group: Group, new: Candidate) -> list[tuple[Member, View]]:
        """The loops that compute, for nothing else, what a copy or an update moves, and where each can write it."""
        if isinstance(new.op, GenericOp) and not _is_copy(new.op):
            return []
        source, target = new.views if isinstance(new.op, GenericOp) else (new.views[2], new.views[0])
        found: list[tuple[Member, View]] = []
        for member in group.members:
            if member.out is None or member.update is not None or member.out.buffer != source.buffer:
                continue
            if any(each.large and each.norm is None for each in member.steps[:1]):
                return []  # it keeps its kernel, which may go over tiles
            if any(target.buffer in (view.buffer for view in each.views[:-1]) for each in member.steps):
                return []  # it would write what it reads
            moved = _moved if isinstance(new.op, GenericOp) else _part_of_row
            view = moved(member.out, source, target)
            if view is None or not (member.steps[0].shares or _beside(view) == _beside(member.out)):
                return []
            found.append((member, view))
        covered = sum(product(member.out.shape).value for member, _ in found if member.out is not None)
        writers = [member.steps[-1].number for member, _ in found]
        whole = found and product(source.shape) == covered
        return found if whole and self.touched.is_only_used_by(source.buffer, sorted([*writers, new.number])) else []


def _alone(candidate: Candidate) -> Member:
    if not isinstance(candidate.op, GenericOp):
        return Member([candidate], update=candidate, x=candidate.views[0])
    outputs = candidate.views[len(candidate.op.inputs) :]
    return Member([candidate], loop=candidate, out=outputs[0] if len(outputs) == 1 else None)


# --- where a loop writes what is moved -------------------------------------------------------------------------------


def _moved(out: View, source: View, target: View) -> View | None:
    """A view like `out`, which covers just `source`, where `target` is."""
    lies = split_strides(out.shape, source.shape, source.strides)
    strides = split_strides(out.shape, target.shape, target.strides)
    if strides is None or not _same(out.shape, out.strides, lies) or out.offset != source.offset:
        return None
    return replace(target, shape=out.shape, strides=strides)


def _part_of_row(out: View, source: View, x: View) -> View | None:
    """The part of x (outer, length, inner) that `out` is written to.

    An update writes `source` (outer, 1, inner) to a row of x, and `out` is a part of `source`.  None if that part is no
    rectangle, or if a size is a symbol.
    """
    sizes = (*source.shape, *source.strides, *x.strides, *out.shape, *out.strides)
    if not all(isinstance(each, int) for each in (*sizes, source.offset, x.offset, out.offset)):
        return None
    (outer, _, inner), (row, _, step) = (tuple(map(int, each)) for each in (source.shape, source.strides))
    row = inner * step if outer == 1 else row
    axes = [(int(size), int(stride)) for size, stride in zip(out.shape, out.strides, strict=True) if size != 1]
    cut = next((i for i, (_, stride) in enumerate(axes) if stride < row), len(axes))
    begin = int(out.offset) - int(source.offset)
    if begin < 0 or step < 1 or row < step or begin % row % step:
        return None
    parts = []
    for some, unit, first, most in (
        (axes[:cut], row, begin // row, outer),
        (axes[cut:], step, begin % row // step, inner),
    ):
        lengths = tuple(size for size, _ in some)
        steps = tuple(each * unit for each in contiguous_strides(lengths) if isinstance(each, int))
        count = math.prod(lengths)
        if steps != tuple(stride for _, stride in some) or first + count > most:
            return None
        parts.append((first, count))
    (o, rows), (n, columns) = parts
    along, _, beside = (int(each) for each in x.strides)
    return replace(x, shape=(rows, x.shape[1], columns), offset=int(x.offset) + o * along + n * beside)


def _beside(view: View) -> list[int]:
    """The dims along which neighbours lie side by side."""
    sizes = enumerate(zip(view.shape, view.strides, strict=True))
    return [axis for axis, (size, stride) in sizes if stride == 1 and size != 1]


def _same(shape: Sequence[Dim], strides: Sequence[Dim], others: Sequence[Dim] | None) -> bool:
    """Equal strides, but for dims of one element."""
    return others is not None and all(
        size == 1 or mine == theirs for size, mine, theirs in zip(shape, strides, others, strict=True)
    )


# --- candidates ------------------------------------------------------------------------------------------------------


def _candidate(step: StepOp, number: int, schedule: Schedule, ranges: dict[str, Range]) -> Candidate | None:
    """The step as a part of a launch, or None. An update of a row must be small."""
    if not isinstance(step, LaunchOp):
        return None
    kernel = schedule.kernels[step.kernel_name]
    if kernel.body is None or any(is_packed(view) for view in step.view_records):
        return None
    op, *rest = kernel.body.block.ops
    if len(rest) != 1 or not isinstance(op, GenericOp | qc.IndexUpdateOp):
        return None
    views = step.view_records
    found = Candidate(step, number, schedule.device_of(views[0].buffer), op)
    if isinstance(op, GenericOp):
        fits = _is_plain_loop(op, views, schedule)
        sizes = views[-1].shape
    else:
        x, index, _ = views
        fits = index.shape == (1,)
        sizes = (x.shape[0], x.shape[2])
    if not fits or product(sizes).bounds(ranges)[1] <= MOST_ELEMENTS:
        return found if fits else None
    return dataclasses.replace(found, large=True) if isinstance(op, GenericOp) else None


def _is_plain_loop(op: GenericOp, views: Sequence[View], schedule: Schedule) -> bool:
    """Whether a loop has parallel iterators, writes nothing that it reads, and touches no state."""
    if any(kind.data != IteratorType.PARALLEL for kind in op.iterator_types):
        return False
    written = {view.buffer for view in views[len(op.inputs) :]}
    if written & {view.buffer for view in views[: len(op.inputs)]}:
        return False
    return all(schedule.arenas[schedule.buffers[view.buffer].arena_name].kind.data != "state" for view in views)


def _is_copy(op: GenericOp) -> bool:
    """A loop that yields its one input, element by element."""
    maps = [attribute.data for attribute in op.indexing_maps]
    block = op.body.block
    yields = isinstance(block.last_op, YieldOp) and list(block.last_op.operands) == [block.args[0]]
    return (
        len(op.inputs) == len(op.results) == 1
        and yields
        and all(each == AffineMap.identity(each.num_dims) for each in maps)
    )
