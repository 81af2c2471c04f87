"""Many graphs as one program, so that one export and one run of the host's compiler serve them all.

Answers are compared one by one (`Failure.component` says which):

    export      the rewritten program in eager torch (weights quantised) against the graph's statements in eager torch
    import      the reference interpreter on the imported module
    passes      the same after fuse-elementwise, the last pass at the tensor level
    schedule    the interpreter of schedules on poisoned memory, after plan-memory
    native      the compiled kernels, one function
    stepwise    the same plan walked step by step: every bit of native
    file        saved and loaded: every bit of native
    mlir        upstream MLIR on what the passes made
    sim         the CUDA kernels on the simulated GPU

An exception stands for all graphs of the program; `isolate` finds those that raise it alone.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphfuzz.compare import difference
from graphfuzz.graphs import Graph, build_module
from graphfuzz.shadow import Meaningless, Trial, run_graph, written_states
from qcompiler.config import QuantConfig, Rule
from qcompiler.errors import InterpreterError, QCompilerError
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.importer import ImportResult
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.interpreter import Interpreter, bind_symbols
from qcompiler.ir.module import entry_funcs
from qcompiler.passes.checks.answers import answers
from qcompiler.passes.pipeline import run_pipeline
from qcompiler.runtime import compiler
from qcompiler.runtime.image import ProgramTarget, build_image
from qcompiler.runtime.isa import resolve_isa
from qcompiler.runtime.loaded import LoadedProgram

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Failure:
    """What went wrong with which graph of a batch; `graph` is None for an exception that names none."""

    graph: int | None
    component: str
    detail: str

    @property
    def kind(self) -> str:
        """What a shrunk graph has to keep: the component, and the exception's class if it was one."""
        first = self.detail.partition(":")[0]
        return f"{self.component}: {first}" if self.graph is None or first.endswith("Error") else self.component


@dataclass(frozen=True)
class Checks:
    """What a batch is held against beside export, import, passes and native."""

    schedule: bool = False
    stepwise: bool = False
    file: bool = False
    mlir: bool = False
    sim: bool = False
    verify_each: bool = False
    """Run the interpreter around every pass, and hold each to what it promises."""
    native: bool = True
    optimise: str = "-O1"
    """-O3 is what users get; it takes the host's compiler three times as long, and the numbers are the same."""
    isa: str | None = None
    static: bool = False
    """Fixed sizes: those of the third set, and nothing is dynamic."""


@dataclass
class Report:
    failures: list[Failure] = field(default_factory=list)
    set_aside: int = 0
    """Graphs whose quantised weights made a comparison meaningless."""
    operators: dict[str, int] = field(default_factory=dict)
    """Calls of each ATen operator in the exported program."""
    compared: dict[str, int] = field(default_factory=dict)
    """Tensors compared, by component."""


class Batch(torch.nn.Module):
    """Graphs side by side: their inputs one after another, a tuple of their results each."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        super().__init__()
        self.counts = [len(graph.inputs) for graph in graphs]
        self.parts = torch.nn.ModuleList(build_module(g, f"graph_{i}.py") for i, g in enumerate(graphs))

    def forward(self, *inputs: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        results, first = [], 0
        for part, count in zip(self.parts, self.counts, strict=True):
            results.append(part(*inputs[first : first + count]))
            first += count
        return tuple(results)


_Value = tuple[int, str, torch.Tensor, torch.Tensor | None]


@dataclass
class _Wanted:
    """Answers of one set of sizes: flat inputs, and for each output its graph, name, value and tolerance."""

    inputs: list[torch.Tensor]
    outputs: list[_Value | None]
    states: dict[str, _Value]
    """What the call leaves in the buffers that it writes."""

    @property
    def arrays(self) -> list[Any]:
        return [to_numpy(value) for value in self.inputs]


def check(graphs: Sequence[Graph], sizes: Sequence[Sizes], checks: Checks | None = None) -> Report:
    """Compiles the graphs as one program and compares. Failures that are exceptions name no graph."""
    checks = checks or Checks()
    report = Report()
    run = _Run(graphs, sizes, checks, report)
    for component, step in (
        ("export", run.export),
        ("passes", run.pipeline),
        ("native", run.natively),
        ("mlir", run.mlir),
        ("sim", run.simulated),
    ):
        try:
            with warnings_off():
                step()
        except Exception as error:
            report.failures.append(Failure(None, run.component or component, _words(error)))
            break
    return report


def _words(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error)[:1500]}"
    if isinstance(error, QCompilerError):
        return text
    return text + "\n" + "".join(traceback.format_tb(error.__traceback__)[-4:])


class _Run:
    def __init__(self, graphs: Sequence[Graph], sizes: Sequence[Sizes], checks: Checks, report: Report) -> None:
        self.graphs, self.checks, self.report = graphs, checks, report
        self.sizes = list(enumerate(sizes))[2:] if checks.static else list(enumerate(sizes))
        self.component = "generator"
        self.model = Batch(graphs).eval()
        self.wanted: list[_Wanted] = []

    # --- export and import ---

    def export(self) -> None:
        self.component = "export"
        index, symbols = self.sizes[0]
        plain = [run_graph(graph, symbols, index) for graph in self.graphs]
        example = [
            trial.eager[leaf.name] for graph, trial in zip(self.graphs, plain, strict=True) for leaf in graph.inputs
        ]
        specs = tuple(spec for graph in self.graphs for spec in graph.dynamic_shapes())
        dynamic = (specs,) if any(specs) and not self.checks.static else None
        self.imported = import_torch(self.model, tuple(example), quant=self._recipe(), dynamic_shapes=dynamic)
        for node in self.imported.quantized.exported.graph.nodes:
            if node.op == "call_function":
                name = str(node.target)
                self.report.operators[name] = self.report.operators.get(name, 0) + 1
        self._prepare()
        held = {key: tensor.clone() for key, tensor in self.imported.quantized.exported.program.state_dict.items()}
        for wanted in self.wanted:
            results = self.imported.quantized.module(*wanted.inputs)
            self._compare([value for part in results for value in part], wanted)
            for key, tensor in self.imported.quantized.exported.program.state_dict.items():
                with torch.no_grad():
                    tensor.copy_(held[key])
        self.component = "import"
        self._interpret(self.imported.module, self.imported.weights)

    def _interpret(self, module: Any, weights: Any) -> None:
        """The interpreter at all sizes, each call with the buffers as the model has them at first."""
        interpreter = Interpreter(module, weights)
        for wanted in self.wanted:
            states = {key: np.array(value) for key, value in self.imported.states.items()}
            self._compare(interpreter.run(wanted.arrays, states=states), wanted)
            self._compare_states(states, wanted)

    def _compare_states(self, states: Mapping[str, Any], wanted: _Wanted) -> None:
        for key, value in wanted.states.items():
            self._compare_one(states[key], value)

    def _recipe(self) -> QuantConfig | None:
        rules = [
            Rule(f"parts.{i}.{attribute}", fmt) for i, graph in enumerate(self.graphs) for attribute, fmt in graph.quant
        ]
        return QuantConfig("float", rules=tuple(rules)) if rules else None

    def _prepare(self) -> None:
        for index, symbols in self.sizes:
            inputs: list[torch.Tensor] = []
            outputs: list[_Value | None] = []
            states: dict[str, _Value] = {}
            for number, graph in enumerate(self.graphs):
                trial = self._trial(number, graph, symbols, index)
                inputs += [trial.eager[leaf.name] for leaf in graph.inputs]
                for name in graph.outputs:
                    known = name in trial.eager
                    outputs.append((number, name, trial.eager[name], trial.tolerance(name)) if known else None)
                for buffer, name in written_states(graph).items():
                    key = f"parts.{number}.{buffer.removeprefix('self.')}"
                    if name in trial.eager:
                        states[key] = (number, buffer, trial.eager[name], trial.tolerance(name))
            self.wanted.append(_Wanted(inputs, outputs, states))

    def _trial(self, number: int, graph: Graph, symbols: Sizes, index: int) -> Trial:
        def weights(attribute: str) -> torch.Tensor | None:
            return self._decoded(f"parts.{number}.{attribute}") if attribute in dict(graph.quant) else None

        try:
            return run_graph(graph, symbols, index, weights)
        except Meaningless:
            if not graph.quant:
                raise
            self.report.set_aside += 1
            trial = Trial(symbols, index)
            for leaf in graph.inputs:
                trial.leaf(leaf)
            return trial

    def _decoded(self, key: str) -> torch.Tensor | None:
        """A quantised weight as the rewritten program decodes it, by torch's own operator."""
        from qcompiler.config import format_text

        if key not in self.imported.weights or self.imported.weights[key].format is None:
            return None
        stored = self.imported.weights[key]
        assert stored.format is not None
        packed = torch.from_numpy(np.array(stored.data))
        dtype = self.model.get_parameter(key).dtype
        decoded: torch.Tensor = torch.ops.qc.dequantize(packed, format_text(stored.format), list(stored.shape), dtype)
        return decoded

    # --- passes ---

    def pipeline(self) -> None:
        self.component = "passes"
        target = Target("cpu", resolve_isa(self.checks.isa))
        self.context = QCContext.default(weights=self.imported.weights.copy(), target=target, devices=("cpu",))
        self.module = self.imported.module.clone()
        samples = self.wanted[-1].arrays if self.checks.verify_each else None
        run_pipeline(
            self.module, self.context, on_stage=self._after_stage, sample_inputs=samples,
            verify_each="numerics" if self.checks.verify_each else None,
        )  # fmt: skip

    def _after_stage(self, name: str, module: Any, _seconds: float, _changed: bool) -> None:
        if name == "fuse-elementwise":
            if self.checks.mlir:  # packing the weights comes later
                self.fused, self.fused_weights = module.clone(), self.context.weights.copy()
            for wanted in self.wanted:
                self._all_entries(module, wanted)
        if name == "plan-memory" and self.checks.schedule:
            self.component = "schedule"
            wanted = self.wanted[-1]
            self._all_entries(module, wanted)
        self.component = "passes"

    def _all_entries(self, module: Any, wanted: _Wanted) -> None:
        """The module's entry points that take inputs of these sizes, interpreted."""
        states = {key: np.array(value) for key, value in self.imported.states.items()}
        for results in answers(module, self.context, wanted.arrays, states).values():
            self._compare(results[: len(wanted.outputs)], wanted)
            self._compare_states(dict(zip(sorted(states), results[len(wanted.outputs) :], strict=True)), wanted)

    # --- running ---

    def natively(self) -> None:
        if not self.checks.native:
            return
        self.component = "native"
        assert self.context.emitted is not None
        plan = self.context.emitted.plan
        isa = self.context.target.isa
        image = build_image(
            plan, self.imported.signature, self.context.weights, target=ProgramTarget(kind="cpu", isa=isa)
        )
        with quick_compiler(self.checks.optimise):
            program = LoadedProgram.from_image(image, "cpu", isa=isa)
            session, steps = program.session(), program.session(stepwise=True)
            given = [self._call(session, wanted) for wanted in self.wanted]
            if self.checks.stepwise:
                self.component = "stepwise"
                for results, wanted in zip(given, self.wanted, strict=True):
                    steps.reset()
                    self._same_bits(self._flat(steps(*wanted.inputs)), results)
            if self.checks.file:
                self.component = "file"
                self._through_a_file(program, given)

    def _call(self, session: Any, wanted: _Wanted) -> list[torch.Tensor]:
        """A call that begins with the buffers as the model has them at first, compared; its results."""
        session.reset()
        results = self._flat(session(*wanted.inputs))
        self._compare(results, wanted)
        if wanted.states:
            held = session.states()
            self._compare_states({key: held_state(held, key, v[2]) for key, v in wanted.states.items()}, wanted)
        return results

    def _through_a_file(self, program: LoadedProgram, given: list[list[torch.Tensor]]) -> None:
        from qcompiler.runtime import load
        from qcompiler.runtime.program_file import save_image

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "fuzz.qca"
            save_image(program.image_with_native(), path)
            loaded = load(path, trust_native=True)
            for results, wanted in zip(given, self.wanted, strict=True):
                loaded.reset()
                self._same_bits(self._flat(loaded(*wanted.inputs)), results)

    def mlir(self) -> None:
        if not self.checks.mlir:
            return
        self.component = "mlir"
        from qcompiler.ir.mlir_oracle import run_with_mlir
        from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass

        wanted = self.wanted[-1]
        entries = [f.sym_name.data for f in entry_funcs(self.fused) if _takes(f, wanted.arrays)]
        assert entries, "no entry point takes the inputs"
        LowerQcToLinalgPass().apply(self.context, self.fused)
        self.fused.verify()
        for entry in entries:
            states = {key: np.array(value) for key, value in self.imported.states.items()}
            results = run_with_mlir(self.fused, self.fused_weights, wanted.arrays, entry, states)
            self._compare(results, wanted)
            self._compare_states(states, wanted)

    def simulated(self) -> None:
        if not self.checks.sim:
            return
        self.component = "sim"
        context = QCContext.default(
            weights=self.imported.weights.copy(), target=Target("cuda", "sm_80"), devices=("cuda:0",)
        )
        module = self.imported.module.clone()
        run_pipeline(module, context)
        assert context.emitted is not None
        plan = context.emitted.plan
        image = build_image(
            plan, self.imported.signature, context.weights, target=ProgramTarget(kind="cuda", isa="sm_80")
        )
        program = LoadedProgram.from_image(image, "sim:0")
        session = program.session()
        for wanted in self.wanted[-2:]:
            self._call(session, wanted)

    # --- comparing ---

    @staticmethod
    def _flat(results: Any) -> list[torch.Tensor]:
        return [value for part in results for value in part]

    def _compare(self, results: Sequence[Any], wanted: _Wanted) -> None:
        assert len(results) == len(wanted.outputs), f"{len(results)} results, not {len(wanted.outputs)}"
        for got, want in zip(results, wanted.outputs, strict=True):
            if want is not None:
                self._compare_one(got, want)

    def _compare_one(self, got: Any, want: _Value) -> None:
        number, name, value, tolerance = want
        if any(failure.graph == number for failure in self.report.failures):
            return
        self.report.compared[self.component] = self.report.compared.get(self.component, 0) + 1
        found = difference(got, value, tolerance)
        if found is not None:
            self.report.failures.append(Failure(number, self.component, f"{name} {found}"))

    def _same_bits(self, results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        numbers = [number for number, graph in enumerate(self.graphs) for _ in graph.outputs]
        for number, got, want in zip(numbers, results, wanted, strict=True):
            self.report.compared[self.component] = self.report.compared.get(self.component, 0) + 1
            if to_numpy(got).tobytes() != to_numpy(want).tobytes():
                self.report.failures.append(Failure(number, self.component, "other bits than native"))


def _takes(function: Any, inputs: Sequence[Any]) -> bool:
    """Whether an entry point takes inputs of these sizes."""
    try:
        bind_symbols(function, inputs)
    except InterpreterError:
        return False
    return True


def held_state(held: Mapping[str, Any], key: str, like: torch.Tensor) -> Any:
    """One state out of the bytes of a session's arenas."""
    array = to_numpy(like)
    return held[f"state.{key}"][: array.nbytes].view(array.dtype).reshape(array.shape)


@contextlib.contextmanager
def quick_compiler(level: str) -> Iterator[None]:
    """The host's compiler with other flags for its level; libraries of each level have keys of their own."""
    plain = compiler.flags_for

    def flags(isa: str) -> tuple[str, ...]:
        return tuple(each for flag in plain(isa) for each in (level.split() if flag.startswith("-O") else (flag,)))

    compiler.flags_for = flags  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler.flags_for = plain


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def isolate(
    graphs: Sequence[Graph], sizes: Sequence[Sizes], checks: Checks, report: Report
) -> list[tuple[int, Failure]]:
    """Every failing graph of a batch with its failure. An exception is that of the graph that its text names, if it
    still fails alone; else the batch is halved."""
    found = [(failure.graph, failure) for failure in report.failures if failure.graph is not None]
    raised = [failure for failure in report.failures if failure.graph is None]
    if not raised:
        return found
    if len(graphs) == 1:
        return [*found, (0, raised[0])]
    done = {number for number, _ in found}
    named = re.search(r"\b(?:parts\.|graph_)(\d+)", raised[0].detail)
    guilty = int(named.group(1)) if named else -1
    if 0 <= guilty < len(graphs) and guilty not in done:
        alone = _again([guilty], graphs, sizes, checks)
        if alone:
            done.add(guilty)
            rest = [i for i in range(len(graphs)) if i not in done]
            return found + alone + _again(rest, graphs, sizes, checks)
    rest = [i for i in range(len(graphs)) if i not in done]
    middle = (len(rest) + 1) // 2
    return found + _again(rest[:middle], graphs, sizes, checks) + _again(rest[middle:], graphs, sizes, checks)


def _again(
    numbers: list[int], graphs: Sequence[Graph], sizes: Sequence[Sizes], checks: Checks
) -> list[tuple[int, Failure]]:
    """Failures among some of the graphs, by their numbers in all."""
    if not numbers:
        return []
    some = [graphs[i] for i in numbers]
    return [(numbers[i], failure) for i, failure in isolate(some, sizes, checks, check(some, sizes, checks))]


Check = Callable[[Sequence[Graph], Sequence[Sizes], Checks], Report]
__all__ = ["Batch", "Check", "Checks", "Failure", "ImportResult", "Report", "check", "isolate", "quick_compiler"]
