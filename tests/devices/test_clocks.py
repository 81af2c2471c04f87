"""The access histories against a table with one row per byte, and which bytes strided operands cover."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompiler.plan.kernel import FormatRef, Operand
from qcompiler.runtime.sim.clocks import AccessMap, Clock, is_before, join
from qcompiler.runtime.sim.ranges import MAX_PIECES, extent_of

SIZE = 24


@dataclass(eq=False)
class Step:
    actor: int
    tick: int
    clock: Clock = field(default_factory=dict)


steps = st.lists(
    st.tuples(
        st.integers(1, 3),  # actor
        st.integers(0, 3),  # an actor whose last step it waits for (0: none)
        st.integers(0, SIZE - 1),
        st.integers(1, SIZE),
        st.booleans(),  # writes
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_exactly_the_unordered_accesses_are_found(listed: list[tuple[int, int, int, int, bool]]) -> None:
    """Every access that conflicts with any earlier one is reported, and none that does not."""
    history, last = AccessMap(), {}
    seen: list[tuple[Step, range, bool]] = []
    for actor, waits, start, length, writes in listed:
        step = Step(actor, 1 + (last[actor].tick if actor in last else 0))
        for before in (actor, waits):
            if before in last:
                join(step.clock, last[before].clock)
        step.clock[actor] = step.tick
        bytes_ = range(start, min(start + length, SIZE))
        conflicts = history.touch(step, bytes_.start, bytes_.stop, writes=writes)
        expected = {
            byte
            for other, touched, wrote in seen
            if (writes or wrote) and not is_before(other, step)
            for byte in set(bytes_) & set(touched)
        }
        found = {byte for conflict in conflicts for byte in range(conflict.lo, conflict.hi)}
        assert found == expected
        if expected:
            return  # like a report: what comes after a race is not judged
        seen.append((step, bytes_, writes))
        last[actor] = step


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(0, 24))
def test_pruning_forgets_nothing_that_may_still_conflict(
    listed: list[tuple[int, int, int, int, bool]], prune_at: int
) -> None:
    plain, pruned, floor = AccessMap(), AccessMap(), {}
    last: dict[int, Step] = {}
    for number, (actor, waits, start, length, writes) in enumerate(listed):
        if number == prune_at:  # the host waits for everything
            floor = {actor: step.tick for actor, step in last.items()}
            pruned.prune(lambda step, over=dict(floor): step.tick <= over.get(step.actor, 0))
            assert len(pruned) == 0
        step = Step(actor, 1 + (last[actor].tick if actor in last else 0), dict(floor))
        for before in (actor, waits):
            if before in last:
                join(step.clock, last[before].clock)
        step.clock[actor] = step.tick
        end = min(start + length, SIZE)
        one = plain.touch(step, start, end, writes=writes)
        two = pruned.touch(step, start, end, writes=writes)
        assert {(c.other, c.wrote) for c in one} == {(c.other, c.wrote) for c in two}
        if one:
            return
        last[actor] = step


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=4),
    st.sampled_from([("f32", 4), ("bf16", 2), ("i8", 1)]),
)
def test_the_extent_of_a_strided_operand_is_what_its_elements_cover(
    axes: list[tuple[int, int]], dtype: tuple[str, int]
) -> None:
    name, size = dtype
    shape, strides = tuple(a for a, _ in axes), tuple(b for _, b in axes)
    operand = Operand(name="x", dtype=name, access="r", shape=shape, strides=strides)
    covered: set[int] = set()
    for index in np.ndindex(*shape):
        first = size * sum(i * step for i, step in zip(index, strides, strict=True))
        covered |= set(range(first, first + size))
    extent = extent_of(operand, {})
    assert extent.is_exact
    assert {byte for lo, hi in extent.pieces for byte in range(lo, hi)} == covered
    assert all(one[1] < two[0] for one, two in zip(extent.pieces, extent.pieces[1:], strict=False))
    assert extent.hull == (min(covered, default=0), max(covered, default=-1) + 1)


def test_symbols_and_packed_operands_have_extents() -> None:
    rows = Operand(name="x", dtype="f32", access="r", shape=("n", 8), strides=(16, 1))
    assert extent_of(rows, {"n": 3}).pieces == ((0, 32), (64, 96), (128, 160))
    assert extent_of(rows, {"n": 0}).pieces == ()
    packed = Operand(
        name="w", dtype="f32", access="r", shape=(16, 64), format=FormatRef(name="nf4", params={"block": 64}),
        layout="canonical",
    )  # fmt: skip
    assert extent_of(packed, {}).hull == (0, 16 * 32 + 16 * 4)


def test_an_operand_in_very_many_pieces_is_its_hull() -> None:
    operand = Operand(name="x", dtype="f32", access="r", shape=(MAX_PIECES + 1, 1), strides=(2, 1))
    extent = extent_of(operand, {})
    assert not extent.is_exact
    assert extent.pieces == ((0, 8 * MAX_PIECES + 4),)
