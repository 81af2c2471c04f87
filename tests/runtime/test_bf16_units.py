"""`QC_BF16` names the instructions that multiply bf16: by default tiles, where processor and system have them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcompiler.errors import ArgumentError
from qcompiler.runtime import amx
from qcompiler.runtime.amx import BF16_FLAGS
from qcompiler.runtime.bf16_units import bf16_units
from qcompiler.runtime.progress import note_once

V4 = "x86-64-v4"


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process asks once is asked in each test, and notes that are printed once are printed."""
    monkeypatch.delenv("QC_QUIET", raising=False)
    monkeypatch.delenv("QC_BF16", raising=False)
    for function in (amx.tiles_refused, note_once):
        function.cache_clear()
    yield
    amx.tiles_refused.cache_clear()


def with_flags(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str, error: int = 0) -> None:
    (folder / "cpuinfo").write_text(f"flags\t\t: {' '.join(flags)}\n")
    monkeypatch.setattr(amx, "CPUINFO", folder / "cpuinfo")
    monkeypatch.setattr(amx, "request_tiles", lambda: error)
    amx.tiles_refused.cache_clear()


def test_tiles_are_the_default_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_flags(monkeypatch, tmp_path, *BF16_FLAGS)
    assert (bf16_units(V4), bf16_units("x86-64-v3")) == (1, 0)
    monkeypatch.setenv("QC_BF16", "dots")
    assert bf16_units(V4) == 0
    monkeypatch.setenv("QC_BF16", "tiles")
    with pytest.raises(ArgumentError, match=r"QC_BF16='tiles' names no instructions .* choose from dots, amx"):
        bf16_units(V4)


def test_a_note_says_why_there_are_no_tiles_if_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_flags(monkeypatch, tmp_path, *BF16_FLAGS[1:])
    assert bf16_units(V4) == 0 and capsys.readouterr().err == ""
    monkeypatch.setenv("QC_BF16", "amx")
    assert bf16_units(V4) == 0
    assert (
        "QC_BF16=amx: this processor lacks amx_tile; bf16 is multiplied as with QC_BF16=dots" in capsys.readouterr().err
    )
    with_flags(monkeypatch, tmp_path, *BF16_FLAGS, error=errno.ENOSPC)
    assert bf16_units(V4) == 0
    assert "the system refuses tiles: No space left on device (ENOSPC)" in capsys.readouterr().err
