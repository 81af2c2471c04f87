"""Recurrent layers of torch as `torch.ops.qc.recurrent`: one operator for each direction of each layer, not unrolled.

    before   aten.lstm.input(x, [h0, c0], [w_ih, w_hh, b_ih, b_hh], …)
    after    gates = aten.linear(x, w_ih, b_ih)                                   all steps at once
             out, cell = qc.recurrent(gates, w_hh, h0[0], None, b_hh, c0[0], "lstm", False)

The weight of the input is the weight of an ordinary linear, in any format, and the size of the graph does not depend on
the number of steps.  torch's own decomposition has a linear for every step, or calls an operator of oneDNN.

A model is traced in this form (`whole_layers`): torch's own operators run step by step even when only shapes are
needed, so the number of steps would become a constant.  A graph that was exported elsewhere is decomposed to this form.

`qc.recurrent` in plain torch is the eager oracle; ir/qc_recurrent.py has the equations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from xdsl.ir import SSAValue

from qcompiler.errors import UnsupportedOperatorError
from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.frontends.torch.common.origins import line_of_frame
from qcompiler.frontends.torch.common.values import dtype_name
from qcompiler.ir import qc, types
from qcompiler.plan.kinds.recurrent import GATES

aten = torch.ops.aten
Tensor = torch.Tensor

# --- the operator ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("qc::recurrent", mutates_args=())
def recurrent(
    x: Tensor,
    w: Tensor,
    start: Tensor,
    projection: Tensor | None,
    bias: Tensor | None,
    cell_start: Tensor | None,
    kind: str,
    reverse: bool,
) -> list[Tensor]:
    """The state after each step, (T, B, R); an LSTM's last cell state; with a projection its last input."""
    state, cell, hidden = start, cell_start, None
    states: list[Tensor] = []
    for step in reversed(x.unbind(0)) if reverse else x.unbind(0):
        share = torch.nn.functional.linear(state.float(), w.float(), bias.float() if bias is not None else None)
        gates = list(zip(step.float().chunk(GATES[kind], 1), share.chunk(GATES[kind], 1), strict=True))
        if kind == "lstm":
            assert cell is not None
            i, f, u, o = (g + s for g, s in gates)
            updated = torch.sigmoid(f) * cell.float() + torch.sigmoid(i) * torch.tanh(u)
            cell = updated.to(cell.dtype)
            new = torch.sigmoid(o) * torch.tanh(cell.float())
        elif kind == "gru":
            r, z = (torch.sigmoid(g + s) for g, s in gates[:2])
            n = torch.tanh(gates[2][0] + r * gates[2][1])
            new = n + z * (state.float() - n)
        else:
            total = gates[0][0] + gates[0][1]
            new = torch.tanh(total) if kind == "tanh" else torch.relu(total)
        if projection is not None:
            hidden = new
            new = torch.nn.functional.linear(new, projection.float())
        state = new.to(start.dtype)
        states.append(state)
    out = torch.stack(states[::-1] if reverse else states)
    last = [] if cell is None else [cell.clone()]
    return [out, *last, *([] if hidden is None else [hidden])]


@recurrent.register_fake
def _(
    x: Tensor,
    w: Tensor,
    start: Tensor,
    projection: Tensor | None,
    bias: Tensor | None,
    cell_start: Tensor | None,
    kind: str,
    reverse: bool,
) -> list[Tensor]:
    del bias, kind, reverse
    made = [start.new_empty(x.shape[0], x.shape[1], w.shape[1])]
    if cell_start is not None:
        made.append(torch.empty_like(cell_start, memory_format=torch.contiguous_format))
    if projection is not None:
        made.append(start.new_empty(x.shape[1], projection.shape[1], dtype=torch.float32))
    return made


OPERATOR = torch.ops.qc.recurrent.default
WEIGHTS = (1, 3)
"""Arguments of the operator that are weights: the state's and the projection's."""


def is_weight_of(user: fx.Node, node: fx.Node) -> bool:
    """Whether `node` is used in `user` as a weight of a recurrent layer, and only so."""
    used = [number for number, argument in enumerate(user.args) if argument is node]
    return user.target is OPERATOR and bool(used) and all(number in WEIGHTS for number in used)


def import_recurrent(s: Scope, node: fx.Node) -> tuple[SSAValue, ...]:
    """`qc.recurrent`."""
    *values, kind, reverse = node.args
    x, w, start, projection, bias, cell_start = (None if each is None else s.value(each) for each in values)
    assert x is not None and w is not None and start is not None
    kinds = [types.tensor(s.symbols.shape(each.shape), dtype_name(each.dtype)) for each in node.meta["val"]]
    op = qc.RecurrentOp(
        x, w, start, kinds, kind=str(kind), reverse=bool(reverse),
        projection=projection, bias=bias, cell_start=cell_start,
    )  # fmt: skip
    s.builder.insert(op)
    return tuple(op.results)


# --- torch's layers --------------------------------------------------------------------------------------------------


def _layers(
    kind: str,
    x: Tensor,
    starts: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    directions: int,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(states of the last layer, last states, last cell states) of all layers; x is (T, B, K) or (B, T, K)."""
    projects = kind == "lstm" and params[1].shape[0] != GATES[kind] * params[1].shape[1]
    each = 2 + 2 * has_biases + projects
    states, cells, time_first = list[Tensor](), list[Tensor](), not batch_first
    for layer in range(len(params) // (each * directions)):
        made = []
        for direction in range(directions):
            number = layer * directions + direction
            w_ih, w_hh, *rest = params[number * each : (number + 1) * each]
            b_ih, b_hh = rest[:2] if has_biases else (None, None)
            gates = torch.nn.functional.linear(x, w_ih, b_ih)
            out, *more = torch.ops.qc.recurrent(
                gates if time_first else gates.transpose(0, 1), w_hh, starts[0][number], rest[-1] if projects else None,
                b_hh, starts[1][number] if kind == "lstm" else None, kind, direction == 1,
            )  # fmt: skip
            made.append(out)
            states.append(out[0] if direction == 1 else out[-1])
            cells += more[:1]
        x, time_first = made[0] if directions == 1 else torch.cat(made, 2), True
    return (x.transpose(0, 1) if batch_first else x), states, cells


def _lstm(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del num_layers
    _refuse_dropout("LSTM", dropout, train)
    out, states, cells = _layers("lstm", input, hx, params, has_biases, 1 + bidirectional, batch_first)
    return out, torch.stack(states), torch.stack(cells)


def _other(kind: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def layer(
        input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        del num_layers
        _refuse_dropout(name, dropout, train)
        out, states, _ = _layers(kind, input, [hx], params, has_biases, 1 + bidirectional, batch_first)
        return out, torch.stack(states)

    return layer


def _refuse_dropout(name: str, dropout: float, train: bool) -> None:
    if train and dropout:
        raise UnsupportedOperatorError(
            f"an {name} in training mode drops values at random (dropout={dropout}); call model.eval() first"
        )


def refuse_packed(*_args: Any, **_kwargs: Any) -> Any:
    """UnsupportedOperatorError that names the line."""
    line, _ = line_of_frame(sys._getframe(1))
    raise UnsupportedOperatorError(
        "a packed sequence has sizes that depend on the values of its lengths" + (f" ({line})" if line else "") + ". "
        "Give the recurrent layer the padded tensor, and take the end of each sequence from its output "
        "(torch.gather); a reversed direction begins in the padding, so reverse each sequence before it"
    )


class _WholeLayers(TorchFunctionMode):
    """Recurrent layers in the form of `_layers`, while a model is traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PACKING:
            refuse_packed()
        packet = _FUNCTIONS.get(func)
        if packet is None:
            return func(*args, **(kwargs or {}))
        overload = packet.data if len(args) > 3 and isinstance(args[3], list | tuple) else packet.input
        return DECOMPOSITIONS[overload](*args, **(kwargs or {}))


def whole_layers() -> TorchFunctionMode:
    """A context for tracing a model."""
    return _WholeLayers()


_FUNCTIONS: dict[Any, Any] = {
    torch.lstm: aten.lstm, torch.gru: aten.gru, torch.rnn_tanh: aten.rnn_tanh, torch.rnn_relu: aten.rnn_relu,
}  # fmt: skip
"""The functions that torch's modules call."""

_PACKING = frozenset((torch._pack_padded_sequence, torch._pad_packed_sequence))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: _lstm,
    aten.gru.input: _other("gru", "GRU"),
    aten.rnn_tanh.input: _other("tanh", "RNN"),
    aten.rnn_relu.input: _other("relu", "RNN"),
    aten.lstm.data: refuse_packed,
    aten.gru.data: refuse_packed,
    aten.rnn_tanh.data: refuse_packed,
    aten.rnn_relu.data: refuse_packed,
}

__all__ = [
    "DECOMPOSITIONS", "OPERATOR", "import_recurrent", "is_weight_of", "recurrent", "refuse_packed", "whole_layers",
]  # fmt: skip
