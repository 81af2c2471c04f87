"""`qc compile`: its arguments, which are known without loading anything, and what it does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qcompiler.command_inputs import check_factory, check_writable, from_factory
from qcompiler.errors import ArgumentError
from qcompiler.lm.arguments import add_sizes
from qcompiler.units import human_bytes

FUNCTION, MLIR = "a package.module:function", "a .mlir file"
LANGUAGE_MODEL = "a .gguf file or a folder with config.json"
"""What `qc compile` compiles, in the words of its errors."""

_EVERY = {
    "model", "output", "quant", "compute", "device", "targets", "workdir", "no_stages", "dump_ir", "verify_each",
    "timing",
}  # fmt: skip
_GRAPH = {"weights", "layout", "source_lines", "mlir", "fallback", "print_after", "print_after_change"}

READ = {
    FUNCTION: _EVERY | _GRAPH,
    MLIR: _EVERY | _GRAPH | {"dynamic"},
    LANGUAGE_MODEL: _EVERY | {"max_seq_len", "kv_cache", "max_batch"},
}
"""The arguments that a compile of each kind of model reads. Each other one is refused, so an option that is new is
refused for the kinds that do not name it here."""


def add_compile(commands: Any) -> argparse.ArgumentParser:
    """The command as a subparser, with the function that runs it."""
    command: argparse.ArgumentParser = commands.add_parser(
        "compile", help="compile a PyTorch model or a text of MLIR to a .qca file"
    )
    command.add_argument(
        "model",
        help="package.module:function, which returns (model, args, kwargs, dynamic_shapes); a .mlir file; or, of a "
        "language model, a .gguf file or a folder with config.json",
    )
    command.add_argument("-o", "--output", type=Path, help="the file to write; needed unless --weights none")
    command.add_argument(
        "--quant",
        default=None,
        help="a storage format such as nf4, int8, int4 or nf4:block=128, or a file such as recipe.toml; default float",
    )
    command.add_argument(
        "--compute",
        choices=("exact", "bf16", "int8"),
        help="the arithmetic of linears, convolutions and experts with quantised weights, and of attention",
    )
    command.add_argument(
        "--device", default=None, help="cpu, cuda:0 or sim:0 (the simulated GPU); default: the model's"
    )
    command.add_argument(
        "--targets", "--target", default=None, metavar="NAME,…",
        help="the targets of the native builds: x86-64,x86-64-v3,x86-64-v4, or sm_80,sm_90a,…; default: this machine",
    )  # fmt: skip
    command.add_argument(
        "--weights", default=None, metavar="PATH", help="safetensors file or folder; 'none': plan and sizes only"
    )
    command.add_argument(
        "--dynamic", action="append", default=[], type=_dynamic, metavar="X:AXIS=NAME,LOW,HIGH",
        help="a .mlir file: the name and range of a dimension that is ?, as in x:0=b,1,64",
    )  # fmt: skip
    add_sizes(command, "a language model")
    command.add_argument("--max-batch", type=int, help="a language model: sequences that may run together (1)")
    command.add_argument("--workdir", type=Path, default=None, help="folder in which a killed compile can continue")
    command.add_argument(
        "--layout", choices=("target", "canonical"), default="target",
        help="how weights lie in the file: as the target's kernels read them (default), or portable",
    )  # fmt: skip
    command.add_argument("--no-stages", action="store_true", help="leave the texts of the stages out of the file")
    command.add_argument(
        "--source-lines", action="store_true",
        help="put the model's source lines into the file for the explorer: paths and text of this machine",
    )  # fmt: skip
    command.add_argument(
        "--dump-ir", type=Path, default=None, metavar="FOLDER", help="write the text of every stage to this folder"
    )
    command.add_argument("--mlir", type=Path, default=None, metavar="FILE", help="write it in upstream MLIR, too")
    command.add_argument(
        "--fallback", choices=("torch",), default=None, help="torch: run operators without a lowering in torch"
    )
    command.add_argument(
        "--verify-each", choices=("ir", "numerics"), default=None,
        help="after each pass: verify the IR; numerics: also run it and compare the answers",
    )  # fmt: skip
    add_watching(command)
    actions = tuple(command._actions)
    command.set_defaults(run=lambda options: _compile(options, actions))
    return command


def add_watching(command: argparse.ArgumentParser) -> None:
    """What tells about stages as they end."""
    command.add_argument("--print-after", metavar="STAGE,…", help="print the IR after these stages to stderr, or 'all'")
    command.add_argument("--print-after-change", action="store_true", help="print it after each stage that changed it")
    command.add_argument("--timing", action="store_true", help="print the seconds of each stage")


def print_after(options: argparse.Namespace) -> str | None:
    """The options of `add_watching` as QC_PRINT_AFTER has them; None, for that variable, without any."""
    names = [options.print_after] if options.print_after else []
    return ",".join(names + ["change"] * options.print_after_change) or None


def _dynamic(text: str) -> tuple[str, int, tuple[str, int, int]]:
    """`X:AXIS=NAME,LOW,HIGH`."""
    place, _, rest = text.partition("=")
    name, _, axis = place.rpartition(":")
    parts = rest.split(",")
    if not name or not axis.isdecimal() or len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dimension with a name and a range, such as x:0=b,1,64")
    return name, int(axis), (parts[0], int(parts[1]), int(parts[2]))


def check_read(options: argparse.Namespace, actions: Iterable[argparse.Action]) -> None:
    """ArgumentError for options that were given and that a compile of this kind of model does not read. `actions` are
    the declarations of all options."""
    kind = _kind(options.model)
    given = [action for action in actions if getattr(options, action.dest, action.default) != action.default]
    unread = [action for action in given if action.dest not in READ[kind]]
    if not unread:
        return
    names = [a.option_strings[0] + (f" {getattr(options, a.dest)}" if a.choices else "") for a in unread]
    takers = [each for each, read in READ.items() if all(action.dest in read for action in unread)]
    way = f"; that of {' or of '.join(takers)} does" if takers else ""
    raise ArgumentError(f"'{options.model}' is taken for {kind}, whose compile takes no {', '.join(names)}{way}")


def _compile(options: argparse.Namespace, actions: Iterable[argparse.Action]) -> None:
    from qcompiler.config import recipe_of
    from qcompiler.runtime.backends import registry
    from qcompiler.runtime.progress import Stages, stage

    check_read(options, actions)
    kind = _kind(options.model)
    if (options.output is None) != (options.weights == "none"):
        raise ArgumentError("-o names the file to write; only a compile with --weights none writes none, and prints")
    if options.mlir is not None and options.weights == "none":
        raise ArgumentError("--mlir writes the weights, and --weights none has none")
    if options.source_lines and options.no_stages:
        raise ArgumentError("--source-lines go with the texts of the stages, which --no-stages leaves out")
    check_writable(options.output)
    check_writable(options.mlir)
    recipe = recipe_of(options.quant, options.compute)
    if options.device is not None:
        registry.parse(options.device)  # a name that means nothing is refused before the model is made
    if kind == LANGUAGE_MODEL:
        from qcompiler.lm.commands import compile_to_file

        _say_written(*compile_to_file(options, recipe), options)
        return
    if kind == FUNCTION:
        check_factory(options.model)
    with Stages(1):
        stage(f"load {options.model}")
        from qcompiler.api import qcompile  # torch, which takes seconds to import

        weights = options.weights
        if kind == MLIR:
            model, args, kwargs, dynamic_shapes = _mlir(options)
            weights = "none" if weights == "none" else None
        else:
            model, args, kwargs, dynamic_shapes = from_factory(options.model)
    program = qcompile(
        model,
        args,
        kwargs,
        quant=recipe,
        dynamic_shapes=dynamic_shapes,
        device=options.device,
        targets=options.targets.split(",") if options.targets else None,
        dump_ir=options.dump_ir,
        print_after=print_after(options),
        verify_each=options.verify_each,
        weights=weights,
        workdir=options.workdir,
        fallback=options.fallback,
    )
    if options.mlir is not None:
        program.to_mlir("linalg").save(options.mlir)
        print(f"wrote {options.mlir} ({human_bytes(options.mlir.stat().st_size)})", file=sys.stderr)
    if options.output is None:
        print(program.report())
        print(program.timing() if options.timing else program.ledger.totals())
        return
    builds = program.save(
        options.output, layout=options.layout, stages=not options.no_stages, source_lines=options.source_lines
    )
    _say_written(program, builds, options)


def _say_written(program: Any, builds: Mapping[str, str], options: argparse.Namespace) -> None:
    """What is in the file: `builds` are its native builds, by target."""
    print(program.ledger.totals(), file=sys.stderr)
    if options.timing:
        print(program.timing())
    for isa, digest in builds.items():
        print(f"native build for {isa}: {digest}", file=sys.stderr)
    print(f"wrote {options.output} ({human_bytes(options.output.stat().st_size)})", file=sys.stderr)


def _kind(model: str) -> str:
    """Which key of `READ` the argument MODEL is."""
    if model.endswith(".gguf") or (Path(model) / "config.json").is_file():
        return LANGUAGE_MODEL
    return MLIR if model.endswith(".mlir") else FUNCTION


def _mlir(options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """A text of MLIR, with weights by name from a safetensors file."""
    from qcompiler.frontends.mlir.model import from_mlir

    dims: dict[str, dict[int, tuple[str, int, int]]] = {}
    for name, axis, entry in options.dynamic:
        dims.setdefault(name, {})[axis] = entry
    weights = None if options.weights == "none" else options.weights
    return from_mlir(Path(options.model), weights), (), {}, dims or None


__all__ = ["READ", "add_compile", "add_watching", "check_read", "print_after"]
