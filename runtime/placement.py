"""Placement of a plan's arenas: the device of each slot, the memory a program shares, and each session's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qcompiler.errors import CaptureRuleError, DeviceUnavailableError, PlanError, TargetMismatchError
from qcompiler.plan.plan import Arena, EntryPoint, Plan
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Backend, Kernel, Memory
from qcompiler.runtime.image import NativeLibrary, ProgramTarget
from qcompiler.runtime.isa import resolve_isa
from qcompiler.runtime.memory import align_up

PAGE = 4096
"""Activation arenas of one entry point begin at multiples of this inside their block."""

_RUNS_ON = {"cpu": ("cpu",), "cuda": ("cuda", "sim"), "sim": ("sim",)}
"""Kinds of devices that serve a slot of a kind: the simulated GPU runs programs for a real one."""


@dataclass(frozen=True)
class SlotDevice:
    """A device slot of a plan on a real device, with the plan's kernels loaded there."""

    name: str
    backend: Backend
    native: NativeLibrary
    kernels: Mapping[str, Kernel]


# --- which device ----------------------------------------------------------------------------------------------------


def choose_devices(plan: Plan, device: str | None = None, devices: Sequence[str] | None = None) -> tuple[str, ...]:
    """A device per slot of the plan.

    `device` serves the first slot, and the following numbers of the same kind serve the others, unless `devices` names
    them all.  Without both, a CPU program runs on cpu and a CUDA program on cuda:0.  TargetMismatchError for a device
    of the wrong kind, DeviceUnavailableError for one that is not present.
    """
    kinds = sorted({slot.kind for slot in plan.devices})
    if len(kinds) != 1:
        raise PlanError(f"the plan has devices of the kinds {', '.join(kinds) or 'none'}; a program runs on one kind")
    if devices is not None:
        if len(devices) != len(plan.devices):
            raise DeviceUnavailableError(
                f"devices={tuple(devices)} names {len(devices)}, the program was compiled for {len(plan.devices)}"
            )
        if device is not None and registry.parse(device) != registry.parse(devices[0]):
            raise DeviceUnavailableError(f"device={device!r} is not the first of devices={tuple(devices)}")
        chosen = [registry.parse(each) for each in devices]
    else:
        kind, index = registry.parse(device if device is not None else _default_device(kinds[0]))
        step = 0 if kind == "cpu" else 1  # there is one CPU
        chosen = [(kind, index + step * number) for number in range(len(plan.devices))]
    names = tuple("cpu" if kind == "cpu" and index == 0 else f"{kind}:{index}" for kind, index in chosen)
    for (kind, _), name in zip(chosen, names, strict=True):
        if kind not in _RUNS_ON[kinds[0]]:
            raise _mismatch(kinds[0], name)
    for name in names:
        registry.require(name)
    return names


def _default_device(kind: str) -> str:
    if kind != "cuda":
        return {"cpu": "cpu", "sim": "sim:0"}[kind]
    if registry.is_available("cuda:0"):
        return "cuda:0"
    raise DeviceUnavailableError(
        'the program was compiled for a GPU and this machine has none; device="sim:0" runs it on the simulated GPU, '
        "slowly and with every access checked"
    )


def _mismatch(kind: str, device: str) -> TargetMismatchError:
    if kind == "cpu":
        way_out = f"run it on cpu, or compile the model with device={device!r}"
    else:
        way_out = "run it on cuda:N or on sim:N, the simulated GPU, or compile the model with device='cpu'"
    return TargetMismatchError(f"the program was compiled for {kind} and cannot run on {device}; {way_out}")


def choose_isa(device: str, target: ProgramTarget, requested: str | None) -> str:
    """The instruction set or architecture to compile kernels for: `requested`, else the device's own.

    The simulated GPU uses the architecture that the program was compiled for.
    """
    kind, _ = registry.parse(device)
    if kind == "cpu":
        return resolve_isa(requested)
    if requested is not None:
        return requested
    if kind == "sim" and target.kind == "cuda":
        return target.isa
    return registry.architecture(device)


# --- weights ---------------------------------------------------------------------------------------------------------


def weight_parts(plan: Plan, arena: Arena) -> list[tuple[int, int, int]]:
    """The contents of a constants arena: (offset there, offset in the weight file, bytes), in few pieces.

    All of the file from its start, or the weights that the arena's buffers name.
    """
    offsets = {weight.name: weight.offset for weight in plan.weights}
    held = sorted((b for b in plan.buffers if b.arena == arena.name and b.weight is not None), key=lambda b: b.offset)
    if not held:
        return [(0, 0, arena.nbytes)] if arena.nbytes else []
    sizes = {weight.name: weight.nbytes for weight in plan.weights}
    parts: list[tuple[int, int, int]] = []
    for buffer in held:
        assert buffer.weight is not None
        target, source, nbytes = buffer.offset, offsets[buffer.weight], sizes[buffer.weight]
        if parts and source - target == parts[-1][1] - parts[-1][0]:  # contiguous with the last one, as in the file
            first = parts.pop()
            parts.append((first[0], first[1], target + nbytes - first[0]))
        elif nbytes:
            parts.append((target, source, nbytes))
    return parts


# --- memory ----------------------------------------------------------------------------------------------------------


class Freeze:
    """Whether a capture is being recorded; allocations are then forbidden."""

    frozen = False


class Allocator:
    """Memory of one device for one session."""

    def __init__(self, backend: Backend, freeze: Freeze) -> None:
        self._backend = backend
        self._freeze = freeze

    def allocate(self, nbytes: int, label: str) -> Memory:
        """CaptureRuleError while frozen."""
        if self._freeze.frozen:
            raise CaptureRuleError(
                f"'{label}' ({nbytes} bytes) would be allocated while a capture is recorded; everything that a graph "
                "uses is allocated before"
            )
        return self._backend.allocate(nbytes, label=label)


class SessionMemory:
    """A session's states and activations, and the allocators for later needs, by slot.

    Activations of all entry points share one block per device: only one entry point runs at a time.
    """

    def __init__(self, plan: Plan, entries: Sequence[EntryPoint], slots: Mapping[str, SlotDevice]) -> None:
        self.freeze = Freeze()
        self.allocators = {name: Allocator(slot.backend, self.freeze) for name, slot in slots.items()}
        self.slot_of = {arena.name: arena.device for arena in plan.arenas}
        is_init = any(entry is plan.init for entry in entries)
        self.states: dict[str, Memory] = {
            arena.name: self.allocate(arena.device, arena.nbytes, f"state {arena.name}")
            for arena in plan.arenas
            if arena.kind == "state" and not is_init
        }
        self._offsets, totals = activation_offsets(plan, entries)
        self._blocks = {slot: self.allocate(slot, total, "activations") for slot, total in totals.items()}

    def allocate(self, slot: str, nbytes: int, label: str) -> Memory:
        """Memory of the slot's device. CaptureRuleError while frozen."""
        return self.allocators[slot].allocate(nbytes, label)

    def bases(self, entry: EntryPoint) -> dict[str, int]:
        """Addresses of the arenas that this memory provides for an entry point."""
        placed = {name: memory.address for name, memory in self.states.items()}
        for name, offset in self._offsets[entry.name].items():
            placed[name] = self._blocks[self.slot_of[name]].address + offset
        return placed


def activation_offsets(plan: Plan, entries: Sequence[EntryPoint]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """The offsets of each entry point's activation arenas in their device's block; the size of each block by slot."""
    offsets: dict[str, dict[str, int]] = {}
    totals: dict[str, int] = {}
    for entry in entries:
        ends: dict[str, int] = {}
        offsets[entry.name] = {}
        for arena in plan.arenas:
            if arena.kind == "activations" and arena.entry in (entry.name, None):
                start = ends.get(arena.device, 0)
                offsets[entry.name][arena.name] = start
                ends[arena.device] = start + align_up(arena.nbytes, PAGE)
        for slot, end in ends.items():
            totals[slot] = max(totals.get(slot, 0), end)
    return offsets, totals
