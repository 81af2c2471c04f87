"""`qcompile` on one page: frontend, pipeline, program."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qcompiler.config import QuantConfig
from qcompiler.device_map import Devices, Placement, check_paths, common_architecture, place
from qcompiler.errors import (
    ArgumentError,
    ArgumentStructureError,
    DeviceUnavailableError,
    ExportError,
    TargetMismatchError,
)
from qcompiler.frontends.common.doors import is_jax_call, is_mlir, is_plain_function
from qcompiler.frontends.common.imported import FRONTEND_STAGES, Imported
from qcompiler.inspect.dumps import StageDumps, print_after_of
from qcompiler.inspect.report import Choice
from qcompiler.inspect.stage_answers import StagesAgain
from qcompiler.inspect.upstream import STAGE
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.text import print_module
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.program import Program, make_image
from qcompiler.runtime.backends import registry
from qcompiler.runtime.isa import buildable_isas, resolve_isa, runnable_isas
from qcompiler.runtime.progress import OnStep, Stages, stage
from qcompiler.units import counted

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from qcompiler.frontends.weights.weight_source import WeightSource
    from qcompiler.plan.weights import WeightStore

KERNELS = "compile-kernels"
"""The name under which `progress` reports the host's compiler, or NVRTC: the stage behind the pipeline's."""

Buckets = Sequence[tuple[str, Mapping[str, tuple[int, int]]]]


def qcompile(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    quant: str | QuantConfig | None = None,
    dynamic_shapes: Any = None,
    calibrate: Iterable[Any] | None = None,
    device: Devices | None = None,
    targets: Sequence[str] | None = None,
    fallback: Literal["torch"] | None = None,
    dump_ir: str | Path | None = None,
    print_after: str | None = None,
    verify_each: Literal["ir", "numerics"] | None = None,
    buckets: Buckets | None = None,
    weights: str | Path | WeightSource | None = None,
    workdir: str | Path | None = None,
    progress: OnStep | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Program:
    """Quantises a model of PyTorch or a function of JAX and compiles it to a program.

    `model` is an nn.Module, an ExportedProgram, an fx.GraphModule, or a `Checkpoint` (`qc.from_gguf`,
    `qc.from_checkpoint`), which has a module and its weights; or a jittable function of JAX, whose first argument holds
    the weights, `qcompile(f, (params, x))`, called without them, `prog(x)`; or a text of MLIR, `qc.from_mlir`, which
    needs no example inputs (docs/doors.md).  `args` and `kwargs` are example inputs.
    `quant` is a format's name ("nf4", "int4:group=64"), the name of a file of a recipe ("recipe.toml", as `qc.search`
    saves it), a `QuantConfig`, or None for float.  `dynamic_shapes` names
    dimensions with their ranges, `{"input_ids": {0: ("b", 1, 64), 1: ("s", 1, 512)}}`, or is an argument of
    torch.export.
    `device` is where the program runs: "cpu", "cuda:0", or "sim:0", the simulated GPU.  The default is the device of
    the model's parameters.  A map from module paths places a model on several GPUs,
    `{"model.layers.1": "cuda:1", "": "cuda:0"}` (docs/runtime.md): the longest path wins; "" is everything else, and
    its device takes arguments and returns results.
    `targets` holds instruction sets (["x86-64-v3", "x86-64-v4"]) or GPU architectures (["sm_80", "sm_90a"]); `save`
    stores a native build for each, and the program runs the best one that the device supports.  The default is the
    device's own.  With `targets`, a machine can compile and save a program that it cannot run.
    QC_COMPUTE_STREAMS is the maximum number of streams for a GPU's kernels (default 4; 1: no overlap).
    `dump_ir` (or QC_DUMP_IR) is a folder for the text of every stage.  `print_after` (or QC_PRINT_AFTER) prints it to
    stderr after the stages that it names, "import,dce", after "all", or after each "change".
    `verify_each="numerics"` runs the program after every pass and names the pass that changed the answer.  `buckets`
    are entry points to specialise for, `[("decode", {"s": (1, 1)})]`.

    `weights` is the source of values: None (the model's own parameters), a safetensors file or a folder of shards (or
    `qc.Shards(path, …)`), read one tensor at a time, or "none" (no values: the program has a plan, IR, sizes and a
    report, and cannot run or be saved).  With a folder or "none" the model may have been built under
    `qc.empty_weights()`: its parameters take no memory.  Codes in a checkpoint are stored as they are; `quant` applies
    to the weights that it holds in floating point.  `workdir` is a folder for packed weights, in which a killed
    compile can continue.  docs/large-models.md gives the memory that each way takes.

    `donate_argnums` are the numbers of arguments of a function of JAX that it returns with the same shapes and types (a
    cache): they become states of the program, which is called without them.  What a jitted function donates itself
    stays an argument unless it is named here; the report has a note.

    `calibrate` is an iterable of inputs (each a tensor, a tuple of arguments, or a dict of keywords).  The float model
    runs over them, one at a time, and the statistics of linears' inputs weight the errors when weights are encoded in
    formats that search for their scales (`takes_importance`: the k-quants and most others of GGUF); codes by
    `algorithm="gptq"` and static scales of activations take them, too.  With `workdir` calibration of a model of torch
    continues after a kill.

    `progress` is called at the beginning of each stage with a `Step`: `stage`, `number`, `of`, `seconds`.
    `progress=print` works, and an exception from it ends the compile.  Without `progress`, a compile of more than two
    seconds prints its stages to stderr, unless QC_QUIET is set.

    `fallback="torch"` runs operators without a lowering in torch; the rest is compiled.  The report lists them with
    the reasons.  Such a program needs torch wherever it runs, and cannot be captured (docs/fallback.md).

    Raises subclasses of `QCompilerError`, each naming the module path, the op and the way out.
    """
    if fallback not in (None, "torch"):
        raise ArgumentError(f"fallback={fallback!r}: choose 'torch', or None to have every operator compiled")
    quant = QuantConfig.of(quant) if isinstance(quant, str) else quant  # reads a file once
    mlir = model if is_mlir(model) else None
    if mlir is not None and mlir.dialect == "torch":
        from qcompiler.frontends.mlir.torch_dialect import torch_program

        check_mlir(mlir, kwargs, weights, donate_argnums)
        model, args, dynamic_shapes = torch_program(mlir, args, dynamic_shapes)
        mlir = None
    is_function = mlir is None and is_jax_call(model, args, kwargs)
    if mlir is None and not is_function:
        check_call(model, args, kwargs)
    check_buckets(buckets)
    if verify_each not in (None, "ir", "numerics"):
        raise ArgumentError(f"verify_each={verify_each!r}: choose 'ir', 'numerics' or None")
    if is_function or mlir is not None:
        if mlir is not None:
            check_mlir(mlir, kwargs, weights, donate_argnums)
        check_function(weights, fallback)
        return _compile_function(
            model, args, kwargs, quant=quant, dynamic_shapes=dynamic_shapes, calibrate=calibrate, device=device,
            targets=targets, dump_ir=dump_ir, print_after=print_after, verify_each=verify_each, buckets=buckets,
            valued=weights != "none", workdir=workdir, progress=progress, donate_argnums=donate_argnums,
        )  # fmt: skip
    if donate_argnums is not None:
        raise ArgumentError("donate_argnums: a model of torch has states in its buffers; leave `donate_argnums` out")
    model, weights = _of_checkpoint(model, weights)
    source = weight_source(weights)
    if not source.valued and verify_each == "numerics":
        raise ArgumentError('verify_each="numerics" runs the program, which weights="none" leaves without values')
    placement = place(device if device is not None else _home(model))
    target = compile_target(placement.devices, targets)

    from qcompiler.frontends.quantise.calibrate import Calibration
    from qcompiler.frontends.torch.frontend import import_torch
    from qcompiler.frontends.weights.workdir import WorkFolder
    from qcompiler.passes.pipeline import STAGES

    directory = dump_ir if dump_ir is not None else os.environ.get("QC_DUMP_IR")
    dumps = StageDumps(directory or None, stages_to_print(print_after), all_stages())
    files = WorkFolder(workdir) if workdir is not None and source.valued else None
    calibration = None if calibrate is None else Calibration(calibrate, files.path if files is not None else None)
    with Stages(len(FRONTEND_STAGES) + len(STAGES) + 1, progress):
        imported = import_torch(
            model, args, kwargs, quant=quant, dynamic_shapes=dynamic_shapes, weights=source, files=files,
            calibration=calibration, fallback=fallback,
        )  # fmt: skip
        return finish(
            imported, dumps, placement, target, quant=quant, verify_each=verify_each, buckets=buckets, targets=targets,
            paths=(path for path, _ in _modules(model)), inputs_seen=calibration.inputs_seen if calibration else None,
        )  # fmt: skip


def finish(
    imported: Imported,
    dumps: StageDumps,
    placement: Placement,
    target: Target,
    *,
    quant: str | QuantConfig | None,
    verify_each: Literal["ir", "numerics"] | None,
    buckets: Buckets | None,
    targets: Sequence[str] | None,
    paths: Iterable[str],
    inputs_seen: int | None = None,
) -> Program:
    """From the module that a frontend made to the program: nothing here knows which frontend it was.

    `paths` are the modules that a device map may name; `inputs_seen` counts the inputs of calibration.
    """
    for name, text in imported.texts.items():
        name_of = name.partition("-")[2]
        dumps.add(name_of, text, imported.seconds[name_of], "txt")
    dumps.add("import", print_module(imported.module), imported.seconds["import"])
    check_paths(placement, imported.module, paths)
    context = QCContext.default(
        weights=imported.weights, target=target, devices=placement.slots, device_map=placement.device_map
    )
    for what, why in imported.notes:
        context.report.add("export", "", what, why)
    data = counted(inputs_seen, "input") if inputs_seen is not None else ""
    for decided_in, path, what in imported.decisions:
        context.report.add(decided_in, path, what, data if decided_in != "insert-qdq" else "")
    for part in imported.torch_parts:
        context.report.add("import", part.path, f"torch runs {', '.join(part.operators)}", part.why)
    recipe = QuantConfig.of(quant)
    options = pass_options(buckets, _compute_streams(), recipe.separate, recipe.attention)
    samples = imported.sample_inputs() if verify_each == "numerics" else None
    again = StagesAgain(context.clone(), options)
    canonical = run_stages(imported.module, context, dumps, options, verify_each, samples, imported.states)
    image = make_image(context, imported, dumps)
    choices = [Choice(d.stage, d.path, d.what, d.why) for d in context.report.decisions]
    stage(KERNELS)
    return Program(
        image, dumps, choices, imported, placement, targets=target.isas if targets else (), canonical=canonical,
        buckets=buckets, again=again,
    )  # fmt: skip


def stages_to_print(print_after: str | None) -> frozenset[str]:
    """`print_after`, or QC_PRINT_AFTER, as names. ArgumentError for a name that is no stage."""
    return print_after_of(print_after, all_stages())


def all_stages() -> tuple[str, ...]:
    """The names of the stages of every compile, in order."""
    from qcompiler.passes.pipeline import STAGES

    return (*FRONTEND_STAGES, *(each.name for each in STAGES))


def check_function(weights: Any, fallback: Any) -> None:
    """ArgumentError for the arguments of `qcompile` that only models of torch have."""
    if weights not in (None, "none"):
        raise ArgumentError(
            f"weights={weights!r}: the weights of a function are the arrays of its first argument; pass them there, or "
            'weights="none" for a plan without values'
        )
    if fallback is not None:
        raise ArgumentError("fallback: torch runs operators of torch only; a function of JAX is compiled as a whole")


def _compile_function(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    quant: str | QuantConfig | None,
    dynamic_shapes: Any,
    calibrate: Iterable[Any] | None,
    device: Devices | None,
    targets: Sequence[str] | None,
    dump_ir: str | Path | None,
    print_after: str | None,
    verify_each: Literal["ir", "numerics"] | None,
    buckets: Buckets | None,
    valued: bool,
    workdir: str | Path | None,
    progress: OnStep | None,
    donate_argnums: int | Sequence[int] | None,
) -> Program:
    """`qcompile` for a jittable function of JAX, and for StableHLO and linalg of `from_mlir`."""
    if not valued and verify_each == "numerics":
        raise ArgumentError('verify_each="numerics" runs the program, which weights="none" leaves without values')
    placement = place(device if device is not None else "cpu")
    target = compile_target(placement.devices, targets)

    from qcompiler.frontends.jax.float_run import Calibration
    from qcompiler.frontends.weights.workdir import WorkFolder
    from qcompiler.passes.pipeline import STAGES

    directory = dump_ir if dump_ir is not None else os.environ.get("QC_DUMP_IR")
    dumps = StageDumps(directory or None, stages_to_print(print_after), all_stages())
    files = WorkFolder(workdir) if workdir is not None and valued else None
    calibration = None if calibrate is None else Calibration(calibrate)
    with Stages(len(FRONTEND_STAGES) + len(STAGES) + 1, progress):
        imported = _import_function(
            function, args, kwargs, quant, dynamic_shapes, valued, files, donate_argnums, calibration
        )
        paths = [row.parameters[0].rpartition(".")[0] for row in imported.ledger]
        return finish(
            imported, dumps, placement, target, quant=quant, verify_each=verify_each, buckets=buckets, targets=targets,
            paths=paths, inputs_seen=calibration.ran if calibration is not None else None,
        )  # fmt: skip


def _import_function(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    quant: str | QuantConfig | None,
    dynamic_shapes: Any,
    valued: bool,
    files: Any,
    donate_argnums: int | Sequence[int] | None,
    calibration: Any,
) -> Imported:
    if is_mlir(function):
        from qcompiler.frontends.mlir.frontend import import_mlir

        return import_mlir(function, args, quant, dynamic_shapes, valued, files, calibration)
    from qcompiler.frontends.jax.frontend import import_jax

    return import_jax(function, args, kwargs, quant, dynamic_shapes, valued, files, donate_argnums, calibration)


def check_mlir(model: Any, kwargs: Any, weights: Any, donate_argnums: Any) -> None:
    """ArgumentError for arguments of `qcompile` that a text of MLIR does not take."""
    if donate_argnums is not None:
        raise ArgumentError("donate_argnums: arguments of MLIR are not states; leave `donate_argnums` out")
    if kwargs:
        raise ArgumentError(
            f"kwargs={list(kwargs)}: example inputs of MLIR are positional, in the order of its arguments: "
            f"{', '.join(argument.name for argument in model.inputs)}"
        )
    if weights not in (None, "none"):
        raise ArgumentError(
            f"weights={weights!r}: the weights of a text are its constants, and arguments by name: "
            'qc.from_mlir(text, weights=…); here it may be "none", for a plan without values'
        )


def check_call(model: Any, args: Any, kwargs: Any) -> None:
    """Refuses a model or example arguments of an unsupported kind, and says what to write instead.

    ExportError for the model, ArgumentStructureError for the arguments.
    """
    if isinstance(model, type):
        raise ExportError(f"{model.__name__} is a class: make a model of it first, qcompile({model.__name__}(…), args)")
    if isinstance(model, str | os.PathLike):
        raise ExportError(
            f"{os.fspath(model)!r} is a path: qc.load reads a program, qc.from_gguf and qc.from_checkpoint read models"
        )
    if not isinstance(args, tuple | list):
        kind = type(args).__name__
        write = "kwargs={…}" if isinstance(args, Mapping) else "(x,): a tuple, also of one argument"
        raise ArgumentStructureError(
            f"args are the example's positional arguments, and a {kind} was given; write qcompile(model, {write})"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ArgumentStructureError(
            f"kwargs are the example's keyword arguments, a dict by name, and a {type(kwargs).__name__} was given"
        )
    if not args and not kwargs and is_plain_function(model):
        name = getattr(model, "__name__", type(model).__name__)
        raise ArgumentStructureError(
            f"'{name}' is a function, and no example arguments were given: write qcompile({name}, (params, x)), with "
            "its weights first"
        )
    if is_plain_function(model):
        name = getattr(model, "__name__", type(model).__name__)
        raise ExportError(
            f"'{name}' is a function, which is compiled through JAX, and its example arguments have tensors of torch: "
            "pass arrays of JAX or NumPy (tensor.numpy()). For PyTorch, give an nn.Module"
        )
    import torch

    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise ExportError(
            f"the model is TorchScript ({type(model).__name__}), which torch.export refuses: compile the nn.Module "
            "that it was made from, or an ExportedProgram of it"
        )
    forward = getattr(model, "forward", None)
    if isinstance(model, torch.nn.Module) and callable(forward):
        try:
            inspect.signature(forward).bind(*args, **(kwargs or {}))
        except TypeError as error:
            raise ArgumentStructureError(
                f"the example arguments do not fit {type(model).__name__}.forward: {error}; write "
                "qcompile(model, (x, …), kwargs={…}) as the model is called"
            ) from error


def check_buckets(buckets: Any) -> None:
    """ArgumentError unless buckets are pairs of a name and ranges by symbol."""
    if buckets is None:
        return
    listed = isinstance(buckets, list | tuple)
    pairs = listed and all(isinstance(b, tuple | list) and len(b) == 2 for b in buckets)
    if not (pairs and all(isinstance(name, str) and isinstance(ranges, Mapping) for name, ranges in buckets)):
        raise ArgumentError(
            f'buckets={buckets!r}: write a list of names with ranges, buckets=[("decode", {{"s": (1, 1)}})]'
        )


def run_stages(
    module: ModuleOp,
    context: QCContext,
    dumps: StageDumps,
    options: Mapping[str, Mapping[str, object]],
    verify_each: Literal["ir", "numerics"] | None = None,
    sample_inputs: Sequence[Any] | None = None,
    sample_states: Mapping[str, Any] | None = None,
) -> WeightStore:
    """Runs the passes in order, with a dump after each; the results are in `context.emitted`.

    Returns the weights as they are after the stage that `Program.to_mlir` lowers: their bytes are shared.
    """
    from qcompiler.passes import pipeline

    text, canonical = "", context.weights

    def on_stage(name: str, current: ModuleOp, seconds: float, changed: bool) -> None:
        nonlocal text, canonical
        if name == STAGE:
            canonical = context.weights.copy()
        if context.emitted is not None:
            dumps.add(name, context.emitted.source, seconds, "cpp" if context.target.kind == "cpu" else "cu")
            return
        text = print_module(current) if changed or not text else text
        dumps.add(name, text, seconds)

    pipeline.run_pipeline(
        module,
        context,
        stages=pipeline.with_options(pipeline.STAGES, options),
        on_stage=on_stage,
        verify_each=verify_each,
        sample_inputs=sample_inputs,
        sample_states=sample_states,
    )
    return canonical


def pass_options(
    buckets: Buckets | None,
    compute_streams: int | None,
    separate: tuple[str, ...] = (),
    attention: str | None = None,
) -> dict[str, dict[str, object]]:
    """The options of passes that a caller chose, by stage. PassError for a bucket's name that no option can hold."""
    from qcompiler.passes.specialize import bucket_text

    options: dict[str, dict[str, object]] = {}
    if buckets is not None:
        options["specialize"] = {"buckets": tuple(bucket_text(name, ranges) for name, ranges in buckets)}
    if attention is not None:
        options["round-attention"] = {"compute": attention}
    if compute_streams is not None:
        options["assign-streams"] = {"compute_streams": compute_streams}
    if separate:
        names = (
            "fuse-glu",
            "fuse-routing",
            "fuse-experts",
            "merge-linears",
            "fuse-norm-prologue",
            "fuse-row-statistics",
            "split-attention",
            "merge-launches",
        )
        options.update({name: {"separate": separate} for name in names})
    return options


def _compute_streams() -> int | None:
    """QC_COMPUTE_STREAMS, the maximum number of kernel streams of a GPU. ArgumentError for an invalid value."""
    text = os.environ.get("QC_COMPUTE_STREAMS")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 16:
        raise ArgumentError(
            f"QC_COMPUTE_STREAMS={text!r} is not a number from 1 to 16; 1 puts all kernels on one stream"
        )
    return int(text)


def weight_source(weights: str | Path | WeightSource | None) -> WeightSource:
    """The source that `weights=` names: the module, nowhere, files, or a given source. WeightsError for bad files."""
    from qcompiler.frontends.weights.weight_source import ModuleWeights, NoValues, Shards

    if weights is None:
        return ModuleWeights()
    if weights == "none":
        return NoValues()
    if isinstance(weights, str | Path):
        return Shards(weights)
    if not callable(getattr(weights, "read", None)):
        raise ArgumentError(f"weights={weights!r} is neither a path, 'none', qc.Shards(…) nor None")
    return weights


def _of_checkpoint(
    model: Any, weights: str | Path | WeightSource | None
) -> tuple[Any, str | Path | WeightSource | None]:
    """The module of a checkpoint, and its weights unless others are named; other models unchanged."""
    from qcompiler.frontends.checkpoints.checkpoint import Checkpoint

    if not isinstance(model, Checkpoint):
        return model, weights
    return model.module, model.weights if weights is None else weights


def _home(model: Any) -> str:
    """The device of a model's parameters; "cpu" without any. DeviceUnavailableError if they are on several."""
    parameters = getattr(model, "parameters", None)
    found = sorted({str(p.device) for p in parameters() if not p.is_meta}) if callable(parameters) else []
    if len(found) > 1:
        raise DeviceUnavailableError(
            f"the model's parameters are on {' and '.join(found)}; move them to one device, or name it with `device=`"
        )
    return found[0] if found else "cpu"


def _modules(model: Any) -> Iterable[tuple[str, Any]]:
    """Paths and modules of any model that qcompile accepts; none for a model without modules."""
    named = getattr(getattr(model, "graph_module", model), "named_modules", None)
    found: Iterable[tuple[str, Any]] = named() if callable(named) else ()
    return found


def compile_target(devices: Sequence[str], targets: Sequence[str] | None) -> Target:
    """The targets to compile for, the best one that the first device runs in front: those named, else the devices' own.

    DeviceUnavailableError for an unknown device, or for a GPU that is not present while no target is named;
    TargetMismatchError for targets of another kind than the device, and for those that this machine cannot build.
    """
    kind, _ = registry.parse(devices[0])
    for device in devices if kind != "cuda" else ():  # a GPU may be on another machine
        registry.require(device)
    names = _target_names(targets)
    gpus = [name for name in names if name in ARCHS]
    if gpus and len(gpus) < len(names):
        raise TargetMismatchError(
            f"targets={list(names)} mixes GPU architectures and instruction sets; a program has one plan, and that is "
            "for a CPU or for GPUs: compile twice, with device='cpu' and with device='cuda:0'"
        )
    if kind == "cpu":
        return _cpu_target(names)
    if not names:
        return Target("cuda", common_architecture(devices))
    if unknown := [name for name in names if name not in ARCHS]:
        raise TargetMismatchError(
            f"{unknown[0]!r} is not a GPU architecture to compile for; choose from {', '.join(ARCHS)}"
        )
    return _ordered("cuda", names, registry.runs(devices[0]) if registry.is_available(devices[0]) else ())


def _target_names(targets: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(targets, str):
        raise ArgumentError(f"targets={targets!r} is one name; give a list of them, targets=[{targets!r}]")
    return tuple(dict.fromkeys(targets or ()))


def _cpu_target(names: tuple[str, ...]) -> Target:
    if not names:
        return Target("cpu", resolve_isa(None))
    for name in names:
        if name in ARCHS:
            raise TargetMismatchError(f"the target {name!r} is a GPU's; compile for it with device='cuda:0'")
        if name not in buildable_isas():
            raise TargetMismatchError(
                f"nothing on this machine ({platform.machine()}) builds for {name!r}; choose from "
                f"{', '.join(buildable_isas())}. A machine of another kind compiles the kernels when it loads a file, "
                "and needs a C++ compiler for that"
            )
    return _ordered("cpu", names, runnable_isas())


def _ordered(kind: str, names: tuple[str, ...], able: Sequence[str]) -> Target:
    """The best target that can run (`able` is plainest first) in front; the given order if none can."""
    first = max(names, key=lambda name: able.index(name) if name in able else -1)
    return Target(kind, first, tuple(name for name in names if name != first))
