"""The text of a module before any parser sees it: which dialect it is in, its resources, and its limits.

    func.func @main(%x: tensor<3x8xf32>) …
    {-# dialect_resources: { builtin: { w: "0x04000000…" } } #-}

The section of resources is cut off and read here. So MLIR's parser never sees the bytes of weights, and a resource
whose length does not fit its type is an error before anything reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qcompiler.errors import ExportError

Dialect = Literal["stablehlo", "torch", "linalg"]

MAX_DEPTH = 200
"""Nested brackets in a text. MLIR's parser calls itself for each, on a stack of fixed size; exporters need about 10."""

_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
"""A string, or what begins as one: a match eats all that it looked at, so that a scan is linear in any text."""
_UNREAD = re.compile(rf"{_STRING}|//[^\n]*")
_ENTRY = re.compile(rf'(?P<name>[\w.$-]+|{_STRING})(?:\s*:\s*"0x(?P<hex>[0-9A-Fa-f]*)")?')
"""A word or a string of the section of resources; with `hex` if it is the name of a resource."""
_OPERATION = re.compile(r"(?<![\w.!#%@^$])\"?(stablehlo|chlo|torch|linalg|tensor|arith|math)\.[a-z]")
_MINUSES = re.compile(r"-(?:\s*-){20}")


@dataclass(frozen=True)
class ModuleText:
    """`body` is the text without resources; `resources` are their bytes by name, without 4 bytes of alignment."""

    body: str
    dialect: Dialect
    mixed: bool
    """Whether StableHLO comes with ops of shape, tensor or arith, as torch-mlir writes symbolic sizes."""
    resources: Mapping[str, bytes] = field(default_factory=dict)


def read_text(text: str, file: str) -> ModuleText:
    """Looks at a text. ExportError for one that is no MLIR, or that no parser should be given."""
    if text.startswith("ML\ufffdR") or "\0" in text:
        raise ExportError(f"{file} is MLIR bytecode, or no text at all: write the module as text, str(module)")
    body, section = _parts(text)
    resources = _resources(section, file)
    plain = _UNREAD.sub(lambda found: '""' if found[0].startswith('"') else "", body)
    _check_depth(plain, file)
    dialect, mixed = _dialect(
        _UNREAD.sub(lambda found: found[0] if found[0].startswith('"') else "", body), plain, file
    )
    return ModuleText(body, dialect, mixed, resources)


def _parts(text: str) -> tuple[str, str]:
    """The text before its section of resources, and what is in the section."""
    whole = text.rstrip()
    start = whole.rfind("{-#", 0, -3)
    if start < 0 or not whole.endswith("#-}"):
        return text, ""
    return text[:start], whole[start + 3 : -3]


def _resources(section: str, file: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in _ENTRY.finditer(section):
        if entry["hex"] is None:
            continue
        name, digits = entry["name"].strip('"'), entry["hex"]
        if len(digits) % 2 or len(digits) < 8:
            raise ExportError(f"the resource '{name}' of {file} is cut off: {len(digits)} hexadecimal digits")
        if name in found:
            raise ExportError(f"{file} has two resources with the name '{name}'")
        found[name] = bytes.fromhex(digits[8:])
    return found


def _check_depth(plain: str, file: str) -> None:
    data = np.frombuffer(plain.encode("ascii", "replace"), np.uint8)
    closing = data == ord(">")
    closing[1:] &= data[:-1] != ord("-")
    change = np.isin(data, np.frombuffer(b"([{<", np.uint8)).astype(np.int32)
    change -= (np.isin(data, np.frombuffer(b")]}", np.uint8)) | closing).astype(np.int32)
    depth = int(np.cumsum(change, dtype=np.int64).max(initial=0))
    if depth > MAX_DEPTH or _MINUSES.search(plain):
        raise ExportError(
            f"{file} nests brackets or signs more than {MAX_DEPTH} deep, which no exporter writes: MLIR's parser would "
            "run out of stack"
        )


def _dialect(body: str, plain: str, file: str) -> tuple[Dialect, bool]:
    names = {each[1] for each in _OPERATION.finditer(body)}
    if "torch" in names or "!torch." in plain:
        return "torch", False
    if names & {"stablehlo", "chlo"}:
        return "stablehlo", bool(re.search(r"(?<![\w.!#%@^$])\"?(shape|tensor)\.[a-z]", body))
    if names & {"linalg", "tensor", "arith", "math"}:
        return "linalg", False
    if re.search(r"(?<![\w.!#%@^$])\"?(mhlo|vhlo|tosa|onnx|memref|llvm|gpu|spirv)\.", body):
        raise ExportError(
            f"{file} is in a dialect that is not read: write StableHLO, torch-mlir's torch dialect, or linalg on "
            "tensors (torch_mlir.fx.export_and_import writes each, by output_type)"
        )
    if re.search(r"\bfunc\.func\b", body):
        return "stablehlo", False  # a function that returns its arguments: any parser will do
    raise ExportError(f"{file} is no MLIR: there is no func.func in it")


def array_of(data: bytes, kind: np.dtype[Any], shape: tuple[int, ...], name: str) -> np.ndarray[Any, Any]:
    """A resource as an array. ExportError if its length is not that of its type."""
    count = 1
    for size in shape:
        count *= size
    if kind == np.bool_:
        raise ExportError(f"the resource '{name}' holds bits, whose order MLIR does not fix: write it as i8")
    if len(data) != count * kind.itemsize:
        raise ExportError(
            f"the resource '{name}' has {len(data)} bytes, and its type {'x'.join(map(str, shape))}x{kind} takes "
            f"{count * kind.itemsize}"
        )
    return np.frombuffer(data, kind).reshape(shape)
