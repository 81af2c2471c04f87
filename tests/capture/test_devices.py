"""Which device runs a program, programs over two devices, moving, and files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import (
    ArgumentError,
    DeviceUnavailableError,
    TargetMismatchError,
)
from qcompiler.runtime import LoadedProgram, NativeLibrary, ProgramImage, load, placement, save_image
from qcompiler.runtime.backends import registry
from qcompiler.runtime.program_file import emitter_of, load_image


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    there = registry.is_available
    monkeypatch.setattr(registry, "is_available", lambda device: there(device) and not device.startswith("cuda"))


@pytest.fixture
def an_sm_86(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if cuda:0 were there and of architecture sm_86."""
    monkeypatch.setattr(registry, "is_available", lambda device: True)
    monkeypatch.setattr(registry, "architecture", lambda device: "sm_86")


# --- choosing --------------------------------------------------------------------------------------------------------


def test_a_gpu_program_does_not_run_on_the_cpu(small: Any) -> None:
    with pytest.raises(TargetMismatchError, match=r"compiled for cuda and cannot run on cpu; .*sim:N.*device='cpu'"):
        LoadedProgram.from_image(small.image, "cpu")


def test_without_a_gpu_the_simulated_one_is_named(small: Any, no_gpu: None, tmp_path: Path) -> None:
    save_image(small.image, tmp_path / "p.qca")
    with pytest.raises(DeviceUnavailableError, match='device="sim:0" runs it on the simulated GPU'):
        load(tmp_path / "p.qca")
    with pytest.raises(DeviceUnavailableError, match='cuda:3 is not available on this machine; device="sim:0"'):
        load(tmp_path / "p.qca", device="cuda:3")


def test_with_a_gpu_it_is_the_default(small: Any, an_sm_86: None) -> None:
    assert placement.choose_devices(small.image.plan) == ("cuda:0",)


def test_threads_belong_to_the_cpu(small: Any) -> None:
    with pytest.raises(ArgumentError, match="num_threads=2 belongs to the CPU"):
        LoadedProgram.from_image(small.image, "sim:0", num_threads=2)


def test_kernels_are_made_for_the_architecture_the_program_was_compiled_for(small: Any) -> None:
    run = LoadedProgram.from_image(small.image, "sim:0")
    assert (run.isa, run.device, run.report()["device"]) == ("sm_80", "sim:0", "sim:0")
    other = LoadedProgram.from_image(small.image, "sim:0", isa="sm_75")
    assert other.isa == "sm_75"
    assert np.array_equal(run(small.x(3))["raw"], other(small.x(3))["raw"])


@pytest.mark.parametrize(
    ("own", "runs"),
    [
        ("sm_75", ("sm_70", "sm_75")),
        ("sm_89", ("sm_80", "sm_86", "sm_89")),
        ("sm_90a", ("sm_90a",)),
        ("sm_120", ("sm_120",)),
    ],
)
def test_a_cubin_runs_on_later_architectures_of_its_major_version(
    monkeypatch: pytest.MonkeyPatch, own: str, runs: tuple[str, ...]
) -> None:
    monkeypatch.setattr(registry, "architecture", lambda device: own)
    assert registry.runs("cuda:0") == runs


# --- two devices -----------------------------------------------------------------------------------------------------


def test_a_program_over_two_devices_takes_neighbours_or_what_is_named(hop: ProgramImage) -> None:
    x = np.arange(9, dtype=np.float32)
    for options, devices in (
        ({"device": "sim:2"}, ("sim:2", "sim:3")),
        ({"devices": ("sim:3", "sim:1")}, ("sim:3", "sim:1")),
    ):
        run = LoadedProgram.from_image(hop, **options)  # type: ignore[arg-type]
        assert run.devices == devices and run.device == devices[0]
        assert np.array_equal(run(x), 2 * (x + 1))
        assert np.array_equal(run(run.array(x)).numpy(), 2 * (x + 1))


def test_two_devices_are_captured_as_one_graph(hop: ProgramImage) -> None:
    run = LoadedProgram.from_image(hop, "sim:0")
    x = np.arange(9, dtype=np.float32)
    graph = run.capture(x)
    assert graph.nodes == {"kernel": 2, "copy": 2}
    for k in range(3):
        assert np.array_equal(graph.replay(k * x), 2 * (k * x + 1))


def test_two_devices_join_a_callers_capture(hop: ProgramImage) -> None:
    run = LoadedProgram.from_image(hop, "sim:0")
    backend = run.slots["near"].backend
    side = backend.stream("side")
    x, y, z = (run.array(np.full(9, value, np.float32)) for value in (5, 0, 0))
    backend.synchronize(backend.legacy_stream())
    backend.begin_capture(side)
    run(x, out=y, stream=side)
    run(y, out=z, stream=side)
    graph = backend.end_capture(side)
    assert graph.shape.nodes == {"kernel": 4, "copy": 4}
    graph.launch(side)
    backend.synchronize(side)
    assert z.numpy().tolist() == [2 * (2 * (5 + 1) + 1)] * 9


def test_device_lists_that_do_not_fit_are_refused(hop: ProgramImage, small: Any) -> None:
    with pytest.raises(DeviceUnavailableError, match="names 1, the program was compiled for 2"):
        LoadedProgram.from_image(hop, devices=("sim:0",))
    with pytest.raises(DeviceUnavailableError, match="is not the first of"):
        LoadedProgram.from_image(hop, "sim:1", devices=("sim:0", "sim:1"))
    with pytest.raises(DeviceUnavailableError, match="sim:8 is not available"):
        LoadedProgram.from_image(hop, "sim:7")


# --- moving ----------------------------------------------------------------------------------------------------------


def test_a_program_moves_with_its_states(small: Any, run: LoadedProgram) -> None:
    x = small.x(3)
    for _ in range(3):
        run(x)
    moved = run.to("sim:1")
    assert (moved.device, moved.devices) == ("sim:1", ("sim:1",))
    assert all(slot.backend.device == "sim:1" for slot in moved.slots.values())
    assert [float(moved(x)["n"][0]), float(moved(x)["n"][0]), float(run(x)["n"][0])] == [14, 15, 14]
    assert np.array_equal(moved(x)["y"], run(x)["y"])
    assert run.to(run.device) is run


def test_a_move_that_fails_leaves_everything_where_it_was(
    small: Any, run: LoadedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = small.x(3)
    want = run(x)
    for device, error in (("sim:99", DeviceUnavailableError), ("cpu", TargetMismatchError)):
        with pytest.raises(error):
            run.to(device)

    def fail(self: Any, init: Any) -> None:
        raise OSError("out of everything")

    with monkeypatch.context() as patch:
        patch.setattr(LoadedProgram, "_run_init", fail)
        with pytest.raises(OSError, match="out of everything"):
            run.to("sim:1")
    again = run(x)
    assert np.array_equal(again["y"], want["y"]) and float(again["n"][0]) == float(want["n"][0]) + 1


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["target", "canonical"])
def test_a_loaded_file_gives_the_same_bits(small: Any, run: LoadedProgram, tmp_path: Path, layout: Any) -> None:
    run.save(tmp_path / "p.qca", layout=layout)
    again = load(tmp_path / "p.qca", device=run.device, verify="full")
    x = small.x(5)
    assert again(x)["y"].tobytes() == run(x)["y"].tobytes()
    assert again.image.target.kind == "cuda"


def test_what_the_simulated_gpu_runs_is_no_build_for_a_gpu(small: Any, tmp_path: Path) -> None:
    LoadedProgram.from_image(small.image, "sim:0").save(tmp_path / "p.qca")
    with zipfile.ZipFile(tmp_path / "p.qca") as archive:
        assert not [name for name in archive.namelist() if name.startswith("native/")]


@pytest.fixture
def with_cubin(small: Any, tmp_path: Path) -> Path:
    cubin = tmp_path / "program.cubin"
    cubin.write_bytes(b"\x7fELF of sm_80")
    path = tmp_path / "native.qca"
    save_image(small.image.with_native(NativeLibrary("sm_80", cubin, emitter_of("cuda"))), path)
    return path


def test_a_trusted_cubin_is_used_on_a_device_that_runs_it(with_cubin: Path, an_sm_86: None) -> None:
    with zipfile.ZipFile(with_cubin) as archive:
        assert "native/sm_80.cubin" in archive.namelist()
    native = load_image(with_cubin, trust_native=True)[1]
    assert native is not None
    assert (native.isa, native.path.suffix) == ("sm_80", ".cubin")
    assert native.path.read_bytes() == b"\x7fELF of sm_80"
    assert load_image(with_cubin)[1] is None


def test_a_cubin_is_no_build_for_the_simulated_gpu_or_another_major_version(
    with_cubin: Path, an_sm_86: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TargetMismatchError, match=r"needs sm_80, sim:0 runs none but its own\. Load without trust"):
        load_image(with_cubin, trust_native=True, device="sim:0")
    monkeypatch.setattr(registry, "architecture", lambda device: "sm_90a")
    with pytest.raises(TargetMismatchError, match="needs sm_80, cuda:0 runs sm_90a"):
        load_image(with_cubin, trust_native=True, device="cuda:0")


def test_a_cubin_of_another_emitter_is_refused(small: Any, tmp_path: Path, an_sm_86: None) -> None:
    """Grids are derived from the emitter: a cubin of another one could be launched with the wrong grid."""
    cubin = tmp_path / "program.cubin"
    cubin.write_bytes(b"\x7fELF")
    save_image(small.image.with_native(NativeLibrary("sm_80", cubin, "0+old")), tmp_path / "p.qca")
    with pytest.raises(TargetMismatchError, match="made by the emitter 0\\+old"):
        load_image(tmp_path / "p.qca", trust_native=True)
