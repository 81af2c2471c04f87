"""Affine maps of linalg.generic as linear forms of its loops.

affine_map<(d0, d1, d2) -> (d0, d1 * 2 + d2, 0)>      d0; 2*d1 + d2; 0
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qcompiler.errors import UnsupportedOperatorError
from qcompiler.frontends.mlir.bodies import Scalar, ScalarBody
from qcompiler.plan.dims import Expr, dim


@dataclass(frozen=True)
class Index:
    """`offset` plus each loop's index times its factor."""

    factors: Mapping[int, int]
    offset: int


_MAP = re.compile(r"(?:affine_map<)?\(([^()]*)\)(?:\[[^\]]*\])? -> \((.*)\)>?\Z")
_TERM = re.compile(r"\s*([+-]?)\s*(?:d(\d+)(?:\s*\*\s*(-?\d+))?|(\d+))\s*")


def parse_map(text: str) -> list[Index]:
    """The results of a map. UnsupportedOperatorError for floordiv, mod and symbols."""
    found = _MAP.match(text)
    if found is None or len(text) > 2000:
        raise UnsupportedOperatorError(f"an indexing map {text[:80]} that is not understood")
    results = found[2].strip()
    return [_index(part, text) for part in results.split(",")] if results else []


def _index(text: str, whole: str) -> Index:
    factors: dict[int, int] = {}
    offset = at = 0
    while at < len(text):
        term = _TERM.match(text, at)
        if term is None or term.end() == at:
            raise UnsupportedOperatorError(
                f"the indexing map {whole[:120]} is no sum of loops: read such places with tensor.extract"
            )
        sign = -1 if term[1] == "-" else 1
        if term[2] is not None:
            d = int(term[2])
            factors[d] = factors.get(d, 0) + sign * int(term[3] or 1)
        else:
            offset += sign * int(term[4])
        at = term.end()
    return Index(factors, offset)


def dim_of(index: Index) -> int | None:
    """The loop, if the index is a loop's."""
    if index.offset == 0 and len(index.factors) == 1:
        ((d, factor),) = index.factors.items()
        return d if factor == 1 else None
    return None


def constant(index: Index) -> int | None:
    """The number, if the index is one."""
    return index.offset if not index.factors else None


def index_of(index: Index, body: ScalarBody) -> int:
    """The place of the index, as ops of a body."""
    total = body.add(Scalar("arith.constant", (), "i64", index.offset))
    for d, factor in index.factors.items():
        at = body.add(Scalar("linalg.index", (), "i64", d))
        times = body.add(Scalar("arith.constant", (), "i64", factor))
        total = body.add(Scalar("arith.addi", (total, body.add(Scalar("arith.muli", (at, times), "i64"))), "i64"))
    return total


_APPLIED = re.compile(r"(?:affine_map<)?\(([^()]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>?\Z")


def apply_map(text: str, operands: Sequence[Expr]) -> Expr:
    """The only result of a map for these sizes: dims, then symbols. UnsupportedOperatorError for another map."""
    found = _APPLIED.match(text)
    if found is None or len(text) > 2000:
        raise UnsupportedOperatorError(f"a map {text[:80]} that is not understood")
    names = [word.strip() for part in (found[1], found[2] or "") for word in part.split(",") if word.strip()]
    words = found[3].replace("floordiv", "//").replace("ceildiv", "@").replace("mod", "%")
    try:
        return _evaluate(ast.parse(words.strip(), mode="eval").body, dict(zip(names, operands, strict=True)))
    except (SyntaxError, ValueError, KeyError, MemoryError) as error:
        raise UnsupportedOperatorError(f"a map {text[:80]} that is not understood") from error


_OPERATIONS: dict[type[ast.operator], Callable[[Expr, Expr], Expr]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b, ast.MatMult: lambda a, b: -((-a) // b),
}  # fmt: skip


def _evaluate(node: ast.expr, sizes: Mapping[str, Expr]) -> Expr:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left, sizes), _evaluate(node.right, sizes))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, sizes)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return dim(node.value)
    if isinstance(node, ast.Name):
        return sizes[node.id]
    raise ValueError("another expression")
