"""Values of `dense<…>` attributes from their text: bindings have no buffers for all types, and all print them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ExportError
from qcompiler.frontends.jax.graph import NUMPY

Array = npt.NDArray[Any]

_NUMBER = re.compile(r"true|false|-?0x[0-9A-Fa-f]+|-?[\d.]+(?:[eE][-+]?\d+)?")


def dense_array(text: str, shape: tuple[int, ...], kind: str, where: str) -> Array:
    """`dense<[[1.0, 0x7FC00000], …]> : …`, `dense<"0x0000803F…"> : …` or `dense<1> : …` (all elements).

    ExportError for another number of values than the shape has.
    """
    found = re.match(r"dense<(.*)> : tensor<", text, re.DOTALL)
    if found is None:
        raise ExportError(f"a constant is written as {text[:60]}{where}; there are dense<…> and dense_resource<…>")
    dtype, count = NUMPY[kind], int(np.prod(shape, dtype=np.int64))
    if found[1].startswith('"0x'):
        data = bytes.fromhex(found[1][3:-1])
        if kind == "i1":
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            values = bits[:count].astype(np.bool_)
        else:
            values = np.frombuffer(data, dtype)
    else:
        values = _numbers(_NUMBER.findall(found[1]), dtype)
    if values.size == 1 and count != 1:
        return np.full(shape, values[0], dtype)
    if values.size != count:
        raise ExportError(f"a constant has {values.size} values, and its type {count}{where}")
    return values.reshape(shape)


def _numbers(words: list[str], dtype: np.dtype[Any]) -> Array:
    if dtype == np.bool_:
        return np.array([word in ("true", "1", "-1") for word in words], np.bool_)
    bits = np.dtype(f"u{dtype.itemsize}")
    made = np.zeros(len(words), dtype)
    for number, word in enumerate(words):
        if dtype.kind in "iu":
            made[number] = np.array(int(word, 0)).astype(dtype)
        elif word.startswith("0x"):
            made[number] = np.array(int(word, 16), bits).view(dtype)
        else:
            made[number] = dtype.type(float(word))
    return made


def scalar_number(text: str) -> float | int | bool:
    """`5 : i64`, `1.0 : f32`, `0xFF800000 : f32`, `true`: the number of a scalar attribute."""
    word, _, kind = text.partition(" : ")
    if word in ("true", "false"):
        return word == "true"
    if kind in ("", "index") or kind.startswith(("i", "si", "ui")):
        return int(word, 0)
    if word.startswith("0x"):
        dtype = NUMPY[kind]
        return float(np.array(int(word, 16), np.dtype(f"u{dtype.itemsize}")).view(dtype))
    return float(word)


def ints(attribute: Any) -> list[int]:
    """An array of integers, however the text writes it: `array<i64: 1, 2>`, `[1, 2]`, `dense<2> : vector<2xi64>`."""
    text = str(attribute)
    if text.startswith("dense<"):
        body, _, type_ = text[6:].partition(">")
        found = [int(word) for word in body.strip("[]").split(",")]
        count = int(type_.partition("<")[2].partition("x")[0])
        return found * count if len(found) == 1 else found
    inner = text.partition(":")[2] if text.startswith("array<") else text
    return [int(word.partition(":")[0]) for word in inner.strip("[]<> ").split(",") if word.strip()]
