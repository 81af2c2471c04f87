"""The cells of gpu_first.py, the most informative first, with the names under which predictions are kept.

    linear/nf4/4096x4096/m1            a program with a fixed size: M is known when the kernel is compiled
    linear/nf4/4096x4096/m48/symbolic  a program for any M: the kernel of M's class, as `select` picks it
    linear/torch/4096x4096/m1          a peer

A `Cell` always has its full sizes; `sizes(cell, "small")` are its sizes on the simulated GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "attention_decode", "attention_prefill", "norm", "grouped", "layer"]
Scale = Literal["full", "small"]

FORMATS: dict[str, tuple[str, dict[str, int | bool | str]] | None] = {
    "nf4": ("nf4", {"block": 64}),
    "int4": ("int4", {"group": 128}),
    "q4_K": ("q4_K", {}),
    "int8": ("int8", {}),
    "mxfp4": ("mxfp4", {}),
    "bf16": None,
    "w8a8": ("int8", {}),
    "w4a8": ("int4", {"group": 128}),
    "w4a8_g32": ("int4", {"group": 32}),
    "q4_K_a8": ("q4_K", {}),
}
"""Our engines of linears -> format and parameters; None: plain weights."""

INTEGERS = ("w8a8", "w4a8", "w4a8_g32", "q4_K_a8")
"""Those whose rows of x are int8, too."""

OURS = tuple(FORMATS)
WEIGHT_ONLY = tuple(name for name in OURS if name not in INTEGERS)
PEERS = ("torch", "tinygemm", "bitsandbytes")
"""torch's bf16 (cuBLAS; SDPA for attention), torch's int4 kernel, bitsandbytes' nf4."""

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
"""(N, K) of an 8 B Llama: q and o, gate and up, down, k and v."""

MS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
TELLING = (1, 64, 4096, 16)
SYMBOLIC_SHAPES = SHAPES[:2]
PEER_SHAPES = SHAPES[:2]
KEYS = (8192, 1024, 32768)
PREFILL = 2048
COLS = 4096
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
EXPERTS, EXPERT_N = 8, 4096
GROUPED_ROWS = (1, 64)


@dataclass(frozen=True)
class Cell:
    """One thing to measure. linear: (n, k) weights, m rows; attention: m queries, n keys; norm: m rows, k columns;
    grouped: m rows, two of eight experts of (n, k) each; layer: m tokens."""

    kind: Kind
    engine: str
    n: int = 0
    k: int = 0
    m: int = 0
    symbolic: bool = False

    @property
    def id(self) -> str:
        match self.kind:
            case "linear":
                return f"linear/{self.engine}/{self.n}x{self.k}/m{self.m}" + ("/symbolic" if self.symbolic else "")
            case "norm":
                return f"norm/{self.engine}/{self.m}x{self.k}"
            case "grouped":
                return f"grouped/{self.engine}/{self.n}x{self.k}/m{self.m}"
            case "layer":
                return f"layer/{self.engine}"
            case _:
                return f"{self.kind}/{self.engine}/{self.n}"

    @property
    def is_peer(self) -> bool:
        return self.engine in PEERS


# --- order -----------------------------------------------------------------------------------------------------------


def every() -> list[Cell]:
    """All cells, the most informative first: one row, then tensor cores at 64 and 4096, then the rest of a layer."""
    return list(dict.fromkeys(_in_order()))


def _in_order() -> Iterator[Cell]:
    square, *others = SHAPES
    yield from _linears(square, 1)
    yield from _linears(square, 64)
    yield from _attention(KEYS[0])
    yield Cell("layer", "nf4", m=1)
    yield from _linears(square, 4096)
    yield from _norms()
    yield from _linears(square, 16)
    for shape in others:
        yield from _linears(shape, 1)
    yield from (cell for m in (64, 16, 1, 4096) for cell in _symbolic(square, m))
    for keys in KEYS[1:]:
        yield from _attention(keys)
    yield from (Cell("attention_prefill", engine, n=PREFILL, m=PREFILL) for engine in ("torch", "ours"))
    yield from (Cell("grouped", "nf4", n=EXPERT_N, k=COLS, m=m) for m in GROUPED_ROWS)
    yield from (Cell("linear", engine, *square, m) for engine in INTEGERS for m in (64, 4096, 1, 16, 512))
    yield from (Cell("linear", "w8a8", *square, m, symbolic=True) for m in (64, 4096, 16, 512))
    for m in TELLING[1:]:
        for shape in others:
            yield from _linears(shape, m)
    for m in MS:
        for shape in SHAPES:
            yield from _linears(shape, m)
    for shape in SYMBOLIC_SHAPES:
        for m in MS:
            yield from _symbolic(shape, m)


def _linears(shape: tuple[int, int], m: int) -> Iterator[Cell]:
    for engine in PEERS if shape in PEER_SHAPES else PEERS[:1]:
        yield Cell("linear", engine, *shape, m)
    for engine in WEIGHT_ONLY:
        yield Cell("linear", engine, *shape, m)


def _symbolic(shape: tuple[int, int], m: int) -> Iterator[Cell]:
    for engine in WEIGHT_ONLY:
        yield Cell("linear", engine, *shape, m, symbolic=True)


def _attention(keys: int) -> Iterator[Cell]:
    yield from (Cell("attention_decode", engine, n=keys, m=1) for engine in ("torch", "ours"))


def _norms() -> Iterator[Cell]:
    yield from (Cell("norm", engine, k=COLS, m=m) for m in (1, 4096) for engine in ("torch", "ours"))


def chosen(only: list[str] | None) -> list[Cell]:
    """The cells whose names equal or contain one of the texts; ValueError for a text that no name contains."""
    cells = every()
    if not only:
        return cells
    for text in only:
        if not any(text in cell.id for cell in cells):
            raise ValueError(f"no cell's name holds {text!r}; `--list` prints all {len(cells)}")
    names = {cell.id for cell in cells}
    return [c for c in cells if any(c.id == text if text in names else text in c.id for text in only)]


# --- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes at which a cell runs."""

    n: int
    k: int
    m: int
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = HEAD_DIM


SMALL_N = {4096: 80, 14336: 144, 1024: 32}
SMALL_K = {4096: 256, 14336: 512}
SMALL_M = {4096: 160, 512: 140}
SMALL_KEYS = {1024: 33, 8192: 160, 32768: 290, PREFILL: 70}
"""Multiples of 256 columns for blocks of that size; rows and keys that end inside tiles."""


def sizes(cell: Cell, scale: Scale) -> Sizes:
    """The sizes of a cell: full, or small."""
    if scale == "full":
        return Sizes(cell.n, cell.k, cell.m)
    if cell.kind.startswith("attention"):
        rows = SMALL_KEYS[cell.m] if cell.m > 1 else 1
        return Sizes(SMALL_KEYS[cell.n], 0, rows, heads=4, kv_heads=2, dim=64)
    m = SMALL_M.get(cell.m, cell.m)
    return Sizes(SMALL_N.get(cell.n, cell.n), SMALL_K.get(cell.k, cell.k), m)
