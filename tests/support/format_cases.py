"""Every format with every choice of its parameters, and bytes for each: encoded weights and random ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from qcompiler import formats
from qcompiler.formats import FORMATS

OF_256 = ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs", "tq1_0", "tq2_0", "iq3_s", "iq3_xxs",
          "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq")  # fmt: skip


def all_parameters(name: str) -> list[dict[str, Any]]:
    """Every combination of a format's parameters."""
    parameters = FORMATS[name].parameters
    choices = itertools.product(*(p.choices for p in parameters))
    return [dict(zip([p.name for p in parameters], chosen, strict=True)) for chosen in choices]


def shape_of(name: str, params: dict[str, Any]) -> tuple[int, int]:
    """A small matrix of several blocks; for blocks that run across rows one whose rows are no multiple of them."""
    if name in OF_256:
        return 3, 512
    if params.get("per") == "block":
        return 130, 160
    return (5, 128) if params.get("group") in (64, 128) else (5, 96)


def encoded(name: str, params: dict[str, Any]) -> np.ndarray:
    shape = shape_of(name, params)
    weights = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    weights[-1] *= 1e-3
    return np.asarray(formats.get(name, **params).encode(weights).data)


def arbitrary(name: str, params: dict[str, Any]) -> np.ndarray | None:
    """Random bytes: NaN and infinite scales, codes that no encoder writes. None where fp32 sections would hold them."""
    fmt, shape = formats.get(name, **params), shape_of(name, params)
    if name == "tq1_0" or any(section.dtype.itemsize == 4 for section in fmt.sections(*shape)):
        return None
    return np.random.default_rng(9).integers(0, 256, fmt.nbytes(*shape)).astype(np.uint8)
