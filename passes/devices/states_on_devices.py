"""Where states live in a program over several devices: on the device of the op that first reads or writes them.

%s = qc.state @key_cache_1                  no path of its own
%1 = qc.index_update %s, …  {qc.path = "model.layers.1.self_attn"}        so: the device of layer 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from qcompiler.ir.module import path_of
from qcompiler.ir.qc import StateOp, StateUpdateOp
from qcompiler.passes.views.views import base_of, readers


def state_devices(entries: Sequence[FuncOp], device_for: Callable[[str], str]) -> dict[str, str]:
    """The device of every state, by key: that of its first user in the first entry point that has the state.

    A state that is never read lives where its new value is computed.
    """
    found: dict[str, str] = {}
    for function in entries:
        position = {op: number for number, op in enumerate(function.body.block.ops)}
        for op in position:
            if isinstance(op, StateOp) and op.key not in found:
                users = [user for user, _ in readers(op.result) if not isinstance(user, StateUpdateOp)]
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


def _maker(value: SSAValue, update: Operation) -> Operation:
    """The op that computes a value, through views; the update itself for what is no op's result."""
    owner = base_of(value).owner
    return owner if isinstance(owner, Operation) else update
