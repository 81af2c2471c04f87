"""Whether work beside other work pays in an entry as a whole: in time, and in memory.

    overlap(tasks, 4, memory)    # streams of the tasks, "166.8 us, on one stream 184.7, no less than 159.6; …"

Tried are all overlaps that pay for themselves, then fewer and fewer: without those beside the steps where the arenas
are fullest, until the rest hardly needs more memory than one stream does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qcompiler.passes.schedule.stream_choice import Choice, Task, choose, longest_chain
from qcompiler.passes.schedule.stream_memory import ActivationMemory

WORTH = 0.98
"""Of the time on one stream: estimates that are closer to it say nothing."""

GROWTH, SLACK = 1.15, 1 << 16
"""How much memory activations may take: 15 percent more than on one stream, or 64 KiB more."""

ROOMS = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Of the largest need on one stream: a step beside which more is alive stays on the device's own.  Tried in turn."""


def overlap(tasks: Sequence[Task], limit: int, memory: ActivationMemory) -> tuple[tuple[str, ...], str]:
    """A stream for each task, at most `limit` for kernels on each device, and what that is expected to save."""
    one = choose(tasks, 1)
    if limit == 1 or all(len(task.lanes) == 1 for task in tasks):
        return one.streams, f"{one.span:.1f} us"
    chosen, grown, stopped = _fitting(tasks, one, limit, memory)
    why = f"{chosen.span:.1f} us, on one stream {one.span:.1f}, no less than {longest_chain(tasks):.1f}"
    if chosen is not one:
        why += f"; {grown:+.0%} memory for activations"
    return chosen.streams, why + (f"; more would take {stopped:+.0%} memory" if stopped is not None else "")


def _fitting(
    tasks: Sequence[Task], one: Choice, limit: int, memory: ActivationMemory
) -> tuple[Choice, float, float | None]:
    """The first choice that is worth it and fits, its growth of memory, and that of the first that did not fit."""
    least, fullness = memory.nbytes(one.streams), memory.fullness()
    stopped: float | None = None
    for room in ROOMS:
        many = choose([replace(task, stays=full > room) for task, full in zip(tasks, fullness, strict=True)], limit)
        if many.span > WORTH * one.span:
            break
        nbytes = memory.nbytes(many.streams)
        grown = nbytes / least - 1 if least else 0.0
        if nbytes <= max(GROWTH * least, least + SLACK):
            return many, grown, stopped
        stopped = grown if stopped is None else stopped
    return one, 0.0, stopped
