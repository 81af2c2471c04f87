"""The part of a program that runs in torch (`fallback="torch"`), from its plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from qcompiler.plan.dims import product
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import Copy, EntryPoint, Launch, Plan, Select, TorchCall
from qcompiler.plan.torch_regions import operators
from qcompiler.units import human_bytes

_PLUMBING = ("aten.view_as_complex.default", "aten.view_as_real.default", "aten.resolve_conj.default")


@dataclass(frozen=True)
class TorchShare:
    """One entry point's part in torch. Of its `steps` that compute, `calls` call torch; `nbytes` go in and out of those
    calls at the largest sizes."""

    entry: str
    calls: int
    steps: int
    operators: dict[str, int]
    places: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        names = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in self.operators.items())
        where = f" for {', '.join(self.places)}" if self.places else ""
        return (
            f"{self.entry}: {self.calls} of {self.steps} steps, {sum(self.operators.values())} operators ({names})"
            f"{where}; {human_bytes(self.nbytes)} in and out"
        )

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"places": list(self.places)}


def torch_shares(plan: Plan) -> list[TorchShare]:
    """One for each entry point that has a part in torch."""
    return [share for entry in plan.entries if (share := _share(entry)).calls]


def _share(entry: EntryPoint) -> TorchShare:
    ranges = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
    calls = [step for step in entry.steps if isinstance(step, TorchCall)]
    work = sum(isinstance(step, Launch | Select | Copy | TorchCall) for step in entry.steps)
    found = Counter(name for call in calls for name in operators(call.region) if name not in _PLUMBING)
    nbytes = sum(product(v.shape).bounds(ranges)[1] * ITEMSIZE[v.dtype] for call in calls for v in call.operands)
    places = tuple(dict.fromkeys(call.serves for call in calls if call.serves))
    return TorchShare(entry.name, len(calls), work, dict(found), places, nbytes)


def read_by_torch(plan: Plan) -> dict[str, str]:
    """The ledger's remarks for parameters that torch reads: {path: remark}."""
    weights = {(buffer.name): buffer.weight for buffer in plan.buffers}
    arenas = {arena.name: arena.kind for arena in plan.arenas}
    at = {entry.offset: entry for entry in plan.weights}
    named = {entry.name: entry for entry in plan.weights}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    remarks: dict[str, str] = {}
    for point in plan.entries:
        for step in point.steps:
            for view in step.inputs if isinstance(step, TorchCall) else ():
                buffer = buffers[view.buffer]
                if arenas[buffer.arena] != "constants":
                    continue
                name = weights[buffer.name]
                entry = named.get(name) if name is not None else at.get(buffer.offset)
                for parameter in entry.paths if entry is not None else ():
                    assert isinstance(step, TorchCall)
                    names = dict.fromkeys(each for each in operators(step.region) if each not in _PLUMBING)
                    remarks.setdefault(parameter, f"torch reads it ({', '.join(names)})")
    return remarks
