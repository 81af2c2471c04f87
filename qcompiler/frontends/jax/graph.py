"""The exported function as a flat list of nodes: calls inlined, loops unrolled, sizes and loop counters computed.

    %12: f32[b, 8] = stablehlo.dot_general(%x, %params.w) {…}    model.py:12

This is what the stages between the export and the import read and write down as text.
"""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import UnsupportedOperatorError
from qcompiler.plan.dims import Dim, Range
from qcompiler.plan.kernel import DType

Known = npt.NDArray[Any]
"""What is computed at compile time: values of the dtype, or objects (numbers and `Expr`) if sizes are among them."""

STORED: dict[str, DType] = {
    "f64": "f64", "f32": "f32", "f16": "f16", "bf16": "bf16", "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8",
    "ui64": "i64", "ui32": "i32", "ui16": "i16", "ui8": "ui8", "i1": "i1",
}  # fmt: skip
"""The IR's type for a type of StableHLO. Unsigned integers have the bits of signed ones; ops know the difference."""

NUMPY: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "i64": np.dtype(np.int64), "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16), "i8": np.dtype(np.int8), "ui64": np.dtype(np.uint64), "ui32": np.dtype(np.uint32),
    "ui16": np.dtype(np.uint16), "ui8": np.dtype(np.uint8), "i1": np.dtype(np.bool_),
}  # fmt: skip
"""NumPy's type for a type of StableHLO."""


@dataclass(eq=False)
class Value:
    """A tensor. `owner` is the node that computes it; None for an argument, a weight or a constant."""

    shape: tuple[Dim, ...]
    type: str
    known: Known | None = None
    owner: Node | None = None
    name: str = ""

    @property
    def dtype(self) -> DType:
        """The IR's element type. UnsupportedOperatorError for a type that programs cannot hold."""
        if self.type not in STORED:
            what = f"'{self.name}'" if self.name else "a value"
            if self.owner is not None:
                what = f"a result of {self.owner.op}"
            where = f" ({self.owner.source})" if self.owner is not None and self.owner.source else ""
            raise UnsupportedOperatorError(
                f"{what} has the element type {self.type}{where}, which programs cannot hold: convert it to one of "
                f"{', '.join(dict.fromkeys(STORED))}, or compute this part outside of the function"
            )
        return STORED[self.type]

    @property
    def unsigned(self) -> bool:
        return self.type.startswith("ui")

    @property
    def floating(self) -> bool:
        return self.type.startswith(("f", "bf"))

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(eq=False)
class Node:
    """One operator. `regions` are the bodies of reduce, sort and scatter; `line` is the user's `file.py:12`."""

    op: str
    operands: list[Value]
    attrs: dict[str, Any]
    results: list[Value] = field(default_factory=list)
    regions: list[Body] = field(default_factory=list)
    line: str = ""
    source: str = ""
    """The user's line with its text, for messages."""

    @property
    def result(self) -> Value:
        return self.results[0]

    def unsupported(self, why: str) -> UnsupportedOperatorError:
        """The error for a case that has no lowering."""
        where = f" ({self.source})" if self.source else ""
        return UnsupportedOperatorError(f"{self.op}: {why}{where}")

    def __str__(self) -> str:
        results = ", ".join(f"{r}: {r.type}[{', '.join(map(str, r.shape))}]" for r in self.results)
        attrs = ", ".join(f"{k}={_short(v)}" for k, v in self.attrs.items())
        operands = ", ".join(_operand(v) for v in self.operands)
        return f"{results} = {self.op}({operands})" + (f" {{{attrs}}}" if attrs else "") + f"    {self.line}".rstrip()


@dataclass(eq=False)
class Body:
    """A region on scalars: its arguments, its nodes, and what it returns."""

    arguments: list[Value]
    nodes: list[Node]
    returned: list[Value]


@dataclass
class Graph:
    """The whole function. `arguments` are called at run time, `leaves` hold weights by path."""

    arguments: list[Value] = field(default_factory=list)
    leaves: dict[Value, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)
    ranges: dict[str, Range] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    states: dict[Value, int] = field(default_factory=dict)
    """Arguments that the program keeps, with the number of the result that is the new value (donation.py)."""

    def live(self, needs: Any = None) -> list[Node]:
        """The nodes that results need, in order; `needs(node)` are the operands that its lowering reads."""
        wanted = set(self.returned)
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(result in wanted for result in node.results):
                kept.append(node)
                wanted.update(node.operands if needs is None else needs(node))
        return kept[::-1]

    def text(self) -> str:
        """The contents of a dump."""
        heads = [f"{v}: {v.type}[{', '.join(map(str, v.shape))}]" for v in (*self.leaves, *self.arguments)]
        lines = [*heads, *(str(node) for node in self.live())]
        return "\n".join([*lines, "return " + ", ".join(_operand(v) for v in self.returned)]) + "\n"


def _operand(value: Value) -> str:
    if value.known is not None and value.known.size <= 8:
        return str(value.known.tolist())
    return str(value)


def _short(value: Any) -> str:
    text = str(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) < 160 else text[:157] + "…"


# --- places ----------------------------------------------------------------------------------------------------------

_FILE = re.compile(r'"(?P<file>[^"]+\.py)":(?P<line>\d+)')
_SPEC = importlib.util.find_spec("jax")
_JAX = tuple(str(Path(each)) for each in (_SPEC.submodule_search_locations or ())) if _SPEC is not None else ()
_TRACER = "/qcompiler/frontends/jax/"
"""Part of the names of the files that call the user's function: what is behind them called qcompiler."""
_PACKAGES = (*_JAX, "/site-packages/", "/dist-packages/", "importlib")
"""Parts of the names of files that are not the user's."""


def user_line(location: str) -> tuple[str, str]:
    """(`model.py:12`, `/path/model.py:12: y = x @ w`) of an MLIR location: the innermost line of the user's code,
    empty where there is none.

    The text of the line is read from the file, so the location must be of a trace in this process: see `user_place`.
    """
    own = user_place(location)
    return (f"{Path(own[0]).name}:{own[1]}", f"{own[0]}:{own[1]}" + _code(*own)) if own is not None else ("", "")


def user_place(location: str) -> tuple[str, int] | None:
    """The file and the line that an MLIR location names as the innermost ones of the user's code. Reads no file."""
    found = ((m["file"], int(m["line"])) for m in _FILE.finditer(location))
    traced = itertools.takewhile(lambda each: _TRACER not in each[0], found)
    return next((each for each in traced if not any(p in each[0] for p in _PACKAGES)), None)


def _code(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f": {text}" if text else ""
