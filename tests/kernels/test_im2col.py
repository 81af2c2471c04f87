"""Linears that read the windows of an image in place, against NumPy in float64: geometries, types, rows, ISAs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from window_cases import CASES, check, spec_of


def test_windows_are_read_where_they_lie(build: Callable[..., Any], isa: str) -> None:
    kernels = build([spec_of(case) for case in CASES], isa)
    for case in CASES:
        check(kernels, case)
