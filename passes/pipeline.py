"""The pipeline: one flat list of named stages, from the imported module to kernels.

    run_pipeline(module, ctx)                                   # all stages
    run_pipeline(module, ctx, stages=upto("fuse-elementwise"))  # a part
    run_pipeline(module, ctx, stages=with_options(STAGES, {"assign-streams": {"compute_streams": 1}}))
    run_pipeline(module, ctx, on_stage=write_dump, verify_each="numerics", sample_inputs=[x])

The module is verified after each stage. A failing stage raises `PassError` with a reproducer: a file with the IR before
that stage and the command that runs the stage again.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import parse_pipeline
from xdsl.utils.exceptions import ArgSpecParseError

from qcompiler.errors import ArgumentError, NumericsError, PassError, QCompilerError
from qcompiler.formats import cache_rows
from qcompiler.ir.context import QCContext
from qcompiler.ir.verified import Verifier
from qcompiler.passes.checks.answers import answers, initial_states, unrounded_answers
from qcompiler.passes.checks.cache_states import cache_columns
from qcompiler.passes.checks.numerics import (
    Exact,
    Finite,
    Numerics,
    Permits,
    Ulps,
    coarsest_epsilon,
    count_roundings,
    count_widenings,
    difference,
)
from qcompiler.passes.checks.reproducer import Reproducer, Samples, write_reproducer
from qcompiler.runtime import progress

Array = npt.NDArray[Any]
Arrays = Sequence[Array]
_Answers = dict[str, tuple[list[Array], dict[int, Array]]]
"""By entry point: results, and the distances of neighbouring codes of those that are quantised."""
VerifyEach = Literal["ir", "numerics"]
OnStage = Callable[[str, ModuleOp, float, bool], None]


def load_pass(name: str) -> type[ModulePass]:
    """The pass of that name: class `XxxYyyPass` in `passes/xxx_yyy.py`. PassError if there is none."""
    if name not in PASS_NAMES:
        raise PassError(f"there is no pass '{name}' (passes: {', '.join(PASS_NAMES)})", stage=name)
    module = importlib.import_module(f"qcompiler.passes.{name.replace('-', '_')}")
    found = getattr(module, "".join(part.capitalize() for part in name.split("-")) + "Pass")
    assert isinstance(found, type) and issubclass(found, ModulePass) and found.name == name
    return found


@dataclass(frozen=True)
class Stage:
    """A named step; `make` builds its pass."""

    name: str
    make: Callable[[], ModulePass]


def _stage(name: str) -> Stage:
    def make() -> ModulePass:
        return load_pass(name)()

    return Stage(name, make)


STAGES: tuple[Stage, ...] = (
    _stage("canonicalize"),
    _stage("cse"),
    _stage("dce"),
    _stage("lower-conv2d"),
    _stage("fold-views"),
    _stage("raise-idioms"),
    _stage("round-attention"),
    _stage("specialize"),
    _stage("hoist-constant-masks"),
    _stage("fuse-dequant-matmul"),
    _stage("pull-slices"),
    _stage("fuse-epilogues"),
    _stage("fuse-elementwise"),
    _stage("assign-devices"),
    _stage("fuse-glu"),
    _stage("fuse-routing"),
    _stage("fuse-experts"),
    _stage("merge-linears"),
    _stage("round-results"),
    _stage("fuse-norm-prologue"),
    _stage("fuse-row-statistics"),
    _stage("split-attention"),
    _stage("select-kernels"),
    _stage("pack-weights"),
    _stage("lower-to-rt"),
    _stage("merge-launches"),
    _stage("assign-streams"),
    _stage("plan-memory"),
    _stage("verify-schedule"),
    _stage("emit-kernels"),
)

PASS_NAMES: tuple[str, ...] = (*(stage.name for stage in STAGES), "lower-qc-to-linalg")
"""The passes of the stages in order, then the passes that run only by name."""

ALL_PASSES: dict[str, Callable[[], type[ModulePass]]] = {name: partial(load_pass, name) for name in PASS_NAMES}
"""Every pass by name, for `qc opt` and `xdsl-opt`. A pass is imported on first use."""


def upto(last: str) -> tuple[Stage, ...]:
    """The stages from the first to `last`, inclusive. PassError if there is no such stage."""
    names = [stage.name for stage in STAGES]
    if last not in names:
        raise PassError(f"there is no stage '{last}' (stages: {', '.join(names)})", stage=last)
    return STAGES[: names.index(last) + 1]


def with_options(stages: Sequence[Stage], options: Mapping[str, Mapping[str, object]]) -> tuple[Stage, ...]:
    """The stages with other options for some passes: `{stage: {field: value}}`."""

    def make(stage: Stage) -> ModulePass:
        return replace(stage.make(), **options[stage.name])

    return tuple(Stage(stage.name, partial(make, stage)) if options.get(stage.name) else stage for stage in stages)


def parse_passes(text: str) -> list[ModulePass]:
    """The passes of a text such as `canonicalize,assign-streams{compute-streams=4}`. ArgumentError for an unknown
    one."""
    try:
        specs = list(parse_pipeline(text))
    except ArgSpecParseError as error:
        raise ArgumentError(f"'{text}' is no list of passes: {error}") from error
    found = []
    for spec in specs:
        if spec.name not in ALL_PASSES:
            raise ArgumentError(f"no pass '{spec.name}'; the passes are: {', '.join(sorted(ALL_PASSES))}")
        try:
            found.append(ALL_PASSES[spec.name]().from_spec(spec))
        except ValueError as error:
            raise ArgumentError(f"the pass '{spec.name}' does not take these options: {error}") from error
    return found


@dataclass(frozen=True)
class StageTime:
    """The wall time of one stage, without verification."""

    name: str
    seconds: float


def run_pipeline(
    module: ModuleOp,
    ctx: QCContext,
    *,
    stages: Sequence[Stage] | None = None,
    on_stage: OnStage | None = None,
    verify_each: VerifyEach | None = None,
    sample_inputs: Arrays | None = None,
    sample_states: Mapping[str, npt.NDArray[Any]] | None = None,
) -> list[StageTime]:
    """Runs the stages on `module`, in place, and calls `on_stage(name, module, seconds, changed)` after each.

    `changed` is false if the stage left every op as it was.  What a stage changed is always verified after it
    (ir/verified.py). `verify_each="numerics"` also runs the program before and after each stage on `sample_inputs` (and
    `sample_states`, zeros by default). NumericsError names the first pass that changed the results by more than it
    declares. PassError for a failing pass. A QCompilerError of another class is raised unchanged, with a note that
    names the reproducer.
    """
    if verify_each == "numerics" and sample_inputs is None:
        raise QCompilerError('verify_each="numerics" needs sample inputs to run the program on')
    chosen = tuple(STAGES if stages is None else stages)
    start, start_ctx = module.clone(), ctx.clone()
    times: list[StageTime] = []
    verifier = Verifier()
    check = NumericsCheck(module, ctx, sample_inputs, sample_states) if verify_each == "numerics" else None
    for number, stage in enumerate(chosen):
        progress.stage(stage.name)
        made = stage.make()
        if check is not None:
            check.before(made, module, ctx)
        began = time.perf_counter()
        try:
            made.apply(ctx, module)
            seconds = time.perf_counter() - began
            changed = verifier.verify(module)
        except Exception as error:
            wanted = _reproducer(start, start_ctx, chosen[:number], made)
            reproducer, left = _left_behind(wanted, error, ctx)
            if isinstance(error, QCompilerError) and not isinstance(error, PassError):
                error.add_note(f"in stage '{stage.name}'; {f'to reproduce: {reproducer}' if reproducer else left}")
                raise
            raise PassError(
                f"stage '{stage.name}' failed: {error}\n{left}", stage=stage.name, reproducer=reproducer
            ) from error
        times.append(StageTime(stage.name, seconds))
        if on_stage is not None:
            on_stage(stage.name, module, seconds, changed)
        if check is not None:
            found = check.after(made, module, ctx)
            if found is not None:
                message = f"stage '{stage.name}' changed the program's answer: {found}"
                wanted = replace(_reproducer(start, start_ctx, chosen[:number], made), samples=check.samples)
                failure = NumericsError(message, stage=stage.name)
                reproducer, left = _left_behind(wanted, failure, ctx)
                raise NumericsError(f"{message}\n{left}", stage=stage.name, reproducer=reproducer)
    return times


def _left_behind(wanted: Reproducer, error: Exception, ctx: QCContext) -> tuple[str | None, str]:
    """Writes the reproducer. Returns its path, and the line that names it. A full disk must not hide `error`."""
    try:
        path = write_reproducer(wanted, error, ctx.report.decisions)
    except OSError as second:
        return None, f"no reproducer could be written: {second}"
    return path, f"reproducer, with a report beside it: {path}"


class NumericsCheck:
    """Compares the program's results before and after each pass. States that are not given start as zeros."""

    def __init__(
        self,
        module: ModuleOp,
        ctx: QCContext,
        inputs: Arrays | None,
        states: Mapping[str, npt.NDArray[Any]] | None,
    ) -> None:
        assert inputs is not None
        self._inputs = inputs
        self._states = {**initial_states(module), **(states or {})}
        self.samples = Samples(tuple(inputs), self._states)
        self._columns = cache_columns(module)
        self._answers = self._values(answers(module, ctx, inputs, self._states))
        self._roundings = count_roundings(module)
        self._widenings = count_widenings(module)
        self._epsilon = coarsest_epsilon(module)

    def before(self, made: ModulePass, module: ModuleOp, ctx: QCContext) -> None:
        """What the program computes without roundings, if the pass may delete some of them."""
        deletes = isinstance(getattr(made, "numerics", None), Ulps) and self._roundings.total() + self._widenings > 0
        self._unrounded = unrounded_answers(module, ctx, self._inputs, self._states) if deletes else None

    def after(self, made: ModulePass, module: ModuleOp, ctx: QCContext) -> str | None:
        """Describes how the results after a pass are wrong; None if they are right. New entry points are checked,
        too."""
        numerics = getattr(made, "numerics", Exact())
        if isinstance(numerics, Permits):
            return self._after_permission(numerics, module, ctx)
        now = self._values(answers(module, ctx, self._inputs, self._states))
        roundings, widenings = count_roundings(module), count_widenings(module)
        deleted = max(0, self._roundings.total() - roundings.total(), self._widenings - widenings)
        # A rounding to another type would not be seen in results without roundings.
        unrounded = deleted > 0 and self._unrounded is not None and roundings <= self._roundings
        found = self._beyond(self._answers, now, Finite() if unrounded else numerics, deleted=deleted)
        if found is None and unrounded:
            assert self._unrounded is not None
            plain = unrounded_answers(module, ctx, self._inputs, self._states)
            if plain is None:
                return "it reads bits of 16-bit floats now, or computes in fp64"
            what = ", without roundings to 16 bits"
            found = self._beyond(_exactly(self._unrounded), _exactly(plain), Exact(), what=what)
        if found is None:
            self._answers, self._roundings, self._widenings = now, roundings, widenings
        return found

    def _beyond(
        self, before: _Answers, now: _Answers, numerics: Numerics, *, deleted: int = 0, what: str = ""
    ) -> str | None:
        """Describes how answers differ from those before by more than is allowed; a new entry point's from the first.
        `what`: what is compared, for the message."""
        baseline = next(iter(before.values()))
        for entry, (results, _) in now.items():
            old, steps = before.get(entry, baseline)
            found = difference(old, results, numerics, roundings_deleted=deleted, epsilon=self._epsilon, steps=steps)
            if found is not None:
                return f"@{entry}{what}: {found}"
        return None

    def _after_permission(self, numerics: Permits, module: ModuleOp, ctx: QCContext) -> str | None:
        """The same of a pass that permits roundings: nothing but these may have changed."""
        plain = self._values(answers(numerics.without(module), ctx, self._inputs, self._states))
        found = self._beyond(self._answers, plain, Exact(), what=f", without {numerics.op}'s {numerics.attribute}")
        if found is not None:
            return found
        self._answers = self._values(answers(module, ctx, self._inputs, self._states))
        self._epsilon = coarsest_epsilon(module)
        return None

    def _values(self, found: dict[str, list[Array]]) -> _Answers:
        """The results of each entry point, with what rows of caches mean, and the distances of the codes of those."""
        values: _Answers = {}
        for entry, results in found.items():
            first, meant, steps = len(results) - len(self._states), list(results), {}
            for number, key in enumerate(sorted(self._states), first):
                if key in self._columns:
                    meant[number] = cache_rows.dequantise(results[number], *self._columns[key])
                    steps[number] = cache_rows.steps_of(results[number], *self._columns[key])
            values[entry] = (meant, steps)
        return values


def _exactly(found: dict[str, list[Array]]) -> _Answers:
    """Answers of which no result may be the next code."""
    return {entry: (results, {}) for entry, results in found.items()}


def _reproducer(start: ModuleOp, ctx: QCContext, before: Sequence[Stage], failing: ModulePass) -> Reproducer:
    """Runs the stages before the failing one again. Passes are deterministic."""

    def repeat() -> tuple[ModuleOp, QCContext]:
        module = start.clone()
        for stage in before:
            stage.make().apply(ctx, module)
        return module, ctx

    return Reproducer(repeat, start, failing)
