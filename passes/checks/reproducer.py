"""Files that reproduce a failing pass: the IR before it, and everything else that the pass reads.

    qc opt -p plan-memory …/before-plan-memory.mlir --context …/context.safetensors

The command names the pass with its options. IR holds no weights. The context file holds their directory, the target and
the devices as JSON, and the bytes of plain weights up to `LARGEST_KEPT`, since passes compute with those (stored masks,
position tables). Larger weights and packed weights are read back as zeros: passes only move them.
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler import formats
from qcompiler.errors import FormatError, PassError, PlanError
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.text import print_module
from qcompiler.plan.kernel import ITEMSIZE, DType, FormatRef
from qcompiler.plan.plan import WeightPart
from qcompiler.plan.weights import StoredTensor, WeightStore

LARGEST_KEPT = 1 << 20
"""Size limit in bytes of a plain weight whose values the context file holds."""
MAX_ELEMENTS = 1 << 40

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
_REFUSED = (
    OSError, ValueError, SafetensorError, msgspec.MsgspecError, RecursionError, FormatError, PlanError, MemoryError,
)  # fmt: skip
"""Errors of a damaged or inconsistent file: those of safetensors and msgspec, and our own. MemoryError: a weight's
zeros are as large as the model's weight was."""


def write_reproducer(repeat: Callable[[], tuple[ModuleOp, QCContext]], start: ModuleOp, failing: ModulePass) -> str:
    """Writes the IR that `repeat` produces (`start` if it fails too) and its context. Returns the path of the IR
    file."""
    folder = Path(tempfile.mkdtemp(prefix="qc-reproducer-"))
    path, option = folder / f"before-{failing.name}.mlir", ""
    try:
        module, ctx = repeat()
        text = print_module(module)
        write_context(ctx, folder / "context.safetensors")
        option = f" --context {folder / 'context.safetensors'}"
    except Exception as error:  # the reproducer must not hide the original error
        text = f"// the stages before could not be repeated: {error}\n{print_module(start)}"
    path.write_text(f"// RUN: qc opt -p {shlex.quote(str(failing))} {path}{option}\n{text}\n")
    return str(path)


def write_context(ctx: QCContext, path: Path) -> None:
    """The context's weight directory, target and devices as one file."""
    kept = {t.key: t.data for t in ctx.weights if t.valued and t.format is None and t.nbytes <= LARGEST_KEPT}
    facts = {
        "target": [ctx.target.kind, *ctx.target.isas],
        "devices": list(ctx.devices),
        "device_map": ctx.device_map,
        "weights": [_facts(tensor) for tensor in ctx.weights],
    }
    save_file({key: np.ascontiguousarray(data) for key, data in kept.items()}, path, {"qcompiler": json.dumps(facts)})


class _Weight(msgspec.Struct):
    key: str
    dtype: DType
    shape: tuple[_Size, ...]
    nbytes: _Size
    format: tuple[str, dict[str, int | bool | str]] | None
    layout: str
    parameters: tuple[str, ...]
    parts: tuple[tuple[_Size, tuple[str, ...]], ...] = ()


class _Context(msgspec.Struct):
    """What `write_context` writes."""

    target: Annotated[list[str], msgspec.Meta(min_length=2)]
    devices: tuple[str, ...]
    device_map: dict[str, str]
    weights: list[_Weight]


def read_context(path: Path) -> QCContext:
    """The context that `write_context` wrote. PassError if the file is something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            facts = msgspec.json.decode((file.metadata() or {}).get("qcompiler", ""), type=_Context, strict=True)
            kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        store = WeightStore()
        for weight in facts.weights:
            store.add(_tensor(weight, kept))
    except _REFUSED as error:
        what = str(error)[:500]
        raise PassError(f"'{path}' is not the context file of a reproducer: {what}", stage="opt") from error
    return QCContext.default(
        weights=store,
        target=Target(facts.target[0], facts.target[1], tuple(facts.target[2:])),
        devices=facts.devices,
        device_map=facts.device_map,
    )


def _facts(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "key": tensor.key,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "nbytes": tensor.nbytes,
        "format": None if tensor.format is None else [tensor.format.name, tensor.format.params],
        "layout": tensor.layout,
        "parameters": tensor.parameters,
        "parts": [[part.rows, part.parameters] for part in tensor.parts],
    }


def _tensor(facts: _Weight, kept: dict[str, Any]) -> StoredTensor:
    """Rebuilds a stored tensor. ValueError or FormatError if the sizes disagree, since zeros are allocated by shape."""
    shape, fmt = facts.shape, None if facts.format is None else formats.get(facts.format[0], **facts.format[1])
    elements = math.prod(shape)
    plain = fmt is None and facts.layout == "canonical"
    if (
        elements > MAX_ELEMENTS
        or facts.nbytes > 8 * MAX_ELEMENTS
        or (plain and facts.nbytes != elements * ITEMSIZE[facts.dtype])
    ):
        raise ValueError(f"the weight {facts.key[:100]!r} has {facts.nbytes} bytes for {list(shape)} of {facts.dtype}")
    data = kept.get(facts.key)
    if data is not None and (data.dtype != np.uint8 or data.size != facts.nbytes):
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if data.size != facts.nbytes:
            raise ValueError(f"the weight {facts.key[:100]!r} has {data.size} bytes, and {facts.nbytes} are said")
    return StoredTensor(
        facts.key,
        facts.dtype,
        shape,
        data if data is not None else np.zeros(facts.nbytes, np.uint8),
        format=None if facts.format is None else FormatRef(*facts.format),
        layout=facts.layout,
        parameters=facts.parameters,
        parts=tuple(WeightPart(rows, parameters) for rows, parameters in facts.parts),
    )
