"""Gathers what the explorer shows, of a program in memory or of a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from qcompiler import __version__
from qcompiler.errors import ArgumentError, CorruptFileError
from qcompiler.inspect.explore.machine_code import machine_code
from qcompiler.inspect.explore.model import (
    MODEL_VERSION,
    Collected,
    Decision,
    Entry,
    Errors,
    Facts,
    Kernel,
    LedgerLine,
    Model,
    Origin,
    Sort,
    SourceLine,
)
from qcompiler.inspect.explore.schedule import Times, arena_records, entry_records, format_text
from qcompiler.inspect.explore.stages import StageText, Texts, stage_records
from qcompiler.inspect.files import SOURCE_STAGE, source_file
from qcompiler.inspect.source_lines import Lines, read_lines
from qcompiler.kernels.cpu.emit import emit_numbered, scratch_bytes
from qcompiler.kernels.cuda import emit as cuda
from qcompiler.kernels.numbered import numbered
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.plan import Plan
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime.plan_bodies import check_bodies
from qcompiler.runtime.plan_text import check_plan_text
from qcompiler.runtime.program_file import Header, read_program
from qcompiler.runtime.tree import check_signature, names_in_order

_NO_SASS = (
    "The machine code (SASS) of the CUDA kernels, and their registers: prog.explore(sass=True) and "
    "qc inspect --html OUT --sass compile them."
)
_NO_ERRORS = (
    "Errors of layers and stages: prog.explore(error=prog.errors(x, model=model)) and "
    "qc inspect --html OUT --error x.npz --model package.module:function measure them."
)
_NO_LINES = "The model's source lines: the model was read from a text that names none."
_NO_LINES_IN_FILE = (
    "The model's source lines: the file was saved without them, since they name paths of a machine "
    "(prog.save(source_lines=True), qc compile --source-lines)."
)
_NO_STAGES = (
    "The IR of the stages: the file was saved without it (qc compile without --no-stages, prog.save(stages=True) and "
    "lm.save(stages=True) put it in)."
)
_FROM_FILE = (
    "The torch graphs of the stages export and insert-qdq: a file does not hold them.",
    "The seconds of the stages: a file does not hold them.",
)


@dataclass(frozen=True)
class Contents:
    """What a page is made of. `ledger` is the JSON value of `Ledger.to_json`, or None."""

    plan: Plan
    kind: str
    isa: str
    origin: Origin
    source: str
    stages: Sequence[StageText]
    decisions: Iterable[Mapping[str, Any]]
    ledger: Any
    qcompiler: str = __version__
    absent: Sequence[str] = ()
    times: Times = field(default_factory=dict)
    """Measured seconds of steps, by id; the others are estimated."""
    lines: Lines = field(default_factory=dict)
    """The model's source lines by module path."""
    errors: Errors | None = None
    sass: bool = False
    """Whether CUDA kernels are compiled and disassembled."""
    results: Sequence[str] = ()
    """The names of the results in the plan's order; those of the plan without."""


def collect(contents: Contents) -> Collected:
    """The model of the page, and its texts. Raises the errors of the emitter and of the timeline.

    With `sass`: ArgumentError for a program for a CPU, MissingDependencyError for NVRTC and nvdisasm.
    """
    plan = contents.plan
    texts = Texts()
    stages = stage_records(contents.stages, texts)
    kernels = _kernels(contents, texts)
    entries = entry_records(plan, contents.isa, contents.times, contents.results)
    rows, totals = _ledger(contents)
    model = Model(
        version=MODEL_VERSION,
        facts=Facts(
            title=f"{Path(contents.source).name} for {contents.isa}", qcompiler=contents.qcompiler,
            kind=contents.kind, isa=contents.isa, origin=contents.origin,
            source=contents.source, devices=tuple(device.name for device in plan.devices),
        ),
        absent=(*contents.absent, *_times_note(entries), *_missing(contents)),
        stages=stages,
        kernels=kernels,
        entries=entries,
        arenas=arena_records(plan, entries),
        ledger=rows,
        totals=totals,
        decisions=_decisions(contents),
        lines={
            path: tuple(SourceLine(text=text, ops=tuple(ops)) for text, ops in found)
            for path, found in contents.lines.items()
        },
        errors=contents.errors,
    )  # fmt: skip
    return Collected(model, texts.all())


def _missing(contents: Contents) -> list[str]:
    """What the page could hold and does not."""
    found = []
    if contents.kind != "cpu" and not contents.sass:
        found.append(_NO_SASS)
    if contents.errors is None:
        found.append(_NO_ERRORS)
    if not contents.lines:
        found.append(_NO_LINES if contents.origin == "compile" else _NO_LINES_IN_FILE)
    return found


def contents_of_file(
    path: str | Path, times: Times | None = None, *, errors: Errors | None = None, sass: bool = False
) -> Contents:
    """What a `.qca` file holds. The plan is proven safe first, since kernels are emitted from it.

    `times`, `errors` and `sass` are those of `Contents`.
    The page names the file without its folder, since it is made to be sent to others.
    Raises the errors of `qc inspect`, PlanError and ScheduleError.
    """
    path = Path(path)
    header, texts = read_program(path)
    check_plan_text(header.plan)
    verify_plan(header.plan)
    check_bodies(header.plan)
    stages = _stage_texts(texts)
    absent = _FROM_FILE if stages else (*_FROM_FILE, _NO_STAGES)
    return Contents(
        header.plan, header.target.kind, header.target.isa, "file", in_utf8(path.name), stages,
        header.report if header.report is not None else [], header.ledger, header.qcompiler, absent, times or {},
        read_lines(texts, str(path)), errors, sass, _results(header),
    )  # fmt: skip


def _results(header: Header) -> Sequence[str]:
    if not header.plan.entries:
        return ()
    first, signature = header.plan.entries[0], header.signature
    check_signature(signature.inputs, signature.outputs, len(first.inputs), len(first.outputs))
    return names_in_order(signature.outputs, len(first.outputs))


def in_utf8(name: str) -> str:
    """A file's name; a byte of it that is no UTF-8 becomes a question mark, since the page is UTF-8."""
    return name.encode(errors="replace").decode()


_IR_FILE = re.compile(r"ir/(\d{1,4})-([^/]+)\.([a-z]+)")
"""`ir/02-import.mlir` is stage 2, import."""


def _stage_texts(texts: Mapping[str, str]) -> list[StageText]:
    """The stages of a file in order; the source of the kernels comes last."""
    named = [(found, name) for name in sorted(texts) if (found := _IR_FILE.fullmatch(name)) is not None]
    stages = [StageText(int(found[1]), found[2], found[3], texts[name]) for found, name in named]
    last = max((stage.index for stage in stages), default=-1)
    for kind, suffix in (("cpu", "cpp"), ("cuda", "cu")):
        if (name := source_file(kind)) in texts:
            stages.append(StageText(last + 1, SOURCE_STAGE, suffix, texts[name]))
    return stages


def _times_note(entries: Sequence[Entry]) -> Sequence[str]:
    """An entry point that was not measured has estimates, beside others that were."""
    names = [entry.name for entry in entries if not entry.measured_on]
    if not names:
        return ()
    where = "" if len(names) == len(entries) else f" of {', '.join(names)}"
    return (f"Measured times{where}: the times of launches are estimates (docs/timeline.md).",)


# --- kernels ---------------------------------------------------------------------------------------------------------


def _kernels(contents: Contents, texts: Texts) -> tuple[Kernel, ...]:
    plan, isa = contents.plan, contents.isa
    emit: Callable[[KernelSpec, int, str], _Emitted] = _emit_cpu if contents.kind == "cpu" else _emit_cuda
    if contents.sass and contents.kind == "cpu":
        raise ArgumentError("SASS is the machine code of a GPU, and this program is for a CPU: leave it out")
    built = machine_code(plan, isa) if contents.sass else {}
    kernels = []
    for number, spec in enumerate(plan.kernels):
        found, machine = emit(spec, number, isa), built.get(number)
        kernels.append(Kernel(
            number=number, name=spec.name, template=spec.template, serves=spec.serves,
            operands=tuple(map(_operand, spec.operands)), symbols=spec.symbols, digest=spec.digest,
            engine=found.engine, launch=found.launch, notes=found.notes, source=texts.add(found.text),
            sass=texts.add(machine.text) if machine is not None else -1,
            resources=machine.resources if machine is not None else "",
        ))  # fmt: skip
    return tuple(kernels)


@dataclass(frozen=True)
class _Emitted:
    text: str
    engine: str
    launch: str
    notes: tuple[str, ...] = ()


def _emit_cpu(spec: KernelSpec, number: int, isa: str) -> _Emitted:
    scratch = scratch_bytes(spec, isa)
    return _Emitted(emit_numbered(spec, number, isa), isa, f"{scratch:,} bytes of scratch memory per thread")


def _emit_cuda(spec: KernelSpec, number: int, isa: str) -> _Emitted:
    kernel = cuda.emit_kernel(numbered(spec, number), isa)
    # The geometry is that of the plan's own spec, in which sizes have the program's names.
    engine, geometry = cuda.engine_and_geometry(spec, isa)
    grid, block = (" x ".join(map(str, each)) for each in (geometry.grid, geometry.block))
    launch = f"grid {grid}, block {block}, {geometry.shared:,} bytes of shared memory"
    return _Emitted(kernel.text, engine, launch, kernel.notes)


def _operand(operand: Operand) -> str:
    shape = ", ".join(map(str, operand.shape))
    if operand.format is not None:
        where = f"{format_text(operand.format)} in {operand.layout}"
    else:
        where = f"strides ({', '.join(map(str, operand.strides))})"
    return f"{operand.access:2} {operand.name}: {operand.dtype}[{shape}], {where}"


# --- ledger and decisions --------------------------------------------------------------------------------------------


class _Row(msgspec.Struct):
    parameters: tuple[str, ...]
    shape: tuple[int, ...] = ()
    dtype: str = ""
    format: str = ""
    reason: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    padding: int = 0


class _Ledger(msgspec.Struct):
    totals: dict[str, str | int | float | None]
    rows: tuple[_Row, ...]


class _Choice(msgspec.Struct):
    stage: str
    path: str
    what: str
    why: str


def _ledger(contents: Contents) -> tuple[tuple[LedgerLine, ...], dict[str, Any]]:
    if contents.ledger is None:
        return (), {}
    try:
        known = msgspec.convert(contents.ledger, _Ledger, strict=True)
    except msgspec.ValidationError as error:
        raise CorruptFileError(f"{contents.source}: the ledger is malformed: {str(error)[:500]}") from error
    return tuple(_line(row) for row in known.rows), dict(known.totals)


def _line(row: _Row) -> LedgerLine:
    elements = 1
    for size in row.shape:
        elements *= size
    return LedgerLine(
        parameters=row.parameters, shape=row.shape, dtype=row.dtype, format=row.format, reason=row.reason,
        bits=8 * row.bytes_after / max(elements, 1), bytes_before=row.bytes_before, bytes_after=row.bytes_after,
        padding=row.padding,
    )  # fmt: skip


def _decisions(contents: Contents) -> tuple[Decision, ...]:
    try:
        known = msgspec.convert(list(contents.decisions), tuple[_Choice, ...], strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise CorruptFileError(f"{contents.source}: the report is malformed: {str(error)[:500]}") from error
    return tuple(
        Decision(stage=each.stage, path=each.path, what=each.what, why=each.why, sort=_sort(each)) for each in known
    )


def _sort(choice: _Choice) -> Sort:
    """The words are those that inspect/report.py sorts idioms by."""
    if choice.stage == "raise-idioms":
        if choice.what.endswith(" stays"):
            return "missed"
        return "idiom" if choice.what.startswith(("raised qc.", "found qc.")) else "other"
    return "kernel" if choice.stage == "select-kernels" else "other"
