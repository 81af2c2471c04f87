"""All operators of a model that do not lower, at once: the examination behind `qc doctor --model`.

The model is exported as `qcompile` does it, without reading the values of its weights.  Every node then goes to its
builder.  If it has none, or the builder refuses, the problem is recorded, and a stand-in of the node's type takes its
place, so that later nodes are examined, too.  Nodes that fail only because of an unknown size are not reported again.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from xdsl.ir import Operation

from qcompiler.errors import ArgumentError, QCompilerError, UnsupportedOperatorError
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.torch.aten.scope import Result, Scope
from qcompiler.frontends.torch.aten.table import BUILDERS
from qcompiler.frontends.torch.capture.export import Refusal, export_model
from qcompiler.frontends.torch.common.origins import describe
from qcompiler.frontends.torch.common.values import dtype_name
from qcompiler.frontends.torch.importer import IGNORED, Importer
from qcompiler.frontends.weights.weight_source import NoValues
from qcompiler.ir import qc, types
from qcompiler.ir.module import path_of
from qcompiler.ir.types import tensor_dtype
from qcompiler.kernels.select import FLOATS, templates
from qcompiler.passes.lowering.kinds import FLOAT_ONLY, TEMPLATES
from qcompiler.plan.torch_regions import TorchOp, TorchRegion
from qcompiler.units import counted

PLACES = 8
"""Maximum number of places listed in a finding; for the rest there is a count."""


@dataclass(frozen=True)
class Finding:
    """One operator that does not lower, for one reason: how often, where, and the way out (`why`)."""

    operator: str
    why: str
    count: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All operators of the exported graph with their number of uses, and those that do not lower."""

    operators: Mapping[str, int]
    findings: tuple[Finding, ...]
    device: str = "cpu"

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        uses = sum(self.operators.values())
        lines = [f"{counted(uses, 'operator')} of {counted(len(self.operators), 'kind')}, for {self.device}"]
        failing = {finding.operator for finding in self.findings}
        lowered = [f"{name} ({count})" for name, count in self.operators.items() if name not in failing]
        if lowered:
            lines.append("lower:          " + ", ".join(lowered))
        for finding in self.findings:
            lines.append(f"does not lower: {finding.operator}, {finding.count} x: {finding.why}")
            lines += [f"    at {place}" for place in finding.places]
            more = finding.count - len(finding.places)
            lines += [f"    and {more} more"] if finding.places and more > 0 else []
        lines.append("everything lowers" if self.ok else counted(len(self.findings), "problem"))
        return "\n".join(lines)


def doctor(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    device: str = "cpu",
) -> Diagnosis:
    """Lists everything in a model that `qcompile` would refuse; compiles nothing, and runs nothing on `device`.

    Arguments are those of `qcompile`.  The model may be built under `qc.empty_weights()`.  If torch.export itself
    fails, that is the one finding "torch.export".  ArgumentError for a device that does not exist.
    """
    kind = {"cpu": "cpu", "cuda": "cuda", "sim": "cuda"}.get(device.partition(":")[0])
    if kind is None:
        raise ArgumentError(f"device {device!r}: programs run on cpu, cuda:N and sim:N")
    notes = _Notes()
    refused: list[Refusal] = []
    try:
        exported = export_model(model, args, kwargs, dynamic_shapes, refused=refused)
        refusals = {node for node, _ in refused}
        for node, error in refused:
            if not refusals & set(node.all_input_nodes):  # else a consequence of another one
                notes.add(str(node.target), error, node)
        importer = _Examiner(insert_qdq(exported, None, NoValues()), notes, refusals)
        importer.examine()
    except QCompilerError as error:
        notes.add("torch.export", error)
        return Diagnosis({}, notes.findings(), device)
    for op in importer.block.ops:
        _judge_kernel(op, kind, notes)
    return Diagnosis(dict(importer.operators.most_common()), notes.findings(), device)


@dataclass
class _Notes:
    """Problems by operator and reason."""

    found: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, name: str, error: Exception | str, node: fx.Node | None = None, place: str = "") -> None:
        where = describe(node).strip() if node is not None else place
        why = str(error).replace(f" {where}", "") if where else str(error)
        self.found.setdefault((name, why), []).append(where.removeprefix("in module "))

    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(name, why, len(places), tuple(dict.fromkeys(p for p in places if p))[:PLACES])
            for (name, why), places in self.found.items()
        )


class _Examiner(Importer):
    """Imports everything that can be imported and records the rest."""

    def __init__(self, quantized: Quantized, notes: _Notes, refused: set[fx.Node]) -> None:
        super().__init__(quantized, None)
        names = {node.name for node in refused}  # insert-qdq may have copied the graph
        self.notes, self.refused, self.unknown = notes, names, set[fx.Node]()
        self.operators: Counter[str] = Counter()

    def examine(self) -> None:
        self._placeholders()
        called: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            if node.op == "get_attr" and node.users:
                user = next(iter(node.users))
                if user not in called:
                    self.operators[str(user.target)] += 1
                    self._note(user, lambda user=user: self._refuse_subgraph(user))
                called.add(user)
            elif node.op == "call_function" and not (_is_size(node) or node.target in IGNORED or node in called):
                self._examine(node)

    def _examine(self, node: fx.Node) -> None:
        if node.target is not operator.getitem and node.target is not torch.ops.qc.dequantize.default:
            self.operators[str(node.target)] += 1
        if node in self.unknown or not node.users:
            return
        if node.name in self.refused:  # reported already
            self.unknown.add(node)
        elif any(each in self.unknown for each in node.all_input_nodes):
            if node.target not in BUILDERS and not str(node.target).startswith("qc."):
                self._note(node, lambda: self._build(self.scope.at(node), node))
            self.unknown.add(node)
        else:
            self._note(node, lambda: self._call(node))

    def _note(self, node: fx.Node, build: Any) -> None:
        try:
            build()
        except QCompilerError as error:
            self.notes.add(str(node.target), error, node)
            self._stand_in(node)
        except NotImplementedError as error:
            self.notes.add(str(node.target), UnsupportedOperatorError(f"{node.target}: {error}"), node)
            self._stand_in(node)

    def _stand_in(self, node: fx.Node) -> None:
        """A value of the node's type, or a note that nothing behind it can be examined."""
        try:
            self.scope.values[node] = self._of_its_type(self.scope.at(node), node)
        except (QCompilerError, KeyError, AttributeError):
            self.unknown.add(node)

    def _of_its_type(self, scope: Scope, node: fx.Node) -> Result:
        inputs = [scope.value(each) for each in node.all_input_nodes if not _is_size(each)]
        value = node.meta["val"]
        metas = value if isinstance(value, list | tuple) else [value]
        kinds = [types.tensor(scope.symbols.shape(meta.shape), dtype_name(meta.dtype)) for meta in metas]
        call = TorchOp(target=str(node.target), args=tuple({"v": i} for i in range(len(inputs))), results=len(kinds))
        results = range(len(inputs), len(inputs) + len(kinds))
        op = qc.TorchCallOp(TorchRegion(inputs=len(inputs), ops=(call,), outputs=tuple(results)), inputs, kinds)
        scope.builder.insert(op)
        return tuple(op.outputs) if isinstance(value, list | tuple) else op.outputs[0]


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool)


def _judge_kernel(op: Operation, kind: str, notes: _Notes) -> None:
    """Records whether the device lacks a kernel for an imported op, or for its types."""
    place = f"'{path_of(op)}'" if path_of(op) else ""
    template = TEMPLATES.get(type(op))
    if template is not None and template not in templates(kind):
        why = f"{op.name} has no kernel for {kind}; compute it outside of the compiled model and pass the result in"
        notes.add(op.name, why, place=place)
    elif isinstance(op, FLOAT_ONLY):
        dtype = tensor_dtype(op.results[0].type)
        if dtype not in FLOATS:
            why = f"{op.name} is {dtype}, its kernels take {', '.join(FLOATS)}; convert its operands with .float()"
            notes.add(op.name, why, place=place)


__all__ = ["Diagnosis", "Finding", "doctor"]
