"""KernelSpec: everything that decides what a kernel does, and nothing about how a target writes it.

A spec is data (strict JSON), so the runtime can emit and compile it on a machine without torch and without xdsl.
Launches with equal specs share one kernel; `KernelSpec.digest` identifies it. The parts of a spec are declared in
`plan/operands.py`. Its body is the record of one of the kinds in `plan/kinds`.
"""

from __future__ import annotations

import hashlib
import operator
from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from qcompiler.plan.kernel_body import KernelBody
from qcompiler.plan.kinds import KINDS
from qcompiler.plan.operands import (
    ITEMSIZE,
    Access,
    DType,
    FormatRef,
    Operand,
    ScalarOp,
    ScalarProgram,
    Strict,
)

__all__ = [
    "ITEMSIZE", "Access", "DType", "FormatRef", "KernelBody", "KernelSpec", "Operand", "ScalarOp", "ScalarProgram",
    "Strict",
]  # fmt: skip

if TYPE_CHECKING:
    AnyBody = KernelBody
else:
    AnyBody = reduce(operator.or_, KINDS.values())
    """The tagged union of all kinds: a spec in a file decodes to the record that its tag names."""


class KernelSpec(Strict, frozen=True):
    """One kernel: its C name, the symbols it takes at run time (in order), its operands and its body.

    `serves` tells the reader for which op and module path the kernel was first emitted. It is not part of the identity.
    """

    name: str
    symbols: tuple[str, ...]
    operands: tuple[Operand, ...]
    body: AnyBody
    serves: str = ""

    @property
    def digest(self) -> str:
        """sha256 of everything but the name and `serves`."""
        bare = msgspec.structs.replace(self, name="", serves="")
        return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()

    @property
    def template(self) -> str:
        return str(type(self.body).__struct_config__.tag)
