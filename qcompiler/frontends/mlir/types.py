"""Types of MLIR as this frontend takes them: ranked tensors, and torch-mlir's value tensors.

tensor<?x8xf32>            (None, 8), f32
!torch.vtensor<[?,8],f32>  (None, 8), f32
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from qcompiler.errors import ExportError
from qcompiler.frontends.jax.graph import STORED

Shape = tuple[int | None, ...]

MAX_ELEMENTS = 1 << 31
"""A tensor of a text with more elements is refused: a program would reserve memory for it."""

_TENSOR = re.compile(r"tensor<((?:(?:\d+|\?)x)*)([a-z]\w*)>\Z")
_TORCH = re.compile(r"!torch\.vtensor<\[((?:\d+|\?)?(?:,(?:\d+|\?))*)\],([a-z]\w*)>\Z")


@dataclass(frozen=True)
class Argument:
    """An argument of the function: None in `shape` for `?`."""

    name: str
    shape: Shape
    element: str


def parse_type(text: str, what: str) -> tuple[Shape, str]:
    """Shape and element type. ExportError for anything but a ranked tensor of plain numbers, or for a huge one."""
    found = _TENSOR.match(text)
    sizes = found[1].split("x")[:-1] if found is not None else []
    if found is None:
        found = _TORCH.match(text)
        sizes = [size for size in found[1].split(",") if size] if found is not None else []
    if found is None:
        raise ExportError(
            f"{what} has the type {text[:200]}; programs take and return ranked tensors without encodings, "
            "tensor<…> or !torch.vtensor<[…],…>"
        )
    shape = tuple(None if size == "?" else int(size) for size in sizes)
    element = {"si64": "i64", "si32": "i32", "si16": "i16", "si8": "i8", "index": "i64"}.get(found[2], found[2])
    if element not in STORED:
        raise ExportError(f"{what} has the element type {found[2]}; there are {', '.join(dict.fromkeys(STORED))}")
    check_size(shape, what)
    return shape, element


def check_size(shape: tuple[int | None, ...], what: str) -> None:
    """ExportError for more elements than MAX_ELEMENTS."""
    count = math.prod(size for size in shape if size is not None)
    if count > MAX_ELEMENTS:
        raise ExportError(
            f"{what} has {count} elements, and the limit is {MAX_ELEMENTS}: compute it in parts, each a program's call"
        )
