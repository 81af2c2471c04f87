"""Which bytes are written: the judgement against sets of bytes, on hand-made layouts, and its limits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qcompiler.plan.coverage import (
    MAX_WORK,
    Coverage,
    _Question,
    _shape,
    _TooMuchWorkError,
    covers,
    lattice,
    sample_bindings,
)
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.view_regions import Ranges, Region, region_of

Axes = list[tuple[int, int]]


def byte_set(low: int, axes: Axes) -> set[int]:
    steps = [range(0, extent * stride, stride) if stride else [0] * extent for extent, stride in axes]
    return {low + sum(point) for point in itertools.product(*steps)}


strides = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 20])
lattices = st.tuples(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 5), strides), max_size=3))


@settings(max_examples=1500, deadline=None)
@given(lattices, st.lists(lattices, max_size=6))
@example((0, [(4, 12), (4, 1)]), [(0, [(2, 12), (4, 1)]), (24, [(4, 4), (4, 1)])])
def test_verdict_equals_that_of_sets_of_bytes(read, writes):
    held = set().union(*(byte_set(*write) for write in writes))
    assert covers(lattice(*read), [lattice(*write) for write in writes]) == (byte_set(*read) <= held)


@settings(max_examples=400, deadline=None)
@given(lattices, st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_way_to_cut_a_view_into_pieces_covers_it_and_every_piece_is_needed(view, cuts, random):
    """Pieces by axis: a run of indices, or every other index."""
    pieces = [view]
    for _ in range(cuts):
        low, axes = pieces.pop(random.randrange(len(pieces)))
        at = [i for i, (extent, _) in enumerate(axes) if extent > 1]
        if not at:
            pieces.append((low, axes))
            continue
        i = random.choice(at)
        extent, stride = axes[i]
        k = random.randrange(1, extent)
        in_two = [(0, k, stride), (k, extent - k, stride)]
        every_other = [(0, (extent + 1) // 2, 2 * stride), (1, extent // 2, 2 * stride)]
        halves = random.choice([in_two, every_other])
        pieces += [(low + first * stride, [*axes[:i], (n, step), *axes[i + 1 :]]) for first, n, step in halves]
    whole = lattice(*view)
    assert covers(whole, [lattice(*piece) for piece in pieces])
    for i, piece in enumerate(pieces):
        rest = pieces[:i] + pieces[i + 1 :]
        held = set().union(*(byte_set(*other) for other in rest))
        assert covers(whole, [lattice(*other) for other in rest]) == (byte_set(*view) <= held), piece


N = 4096
ROW = 4 * N  # bytes
MATRIX = (0, [(N, ROW), (ROW, 1)])
LEFT, RIGHT = ((first, [(N, ROW), (ROW // 2, 1)]) for first in (0, ROW // 2))
EVEN, ODD = ((first, [(N * N // 2, 8), (4, 1)]) for first in (0, 4))
ALL_BUT_THE_LAST_ODD = (4, [(N * N // 2 - 1, 8), (4, 1)])
THREE_OF_FOUR_ROWS = (0, [(N // 4, 4 * ROW), (3, ROW), (ROW, 1)])
FOURTH_ROWS = (3 * ROW, [(N // 4, 4 * ROW), (ROW, 1)])
PADDED = (0, [(N, ROW + 64), (ROW, 1)])
WITH_ITS_PADDING = (0, [(N, ROW + 64), (ROW + 64, 1)])


@pytest.mark.parametrize(
    ("what", "read", "writes", "is_covered"),
    [
        ("left and right halves of rows", MATRIX, [LEFT, RIGHT], True),
        ("even and odd elements", MATRIX, [EVEN, ODD], True),
        ("even elements alone", MATRIX, [EVEN], False),
        ("the last odd element is missing", MATRIX, [EVEN, ALL_BUT_THE_LAST_ODD], False),
        ("three rows of four, and the fourth", MATRIX, [THREE_OF_FOUR_ROWS, FOURTH_ROWS], True),
        ("the left half and every other element", MATRIX, [LEFT, EVEN], False),
        ("the elements that both leave out", (ROW // 2 + 4, [(N, ROW), (4, 1)]), [LEFT, EVEN], False),
        ("a transposed write", MATRIX, [(0, [(4, 1), (N, 4), (N, ROW)])], True),
        ("rows of a padded matrix", PADDED, [PADDED], True),
        ("a row of a padded matrix", (7 * (ROW + 64), [(ROW, 1)]), [PADDED], True),
        ("the padding too", WITH_ITS_PADDING, [PADDED], False),
        ("every row on its own", MATRIX, [(i * ROW, [(ROW, 1)]) for i in range(N)], True),
        ("every row but one", MATRIX, [(i * ROW, [(ROW, 1)]) for i in range(N) if i != 77], False),
        ("columns across both halves", (ROW // 2 - 40, [(N, ROW), (80, 1)]), [LEFT, RIGHT], True),
    ],
)
def test_sixteen_million_elements_are_judged_by_their_axes(what, read, writes, is_covered):
    assert covers(lattice(*read), [lattice(*write) for write in writes]) == is_covered, what


def test_a_question_without_end_is_refused_in_bounded_work():
    """Strides without a common measure. Nothing real looks like that, but a program file may."""
    read = lattice(0, [(1 << 30, 1009), (1 << 30, 1013 * 1009 * 1021), (7, 1)])
    writes = [lattice(i, [(1 << 40, 1013 + 2 * i), (1 << 40, 1999 * 3001 + i), (11, 1)]) for i in range(40)]
    question = _Question()
    with pytest.raises(_TooMuchWorkError):
        question.covers(read, frozenset(writes))
    assert question.work < MAX_WORK + 1000
    assert not covers(read, writes)


# --- all shapes ------------------------------------------------------------------------------------------------------

RANGES: Ranges = {"b": (1, 8), "s": (1, 4096), "t": (0, 1 << 20)}


def region(shape: list[Dim], strides: list[Dim], offset: Dim = 0, ranges: Ranges = RANGES) -> Region:
    return region_of("f32", shape, strides, offset, ranges)


def proven(read: Region, writes: list[Region]) -> bool:
    return Coverage(RANGES).proves(_shape(read), [_shape(write) for write in writes])


CONCAT = [8, 1]
INNER = ["8*s + 8*t", 8, 1]
QKV = ["12*s", 12, 1]


@pytest.mark.parametrize(
    ("what", "read", "writes"),
    [
        ("another shape", region(["b", "s", 64], ["64*s", 64, 1]), [region(["b*s", 8, 8], [64, 8, 1])]),
        ("heads before rows", region(["b", 4, "s", 16], ["64*s", 16, 64, 1]), [region(["b*s", 64], [64, 1])]),
        (
            "one after the other",
            region(["s + t", 8], CONCAT),
            [region(["t", 8], CONCAT, "8*s"), region(["s", 8], CONCAT)],
        ),
        (
            "side by side",
            region(["b", "s + t", 8], INNER),
            [region(["b", "s", 8], INNER), region(["b", "t", 8], INNER, "8*s")],
        ),
        ("even and odd elements", region(["b", "2*s"], ["2*s", 1]), [region(["b*s"], [2]), region(["b*s"], [2], 1)]),
        (
            "columns of columns",
            region(["b*s", 12], [12, 1]),
            [region(["b", "s", 4], QKV), region(["b", "s", 4], QKV, 4), region(["b*s", 4], [12, 1], 8)],
        ),
        ("a column", region(["b"], ["s + t"], "s - 1"), [region(["b", "s"], ["s + t", 1])]),
    ],
)
def test_layouts_of_models_are_proven_for_every_shape(what, read, writes):
    assert proven(read, writes), what
    for i in range(len(writes)):
        assert not proven(read, writes[:i] + writes[i + 1 :]), f"{what}, without write {i}"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([["n"], ["n", 2], ["m", 2], ["m", "n"], [3, "n"], ["n + m"], ["n*m"], [2]]),
            st.sampled_from([1, 2, "n", "m", "2*n", "n + m"]),
            st.sampled_from([1, 2]),
            st.sampled_from([0, 1, 2, "n", "m", "n + m"]),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_what_is_proven_holds_at_every_shape(drawn):
    ranges: Ranges = {"n": (0, 5), "m": (1, 4)}
    regions = [
        region(shape, [outer, inner] if len(shape) == 2 else [inner], offset, ranges)
        for shape, outer, inner, offset in drawn
    ]
    read, *writes = regions
    judge = Coverage(ranges)
    hole = judge.hole(read, writes)

    def is_held(binding: Mapping[str, int]) -> bool:
        sets = []
        for each in regions:
            axes = [(dim(n).evaluate(binding), dim(s).evaluate(binding)) for n, s in each.axes]
            sets.append(byte_set(each.low.evaluate(binding), [*axes, (4, 1)]))
        return sets[0] <= set().union(*sets[1:])

    if judge.proves(_shape(read), [_shape(write) for write in writes]):
        assert hole is None
        assert all(is_held({"n": n, "m": m}) for n in range(6) for m in range(1, 5))
    assert all(map(is_held, judge.bindings)) if hole is None else not is_held(hole)


def test_samples_are_all_shapes_if_they_are_few_and_all_ends_otherwise():
    assert len(sample_bindings({})) == 1
    assert len(sample_bindings({"b": (1, 2), "s": (3, 8)})) == 12
    many = sample_bindings(dict.fromkeys("abcdef", (1, 1000)))
    assert many[0] == dict.fromkeys("abcdef", 1000)
    for point in itertools.product((1, 4096), (7, 999)):
        assert dict(zip("bs", point, strict=True)) in sample_bindings({"b": (1, 4096), "s": (7, 999)})
    for name in "abcdef":
        assert {**dict.fromkeys("abcdef", 1000), name: 1} in many
