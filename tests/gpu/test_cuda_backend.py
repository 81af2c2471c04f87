"""The cuda backend's calls, their order and their errors, against a driver that only takes notes."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from by_path import load

from qcompiler.errors import (
    ArgumentError,
    CaptureRuleError,
    CompileFailedError,
    DeviceError,
    DeviceUnavailableError,
    MissingDependencyError,
    OutOfMemoryError,
    TargetMismatchError,
)
from qcompiler.kernels.cuda import emit
from qcompiler.kernels.cuda.geometry import Geometry
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends import cuda_driver, cuda_graphs
from qcompiler.runtime.backends.cuda import CudaBackend, LoadedCudaKernel
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.image import NativeLibrary

fake = load("tests/gpu/fake_driver.py")


@pytest.fixture
def driver() -> Any:
    return fake.FakeDriver()


@pytest.fixture
def backend(driver: Any) -> Iterator[CudaBackend]:
    made = CudaBackend(1, found=cuda_driver.Api(driver, fake.FakeCore(driver)))
    driver.calls.clear()
    yield made
    cuda_graphs._captures.clear()


def kernel(threads: int = 128, shared: int = 0) -> LoadedCudaKernel:
    x = Operand(name="x", dtype="f32", access="r", shape=("r", 4), strides=(4, 1))
    y = Operand(name="y", dtype="f32", access="w", shape=("r", 4), strides=(4, 1))
    spec = KernelSpec(name="soft", symbols=("r",), operands=(x, y), body=SoftmaxKernel(rows="r", cols=4))
    return LoadedCudaKernel(spec, 77, Geometry(("(r + 3) // 4", 2, 1), (threads, 1, 1), shared))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_runtime_api() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    theirs = {int(error): error.name for error in runtime.cudaError_t}
    assert {code: theirs[code] for code in cuda_driver.RUNTIME_NAMES} == cuda_driver.RUNTIME_NAMES


@pytest.mark.parametrize("code", range(900, 909))
def test_capture_errors_carry_code_and_name(backend: CudaBackend, driver: Any, code: int) -> None:
    driver.fails["cuStreamBeginCapture"] = code
    with pytest.raises(DeviceError) as caught:
        backend.begin_capture(backend.stream())
    assert (caught.value.code, caught.value.symbol) == (code, cuda_driver.RUNTIME_NAMES[code])
    assert not backend.captures_here()


def test_no_memory_says_for_what_and_how_much_is_left(backend: CudaBackend, driver: Any) -> None:
    driver.fails["cuMemAlloc"] = 2
    with pytest.raises(OutOfMemoryError, match=r"MemoryAllocation.*1000 bytes on cuda:1 for weights.*123 of 456"):
        backend.allocate(1000, label="weights")


def test_a_lost_context_says_so(backend: CudaBackend, driver: Any) -> None:
    driver.fails["cuStreamSynchronize"] = 700
    with pytest.raises(DeviceError, match=r"cudaErrorIllegalAddress.*restarted"):
        backend.synchronize(backend.stream())


def test_an_unknown_status_keeps_the_drivers_name(backend: CudaBackend, driver: Any) -> None:
    driver.fails["cuStreamSynchronize"] = 916
    with pytest.raises(DeviceError) as caught:
        backend.synchronize(backend.stream())
    assert caught.value.code == 916


@pytest.mark.parametrize(
    ("text", "code"),
    [("CUDA_ERROR_904: explained", 904), ("UNEXPECTED ERROR CODE: 917", 917), ("something else", 999)],
)
def test_errors_of_cuda_core_get_their_code_from_the_text(backend: CudaBackend, text: str, code: int) -> None:
    says = "testing" if code != 999 else "something else"
    with pytest.raises(DeviceError, match=says) as caught, backend.api.translated("testing"):
        raise fake.CUDAError(text)
    assert caught.value.code == code


def test_other_errors_stay_what_they_are(backend: CudaBackend) -> None:
    for error in (ValueError("a bug"), CaptureRuleError("a rule")):
        with pytest.raises(type(error)), backend.api.translated("testing"):
            raise error


def test_streams_that_cannot_be_made_say_so(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise fake.CUDAError("CUDA_ERROR_2: no memory")

    monkeypatch.setattr(backend.api.core, "_make", fails)
    for make, what in ((backend.stream, "a stream"), (backend.event, "an event")):
        with pytest.raises(OutOfMemoryError, match=f"{what} of cuda:1"):
            make()


# --- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "arch"),
    [((7, 0), "sm_70"), ((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"),
     ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 0), "sm_120"), ((12, 1), "sm_120")],
)  # fmt: skip
def test_a_device_gets_the_newest_architecture_it_runs(device: tuple[int, int], arch: str) -> None:
    assert cuda_driver.arch_for(device, "cuda:0") == arch


def test_a_device_that_nothing_serves_is_refused() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"6\.1"):
        cuda_driver.arch_for((6, 1), "cuda:0")
    assert not cuda_driver.runs_on("sm_90a", (9, 1))


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90a"])
def test_kernels_for_another_architecture_are_refused(driver: Any, arch: str) -> None:
    with pytest.raises(TargetMismatchError, match=rf"{arch}.*9\.0.*sm_90a"):
        CudaBackend(0, arch, found=cuda_driver.Api(driver, fake.FakeCore(driver)))


def test_a_device_that_is_not_there_is_refused(driver: Any) -> None:
    with pytest.raises(DeviceUnavailableError, match=r"no cuda:2.*2 GPUs"):
        CudaBackend(2, found=cuda_driver.Api(driver, fake.FakeCore(driver)))


def test_no_driver_is_no_gpu() -> None:
    missing = SimpleNamespace(cuInit=lambda _: (_ for _ in ()).throw(RuntimeError("no libcuda")))
    assert cuda_driver._count(cuda_driver.Api(missing, None)) == 0
    assert cuda_driver._count(cuda_driver.Api(SimpleNamespace(cuInit=lambda _: (100,)), None)) == 0
    with pytest.raises(DeviceUnavailableError, match="cudaErrorSystemDriverMismatch"):
        cuda_driver._count(cuda_driver.Api(SimpleNamespace(cuInit=lambda _: (803,)), None))


def test_a_machine_without_a_driver_imports_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver_installed", lambda: False)
    monkeypatch.setattr(cuda_driver, "api", lambda: pytest.fail("imported cuda.core"))
    assert cuda_driver.device_count() == 0


def test_a_driver_without_bindings_is_no_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    cuda_driver.api.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"qcompiler\[cuda\]"):
        cuda_driver.device_count()
    cuda_driver.api.cache_clear()


# --- the current device -----------------------------------------------------------------------------------------------


def test_the_callers_current_device_comes_back(backend: CudaBackend, driver: Any) -> None:
    driver.stack[:] = [0xABC]
    stream = backend.stream()
    backend.record(backend.event(), stream)
    backend.launch(stream, kernel(), [1, 2], [9])
    driver.fails["cuMemsetD8Async"] = 700
    with pytest.raises(DeviceError):
        backend.zero(stream, 64, 64)
    assert driver.stack == [0xABC]


def test_nothing_is_pushed_where_the_device_is_current(backend: CudaBackend, driver: Any) -> None:
    driver.stack[:] = [fake.FakeDriver.PRIMARY]
    backend.launch(backend.stream(), kernel(), [1, 2], [9])
    assert "cuCtxPushCurrent" not in driver.names()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_cleared_before_it_is_given(backend: CudaBackend, driver: Any) -> None:
    memory = backend.allocate(512)
    assert (memory.address, memory.nbytes) == (0x7000, 512)
    names = [name for name in driver.names() if "Ctx" not in name]
    assert names == ["cuMemAlloc", "cuMemsetD8Async", "cuStreamSynchronize"]


def test_no_bytes_need_no_allocation(backend: CudaBackend, driver: Any) -> None:
    memory = backend.allocate(0)
    memory.close()
    assert memory.address == 0
    assert driver.calls == []


def test_freeing_never_breaks_a_capture(backend: CudaBackend, driver: Any) -> None:
    memory = backend.allocate(512)
    del memory
    gc.collect()
    assert driver.names().count("cuMemFree") == 1
    assert driver.modes_seen["cuMemFree"] == fake.Mode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert driver.mode == fake.Mode.CU_STREAM_CAPTURE_MODE_GLOBAL, "the thread's mode comes back"


def test_closing_twice_frees_once(backend: CudaBackend, driver: Any) -> None:
    memory = backend.allocate(512)
    memory.close()
    memory.close()
    assert driver.names().count("cuMemFree") == 1


def test_pinned_bytes_are_read_before_an_upload_returns(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    driver.fails["cuPointerGetAttribute"] = 1
    backend.upload(stream, 64, 128, 8)
    assert "cuStreamSynchronize" not in driver.names(), "the driver stages pageable memory itself"
    driver.fails.clear()
    backend.upload(stream, 64, 128, 8)
    assert driver.names().count("cuStreamSynchronize") == 1


def test_host_memory_stays_out_of_a_capture(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    driver.capturing = 1
    with pytest.raises(CaptureRuleError, match="upload"):
        backend.upload(stream, 64, 128, 8)
    with pytest.raises(CaptureRuleError, match="download"):
        backend.download(stream, 64, 128, 8)
    assert not [name for name in driver.names() if name.startswith("cuMemcpy")]


def test_the_device_of_an_address_is_the_drivers_answer(backend: CudaBackend, driver: Any) -> None:
    assert backend.device_of(0x7000) == "cuda:1"
    driver.fails["cuPointerGetAttribute"] = 1
    assert backend.device_of(0x7000) is None


# --- kernels ---


def native(folder: Path) -> NativeLibrary:
    (folder / "kernels.cubin").write_bytes(b"a cubin")
    return NativeLibrary("sm_90a", folder / "kernels.cubin", "1")


def plan(*names: str) -> Plan:
    specs = tuple(msgspec.structs.replace(kernel().spec, name=name) for name in names or ("soft",))
    return Plan(devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=specs, entries=())


def test_kernels_are_loaded_at_once_and_a_cubin_once(backend: CudaBackend, driver: Any, tmp_path: Path) -> None:
    assert backend.load(plan(), native(tmp_path))["soft"].spec.name == "soft"
    assert driver.names().count("cuFuncLoad") == 1
    backend.load(plan(), native(tmp_path))
    assert driver.names().count("cuFuncLoad") == 2
    assert driver.names().count("from_cubin") == 1


def test_kernels_of_this_version_overlap_from_sm_90_on(backend: CudaBackend, driver: Any, tmp_path: Path) -> None:
    """Kernels of another version need not wait for those before them."""
    of_file = native(tmp_path)
    own = dataclasses.replace(of_file, emitter_version=emitter_version("cuda"))
    for build, call in (
        (of_file, "cuLaunchKernel"), (dataclasses.replace(own, isa="sm_80"), "cuLaunchKernel"),
        (own, "cuLaunchKernelEx"),
    ):  # fmt: skip
        one = backend.load(plan(), build)["soft"]
        assert (one.overlapping is not None) == (call == "cuLaunchKernelEx")
        backend.launch(backend.stream(), one, [0x10, 0x20], [9])
        assert [name for name in driver.names() if name.startswith("cuLaunchKernel")][-1] == call
        assert driver.parameters[-1] == [0x10, 0x20, 9]


def test_a_kernel_with_much_shared_memory_gets_its_limit_raised(
    backend: CudaBackend, driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shared, raised in ((48 << 10, 0), (100 << 10, 1)):
        monkeypatch.setattr(emit, "geometry", lambda spec, isa, shared=shared: Geometry((1, 1, 1), (32, 1, 1), shared))
        backend.load(plan(), native(tmp_path))
        assert driver.names().count("cuFuncSetAttribute") == raised
    assert dict(driver.calls)["cuFuncSetAttribute"][-1] == 100 << 10


def test_a_cubin_that_lacks_a_kernel_or_does_not_load_is_told_apart(
    backend: CudaBackend, driver: Any, tmp_path: Path
) -> None:
    with pytest.raises(CompileFailedError, match="'qk_1'"):
        backend.load(plan("soft", "hard"), native(tmp_path))
    driver.fails["cuLibraryLoadData"] = 200
    with pytest.raises(DeviceError, match=r"cudaErrorInvalidKernelImage.*kernels\.cubin on cuda:1"):
        backend.load(plan(), native(tmp_path))


# --- launches ---------------------------------------------------------------------------------------------------------


def test_parameters_are_pointers_then_symbols(backend: CudaBackend, driver: Any) -> None:
    stream, one = backend.stream(), kernel(threads=96, shared=1 << 16)
    backend.launch(stream, one, [0x7F00_0000_0000, 0x10], [9])
    backend.launch(stream, one, [0x20, 0x30], [2**32])
    assert driver.parameters == [[0x7F00_0000_0000, 0x10, 9], [0x20, 0x30, 2**32]]
    arguments = dict(driver.calls)["cuLaunchKernel"]
    assert arguments[0] == 77
    assert arguments[4:9] == (96, 1, 1, 1 << 16, stream.handle)


def test_grids_follow_the_symbols_and_empty_ones_are_left_out(backend: CudaBackend, driver: Any) -> None:
    one = kernel()
    for rows in (9, 0, 5):
        backend.launch(backend.stream(), one, [1, 2], [rows])
    grids = [arguments[1:4] for name, arguments in driver.calls if name == "cuLaunchKernel"]
    assert grids == [(3, 2, 1), (2, 2, 1)]


def test_a_failed_launch_names_its_kernel(backend: CudaBackend, driver: Any) -> None:
    driver.fails["cuLaunchKernel"] = 701
    with pytest.raises(DeviceError, match=r"cudaErrorLaunchOutOfResources.*'soft'.*\(3, 2, 1\)"):
        backend.launch(backend.stream(), kernel(), [1, 2], [9])


def test_another_devices_stream_is_refused(backend: CudaBackend, driver: Any) -> None:
    other = CudaBackend(0, found=cuda_driver.Api(driver, fake.FakeCore(driver)))
    with pytest.raises(DeviceError, match="cuda:0 was used on cuda:1"):
        backend.launch(other.stream(), kernel(), [1, 2], [9])


# --- the caller's stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 1, SimpleNamespace(__cuda_stream__=lambda: (0, 0))])
def test_the_default_stream_is_the_legacy_one(backend: CudaBackend, given: Any) -> None:
    assert backend.caller_stream(given) is backend.legacy_stream()
    assert backend.legacy_stream().handle == 1


def test_streams_come_as_numbers_protocols_and_torchs(backend: CudaBackend) -> None:
    method = SimpleNamespace(__cuda_stream__=lambda: (0, 0x55))
    early = SimpleNamespace(__cuda_stream__=(0, 0x55))
    torchs = SimpleNamespace(cuda_stream=0x55)
    assert {backend.caller_stream(given).handle for given in (0x55, method, early, torchs)} == {0x55}
    own = backend.stream()
    assert backend.caller_stream(own) is own
    with pytest.raises(ArgumentError, match="float"):
        backend.caller_stream(1.5)


def test_a_stream_of_another_context_is_refused(backend: CudaBackend, driver: Any) -> None:
    driver.stream_context = 0x9999
    with pytest.raises(DeviceUnavailableError, match="0x55"):
        backend.caller_stream(0x55)


def test_torchs_current_stream_is_asked_only_if_torch_uses_the_gpu(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = SimpleNamespace(
        is_initialized=lambda: True, current_stream=lambda index: SimpleNamespace(cuda_stream=0x60 + index)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=used))
    assert backend.caller_stream().handle == 0x61
    unused = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=unused))
    assert backend.caller_stream() is backend.legacy_stream()


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_a_capture_begins_in_its_mode_and_counts_its_nodes(backend: CudaBackend, driver: Any, mode: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream, mode)
    assert backend.captures_here()
    graph = backend.end_capture(stream)
    assert not backend.captures_here()
    assert dict(driver.calls)["cuStreamBeginCapture"] == (
        stream.handle,
        fake.Mode[f"CU_STREAM_CAPTURE_MODE_{mode.upper()}"],
    )
    assert graph.shape.nodes == {"kernel": 2, "empty": 1}
    assert driver.names().count("cuGraphDestroy") == 1, "the template is not kept"


def test_a_broken_capture_has_ended_all_the_same(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    driver.fails["cuStreamEndCapture"] = 904
    with pytest.raises(DeviceError) as caught:
        backend.end_capture(stream)
    assert caught.value.symbol == "cudaErrorStreamCaptureUnjoined"
    assert not backend.captures_here()
    assert driver.stack == []


def test_a_capture_whose_nodes_cannot_be_counted_ends(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    driver.fails["cuGraphGetNodes"] = 1
    with pytest.raises(DeviceError, match="counting"):
        backend.end_capture(stream)
    assert driver.names().count("cuStreamEndCapture") == 1
    assert not backend.captures_here()


def test_a_capture_that_cannot_end_here_goes_on(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    driver.fails["cuStreamEndCapture"] = 908
    driver.capturing = 2
    with pytest.raises(DeviceError):
        backend.end_capture(stream)
    assert backend.captures_here()
    driver.fails["cuStreamEndCapture"], driver.capturing = 901, 0
    with pytest.raises(DeviceError):
        backend.end_capture(stream)
    assert not backend.captures_here()


def test_an_empty_graph_is_refused(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    driver.nodes.clear()
    with pytest.raises(CaptureRuleError, match="nothing"):
        backend.end_capture(stream)
    assert "cuGraphInstantiateWithParams" not in driver.names()
    assert driver.names().count("cuGraphDestroy") == 1


def test_a_graph_is_not_launched_inside_a_capture(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    graph = backend.end_capture(stream)
    driver.capturing = 1
    with pytest.raises(CaptureRuleError, match="graph inside a graph"):
        graph.launch(stream)
    assert "cuGraphLaunch" not in driver.names()


@pytest.mark.parametrize("status", [901, 0])
def test_an_invalidated_capture_ends_with_its_code(backend: CudaBackend, driver: Any, status: int) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    driver.capturing = 2
    driver.fails["cuStreamEndCapture"] = status
    with pytest.raises(DeviceError) as caught:
        backend.end_capture(stream)
    assert caught.value.code == 901
    assert driver.names().count("cuStreamEndCapture") == 1
    assert not backend.captures_here()


@pytest.mark.parametrize("status", [901, 904])
def test_the_builder_of_a_broken_capture_is_never_released(backend: CudaBackend, driver: Any, status: int) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    builder = weakref.ref(backend.api.core.builders.pop())
    driver.fails["cuStreamEndCapture"] = status
    with pytest.raises(DeviceError):
        backend.end_capture(stream)
    gc.collect()
    assert builder() is not None
    assert "cuGraphDestroy" not in driver.names()


def test_a_capture_that_somebody_else_ended_does_not_end_the_next(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    first = weakref.ref(backend.api.core.builders.pop())
    driver.capturing = 0
    backend.begin_capture(stream)
    gc.collect()
    assert first() is not None
    assert backend.end_capture(stream).shape.count == 3


def test_a_stream_without_a_capture_of_ours_cannot_end_one(backend: CudaBackend, driver: Any) -> None:
    driver.capturing = 1
    with pytest.raises(DeviceError) as caught:
        backend.end_capture(backend.stream())
    assert caught.value.code == 401
    assert "cuStreamEndCapture" not in driver.names()


def test_a_foreign_stream_is_captured_through_cuda_core(backend: CudaBackend, driver: Any) -> None:
    stream = backend.caller_stream(0x55)
    backend.begin_capture(stream)
    backend.end_capture(stream).launch(backend.legacy_stream())
    begun, launched = (dict(driver.calls)[name] for name in ("cuStreamBeginCapture", "cuGraphLaunch"))
    assert (begun[0], launched[1]) == (0x55, 1)


def test_a_graph_that_cannot_be_instantiated_leaves_nothing(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    driver.fails["cuGraphInstantiateWithParams"] = 2
    with pytest.raises(OutOfMemoryError):
        backend.end_capture(stream)
    assert driver.names()[-2:] == ["cuGraphDestroy", "cuCtxPopCurrent"]


def test_a_closed_graph_is_not_launched(backend: CudaBackend, driver: Any) -> None:
    stream = backend.stream()
    backend.begin_capture(stream)
    graph = backend.end_capture(stream)
    graph.launch(stream)
    graph.close()
    graph.close()
    assert driver.names().count("cuGraphExecDestroy") == 1
    with pytest.raises(DeviceError, match="closed"):
        graph.launch(stream)


def test_capture_state_is_the_threads_own(backend: CudaBackend) -> None:
    from concurrent.futures import ThreadPoolExecutor

    backend.begin_capture(backend.stream())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backend.captures_here).result() is False
    assert backend.captures_here()


def test_pending_work_is_no_error(backend: CudaBackend, driver: Any) -> None:
    stream, event = backend.stream(), backend.event()
    assert backend.query(stream)
    driver.fails.update(cuStreamQuery=600, cuEventQuery=600)
    assert not backend.query(stream)
    assert not backend.query(event)
    driver.fails["cuEventQuery"] = 907
    with pytest.raises(DeviceError, match="cudaErrorCapturedEvent"):
        backend.query(event)
