"""Builders of the nodes that the linalg reader makes beside StableHLO's: loops with a body, folds, and takes.

mlir.pointwise(x, y) {body}          linalg.generic over all loops
mlir.fold(x) {add, axes}             a reduction loop
mlir.take(flat, index)               qc.gather of a linear index
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import Scalars
from qcompiler.frontends.jax.folds import argmax
from qcompiler.frontends.jax.graph import Node
from qcompiler.frontends.jax.scope import Result, Scope, lowers, opmath, splat
from qcompiler.frontends.mlir.bodies import ScalarBody, emit
from qcompiler.ir import build


@lowers("mlir.pointwise")
def _pointwise(s: Scope, node: Node) -> Result:
    """Operands broadcast to the loops; `places` are theirs in the body, `place` is the result's."""
    body: ScalarBody = node.attrs["body"]
    places: list[int] = node.attrs["places"]
    numbers = {place: splat(value) for place, value in zip(places, node.operands, strict=True)}
    read = [(p, s.value(v)) for p, v in zip(places, node.operands, strict=True) if numbers[p] is None]

    def build_body(inner: Builder, arguments: Sequence[SSAValue]) -> SSAValue:
        given = {place: argument for (place, _), argument in zip(read, arguments, strict=False)}
        for (place, known), value in zip(numbers.items(), node.operands, strict=True):
            if known is not None:
                given[place] = Scalars(inner, value.dtype).const(known)
        return emit(inner, body, given, [node.attrs["place"]])[0]

    return build.pointwise(s.builder, [v for _, v in read], node.result.shape, node.result.dtype, build_body)


@lowers("mlir.fold")
def _fold(s: Scope, node: Node) -> Result:
    value = node.operands[0]
    made = s.reduce(s.value(value), tuple(node.attrs["axes"]), node.attrs["by"], compute=opmath(value.dtype))
    return s.cast(made, node.result.dtype)


@lowers("mlir.argmax")
def _argmax(s: Scope, node: Node) -> Result:
    found = argmax(s, s.value(node.operands[0]), node.attrs["axis"], largest=node.attrs["largest"])
    return s.cast(s.reshape(found, node.result.shape), node.result.dtype)


@lowers("mlir.take")
def _take(s: Scope, node: Node) -> Result:
    flat, index = node.operands
    return s.take(s.value(flat), s.value(index), 0)


@lowers("mlir.insert")
def _insert(s: Scope, node: Node) -> Result:
    part, into = node.operands
    return build.insert_slice(s.builder, s.value(part), s.value(into), node.attrs["offsets"], node.attrs["steps"])


@lowers("mlir.slice")
def _slice(s: Scope, node: Node) -> Result:
    a = node.attrs
    return build.extract_slice(s.builder, s.value(node.operands[0]), a["offsets"], a["sizes"], a["steps"])


@lowers("mlir.empty")
def _empty(s: Scope, node: Node) -> Result:
    """Undefined values that something reads: any will do, and zeros are the same each time."""
    return s.full(0, node.result.shape, node.result.dtype)
