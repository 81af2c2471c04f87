"""Calls on a device: results are right and live where the arguments live, sessions are apart, states are their own."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    DeviceUnavailableError,
    SessionBusyError,
)
from qcompiler.runtime import DeviceArray, LoadedProgram, ProgramImage


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("batch", [1, 2, 8, 9, 12])
def test_results_are_right_in_every_entry_point_and_case(small: Any, run: LoadedProgram, batch: int) -> None:
    x = small.x(batch)
    result = run(x)
    assert [type(each) for each in result.values()] == [np.ndarray] * 3
    assert relative(result["y"], small.expected(x)) < 1e-5
    assert np.array_equal(result["raw"], x)


def test_device_arguments_give_device_results_of_the_same_bits(small: Any, run: LoadedProgram) -> None:
    x = small.x(3)
    on_host, result = run(x), run(run.array(x))
    assert {type(each) for each in result.values()} == {DeviceArray}
    assert result["y"].device == run.device and result["y"].shape == (3, 48) and result["y"].dtype == np.float32
    assert result["y"].nbytes == 3 * 48 * 4 and len(result["y"]) == 3
    assert result["y"].numpy().tobytes() == on_host["y"].tobytes()
    assert np.asarray(result["raw"]).tobytes() == x.tobytes()


def test_a_result_is_the_next_calls_argument_without_a_copy(double: ProgramImage, device: str) -> None:
    run = LoadedProgram.from_image(double, device)
    x = np.arange(7, dtype=np.float32)
    y = run.array(x)
    for _ in range(5):
        y = run(y)  # each result's memory is the one after next's
    assert np.array_equal(y.numpy(), 32 * x)


def test_torch_in_torch_out(small: Any, run: LoadedProgram) -> None:
    x = small.x(4)
    result = run(torch.from_numpy(x))
    assert {type(each) for each in result.values()} == {torch.Tensor}
    assert np.array_equal(result["raw"].numpy(), x)
    assert relative(result["y"].numpy(), small.expected(x)) < 1e-5


def test_host_and_device_arguments_together_give_device_results(total: ProgramImage, device: str) -> None:
    run = LoadedProgram.from_image(total, device)
    a, b = np.arange(5, dtype=np.float32), np.full(5, 3, np.float32)
    for first, second in ((run.array(a), b), (a, run.array(b)), (run.array(a), torch.from_numpy(b))):
        result = run(first, second)
        assert isinstance(result, DeviceArray)
        assert np.array_equal(result.numpy(), a + b)
    assert isinstance(run(a, torch.from_numpy(b)), torch.Tensor)


def test_a_call_over_nothing_launches_nothing(double: ProgramImage, device: str) -> None:
    run = LoadedProgram.from_image(double, device)
    assert run(np.zeros(0, np.float32)).shape == (0,)
    assert run(run.array(np.zeros(0, np.float32))).numpy().shape == (0,)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("argument", ["host", "device"])
def test_out_is_filled_on_either_side(small: Any, run: LoadedProgram, argument: str, place: str) -> None:
    x = small.x(3)
    out = small.outputs(3, run if place == "device" else None)
    assert run(run.array(x) if argument == "device" else x, out=out) is out
    assert relative(np.asarray(out["y"]), small.expected(x)) < 1e-5
    assert np.array_equal(np.asarray(out["raw"]), x)


def test_out_that_does_not_fit_is_refused(small: Any, run: LoadedProgram) -> None:
    x = run.array(small.x(3))
    out = small.outputs(3, run)
    with pytest.raises(ArgumentShapeError, match=r"out 'y' has shape \(2, 48\)"):
        run(x, out=out | {"y": run.array(np.zeros((2, 48), np.float32))})
    with pytest.raises(ArgumentDtypeError, match="out 'y' has dtype i32"):
        run(x, out=out | {"y": run.array(np.zeros((3, 48), np.int32))})
    with pytest.raises(ArgumentError, match="out 'raw' shares memory with argument 'x'"):
        run(x, out=out | {"raw": x})


def test_wrong_arguments_are_named(small: Any, run: LoadedProgram) -> None:
    with pytest.raises(ArgumentShapeError, match=r"b must lie in 2…12"):
        run(run.array(np.zeros((13, 64), np.float32)))
    with pytest.raises(ArgumentDtypeError, match="'x' has dtype i64, the program takes f32"):
        run(run.array(np.zeros((3, 64), np.int64)))
    with pytest.raises(ArgumentStructureError, match="must be a tensor"):
        run([1.0])
    with pytest.raises(DeviceUnavailableError, match="torch tensor on meta"):
        run(torch.empty(3, 64, device="meta"))


def test_an_array_of_another_device_is_refused_with_both_names(small: Any) -> None:
    here, there = (LoadedProgram.from_image(small.image, device) for device in ("sim:0", "sim:1"))
    with pytest.raises(DeviceUnavailableError, match=r"argument 'x' is on sim:1, but the program takes it on sim:0"):
        here(there.array(small.x(2)))
    with pytest.raises(DeviceUnavailableError, match=r"out 'y' is on sim:1, but the program takes it on sim:0"):
        here(small.x(2), out=small.outputs(2, there))


def test_a_simulated_array_tells_other_libraries_to_copy_it(small: Any) -> None:
    array = LoadedProgram.from_image(small.image, "sim:0").array(small.x(2))
    with pytest.raises(DeviceUnavailableError, match=r"\.numpy\(\)"):
        torch.from_dlpack(array)
    assert not hasattr(array, "__cuda_array_interface__")
    with pytest.raises(TypeError):
        len(LoadedProgram.from_image(small.image, "sim:0").array(np.float32(1)))


# --- sessions --------------------------------------------------------------------------------------------------------


def test_states_begin_as_stored_belong_to_the_session_and_can_be_reset(small: Any, run: LoadedProgram) -> None:
    a, b = run.session(), run.session()
    x = small.x(2)
    assert [float(a(x)["n"][0]) for _ in range(3)] == [11, 12, 13]
    assert float(b(x)["n"][0]) == 11
    a.reset()
    assert float(a(x)["n"][0]) == 11


def test_states_of_another_program_are_refused_and_nothing_is_written(run: LoadedProgram) -> None:
    session = run.session()
    before = session.states()
    good = np.zeros(64, np.uint8)
    for name, bad in (("calls", np.zeros(400, np.uint8)), ("calls", np.zeros(16, np.float32)), ("cache", good)):
        with pytest.raises(ArgumentError, match=rf"the state '{name}' .* its states \(bytes\) are calls \(64\)"):
            session.set_states({"calls": good} | {name: bad})
    assert np.array_equal(session.states()["calls"], before["calls"])


def test_all_entry_points_see_one_state(small: Any, run: LoadedProgram) -> None:
    assert [float(run(small.x(batch))["n"][0]) for batch in (1, 5, 1, 12)] == [11, 12, 13, 14]


def test_constants_are_on_the_device_once(small: Any, run: LoadedProgram) -> None:
    addresses = {id(run): run.shared_bases["constants"]}
    for _ in range(3):
        session = run.session()
        addresses[id(session)] = session.bases[0]["constants"]
    assert len(set(addresses.values())) == 1


def test_two_threads_on_two_sessions_give_the_same_bits(small: Any, run: LoadedProgram) -> None:
    inputs = [small.x(5, seed) for seed in range(3)]
    want = [run(x)["y"].tobytes() for x in inputs]
    wrong: list[int] = []
    done: list[int] = []

    def work(session: Any) -> None:
        for turn in range(6):
            if session(inputs[turn % 3])["y"].tobytes() != want[turn % 3]:
                wrong.append(turn)
        done.append(1)

    threads = [threading.Thread(target=work, args=(run.session(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (done, wrong) == ([1, 1], [])


def test_a_second_concurrent_call_is_refused(small: Any, run: LoadedProgram) -> None:
    session = run.session()
    session._lock.acquire()
    with pytest.raises(SessionBusyError, match=r"program\.session\(\)"):
        session(small.x(2))
    session._lock.release()
    session(small.x(2))


def test_dropped_results_make_room_for_later_ones(small: Any, run: LoadedProgram) -> None:
    x = run.array(small.x(3))
    first = run(x)
    address = first["y"].address
    del first
    run(x)  # the session holds on to the last call's results until the next one
    gc.collect()
    assert address in {each.address for _ in range(2) for each in run(x).values()}


def test_results_outlive_program_and_session(small: Any, device: str) -> None:
    x = small.x(3)
    run = LoadedProgram.from_image(small.image, device)
    want = run(x)["y"]
    result = run(run.array(x))
    del run
    gc.collect()
    assert result["y"].numpy().tobytes() == want.tobytes()
