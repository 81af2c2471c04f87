"""What `select-kernels` reports of CUDA engines: the chosen one and why not the others, for each architecture.

    select-kernels: engines on sm_75: M class 1: few rows, CUDA cores; large: CUDA cores  [model.layers.0.mlp.up_proj]
        few rows, tensor cores: bf16 mma: sm_80; tensor cores: bf16 mma: sm_80

The decision is kernels/cuda/engines.py's, which `emit-kernels` follows as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec
from xdsl.ir import Attribute, Operation

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor_dtype
from qcompiler.kernels.cuda import attention, engines, grouped_linear, linear
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.kernels.cuda.weights import LAYOUT, Weight, weight_of
from qcompiler.passes.views.windows import windows_of
from qcompiler.plan.kernel import DType, FormatRef, Operand
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

Decide = Callable[[int], engines.Decision]


def report_engines(op: Operation, context: QCContext, classes: Sequence[str], *, constant: bool) -> None:
    """One line per architecture for an op that has several engines; `classes` are a linear's, and `constant` says that
    its weight lies in the target's layout."""
    if context.target.kind != "cuda":
        return
    candidates: tuple[engines.Engine, ...]
    if isinstance(op, qc.LinearOp):
        weight, dtype = _weight(op.w.type, in_tiles=constant), tensor_dtype(op.x.type)
        windows = windows_of(op.x) is not None
        facts = {f"M class {c}": linear.facts_of(dtype, weight, c, windows=windows) for c in classes}
        candidates = linear.ENGINES
    elif isinstance(op, qc.GroupedLinearOp):
        weight, experts = _weight(op.w.type, in_tiles=constant), op.experts.value.data
        body = GroupedLinearKernel(
            rows=shape_of(op.x.type)[0], repeat=op.repeat.value.data, experts=experts, n=weight.rows // experts,
            k=weight.cols,
        )  # fmt: skip
        facts = {"grouped_linear": grouped_linear.facts_of(tensor_dtype(op.x.type), weight, body)}
        candidates = grouped_linear.ENGINES
    elif isinstance(op, qc.AttentionOp):
        q, v = shape_of(op.q.type), shape_of(op.v.type)
        types = (tensor_dtype(op.q.type), tensor_dtype(op.k.type), tensor_dtype(op.v.type))
        facts = {"attention": engines.attention_facts(types, q[2], int(q[3]), int(v[3]))}
        candidates = attention.ENGINES
    else:
        return
    for arch in context.target.isas:
        made = {name: engines.choose(candidates, each, arch_number(arch)) for name, each in facts.items()}
        what = "; ".join(f"{name}: {decision.engine.name}" for name, decision in made.items())
        reasons = (f"{name}: {d.why_not}" if len(made) > 1 else d.why_not for name, d in made.items())
        context.report.add("select-kernels", path_of(op), f"engines on {arch}: {what}", "; ".join(reasons))


def _weight(type_: Attribute, *, in_tiles: bool) -> Weight:
    rows, cols = (int(n) for n in shape_of(type_))
    ref = type_.format.ref if isinstance(type_, QTensorType) else None
    return _weight_of(tensor_dtype(type_), rows, cols, msgspec.json.encode(ref), in_tiles=in_tiles)


@functools.lru_cache(maxsize=256)
def _weight_of(dtype: DType, rows: int, cols: int, format_json: bytes, *, in_tiles: bool) -> Weight:
    ref = msgspec.json.decode(format_json, type=FormatRef | None)
    layout = LAYOUT if in_tiles or ref is not None else None
    return weight_of("w", Operand(name="w", dtype=dtype, access="r", shape=(rows, cols), format=ref, layout=layout))
