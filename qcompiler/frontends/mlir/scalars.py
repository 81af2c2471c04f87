"""Ops of arith and math outside of loops, on sizes or single numbers, as the StableHLO ops that mean the same.

%n = arith.muli %b, %c8 : index      stablehlo.multiply, which is 8*b at compile time
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qcompiler.frontends.jax.graph import Node, Value

Make = Callable[[Any, list[Value]], Node]

_PLAIN = {
    "addi": "add", "addf": "add", "subi": "subtract", "subf": "subtract", "muli": "multiply", "mulf": "multiply",
    "divsi": "divide", "divf": "divide", "remsi": "remainder", "maxsi": "maximum", "minsi": "minimum",
    "maximumf": "maximum", "minimumf": "minimum", "negf": "negate", "andi": "and", "ori": "or", "xori": "xor",
    "select": "select", "index_cast": "convert", "extsi": "convert", "trunci": "convert", "extf": "convert",
    "truncf": "convert", "sitofp": "convert", "extui": "convert",
}  # fmt: skip
_SIGNED = {"eq": "EQ", "ne": "NE", "slt": "LT", "sle": "LE", "sgt": "GT", "sge": "GE"}
PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
"""Predicates of arith.cmpi, by number."""


_BITS = {
    "add": "xor", "subtract": "xor", "multiply": "and", "maximum": "and", "minimum": "or", "and": "and", "or": "or",
    "xor": "xor", "select": "select",
}  # fmt: skip
"""What an op of numbers is on truth values of arith: numbers of one bit, of which the set one is -1."""


def _named(name: str) -> Make:
    def make(op: Any, operands: list[Value]) -> Node:
        if operands[-1].type != "i1":
            return Node(f"stablehlo.{name}", operands, {})
        if name not in _BITS:
            raise Node(str(op.name), operands, {}).unsupported("truth values as numbers of one bit")
        return Node(f"stablehlo.{_BITS[name]}", operands, {})

    return make


_EXTENDS = ("index_cast", "extsi", "trunci", "sitofp", "extui")


def _converted(name: str) -> Make:
    """A conversion that means the same in StableHLO: not of a signed truth value, nor of a negative one to unsigned."""

    def make(op: Any, operands: list[Value]) -> Node:
        (value,) = operands
        node = Node("stablehlo.convert", operands, {})
        if value.type == "i1" and name != "extui":
            raise node.unsupported(f"arith.{name} of a truth value, which is -1")
        if name == "extui" and value.type != "i1" and not _natural(value):
            raise node.unsupported("arith.extui of numbers that may be negative")
        if name == "trunci" and str(op.results[0].type).endswith(("i1", "i1>")):
            raise node.unsupported("arith.trunci to a truth value; compare with 0")
        return node

    return make


def _natural(value: Value) -> bool:
    known = value.known
    return known is not None and known.dtype != object and bool((known >= 0).all())


def _compare(op: Any, operands: list[Value]) -> Node:
    predicate = PREDICATES[int(op.attributes["predicate"].value)]
    if predicate not in _SIGNED:
        node = Node("arith.cmpi", operands, {})
        raise node.unsupported(f"the predicate {predicate} on sizes")
    if operands[0].type == "i1" and predicate not in ("eq", "ne"):
        raise Node("arith.cmpi", operands, {}).unsupported(f"the predicate {predicate} on truth values")
    return Node("stablehlo.compare", operands, {"comparison_direction": _SIGNED[predicate]})


SCALARS: dict[str, Make] = {f"arith.{mine}": _named(theirs) for mine, theirs in _PLAIN.items()}
SCALARS.update({f"arith.{name}": _converted(name) for name in _EXTENDS})
SCALARS["arith.cmpi"] = _compare
"""Every scalar op with a meaning outside of loops."""
