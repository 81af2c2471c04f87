"""Huge pages are asked for where weights lie: in memory, in the unnamed file of packed weights, in a program's file."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from qcompiler.runtime import memory
from qcompiler.runtime.image import MappedFile


class Mapping(mmap.mmap):
    asked: ClassVar[list[tuple[int, int]]] = []

    def madvise(self, option: int, *rest: int) -> None:
        Mapping.asked.append((len(self), option))
        super().madvise(option, *rest)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no MADV_HUGEPAGE")
    Mapping.asked = []
    monkeypatch.setattr(mmap, "mmap", Mapping)
    return Mapping.asked


def test_weights_ask_for_huge_pages(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    size = memory.HUGE_PAGE_FLOOR
    written = memory.file_bytes(size, tmp_path)
    written[:] = 7
    (tmp_path / "weights").write_bytes(written.tobytes())
    mapped = MappedFile(tmp_path / "weights")
    assert np.array_equal(np.frombuffer(mapped.data, np.uint8), written)
    assert memory.Block(size).nbytes == size
    assert asked == [(size, mmap.MADV_HUGEPAGE)] * 3


def test_small_memory_does_not(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    memory.file_bytes(memory.HUGE_PAGE_FLOOR - 1, tmp_path)
    memory.Block(4096)
    assert asked == []


def test_a_system_that_refuses_is_only_slower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, option: int, *rest: int) -> None:
            raise OSError("no huge pages")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert memory.file_bytes(memory.HUGE_PAGE_FLOOR, tmp_path).nbytes == memory.HUGE_PAGE_FLOOR
