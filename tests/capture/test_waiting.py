"""Nothing waits on the host but what was asked for: calls, captures and replays are ordered by streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qcompiler.runtime import LoadedProgram, ProgramImage
from qcompiler.runtime.backends.base import Backend, Stream


class HostWaits:
    """What the host waited for since `clear`: the streams of `synchronize` (None: a whole device), and queries."""

    def __init__(self) -> None:
        self.streams: list[Stream | None] = []
        self.queries = 0

    def clear(self) -> None:
        self.streams, self.queries = [], 0

    @property
    def none(self) -> bool:
        return not self.streams and not self.queries


@pytest.fixture
def backend(run: LoadedProgram) -> Backend:
    return next(iter(run.slots.values())).backend


@pytest.fixture
def waits(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostWaits]:
    found, kind = HostWaits(), type(backend)
    synchronize, query = kind.synchronize, kind.query

    def counted(self: Backend, stream: Stream | None = None) -> None:
        found.streams.append(stream)
        synchronize(self, stream)

    def asked(self: Backend, what: Any) -> bool:
        found.queries += 1
        return query(self, what)

    monkeypatch.setattr(kind, "synchronize", counted)
    monkeypatch.setattr(kind, "query", asked)
    yield found


def own(session: Any) -> set[Any]:
    """The streams of a session."""
    queues = session.queues
    return {queue.stream for queue in (*queues.named.values(), *queues.homes.values())}


def test_calls_with_device_arrays_wait_for_nothing(small: Any, run: LoadedProgram, waits: HostWaits) -> None:
    session = run.session()
    x, out = run.array(small.x(3)), small.outputs(3, run)
    waits.clear()
    first = session(x)
    session(first["raw"], out=out)
    assert waits.none
    assert np.array_equal(out["raw"].numpy(), small.x(3))
    assert not waits.none, "reading the result is what waits"


def test_calls_with_host_arrays_wait_for_their_own_stream_only(
    small: Any, run: LoadedProgram, waits: HostWaits
) -> None:
    session = run.session()
    waits.clear()
    session(small.x(3))
    assert waits.streams == [home.stream for home in session.queues.homes.values()]  # type: ignore[attr-defined]
    assert not waits.queries


def test_a_capture_waits_for_its_sessions_streams_only(
    small: Any, run: LoadedProgram, backend: Backend, waits: HostWaits
) -> None:
    session, caller = run.session(), backend.stream("caller")
    x = run.array(small.x(3))
    waits.clear()
    session.capture(x, stream=caller)
    assert set(waits.streams) <= own(session), "neither the device nor the caller's stream"
    assert not waits.queries


def test_replays_on_a_callers_stream_wait_for_nothing(
    small: Any, run: LoadedProgram, backend: Backend, waits: HostWaits
) -> None:
    """What the caller's stream did before a replay is seen by it, and what it does after it sees the results."""
    caller = backend.stream("caller")
    graph = run.capture(small.x(3))
    fresh, x, out = run.array(small.x(3, 5)), run.array(small.x(3, 6)), small.outputs(3, run)
    kept = run.array(np.zeros((3, 48), np.float32))
    backend.synchronize(backend.legacy_stream())
    waits.clear()
    backend.copy(caller, x.address, fresh.address, x.nbytes)
    graph.replay(x, out=out, stream=caller)
    backend.copy(caller, kept.address, out["y"].address, kept.nbytes)
    graph.replay(fresh, stream=caller)
    assert waits.none
    backend.synchronize(caller)
    assert np.array_equal(kept.numpy(), run.session()(small.x(3, 5))["y"])


def test_graphs_of_two_sessions_and_all_entry_points_take_turns_without_a_wait(
    small: Any, run: LoadedProgram, backend: Backend, waits: HostWaits, same: Callable[[Any, Any], bool]
) -> None:
    """Six graphs alive at once, replayed in turn with fresh inputs; the states are each session's own."""
    caller = backend.stream("caller")
    sessions = [run.session(), run.session()]
    graphs = [(session, batch, session.capture(small.x(batch))) for session in sessions for batch in (1, 4, 12)]
    eager = {id(session): run.session() for session in sessions}
    turns = [(*graphs[number % 6], small.x(graphs[number % 6][1], 40 + number)) for number in (0, 4, 2, 3, 1, 5, 0, 3)]
    arrays = [run.array(x) for *_, x in turns]
    backend.synchronize(backend.legacy_stream())
    waits.clear()
    results = [graph.replay(x, stream=caller) for (_, _, graph, _), x in zip(turns, arrays, strict=True)]
    assert waits.none
    for (session, _, _, x), result in zip(turns, results, strict=True):
        assert same(result, eager[id(session)](x))


def test_two_devices_wait_for_each_other_and_not_the_host(hop: ProgramImage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LoadedProgram.from_image(hop, "sim:0")
    kind = type(next(iter(run.slots.values())).backend)
    x = run.array(np.arange(9, dtype=np.float32))
    graph = run.capture(x)
    waited: list[Any] = []
    synchronize = kind.synchronize
    monkeypatch.setattr(
        kind, "synchronize", lambda self, stream=None: (waited.append(stream), synchronize(self, stream))[1]
    )
    eager, replayed = run(x), graph.replay(x)
    assert not waited
    assert np.array_equal(eager.numpy(), replayed.numpy())
