"""A program that is ready to run: its kernels compiled and loaded, its constants in memory, `@init` done."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from qcompiler.errors import ArgumentError, CaptureRuleError, DeviceUnavailableError, PlanError
from qcompiler.plan.plan import EntryPoint, Plan, Signature, TorchCall, initial_weight
from qcompiler.plan.torch_regions import check_trusted, operators, runner
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime import on_request, sanitize
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Memory
from qcompiler.runtime.binding import Binder, EntryBinder
from qcompiler.runtime.device_interop import Uploader
from qcompiler.runtime.executor import EntryArenas, Executor, NativeExecutor, PlanExecutor
from qcompiler.runtime.image import NativeLibrary, ProgramImage, check_directory, constants_nbytes
from qcompiler.runtime.memory import Block, Bytes, address_of
from qcompiler.runtime.native import Library, scratch_stride
from qcompiler.runtime.placement import SessionMemory, SlotDevice, choose_devices, choose_isa, weight_parts
from qcompiler.runtime.plan_bodies import check_bodies
from qcompiler.runtime.plan_text import check_plan_text
from qcompiler.runtime.session import HostSession, Session, make_context
from qcompiler.runtime.streams import Queues
from qcompiler.runtime.support import support
from qcompiler.runtime.threads import resolve_num_threads
from qcompiler.runtime.tree import check_signature, input_flattener, output_flattener, unflattener

if TYPE_CHECKING:
    from qcompiler.runtime.graph import CapturedGraph
    from qcompiler.runtime.profile import Profile
    from qcompiler.runtime.timeline import Timeline


class LoadedProgram:
    """A program on a device (or on several of one kind). Calling it runs its default session; `session()` makes more.

    All sessions share the constants and the results of `@init`, which are never written again.
    """

    def __init__(
        self,
        image: ProgramImage,
        slots: dict[str, SlotDevice],
        *,
        num_threads: int | None = None,
        stepwise: bool = False,
        stream: Any = None,
    ) -> None:
        plan = image.plan
        self.image = image
        self.slots = slots
        self.stream = stream
        self.kind = next(iter(slots.values())).backend.kind
        if num_threads is not None and self.kind != "cpu":
            raise ArgumentError(f"num_threads={num_threads} belongs to the CPU; the program runs on {self.device}")
        self.num_threads = resolve_num_threads(num_threads) if self.kind == "cpu" else 0
        self.stepwise = stepwise or self.kind != "cpu"
        self.native = next(iter(slots.values())).native
        if self.kind == "cpu":
            support(self.native.pool)
        self.library = Library(self.native) if self.kind == "cpu" else None
        self.scratch_stride = _scratch_stride(plan, self.native) if self.kind == "cpu" else 0
        self.binder = Binder(plan)
        self.flatten_inputs = input_flattener(image.signature.inputs)
        self.flatten_outputs = output_flattener(image.signature.outputs, len(plan.entries[0].outputs))
        self.unflatten_outputs = unflattener(image.signature.outputs)
        self._weights = _aligned(image.weights)
        self.initial_states = _initial_states(plan, self._weights)
        self._shared: dict[str, Memory] = {}
        self.shared_bases = self._place_shared()
        self._kept: list[Session] = []
        self._uploader = Uploader(next(iter(slots.values())).backend) if self.kind != "cpu" else None
        if plan.init is not None:
            self._run_init(plan.init)
        self._default = self.session()

    @staticmethod
    def from_image(
        image: ProgramImage,
        device: str | None = None,
        *,
        devices: Sequence[str] | None = None,
        stream: Any = None,
        num_threads: int | None = None,
        isa: str | None = None,
        native: NativeLibrary | None = None,
        stepwise: bool = False,
    ) -> LoadedProgram:
        """Verifies the plan, finds or compiles its kernels, puts its constants on the device, runs `@init`.

        `device` serves the plan's first device slot, and the following numbers of the same kind serve the others;
        `devices` names one for each.  Default: cpu, or cuda:0 for a program that was compiled for a GPU.  `isa=None`
        means the device's own (on cpu `QC_ISA` first); the simulated GPU uses the architecture that the program was
        compiled for.  `native` is a trusted build to use instead.  `stream` is the caller's stream for every call.

        Raises PlanError or ScheduleError for a plan that is not safe, TargetMismatchError for a device of another kind,
        DeviceUnavailableError, CompilerMissingError, CompileFailedError.
        """
        names = choose_devices(image.plan, device, devices)
        if stream is not None and names[0] == "cpu":
            raise DeviceUnavailableError("stream= belongs to a GPU; on cpu a call is done when it returns")
        check_image(image)
        slots: dict[str, SlotDevice] = {}
        for slot, name in zip(image.plan.devices, names, strict=True):
            backend = registry.backend(name, native.isa if native else choose_isa(name, image.target, isa))
            build = native if native is not None else backend.build(image.plan)
            slots[slot.name] = SlotDevice(slot.name, backend, build, backend.load(image.plan, build))
        return LoadedProgram(image, slots, num_threads=num_threads, stepwise=stepwise, stream=stream)

    # --- running ---

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **kwargs: Any) -> Any:
        """Runs the default session; see `Session.__call__`."""
        return self._default(*args, out=out, stream=stream, **kwargs)

    def session(self, *, stepwise: bool | None = None) -> Session:
        """A new session with its own activations and states; sessions may run at the same time.

        CaptureRuleError while this thread records a capture; ChangedFileError if the program's file was written to.
        """
        self.image.require_unchanged()
        if self.kind == "cpu":
            return HostSession(self, stepwise=self.stepwise if stepwise is None else stepwise)
        if any(slot.backend.captures_here() for slot in self.slots.values()):
            raise CaptureRuleError(
                "this thread records a capture, in which no session's memory can be allocated; make the session before"
            )
        from qcompiler.runtime.device_session import DeviceSession

        return DeviceSession(self)

    def reset(self) -> None:
        """Resets the default session's states to their initial values."""
        self._default.reset()

    def capture(self, *args: Any, **kwargs: Any) -> CapturedGraph:
        """A device graph of the default session's call with arguments of these shapes; `replay` runs it with others.

        `stream` is the caller's, as for a call; `mode="global"` records in CUDA's global capture mode instead of the
        thread's.  DeviceUnavailableError on cpu, which has no graphs; CaptureRuleError or DeviceError if a capture
        rule is broken.
        """
        return self._default.capture(*args, **kwargs)

    def profile(self, *args: Any, rounds: int = 30, keep_states: bool = True, **kwargs: Any) -> Profile:
        """The time of each launch of a call with these arguments; `str()` has tables (docs/profile.md).

        Runs the default session's call `rounds` times and three times to warm up.  States are restored from a copy
        afterwards; with `keep_states=False` there is no copy, and they have changed as by many calls.
        """
        return self._default.profile(*args, rounds=rounds, keep_states=keep_states, **kwargs)

    def array(self, values: Any) -> Any:
        """A copy of an array (NumPy, or a torch CPU tensor) in the memory of the program's first device.

        On the CPU this is the array itself.
        """
        if self._uploader is None:
            return values
        return self._uploader.put(values, self.stream)

    def to(self, device: str, *, devices: Sequence[str] | None = None) -> LoadedProgram:
        """The program on another device, with the default session's states; or an error, and no change.

        Returns this program if it already runs there.  This one stays usable until it is dropped, and its graphs run
        here; the `stream` of its load belongs to this device and does not move.
        """
        if choose_devices(self.plan, device, devices) == self.devices:
            return self
        moved = LoadedProgram.from_image(
            self.image,
            device,
            devices=devices,
            num_threads=self.num_threads or None,
            stepwise=self.stepwise,
        )
        moved._default.set_states(self._default.states())
        return moved

    def keep(self, session: Session) -> None:
        """Keeps a session as long as the program: a caller's graph holds addresses of it."""
        if session not in self._kept:
            self._kept.append(session)

    # --- looking at it ---

    @property
    def plan(self) -> Plan:
        return self.image.plan

    @property
    def signature(self) -> Signature:
        return self.image.signature

    @property
    def device(self) -> str:
        """The device of the plan's first slot."""
        return next(iter(self.slots.values())).backend.device

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all slots, in the plan's order."""
        return tuple(slot.backend.device for slot in self.slots.values())

    @property
    def isa(self) -> str:
        return self.native.isa

    @property
    def entries(self) -> tuple[EntryPoint, ...]:
        return self.image.plan.entries

    @property
    def ledger(self) -> Any:
        """The coverage ledger as JSON (the format of each parameter, or why it was not quantised)."""
        return self.image.ledger

    def report(self) -> dict[str, Any]:
        """Figures of the loaded program as JSON: device, threads, entry points, bytes by kind of arena."""
        plan = self.plan
        nbytes: dict[str, int] = {}
        for arena in plan.arenas:
            nbytes[arena.kind] = nbytes.get(arena.kind, 0) + arena.nbytes
        return {
            "device": self.device,
            "devices": list(self.devices),
            "isa": self.isa,
            "num_threads": self.num_threads,
            "library": str(self.native.path),
            "entries": [
                {
                    "name": entry.name,
                    "symbols": {symbol.name: [symbol.min, symbol.max] for symbol in entry.symbols},
                    "inputs": {sig.name: EntryBinder(0, entry).describe(sig) for sig in entry.inputs},
                    "steps": len(entry.steps),
                }
                for entry in plan.entries
            ],
            "kernels": len(plan.kernels),
            "bytes": nbytes,
            "torch_calls": list(self.image.torch_calls),
            "torch_seconds": vars(self._default.torch_time()),
            "compile": self.image.report,
        }

    def timeline(
        self,
        entry: str | None = None,
        symbols: Mapping[str, int] | None = None,
        *,
        measured: Mapping[int, float] | None = None,
    ) -> Timeline:
        """Estimated times of each step by stream: `str()` is a chart, `.save("x.json")` a Perfetto trace.

        `entry` is by default the first that takes the sizes in `symbols`; other sizes have their largest value.
        `measured` maps numbers of steps to microseconds, which replace the estimates.
        """
        return on_request.timeline(self.plan, self.isa, entry, symbols, measured)

    def image_with_native(self) -> ProgramImage:
        """The image with this machine's build, for `save_image`.

        Builds of the simulated GPU fit no real GPU, and a sanitised build (`QC_SANITIZE`) runs nowhere else.
        """
        return self.image if self.kind == "sim" or sanitize.wanted() else self.image.with_native(self.native)

    @property
    def attachments(self) -> Mapping[str, bytes]:
        """Files by name that travel with the program (`save(attachments=…)`). Their contents are not checked."""
        return self.image.attachments

    def save(
        self,
        path: str | Path,
        *,
        layout: Literal["target", "canonical"] = "target",
        stages: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> dict[str, str]:
        """Writes the program, with the native build that runs here, to a `.qca` file; `stages=False` without texts.

        `attachments` replace the program's own.  Returns the build's digest under its instruction set,
        ``{"x86-64-v4": "sha256:…"}``.
        """
        from qcompiler.runtime.program_file import save_image

        image = self.image_with_native()
        if attachments is not None:
            image = replace(image, attachments=attachments)
        return save_image(image, path, layout=layout, stages=stages)

    def to_mlir(self, *_: Any, **__: Any) -> NoReturn:
        """ArgumentError: only the compiler has weights as MLIR needs them; here they are merged and repacked."""
        raise ArgumentError(
            "to_mlir: a loaded program has the weights as its kernels read them, merged and in their layouts, and MLIR "
            "is written from those that qcompile had. Compile the model again and call to_mlir on the result, or write "
            "the text beside the file: qc compile MODEL -o FILE --mlir model.mlir"
        )

    def __repr__(self) -> str:
        entries = ", ".join(entry.name for entry in self.entries)
        threads = f", {self.num_threads} threads" if self.kind == "cpu" else ""
        return f"<LoadedProgram {entries} on {', '.join(self.devices)} ({self.isa}{threads})>"

    # --- shared memory ---

    def _place_shared(self) -> dict[str, int]:
        """Addresses of the constants and init arenas. On the CPU constants stay where they are mapped."""
        bases: dict[str, int] = {}
        for arena in self.plan.arenas:
            if arena.kind not in ("constants", "init"):
                continue
            backend = self.slots[arena.device].backend
            parts = weight_parts(self.plan, arena) if arena.kind == "constants" else []
            if arena.kind == "constants" and backend.kind == "cpu" and all(part[0] == part[1] for part in parts):
                bases[arena.name] = address_of(self._weights) if self._weights.nbytes else 0
                continue
            memory = self._shared[arena.name] = backend.allocate(arena.nbytes, label=arena.name)
            bases[arena.name] = memory.address
            if parts:
                stream = backend.stream("load")
                for target, source, nbytes in parts:
                    backend.upload(stream, memory.address + target, address_of(self._weights) + source, nbytes)
                backend.synchronize(stream)
        return bases

    def _run_init(self, init: EntryPoint) -> None:
        """Fills the init arenas. Init takes no arguments and no symbols."""
        if init.inputs or init.symbols:
            raise PlanError(f"the init entry '{init.name}' takes arguments or symbols")
        memory = SessionMemory(self.plan, [init], self.slots)
        queues = Queues(self.plan, self.slots)
        frame = EntryArenas(self.plan, init, self.shared_bases | memory.bases(init))
        executor: Executor
        if self.library is not None and not self.stepwise:
            executor = NativeExecutor(self.plan, init, self.library)
        else:
            executor = PlanExecutor(self.plan, init, self.slots, queues, frame)
        context = None
        if self.kind == "cpu":
            context = make_context(self.num_threads, self.scratch_stride, self.isa)
        used = queues.of_entry(init)
        queues.fork(used)
        executor.run(context, frame.arenas, EntryBinder(0, init).bind(()))
        queues.join(used)
        queues.synchronize()
        del memory  # the init entry's scratch memory, held until here


def check_image(image: ProgramImage) -> None:
    """All checks before a plan's kernels may run: its text, its schedule, its bounds, its signature."""
    plan = image.plan
    image.require_values()
    image.require_unchanged()
    check_plan_text(plan)
    verify_plan(plan)
    check_bodies(plan)
    check_torch_calls(plan, image.trusted_operators)
    Binder(plan)  # the entry points take one interface
    check_directory(plan.weights, constants_nbytes(plan))
    if image.weights.nbytes != constants_nbytes(plan):
        raise PlanError(f"the weights have {image.weights.nbytes} bytes, the plan's constants {constants_nbytes(plan)}")
    _check_truth_values(plan, image.weights)
    entry = plan.entries[0] if plan.entries else None
    if entry is None:
        raise PlanError("the plan has no entry point")
    check_signature(image.signature.inputs, image.signature.outputs, len(entry.inputs), len(entry.outputs))


def check_torch_calls(plan: Plan, trusted: Collection[str]) -> None:
    """Checks that every torch operator of a plan is harmless or trusted by name, exists here, and fits its schema.

    TrustError, PlanError, MissingDependencyError without torch.  Nothing is imported for a plan without such steps.
    """
    regions = [step.region for entry in plan.entries for step in entry.steps if isinstance(step, TorchCall)]
    check_trusted((name for region in regions for name in operators(region)), trusted)
    for region in regions:
        runner().prepare(region)


def _check_truth_values(plan: Plan, weights: Bytes) -> None:
    """PlanError unless constants of i1 are bytes of 0 and 1: kernels load them as `bool`, which has no other values."""
    for entry in plan.weights:
        values = weights[entry.offset : entry.offset + entry.nbytes]
        if entry.dtype == "i1" and entry.format is None and values.size and int(values.max()) > 1:
            raise PlanError(f"the weight '{entry.name}' holds truth values, and a byte of {int(values.max())}")


def _initial_states(plan: Plan, weights: Bytes) -> dict[str, Bytes]:
    """Initial values of states, by arena; states that are not listed start with zeros. PlanError for a wrong size."""
    stored = {entry.name: entry for entry in plan.weights}
    found: dict[str, Bytes] = {}
    for arena in plan.arenas:
        entry = stored.get(initial_weight(arena.name))
        if arena.kind != "state" or entry is None:
            continue
        values = weights[entry.offset : entry.offset + entry.nbytes]
        if entry.nbytes > arena.nbytes:
            raise PlanError(f"'{entry.name}' has {entry.nbytes} bytes, the arena '{arena.name}' {arena.nbytes}")
        found[arena.name] = values
    return found


def _scratch_stride(plan: Plan, native: NativeLibrary) -> int:
    """Bytes of scratch per thread: a build from a file has its own figure."""
    return scratch_stride(plan, native.isa) if native.scratch is None else native.scratch


def _aligned(weights: Bytes) -> Bytes:
    """The weights at a 64-byte boundary, as kernels require (a copy only if needed)."""
    if not weights.nbytes or address_of(weights) % 64 == 0:
        return weights
    block = Block(weights.nbytes)
    block.bytes[:] = weights
    return block.bytes
