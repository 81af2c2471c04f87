"""Running: results are right and the caller's own, sessions are apart, both executors agree to the bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    DeviceUnavailableError,
    SessionBusyError,
    TargetMismatchError,
)
from qcompiler.runtime import LoadedProgram, load, save_image
from qcompiler.runtime.isa import supported_isas


@pytest.fixture(scope="module")
def run(small: Any) -> LoadedProgram:
    return LoadedProgram.from_image(small.image, num_threads=2)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("batch", [1, 2, 7, 300])
def test_results_are_right_in_every_entry_point(small: Any, run: LoadedProgram, batch: int) -> None:
    x = small.x(batch)
    result = run(x)
    assert list(result) == ["y", "n", "raw"]
    assert relative(result["y"], small.expected(x)) < 1e-5
    assert np.array_equal(result["raw"], x)


def test_stepwise_equals_native_to_the_bit(small: Any, run: LoadedProgram) -> None:
    stepwise = run.session(stepwise=True)
    for batch in (1, 2, 33):
        x = small.x(batch)
        assert run(x)["y"].tobytes() == stepwise(x)["y"].tobytes()


@pytest.mark.parametrize("isa", supported_isas())
def test_every_isa_of_this_machine_runs(small: Any, isa: str) -> None:
    x = small.x(5)
    run = LoadedProgram.from_image(small.image, isa=isa, num_threads=1)
    assert run.isa == isa
    assert relative(run(x)["y"], small.expected(x)) < 1e-5


def test_results_do_not_depend_on_the_number_of_threads(small: Any) -> None:
    x = small.x(200)
    results = {LoadedProgram.from_image(small.image, num_threads=n)(x)["y"].tobytes() for n in (1, 2, 3, 8)}
    assert len(results) == 1


def test_first_result_is_unchanged_by_a_second_run(small: Any, run: LoadedProgram) -> None:
    y1 = run(small.x(9, seed=1))["y"]
    kept = y1.copy()
    y2 = run(small.x(9, seed=2))["y"]
    assert np.array_equal(y1, kept)
    assert not np.array_equal(y1, y2)


def test_a_result_that_is_an_argument_is_a_copy(small: Any, run: LoadedProgram) -> None:
    x = small.x(3)
    raw = run(x)["raw"]
    assert not np.shares_memory(raw, x)


def test_states_belong_to_the_session(small: Any, run: LoadedProgram) -> None:
    a, b = run.session(), run.session()
    x = small.x(2)
    assert [float(a(x)["n"][0]) for _ in range(3)] == [1, 2, 3]
    assert float(b(x)["n"][0]) == 1
    a.reset()
    assert float(a(x)["n"][0]) == 1


# --- out= ------------------------------------------------------------------------------------------------------------


def outputs(batch: int) -> dict[str, np.ndarray]:
    return {
        "y": np.full((batch, 48), np.nan, np.float32),
        "n": np.zeros(4, np.float32),
        "raw": np.zeros((batch, 64), np.float32),
    }


def test_out_is_written_and_returned(small: Any, run: LoadedProgram) -> None:
    x, out = small.x(4), outputs(4)
    assert run(x, out=out) is out
    assert np.array_equal(out["y"], run(x)["y"])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda o: o.update(y=o["y"][:2]), ArgumentShapeError, r"out 'y' has shape \(2, 48\)"),
        (lambda o: o.update(y=o["y"].astype(np.float64)), ArgumentDtypeError, "out 'y' has dtype float64"),
        (lambda o: o.update(y=np.zeros((48, 4), np.float32).T), ArgumentStructureError, "contiguous"),
        (lambda o: o.update(y=[1.0]), ArgumentStructureError, "not a list"),
        (lambda o: o.pop("n"), ArgumentStructureError, "'out' must have the keys"),
    ],
)
def test_out_that_does_not_fit_is_refused(
    small: Any, run: LoadedProgram, change: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    out = outputs(4)
    change(out)
    with pytest.raises(error, match=text):
        run(small.x(4), out=out)


def test_read_only_out_is_refused(small: Any, run: LoadedProgram) -> None:
    out = outputs(4)
    out["y"].flags.writeable = False
    with pytest.raises(ArgumentStructureError, match="writable"):
        run(small.x(4), out=out)


def test_out_that_shares_memory_with_an_argument_is_refused(small: Any, run: LoadedProgram) -> None:
    x = small.x(4)
    with pytest.raises(ArgumentError, match="out 'raw' shares memory with argument 'x'"):
        run(x, out=outputs(4) | {"raw": x})


def test_outs_that_share_memory_are_refused(small: Any, run: LoadedProgram) -> None:
    memory = np.zeros(4 * 64, np.float32)
    out = outputs(4) | {"raw": memory.reshape(4, 64), "y": memory[: 4 * 48].reshape(4, 48)}
    with pytest.raises(ArgumentError, match="out 'raw' shares memory with out 'y'"):
        run(small.x(4), out=out)


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        (np.zeros((2, 63), np.float32), ArgumentShapeError, r"'x' has shape \(2, 63\), expected \(b, 64\)"),
        (np.zeros((301, 64), np.float32), ArgumentShapeError, r"b must lie in 2…300"),
        (np.zeros((0, 64), np.float32), ArgumentShapeError, r"b must lie in 1…1"),
        (np.zeros(64, np.float32), ArgumentShapeError, "1 dimension instead of 2"),
        (np.zeros((2, 64)), ArgumentDtypeError, "'x' has dtype f64, the program takes f32"),
        (np.zeros((2, 64), ml_dtypes.bfloat16), ArgumentDtypeError, "'x' has dtype bf16"),
        (np.zeros((2, 64), np.complex64), ArgumentDtypeError, "'x' has dtype complex64"),
        ([[1.0] * 64], ArgumentStructureError, "'x' must be a tensor .* not a list"),
        (None, ArgumentStructureError, "'x' must be a tensor .* not a NoneType"),
        (3, ArgumentDtypeError, "Python int"),
    ],
)
def test_wrong_argument_is_named(run: LoadedProgram, argument: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run(argument)


def test_wrong_structure_is_named(small: Any, run: LoadedProgram) -> None:
    with pytest.raises(ArgumentStructureError, match="takes 1 positional argument, the call has 2"):
        run(small.x(2), small.x(2))
    with pytest.raises(ArgumentStructureError, match="unexpected keyword arguments: 'mask'"):
        run(small.x(2), mask=None)


def test_strided_reversed_and_unaligned_arguments_give_the_same(small: Any, run: LoadedProgram) -> None:
    x = small.x(6)
    want = run(x)["y"]
    wide = np.zeros((6, 128), np.float32)
    wide[:, ::2] = x
    raw = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(6, 64)
    unaligned[...] = x
    for other in (wide[:, ::2], np.asfortranarray(x), x[::-1].copy()[::-1], unaligned):
        assert np.array_equal(run(other)["y"], want)


class OnlyDLPack:
    """An object of another library: nothing but the protocol."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_dlpack_arguments_are_read_in_place_and_strided(small: Any, run: LoadedProgram) -> None:
    x = small.x(6)
    want = run(x)["y"]
    assert np.array_equal(run(OnlyDLPack(x))["y"], want)
    assert np.array_equal(run(OnlyDLPack(np.asfortranarray(x)))["y"], want)
    assert np.array_equal(run(OnlyDLPack(x[::-1].copy()[::-1]))["y"], want)
    with pytest.raises(ArgumentDtypeError, match="'x' has dtype f64"):
        run(OnlyDLPack(x.astype(np.float64)))


def test_torch_in_torch_out(small: Any, run: LoadedProgram) -> None:
    import torch

    x = small.x(6)
    want = run(x)
    result = run(torch.from_numpy(x))
    assert {name: type(value) for name, value in result.items()} == dict.fromkeys(want, torch.Tensor)
    assert np.array_equal(result["y"].numpy(), want["y"])
    strided = torch.from_numpy(np.asfortranarray(x))
    assert np.array_equal(run(strided.requires_grad_())["y"].numpy(), want["y"])
    out = {name: torch.zeros(value.shape) for name, value in want.items()}
    assert run(torch.from_numpy(x), out=out)["y"] is out["y"]
    assert np.array_equal(out["y"].numpy(), want["y"])
    with pytest.raises(DeviceUnavailableError, match="on meta"):
        run(torch.empty(2, 64, device="meta"))


# --- concurrency -----------------------------------------------------------------------------------------------------


def test_a_second_concurrent_call_on_one_session_is_refused(small: Any, run: LoadedProgram) -> None:
    session = run.session()
    session._lock.acquire()
    try:
        with pytest.raises(SessionBusyError, match=r"program\.session\(\)"):
            session(small.x(2))
    finally:
        session._lock.release()
    session(small.x(2))


def test_a_failed_call_does_not_leave_the_session_busy(small: Any, run: LoadedProgram) -> None:
    with pytest.raises(ArgumentShapeError):
        run(np.zeros((2, 3), np.float32))
    run(small.x(2))


def test_two_threads_on_two_sessions_give_the_same_bits(small: Any, run: LoadedProgram) -> None:
    inputs = [small.x(100 + i, seed=i) for i in range(4)]
    want = [run(x)["y"].tobytes() for x in inputs]
    wrong: list[int] = []
    done: list[int] = []

    def work(session: Any) -> None:
        for round_ in range(50):
            i = round_ % 4
            if session(inputs[i])["y"].tobytes() != want[i]:
                wrong.append(round_)
        done.append(1)

    threads = [threading.Thread(target=work, args=(run.session(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert done == [1, 1]
    assert wrong == []


def test_a_forked_child_computes_beside_its_parent(small: Any, run: LoadedProgram) -> None:
    x, other = small.x(200, seed=1), small.x(200, seed=2)
    want, want_other = run(x)["y"].tobytes(), run(other)["y"].tobytes()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        same = all(run(x)["y"].tobytes() == want for _ in range(30))
        os._exit(0 if same else 1)
    # The parent runs at the same time on its own copy of the activations.
    assert all(run(other)["y"].tobytes() == want_other for _ in range(30))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_session_busy_in_another_thread_is_free_in_a_child(small: Any, run: LoadedProgram) -> None:
    session = run.session()
    session._lock.acquire()  # as if another thread were inside
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            session(small.x(2))
            os._exit(0)
        finally:
            os._exit(1)
    session._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- devices, files --------------------------------------------------------------------------------------------------


def test_capture_and_other_devices_are_refused_with_a_reason(run: LoadedProgram, tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailableError, match="capture needs cuda or sim"):
        run.capture()
    for device in ("cuda:0", "sim:1"):
        with pytest.raises(
            TargetMismatchError, match=f"compiled for cpu and cannot run on {device}.*device='{device}'"
        ):
            run.to(device)
    with pytest.raises(DeviceUnavailableError, match="no device 'tpu'"):
        run.to("tpu")
    assert run.to("cpu") is run
    run.save(tmp_path / "x.qca")
    with pytest.raises(DeviceUnavailableError, match="stream"):
        load(tmp_path / "x.qca", stream=3)
    with pytest.raises(DeviceUnavailableError, match="stream"):
        run(np.zeros((2, 64), np.float32), stream=3)


def test_an_isa_the_machine_lacks_is_refused(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_ISA", "x86-64-v9")
    with pytest.raises(TargetMismatchError, match="QC_ISA asks for the instruction set 'x86-64-v9'"):
        LoadedProgram.from_image(small.image)


@pytest.mark.parametrize("layout", ["target", "canonical"])
def test_a_loaded_file_gives_the_same_bits(small: Any, run: LoadedProgram, tmp_path: Path, layout: Any) -> None:
    run.save(tmp_path / "p.qca", layout=layout)
    x = small.x(11)
    again = load(tmp_path / "p.qca", verify="full")
    assert again(x)["y"].tobytes() == run(x)["y"].tobytes()
    assert again.report()["entries"][1]["symbols"] == {"b": [2, 300]}


def test_trusted_native_code_gives_the_same_bits(small: Any, run: LoadedProgram, tmp_path: Path) -> None:
    run.save(tmp_path / "p.qca")
    trusted = load(tmp_path / "p.qca", trust_native=True)
    assert trusted.native.path.parent.name == "trusted"
    x = small.x(11)
    assert trusted(x)["y"].tobytes() == run(x)["y"].tobytes()


def test_loading_a_known_plan_needs_no_compiler(
    small: Any, run: LoadedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_image(small.image, tmp_path / "p.qca")
    monkeypatch.setenv("QC_CXX", "/nonexistent/g++")
    load(tmp_path / "p.qca")(small.x(2))
