"""What the model of AMX (tests/kernels/amx_model.h) counted."""

from __future__ import annotations

import ctypes
from typing import Any


def tile_counts(kernels: Any) -> dict[str, int]:
    """What the model counted; empty for a processor."""
    names = ("errors", "dots", "configured", "released", "once")
    if "QC_AMX_MODEL 1" not in kernels.source:
        return {}
    return {name: ctypes.c_int64.in_dll(kernels.library, f"amx_{name}").value for name in names}


def check_counts(kernels: Any, before: dict[str, int]) -> None:
    """Tiles were used as the manual says, and released."""
    if before:
        after = tile_counts(kernels)
        assert after["errors"] == 0 and after["dots"] > before["dots"] and after["configured"] == after["released"]
