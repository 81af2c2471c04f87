"""Captured graphs: replays see fresh inputs and equal eager calls to the bit; what breaks a capture leaves no trace."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentShapeError,
    CaptureRuleError,
    DeviceUnavailableError,
    SessionBusyError,
)
from qcompiler.runtime import DeviceArray, LoadedProgram, ProgramImage
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.executor import PlanExecutor
from qcompiler.runtime.sim.device import SimGraph

NODES = {"kernel": 3, "copy": 2}
Same = Callable[[Any, Any], bool]


@pytest.mark.parametrize("batch", [1, 3, 12])
@pytest.mark.parametrize("place", ["host", "device"])
def test_three_replays_with_fresh_inputs_equal_eager(
    small: Any, run: LoadedProgram, same: Same, batch: int, place: str
) -> None:
    eager = run.session()
    graph = run.capture(small.x(batch, 100))
    assert graph.nodes == NODES
    for seed in range(3):
        x = small.x(batch, seed)
        replayed = graph.replay(run.array(x) if place == "device" else x)
        assert isinstance(replayed["y"], DeviceArray if place == "device" else np.ndarray)
        assert same(replayed, eager(x)), f"replay {seed} differs"


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_capturing_runs_once_and_leaves_states_as_they_were(small: Any, run: LoadedProgram, mode: str) -> None:
    x = small.x(2)
    run(x)
    graph = run.capture(x, mode=mode)
    assert [float(graph.replay(x)["n"][0]), float(run(x)["n"][0]), float(graph.replay(x)["n"][0])] == [12, 13, 14]
    run.reset()
    assert float(graph.replay(x)["n"][0]) == 11


def test_capturing_without_a_copy_of_the_states_leaves_them_as_a_call_does(small: Any, run: LoadedProgram) -> None:
    x = small.x(2)
    run(x)
    graph = run.capture(x, keep_states=False)
    assert [float(graph.replay(x)["n"][0]), float(run(x)["n"][0])] == [13, 14]


def test_graphs_of_all_entry_points_live_side_by_side(small: Any, run: LoadedProgram, same: Same) -> None:
    eager = run.session()
    graphs = {batch: run.capture(small.x(batch)) for batch in (1, 2, 9)}
    assert {batch: graph.entry for batch, graph in graphs.items()} == {1: "one", 2: "many", 9: "many"}
    for batch in (9, 1, 2, 1, 9):
        x = small.x(batch, seed=batch + 7)
        assert same(graphs[batch].replay(x), eager(x))


def test_graphs_of_two_sessions_do_not_meet(small: Any, run: LoadedProgram) -> None:
    x, other = small.x(3, 1), small.x(3, 2)
    a, b = (session.capture(x) for session in (run.session(), run.session()))
    results = [a.replay(x), b.replay(other), a.replay(other)]
    assert [float(each["n"][0]) for each in results] == [11, 11, 12]
    assert np.array_equal(results[1]["y"], results[2]["y"])
    assert not np.array_equal(results[0]["y"], results[1]["y"])


def test_replay_fills_out(small: Any, run: LoadedProgram) -> None:
    graph = run.capture(small.x(3))
    for seed, place in enumerate((None, run)):
        x, out = small.x(3, seed), small.outputs(3, place)
        assert graph.replay(x, out=out) is out
        assert np.array_equal(np.asarray(out["y"]), run(x)["y"])


def test_replay_on_host_gives_the_same_and_takes_exactly_what_was_captured(
    small: Any, run: LoadedProgram, same: Same
) -> None:
    graph, eager = run.capture(small.x(3)), run.session()
    names = [sig.name for sig in run.plan.entries[0].outputs]
    for seed in range(3):
        x, out = small.x(3, seed), small.outputs(3, None)
        graph.replay_on_host({"x": x}, {number: out[name] for number, name in enumerate(names)})
        x[:] = 0  # the caller's again
        assert same(out, eager(small.x(3, seed)))
    x, y = small.x(3), small.outputs(3, None)["y"]
    graph.replay_on_host({"x": x}, {names.index("y"): y})
    assert np.array_equal(y, eager(x)["y"]), "an output that is not asked for stays where it is"
    for wrong, error in (
        (small.x(2), ArgumentShapeError), (x.astype(np.float64), ArgumentDtypeError),
        (np.asfortranarray(x), ArgumentDtypeError),
    ):  # fmt: skip
        with pytest.raises(error, match="argument 'x'"):
            graph.replay_on_host({"x": wrong}, {})


class Made(Mapping[str, Any]):
    """Arguments that are made when they are asked for, and kept nowhere."""

    def __getitem__(self, name: str) -> Any:
        return np.full(9, {"a": 1, "b": 20}[name], np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2


def test_arrays_that_a_mapping_makes_live_until_they_are_read(total: ProgramImage, device: str) -> None:
    run, y = LoadedProgram.from_image(total, device), np.zeros(9, np.float32)
    graph = run.capture(np.zeros(9, np.float32), np.zeros(9, np.float32))
    graph.replay_on_host(Made(), {0: y})
    assert y.tolist() == [21.0] * 9


def test_graphs_of_one_session_and_their_small_inputs_take_turns(total: ProgramImage, device: str) -> None:
    """Before any result is read: both from the host, one from either side, on the caller's stream and on another."""
    run = LoadedProgram.from_image(total, device)
    other, found = registry.backend(device, total.target.isa).stream("other"), []
    graphs = {n: run.capture(np.zeros(n, np.float32), np.zeros(n, np.float32)) for n in (9, 12)}
    for turn in range(4):
        for n, graph in graphs.items():
            a, b = (np.arange(n, dtype=np.float32) + seed for seed in (turn, 10 * turn))
            sums = a + b
            given = run.array(b) if turn % 2 else b
            out = run.array(np.zeros(n, np.float32))
            graph.replay(a, given, out=out, stream=other if turn >= 2 else None)
            y = np.zeros(n, np.float32)
            graph.replay_on_host({"a": b, "b": sums}, {0: y})
            found.append((out, sums, y, b + sums))
            a[:] = b[:] = -1.0  # the caller's again
    assert all(np.array_equal(out.numpy(), wanted) and np.array_equal(y, then) for out, wanted, y, then in found)


@pytest.mark.parametrize("where", ["upload", "launch", "download"])
def test_a_replay_on_host_that_fails_leaves_the_next_ones_as_they_are(
    total: ProgramImage, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, y = LoadedProgram.from_image(total, "sim:0"), np.zeros(9, np.float32)
    x = np.arange(9, dtype=np.float32)
    graph = run.capture(x, x)
    owner: Any = SimGraph if where == "launch" else SimBackend
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
        with pytest.raises(MemoryError, match="planted"):
            graph.replay_on_host({"a": x, "b": x}, {0: y})
    graph.replay_on_host({"a": x + 1, "b": x}, {0: y})
    assert np.array_equal(y, 2 * x + 1) and np.array_equal(graph.replay(x, x + 2), 2 * x + 2)


def test_other_shapes_are_refused_with_the_captured_ones(small: Any, run: LoadedProgram) -> None:
    graph = run.capture(small.x(3))
    with pytest.raises(ArgumentShapeError, match=r"'x' has shape \(4, 64\), but .* captured with x \(3, 64\)"):
        graph.replay(small.x(4))
    graph.replay(small.x(3))


def test_results_of_a_replay_are_copies(small: Any, run: LoadedProgram) -> None:
    graph = run.capture(small.x(3))
    first = graph.replay(run.array(small.x(3, 1)))
    kept = first["y"].numpy()
    graph.replay(small.x(3, 2))
    assert np.array_equal(first["y"].numpy(), kept)


def test_static_outputs_read_through_an_older_handle_raise(small: Any, run: LoadedProgram) -> None:
    graph = run.capture(small.x(3))
    result = graph.replay(small.x(3))
    outputs = graph.outputs
    assert np.array_equal(outputs["y"].numpy(), result["y"])
    graph.replay(small.x(3, 9))
    for use in (outputs["y"].numpy, lambda: outputs["y"].address, lambda: np.asarray(outputs["n"])):
        with pytest.raises(CaptureRuleError, match="replay 2 has overwritten"):
            use()
    assert np.array_equal(graph.outputs["raw"].numpy(), small.x(3, 9))


def test_a_static_output_may_be_the_next_input(double: ProgramImage, device: str) -> None:
    run = LoadedProgram.from_image(double, device)
    x = np.arange(5, dtype=np.float32)
    graph = run.capture(x)
    graph.replay(x)
    for _ in range(3):
        graph.replay(graph.outputs)
    assert np.array_equal(graph.outputs.numpy(), 16 * x)


def test_a_graph_keeps_alive_what_it_uses(small: Any, device: str) -> None:
    run = LoadedProgram.from_image(small.image, device)
    want = run(small.x(3))["y"]
    graph = run.session().capture(small.x(3))
    del run
    gc.collect()
    assert np.array_equal(graph.replay(small.x(3))["y"], want)


def test_a_busy_session_replays_nothing(small: Any, run: LoadedProgram) -> None:
    session = run.session()
    graph = session.capture(small.x(2))
    session._lock.acquire()
    for use in (graph.replay, session.capture):
        with pytest.raises(SessionBusyError):
            use(small.x(2))
    session._lock.release()
    graph.replay(small.x(2))


def test_an_empty_graph_is_refused(double: ProgramImage, device: str) -> None:
    run = LoadedProgram.from_image(double, device)
    with pytest.raises(CaptureRuleError, match=r"nothing to do on the device .* empty"):
        run.capture(np.zeros(0, np.float32))
    run.capture(np.zeros(1, np.float32))


# --- what breaks a capture -------------------------------------------------------------------------------------------


def while_recording(monkeypatch: pytest.MonkeyPatch, session: Any, change: Callable[[Any, Callable[[], None]], None]):
    """Plants a fault: the executor's run inside the recording goes through `change(executor, run)`."""
    original = PlanExecutor.run

    def run(self: Any, context: Any, arenas: Any, binding: Any) -> None:
        if session.memory.freeze.frozen:
            change(self, lambda: original(self, context, arenas, binding))
        else:
            original(self, context, arenas, binding)

    monkeypatch.setattr(PlanExecutor, "run", run)


def usable(small: Any, session: Any, same: Same) -> bool:
    """Calls and captures of the session work, and no stream of it captures."""
    assert not any(queue.stream.is_capturing for queue in session.queues.named.values())
    assert gc.isenabled()
    other = session.program.session()
    other.set_states(session.states())
    x = small.x(3, 5)
    return same(session.capture(x).replay(x), other(x))


def test_an_exception_inside_a_capture_ends_it(
    small: Any, run: LoadedProgram, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run.session()

    def fail(executor: Any, run: Callable[[], None]) -> None:
        run()
        raise KeyboardInterrupt("in the middle of it")

    with monkeypatch.context() as patch:
        while_recording(patch, session, fail)
        with pytest.raises(KeyboardInterrupt):
            session.capture(small.x(3))
    assert usable(small, session, same)


def test_an_exception_between_fork_and_join_ends_the_capture(
    small: Any, run: LoadedProgram, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run.session()

    def fail(executor: Any, run: Callable[[], None]) -> None:
        raise ValueError("before the first step")

    with monkeypatch.context() as patch:
        while_recording(patch, session, fail)
        with pytest.raises(ValueError, match="before the first step"):
            session.capture(small.x(3))
    assert usable(small, session, same)


@pytest.mark.parametrize(
    ("method", "before"), [("begin_capture", False), ("end_capture", True), ("end_capture", False)]
)
def test_an_interrupt_at_either_end_of_a_capture_ends_it(
    small: Any, run: LoadedProgram, same: Same, monkeypatch: pytest.MonkeyPatch, method: str, before: bool
) -> None:
    session = run.session()
    backend = session.queues.first.backend
    original = getattr(backend, method)
    left = [1]

    def interrupted(*args: Any) -> Any:
        result = None if before and left else original(*args)
        if left:
            left.pop()
            raise KeyboardInterrupt("at the end of it")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(backend, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.capture(small.x(3))
    assert usable(small, session, same)


def test_an_allocation_while_recording_is_refused(
    small: Any, run: LoadedProgram, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = run.session()

    def allocate(executor: Any, run: Callable[[], None]) -> None:
        run()
        session.memory.allocate("gpu", 64, "workspace")

    with monkeypatch.context() as patch:
        while_recording(patch, session, allocate)
        with pytest.raises(CaptureRuleError, match=r"'workspace' \(64 bytes\) would be allocated while a capture"):
            session.capture(small.x(3))
    assert usable(small, session, same)


@pytest.mark.parametrize("fault", ["missing", "doubled"])
def test_a_graph_that_is_not_the_plan_is_refused(
    small: Any, run: LoadedProgram, same: Same, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    session: Any = run.session()

    def change(executor: Any, run: Callable[[], None]) -> None:
        (prepared,) = executor._prepared.values()
        steps = list(prepared.steps)
        last = next(step for step in reversed(steps) if hasattr(step, "kernel"))
        prepared.steps[:] = [*steps, last] if fault == "doubled" else [step for step in steps if step is not last]
        try:
            run()
        finally:
            prepared.steps[:] = steps

    found = {"missing": "2 copy nodes, 2 kernel nodes", "doubled": "2 copy nodes, 4 kernel nodes"}[fault]
    with monkeypatch.context() as patch:
        while_recording(patch, session, change)
        with pytest.raises(CaptureRuleError, match=f"holds {found}, its steps are 2 copy nodes, 3 kernel nodes"):
            session.capture(small.x(3))
    assert usable(small, session, same)


def test_work_that_escapes_to_another_stream_breaks_the_seal(
    small: Any, run: LoadedProgram, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the seal exists for: a launch on a stream outside the capture runs once and is never replayed."""
    session: Any = run.session()
    outside = session.queues.first.backend.stream("outside")

    def escape(executor: Any, run: Callable[[], None]) -> None:
        (prepared,) = executor._prepared.values()
        step = next(step for step in prepared.steps if hasattr(step, "kernel"))
        inside, step.stream = step.stream, outside
        try:
            run()
        finally:
            step.stream = inside

    with monkeypatch.context() as patch:
        while_recording(patch, session, escape)
        with pytest.raises(CaptureRuleError, match="work escaped the capture"):
            session.capture(small.x(3))
    session.queues.first.backend.synchronize(outside)
    assert usable(small, session, same)


def test_the_cpu_has_no_graphs_and_says_so(small: Any) -> None:
    from qcompiler.runtime.backends.registry import backend

    cpu = backend("cpu", "x86-64")
    with pytest.raises(DeviceUnavailableError, match="capture needs cuda or sim"):
        cpu.begin_capture(cpu.legacy_stream())
