"""Parts that normalise the rows of heads and read them in a loop, beside the norm and the loop apart: for both targets.

x is (n, HEADS, D) in wider rows, the result (HEADS, n, D).  `turn` says what the loop does with a row: "halves" and
"pairs" rotate it, "copy" and "reversed" move it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from qcompiler.plan.dims import contiguous_strides
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.kinds.parts import Part, PartNorm, PartsKernel

HEADS, WIDER = 3, 8
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclass(frozen=True)
class Case:
    """A launch of one such part, and the two kernels that it replaces."""

    cols: int
    dtype: Any
    turn: str
    kind: Any

    @property
    def name(self) -> str:
        return f"{self.turn}_{self.cols}_{self.dtype}_{self.kind}"

    @property
    def affine(self) -> list[Operand]:
        """The weight of an RMS norm, the weight and the bias of a layer norm."""
        names = ("weight", "bias") if self.kind == "layer" else ("weight",)
        return [self._operand(name, (self.cols,)) for name in names]

    def _operand(self, name: str, shape: Any, access: Any = "r", strides: Any = None) -> Operand:
        steps = contiguous_strides(tuple(shape)) if strides is None else strides
        return Operand(name=name, dtype=self.dtype, access=access, shape=tuple(shape), strides=steps)

    @property
    def x(self) -> Operand:
        return self._operand("x", ("n", HEADS, self.cols), strides=(HEADS * self.cols + WIDER, self.cols, 1))

    @property
    def tables(self) -> list[Operand]:
        return [self._operand(name, ("n", self.cols)) for name in ("cos", "sin")] if self.turns else []

    @property
    def turns(self) -> bool:
        return self.turn in ("halves", "pairs")

    @property
    def out(self) -> Operand:
        return self._operand("out", (HEADS, "n", self.cols), "w")

    @property
    def loop(self) -> LoopKernel:
        d, rows = self.cols, self.cols * HEADS
        if not self.turns:
            step, begin = (1, 0) if self.turn == "copy" else (-1, d - 1)
            program = ScalarProgram(inputs=(("a", self.dtype), ("b", self.dtype)), ops=(), yields=("a",))
            accesses = (
                AffineAccess(offset=begin, coefficients=(d, rows, step)),
                AffineAccess(offset=0, coefficients=(f"{d}*n", d, 1)),
            )
            return LoopKernel(extents=(HEADS, "n", d), iterators=("parallel",) * 3, accesses=accesses, body=program)
        half, halves = d // 2, self.turn == "halves"
        inside, other = ((half, 1), (-half, 1)) if halves else ((2, 1), (2, -1))
        accesses = (
            AffineAccess(offset=0, coefficients=(d, rows, *inside)),
            AffineAccess(offset=half if halves else 1, coefficients=(d, rows, *other)),
            *(AffineAccess(offset=0, coefficients=(0, d, *inside)) for _ in range(2)),
            AffineAccess(offset=0, coefficients=(f"{d}*n", d, *inside)),
        )
        return LoopKernel(
            extents=(HEADS, "n", *((2, half) if halves else (half, 2))), iterators=("parallel",) * 4,
            accesses=accesses, body=self._rotation(2 if halves else 3),
        )  # fmt: skip

    def _rotation(self, axis: int) -> ScalarProgram:
        """``x * cos + (-other where index(axis) == 0 else other) * sin``, in fp32."""
        names = ("x", "other", "cos", "sin")
        wide = self.dtype == "f32"
        value = {name: name if wide else f"{name}_wide" for name in names}
        ops = [ScalarOp(result=value[name], op="arith.extf", dtype="f32", args=(name,)) for name in names if not wide]
        ops += [
            ScalarOp(result="i", op="linalg.index", dtype="index", axis=axis),
            ScalarOp(result="zero", op="arith.constant", dtype="index", value="0"),
            ScalarOp(result="first", op="arith.cmpi", dtype="i1", args=("i", "zero"), predicate="eq"),
            ScalarOp(result="minus", op="arith.negf", dtype="f32", args=(value["other"],)),
            ScalarOp(result="turned", op="arith.select", dtype="f32", args=("first", "minus", value["other"])),
            ScalarOp(result="a", op="arith.mulf", dtype="f32", args=(value["x"], value["cos"])),
            ScalarOp(result="b", op="arith.mulf", dtype="f32", args=("turned", value["sin"])),
            ScalarOp(result="y", op="arith.addf", dtype="f32", args=("a", "b")),
        ]
        if not wide:
            ops.append(ScalarOp(result="narrow", op="arith.truncf", dtype=self.dtype, args=("y",)))
        inputs = tuple((name, self.dtype) for name in (*names, "out"))
        return ScalarProgram(inputs=inputs, ops=tuple(ops), yields=("y" if wide else "narrow",))

    @property
    def body(self) -> NormKernel:
        return NormKernel(
            kind=self.kind, rows="n", inner=HEADS, cols=self.cols, eps=1e-6, has_weight=True,
            has_bias=self.kind == "layer",
        )  # fmt: skip

    @property
    def reads(self) -> int:
        """How many inputs of the loop read the norm."""
        return 2 if self.turns else 1

    @property
    def fused(self) -> KernelSpec:
        """Operands x, weight, [bias], [cos, sin], out."""
        operands = (self.x, *self.affine, *self.tables, self.out)
        first = 1 + len(self.affine)
        part = Part(
            operands=(*(0,) * self.reads, *range(first, len(operands))), loop=self.loop,
            norm=PartNorm(body=self.body, inputs=tuple(range(self.reads)), affine=tuple(range(1, first))),
        )  # fmt: skip
        return KernelSpec(f"fused_{self.name}", ("n",), operands, PartsKernel(parts=(part,)))

    @property
    def norm(self) -> KernelSpec:
        """Operands x, weight, [bias], out."""
        out = self._operand("out", self.x.shape, "w")
        return KernelSpec(f"norm_{self.name}", ("n",), (self.x, *self.affine, out), self.body)

    @property
    def moved(self) -> KernelSpec:
        """The loop: the norm's result as often as it is read, [cos, sin], out."""
        rows = self._operand("rows", self.x.shape)
        operands = (*(rows,) * self.reads, *self.tables, self.out)
        return KernelSpec(f"loop_{self.name}", ("n",), operands, self.loop)

    def given(self, rows: int) -> list[np.ndarray]:
        """Values of x (as it lies), the weight, [the bias], [cos, sin]."""
        rng = np.random.default_rng(rows)
        shapes = [(rows, HEADS * self.cols + WIDER), *((self.cols,) for _ in self.affine)]
        shapes += [(rows, self.cols) for _ in self.tables]
        return [rng.normal(size=shape).astype(TYPES[self.dtype]) for shape in shapes]

    def heads(self, x: np.ndarray) -> np.ndarray:
        """x as its operand sees it."""
        return x[:, : HEADS * self.cols].reshape(len(x), HEADS, self.cols)

    def empty(self, *shape: int) -> np.ndarray:
        return np.zeros(shape, TYPES[self.dtype])

    def expected(self, given: list[np.ndarray]) -> np.ndarray:
        """(n, HEADS, D) in float64."""
        x, *rest = (each.astype(np.float64) for each in given)
        x = self.heads(x)
        if self.kind == "layer":
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * rest[0] + rest[1]
        else:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * rest[0]
        if not self.turns:
            return x if self.turn == "copy" else x[..., ::-1]
        cos, sin = (each[:, None] for each in rest[-2:])
        half = self.cols // 2
        if self.turn == "halves":
            other = np.concatenate([-x[..., half:], x[..., :half]], -1)
        else:
            other = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        return x * cos + other * sin


def cases(quick: bool) -> list[Case]:
    """Heads of the usual sizes and of odd ones, with every way in which a warp finds what an element reads."""
    short = [
        Case(64, "f32", "halves", "rms"), Case(128, "bf16", "halves", "rms"), Case(80, "f32", "halves", "rms"),
        Case(128, "f32", "pairs", "rms"), Case(16, "bf16", "halves", "rms"), Case(6, "f32", "pairs", "layer"),
        Case(75, "bf16", "copy", "rms"), Case(33, "f32", "reversed", "layer"), Case(257, "f32", "copy", "rms"),
        Case(1100, "bf16", "copy", "layer"),
    ]  # fmt: skip
    if quick:
        return short
    turned = [(d, turn) for d in (2, 10, 64, 80, 96, 128, 256) for turn in ("halves", "pairs")]
    every = [*turned, *((d, turn) for d in (2, 33, 75, 255) for turn in ("copy", "reversed"))]
    every += [(d, "copy") for d in (257, 512, 513, 1100, 3072, 8192)]
    return [Case(d, dtype, turn, kind) for d, turn in every for dtype in TYPES for kind in ("rms", "layer")]


SHORT = cases(quick=True)
