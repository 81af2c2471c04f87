"""`device=` of qcompile: one device, or a map from module paths to devices.

    device="cuda:1"                                               all of the model there
    device={"model.layers.0": "cuda:0", "model.layers.1": "cuda:1", "lm_head": "cuda:1", "": "cuda:0"}

A path covers the module and everything inside; the longest path wins.  "" is everything else (by default it goes to the
device of the map's first path), and its device takes arguments and returns results.  The compiler sees devices as
numbered slots; the loader decides which real device serves a slot, and `qc.load(devices=…)` may name others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcompiler.errors import ArgumentError, TargetMismatchError
from qcompiler.ir.module import functions, path_of
from qcompiler.runtime.backends import registry

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

Devices = str | Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Real devices, the default one first, and the paths of the device map, each with the number of its device."""

    devices: tuple[str, ...]
    paths: Mapping[str, int]

    @property
    def slots(self) -> tuple[str, ...]:
        """The compiler's names of the devices; the loader maps them to real ones."""
        if registry.parse(self.devices[0])[0] == "cpu":
            return ("cpu",)
        return tuple(f"cuda:{number}" for number in range(len(self.devices)))

    @property
    def device_map(self) -> dict[str, str]:
        return {path: self.slots[number] for path, number in self.paths.items()}

    @property
    def text(self) -> str:
        """For reports: `cuda0 = sim:0, cuda1 = sim:1`."""
        pairs = zip(self.slots, self.devices, strict=True)
        return ", ".join(f"{slot.replace(':', '')} = {device}" for slot, device in pairs)


def place(device: Devices) -> Placement:
    """The devices that `device=` names.

    ArgumentError for an empty map, TargetMismatchError for devices of several kinds, DeviceUnavailableError for an
    invalid name.
    """
    if isinstance(device, str):
        return Placement((device,), {})
    if not isinstance(device, Mapping) or not device or not all(isinstance(each, str) for each in device.values()):
        raise ArgumentError(
            f"device={device!r}: name a device, or map module paths to devices, such as "
            '{"model.layers.1": "cuda:1", "": "cuda:0"}'
        )
    chosen = {path: _canonical(name) for path, name in device.items()}
    default = chosen.get("", next(iter(chosen.values())))
    names = tuple(dict.fromkeys((default, *chosen.values())))
    kinds = list(dict.fromkeys(registry.parse(name)[0] for name in names))
    if len(kinds) > 1:
        mixed = " and ".join(next(name for name in names if registry.parse(name)[0] == kind) for kind in kinds)
        raise TargetMismatchError(
            f"the device map has {mixed}; a program runs on devices of one kind. Map all of it to {kinds[0]} or to "
            f"{kinds[1]}, or compile the parts as programs of their own and pass results from one to the next"
        )
    return Placement(names, {path: names.index(name) for path, name in chosen.items() if path})


def _canonical(name: str) -> str:
    """ "cuda" and "cuda:0" are one device."""
    kind, index = registry.parse(name)
    return kind if kind == "cpu" and index == 0 else f"{kind}:{index}"


def check_paths(placement: Placement, module: ModuleOp, model_paths: Iterable[str]) -> None:
    """ArgumentError for a path of the map that no op of the imported module has, since it would have no effect."""
    found = {path_of(op) for function in functions(module) for op in function.body.block.ops}
    for path in placement.paths:
        if any(each == path or each.startswith(path + ".") for each in found):
            continue
        known = list(model_paths)
        near = difflib.get_close_matches(path, [each for each in known if each], n=3, cutoff=0.5)
        if path in known:
            why = "computes nothing of its own in this program; leave it out, or name a module around it"
        else:
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "paths are model.named_modules()'s"
            why = f"is no module of the model; {hint}"
        raise ArgumentError(f"the device map names '{path}', which {why}")


def common_architecture(devices: Sequence[str]) -> str:
    """The one architecture of several devices. TargetMismatchError if they differ: all share one plan."""
    found = {device: registry.architecture(device) for device in devices}
    if len(set(found.values())) > 1:
        each = ", ".join(f"{device} is {arch}" for device, arch in found.items())
        wanted = sorted(set(found.values()))
        raise TargetMismatchError(
            f"the device map spans different architectures ({each}); name them all, targets={wanted}, and the plan is "
            "made of kernels that each of them runs"
        )
    return found[devices[0]]
