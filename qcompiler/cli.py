"""`qc compile | run | inspect | opt | bench | convert | doctor | generate | chat | eval | search`.

Data goes to stdout, progress and messages to stderr. Exit status 1 and one message on stderr for every `QCompilerError`
and for files that cannot be read or written; 2 for a wrong command line, before anything is read or compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from qcompiler import __version__
from qcompiler.command_inputs import check_writable, from_factory
from qcompiler.errors import ArgumentError, QCompilerError
from qcompiler.lm.arguments import add_commands as add_language_models
from qcompiler.units import human_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except QCompilerError as error:
        print(f"qc: {type(error).__name__}: {_printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141  # the reader of our stdout has closed it, as in `qc opt … | head`
    except OSError as error:  # a missing file, or one without permission to read or write
        print(f"qc: {_printable(str(error))}", file=sys.stderr)
        return 1
    return status or 0


def _printable(text: str) -> str:
    """A message without control characters: it may quote an untrusted file, and must not control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qc", description="Quantise, compile, read and run models.")
    parser.add_argument("--version", action="version", version=f"qcompiler {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("compile", help="compile a PyTorch model or a text of MLIR to a .qca file")
    command.add_argument(
        "model", help="package.module:function, which returns (model, args, kwargs, dynamic_shapes); or a .mlir file"
    )
    command.add_argument("-o", "--output", type=Path, help="the file to write; needed unless --weights none")
    command.add_argument(
        "--quant",
        default=None,
        help="a storage format such as nf4, int8, int4 or nf4:block=128, or a file such as recipe.toml; default float",
    )
    command.add_argument(
        "--compute", choices=("exact", "bf16", "int8"), help="the arithmetic of linears with quantised weights"
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
    command.add_argument("--workdir", type=Path, default=None, help="folder in which a killed compile can continue")
    command.add_argument("--layout", choices=("target", "canonical"), default="target")
    command.add_argument("--no-stages", action="store_true", help="leave the texts of the stages out of the file")
    command.add_argument("--dump-ir", type=Path, default=None)
    command.add_argument("--mlir", type=Path, default=None, metavar="FILE", help="write it in upstream MLIR, too")
    command.add_argument(
        "--fallback", choices=("torch",), default=None, help="torch: run operators without a lowering in torch"
    )
    command.add_argument("--verify-each", choices=("ir", "numerics"), default=None)
    command.add_argument("--timing", action="store_true", help="print the seconds of each stage")
    command.set_defaults(run=_compile)

    command = commands.add_parser("run", help="run a .qca file on .npy/.npz inputs")
    command.add_argument("program", type=Path)
    command.add_argument(
        "inputs", nargs="*", help="x.npy in order, or name=x.npy with the names that qc inspect prints, or a .npz"
    )
    command.add_argument(
        "-o", "--output", type=Path, help=".npz for the results (default: print shapes and statistics)"
    )
    _add_loading(command)
    command.set_defaults(run=_run)

    _add_inspect(commands)
    command = commands.add_parser("opt", help="run passes over a file of IR")
    command.add_argument("file", nargs="?", default="-")
    command.add_argument(
        "-p", "--passes", default="", help="passes, comma-separated, as in 'cse,assign-streams{compute-streams=2}'"
    )
    command.add_argument("--generic", action="store_true", help="print the generic syntax")
    command.add_argument("--mlir", action="store_true", help="print what a stock MLIR parses")
    command.add_argument("--list", action="store_true", help="list the passes")
    command.add_argument("--context", metavar="FILE", help="weights, target and buckets, as written with a reproducer")
    command.set_defaults(run=_opt)

    _add_bench(commands)
    _add_convert(commands)
    add_language_models(commands)
    command = commands.add_parser("doctor", help="show what this machine offers, or which operators do not lower")
    command.add_argument(
        "--model", metavar="WHERE", help="package.module:function, as for qc compile, or a .pt2 file of torch.export"
    )
    command.add_argument("--device", default="cpu", help="with --model: cpu, cuda:0 or sim:0")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_doctor)
    return parser


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser("inspect", help="show what a .qca file holds, without running it")
    command.add_argument("program", type=Path)
    command.add_argument("--json", action="store_true")
    command.add_argument("--plan", action="store_true", help="print the plan as JSON")
    command.add_argument("--ir", metavar="STAGE", help="print the text of a stage")
    command.add_argument(
        "--html", type=Path, metavar="OUT", help="also write everything as one page (docs/explorer.md)"
    )
    command.add_argument("--timeline", action="store_true", help="chart what runs on which stream, by estimated times")
    command.add_argument("--perfetto", type=Path, metavar="OUT", help="write the timeline as a trace for Perfetto")
    command.add_argument("--entry", help="for a timeline: the entry point; default: the first for these sizes")
    command.add_argument(
        "--dim", action="append", default=[], type=_dim, metavar="NAME=VALUE", help="for a timeline: a size"
    )
    command.add_argument("--between", type=_times, metavar="US,US", help="with --timeline: the part between two times")
    command.set_defaults(run=_inspect)


def _add_bench(commands: Any) -> None:
    command = commands.add_parser("bench", help="time a .qca file on random inputs")
    command.add_argument("program", type=Path)
    command.add_argument("--entry", help="the entry point to time; default: the one for these sizes")
    command.add_argument(
        "--dim", action="append", default=[], type=_dim, metavar="NAME=VALUE", help="a value for a dimension"
    )
    command.add_argument("--rounds", type=_count, help="timed calls, at least 1; default 30, of a language model 5")
    command.add_argument("--profile", action="store_true", help="also time every step, on the CPU")
    command.add_argument("--prompt", type=_count, metavar="N", help="a language model: read so many tokens (512)")
    command.add_argument("--generate", type=_count, metavar="N", help="a language model: tokens after them (128)")
    command.add_argument("--batch", type=_count, metavar="N", help="a language model: so many sequences (1)")
    command.add_argument("--json", action="store_true")
    _add_loading(command)
    command.set_defaults(run=_bench)


def _add_convert(commands: Any) -> None:
    command = commands.add_parser("convert", help="convert a GGUF file or a quantised checkpoint")
    command.add_argument("source", type=Path, help="a .gguf file, or a folder with config.json and safetensors")
    command.add_argument("target", type=Path, help="a .gguf file, or a folder to make")
    command.add_argument("--to", metavar="FORMAT", help="such as q8_0 or int4:group=32; default: each as it is")
    command.add_argument(
        "--quant", metavar="RECIPE", help="for a folder that becomes a GGUF file: a mixture such as q4_K_M, or a format"
    )
    command.add_argument("--layout", help="for a folder: gptq, gptq_v2, awq, compressed-tensors, bitsandbytes")
    command.add_argument("--lossy", action="store_true", help="allow loss of precision, which is always printed")
    command.add_argument("--force", action="store_true", help="replace an existing target without asking")
    command.add_argument("--json", action="store_true", help="print each tensor's formats and errors")
    command.set_defaults(run=_convert)


def _add_loading(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default=None, help="cpu, cuda:0 or sim:0; default: what the program was made for")
    command.add_argument("--num-threads", type=_count, default=None)
    command.add_argument(
        "--trust-native",
        default=None,
        help="'yes', or sha256:… (several with commas), to run native code from the file",
    )
    command.add_argument("--verify", choices=("auto", "full"), default="auto")
    command.add_argument("--trust-operators", metavar="NAMES", help="names of torch operators that may run, too")


# --- checks of the command line; a violation is a usage error, status 2 -----------------------------------------------


def _count(text: str) -> int:
    """A number of rounds or threads: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _dim(text: str) -> tuple[str, int]:
    """`NAME=VALUE`."""
    name, _, value = text.partition("=")
    if not name or not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name with a size of at least 1, such as s=1")
    return name, int(value)


def _dynamic(text: str) -> tuple[str, int, tuple[str, int, int]]:
    """`X:AXIS=NAME,LOW,HIGH`."""
    place, _, rest = text.partition("=")
    name, _, axis = place.rpartition(":")
    parts = rest.split(",")
    if not name or not axis.isdecimal() or len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dimension with a name and a range, such as x:0=b,1,64")
    return name, int(axis), (parts[0], int(parts[1]), int(parts[2]))


def _times(text: str) -> tuple[float, float]:
    """`US,US`: two times, the second behind the first."""
    try:
        begin, end = (float(part) for part in text.split(","))
    except ValueError:
        begin, end = 0.0, 0.0
    if not 0 <= begin < end:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of times in microseconds, such as 100,250")
    return begin, end


def _load(options: argparse.Namespace) -> Any:
    from qcompiler import runtime

    return runtime.load(options.program, **_loading(options))


def _loading(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `_add_loading` as arguments of `load`."""
    trusted = options.trust_native
    return {
        "device": options.device,
        "num_threads": options.num_threads,
        "trust_native": trusted == "yes" or (trusted.split(",") if trusted else False),
        "verify": options.verify,
        "trust_operators": options.trust_operators.split(",") if options.trust_operators else (),
    }


# --- compile ---------------------------------------------------------------------------------------------------------


def _compile(options: argparse.Namespace) -> None:
    from qcompiler.runtime.progress import Stages, stage

    if (options.output is None) != (options.weights == "none"):
        raise ArgumentError("-o names the file to write; only a compile with --weights none writes none, and prints")
    if options.mlir is not None and options.weights == "none":
        raise ArgumentError("--mlir writes the weights, and --weights none has none")
    check_writable(options.output)
    check_writable(options.mlir)
    with Stages(1):
        stage(f"load {options.model}")
        from qcompiler.api import qcompile  # torch, which takes seconds to import
        from qcompiler.config import recipe_of

        weights = options.weights
        if options.model.endswith(".mlir"):
            model, args, kwargs, dynamic_shapes = _mlir(options)
            weights = "none" if weights == "none" else None
        else:
            model, args, kwargs, dynamic_shapes = from_factory(options.model)
    program = qcompile(
        model,
        args,
        kwargs,
        quant=recipe_of(options.quant, options.compute),
        dynamic_shapes=dynamic_shapes,
        device=options.device,
        targets=options.targets.split(",") if options.targets else None,
        dump_ir=options.dump_ir,
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
    builds = program.save(options.output, layout=options.layout, stages=not options.no_stages)
    print(program.ledger.totals(), file=sys.stderr)
    if options.timing:
        print(program.timing())
    for isa, digest in builds.items():
        print(f"native build for {isa}: {digest}", file=sys.stderr)
    print(f"wrote {options.output} ({human_bytes(options.output.stat().st_size)})", file=sys.stderr)


def _mlir(options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """A text of MLIR, with weights by name from a safetensors file."""
    from qcompiler.frontends.mlir.model import from_mlir

    dims: dict[str, dict[int, tuple[str, int, int]]] = {}
    for name, axis, entry in options.dynamic:
        dims.setdefault(name, {})[axis] = entry
    weights = None if options.weights == "none" else options.weights
    return from_mlir(Path(options.model), weights), (), {}, dims or None


# --- convert ---------------------------------------------------------------------------------------------------------


def _convert(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from qcompiler.frontends.checkpoints.convert import convert

    force = options.force or _may_replace(options.target)
    done = convert(
        options.source, options.target, to=options.to, layout=options.layout, lossy=options.lossy, force=force,
        quant=options.quant,
    )  # fmt: skip
    if options.json:
        print(json.dumps({"path": str(done.path), "tensors": [asdict(each) for each in done.tensors]}))
    print(done, file=sys.stderr)


def _may_replace(target: Path) -> bool:
    """Asks whether an existing target may be replaced, if stdin and stderr are a terminal."""
    if not target.exists() or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{target} exists. Replace it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# --- run and bench ---------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> None:
    import numpy as np

    check_writable(options.output)
    args, kwargs = _read_inputs(options.inputs)
    run = _load(options)
    given, named = _by_structure(run, args, kwargs)
    result = run(*given, **named)
    leaves = dict(_leaves(result, "result"))
    if options.output is not None:
        with options.output.open("wb") as file:  # given a name, numpy would append .npz to it
            np.savez(file, **leaves)
        return
    for name, value in leaves.items():
        values = np.asarray(value, dtype=np.float64)
        spread = f"mean {values.mean():.6g}, std {values.std():.6g}" if values.size else "empty"
        print(f"{name}: {value.dtype} {list(value.shape)}, {spread}")


def _read_inputs(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    from qcompiler.runtime.array_files import read_arrays

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        name, _, path = text.rpartition("=")
        value = read_arrays(Path(path))
        if isinstance(value, dict):
            kwargs.update(value)
        elif name:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def _by_structure(run: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments that are given by the names of single tensors, as `qc inspect` lists them for an entry point.

    A command line can give the parts of a tuple or a dict only in this way.
    """
    from qcompiler.runtime.tree import arguments_of

    names = [sig.name for sig in run.plan.entries[0].inputs]
    if args or set(kwargs) != set(names):
        return args, kwargs
    return arguments_of(run.signature.inputs, [kwargs[name] for name in names])


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, str(key))]
    if isinstance(value, list | tuple):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, f"{name}.{index}")]
    return [] if value is None else [(name, value)]


def _bench(options: argparse.Namespace) -> None:
    if (options.prompt, options.generate, options.batch) != (None, None, None):
        _bench_language_model(options)
        return
    import numpy as np

    from qcompiler.plan.dims import dim
    from qcompiler.plan.weights import NUMPY_DTYPES
    from qcompiler.runtime.tree import arguments_of

    run, rounds = _load(options), options.rounds or 30
    entry = _entry(run.plan, options.entry)
    symbols = {symbol.name: symbol.max for symbol in entry.symbols}
    for name, value in options.dim:
        if name not in symbols:
            raise ArgumentError(f"--dim {name}={value}: the dimensions of '{entry.name}' are {_list(symbols)}")
        symbols[name] = value
    generator = np.random.default_rng(0)
    shapes = tuple(tuple(dim(d).evaluate(symbols) for d in sig.shape) for sig in entry.inputs)
    taken = run.plan.entries[run.binder.bind(shapes).entry]
    if options.entry is not None and taken is not entry:
        raise ArgumentError(
            f"--entry {entry.name}: at {_sizes_text(symbols)} a call runs '{taken.name}', which comes first; give "
            "other sizes by --dim"
        )
    tensors = []
    for shape, sig in zip(shapes, entry.inputs, strict=True):
        dtype = NUMPY_DTYPES[sig.dtype]
        is_float = sig.dtype in ("f32", "f64", "f16", "bf16")
        tensors.append(generator.standard_normal(shape).astype(dtype) if is_float else np.ones(shape, dtype))
    args, kwargs = arguments_of(run.signature.inputs, tensors)
    for _ in range(3):
        run(*args, **kwargs)
    times, before = [], run.report()["torch_seconds"]
    for _ in range(rounds):
        start = time.perf_counter()
        run(*args, **kwargs)
        times.append(time.perf_counter() - start)
    figures: dict[str, Any] = {
        "entry": taken.name,
        "dims": symbols,
        "rounds": len(times),
        "median_s": median(times),
        "min_s": min(times),
    }
    after = run.report()["torch_seconds"]
    if after["calls"] > before["calls"]:
        figures["torch_share"] = (after["torch"] - before["torch"]) / (after["calls"] - before["calls"])
    profile = run.profile(*args, rounds=rounds, **kwargs) if options.profile else None
    if options.json:
        print(json.dumps(figures | ({"profile": profile.as_dict()} if profile is not None else {})))
    else:
        where = f"{taken.name}, " * (len(run.plan.entries) > 1) + _sizes_text(symbols)
        print(f"{where}: median {median(times) * 1e3:.3f} ms, least {min(times) * 1e3:.3f} ms of {rounds} runs")
        if "torch_share" in figures:
            print(f"in torch: {figures['torch_share']:.0%} of the time")
        if profile is not None:
            print(f"\n{profile}")


def _bench_language_model(options: argparse.Namespace) -> None:
    from qcompiler.lm.bench import measure
    from qcompiler.lm.model import load_causal_lm

    if options.entry is not None or options.dim or options.profile:
        raise ArgumentError("--prompt, --generate and --batch time whole texts: leave --entry, --dim and --profile out")
    lm = load_causal_lm(options.program, **_loading(options))
    found = measure(lm, options.prompt or 512, options.generate or 128, options.batch or 1, options.rounds or 5)
    print(json.dumps(found.as_dict()) if options.json else found)


def _entry(plan: Any, name: str | None) -> Any:
    """The entry point of that name, or the first one."""
    if name is None:
        return plan.entries[0]
    found = [entry for entry in plan.entries if entry.name == name]
    if not found:
        raise ArgumentError(f"--entry {name}: the entry points are {_list(entry.name for entry in plan.entries)}")
    return found[0]


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _sizes_text(symbols: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in symbols.items()) or "static shapes"


# --- inspect, opt, doctor --------------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> None:
    from qcompiler.inspect.files import describe, ir_text, plan_json, summary

    check_writable(options.perfetto)
    check_writable(options.html)
    if options.html is not None:
        from qcompiler.inspect.explore.page import write_page

        write_page(options.program, options.html)
        print(f"wrote {options.html}; open it in a browser", file=sys.stderr)
    if options.timeline or options.perfetto is not None:
        _timeline(options)
    elif options.entry is not None or options.dim or options.between is not None:
        raise ArgumentError("--entry, --dim and --between are of a timeline: add --timeline or --perfetto OUT")
    elif options.ir is not None:
        print(ir_text(options.program, options.ir))
    elif options.plan:
        print(plan_json(options.program))
    elif options.json:
        print(json.dumps(describe(options.program), indent=1))
    else:
        print(summary(options.program))


def _timeline(options: argparse.Namespace) -> None:
    from qcompiler.inspect.files import printable, timeline_of

    shown = timeline_of(options.program, options.entry, dict(options.dim))
    if options.perfetto is not None:
        shown.save(options.perfetto)
        print(f"wrote {options.perfetto}; open it at ui.perfetto.dev", file=sys.stderr)
    if options.json:
        print(json.dumps(shown.as_dict(), indent=1))
    elif options.timeline:
        begin, end = options.between or (0.0, None)
        print(printable(shown.text(begin=begin, end=end)))


def _opt(options: argparse.Namespace) -> None:
    from qcompiler.inspect.opt import list_passes, run_passes

    if options.list:
        print(list_passes())
        return
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, a NUL in the name
        raise ArgumentError(f"cannot read '{options.file}': {error}") from error
    syntax = "mlir" if options.mlir else "generic" if options.generic else "pretty"
    where = "<stdin>" if options.file == "-" else options.file
    print(run_passes(text, options.passes, syntax, options.context, where=where))


def _doctor(options: argparse.Namespace) -> int:
    if options.model is not None:
        return _doctor_model(options)
    from qcompiler.inspect.doctor import compiles, examine, problems

    facts = examine()
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        for name, value in facts.items():
            print(f"{name:14} {value}")
    for problem in problems(facts):
        print(f"qc: {problem}", file=sys.stderr)
    return 0 if compiles(facts) else 1


def _doctor_model(options: argparse.Namespace) -> int:
    """Imports and calls what the user named, or loads the named file."""
    import torch

    from qcompiler.frontends.torch.survey import doctor

    path = Path(options.model)
    if path.suffix == ".pt2":
        if not path.is_file():
            raise ArgumentError(f"there is no file {options.model}")
        diagnosis = doctor(torch.export.load(path), device=options.device)
    else:
        model, args, kwargs, dims = from_factory(options.model)
        diagnosis = doctor(model, args, kwargs, dynamic_shapes=dims, device=options.device)
    print(json.dumps(diagnosis.as_dict(), indent=1) if options.json else diagnosis)
    return 0 if diagnosis.ok else 1


if __name__ == "__main__":
    sys.exit(main())
