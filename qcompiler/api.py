"""`qcompile` on one page: frontend, pipeline, program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qcompiler.errors import (
    ArgumentError,
    DeviceUnavailableError,
    RecipeError,
    TargetMismatchError,
    UnsupportedOperatorError,
)
from qcompiler.inspect.dumps import StageDumps
from qcompiler.inspect.report import Choice
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.text import print_module
from qcompiler.program import Program, make_image
from qcompiler.runtime.isa import resolve_isa

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from qcompiler.config import QuantConfig

Buckets = Sequence[tuple[str, Mapping[str, tuple[int, int]]]]


def qcompile(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    quant: str | QuantConfig | None = None,
    dynamic_shapes: Any = None,
    calibrate: Iterable[Any] | None = None,
    device: str | None = None,
    targets: Sequence[str] | None = None,
    fallback: Literal["torch"] | None = None,
    dump_ir: str | Path | None = None,
    verify_each: Literal["ir", "numerics"] | None = None,
    buckets: Buckets | None = None,
) -> Program:
    """Quantises a PyTorch model and compiles it to a program.

    `model` is an nn.Module, an ExportedProgram or an fx.GraphModule; `args` and `kwargs` are example inputs.
    `quant` is a format's name ("nf4", "int8", "int4"), a `QuantConfig`, or None for float.  `dynamic_shapes` names
    dimensions with their ranges, `{"input_ids": {0: ("b", 1, 64), 1: ("s", 1, 512)}}`, or is what torch.export takes.
    `targets` are instruction sets ("x86-64-v4"); the default is this machine's.  `dump_ir` (or QC_DUMP_IR) is a folder
    that gets the text of every stage.  `verify_each="numerics"` runs the program after every pass and names the pass
    that changed the answer.  `buckets` are entry points to specialise for, `[("decode", {"s": (1, 1)})]`.
    `calibrate`, `fallback` and any `device` but the CPU are refused in this release.

    Raises subclasses of `QCompilerError`, each naming the module path, the op and the way out.
    """
    if calibrate is not None:
        raise RecipeError("no format of this release uses calibration data; leave `calibrate` out")
    if device not in (None, "cpu"):
        raise DeviceUnavailableError(f"this release compiles for the CPU only, not for '{device}'; leave `device` out")
    if fallback is not None:
        raise UnsupportedOperatorError(
            f"fallback={fallback!r}: no runtime of this release can run torch operators, so every operator needs a "
            "lowering; leave `fallback` out, and an operator without one is named with its line"
        )
    if verify_each not in (None, "ir", "numerics"):
        raise ArgumentError(f"verify_each={verify_each!r}: choose 'ir', 'numerics' or None")
    isa = _one_target(targets)

    from qcompiler.frontends.torch_frontend import import_torch

    directory = dump_ir if dump_ir is not None else os.environ.get("QC_DUMP_IR")
    dumps = StageDumps(directory or None)
    imported = import_torch(model, args, kwargs, quant=quant, dynamic_shapes=dynamic_shapes)
    for name, text in imported.texts.items():
        stage = name.partition("-")[2]
        dumps.add(stage, text, imported.seconds[stage], "txt")
    dumps.add("import", print_module(imported.module), imported.seconds["import"])

    context = QCContext.default(weights=imported.weights, target=Target("cpu", isa))
    if buckets is not None:
        context.options["buckets"] = list(buckets)
    samples = imported.sample_inputs() if verify_each == "numerics" else None
    run_stages(imported.module, context, dumps, verify_each, samples, imported.states)
    image = make_image(context, imported, isa, dumps)
    choices = [Choice(d.stage, d.path, d.what, d.why) for d in context.report.decisions]
    return Program(image, dumps, choices, imported)


def run_stages(
    module: ModuleOp,
    context: QCContext,
    dumps: StageDumps,
    verify_each: Literal["ir", "numerics"] | None = None,
    sample_inputs: Sequence[Any] | None = None,
    sample_states: Mapping[str, Any] | None = None,
) -> None:
    """The passes in order, with a dump after each; the plan and the source are left in `context.options`."""
    from qcompiler.passes.emit_kernels import SOURCE
    from qcompiler.passes.pipeline import run_pipeline

    def on_stage(name: str, current: ModuleOp, seconds: float) -> None:
        if name == "emit-kernels":
            dumps.add(name, str(context.options[SOURCE]), seconds, "cpp")
        else:
            dumps.add(name, print_module(current), seconds)

    run_pipeline(
        module,
        context,
        on_stage=on_stage,
        verify_each=verify_each,
        sample_inputs=sample_inputs,
        sample_states=sample_states,
    )


def _one_target(targets: Sequence[str] | None) -> str:
    """The instruction set to compile for: this machine's, or the one asked for if this machine can run it."""
    if not targets:
        return resolve_isa(None)
    if len(targets) > 1:
        raise TargetMismatchError(
            "this release stores one native build; give one target, or save with layout='canonical'"
        )
    return resolve_isa(targets[0])
