"""What repeats a failing pass: the IR before it, and beside it the rest of what the pass reads.

    qc opt -p plan-memory …/before-plan-memory.mlir --context …/context.safetensors

IR holds no weights.  The context file holds their directory, the target, the devices and the buckets as JSON, and the
bytes of plain weights up to `LARGEST_KEPT`, since passes compute with those (stored masks, position tables).  Larger
and packed weights are zeros when they are read back: passes only move them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from xdsl.dialects.builtin import ModuleOp

from qcompiler.errors import PassError
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.text import print_module
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.weights import StoredTensor, WeightStore

LARGEST_KEPT = 1 << 20
"""Bytes of a plain weight that the context file holds by value."""


def write_reproducer(repeat: Callable[[], tuple[ModuleOp, QCContext]], start: ModuleOp, failing: str) -> str:
    """Writes the IR that `repeat` leaves (`start` if it fails, too) and its context; the path of the IR file."""
    folder = Path(tempfile.mkdtemp(prefix="qc-reproducer-"))
    path, option = folder / f"before-{failing}.mlir", ""
    try:
        module, ctx = repeat()
        text = print_module(module)
        write_context(ctx, folder / "context.safetensors")
        option = f" --context {folder / 'context.safetensors'}"
    except Exception as error:  # the reproducer must not hide the error it is made for
        text = f"// the stages before could not be repeated: {error}\n{print_module(start)}"
    path.write_text(f"// RUN: qc opt -p {failing} {path}{option}\n{text}\n")
    return str(path)


def write_context(ctx: QCContext, path: Path) -> None:
    """The context's weight directory, target, devices and buckets as one file."""
    kept = {t.key: t.data for t in ctx.weights if t.valued and t.format is None and t.nbytes <= LARGEST_KEPT}
    facts = {
        "target": [ctx.target.kind, *ctx.target.isas],
        "devices": list(ctx.devices),
        "device_map": ctx.device_map,
        "buckets": ctx.options.get("buckets"),
        "compute-streams": ctx.options.get("compute-streams"),
        "weights": [_facts(tensor) for tensor in ctx.weights],
    }
    save_file({key: np.ascontiguousarray(data) for key, data in kept.items()}, path, {"qcompiler": json.dumps(facts)})


def read_context(path: Path) -> QCContext:
    """The context that `write_context` wrote. PassError if the file is something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            facts: dict[str, Any] = json.loads((file.metadata() or {})["qcompiler"])
            kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise PassError(f"'{path}' is not the context file of a reproducer: {error}", stage="opt") from error
    store = WeightStore()
    for weight in facts["weights"]:
        store.add(_tensor(weight, kept))
    ctx = QCContext.default(
        weights=store,
        target=Target(facts["target"][0], facts["target"][1], tuple(facts["target"][2:])),
        devices=tuple(facts["devices"]),
        device_map=facts["device_map"],
    )
    if facts["buckets"] is not None:
        ctx.options["buckets"] = [(name, {s: tuple(r) for s, r in sizes.items()}) for name, sizes in facts["buckets"]]
    if facts.get("compute-streams") is not None:
        ctx.options["compute-streams"] = facts["compute-streams"]
    return ctx


def _facts(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "key": tensor.key,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "nbytes": tensor.nbytes,
        "format": None if tensor.format is None else [tensor.format.name, tensor.format.params],
        "layout": tensor.layout,
        "parameters": tensor.parameters,
    }


def _tensor(facts: dict[str, Any], kept: dict[str, Any]) -> StoredTensor:
    data = kept.get(facts["key"])
    return StoredTensor(
        facts["key"],
        facts["dtype"],
        tuple(facts["shape"]),
        data if data is not None else np.zeros(facts["nbytes"], np.uint8),
        format=None if facts["format"] is None else FormatRef(*facts["format"]),
        layout=facts["layout"],
        parameters=tuple(facts["parameters"]),
    )
