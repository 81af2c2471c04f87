"""A compiled program: the result of `qcompile`. It runs, saves itself, and shows every step of its compilation."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qcompiler.device_map import Placement, place
from qcompiler.errors import ArgumentError, MissingDependencyError, QCompilerError, TargetMismatchError
from qcompiler.inspect.dumps import StageDumps
from qcompiler.inspect.eager import eager_times
from qcompiler.inspect.error_report import ErrorReport
from qcompiler.inspect.explore.collect import Contents, in_utf8
from qcompiler.inspect.explore.page import Explorer
from qcompiler.inspect.explore.schedule import Times
from qcompiler.inspect.explore.stages import StageText
from qcompiler.inspect.files import source_file
from qcompiler.inspect.measure_errors import Stages, check_arguments, measure
from qcompiler.inspect.report import Choice, ProgramReport
from qcompiler.inspect.source_lines import LINES_FILE, Lines, lines_text
from qcompiler.inspect.stage_answers import StagesAgain
from qcompiler.inspect.torch_share import read_by_torch
from qcompiler.inspect.upstream import STAGE, UpstreamModule, Weights, upstream
from qcompiler.ledger import Ledger
from qcompiler.runtime.backends.base import CaptureMode
from qcompiler.runtime.backends.registry import is_available, runs
from qcompiler.runtime.image import ProgramImage, ProgramTarget, build_image
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.native import build_native
from qcompiler.runtime.nvrtc import build_module
from qcompiler.runtime.profile import Profile
from qcompiler.runtime.program_file import save_image
from qcompiler.runtime.progress import note
from qcompiler.runtime.timeline import Timeline, timeline
from qcompiler.runtime.tree import names_in_order

if TYPE_CHECKING:
    from qcompiler.frontends.common.imported import Imported
    from qcompiler.ir.context import QCContext
    from qcompiler.passes.specialize import Bucket
    from qcompiler.plan.plan import Plan, WeightEntry
    from qcompiler.plan.weights import WeightStore


class Program:
    """A model as a program: call it like the model; torch tensors in, torch tensors out, NumPy in, NumPy out.

    `stages` names the compiler's stages, `ir(stage)` shows the text after one, `report()` lists decisions with reasons,
    `ledger` lists every parameter with its format and bytes.  The methods of a loaded program (`session`, `capture`,
    `to`, `out=`) are here too.
    """

    def __init__(
        self,
        image: ProgramImage,
        dumps: StageDumps,
        choices: Sequence[Choice],
        imported: Imported,
        placement: Placement | None = None,
        *,
        targets: Sequence[str] = (),
        canonical: WeightStore | None = None,
        buckets: Sequence[Bucket] | None = None,
        again: StagesAgain | None = None,
    ) -> None:
        self.image = image
        self.placement = placement if placement is not None else place("cpu")
        self.ledger: Ledger = stored_ledger(imported.ledger, image.plan)
        self._oracle = imported.oracle
        self._imported = imported
        self._again = again
        self._states = imported.states
        self._canonical = canonical
        self._buckets = buckets
        self._dumps = dumps
        self._choices = tuple(choices)
        self.targets = tuple(targets)
        """The targets that `save` stores builds for; empty for this machine's default."""
        self._loaded: LoadedProgram | None = None
        if image.valued and self._is_here() and self._misfit() is None:
            self._loaded = self._load()

    @property
    def device(self) -> str:
        """The device that takes arguments and returns results."""
        return self.placement.devices[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices that the program was compiled to run on, in the order of the plan's slots."""
        return self.placement.devices

    # --- running (as qc.load) ---

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **kwargs: Any) -> Any:
        """The model's result for these arguments, in fresh memory owned by the caller (or in `out`).

        Results are on the device of the arguments.  On a GPU, the work runs after all earlier work of `stream` (by
        default the caller's current one), and later work of that stream runs after it.
        """
        return self.run(*args, out=out, stream=stream, **kwargs)

    def array(self, values: Any) -> Any:
        """A host array on the program's device."""
        return self.run.array(values)

    def session(self, *, stepwise: bool | None = None) -> Any:
        """A new session: activations and states that no other call shares."""
        return self.run.session(stepwise=stepwise)

    def reset(self) -> None:
        """Resets the states to the initial values of the model's buffers."""
        self.run.reset()

    def capture(self, *args: Any, mode: CaptureMode = "thread_local", **kwargs: Any) -> Any:
        """A captured graph for arguments of these shapes. DeviceUnavailableError on the CPU, which has no graphs."""
        return self.run.capture(*args, mode=mode, **kwargs)

    def profile(
        self, *args: Any, rounds: int = 30, keep_states: bool = True, eager: Any = None, **kwargs: Any
    ) -> Profile:
        """The time of each launch of a call with these arguments (docs/profile.md); see `LoadedProgram.profile`.

        With `eager`, the float model, a column has the times of its modules in eager torch on the same arguments.
        """
        # Eager torch comes first: an error in the model does not lose a profile.
        times = None
        if eager is not None:
            times = eager_times(eager, args, kwargs, rounds=rounds, threads=self.run.num_threads or None)
        found = self.run.profile(*args, rounds=rounds, keep_states=keep_states, **kwargs)
        return found if times is None else found.beside(times)

    def errors(self, *args: Any, model: Any = None, **kwargs: Any) -> ErrorReport:
        """Signal-to-noise ratios on this input: of each result, each layer, each stage (docs/explorer.md#errors).

        The program is compared with its oracle and, if `model` is given, with this float model: the module of torch,
        or the function of JAX with the program's arguments.  `print` the report, or give it to `explore(error=)`.
        The program runs in a session of its own, step by step; if it is for a GPU that is not here, on the simulated
        one, which the report says.  Each stage runs in the interpreter, which takes seconds for a small
        model and minutes for a large one.

        ArgumentError for a model that is none, or has results of other shapes; WeightsError without values; the errors
        of a call.
        """
        if self._again is None:
            raise QCompilerError("this program was not made by qcompile, which keeps what its errors are measured with")
        run, note = self._run_or_simulated()
        check_arguments(run, args, kwargs)
        compared = self._imported.compared(model, args, kwargs, run.flatten_outputs)
        report = measure(run, compared, Stages(self._again, self.ir("import"), self._states), args, kwargs)
        return report.noted(note)

    def _run_or_simulated(self) -> tuple[LoadedProgram, tuple[str, ...]]:
        """The loaded program; on the simulated GPU, with a note, if it is for GPUs that are not here."""
        self.image.require_values()
        if self._loaded is not None or self._is_here() or any(not each.startswith("cuda") for each in self.devices):
            return self.run, ()
        gone = [device for device in self.devices if not is_available(device)]
        note = f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} not here: the program ran on the simulated GPU, "
        note += "which executes the same kernels"
        return self.to("sim:0"), (note,)

    @functools.cached_property
    def _lines(self) -> Lines:
        """The model's source lines by module path."""
        return self._imported.lines

    def to(self, device: str, *, devices: Sequence[str] | None = None) -> LoadedProgram:
        """The whole program on another device, or an error and no change. Its own device need not be present.

        A program for several devices moves to as many, numbered from `device` on, or to those that `devices` names.
        """
        if self._loaded is None:
            return LoadedProgram.from_image(self.image, device, devices=devices)
        return self._loaded.to(device, devices=devices)

    @property
    def run(self) -> LoadedProgram:
        """The loaded program behind this one. DeviceUnavailableError if it was compiled for a GPU that is not present,
        TargetMismatchError if no target of it runs here, WeightsError if it has no values."""
        self.image.require_values()
        if self._loaded is None:
            if self._is_here() and (why := self._misfit()) is not None:
                raise TargetMismatchError(why)
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> LoadedProgram:
        isa = self.image.target.isa if self.targets else None
        return LoadedProgram.from_image(self.image, devices=self.devices, isa=isa)

    def _is_here(self) -> bool:
        return all(is_available(device) for device in self.devices)

    def _misfit(self) -> str | None:
        """Why the device runs none of the targets that the caller named; None if it runs one."""
        if not self.targets or self.device.startswith("sim") or self.image.target.isa in runs(self.device):
            return None
        return (
            f"the program was compiled for {', '.join(self.targets)}, and {self.device} runs "
            f"{', '.join(runs(self.device))}; save() stores its builds for other machines, and without `targets` it is "
            "compiled for this one"
        )

    @functools.cached_property
    def oracle(self) -> Callable[..., Any]:
        """The model with its quantised weights in eager torch, or the function with them in JAX (jittable): the
        reference for the program's results."""
        return self._oracle()

    @property
    def plan(self) -> Plan:
        return self.image.plan

    # --- reading ---

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in order."""
        return self._dumps.names

    def ir(self, stage: str) -> str:
        """The text after a stage, by name or number."""
        return self._dumps.text(stage)

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds of each stage, without verifying and printing its result."""
        return {dump.name: dump.seconds for dump in self._dumps}

    def timing(self) -> str:
        """Seconds of each stage."""
        return self._dumps.timing()

    def decided(self, choices: Sequence[Choice]) -> None:
        """Adds decisions that were taken before the compiler saw the model to the report."""
        self._choices += tuple(choices)

    def report(self) -> ProgramReport:
        """The program's contents, and the compiler's decisions with reasons."""
        title = f"qcompiler program for {self.image.target.kind} ({self.image.target.isa})"
        if len(self.devices) > 1:
            title += f" on {self.placement.text}"
        return ProgramReport(title, self.ledger, self.plan, self._choices)

    def timeline(
        self,
        entry: str | None = None,
        symbols: Mapping[str, int] | None = None,
        *,
        measured: Mapping[int, float] | None = None,
    ) -> Timeline:
        """Estimated times of each step by stream: `print` it, or `.save("x.json")` for Perfetto.

        `entry` is by default the first entry point that takes the sizes in `symbols`; other sizes have their largest
        value.  Needs no device.  `measured` maps numbers of steps to microseconds, which replace the estimates.
        """
        return timeline(self.plan, self.image.target.isa, entry, symbols, measured=measured)

    def explore(
        self,
        path: str | Path | None = None,
        *,
        times: Times | None = None,
        error: ErrorReport | None = None,
        sass: bool = False,
    ) -> Explorer:
        """The program as one HTML page: stages, kernels, ledger, memory, timeline (docs/explorer.md).

        `path` is the file to write; `.save(path)` of the result does the same, and a notebook shows the result.
        `times` are measured seconds by the id of the step, which replace the estimates: `prog.profile(x).seconds()`.
        Those of several profiles are joined by `|`. The page names what they were measured on, and at which sizes.
        `error` are measured ratios of signal to noise: `prog.errors(x, model=model)`.
        `sass` adds the machine code of CUDA kernels, which NVRTC compiles for the program's architecture; no GPU is
        needed.  Needs no device. ArgumentError if the file's folder does not exist, for times of a step that there is
        not, and for the SASS of a program for a CPU; MissingDependencyError names what to install for SASS.
        """
        stages = [StageText(each.index, each.name, each.suffix, each.text, each.seconds) for each in self._dumps]
        page = Explorer(Contents(
            self.plan, self.image.target.kind, self.image.target.isa, "compile",
            "program" if path is None else in_utf8(Path(path).stem), stages, [vars(each) for each in self._choices],
            json.loads(self.ledger.to_json()), times=times or {}, lines=self._lines,
            errors=None if error is None else error.errors, sass=sass,
            results=names_in_order(self.image.signature.outputs, len(self.plan.entries[0].outputs)),
        ))  # fmt: skip
        if path is not None:
            page.save(path)
        return page

    def _repr_html_(self) -> str:
        return self.explore()._repr_html_()

    def to_mlir(
        self,
        dialect: Literal["linalg"] = "linalg",
        *,
        entry: str | None = None,
        weights: Weights = "resources",
    ) -> UpstreamModule:
        """The quantised program in upstream MLIR dialects: `print` it, or `.save("model.mlir")` (docs/mlir.md).

        Packed weights and their decoding are in it. `weights="arguments"` makes the function take them instead of
        holding them in the text. `entry` names an entry point of the program, whose sizes the text then has; without
        it the text takes all sizes. It is the program after the stage `raise-idioms`, before this compiler fuses it
        and chooses layouts. Needs no device. Sums are in fp32, in another order than those of the program.

        ArgumentError for another choice, WeightsError for a program without values, QCompilerError for an operator
        that upstream dialects cannot express (`fallback="torch"`).
        """
        if dialect != "linalg":
            raise ArgumentError(f"to_mlir({dialect!r}): the one choice is 'linalg'")
        if weights not in ("resources", "arguments"):
            raise ArgumentError(f"weights={weights!r}: choose 'resources' or 'arguments'")
        if self._canonical is None:
            raise QCompilerError("this program was not made by qcompile, which keeps the weights that MLIR needs")
        return upstream(
            self.ir(STAGE), self._canonical, self._states, weights, entry=entry, buckets=self._buckets,
            devices=len(self.devices),
        )  # fmt: skip

    # --- saving ---

    def save(
        self,
        path: str | Path,
        *,
        layout: Literal["target", "canonical"] = "target",
        stages: bool = True,
        source_lines: bool = False,
        attachments: Mapping[str, bytes] | None = None,
    ) -> dict[str, str]:
        """Writes a .qca file with a native build for each of `targets`, or else for the machine that it runs on.

        Returns the builds' digests, ``{"x86-64-v4": "sha256:…"}``, the argument of `qc.load(trust_native=)`.  For a GPU
        that is not present NVRTC compiles the cubin, or it is left out with a note if NVRTC is missing.
        `layout="canonical"` is the portable form, repacked at load; it has only the builds that `targets` names.
        `stages=False` leaves out the texts of the stages and of the kernels, which the runtime does not need.
        `source_lines=True` adds the model's source lines by module path, which the explorer shows: paths of this
        machine and text of the model's source.  They are left out unless asked for.
        `attachments` are files by name that travel with the program; `qc.load(path).attachments` has their bytes.
        """
        if source_lines and not stages:
            raise ArgumentError("source_lines=True goes with the texts of the stages, which stages=False leaves out")
        self.image.require_values()
        with_builds = layout == "target" or bool(self.targets)
        image = self._image_with_native() if with_builds else self.image
        if source_lines:
            image = replace(image, texts={**image.texts, LINES_FILE: lines_text(self._lines)})
        if attachments is not None:
            image = replace(image, attachments=attachments)
        return save_image(image, path, layout=layout, stages=stages)

    def _image_with_native(self) -> ProgramImage:
        if self._loaded is not None and not self.targets:
            return self._loaded.image_with_native()
        build = build_native if self.image.target.kind == "cpu" else build_module
        try:
            return self.image.with_native(*(build(self.plan, isa) for isa in self.targets or (self.image.target.isa,)))
        except MissingDependencyError as error:
            note(f"the file gets no cubin, its kernels will be compiled where it is loaded: {error}")
            return self.image


def stored_ledger(ledger: Ledger, plan: Plan) -> Ledger:
    """The ledger with the bytes that the program stores; a weight that is stored twice counts twice.

    In a program for several devices it names the devices that hold each parameter.
    """
    arenas = {arena.name: arena.device for arena in plan.arenas}
    on: dict[str, list[str]] = {}
    for buffer in plan.buffers:
        if buffer.weight is not None:
            on.setdefault(buffer.weight, []).append(arenas[buffer.arena])
    nbytes: dict[str, int] = {}
    devices: dict[str, list[str]] = {}
    for entry in plan.weights:
        for part, held in zip(entry.named, shares(entry), strict=True):
            for parameter in part.parameters:
                nbytes[parameter] = nbytes.get(parameter, 0) + held
                devices.setdefault(parameter, []).extend(on.get(entry.name, ()))
    stored = ledger.as_stored(nbytes, {parameter: tuple(dict.fromkeys(names)) for parameter, names in devices.items()})
    return stored.remarked(read_by_torch(plan))


def shares(entry: WeightEntry) -> list[int]:
    """The bytes of a stored tensor, divided among its parts by their rows; padding likewise."""
    rows = sum(part.rows for part in entry.named)
    ends = [entry.nbytes * end // rows if rows else entry.nbytes for end in accumulate(p.rows for p in entry.named)]
    return [end - begin for begin, end in pairwise([0, *ends])]


def make_image(context: QCContext, imported: Imported, dumps: StageDumps) -> ProgramImage:
    """The program in memory, from the pipeline's context. PromiseError if it is larger than promised."""
    if context.emitted is None:
        raise QCompilerError("the pipeline ended without a plan; it must end with emit-kernels")
    plan = context.emitted.plan
    ledger = stored_ledger(imported.ledger, plan)
    ledger.check_promise()
    target = context.target
    texts: Mapping[str, str] = {f"ir/{dump.file_name}": dump.text for dump in dumps if dump.suffix == "mlir"}
    return build_image(
        plan,
        imported.signature,
        context.weights,
        room=imported.room,
        target=ProgramTarget(kind="cpu" if target.kind == "cpu" else "cuda", isa=target.isa),
        ledger=json.loads(ledger.to_json()),
        report=[vars(decision) for decision in context.report.decisions],
        torch_calls=imported.torch_calls,
        trusted_operators=frozenset(imported.torch_calls),
        texts={**texts, source_file(target.kind): context.emitted.source},
    )
