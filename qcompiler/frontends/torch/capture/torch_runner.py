"""Runs regions of torch operators (plan/torch_regions.py) for a program's steps and for the interpreter.

The runtime does not import this module, which imports torch: `torch_regions.runner()` does, by name, if a plan has such
a step.  Inputs are read in place; results are checked against the plan and copied to their places.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qcompiler.errors import PlanError, RuntimeFailure
from qcompiler.frontends.torch.capture.torch_guards import condition_of
from qcompiler.plan.torch_regions import COND, TensorMemory, TorchOp, TorchRegion

_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "ui8": torch.uint8, "i1": torch.bool,
}  # fmt: skip

_ALIGNMENT = 16
"""Bytes: the widest element of a type that torch may view an input as (complex128)."""

_ARGUMENTS = {
    "Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]",
    "int", "Optional[int]", "List[int]", "Optional[List[int]]", "SymInt", "Optional[SymInt]", "List[SymInt]",
    "Optional[List[SymInt]]", "float", "Optional[float]", "List[float]", "Optional[List[float]]", "bool",
    "Optional[bool]", "List[bool]", "number", "Optional[number]", "List[number]", "str", "Optional[str]",
    "Optional[Device]", "Optional[Layout]", "Optional[MemoryFormat]",
}  # fmt: skip
"""Types of schema arguments that regions support. A generator, a storage, a stream or an object is not among them."""

_RESULTS = {"Tensor", "List[Tensor]"}

Evaluate = Callable[[list[Any], Sequence[int], torch.device], Any]


class TorchRunner:
    """The torch of this process."""

    def prepare(self, region: TorchRegion) -> ReadyRegion:
        """PlanError for an operator that torch does not have, or a call that its schema does not allow."""
        return ReadyRegion(region)


@dataclass
class _Call:
    """One operator with its arguments for each run; `last` are values that nothing reads after it."""

    name: str
    run: Callable[[list[Any], Sequence[int], torch.device], list[Any]]
    results: int
    last: tuple[int, ...] = ()


class ReadyRegion:
    """A region whose operators were found and whose calls fit their schemas."""

    def __init__(self, region: TorchRegion) -> None:
        self.region = region
        self._calls = [_prepared(op) for op in region.ops]
        self._find_last_uses()

    def _find_last_uses(self) -> None:
        """Finds where intermediate values can be dropped."""
        number, kept = self.region.inputs, set(self.region.outputs)
        last: dict[int, int] = {}
        for place, op in enumerate(self.region.ops):
            for value in _values((op.args, op.kwargs)):
                last[value] = place
            for value in range(number, number + op.results):
                last[value] = place
            number += op.results
        for value, place in last.items():
            if value >= self.region.inputs and value not in kept:
                self._calls[place].last += (value,)

    def evaluate(self, values: Sequence[Any], sizes: Sequence[int], device: torch.device) -> list[Any]:
        """The outputs for these inputs (tensors, or sizes in a branch). RuntimeFailure names an operator that fails."""
        known = list(values)
        for call in self._calls:
            try:
                found = call.run(known, sizes, device)
            except RuntimeFailure:
                raise
            except Exception as error:  # whatever torch raises
                text = str(error).strip().split("\n")[0]
                raise RuntimeFailure(
                    f"the torch operator {call.name} failed: {type(error).__name__}: {text}"
                ) from error
            if len(found) != call.results:
                raise RuntimeFailure(
                    f"the torch operator {call.name} gave {len(found)} results; the program expects {call.results}"
                )
            known += found
            for value in call.last:
                known[value] = None
        return [known[number] for number in self.region.outputs]

    def on_host(self, sizes: Sequence[int], inputs: Sequence[TensorMemory], outputs: Sequence[TensorMemory]) -> None:
        """Runs the region on host memory."""
        with _plain():
            found = self.evaluate([_host_tensor(place) for place in inputs], sizes, torch.device("cpu"))
            self._write(found, outputs, _host_tensor)

    def on_cuda(
        self,
        sizes: Sequence[int],
        inputs: Sequence[TensorMemory],
        outputs: Sequence[TensorMemory],
        device: str,
        stream: int,
    ) -> None:
        """Runs the region on a GPU's memory, in the order of a stream."""
        at = torch.device(device)

        def tensor(place: TensorMemory) -> torch.Tensor:
            return _device_tensor(place, at)

        queue = torch.cuda.ExternalStream(stream, device=at)  # type: ignore[no-untyped-call]
        with _plain(), torch.cuda.stream(queue):
            self._write(self.evaluate([tensor(place) for place in inputs], sizes, at), outputs, tensor)

    def _write(
        self, found: Sequence[Any], outputs: Sequence[TensorMemory], tensor: Callable[[TensorMemory], torch.Tensor]
    ) -> None:
        for value, place in zip(found, outputs, strict=True):
            _check_result(value, place, self.region)
        for value, place in zip(found, outputs, strict=True):
            if place.nbytes:
                tensor(place).copy_(_truths(value) if place.dtype == "i1" else value)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Inside, no setting of the caller's own torch code changes what a region computes."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _truths(value: torch.Tensor) -> torch.Tensor:
    """Truth values as bytes of 0 and 1, on which kernels rely: a bool view may have any bytes."""
    return value.view(torch.uint8) != 0


def _check_result(value: Any, place: TensorMemory, region: TorchRegion) -> None:
    names = ", ".join(dict.fromkeys(op.target for op in region.ops))
    if not isinstance(value, torch.Tensor):
        raise RuntimeFailure(f"torch gave {type(value).__name__} instead of a tensor for {names}")
    if value.dtype != _DTYPES[place.dtype] or tuple(value.shape) != place.shape or value.layout != torch.strided:
        raise RuntimeFailure(
            f"torch gave {value.dtype} {list(value.shape)} for {names}; the program was compiled for "
            f"{_DTYPES[place.dtype]} {list(place.shape)}"
        )


# --- memory as tensors -----------------------------------------------------------------------------------------------


def _host_tensor(place: TensorMemory) -> torch.Tensor:
    dtype = _DTYPES[place.dtype]
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype)
    memory = (ctypes.c_char * place.nbytes).from_address(place.address)
    tensor = torch.frombuffer(memory, dtype=dtype).reshape(place.shape)
    return tensor.clone() if place.address % _ALIGNMENT and not place.written else tensor


class _Interface:
    """Bytes of a GPU for `torch.as_tensor`."""

    def __init__(self, place: TensorMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (place.nbytes,), "typestr": "|u1", "data": (place.address, False), "version": 3,
        }  # fmt: skip


def _device_tensor(place: TensorMemory, device: torch.device) -> torch.Tensor:
    dtype = _DTYPES[place.dtype]
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype, device=device)
    found: torch.Tensor = torch.as_tensor(_Interface(place), device=device)
    tensor = found.view(dtype).reshape(place.shape)
    return tensor.clone() if place.address % _ALIGNMENT and not place.written else tensor


# --- calls -----------------------------------------------------------------------------------------------------------


def _prepared(op: TorchOp) -> _Call:
    if op.target == COND:
        return _prepared_cond(op)
    overload = _overload(op.target)
    schema = overload._schema
    _check_schema(op, schema)
    args = [_argument(argument) for argument in op.args]
    kwargs = {name: _argument(argument) for name, argument in op.kwargs.items()}
    makes, condition = _makes_its_tensor(schema), condition_of(overload)

    def run(values: list[Any], sizes: Sequence[int], device: torch.device) -> list[Any]:
        given = {name: argument(values, sizes, device) for name, argument in kwargs.items()}
        positional = [argument(values, sizes, device) for argument in args]
        if condition is not None and not condition(positional, given):
            raise RuntimeFailure(
                f"the torch operator {op.target} was refused: torch does not check these arguments, and would read or "
                "write memory that is not theirs; see docs/fallback.md"
            )
        if makes:
            given["device"] = device
        result = overload(*positional, **given)
        flat: list[Any] = []
        for each in result if isinstance(result, tuple | list) else (result,):
            flat += each if isinstance(each, tuple | list) else (each,)
        return flat

    return _Call(op.target, run, op.results)


def _prepared_cond(op: TorchOp) -> _Call:
    args = [_argument(argument) for argument in op.args]
    branches = [ReadyRegion(branch) for branch in op.branches]

    def run(values: list[Any], sizes: Sequence[int], device: torch.device) -> list[Any]:
        predicate, *given = [argument(values, sizes, device) for argument in args]
        return branches[0 if bool(predicate) else 1].evaluate(given, sizes, device)

    return _Call(op.target, run, op.results)


def _overload(name: str) -> Any:
    space, packet, overload = name.split(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space), packet), overload)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise PlanError(
            f"the program calls the torch operator {name}, which torch {torch.__version__} does not have here; load it "
            "with the torch that it was compiled with, and import what defines the operator first"
        )
    return found


def _check_schema(op: TorchOp, schema: Any) -> None:
    """PlanError unless the operator writes nothing, and the call has the arguments that it takes."""
    if schema.is_mutable or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        raise PlanError(f"the torch operator {op.target} writes an argument, which no region may do")
    strange = [str(a.type) for a in schema.arguments if str(a.type) not in _ARGUMENTS]
    strange += [str(r.type) for r in schema.returns if str(r.type) not in _RESULTS]
    if strange or not schema.returns:
        raise PlanError(f"the torch operator {op.target} takes or gives {', '.join(strange) or 'nothing'}, not tensors")
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(op.args) > len(positional):
        raise PlanError(
            f"the torch operator {op.target} takes {len(positional)} arguments, the region gives {len(op.args)}"
        )
    bound = {a.name: value for a, value in zip(positional, op.args, strict=False)}
    names = {a.name: a for a in schema.arguments}
    for name in op.kwargs:
        if name not in names or name in bound or name in ("device", "layout", "pin_memory", "memory_format"):
            raise PlanError(f"the torch operator {op.target} takes no argument '{name}' in a region")
    bound |= op.kwargs
    missing = [a.name for a in schema.arguments if not a.has_default_value() and a.name not in bound]
    if missing:
        raise PlanError(f"the torch operator {op.target} is called without '{missing[0]}'")
    for name, value in bound.items():
        _check_type(op, name, str(names[name].type), value)


def _check_type(op: TorchOp, name: str, type_: str, value: Any) -> None:
    """Checks numbers and strings against the schema; torch's own parser checks the rest at the call."""
    inner = type_
    if type_.startswith("Optional["):
        if value is None:
            return
        inner = type_[len("Optional[") : -1]
    items, element = (value, inner[5:-1]) if inner.startswith("List[") else ([value], inner)
    if inner.startswith("List[") and not isinstance(items, list | tuple):
        items = [value] if element in ("int", "SymInt", "float") else [None]  # torch accepts a number as a list
    for item in items:
        if not _fits(element, item):
            raise PlanError(f"the torch operator {op.target} takes {type_} for '{name}', the region gives {value!r}")


def _fits(type_: str, value: Any) -> bool:
    reference = value.keys() if isinstance(value, dict) else set()
    match type_.removeprefix("Optional[").removesuffix("]"):
        case "Tensor":  # torch accepts numbers there, too
            if value is None:
                return type_.startswith("Optional[")
            return isinstance(value, bool | int | float) or bool(reference & {"v", "size", "float", "complex"})
        case "int" | "SymInt":
            return (isinstance(value, int) and not isinstance(value, bool)) or bool(reference & {"size", "dtype", "v"})
        case "float" | "number":
            allowed = {"size", "float", "v", "complex"} if "number" in type_ else {"size", "float", "v"}
            return isinstance(value, int | float) or bool(reference & allowed)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
    return False


def _makes_its_tensor(schema: Any) -> bool:
    """Whether an operator takes no tensor, so that it needs the device as an argument."""
    names = {argument.name for argument in schema.arguments}
    return "device" in names and not any("Tensor" in str(argument.type) for argument in schema.arguments)


def _argument(argument: Any) -> Evaluate:
    """A function that returns an argument's value at each run."""
    if isinstance(argument, list | tuple):
        parts = [_argument(item) for item in argument]
        return lambda values, sizes, device: [part(values, sizes, device) for part in parts]
    if isinstance(argument, dict):
        ((kind, given),) = argument.items()
        match kind:
            case "v":
                return lambda values, _sizes, _device: values[given]
            case "size":
                return lambda _values, sizes, _device: sizes[given]
            case "dtype":
                dtype = getattr(torch, given)
                return lambda _values, _sizes, _device: dtype
            case "complex":
                return lambda _values, _sizes, _device: complex(*given)
            case _:
                number = float(given)
                return lambda _values, _sizes, _device: number
    return lambda _values, _sizes, _device: argument


def _values(argument: Any) -> Iterator[int]:
    """The numbers of the values that an argument reads."""
    if isinstance(argument, dict) and len(argument) == 1 and isinstance(argument.get("v"), int):
        yield argument["v"]
    else:
        items = argument.values() if isinstance(argument, dict) else argument
        for item in items if isinstance(argument, dict | list | tuple) else ():
            yield from _values(item)
