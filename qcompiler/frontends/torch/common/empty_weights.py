"""Models whose parameters have no values: how they are built, exported, and run for their shapes.

    with qc.empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

Parameters become fake tensors (shape, dtype, device) when they are registered, so their initialisation takes neither
memory nor time.  Buffers, such as the frequencies of a rotary embedding, are computed as usual, since a program stores
them.

The meta device is not used, because torch.export then writes device='meta' into the graph wherever a model reads a
parameter's device.  Models on the meta device are exported all the same: their parameters, too, are replaced by fakes
on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from qcompiler.errors import WeightsError

_building = threading.local()
"""`modes`: the fake modes, and `rooms`: the limits, of this thread's current `empty_weights()` blocks.
`applied`: the results of `_apply`."""

_ours: weakref.WeakSet[FakeTensorMode] = weakref.WeakSet()
"""The fake modes of parameters that were made here."""


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and a dtype, but no values."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@dataclass
class Room:
    """The maximum of parameters and elements in the modules of a block; `message` is the WeightsError for more."""

    parameters: int
    elements: int
    message: str

    def take(self, elements: int) -> None:
        self.parameters -= 1
        self.elements -= elements
        if self.parameters < 0 or self.elements < 0:
            raise WeightsError(self.message)


@contextlib.contextmanager
def empty_weights(room: Room | None = None) -> Iterator[None]:
    """Modules that this thread builds inside get parameters without values, which take no time and no memory.

    The model can be cast (`model.to(torch.bfloat16)`), switched (`eval()`) and compiled, but not run.  Compile it with
    `weights=<folder of safetensors>`, or with `weights="none"` for plan, sizes and report only.  Buffers that a
    constructor registers keep their values.  A tensor that is computed *before* it becomes a parameter is computed,
    and then dropped.  With `room`, a larger model is a WeightsError.
    """
    _install()
    modes: list[FakeTensorMode] = _building.__dict__.setdefault("modes", [])
    rooms: list[Room | None] = _building.__dict__.setdefault("rooms", [])
    modes.append(FakeTensorMode(allow_non_fake_inputs=True))
    rooms.append(room)
    _ours.add(modes[-1])
    try:
        yield
    finally:
        modes.pop()
        rooms.pop()


@functools.cache
def _install() -> None:
    """Patches torch once; outside of a block, and in other threads, the functions behave as before."""
    register, apply = nn.Module.register_parameter, nn.Module._apply

    @functools.wraps(register)
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        modes = getattr(_building, "modes", ())
        if modes and param is not None and not is_empty(param):
            room = _building.rooms[-1]
            if room is not None:
                room.take(param.numel())
            param = _fake(param, modes[-1])
        register(self, name, param)

    @functools.wraps(apply)
    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        outermost = not hasattr(_building, "applied")
        if outermost:
            _building.applied = {}
        try:
            module: nn.Module = _apply_to_empty(self, fn, functools.partial(apply, self, fn, recurse))
            return module
        finally:
            if outermost:
                del _building.applied

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    nn.Module._apply = _apply  # type: ignore[method-assign]


def _apply_to_empty(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], rest: Callable[[], Any]) -> Any:
    """`Module.to` and the like for parameters without values: torch itself refuses to swap fake tensors.

    `rest` handles all other parameters.  A tied parameter stays tied.
    """
    applied: dict[int, tuple[nn.Parameter, nn.Parameter]] = _building.applied
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    empty = {name: p for name, p in parameters.items() if isinstance(p, FakeTensor) and p.fake_mode in _ours}
    for name in empty:
        module._parameters[name] = None
    try:
        return rest()
    finally:
        for name, old in empty.items():
            if id(old) not in applied:  # keeps the old one, so that its id is not reused
                applied[id(old)] = (old, nn.Parameter(fn(old), requires_grad=old.requires_grad))
            module._parameters[name] = applied[id(old)][1]


def _fake(like: torch.Tensor, mode: FakeTensorMode) -> nn.Parameter:
    """A parameter of the mode with the shape, strides and dtype of another; on the CPU if that is on meta."""
    device = "cpu" if like.is_meta else like.device
    with mode:
        made = nn.Parameter(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device), False)
    vars(made)["_is_hf_initialized"] = True  # transformers' initialisers pass it over: some of them read values
    return made


# --- export ----------------------------------------------------------------------------------------------------------


def has_empty_parameters(model: nn.Module) -> bool:
    """Whether some parameter of the model has no values."""
    return any(is_empty(p) for p in model.parameters())


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: dict[str, Any] | None
) -> ExportedProgram:
    """torch.export, non-strict, for models with and without values.

    Fake tensors of two modes do not mix, and torch.export makes a mode for each trace: during the trace, parameters
    without values are replaced by fakes of its mode.  WeightsError for a buffer without values.
    """
    if not has_empty_parameters(model):
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    _refuse_empty_buffers(model)
    mode = FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True), allow_non_fake_inputs=True, export=True
    )
    with _stand_ins(model, mode), tracing(TracingContext(mode)):
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def _refuse_empty_buffers(model: nn.Module) -> None:
    empty = [name for name, buffer in model.named_buffers() if is_empty(buffer)]
    if empty:
        raise WeightsError(
            f"{len(empty)} buffers hold no values ({', '.join(empty[:5])}): a program stores what a model computes "
            "when it is built. Build it under `with qc.empty_weights():`, not on the meta device or in a fake mode"
        )


@contextlib.contextmanager
def _stand_ins(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Inside, all parameters without values are fakes of `mode`; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_empty(parameter):
                replaced.append((module, name, parameter))
                made.setdefault(id(parameter), _fake(parameter, mode))
    try:
        for module, name, parameter in replaced:
            module._parameters[name] = made[id(parameter)]
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


# --- shapes ----------------------------------------------------------------------------------------------------------


def result_shapes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | str:
    """The leaves of a call's result as fakes; or why there are none: the model reads the values of a tensor."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _stand_ins(model, mode), mode, torch.no_grad():
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), dict(kwargs)))
        try:
            result = model(*fakes[0], **fakes[1])
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return f"the model asks for values ({error})"
        return [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]


__all__ = ["Room", "empty_weights", "export", "has_empty_parameters", "is_empty", "result_shapes"]
