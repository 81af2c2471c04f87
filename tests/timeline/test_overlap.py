"""Overlap as a whole: kept where it saves time and takes hardly more memory, said so where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qcompiler.kernels.cost import Cost
from qcompiler.passes.schedule.overlap import overlap
from qcompiler.passes.schedule.stream_choice import Task

STREAMS = ("gpu.compute", "gpu.compute1", "gpu.compute2", "gpu.compute3")
MIB = 1 << 20


class Memory:
    """Stands in for ActivationMemory: step `full` is where the arena is fullest; each fork beside it takes a MiB."""

    def __init__(self, steps: int, full: Sequence[int], base: int = 2 * MIB) -> None:
        self.steps, self.full, self.base = steps, set(full), base

    def fullness(self) -> list[float]:
        return [1.0 if number in self.full else 0.1 for number in range(self.steps)]

    def nbytes(self, streams: Sequence[str]) -> int:
        return self.base + MIB * sum(streams[number] != STREAMS[0] for number in self.full)


def tasks() -> list[Task]:
    """A root, two long branches, their meeting; the same again."""
    found: list[Task] = []
    for start in (0, 4):
        earlier = (start - 1,) if start else ()
        for number, (before, span) in enumerate(
            [(earlier, 4), ((start,), 30), ((start,), 30), ((start + 1, start + 2), 4)]
        ):
            found.append(Task("gpu", STREAMS, before, Cost(span, 0.1), 2.0))
            assert len(found) == start + number + 1
    return found


def run(full: Sequence[int], limit: int = 4, base: int = 2 * MIB) -> tuple[tuple[str, ...], str]:
    memory: Any = Memory(8, full, base)
    return overlap(tasks(), limit, memory)


def test_both_branches_overlap_where_there_is_room() -> None:
    streams, why = run([])
    assert streams[1] != streams[2] and streams[5] != streams[6]
    assert why.endswith("+0% memory for activations")


def test_beside_the_fullest_steps_nothing_runs() -> None:
    streams, why = run([5, 6])
    assert streams[1] != streams[2]
    assert streams[5] == streams[6] == STREAMS[0]
    assert "+0% memory" in why and "more would take +50% memory" in why


def test_little_memory_is_no_reason() -> None:
    streams, why = run([5, 6], base=1000 * MIB)
    assert streams[5] != streams[6] and "more would" not in why


def test_one_stream_where_overlap_saves_nothing_or_is_switched_off() -> None:
    assert set(run([], limit=1)[0]) == {STREAMS[0]}
    chain = [Task("gpu", STREAMS, (number - 1,) if number else (), Cost(4.0, 0.1), 2.0) for number in range(5)]
    memory: Any = Memory(5, [])
    streams, why = overlap(chain, 4, memory)
    assert set(streams) == {STREAMS[0]} and why == "20.0 us, on one stream 20.0, no less than 20.0"
