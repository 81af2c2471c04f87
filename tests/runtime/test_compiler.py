"""Compiler, cache, instruction sets and thread counts."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qcompiler.errors import (
    ArgumentError,
    CompileFailedError,
    CompilerMissingError,
    TargetMismatchError,
)
from qcompiler.runtime import LoadedProgram, cache, compiler, isa, threads
from qcompiler.runtime.support import support

PLAIN = isa.supported_isas()[0]


@pytest.fixture
def cache_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LC_ALL", "C")  # the compiler's messages in English
    return tmp_path / "cache"


# --- compiler --------------------------------------------------------------------------------------------------------


def test_no_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("QC_CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CompilerMissingError, match=r"apt install g\+\+"):
        compiler.find_compiler()


def test_a_wrong_qc_cxx_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_CXX", "no-such-compiler -O9")
    with pytest.raises(CompilerMissingError, match="QC_CXX='no-such-compiler -O9'"):
        compiler.find_compiler()


def test_refused_source_carries_the_log_and_the_path(cache_path: Path) -> None:
    with pytest.raises(CompileFailedError, match=r"program-[0-9a-f]+\.cpp(?s:.*)missing.*not declared") as info:
        compiler.compile_library("int f() { return missing; }", PLAIN)
    path = Path(str(info.value).split(" refused ")[1].split(" (exit")[0])
    assert path.read_text() == "int f() { return missing; }"
    assert not list(cache_path.rglob("*.so"))


def test_a_missing_symbol_fails_when_compiled_not_when_run(cache_path: Path) -> None:
    with pytest.raises(CompileFailedError, match="undefined"):
        compiler.compile_library('extern "C" int absent(); extern "C" int f() { return absent(); }', PLAIN)


def test_the_second_compile_comes_from_the_cache(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" int f() { return 7; }'
    first = compiler.compile_library(source, PLAIN)
    monkeypatch.setattr(compiler._Job, "run", lambda *_: pytest.fail("compiled twice"))
    assert compiler.compile_library(source, PLAIN) == first
    assert ctypes.CDLL(str(first)).f() == 7
    assert first.is_relative_to(cache_path)


@pytest.mark.parametrize("change", [{"emitter_version": "2"}, {"extra_flags": ("-DX",)}, {"source": "int g;"}])
def test_whatever_changes_code_changes_the_key(cache_path: Path, change: dict[str, object]) -> None:
    base: dict[str, object] = {"source": "int f;", "isa": PLAIN, "emitter_version": "1"}
    assert compiler.compile_library(**base) != compiler.compile_library(**(base | change))  # type: ignore[arg-type]


def test_the_level_is_chosen_by_the_environment_and_changes_no_result(
    small: Any, cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for level in ("g", "1", "2", "3"):
        monkeypatch.setenv("QC_OPTIMISE", level)
        assert f"-O{level}" in compiler.flags_for("generic")
        if level in ("g", "3"):
            found[level] = LoadedProgram.from_image(small.image)(small.x(33))["y"].tobytes()
    assert found["g"] == found["3"]
    assert len(list(cache_path.glob("native/program-*.so"))) == 2
    monkeypatch.setenv("QC_OPTIMISE", "fast")
    with pytest.raises(ArgumentError, match="QC_OPTIMISE is 'fast'"):
        compiler.flags_for("generic")


def test_processes_that_compile_the_same_at_once_all_get_it(cache_path: Path) -> None:
    code = (
        "import ctypes; from qcompiler.runtime import compiler\n"
        f"p = compiler.compile_library('extern \"C\" int f() {{ return 5; }}', {PLAIN!r})\n"
        "assert ctypes.CDLL(str(p)).f() == 5"
    )
    processes = [subprocess.Popen([sys.executable, "-P", "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert len(list(cache_path.rglob("*.so"))) == 1


# --- cache (damage, owners and full disks: test_cache.py) ------------------------------------------------------------


def test_cache_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "qcompiler"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir("native") == tmp_path / ".cache" / "qcompiler" / "native"


# --- instruction sets ------------------------------------------------------------------------------------------------

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = V2 + " avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "level"), [("sse2", 1), (V3, 2), (V3.replace("popcnt", ""), 1), (V4, 3), (V4.replace("avx512bw", ""), 2)]
)
def test_level_from_flags(tmp_path: Path, flags: str, level: int) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    read = isa.cpuinfo_flags(tmp_path / "cpuinfo")
    assert read is not None
    assert isa.level_of(read) == level


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "zen4"),
    [
        ("AuthenticAMD", "25", V4, True),
        ("AuthenticAMD", "25", V3, False),  # a Zen 3
        ("AuthenticAMD", "26", V4, False),
        ("GenuineIntel", "6", V4, False),
    ],
)
def test_a_zen4_has_a_flag_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, family: str, flags: str, zen4: bool
) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: {flags}\n"
    (tmp_path / "cpuinfo").write_text(f"{text}\n{text.replace(vendor, 'Other')}")
    fields = isa.cpuinfo_fields(tmp_path / "cpuinfo")
    assert fields is not None
    monkeypatch.setattr(compiler, "host_is_zen4", lambda: isa.is_zen4(fields))
    assert ("-DQG_PAST_L2" in compiler.flags_for("x86-64-v4")) == zen4


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="psABI levels are x86-64's")
def test_the_processor_itself_says_the_same_as_proc() -> None:
    assert {4: 3, 3: 2, 1: 1}[support().qc_host_level()] == len(isa.supported_isas())


def test_qc_isa_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_ISA", PLAIN)
    assert isa.host_isa() == PLAIN
    with pytest.raises(TargetMismatchError, match="'sparc'"):
        isa.resolve_isa("sparc")


# --- threads ---------------------------------------------------------------------------------------------------------


def test_argument_before_environment_before_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_NUM_THREADS", "3")
    assert threads.resolve_num_threads(5) == 5
    assert threads.resolve_num_threads(None) == 3
    monkeypatch.delenv("QC_NUM_THREADS")
    monkeypatch.setattr(threads, "usable_cpus", lambda: 8)
    for quota, count in ((None, 8), (2.5, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(threads, "cgroup_cpus", lambda quota=quota: quota)
        assert threads.resolve_num_threads(None) == count


@pytest.mark.parametrize("value", [0, -1, 5000, True, "two"])
def test_nonsense_thread_counts_are_refused(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="num_threads"):
        threads.resolve_num_threads(value)  # type: ignore[arg-type]
    monkeypatch.setenv("QC_NUM_THREADS", str(value))
    with pytest.raises(ArgumentError, match="QC_NUM_THREADS"):
        threads.resolve_num_threads(None)


def test_affinity_limits_threads() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert threads.usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_quota_is_the_least_along_the_path(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/pod/box\n")
    (tmp_path / "pod" / "box").mkdir(parents=True)
    (tmp_path / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    assert threads.cgroup_cpus(tmp_path / "cgroup", tmp_path) is None
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    assert threads.cgroup_cpus(tmp_path / "cgroup", tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("800000 100000\n")
    assert threads.cgroup_cpus(tmp_path / "cgroup", tmp_path) == 1.5


def test_quota_of_the_old_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("3:cpu,cpuacct:/box\n1:memory:/box\n")
    (tmp_path / "cpu" / "box").mkdir(parents=True)
    (tmp_path / "cpu" / "box" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "box" / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.cgroup_cpus(tmp_path / "cgroup", tmp_path) == 2.0
    (tmp_path / "cpu" / "box" / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.cgroup_cpus(tmp_path / "cgroup", tmp_path) is None
