"""Where states live in a program over several devices: on the device of the op that first reads or writes them.

%s = qc.state @key_cache_1                  no path of its own
%1 = qc.index_update %s, …  {qc.path = "model.layers.1.self_attn"}        so: the device of layer 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir.module import path_of
from qcompiler.ir.qc import StateOp, StateUpdateOp
from qcompiler.passes.lowering.places import VIEWS


def state_devices(entries: Sequence[FuncOp], device_for: Callable[[str], str]) -> dict[str, str]:
    """The device of every state, by key: that of its first user in the first entry point that has the state.

    A state that is never read lives where its new value is computed.
    """
    found: dict[str, str] = {}
    for function in entries:
        position = {op: number for number, op in enumerate(function.body.block.ops)}
        for op in position:
            if isinstance(op, StateOp) and op.key not in found:
                users = [user for user in _users(op.result) if not isinstance(user, StateUpdateOp)]
                users = [user for user in users if user.name != "func.return"]
                if users:
                    found[op.key] = device_for(path_of(min(users, key=position.__getitem__)))
        for op in position:
            if isinstance(op, StateUpdateOp) and op.key not in found:
                found[op.key] = device_for(path_of(_maker(op.value, op)))
    for function in entries:
        for op in function.body.block.ops:
            if isinstance(op, StateOp):  # only returned, unchanged
                found.setdefault(op.key, device_for(""))
    return found


def _users(value: SSAValue) -> Iterator[Operation]:
    """The ops that read a value, through views."""
    for use in value.uses:
        if isinstance(use.operation, VIEWS):
            for result in use.operation.results:
                yield from _users(result)
        else:
            yield use.operation


def _maker(value: SSAValue, update: Operation) -> Operation:
    """The op that computes a value, through views; `update` itself if no op computes it."""
    while isinstance(value.owner, VIEWS):
        value = value.owner.operands[0]
    return value.owner if isinstance(value.owner, Operation) else update
