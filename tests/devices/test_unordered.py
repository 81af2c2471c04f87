"""What the vector clocks find: two operations on the same bytes that nothing orders, whatever ran first."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import OutOfMemoryError, SimulationError
from qcompiler.runtime.backends.sim import SimKernel
from qcompiler.runtime.sim.clocks import Access
from qcompiler.runtime.sim.device import machine, sim_device, sim_stream
from qcompiler.runtime.sim.queue import Work, step_label


def finding(rig: Any) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        rig.backend.synchronize()
    return caught.value


def test_a_missing_wait_is_found_under_every_seed_even_where_the_numbers_are_right(sim: Any, seeds: Any) -> None:
    right = 0
    for _ in seeds(20):
        one, two, x, y, z = sim.stream("one"), sim.stream("two"), sim.full(1), sim.full(7), sim.empty("z")
        sim.double(one, x, y)
        sim.double(two, y, z)  # nothing says that y is there
        assert finding(sim).finding == "unordered-access"
        right += bool((sim.peek(z) == 4).all())
    assert 0 < right < 20  # both orders happened


def test_a_seed_decides_the_order(sim: Any, seeds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, orders = sim_device(0), []

    def run() -> list[str]:
        order: list[str] = []
        streams = {name: sim.stream(name) for name in "abc"}
        for turn in range(4):
            for name, stream in streams.items():
                text = f"{name}{turn}"
                work = Work("kernel", text, 0, action=lambda seed, text=text: order.append(text) or ())
                device.enqueue(stream, work)
        sim.backend.synchronize()
        assert all(sorted(x for x in order if x[0] == name) == [x for x in order if x[0] == name] for name in "abc")
        return order

    for _ in seeds(5):
        orders.append(run())
    assert len({tuple(order) for order in orders}) > 1
    monkeypatch.setenv("QC_SIM_SEED", "3")
    machine().reseed()
    assert run() == orders[3]


def test_the_report_names_both_operations_the_memory_and_the_wait(sim: Any) -> None:
    one, two, x, y, z = sim.stream("one"), sim.stream("two"), sim.full(1), sim.empty("y"), sim.empty("z")
    with step_label("step 4 of decode[s=1]"):
        sim.double(one, x, y)
    with step_label("step 5 of decode[s=1]"):
        sim.increment(two, y, z)
    text = str(finding(sim))
    for part in (
        "kernel 'double_it'", "stream 'one'", "step 4 of decode[s=1]", "writes", "kernel 'increment'", "stream 'two'",
        "step 5 of decode[s=1]", "reads", "'y' of sim:0", f"bytes 0…{4 * sim.n}",
        "Let stream 'two' wait for an event that is recorded on stream 'one' after kernel 'double_it'",
    ):  # fmt: skip
        assert part in text, text


@pytest.mark.parametrize(
    ("first", "second"),
    [("write", "write"), ("read", "write"), ("write", "read"), ("copy", "write"), ("zero", "read"), ("upload", "read")],
)
def test_every_pair_with_a_write_conflicts(sim: Any, first: str, second: str) -> None:
    x, y, z = sim.full(1, "x"), sim.full(2, "y"), sim.full(3, "z")
    host = np.zeros(sim.n, np.float32)

    def deed(stream: Any, what: str) -> None:
        if what == "write":
            sim.double(stream, x, y)
        elif what == "read":
            sim.double(stream, y, z)
        elif what == "copy":
            sim.copy(stream, y, x)
        elif what == "upload":
            sim.backend.upload(stream, y.address, host.ctypes.data, host.nbytes)
        else:
            sim.backend.zero(stream, y.address, y.nbytes)

    deed(sim.stream("one"), first)
    deed(sim.stream("two"), second)
    assert finding(sim).finding == "unordered-access"


def test_two_readers_do_not_conflict(sim: Any) -> None:
    x, y, z = sim.full(1), sim.empty("y"), sim.empty("z")
    sim.double(sim.stream("one"), x, y)
    sim.double(sim.stream("two"), x, z)
    sim.backend.synchronize()


def test_neighbouring_bytes_do_not_conflict(sim: Any) -> None:
    x, y = sim.full(1), sim.full(2)
    sim.backend.copy(sim.stream("one"), y.address, x.address, 400)
    sim.backend.copy(sim.stream("two"), y.address + 400, x.address, 400)
    sim.backend.synchronize()
    sim.backend.copy(sim.stream("one"), y.address, x.address, 404)
    sim.backend.copy(sim.stream("two"), y.address + 400, x.address, 400)
    assert "bytes 400…404" in str(finding(sim))


def test_a_download_needs_the_wait_too(sim: Any) -> None:
    one, two, x, y = sim.stream("one"), sim.stream("two"), sim.full(1), sim.empty("y")
    sim.double(one, x, y)
    host = np.zeros(sim.n, np.float32)
    sim.backend.download(two, host.ctypes.data, y.address, host.nbytes)
    with pytest.raises(SimulationError, match="the download of 4000 bytes from 'y'"):
        sim.backend.synchronize(two)


def test_waiting_on_the_host_orders_streams(sim: Any) -> None:
    one, two, x, y, z = sim.stream("one"), sim.stream("two"), sim.full(1), sim.empty("y"), sim.empty("z")
    sim.double(one, x, y)
    sim.backend.synchronize(one)
    sim.double(two, y, z)
    event = sim.mark(two)
    while not sim.backend.query(event):
        pass
    sim.double(one, z, y)
    sim.backend.synchronize()


def test_waiting_for_one_stream_does_not_order_another(sim: Any) -> None:
    one, two, three, x, y, z = (
        sim.stream("one"), sim.stream("two"), sim.stream("three"), sim.full(1), sim.empty("y"), sim.empty("z"),
    )  # fmt: skip
    sim.double(one, x, y)
    sim.double(two, x, z)
    sim.backend.synchronize(two)
    sim.double(three, y, z)
    assert "stream 'one'" in str(finding(sim))


def test_a_wait_before_the_record_is_too_early(sim: Any) -> None:
    one, two, x, y, z = sim.stream("one"), sim.stream("two"), sim.full(1), sim.empty("y"), sim.empty("z")
    event = sim.mark(one)
    sim.backend.wait(two, event)
    sim.double(one, x, y)
    sim.backend.record(event, one)
    sim.double(two, y, z)
    assert finding(sim).finding == "unordered-access"


def test_order_passes_through_a_third_stream(sim: Any) -> None:
    one, two, three, x, y, z = (
        sim.stream("one"), sim.stream("two"), sim.stream("three"), sim.full(1), sim.empty("y"), sim.empty("z"),
    )  # fmt: skip
    sim.double(one, x, y)
    sim.order(one, two)
    sim.order(two, three)
    sim.double(three, y, z)
    sim.backend.synchronize()


def test_a_nonblocking_stream_is_not_ordered_by_the_legacy_stream(sim: Any) -> None:
    one, x, y, z = sim.stream("one", "nonblocking"), sim.full(1), sim.empty("y"), sim.empty("z")
    sim.double(one, x, y)
    sim.double(sim.legacy(), y, z)
    assert "the legacy stream" in str(finding(sim))


def test_two_blocking_streams_are_unordered_without_the_legacy_stream(sim: Any) -> None:
    one, two, x, y, z = (
        sim.stream("one", "blocking"),
        sim.stream("two", "blocking"),
        sim.full(1),
        sim.empty("y"),
        sim.empty("z"),
    )
    sim.double(one, x, y)
    sim.double(two, y, z)
    assert finding(sim).finding == "unordered-access"


def test_branches_of_a_graph_are_unordered(sim: Any) -> None:
    stream, fork, x, y, z = sim.stream("origin"), sim.stream("fork"), sim.full(1), sim.full(2), sim.full(3)
    sim.backend.begin_capture(stream)
    sim.order(stream, fork)
    sim.double(stream, x, y)
    sim.double(fork, y, z)
    sim.order(fork, stream)
    graph = sim.backend.end_capture(stream)
    graph.launch(stream)
    text = str(finding(sim))
    assert "stream 'origin' in a graph" in text
    assert "stream 'fork' in a graph" in text


def test_a_graph_and_a_stream_beside_it_are_unordered(sim: Any) -> None:
    stream, beside, x, y = sim.stream("origin"), sim.stream("beside"), sim.full(1), sim.full(2)
    sim.backend.begin_capture(stream)
    sim.double(stream, x, y)
    graph = sim.backend.end_capture(stream)
    graph.launch(stream)
    sim.fill(beside, x, 3)  # the next input, too early
    assert finding(sim).finding == "unordered-access"


def test_a_second_launch_of_a_graph_is_ordered_behind_the_first(sim: Any) -> None:
    stream, beside, x, y = sim.stream("origin"), sim.stream("beside"), sim.full(1), sim.full(2)
    sim.backend.begin_capture(stream)
    sim.double(stream, x, y)
    graph = sim.backend.end_capture(stream)
    graph.launch(stream)
    graph.launch(beside)
    sim.backend.synchronize()


def test_several_findings_are_counted(sim: Any) -> None:
    x, y = sim.full(1), sim.full(2)
    for name in ("one", "two", "three"):
        sim.double(sim.stream(name), x, y)
    text = str(finding(sim))
    assert all(f"stream '{name}'" in text for name in ("one", "two", "three"))


def test_a_download_that_nobody_waited_for_cannot_be_uploaded(sim: Any) -> None:
    one, two, x, y = sim.stream("one"), sim.stream("two"), sim.full(1), sim.empty("y")
    host = np.zeros(sim.n, np.float32)
    sim.backend.download(one, host.ctypes.data, x.address, host.nbytes)
    machine().run(machine().latest(0))  # executed, but the host does not know
    with pytest.raises(SimulationError, match="the host has not waited"):
        sim.backend.upload(two, y.address, host.ctypes.data, host.nbytes)
    sim.backend.synchronize(one)
    sim.backend.upload(two, y.address, host.ctypes.data, host.nbytes)
    assert (sim.read(y, two) == 1).all()


def test_accesses_that_nobody_declared_are_compared_as_well(sim: Any, seeds: Any) -> None:
    """Also when the host has waited for one of the two before the other runs."""
    device = sim_device(0)
    for _ in seeds(20):
        one, two, x = sim.stream("one"), sim.stream("two"), sim.full(1)
        seen = {"r": Access(x.address, x.address + 4, "r"), "w": Access(x.address, x.address + 4, "w")}

        def work(kind: str, x: Any = x, seen: Any = seen) -> Work:
            return Work("kernel", f"a kernel that {kind}", 0, (), (x.allocation,), lambda seed: [seen[kind]])

        device.enqueue(one, work("w"))
        device.enqueue(two, work("r"))
        with pytest.raises(SimulationError, match=r"a kernel that w .*a kernel that r"):
            for stream in (one, two):
                sim.backend.synchronize(stream)


def test_correct_programs_are_clean_over_fifty_seeds(sim: Any, other: Any, seeds: Any) -> None:
    """Pipelines of kernels, copies between devices, graphs and host waits; any order gives the same numbers."""
    expected = None
    for _ in seeds(50):
        values = _correct_program(sim, other)
        expected = values if expected is None else expected
        assert np.array_equal(values, expected)


def _correct_program(sim: Any, other: Any) -> Any:
    main, side, far, legacy = sim.stream("main"), sim.stream("side", "blocking"), other.stream("far"), sim.legacy()
    x, y, z, there, back = sim.full(1), sim.empty("y"), sim.empty("z"), other.empty("there"), other.empty("back")
    sim.backend.begin_capture(main)
    sim.double(main, x, y)
    sim.order(main, side)
    sim.increment(side, x, z)
    sim.order(side, main)
    sim.add(main, y, z, x)
    graph = sim.backend.end_capture(main)
    for turn in range(3):
        graph.launch(main)
        sim.copy(main, there, x)
        sim.order(main, far)
        other.double(far, there, back)
        other.order(far, main)
        sim.copy(main, y, back)
        sim.order(main, side)
        sim.double(side, y, z)
        sim.increment(legacy, z, x)  # the legacy stream waits for the blocking one
        sim.order(legacy, main)
        if turn == 1:
            sim.backend.synchronize(main)
    return sim.read(x, main)


# --- the callers' stream, devices, freed memory ----------------------------------------------------------------------


def test_the_current_stream_of_a_thread(sim: Any, other: Any) -> None:
    stream, inner, far = sim.stream("outer"), sim.stream("inner"), other.stream("far")
    with sim_stream(stream), sim_stream(far):
        assert sim.backend.caller_stream() is stream
        assert other.backend.caller_stream() is far
        with sim_stream(inner):
            assert sim.backend.caller_stream() is inner
        assert sim.backend.caller_stream() is stream
    assert sim.backend.caller_stream() is sim.legacy()


def test_devices_have_separate_memories(sim: Any, other: Any) -> None:
    here, there, y = sim.full(1, "here"), other.full(2, "there"), sim.empty("y")
    with pytest.raises(SimulationError, match="'there' of sim:1, but the kernel runs on sim:0") as caught:
        sim.double(sim.stream(), there, y)
    assert caught.value.finding == "wrong-device"
    stream = sim.stream()
    sim.copy(stream, y, there)
    sim.add(stream, here, y, y)
    assert (sim.read(y, stream) == 3).all()


def test_an_event_orders_streams_of_two_devices(sim: Any, other: Any, seeds: Any) -> None:
    for seed in seeds(10):
        stream, far, x, there, z = (
            sim.stream("near"),
            other.stream("far"),
            sim.full(1),
            other.empty("there"),
            other.empty("z"),
        )
        sim.copy(stream, there, x)
        if seed % 2:
            sim.order(stream, far)
        other.double(far, there, z)
        if seed % 2:
            assert (other.read(z, far) == 2).all()
        else:
            assert finding(other).finding in ("unordered-access", "uninitialised-read")


def test_a_device_without_room_says_so(sim: Any) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        sim.backend.allocate(1 << 60, label="far too much")
    assert caught.value.code == 2
    assert (sim.read(sim.full(1)) == 1).all()


def test_freed_memory_is_not_used_again(sim: Any) -> None:
    stream, x, y = sim.stream(), sim.full(1), sim.empty("scratch")
    y.close()
    for use in (
        lambda: sim.double(stream, x, y),
        lambda: sim.copy(stream, y, x),
        lambda: sim.backend.zero(stream, y.address, 16),
    ):
        with pytest.raises(SimulationError, match="'scratch' of sim:0, which was freed") as caught:
            use()
        assert caught.value.finding == "use-after-free"


def test_memory_outlives_the_work_that_was_submitted_before_it_was_freed(sim: Any) -> None:
    stream, x, y, z = sim.stream(), sim.full(1), sim.empty("y"), sim.empty("z")
    sim.double(stream, x, y)
    sim.double(stream, y, z)
    y.close()
    y.close()
    del x
    fresh = [sim.full(9) for _ in range(4)]
    assert (sim.read(z, stream) == 4).all()
    assert len(fresh) == 4


def test_a_graph_does_not_outlive_its_memory(sim: Any) -> None:
    stream, x, y = sim.stream(), sim.full(1), sim.empty("y")
    sim.backend.begin_capture(stream)
    sim.double(stream, x, y)
    graph = sim.backend.end_capture(stream)
    graph.launch(stream)
    sim.backend.synchronize()
    y.close()
    again = sim.empty("y")  # perhaps at the same address: the graph means the old memory
    with pytest.raises(SimulationError, match="freed after the capture") as caught:
        graph.launch(stream)
    assert caught.value.finding == "use-after-free"
    assert again.nbytes == y.nbytes


def test_an_operand_that_reaches_past_its_memory_is_refused(sim: Any) -> None:
    stream, x, y = sim.stream(), sim.full(1), sim.backend.allocate(4 * sim.n - 4, label="short")
    with pytest.raises(SimulationError, match="'short' of sim:0, which has 3996") as caught:
        sim.double(stream, x, y)
    assert caught.value.finding == "out-of-bounds"
    with pytest.raises(SimulationError, match="no device memory"):
        sim.backend.zero(stream, 0x1000, 4)


# --- a kernel that fails ---------------------------------------------------------------------------------------------


def test_the_unchecked_build_sees_schedules_but_no_accesses(monkeypatch: pytest.MonkeyPatch, sim: Any) -> None:
    monkeypatch.setenv("QC_SIM_CHECK", "0")
    fast = type(sim)(type(sim.backend)(0))
    one, two, x, y, z = fast.stream("one"), fast.stream("two"), fast.full(1), fast.empty("y"), fast.empty("z")
    fast.double(one, x, y)
    fast.copy(one, z, y)
    assert (fast.read(z, one) == 2).all()
    fast.double(one, z, y)
    fast.double(two, y, x)
    assert finding(fast).finding == "unordered-access"
    machine().drop_all()
    fast.double(one, fast.empty("raw"), y)
    fast.backend.synchronize()


def test_a_failed_kernel_is_reported_once_and_what_follows_it_is_dropped(sim: Any) -> None:
    stream, beside, y, z = sim.stream("failing"), sim.stream("beside"), sim.empty("y"), sim.empty("z")
    raw, x = sim.empty("raw"), sim.full(1)
    sim.double(stream, raw, y)  # nothing wrote `raw`
    sim.double(stream, y, z)
    ok = sim.empty("ok")
    sim.double(beside, x, ok)
    with pytest.raises(SimulationError, match=r"kernel 'double_it'.*stream 'failing'") as caught:
        sim.backend.synchronize()
    assert caught.value.finding == "uninitialised-read"
    assert "more" not in str(caught.value)
    assert (sim.peek(ok) == 2).all()
    machine().drop_all()
    sim.double(stream, x, y)
    assert (sim.read(y, stream) == 2).all()


def test_a_grid_that_is_too_small_leaves_results_unwritten(sim: Any) -> None:
    kernel, stream, count = sim.kernels["double_it"], sim.stream(), 8 * sim.n
    x, y = sim.empty("x", count), sim.empty("y", count)
    sim.backend.zero(stream, x.address, x.nbytes)
    small = dataclasses.replace(kernel.geometry, grid=(1, 1, 1))
    broken = SimKernel(kernel.spec, kernel.function, small, checked=True)
    sim.backend.launch(stream, broken, [x.address, y.address], [count])
    with pytest.raises(SimulationError, match="bytes of its results unwritten") as caught:
        sim.backend.synchronize(stream)
    assert caught.value.finding == "unwritten-output"


def test_copying_what_nothing_wrote_is_reported(sim: Any) -> None:
    stream, x, y = sim.stream(), sim.empty("raw"), sim.empty("y")
    sim.copy(stream, y, x)
    with pytest.raises(SimulationError, match="'raw' of sim:0") as caught:
        sim.backend.synchronize(stream)
    assert caught.value.finding == "uninitialised-read"
