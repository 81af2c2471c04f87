"""canonicalize: rewrites equivalent forms to a single one, without changing a bit of any result.

    %1 = linalg.transpose %0 [1, 0]                    %2 = %0
    %2 = linalg.transpose %1 [1, 0]
    %4 = tensor.expand_shape (tensor.collapse_shape %3)     ->     one reshape of %3, or %3 itself
    %6 = arith.truncf (arith.extf %5 : bf16 to f32)                %5
    %9 = arith.mulf %7, %8 (two constants)                         arith.constant

A `linalg.generic` loses the inputs that its body does not read. A nest that only copies is replaced by its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block
from xdsl.passes import ModulePass

from qcompiler.ir.module import functions
from qcompiler.passes.checks.numerics import Exact, Numerics
from qcompiler.passes.loops import canonical as loops
from qcompiler.passes.rewriting import rewrite
from qcompiler.passes.views import canonical as views

PATTERNS = (*loops.PATTERNS, *views.PATTERNS)


@dataclass(frozen=True)
class CanonicalizePass(ModulePass):
    """Folds views that cancel, casts that cancel, constants, and copies."""

    name = "canonicalize"
    numerics: ClassVar[Numerics] = Exact()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            canonicalize_block(function.body.block)


def canonicalize_block(block: Block) -> None:
    """Canonicalises a block: the bodies of its ops first, then the ops."""
    rewrite(block, PATTERNS)
