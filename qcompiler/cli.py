"""`qc COMMAND`: compile, run, inspect, opt, reduce, bench, convert, generate, chat, eval, search, doctor, completion.

Data goes to stdout, progress and messages to stderr. Exit status 1 and one message on stderr for every `QCompilerError`
and for files that cannot be read or written; 2 for a wrong command line, before anything is read or compiled; 70 for
any other exception, whose traceback goes into a file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from qcompiler import __version__
from qcompiler.command_help import add_completion, finish
from qcompiler.command_inputs import check_writable, from_factory
from qcompiler.compile_command import add_compile, add_watching, print_after
from qcompiler.errors import ArgumentError, QCompilerError
from qcompiler.import_noise import without_import_noise
from qcompiler.lm.arguments import add_commands as add_language_models
from qcompiler.units import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    for stream in (sys.stdout, sys.stderr):
        _accept_all_characters(stream)
    options = _parser().parse_args(arguments)
    try:
        with without_import_noise():
            status: int | None = options.run(options)
        if sys.stdout is not None:  # None: closed by the caller
            sys.stdout.flush()  # what fails here would otherwise be a traceback of Python's at its end
    except QCompilerError as error:
        _say("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 141  # the reader of our stdout has closed it, as in `qc opt … | head`
    except OSError as error:  # a missing file, one without permission to read or write, or no room
        _drop_stdout()
        _say(_of_file(error))
        return 1
    except Exception as error:  # a bug of ours, or in the model that was named: the traceback goes into a file
        missing = _missing(error)
        _say(missing or f"{type(error).__name__}: {error}; {_reported(error)}")
        return 1 if missing else 70
    return status or 0


def _accept_all_characters(stream: TextIO | None) -> None:
    """Spells out the characters that the stream's encoding lacks, such as the "…" of the help in Latin-1."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _say(message: str) -> None:
    """One message on stderr."""
    if sys.stderr is not None:
        print(f"qc: {printable(message)}", file=sys.stderr)


def _of_file(error: OSError) -> str:
    """What the system said of a file: `model.qca: No such file or directory`."""
    if error.filename is None or error.strerror is None:
        return str(error)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return f"{' -> '.join(names)}: {error.strerror}" if names else str(error)


def _missing(error: Exception) -> str:
    """What to install, if the error is that torch or transformers is not there; else ""."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in ("torch", "transformers"):
        return ""
    return (
        f"MissingDependencyError: this needs {error.name}, which is not installed: pip install 'qcompiler[files]' "
        "(torch and transformers) or, without language models, 'qcompiler[torch]'"
    )


def _reported(error: Exception) -> str:
    """Writes the traceback to a file, and says where it is."""
    from qcompiler.runtime.failure_report import report_alone

    try:
        return f"the traceback is in {report_alone(error)}"
    except OSError as second:
        return f"no report could be written: {second}"


def _drop_stdout() -> None:
    """Forgets what could not be written: Python would try again at its end, and complain."""
    stdout = sys.__stdout__
    if stdout is not None and sys.stdout is stdout:
        with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qc", description="Quantise, compile, read and run models.")
    parser.add_argument("--version", action="version", version=f"qcompiler {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    add_compile(commands)
    command = commands.add_parser("run", help="run a .qca file on .npy/.npz inputs")
    command.add_argument("program", type=Path, help="a .qca file")
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
    command.add_argument("file", nargs="?", default="-", help="a text of IR, such as a dump; default '-', stdin")
    command.add_argument(
        "-p",
        "--passes",
        action="append",
        default=[],
        help="passes, comma-separated, as in 'cse,assign-streams{compute-streams=2}'; may be given again for more",
    )
    command.add_argument("--generic", action="store_true", help="print the generic syntax")
    command.add_argument("--mlir", action="store_true", help="print what a stock MLIR parses")
    command.add_argument("--list", action="store_true", help="list the passes")
    command.add_argument("--context", metavar="FILE", help="weights, target and buckets, as written with a reproducer")
    command.add_argument("--verify-each", choices=("ir", "numerics"), help="numerics: also compare the answers")
    add_watching(command)
    command.set_defaults(run=_opt)

    _add_reduce(commands)
    _add_bench(commands)
    _add_convert(commands)
    add_language_models(commands)
    command = commands.add_parser("doctor", help="show what this machine offers, or which operators do not lower")
    command.add_argument(
        "--model", metavar="WHERE", help="package.module:function, as for qc compile, or a .pt2 file of torch.export"
    )
    command.add_argument("--device", default="cpu", help="with --model: cpu, cuda:0 or sim:0")
    command.add_argument(
        "--target", action="append", default=[], metavar="ISA", help="also show the kernels for sm_90a, x86-64-v3, …"
    )
    command.add_argument("--no-measure", action="store_true", help="leave bandwidth and rates out")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    command.set_defaults(run=_doctor)
    add_completion(commands)
    finish(parser)
    parser.set_defaults(parser=parser)
    return parser


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser("inspect", help="show what a .qca file holds, without running it")
    command.add_argument("program", type=Path, help="a .qca file; for texts of stages also a folder of --dump-ir")
    command.add_argument(
        "--json", action="store_true", help="print the summary, or the part that is asked for, as JSON"
    )
    part = command.add_mutually_exclusive_group()
    part.add_argument("--plan", action="store_true", help="print the plan as JSON")
    part.add_argument("--stage", "--ir", metavar="STAGE", help="print the text of a stage, by name or number")
    part.add_argument("--diff", nargs=2, metavar=("A", "B"), help="print what the texts of two stages differ in")
    part.add_argument("--ledger", action="store_true", help="print every parameter with its format and bytes")
    part.add_argument("--kernels", action="store_true", help="list the kernels and what they serve")
    part.add_argument(
        "--error", type=Path, metavar="DATA",
        help="signal-to-noise ratios of results, layers and stages on the inputs in a .npz or .npy file; needs --model",
    )  # fmt: skip
    part.add_argument("--timeline", action="store_true", help="chart what runs on which stream, by estimated times")
    command.add_argument(
        "--html", type=Path, metavar="OUT", help="also write everything as one page (docs/explorer.md)"
    )
    command.add_argument("--sass", action="store_true", help="with --html: also the machine code of CUDA kernels")
    command.add_argument(
        "--model", metavar="WHERE", help="with --error: package.module:function, the model that the file was made from"
    )
    command.add_argument("--quant", metavar="RECIPE", help="with --error: the recipe; default: what the ledger names")
    command.add_argument(
        "--op", type=_pattern, metavar="REGEX",
        help="print the ops that match, such as 'qc.linear' or a module path: of --stage, or stage by stage",
    )  # fmt: skip
    command.add_argument("--perfetto", type=Path, metavar="OUT", help="write the timeline as a trace for Perfetto")
    command.add_argument("--entry", help="for a timeline: the entry point; default: the first for these sizes")
    command.add_argument(
        "--dim", action="append", default=[], type=_dim, metavar="NAME=VALUE", help="for a timeline: a size"
    )
    command.add_argument("--between", type=_times, metavar="US,US", help="with --timeline: the part between two times")
    command.set_defaults(run=_inspect)


def _add_reduce(commands: Any) -> None:
    command = commands.add_parser("reduce", help="shrink a failing IR while it fails in the same way")
    command.add_argument("file", type=Path, help="a reproducer, or another file of IR")
    command.add_argument("-o", "--output", type=Path, help="the file to write; default PASS.reduced.mlir")
    command.add_argument("-p", "--passes", help="the passes that fail; default those of the file's RUN line")
    command.add_argument("--context", type=Path, metavar="FILE", help="weights and target; default of the RUN line")
    command.add_argument("--verify-each", choices=("ir", "numerics"), help="numerics: the failure is a wrong answer")
    command.add_argument("--timeout", type=_count, metavar="S", help="seconds after which a run counts as a hang")
    command.set_defaults(run=_reduce)


def _add_bench(commands: Any) -> None:
    command = commands.add_parser("bench", help="time a .qca file on random inputs")
    command.add_argument("program", type=Path, help="a .qca file")
    command.add_argument("--entry", help="the entry point to time; default: the one for these sizes")
    command.add_argument(
        "--dim", action="append", default=[], type=_dim, metavar="NAME=VALUE", help="a value for a dimension"
    )
    command.add_argument("--rounds", type=_count, help="timed calls, at least 1; default 30, of a language model 5")
    command.add_argument("--profile", action="store_true", help="also time every launch: tables by kernel and module")
    command.add_argument("--steps", action="store_true", help="with --profile: a table of every launch, too")
    command.add_argument("--svg", type=Path, metavar="OUT", help="with --profile: a flame-like chart by module")
    command.add_argument("--perfetto", type=Path, metavar="OUT", help="with --profile: a trace of the measured times")
    command.add_argument(
        "--model", metavar="WHERE", help="with --profile: package.module:function, the float model to time in torch"
    )
    command.add_argument("--prompt", type=_count, metavar="N", help="a language model: read so many tokens (512)")
    command.add_argument("--generate", type=_count, metavar="N", help="a language model: tokens after them (128)")
    command.add_argument("--batch", type=_count, metavar="N", help="a language model: so many sequences (1)")
    command.add_argument("--json", action="store_true", help="print the figures as JSON, in seconds")
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
    command.add_argument(
        "--program", type=Path, metavar="FILE.qca", help="a program of the folder, whose codes the result gets"
    )
    command.add_argument("--lossy", action="store_true", help="allow loss of precision, which is always printed")
    command.add_argument("--force", action="store_true", help="replace an existing target without asking")
    command.add_argument("--json", action="store_true", help="print each tensor's formats and errors")
    command.set_defaults(run=_convert)


def _add_loading(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default=None, help="cpu, cuda:0 or sim:0; default: what the program was made for")
    command.add_argument(
        "--num-threads", type=_count, default=None, metavar="N",
        help="threads on the CPU; default: QC_NUM_THREADS, else the processors that this process may use",
    )  # fmt: skip
    command.add_argument(
        "--trust-native",
        default=None,
        help="'yes', or sha256:… (several with commas), to run native code from the file",
    )
    command.add_argument(
        "--verify", choices=("auto", "full"), default="auto",
        help="check the weights' digests: auto (default), unless this file was checked before; full, always",
    )  # fmt: skip
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


def _pattern(text: str) -> re.Pattern[str]:
    """A regular expression of Python."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error


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


# --- convert ---------------------------------------------------------------------------------------------------------


def _convert(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from qcompiler.frontends.checkpoints.convert import convert
    from qcompiler.runtime.loaded import check_image
    from qcompiler.runtime.program_file import load_image

    force = options.force or _may_replace(options.target)
    program = None
    if options.program is not None:  # its weights are read, and nothing runs: no kernel is compiled, no GPU is needed
        program, _ = load_image(options.program)
        check_image(program)
    done = convert(
        options.source, options.target, to=options.to, layout=options.layout, lossy=options.lossy, force=force,
        quant=options.quant, program=program,
    )  # fmt: skip
    if options.json:
        tensors = [asdict(each) for each in done.tensors]
        print(json.dumps({"path": str(done.path), "tensors": tensors, "notes": done.notes}))
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

    from qcompiler.input_files import by_structure, read_inputs
    from qcompiler.runtime.array_files import write_archive
    from qcompiler.runtime.files import replacing
    from qcompiler.runtime.tree import result_names

    check_writable(options.output)
    args, kwargs = read_inputs(options.inputs)
    run = _load(options)
    given, named = by_structure(run.plan, run.signature, args, kwargs)
    result = run(*given, **named)
    tensors = run.flatten_outputs(result)
    leaves = {name: tensors[number] for name, number in result_names(run.signature.outputs)}
    if options.output is not None:
        with replacing(options.output) as file:  # given a name, numpy would append .npz to it
            write_archive(file, leaves)
        return
    for name, value in leaves.items():
        values = np.asarray(value, dtype=np.float64)
        spread = f"mean {values.mean():.6g}, std {values.std():.6g}" if values.size else "empty"
        print(printable(f"{name}: {value.dtype} {list(value.shape)}, {spread}"))


def _bench(options: argparse.Namespace) -> None:
    _check_profile_options(options)
    if (options.prompt, options.generate, options.batch) != (None, None, None):
        _bench_language_model(options)
        return
    from qcompiler.inspect.bench import Bench

    bench = Bench(_load(options), options.entry, options.dim)
    figures = bench.times(options.rounds or 30)
    profile = bench.profile(options.rounds or 30, options.model) if options.profile else None
    if options.json:
        print(json.dumps(figures | ({"profile": profile.as_dict()} if profile is not None else {})))
    else:
        print(bench.text(figures))
        if profile is not None:
            print(f"\n{profile}" + (f"\n\n{profile.table(by='step')}" if options.steps else ""))
    for path in (options.svg, options.perfetto):
        if path is not None and profile is not None:
            profile.save(path)
            print(f"wrote {path}", file=sys.stderr)


def _check_profile_options(options: argparse.Namespace) -> None:
    """ArgumentError for options of a profile without one, and for a file that could not be written."""
    for name, value in (("--steps", options.steps), ("--svg", options.svg), ("--perfetto", options.perfetto),
                        ("--model", options.model)):  # fmt: skip
        if value and not options.profile:
            raise ArgumentError(f"{name} is of a profile: add --profile")
    for name, path, suffix in (("--svg", options.svg, ".svg"), ("--perfetto", options.perfetto, ".json")):
        check_writable(path)
        if path is not None and path.suffix != suffix:
            raise ArgumentError(f"{name} {path}: name a file that ends in {suffix}")


def _bench_language_model(options: argparse.Namespace) -> None:
    from qcompiler.lm.bench import measure
    from qcompiler.lm.model import load_causal_lm

    if options.entry is not None or options.dim or options.profile:
        raise ArgumentError("--prompt, --generate and --batch time whole texts: leave --entry, --dim and --profile out")
    lm = load_causal_lm(options.program, **_loading(options))
    found = measure(lm, options.prompt or 512, options.generate or 128, options.batch or 1, options.rounds or 5)
    print(json.dumps(found.as_dict()) if options.json else found)


# --- inspect, opt, doctor --------------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> None:
    from qcompiler.inspect.files import describe, plan_json, summary
    from qcompiler.inspect.shown import show_kernels, show_ledger, show_stages
    from qcompiler.inspect.terminal import show

    check_writable(options.perfetto)
    check_writable(options.html)
    if (options.entry is not None or options.dim) and not (options.timeline or options.perfetto is not None):
        raise ArgumentError("--entry and --dim are of a timeline: add --timeline or --perfetto OUT")
    if options.between is not None and not options.timeline:
        raise ArgumentError("--between is a part of the chart: add --timeline")
    if options.error is not None and options.op is not None:
        raise ArgumentError("--op is of texts of stages, and --error prints none: ask for one of them")
    report = _errors(options)
    if options.html is not None:
        from qcompiler.inspect.explore.page import write_page

        write_page(options.program, options.html, errors=report, sass=options.sass)
        print(f"wrote {options.html}; open it in a browser", file=sys.stderr)
    if report is not None:
        if options.perfetto is not None:
            _timeline(options, alone=False)
        show(json.dumps(report.as_dict(), indent=1) if options.json else printable(str(report)))
        return
    texts = options.op is not None or options.stage is not None or options.diff is not None
    other = texts or options.ledger or options.kernels or options.plan
    if options.timeline or options.perfetto is not None:
        _timeline(options, alone=not other)
        if not other:
            return
    if texts:
        show_stages(options)
    elif options.ledger:
        show_ledger(options.program, as_json=options.json)
    elif options.kernels:
        show_kernels(options.program, as_json=options.json)
    elif options.plan:
        show(plan_json(options.program))
    elif options.json:
        show(json.dumps(describe(options.program), indent=1))
    else:
        show(summary(options.program))


def _errors(options: argparse.Namespace) -> Any:
    """The report of --error; None without it. ArgumentError for its options without it."""
    if options.sass and options.html is None:
        raise ArgumentError("--sass is a part of the page: add --html OUT")
    if options.error is None:
        if options.model is not None or options.quant is not None:
            raise ArgumentError("--model and --quant are of --error: add --error DATA")
        return None
    from qcompiler.error_command import errors_of_file

    return errors_of_file(options.program, options.error, options.model, options.quant)


def _timeline(options: argparse.Namespace, *, alone: bool) -> None:
    """Writes the trace, and prints the timeline; `alone`: --json is its, and not that of another part."""
    from qcompiler.inspect.files import timeline_of
    from qcompiler.inspect.terminal import show, width

    shown = timeline_of(options.program, options.entry, dict(options.dim))
    if options.perfetto is not None:
        shown.save(options.perfetto)
        print(f"wrote {options.perfetto}; open it at ui.perfetto.dev", file=sys.stderr)
    if options.json and alone:
        show(json.dumps(shown.as_dict(), indent=1))
    elif options.timeline:
        begin, end = options.between or (0.0, None)
        show(printable(shown.text(max(width(), 80), begin, end)))


def _opt(options: argparse.Namespace) -> None:
    from qcompiler.frontends.common.imported import FRONTEND_STAGES
    from qcompiler.inspect.dumps import StageDumps, print_after_of
    from qcompiler.inspect.opt import list_passes, read_text, run_passes
    from qcompiler.inspect.terminal import show
    from qcompiler.passes.pipeline import ALL_PASSES

    if options.list:
        print(list_passes())
        return
    text = read_text(options.file)
    syntax = "mlir" if options.mlir else "generic" if options.generic else "pretty"
    where = "<stdin>" if options.file == "-" else options.file
    # QC_PRINT_AFTER may be set for all commands: the stages of the frontends are no passes, and no error either
    dumps = StageDumps(print_after=print_after_of(print_after(options), (*FRONTEND_STAGES, *ALL_PASSES)))
    passes = ",".join(options.passes)
    shown = run_passes(text, passes, syntax, options.context, where=where, verify_each=options.verify_each, dumps=dumps)
    show(shown.removesuffix("\n"), "ir")
    if options.timing:
        print(dumps.timing(), file=sys.stderr)


def _reduce(options: argparse.Namespace) -> int:
    from qcompiler.reduce.command import reduce

    check_writable(options.output)
    return reduce(options)


def _doctor(options: argparse.Namespace) -> int:
    if options.model is not None:
        return _doctor_model(options)
    from qcompiler.inspect.doctor import compiles, diagnose, examine, problems

    facts = examine()
    found = diagnose(facts, options.target, measure=not options.no_measure)
    print(json.dumps(found.as_dict(), indent=1) if options.json else found)
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
