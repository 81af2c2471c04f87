"""A program that is ready to run: its kernels compiled and loaded, its constants in memory, `@init` done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from qcompiler.errors import DeviceUnavailableError, PlanError
from qcompiler.plan.plan import EntryPoint, Plan, Signature, initial_weight
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime.binding import Binder, EntryBinder
from qcompiler.runtime.executor import kernel_error, make_executor
from qcompiler.runtime.image import NativeLibrary, ProgramImage, check_directory, constants_nbytes
from qcompiler.runtime.isa import resolve_isa
from qcompiler.runtime.memory import Block, Bytes, address_of, align_up
from qcompiler.runtime.native import Library, build_native
from qcompiler.runtime.plan_bodies import check_bodies
from qcompiler.runtime.plan_text import check_plan_text
from qcompiler.runtime.session import Frame, Session, make_context, place_activations
from qcompiler.runtime.threads import resolve_num_threads
from qcompiler.runtime.tree import check_signature, input_flattener, output_flattener, unflattener


class LoadedProgram:
    """A program on one device. Calling it runs its default session; `session()` makes more.

    Constants and what `@init` computed are shared by all sessions and never written again.
    """

    def __init__(
        self, image: ProgramImage, native: NativeLibrary, *, num_threads: int | None = None, stepwise: bool = False
    ) -> None:
        plan = image.plan
        self.image = image
        self.num_threads = resolve_num_threads(num_threads)
        self.stepwise = stepwise
        self.native = native
        self.library = Library(native)
        self.scratch_stride = _scratch_stride(plan, native.isa)
        self.binder = Binder(plan)
        self.flatten_inputs = input_flattener(image.signature.inputs)
        self.flatten_outputs = output_flattener(image.signature.outputs, len(plan.entries[0].outputs))
        self.unflatten_outputs = unflattener(image.signature.outputs)
        self._weights = _aligned(image.weights)
        self.initial_states = _initial_states(plan, self._weights)
        self._init_blocks = {arena.name: Block(arena.nbytes) for arena in plan.arenas if arena.kind == "init"}
        self.shared_bases = {name: block.address for name, block in self._init_blocks.items()}
        constants = [arena.name for arena in plan.arenas if arena.kind == "constants"]
        self.shared_bases |= {name: address_of(self._weights) if self._weights.nbytes else 0 for name in constants}
        if plan.init is not None:
            self._run_init(plan.init)
        self._default = Session(self, stepwise=stepwise)

    @staticmethod
    def from_image(
        image: ProgramImage,
        device: str | None = None,
        *,
        num_threads: int | None = None,
        isa: str | None = None,
        native: NativeLibrary | None = None,
        stepwise: bool = False,
    ) -> LoadedProgram:
        """Verifies the plan, finds or compiles its kernels for `isa`, runs `@init`.

        `isa=None` means `QC_ISA`, else the machine's best. `native` is a trusted build to use instead.  Raises
        PlanError or ScheduleError for a plan that is not safe,
        DeviceUnavailableError, TargetMismatchError, CompilerMissingError, CompileFailedError.
        """
        check_device(device)
        check_image(image)
        chosen = native if native is not None else build_native(image.plan, resolve_isa(isa))
        return LoadedProgram(image, chosen, num_threads=num_threads, stepwise=stepwise)

    # --- running ---

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Runs the default session; see `Session.__call__`."""
        return self._default(*args, out=out, **kwargs)

    def session(self, *, stepwise: bool | None = None) -> Session:
        """A new session with its own activations and states; sessions may run at the same time."""
        return Session(self, stepwise=self.stepwise if stepwise is None else stepwise)

    def reset(self) -> None:
        """Puts the default session's states back to what they began as."""
        self._default.reset()

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a device graph. DeviceUnavailableError on cpu, which has none."""
        raise DeviceUnavailableError(
            "capture needs cuda or sim; this program runs on cpu, where a call is one function already"
        )

    def to(self, device: str) -> LoadedProgram:
        """The program on `device`: itself on cpu. DeviceUnavailableError for a device that is not there."""
        check_device(device)
        return self

    # --- looking at it ---

    @property
    def plan(self) -> Plan:
        return self.image.plan

    @property
    def signature(self) -> Signature:
        return self.image.signature

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def isa(self) -> str:
        return self.native.isa

    @property
    def entries(self) -> tuple[EntryPoint, ...]:
        return self.image.plan.entries

    @property
    def ledger(self) -> Any:
        """The coverage ledger as JSON (which parameter has which format, or why it was left)."""
        return self.image.ledger

    def report(self) -> dict[str, Any]:
        """Figures of the loaded program as JSON: device, threads, entry points, bytes by kind of arena."""
        plan = self.plan
        nbytes: dict[str, int] = {}
        for arena in plan.arenas:
            nbytes[arena.kind] = nbytes.get(arena.kind, 0) + arena.nbytes
        return {
            "device": self.device,
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
            "compile": self.image.report,
        }

    def image_with_native(self) -> ProgramImage:
        """The image with this machine's build, for `save_image`."""
        return self.image.with_native(self.native)

    def save(self, path: str | Path, *, layout: Literal["target", "canonical"] = "target") -> None:
        """Writes the program, with its native build, to a `.qca` file."""
        from qcompiler.runtime.program_file import save_image

        save_image(self.image_with_native(), path, layout=layout)

    def __repr__(self) -> str:
        entries = ", ".join(entry.name for entry in self.entries)
        return f"<LoadedProgram {entries} on cpu ({self.isa}, {self.num_threads} threads)>"

    def _run_init(self, init: EntryPoint) -> None:
        """Fills the init arenas. Init takes no arguments and no symbols."""
        if init.inputs or init.symbols:
            raise PlanError(f"the init entry '{init.name}' takes arguments or symbols")
        block, placed = place_activations(self.plan, [init])
        bases = self.shared_bases | placed[init.name]
        executor = make_executor(self.plan, init, self.library, stepwise=self.stepwise)
        frame = Frame(self.plan, init, bases, executor)
        context = make_context(self.num_threads, self.scratch_stride)
        binding = EntryBinder(0, init).bind(())
        if executor.run(context, frame.arenas, binding):
            raise kernel_error(context, self.plan)
        del block  # held until here: the init entry's scratch memory


def check_device(device: str | None) -> None:
    """DeviceUnavailableError for anything but the CPU."""
    if device not in (None, "cpu", "cpu:0"):
        raise DeviceUnavailableError(
            f"the device {device!r} is not available: this build of the runtime drives cpu only"
        )


def check_image(image: ProgramImage) -> None:
    """All that must hold before a plan's kernels may run: its text, its schedule, its bounds, its signature."""
    plan = image.plan
    for slot in plan.devices:
        if slot.kind != "cpu":
            raise DeviceUnavailableError(
                f"the program was compiled for {slot.kind} ({slot.name}); this build of the runtime drives cpu only, "
                "compile it with device='cpu'"
            )
    check_plan_text(plan)
    verify_plan(plan)
    check_bodies(plan)
    check_directory(plan.weights, constants_nbytes(plan))
    if image.weights.nbytes != constants_nbytes(plan):
        raise PlanError(f"the weights have {image.weights.nbytes} bytes, the plan's constants {constants_nbytes(plan)}")
    entry = plan.entries[0] if plan.entries else None
    if entry is None:
        raise PlanError("the plan has no entry point")
    check_signature(image.signature.inputs, image.signature.outputs, len(entry.inputs), len(entry.outputs))


def _initial_states(plan: Plan, weights: Bytes) -> dict[str, Bytes]:
    """What states begin as, by arena; those that are not listed begin as zeros. PlanError for another size."""
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


def _scratch_stride(plan: Plan, isa: str) -> int:
    """Bytes of scratch per thread: what the neediest kernel asks for, to full cache lines."""
    from qcompiler.kernels.cpu import emit

    return align_up(max((emit.scratch_bytes(spec, isa) for spec in plan.kernels), default=0), 64)


def _aligned(weights: Bytes) -> Bytes:
    """The weights at a 64-byte boundary, as kernels expect them (a copy only where they are not)."""
    if not weights.nbytes or address_of(weights) % 64 == 0:
        return weights
    block = Block(weights.nbytes)
    block.bytes[:] = weights
    return block.bytes
