"""`QC_INT8` names the instructions that multiply int8; results do not depend on it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcompiler.errors import ArgumentError
from qcompiler.runtime import amx
from qcompiler.runtime.amx import INT8_FLAGS
from qcompiler.runtime.int8_units import int8_units
from qcompiler.runtime.isa import cpuinfo_flags
from qcompiler.runtime.progress import note_once

V4 = "x86-64-v4"


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process asks once is asked in each test, and notes that are printed once are printed."""
    monkeypatch.delenv("QC_QUIET", raising=False)
    for function in (amx.tiles_refused, note_once):
        function.cache_clear()
    yield
    amx.tiles_refused.cache_clear()


def test_qc_int8_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_INT8", "vnni")
    assert int8_units(V4) == 0
    monkeypatch.setenv("QC_INT8", "pairs")
    assert int8_units("x86-64-v3") == 1
    monkeypatch.setenv("QC_INT8", "avx")
    with pytest.raises(ArgumentError, match=r"QC_INT8='avx' names no instructions .* choose from vnni, pairs, amx"):
        int8_units(V4)


def with_flags(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str, asked: str = "amx") -> None:
    (folder / "cpuinfo").write_text(f"flags\t\t: {' '.join(flags)}\n")
    monkeypatch.setattr(amx, "CPUINFO", folder / "cpuinfo")
    monkeypatch.setenv("QC_INT8", asked)
    amx.tiles_refused.cache_clear()


@pytest.mark.parametrize("asked", ["amx", ""])
def test_the_system_is_asked_once_for_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str) -> None:
    answers = [0]
    with_flags(monkeypatch, tmp_path, *INT8_FLAGS, asked=asked)
    monkeypatch.setattr(amx, "request_tiles", answers.pop)
    assert int8_units(V4) == int8_units(V4) == 2 and not answers


def test_tiles_that_are_refused_have_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_flags(monkeypatch, tmp_path, *INT8_FLAGS)
    monkeypatch.setattr(amx, "request_tiles", lambda: errno.ENOSPC)
    assert int8_units(V4) == int8_units("x86-64-v3") == 0
    with_flags(monkeypatch, tmp_path, *INT8_FLAGS[1:])
    assert int8_units(V4) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.count("QC_INT8=amx: ") for note in notes] == [1, 1, 1]
    assert "the system refuses tiles: No space left on device (ENOSPC)" in notes[0]
    assert "kernels for x86-64-v3 have no tiles" in notes[1] and "this processor lacks amx_tile" in notes[2]


def test_by_default_only_a_refusal_of_the_system_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(amx, "request_tiles", lambda: errno.EPERM)
    with_flags(monkeypatch, tmp_path, *INT8_FLAGS[1:], asked="")
    assert int8_units(V4) == 0
    with_flags(monkeypatch, tmp_path, *INT8_FLAGS, asked="")
    assert int8_units(V4) == int8_units(V4) == int8_units("x86-64-v3") == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert "the system refuses tiles: Operation not permitted (EPERM); int8 is multiplied without AMX" in note


@pytest.mark.skipif(
    "amx_tile" in (cpuinfo_flags(Path("/proc/cpuinfo")) or {"amx_tile"}), reason="this processor may have tiles"
)
def test_a_system_without_tiles_refuses_them() -> None:
    assert amx.request_tiles() != 0
