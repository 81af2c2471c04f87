"""Prints and parses modules.

* `print_module` writes text for people, which `qc opt` and a plain `xdsl-opt` parse.
* `print_for_mlir` writes text that stock MLIR parses with unregistered dialects allowed: `qc` and `rt` ops in generic
  form.

xDSL's syntax of `linalg.transpose`, `linalg.broadcast` and `tensor.empty` has no place for attributes. If such an op
has attributes, it is printed in generic form so that nothing is lost. The scalar ops that xDSL lacks are, too.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import tensor
from xdsl.dialects.builtin import DYNAMIC_INDEX, AffineMapAttr, DenseArrayBase, ModuleOp, StringAttr, TensorType
from xdsl.dialects.linalg.ops import BroadcastOp, TransposeOp
from xdsl.ir import Attribute, Operation
from xdsl.parser import Parser
from xdsl.printer import Printer

from qcompiler.errors import QCompilerError
from qcompiler.ir.context import QCContext
from qcompiler.ir.reading import check_text, refusing
from qcompiler.ir.scalar_ops import OURS
from qcompiler.ir.types import DimsAttr, QTensorType

_LOSES_ATTRIBUTES = (TransposeOp, BroadcastOp, tensor.EmptyOp)


_CACHED = (TensorType, QTensorType, AffineMapAttr, DimsAttr, StringAttr)
"""Attributes that repeat throughout a module and whose text depends on nothing else.

No attribute that may hold a float is among them: 0.0 equals -0.0, and a cache would print one as the other.
"""


@functools.lru_cache(maxsize=1 << 14)
def _attribute_text(attribute: Attribute) -> str:
    stream = io.StringIO()
    Printer(stream=stream).print_attribute(attribute)
    return stream.getvalue()


@dataclass(eq=False, repr=False)
class _Printer(Printer):
    """xDSL's printer, which chooses the generic form op by op. It is fast for frequent cases, since every stage is
    printed."""

    for_mlir: bool = False

    def print_string(self, text: str, *, indent: int | None = None) -> None:
        if "\n" in text:
            super().print_string(text, indent=indent)
        elif self.stream is not None:
            self.stream.write(text)

    def print_attribute(self, attribute: Attribute) -> None:
        if isinstance(attribute, _CACHED):
            self.print_string(_attribute_text(attribute), indent=0)
        else:
            super().print_attribute(attribute)

    def print_op(self, op: Operation) -> None:
        generic = (isinstance(op, _LOSES_ATTRIBUTES) and bool(op.attributes)) or isinstance(op, OURS)
        if self.for_mlir and op.name.startswith(("qc.", "rt.")):
            generic = True
        if not generic or self.print_generic_format:
            super().print_op(op)
            return
        self.print_generic_format = True
        super().print_op(op)
        self.print_generic_format = False


def print_module(module: Operation, generic: bool = False) -> str:
    """The text of a module (or of one op): readable, or entirely in generic form."""
    stream = io.StringIO()
    _Printer(stream=stream, print_generic_format=generic).print_op(module)
    return stream.getvalue() + "\n"


def print_for_mlir(module: ModuleOp) -> str:
    """Text for stock MLIR with unregistered dialects allowed. It parses here as well."""
    stream = io.StringIO()
    _Printer(stream=stream, for_mlir=True).print_op(module)
    return stream.getvalue() + "\n"


def parse_module(text: str, ctx: Context | None = None, *, name: str = "<input>") -> ModuleOp:
    """The verified module of `text`. QCompilerError with the position in the text if it is malformed."""
    check_text(text, name)
    with refusing(name):
        module = Parser(ctx if ctx is not None else QCContext.default(), text, name).parse_module()
        module.verify()
    _check_marks(module, name)
    return module


def _check_marks(module: ModuleOp, name: str) -> None:
    """Checks that a list of sizes has as many markers -2^63 as the op has dynamic sizes. xDSL's verifier does not count
    them, and 2^63 in a text becomes a marker."""
    for op in module.walk():
        for key, numbers in (op.properties | op.attributes).items():
            if not key.startswith("static_") or not isinstance(numbers, DenseArrayBase):
                continue
            marks = sum(number == DYNAMIC_INDEX for number in numbers.get_values())
            what = key.removeprefix("static_")
            values = getattr(op, what, None) or getattr(op, f"dynamic_{what}", ())
            if isinstance(values, Sequence) and len(values) != marks:
                raise QCompilerError(
                    f"{name} is not a valid module: {op.name} has {len(values)} values, and {marks} places for them in "
                    f"'{key}' (the number -2**63 marks one)"
                )
