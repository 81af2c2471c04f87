"""What `select-kernels` reports about CUDA engines: the chosen one and why not the others, for each architecture.

    select-kernels: engines on sm_75: M class 1: few rows, CUDA cores; large: CUDA cores  [model.layers.0.mlp.up_proj]
        few rows, tensor cores: bf16 mma: sm_80; tensor cores: bf16 mma: sm_80

kernels/cuda/engines.py takes the decision, for this report and for `emit-kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec
from xdsl.ir import Attribute, Operation

from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor_dtype
from qcompiler.kernels.cuda import engines
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.kernels.cuda.weights import LAYOUT, Weight, weight_of
from qcompiler.plan.kernel import DType, FormatRef, Operand


def report_engines(
    op: Operation, context: QCContext, candidates: tuple[engines.Engine, ...], facts: Mapping[str, engines.Facts]
) -> None:
    """One line for each architecture of an op that has several engines: by name, the facts that one kernel is chosen
    from."""
    for arch in context.target.isas:
        made = {name: engines.choose(candidates, each, arch_number(arch)) for name, each in facts.items()}
        what = "; ".join(f"{name}: {decision.engine.name}" for name, decision in made.items())
        reasons = (f"{name}: {d.why_not}" if len(made) > 1 else d.why_not for name, d in made.items())
        context.report.add("select-kernels", path_of(op), f"engines on {arch}: {what}", "; ".join(reasons))


def engine_weight(type_: Attribute, *, in_tiles: bool) -> Weight:
    """What engines ask of a weight; `in_tiles` says that it lies in the target's layout."""
    rows, cols = (int(n) for n in shape_of(type_))
    ref = type_.format.ref if isinstance(type_, QTensorType) else None
    return _weight_of(tensor_dtype(type_), rows, cols, msgspec.json.encode(ref), in_tiles=in_tiles)


@functools.lru_cache(maxsize=256)
def _weight_of(dtype: DType, rows: int, cols: int, format_json: bytes, *, in_tiles: bool) -> Weight:
    ref = msgspec.json.decode(format_json, type=FormatRef | None)
    layout = LAYOUT if in_tiles or ref is not None else None
    return weight_of("w", Operand(name="w", dtype=dtype, access="r", shape=(rows, cols), format=ref, layout=layout))
