"""Compiling without a driver: cubins, what kernels take, the cache, errors; sm_70 in its own process."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qcompiler.errors import CompileFailedError, FileWriteError, MissingDependencyError
from qcompiler.kernels.cuda.emit import header
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.runtime import nvrtc

SOURCE = """
extern "C" __global__ void __launch_bounds__(256) qk_shared(const float* x, float* y) {
    __shared__ float tile[256];
    int unused;
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x ^ 1];
}
extern "C" __global__ void qk_stack(const float* x, float* y, int64_t n) {
    float big[200];
    for (int i = 0; i < 200; ++i) big[i] = x[(i * n) % 1000];
    y[threadIdx.x] = big[n % 200];
}
extern "C" __global__ void __launch_bounds__(1024, 2) qk_spill(const float* x, float* y) {
    float each[64];
    for (int i = 0; i < 64; ++i) each[i] = x[threadIdx.x * 64 + i];
    __syncthreads();
    for (int i = 0; i < 64; ++i) y[threadIdx.x * 64 + i] = each[i] * each[63 - i];
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled(arch: str = "sm_80", source: str = SOURCE) -> nvrtc.Cubin:
    return nvrtc.compile_cubin(header("device.cuh") + source, arch)


def servable() -> list[str]:
    return [arch for arch in ARCHS if arch != "sm_70" or nvrtc.sm70_available()]


@pytest.mark.parametrize("arch", servable())
def test_every_architecture_compiles_without_a_driver(arch: str) -> None:
    cubin = compiled(arch)
    assert cubin.read()[:4] == b"\x7fELF"
    assert set(cubin.resources) == {"qk_shared", "qk_stack", "qk_spill"}
    assert cubin.compiler_version.startswith("NVRTC 12." if arch == "sm_70" else "NVRTC 13.")


def test_local_memory_and_spills_are_seen() -> None:
    found = compiled().resources
    assert found["qk_shared"].shared_static == 1024
    assert not found["qk_shared"].uses_local_memory
    assert found["qk_stack"].stack >= 800
    assert found["qk_spill"].registers <= 32
    assert found["qk_spill"].spill_stores > 0
    assert found["qk_spill"].uses_local_memory


def regcounts(elf: bytes) -> dict[str, int]:
    """Registers by kernel as the cubin itself says (EIATTR_REGCOUNT of section .nv.info)."""
    start, size, count, names_at = struct.unpack_from("<Q10xHHH", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]

    def text(table: tuple[Any, ...], offset: int) -> str:
        begin = table[4] + offset
        return elf[begin : elf.index(b"\0", begin)].decode()

    sections = {text(heads[names_at], head[0]): head for head in heads}
    symbols, strings, info = sections[".symtab"], sections[".strtab"], sections[".nv.info"]
    found, at, end = {}, info[4], info[4] + info[5]
    while at < end:
        form, kind, length = struct.unpack_from("<BBH", elf, at)
        if form == 4 and kind == 0x2F:  # sized value: symbol index, registers
            index, registers = struct.unpack_from("<II", elf, at + 4)
            name = struct.unpack_from("<I", elf, symbols[4] + 24 * index)[0]
            found[text(strings, name)] = registers
        at += 4 + (length if form == 4 else 0)
    return found


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_registers_agree_with_what_the_cubin_says(arch: str) -> None:
    cubin = compiled(arch)
    assert {name: each.registers for name, each in cubin.resources.items()} == regcounts(cubin.read())


def test_the_key_covers_the_options_that_nvrtc_gets() -> None:
    given = nvrtc.program_options("sm_80").as_bytes("nvrtc")
    assert {option.decode() for option in given} == set(nvrtc.options("sm_80"))


def test_products_are_not_contracted() -> None:
    plain = 'extern "C" __global__ void qk_a(const float* x, float* y) { y[0] = x[0] * x[1] + x[2]; }'
    fused = 'extern "C" __global__ void qk_a(const float* x, float* y) { y[0] = fmaf(x[0], x[1], x[2]); }'
    assert compiled(source=plain).read() != compiled(source=fused).read()


def test_a_module_is_compiled_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled()
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiled() == first


def test_another_source_arch_or_emitter_is_another_module(own_cache: Path) -> None:
    paths = {
        nvrtc.compile_cubin(SOURCE.replace("int64_t", "long long"), arch, emitter_version=version).path
        for arch, version in (("sm_80", "1"), ("sm_80", "2"), ("sm_86", "1"))
    }
    assert len(paths) == 3


def test_a_damaged_record_compiles_anew(own_cache: Path) -> None:
    cubin = compiled()
    cubin.path.with_suffix(".json").write_text(json.dumps({"kernels": 3}))
    assert compiled().resources == cubin.resources


def test_an_error_names_the_source_and_the_line(own_cache: Path) -> None:
    with pytest.raises(CompileFailedError, match=r"kernels\.cu\(3\): error.*undefined_thing") as caught:
        nvrtc.compile_cubin('extern "C" __global__ void\nqk_a(int* y) {\n    *y = undefined_thing;\n}', "sm_80")
    path = Path(str(caught.value).split("refused ")[1].split(" for ")[0])
    assert path.read_text().startswith('extern "C"')


def test_missing_cuda_core_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingDependencyError, match=r"qcompiler\[cuda\]"):
        compiled()


def test_missing_cuda_12_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_sm70_library", lambda: None)
    assert not nvrtc.sm70_available()
    with pytest.raises(MissingDependencyError, match=r"qcompiler\[sm70\]"):
        compiled("sm_70")


@pytest.mark.skipif(not nvrtc.sm70_available(), reason="CUDA 12's NVRTC is not installed (the extra sm70)")
def test_sm_70_errors_come_back_from_the_worker() -> None:
    with pytest.raises(CompileFailedError, match=r"undefined_thing"):
        nvrtc.compile_cubin('extern "C" __global__ void qk_a(int* y) { *y = undefined_thing; }', "sm_70")


def test_importing_the_compiler_loads_no_cuda() -> None:
    code = "import sys, qcompiler.runtime.nvrtc; assert not [m for m in sys.modules if m.split('.')[0] == 'cuda']"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


THREADS = """
import sys, threading
from qcompiler.runtime import nvrtc
from qcompiler.runtime.backends import cuda_driver

failures, together = [], threading.Barrier(8)

def first(call):
    together.wait()
    try:
        call()
    except Exception as error:
        failures.append(repr(error))

sys.setswitchinterval(1e-6)
calls = [lambda: nvrtc.compiler_version("sm_90a"), cuda_driver.api] * 4
threads = [threading.Thread(target=first, args=(call,)) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("; ".join(failures) or 0)
"""


def test_threads_that_compile_first_at_once_do_not_meet_half_a_package() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PLAIN = 'extern "C" __global__ void qk_a(const float* x, float* y) { y[0] = x[0]; }'


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "gone", "record"])
def test_a_damaged_cubin_is_compiled_again(damage: str) -> None:
    first = compiled(source=PLAIN)
    data = first.read()
    half = len(data) // 2
    record = first.path.with_suffix(".json")
    if damage == "gone":
        first.path.unlink()
    elif damage == "record":
        record.write_bytes(b'["valid", "and no object"]')
    else:
        wrong = {"empty": b"", "cut": data[:half], "flipped": data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]}
        first.path.write_bytes(wrong[damage])
    again = compiled(source=PLAIN)
    assert again.read() == data == again.path.read_bytes()
    assert again.resources == first.resources


def test_a_full_cache_costs_cubins_nothing_but_time(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise FileWriteError.of(str(own_cache), OSError(28, "No space left on device"))

    true = nvrtc.write_private
    monkeypatch.setattr(
        nvrtc, "write_private", lambda path, data: (full if path.is_relative_to(own_cache) else true)(path, data)
    )
    made = compiled(source=PLAIN)
    assert made.read()[:4] == b"\x7fELF"
    assert not made.path.is_relative_to(own_cache)
    assert compiled(source=PLAIN).path == made.path
