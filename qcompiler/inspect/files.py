"""`qc inspect`: the contents of a `.qca` file, read and checked without compiling or running any of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from qcompiler.errors import ArgumentError, CorruptFileError
from qcompiler.inspect.report import step_kind, steps_text
from qcompiler.inspect.source_lines import LINES_FILE
from qcompiler.inspect.torch_share import TorchShare, torch_shares
from qcompiler.ledger import Ledger, LedgerRow
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.moved import counts, moved_text
from qcompiler.plan.plan import EntryPoint, Launch, Plan, Select, TensorSig, WeightEntry, to_json
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime.plan_bodies import check_bodies
from qcompiler.runtime.plan_text import check_plan_text
from qcompiler.runtime.program_file import Header, read_program
from qcompiler.runtime.timeline import Timeline, timeline
from qcompiler.runtime.tree import check_signature
from qcompiler.units import counted, human_bytes, printable

SOURCE_STAGE = "emit-kernels"
_SOURCE_FILES = {"cpu": "kernels/program.cpp", "cuda": "kernels/program.cu"}


MOST_DIMENSIONS = 64
"""torch has as many at most."""


def source_file(kind: str) -> str:
    """The name of the emitted source in a program file for a kind of target."""
    return _SOURCE_FILES[kind]


def describe(path: str | Path) -> dict[str, Any]:
    """All facts as JSON values; sizes in bytes. Raises ProgramFileError's subclasses and OSError."""
    path = Path(path)
    header, texts = read_program(path)
    plan = header.plan
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "qcompiler": header.qcompiler,
        "format": header.format,
        "plan_version": plan.version,
        "emitter_version": header.emitter_version,
        "target": {"kind": header.target.kind, "isa": header.target.isa},
        "layout": header.layout,
        "signature": _signature(path, header),
        "entries": [_entry(entry) for entry in plan.entries],
        "init_steps": len(plan.init.steps) if plan.init is not None else 0,
        "ledger": _totals(path, header.ledger),
        "weights": _weights(header.stored),
        "moved": counts(plan),
        "memory": _memory(plan),
        "kernels": _kernels(plan),
        "templates": _templates(plan),
        "stages": [stage_name(name) for name in stage_files(texts)],
        "native": [
            {"file": b.file, "isa": b.isa, "sha256": b.sha256, "compiler": b.compiler, "emitter": b.emitter_version}
            for b in header.native
        ],
        "torch": [share.as_dict() for share in torch_shares(plan)],
    }


def summary(path: str | Path) -> str:
    """The facts of `describe` as text, one screen."""
    facts = describe(path)
    versions = f"file format {facts['format']}, plan {facts['plan_version']}, emitter {facts['emitter_version']}"
    native = [f"{b['file']} for {b['isa']}, sha256:{b['sha256']}" for b in facts["native"]]
    lines = [
        f"{facts['file']}: {human_bytes(facts['bytes'])}, qcompiler {facts['qcompiler']}, {versions}",
        f"target      {facts['target']['kind']} {facts['target']['isa']}, weights in {facts['layout']} layout",
        f"signature   {facts['signature']}",
        *_section("entries", map(_entry_line, facts["entries"])),
    ]
    if facts["init_steps"]:
        lines.append(f"at load     {counted(facts['init_steps'], 'step')}, once")
    lines += _section("ledger", [_ledger_line(facts["ledger"])])
    lines += _section("weights", map(_weight_line, facts["weights"]))
    if facts["moved"] != {}:
        lines += _section("moved", [moved_text(facts["moved"])])
    lines += _section("memory", [f"{kind} {human_bytes(size)}" for kind, size in facts["memory"].items()])
    lines += _section("kernels", _kernel_lines(facts["templates"]))
    lines += _section("IR inside", [", ".join(facts["stages"]) or "none"])
    lines += _section("native", native or ["none"])
    if facts["torch"]:
        shares = [str(TorchShare(**share)) for share in facts["torch"]]
        lines += _section("torch", ["needed to run this, a part of it was left to torch", *shares])
    return printable("\n".join(lines))


def plan_json(path: str | Path) -> str:
    """The plan as indented JSON."""
    header, _ = read_program(path)
    return printable(msgspec.json.format(to_json(header.plan), indent=1).decode())


def timeline_of(path: str | Path, entry: str | None = None, symbols: Mapping[str, int] | None = None) -> Timeline:
    """The estimated timeline of an entry point (runtime/timeline.py). Raises the errors of `describe`, PlanError and
    ScheduleError for an unsafe plan, and ArgumentError for an unknown entry point or size."""
    header, _ = read_program(path)
    check_plan_text(header.plan)
    verify_plan(header.plan)
    check_bodies(header.plan)
    return timeline(header.plan, header.target.isa, entry, symbols)


# --- facts -----------------------------------------------------------------------------------------------------------


def ledger_of(path: str | Path) -> Ledger:
    """The ledger in a file, row by row. ArgumentError if the file holds none."""
    header, _ = read_program(path)
    if header.ledger is None:
        raise ArgumentError(f"{path} holds no ledger: it was not made by qcompile")
    totals = _checked(Path(path), header.ledger).totals
    rows: tuple[LedgerRow, ...] = _converted(Path(path), header.ledger["rows"], tuple[LedgerRow, ...])
    if any(len(row.shape) > MOST_DIMENSIONS for row in rows):  # their product would take forever
        raise CorruptFileError(f"{path}: the ledger in the file has a shape of more than {MOST_DIMENSIONS} dimensions")
    return Ledger(rows, totals.recipe, totals.promise_bits, totals.later)


def kernels_of(path: str | Path) -> list[dict[str, Any]]:
    """Every kernel: its name, its template, what it serves, the steps that launch it, its digest."""
    return _kernels(read_program(path)[0].plan)


class _Totals(msgspec.Struct):
    """The totals of a ledger (see qcompiler.ledger.Ledger.to_json)."""

    recipe: str
    bits_per_weight: float
    promise_bits: float | None
    bytes_before: int
    bytes_after: int
    padding: int = 0
    later: int = 0


class _Ledger(msgspec.Struct):
    totals: _Totals
    rows: list[dict[str, Any]]


def _totals(path: Path, ledger: Any) -> dict[str, Any] | None:
    if ledger is None:
        return None
    known = _checked(path, ledger)
    totals: dict[str, Any] = msgspec.to_builtins(known.totals)
    return totals | {"tensors": len(known.rows)}


def _checked(path: Path, ledger: Any) -> _Ledger:
    known: _Ledger = _converted(path, ledger, _Ledger)
    return known


def _converted(path: Path, value: Any, kind: Any) -> Any:
    """A part of the ledger as what it must be. CorruptFileError if it is something else."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise CorruptFileError(f"{path}: the ledger in the file is malformed: {str(error)[:500]}") from error


def _signature(path: Path, header: Header) -> str:
    """`(input_ids: i64[b, s]) -> f32[b, 384]` of the first entry point, with the names that a call may use."""
    if not header.plan.entries:
        raise CorruptFileError(f"{path}: the plan in the file has no entry point")
    entry, inputs, outputs = header.plan.entries[0], header.signature.inputs, header.signature.outputs
    check_signature(inputs, outputs, len(entry.inputs), len(entry.outputs))
    items, keys = inputs["args"]["items"], inputs["kwargs"]["keys"]
    names = [*inputs.get("names", [])[: len(items)]]
    names += [""] * (len(items) - len(names))
    named = zip([*names, *keys], [*items, *inputs["kwargs"]["items"]], strict=True)
    args = [f"{name}: {_tree(item, entry.inputs)}".removeprefix(": ") for name, item in named]
    return f"({', '.join(args)}) -> {_tree(outputs, entry.outputs)}"


def _tree(node: dict[str, Any], tensors: Sequence[TensorSig]) -> str:
    kind = node["kind"]
    if kind == "leaf":
        return _tensor(tensors[node["index"]])
    if kind in ("none", "constant"):
        return repr(node.get("value"))
    items = [_tree(item, tensors) for item in node["items"]]
    if kind == "tuple":
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if kind == "list":
        return f"[{', '.join(items)}]"
    pairs = ", ".join(f"{key}={item}" for key, item in zip(node["keys"], items, strict=True))
    return f"dict({pairs})" if kind == "dict" else f"{node['class'].rpartition(':')[2]}({pairs})"


def _tensor(sig: TensorSig) -> str:
    return f"{sig.dtype}[{', '.join(map(str, sig.shape))}]"


def _entry(entry: EntryPoint) -> dict[str, Any]:
    kinds = map(step_kind, entry.steps)
    return {
        "name": entry.name,
        "symbols": {symbol.name: [symbol.min, symbol.max] for symbol in entry.symbols},
        "inputs": [{"name": sig.name, "dtype": sig.dtype, "shape": list(sig.shape)} for sig in entry.inputs],
        "outputs": [{"name": sig.name, "dtype": sig.dtype, "shape": list(sig.shape)} for sig in entry.outputs],
        "steps": dict(Counter(kinds)),
    }


def _weights(stored: Iterable[WeightEntry]) -> list[dict[str, Any]]:
    """Tensors and bytes by format (or dtype, for plain values) and layout, as stored in the file."""
    groups: dict[tuple[str, str], list[int]] = {}
    for entry in stored:
        kind = _format(entry.format) if entry.format is not None else entry.dtype
        groups.setdefault((kind, entry.layout), []).append(entry.nbytes)
    return [
        {"stored": kind, "layout": layout, "tensors": len(sizes), "bytes": sum(sizes)}
        for (kind, layout), sizes in groups.items()
    ]


def _format(ref: FormatRef) -> str:
    params = ",".join(f"{key}={value}" for key, value in sorted(ref.params.items()))
    return f"{ref.name}:{params}" if params else ref.name


def _memory(plan: Plan) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for arena in plan.arenas:
        sizes[arena.kind] += arena.nbytes
    return dict(sizes)


def _kernels(plan: Plan) -> list[dict[str, Any]]:
    launches = Counter(name for step in _launches(plan) for name in step)
    return [
        {"name": spec.name, "template": spec.template, "serves": spec.serves, "launches": launches[spec.name],
         "digest": spec.digest}
        for spec in plan.kernels
    ]  # fmt: skip


def _templates(plan: Plan) -> dict[str, dict[str, int]]:
    """For each kernel template: its kernels, and the steps that launch one of them (a select counts once)."""
    template = {spec.name: spec.template for spec in plan.kernels}
    steps = Counter(name for step in _launches(plan) for name in {template.get(kernel, "unknown") for kernel in step})
    return {name: {"kernels": count, "steps": steps[name]} for name, count in Counter(template.values()).items()}


def _launches(plan: Plan) -> Iterator[set[str]]:
    """The kernels that each launching step may run, over all entry points and init."""
    for entry in [*plan.entries, *([plan.init] if plan.init is not None else [])]:
        for step in entry.steps:
            if isinstance(step, Launch):
                yield {step.kernel}
            elif isinstance(step, Select):
                yield {case.kernel for case in step.cases}


def stage_files(texts: Iterable[str]) -> list[str]:
    """The files of stages among the texts of a program file, in order."""
    return sorted(name for name in texts if name.startswith("ir/") and name != LINES_FILE) + [
        name for name in texts if name in _SOURCE_FILES.values()
    ]


def names_of(file: str) -> set[str]:
    """The names that a user may give to a stage: `import`, `2`, `02`, `02-import.mlir`, `ir/02-import.mlir`."""
    base = file.rpartition("/")[2]
    number = base.partition("-")[0]
    return {stage_name(file), file, base} | ({number, str(int(number))} if number.isdecimal() else set())


def stage_name(file: str) -> str:
    """`ir/02-import.mlir` -> `import`."""
    if file in _SOURCE_FILES.values():
        return SOURCE_STAGE
    stem = file.rpartition("/")[2].rpartition(".")[0]
    number, dash, rest = stem.partition("-")
    return rest if dash and number.isdecimal() else stem


# --- lines -----------------------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return [f"{title if number == 0 else '':12}{line}" for number, line in enumerate(lines)]


def _entry_line(entry: dict[str, Any]) -> str:
    ranges = ", ".join(f"{name} in [{low}, {high}]" for name, (low, high) in entry["symbols"].items())
    steps = steps_text(entry["steps"])
    return f"{entry['name']}({', '.join(sig['name'] for sig in entry['inputs'])}), {ranges or 'static shapes'}: {steps}"


def _ledger_line(totals: dict[str, Any] | None) -> str:
    if totals is None:
        return "none"
    promise = "no promise" if totals["promise_bits"] is None else f"promised {totals['promise_bits']}"
    before, after = human_bytes(totals["bytes_before"]), human_bytes(totals["bytes_after"])
    promise += f"; {counted(totals['later'], 'tensor')} in a later choice" if totals["later"] else ""
    promise += f"; {totals['padding']:,} bytes are padding" if totals["padding"] else ""
    bits = f"{totals['bits_per_weight']:.3f} bits per weight ({promise})"
    return f"recipe {totals['recipe']}, {counted(totals['tensors'], 'tensor')}, {before} -> {after}, {bits}"


def _weight_line(group: dict[str, Any]) -> str:
    return f"{group['tensors']} x {group['stored']} in {group['layout']}: {human_bytes(group['bytes'])}"


def _kernel_lines(templates: dict[str, dict[str, int]]) -> list[str]:
    lines = [f"{t['kernels']} {name}, launched by {counted(t['steps'], 'step')}" for name, t in templates.items()]
    return lines or ["none"]


def kernels_text(kernels: Sequence[Mapping[str, Any]]) -> str:
    """A line for each kernel, those with most launches first."""
    rows = [("kernel", "template", "launches", "serves")]
    ordered = sorted(kernels, key=lambda each: -int(each["launches"]))
    rows += [(each["name"], each["template"], str(each["launches"]), each["serves"] or "") for each in ordered]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:{wide[0]}}  {b:{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return printable("\n".join(lines))
