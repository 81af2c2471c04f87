"""`QC_INT8` names the instructions that multiply int8; results do not depend on it."""

from __future__ import annotations

import pytest

from qcompiler.errors import ArgumentError
from qcompiler.runtime.int8_units import int8_units


def test_qc_int8_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QC_INT8", raising=False)
    assert int8_units() == 0
    monkeypatch.setenv("QC_INT8", "pairs")
    assert int8_units() == 1
    monkeypatch.setenv("QC_INT8", "avx")
    with pytest.raises(ArgumentError, match="QC_INT8='avx' names no instructions .* choose from vnni, pairs"):
        int8_units()
