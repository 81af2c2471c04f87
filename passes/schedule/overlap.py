"""Decides whether overlapping work on several streams pays off for a whole entry, in time and in memory.

    overlap(tasks, 4, memory)    # streams of the tasks, "166.8 us, on one stream 184.7, no less than 159.6; …"

Tries the full set of profitable overlaps first. If that needs too much memory, it keeps the steps where the arenas are
fullest on the device's own stream, and lowers that threshold until the entry needs little more memory than one stream
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qcompiler.passes.schedule.stream_choice import StreamChoice, Task, choose, longest_chain
from qcompiler.passes.schedule.stream_memory import ActivationMemory

MOST_TIME_FRACTION = 0.98
"""The overlapped time must be below this fraction of the one-stream time. The estimates are not precise enough for
less."""

MEMORY_GROWTH, MEMORY_SLACK_BYTES = 1.15, 1 << 16
"""Memory limit for activations: 15 percent more than on one stream, or 64 KiB more, whichever is larger."""

FULLNESS_LIMITS = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Thresholds, tried in turn. A step stays on the device's own stream if the arenas are fuller than this fraction of
their one-stream peak while it may run."""


def overlap(tasks: Sequence[Task], limit: int, memory: ActivationMemory) -> tuple[tuple[str, ...], str]:
    """Chooses a stream for each task, with at most `limit` streams for kernels on each device. Also returns a text with
    the estimated times."""
    one = choose(tasks, 1)
    if limit == 1 or all(len(task.candidates) == 1 for task in tasks):
        return one.streams, f"{one.span:.1f} us"
    chosen, grown, stopped = _fitting(tasks, one, limit, memory)
    why = f"{chosen.span:.1f} us, on one stream {one.span:.1f}, no less than {longest_chain(tasks):.1f}"
    if chosen is not one:
        why += f"; {grown:+.0%} memory for activations"
    return chosen.streams, why + (f"; more would take {stopped:+.0%} memory" if stopped is not None else "")


def _fitting(
    tasks: Sequence[Task], one: StreamChoice, limit: int, memory: ActivationMemory
) -> tuple[StreamChoice, float, float | None]:
    """The first choice that saves time and fits in memory, its memory growth, and the growth of the first choice that
    did not fit."""
    least, fullness = memory.nbytes(one.streams), memory.fullness()
    stopped: float | None = None
    for room in FULLNESS_LIMITS:
        many = choose([replace(task, stays=full > room) for task, full in zip(tasks, fullness, strict=True)], limit)
        if many.span > MOST_TIME_FRACTION * one.span:
            break
        nbytes = memory.nbytes(many.streams)
        grown = nbytes / least - 1 if least else 0.0
        if nbytes <= max(MEMORY_GROWTH * least, least + MEMORY_SLACK_BYTES):
            return many, grown, stopped
        stopped = grown if stopped is None else stopped
    return one, 0.0, stopped
