"""assign-streams: what gets a stream of its own, and what does not."""

from __future__ import annotations

import random

import pytest

from qcompiler.kernels.cost import Cost
from qcompiler.passes.schedule.stream_choice import StreamChoice, Task, choose, longest_chain

STREAMS = ("gpu.compute", "gpu.compute1", "gpu.compute2", "gpu.compute3")
EVENT = 2.0


def task(*earlier: int, span: float = 4.0, share: float = 0.1, candidates: tuple[str, ...] = STREAMS) -> Task:
    return Task("gpu", candidates, earlier, Cost(span, share), EVENT)


def numbers(choice: StreamChoice) -> list[int]:
    """The streams in the order of their first use."""
    first = list(dict.fromkeys(choice.streams))
    return [first.index(stream) for stream in choice.streams]


def test_a_chain_stays_on_one_stream() -> None:
    choice = choose([task(), task(0), task(1), task(2)], 4)
    assert numbers(choice) == [0] * 4 and choice.span == 16


def test_branches_beside_each_other_get_streams_and_meet_again() -> None:
    """norm, then q k v, then attention: 4 + 4 + 2 x an event + 4 instead of 20."""
    choice = choose([task(), task(0, span=8), task(0), task(0), task(1, 2, 3)], 4)
    assert choice.streams[:2] == STREAMS[:1] * 2 and len(set(choice.streams[1:4])) == 3
    assert choice.span < 4 + 8 + 4 + 4 + 4


def test_launches_that_fill_the_device_are_not_forked() -> None:
    assert numbers(choose([task(), task(0, span=50, share=0.97), task(0, span=50, share=0.97)], 4)) == [0, 0, 0]


def test_work_shorter_than_the_events_around_it_is_not_forked() -> None:
    assert numbers(choose([task(), task(0, span=1.5), task(0, span=1.5), task(1, 2)], 4)) == [0] * 4


def test_the_limit_holds() -> None:
    tasks = [task(), *(task(0, span=30, share=0.05) for _ in range(9))]
    assert [len(set(choose(tasks, limit).streams)) for limit in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_the_chain_with_the_most_behind_it_keeps_the_devices_own_stream() -> None:
    """A table that is made beside the first norm is listed first, but is not in its way."""
    tasks = [task(), task(), task(1), task(0), task(3), task(4), task(5), task(2, 6)]
    choice = choose(tasks, 4)
    assert {choice.streams[i] for i in (0, 3, 4, 5, 6)} == {STREAMS[0]}
    assert {choice.streams[i] for i in (1, 2)} == {STREAMS[1]}


def test_copies_keep_their_own_stream() -> None:
    tasks = [task(candidates=("gpu.copy",)), task(0), task(candidates=("gpu.copy",)), task(1, 2)]
    assert [name for name in choose(tasks, 4).streams if "copy" in name] == ["gpu.copy"] * 2


@pytest.mark.parametrize("seed", range(20))
def test_more_streams_never_beat_the_bound_and_dependences_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    tasks: list[Task] = []
    for number in range(40):
        earlier = tuple(sorted(rng.sample(range(number), min(number, rng.randint(0, 2)))))
        tasks.append(task(*earlier, span=rng.uniform(1.6, 12), share=rng.uniform(0.01, 1)))
    bound = longest_chain(tasks)
    one = choose(tasks, 1)
    assert one.span == pytest.approx(sum(each.cost.span for each in tasks))
    for limit in (2, 4):
        many = choose(tasks, limit)
        assert bound - 1e-6 <= many.span
        assert set(many.streams) <= set(STREAMS[:limit])
        assert choose(tasks, limit) == many, "the choice is deterministic"
