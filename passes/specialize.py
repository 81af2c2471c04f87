"""specialize: makes one function for each bucket of sizes. These functions become the program's entry points.

    func.func @main(%x: tensor<?x384xf32, ["s", 384]>)    func.func @"decode[s=1]"(%x: tensor<1x384xf32>)
        attributes {qc.ranges = {s = [1, 512]}}      ->   func.func @"prefill[s<=512]"(%x: tensor<?x384xf32, …>)

The buckets are an option of the pass, `specialize{buckets="decode: s=1..1","prefill: s=1..512 b=1..4"}`. Without it, a
model without state keeps its one entry point `main`. A model with state (a cache) whose token dimension may be 1 gets
two: `decode` for that size, and `prefill`. A symbol with one possible value becomes that integer everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from qcompiler.errors import PassError
from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import find_func, ranges_of, set_ranges
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.loops.substitute import substitute_symbols
from qcompiler.plan.dims import Range

Bucket = tuple[str, Mapping[str, Range]]
"""The name of an entry point, and the range of each symbol."""

_SIZE = re.compile(r"([A-Za-z_]\w*)=(\d{1,19})\.\.(\d{1,19})")


@dataclass(frozen=True)
class SpecializePass(ModulePass):
    """Clones `@main` for each bucket. `buckets` are texts made by `bucket_text`."""

    name = "specialize"
    buckets: tuple[str, ...] | None = None
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the interpreter's matmul may sum a single row in another order

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        main = find_func(op, "main")
        if main is None:
            return  # already specialised, or entry points written by hand
        given = None if self.buckets is None else [parse_bucket(text) for text in self.buckets]
        buckets = default_buckets(main) if given is None else checked_buckets(main, given)
        made = [_specialised(main, name, ranges) for name, ranges in buckets]
        op.body.block.insert_ops_before(made, main)
        op.body.block.erase_op(main)
        for function in made:
            if isinstance(ctx, QCContext):
                sizes = ", ".join(f"{a} <= {s} <= {b}" for s, (a, b) in ranges_of(function).items()) or "static shapes"
                ctx.report.add(self.name, "", f"entry point {function.sym_name.data}", sizes)


def _specialised(main: func.FuncOp, name: str, ranges: Mapping[str, Range]) -> func.FuncOp:
    """A copy of `@main` under another name, with narrower ranges."""
    clone = main.clone()
    clone.properties["sym_name"] = StringAttr(name)
    joined = {**ranges_of(main), **ranges}
    set_ranges(clone, joined)
    substitute_symbols(clone, {symbol: low for symbol, (low, high) in joined.items() if low == high})
    return clone


def default_buckets(main: func.FuncOp) -> list[Bucket]:
    """`main`, or `prefill` and `decode` for a model with state whose token dimension may be 1.

    The token dimension is the only symbol with 1 in its range. If there are several, it is the one named like a
    sequence.
    """
    ranges = ranges_of(main)
    has_state = any(isinstance(op, qc.StateOp) for op in main.body.block.ops)
    token = _token_symbol([s for s, (low, high) in ranges.items() if low == 1 < high])
    if not has_state or token is None:
        return [("main", ranges)]
    low, high = ranges[token]
    return [(f"decode[{token}=1]", {token: (1, 1)}), (f"prefill[{token}<={high}]", {token: (low, high)})]


def _token_symbol(candidates: Sequence[str]) -> str | None:
    if len(candidates) == 1:
        return candidates[0]
    named = [s for s in candidates if s.lower().startswith(("s", "t", "q")) or "seq" in s.lower() or "len" in s.lower()]
    return named[0] if len(named) == 1 else None


def bucket_text(name: str, ranges: Mapping[str, Range]) -> str:
    """The text of a bucket in the pass's option: "decode: s=1..1". PassError for a name that this text cannot hold."""
    if re.search(r'["\\\x00-\x1f]', name) or not name:
        raise PassError(f"{name!r} cannot be the name of a bucket: quotes and backslashes cannot", stage="specialize")
    return " ".join([f"{name}:", *(f"{symbol}={low}..{high}" for symbol, (low, high) in ranges.items())])


def parse_bucket(text: str) -> Bucket:
    """Reads a text of `bucket_text`. PassError for any other text."""
    name, colon, sizes = text.rpartition(":")
    found = [_SIZE.fullmatch(each) for each in sizes.split()]
    if not colon or not name or None in found:
        raise PassError(f"'{text}' is no bucket; write a name and ranges, \"decode: s=1..1\"", stage="specialize")
    return name, {each[1]: (int(each[2]), int(each[3])) for each in found if each is not None}


def checked_buckets(main: func.FuncOp, given: Sequence[Bucket]) -> list[Bucket]:
    """The buckets, checked. PassError names a bucket that does not fit the model's ranges."""
    ranges = ranges_of(main)
    buckets: list[Bucket] = []
    if not given:
        raise PassError("buckets must be a sequence of (name, {symbol: (min, max)})", stage="specialize")
    for name, wanted in given:
        for symbol, (low, high) in wanted.items():
            if symbol not in ranges:
                known = ", ".join(ranges) or "none"
                raise PassError(f"bucket '{name}' names '{symbol}'; the dimensions are {known}", stage="specialize")
            if not ranges[symbol][0] <= low <= high <= ranges[symbol][1]:
                limits = f"{ranges[symbol][0]}..{ranges[symbol][1]}"
                message = f"bucket '{name}' asks {symbol} in {low}..{high}, outside of the exported range {limits}"
                raise PassError(message, stage="specialize")
        if name in {other for other, _ in buckets}:
            raise PassError(f"two buckets are named '{name}'", stage="specialize")
        buckets.append((str(name), dict(wanted)))
    return buckets
