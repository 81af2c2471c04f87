"""Files that reproduce a failing pass: the IR before it, and everything else that the pass reads.

    qc opt -p plan-memory …/before-plan-memory.mlir --context …/context.safetensors
    qc reduce …/before-plan-memory.mlir            # shrinks it

A report lies beside them (runtime/failure_report.py).  The command names the pass with its options.  IR holds no
weights.  The context file holds their directory, the target and the devices as JSON, and the bytes of plain weights up
to `LARGEST_KEPT`, since passes compute with those (stored masks, position tables).  Larger weights and packed weights
are read back as zeros: passes only move them.  Where the failure is a wrong answer, the file also holds the inputs that
showed it, and the bytes of weights up to `LARGEST_WITH_SAMPLES`.
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler import formats
from qcompiler.errors import FormatError, PassError, PlanError
from qcompiler.ir.context import Decision, QCContext, Target
from qcompiler.ir.text import print_module
from qcompiler.plan.kernel import ITEMSIZE, DType, FormatRef
from qcompiler.plan.plan import WeightPart
from qcompiler.plan.weights import DTYPE_NAMES, NUMPY_DTYPES, StoredTensor, WeightStore
from qcompiler.runtime.failure_report import write_report

LARGEST_KEPT = 1 << 20
"""Size limit in bytes of a plain weight whose values the context file holds."""
LARGEST_WITH_SAMPLES = 64 << 20
"""The same for any weight, where the failure is a wrong answer: a vocabulary of 32,000 rows of 4,096 in 4 bits."""
_SAMPLE = "sample/"
MAX_ELEMENTS = 1 << 40

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
_REFUSED = (
    OSError, ValueError, KeyError, SafetensorError, msgspec.MsgspecError, RecursionError, FormatError, PlanError,
    MemoryError,
)  # fmt: skip
"""Errors of a damaged or inconsistent file: those of safetensors and msgspec, and our own. MemoryError: a weight's
zeros are as large as the model's weight was."""


@dataclass(frozen=True)
class Reproducer:
    """How to repeat a failure: `repeat` makes the IR before the pass `failing`, and its context; `start` is the IR
    before all passes. A failure that only shows in numbers needs the inputs and the states that showed it."""

    repeat: Callable[[], tuple[ModuleOp, QCContext]]
    start: ModuleOp
    failing: ModulePass
    samples: Samples | None = None


def write_reproducer(wanted: Reproducer, error: BaseException, decisions: Sequence[Decision] = ()) -> str:
    """Writes a folder with the IR before the failing pass (`start` if it cannot be made again), its context and a
    report. Returns the path of the IR file."""
    folder = Path(tempfile.mkdtemp(prefix="qc-reproducer-"))
    path, option = folder / f"before-{wanted.failing.name}.mlir", ""
    try:
        module, ctx = wanted.repeat()
        text = print_module(module)
        write_context(ctx, folder / "context.safetensors", wanted.samples)
        option = f" --context {folder / 'context.safetensors'}"
    except Exception as second:  # the reproducer must not hide the original error
        text = f"// the stages before could not be repeated: {second}\n{print_module(wanted.start)}"
    option += " --verify-each numerics" if wanted.samples is not None else ""
    command = f"qc opt -p {shlex.quote(str(wanted.failing))} {path}{option}"
    path.write_text(f"// RUN: {command}\n{text}\n")
    shrink = [f"repeat     {command}", f"shrink     qc reduce {path}"]
    taken = [f"  {each.stage}: {each.what}  [{each.path}] {each.why}".rstrip() for each in decisions]
    write_report(folder, error, [*shrink, "", "Decisions before the failure", *taken])
    return str(path)


@dataclass(frozen=True)
class Samples:
    """Inputs of the entry points, and states by key, with which a wrong answer shows."""

    inputs: tuple[npt.NDArray[Any], ...]
    states: Mapping[str, npt.NDArray[Any]]


def write_context(ctx: QCContext, path: Path, samples: Samples | None = None) -> None:
    """The context's weight directory, target and devices as one file; with samples also those, and the bytes of all
    weights up to `LARGEST_WITH_SAMPLES`, packed ones too, as wrong numbers may need the right ones."""
    limit = LARGEST_KEPT if samples is None else LARGEST_WITH_SAMPLES
    kept = {
        t.key: t.data
        for t in ctx.weights
        if t.valued and t.nbytes <= limit and (samples is not None or t.format is None)
    }
    given = {} if samples is None else _named(samples)
    facts = {
        "target": [ctx.target.kind, *ctx.target.isas],
        "devices": list(ctx.devices),
        "device_map": ctx.device_map,
        "weights": [_facts(tensor) for tensor in ctx.weights],
        "samples": None if samples is None else {name: _array_facts(value) for name, value in given.items()},
    }
    stored = kept | {
        f"{_SAMPLE}{name}": np.ascontiguousarray(v).reshape(-1).view(np.uint8) for name, v in given.items()
    }
    save_file({key: np.ascontiguousarray(data) for key, data in stored.items()}, path, {"qcompiler": json.dumps(facts)})


def _named(samples: Samples) -> dict[str, npt.NDArray[Any]]:
    """Each sample under the name that it has in a file."""
    inputs = {f"input.{number}": value for number, value in enumerate(samples.inputs)}
    return inputs | {f"state.{key}": value for key, value in samples.states.items()}


def _array_facts(value: npt.NDArray[Any]) -> dict[str, Any]:
    return {"dtype": DTYPE_NAMES[value.dtype], "shape": value.shape}


class _Weight(msgspec.Struct):
    key: str
    dtype: DType
    shape: tuple[_Size, ...]
    nbytes: _Size
    format: tuple[str, dict[str, int | bool | str]] | None
    layout: str
    parameters: tuple[str, ...]
    parts: tuple[tuple[_Size, tuple[str, ...]], ...] = ()


class _Array(msgspec.Struct):
    dtype: DType
    shape: tuple[_Size, ...]


class _Context(msgspec.Struct):
    """What `write_context` writes."""

    target: Annotated[list[str], msgspec.Meta(min_length=2)]
    devices: tuple[str, ...]
    device_map: dict[str, str]
    weights: list[_Weight]
    samples: dict[str, _Array] | None = None


def read_context(path: Path) -> QCContext:
    """The context that `write_context` wrote. PassError if the file is something else."""
    return read_all(path)[0]


def read_all(path: Path) -> tuple[QCContext, Samples | None]:
    """The context and the samples that `write_context` wrote. PassError if the file is something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            facts = msgspec.json.decode((file.metadata() or {}).get("qcompiler", ""), type=_Context, strict=True)
            kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        store = WeightStore()
        for weight in facts.weights:
            store.add(_tensor(weight, kept))
        samples = _samples(facts.samples, kept)
    except _REFUSED as error:
        what = str(error)[:500]
        raise PassError(f"'{path}' is not the context file of a reproducer: {what}", stage="opt") from error
    ctx = QCContext.default(
        weights=store,
        target=Target(facts.target[0], facts.target[1], tuple(facts.target[2:])),
        devices=facts.devices,
        device_map=facts.device_map,
    )
    return ctx, samples


def _samples(facts: dict[str, _Array] | None, kept: Mapping[str, Any]) -> Samples | None:
    """ValueError or KeyError if an array is missing or has another size."""
    if facts is None:
        return None
    arrays = {
        name: kept[f"{_SAMPLE}{name}"].view(NUMPY_DTYPES[each.dtype]).reshape(each.shape)
        for name, each in facts.items()
    }
    count = sum(name.startswith("input.") for name in arrays)
    inputs = tuple(arrays[f"input.{number}"] for number in range(count))
    return Samples(inputs, {k.removeprefix("state."): v for k, v in arrays.items() if k.startswith("state.")})


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
