"""Regions of torch operators: what `fallback="torch"` leaves to torch, as data.

    %1 = aten._fft_r2c(%0, [1], 0, true)        {"target": "aten._fft_r2c.default", "args": [{"v": 0}, [1], 0, true]}
    %2 = aten.abs(%1)                           {"target": "aten.abs.default", "args": [{"v": 1}]}

A region is straight-line code over numbered values: its inputs first, then the results of its operators in order.  An
argument is a number, a truth value, null, a word, a list of these, or one of `{"v": n}` (a value), `{"size": n}` (a
size of the call), `{"dtype": "complex64"}`, `{"float": "inf"}` and `{"complex": [0.0, 1.0]}`.  What enters and leaves
a region are tensors that a plan can hold; between its operators values may have other types, complex ones above all.

A file from a stranger may hold regions.  An operator is a name of `SAFE_OPERATORS` (or one that the caller trusts by
name), never code, and `torch_runner` compares each call with torch's own schema before anything runs.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from qcompiler.errors import MissingDependencyError, PlanError, TrustError
from qcompiler.plan.kernel import ITEMSIZE, Strict
from qcompiler.plan.torch_operators import SAFE_OPERATORS

COND = "cond"
"""The operator of a choice: (predicate, *values), one region for true and one for false."""

FOREIGN_DTYPES = ("complex64", "complex128", "complex32")
TORCH_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", *FOREIGN_DTYPES,
)  # fmt: skip

MOST_OPERATORS = 10_000
MOST_RESULTS = 4_096
DEEPEST = 8
"""Levels of `torch.cond` inside each other."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z_][A-Za-z0-9_]{0,63}){2}\Z")
_WORD = re.compile(r"[a-z_]{1,32}\Z")
_FLOATS = ("inf", "-inf", "nan")
_INT64 = 1 << 63


class TorchOp(Strict, frozen=True):
    """One operator by the name of its overload; `results` counts the values that it defines. `branches` are the two
    regions of a `cond`, which take its values after the predicate and define its results."""

    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    results: int = 1
    branches: tuple[TorchRegion, ...] = ()


class TorchRegion(Strict, frozen=True):
    """Operators in order. Values 0 … `inputs` - 1 are the inputs; `outputs` are numbers of values."""

    inputs: int
    ops: tuple[TorchOp, ...]
    outputs: tuple[int, ...]


def region_to_json(region: TorchRegion) -> str:
    """Deterministic JSON, without what has its default."""
    return msgspec.json.encode(_bare(region), order="deterministic").decode()


def _bare(region: TorchRegion) -> dict[str, Any]:
    ops = []
    for op in region.ops:
        found: dict[str, Any] = {"target": op.target}
        if op.args:
            found["args"] = op.args
        if op.kwargs:
            found["kwargs"] = op.kwargs
        if op.results != 1:
            found["results"] = op.results
        if op.branches:
            found["branches"] = [_bare(branch) for branch in op.branches]
        ops.append(found)
    return {"inputs": region.inputs, "ops": ops, "outputs": region.outputs}


def region_from_json(text: str) -> TorchRegion:
    """PlanError for what is no region."""
    try:
        return msgspec.json.decode(text, type=TorchRegion, strict=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PlanError(f"the region of torch operators is malformed: {error}") from error


# --- what a region must be -------------------------------------------------------------------------------------------


def check_region(region: TorchRegion, inputs: int, outputs: int, sizes: int) -> None:
    """PlanError unless the region is well formed: it takes `inputs` tensors and `sizes` sizes, gives `outputs` tensors,
    every value is defined before it is used, and every argument is of a kind that regions know."""
    if region.inputs != inputs or len(region.outputs) != outputs:
        raise PlanError(
            f"a region of torch operators takes {region.inputs} tensors and gives {len(region.outputs)}; its step "
            f"passes {inputs} and takes {outputs}"
        )
    _check(region, sizes, 0)


def _check(region: TorchRegion, sizes: int, depth: int) -> None:
    if depth > DEEPEST:
        raise PlanError(f"a region of torch operators has more than {DEEPEST} conditions inside each other")
    least = 0 if depth else 1  # a branch may give back what it was given
    if not 0 <= region.inputs <= MOST_RESULTS or not least <= len(region.ops) <= MOST_OPERATORS:
        raise PlanError(f"a region of torch operators has {region.inputs} inputs and {len(region.ops)} operators")
    known = region.inputs
    for op in region.ops:
        if not 0 < op.results <= MOST_RESULTS:
            raise PlanError(f"the torch operator {_short(op.target)} has {op.results} results")
        if op.target != COND and not _NAME.match(op.target):
            raise PlanError(f"{_short(op.target)} is no name of a torch operator, such as aten.abs.default")
        for argument in (*op.args, *op.kwargs.values()):
            _check_argument(op, argument, known, sizes, 0)
        if any(not _WORD.match(name.lower()) for name in op.kwargs):
            raise PlanError(f"the torch operator {_short(op.target)} has a keyword that is no word")
        _check_branches(op, sizes, depth)
        known += op.results
    if any(not 0 <= number < known for number in region.outputs):
        raise PlanError("a region of torch operators gives a value that it does not have")


def _check_branches(op: TorchOp, sizes: int, depth: int) -> None:
    if op.target != COND:
        if op.branches:
            raise PlanError(f"the torch operator {op.target} has branches, which only a condition has")
        return
    if len(op.branches) != 2 or not op.args or op.kwargs:
        raise PlanError("a condition among torch operators needs a predicate and two branches")
    for branch in op.branches:
        if branch.inputs != len(op.args) - 1 or len(branch.outputs) != op.results:
            raise PlanError("a branch of a condition among torch operators takes or gives another number of values")
        _check(branch, sizes, depth + 1)


def _check_argument(op: TorchOp, argument: Any, known: int, sizes: int, depth: int) -> None:
    match argument:
        case None | bool():
            return
        case int() if -_INT64 <= argument < _INT64:
            return
        case float() if math.isfinite(argument):
            return
        case str() if _WORD.match(argument):
            return
        case list() | tuple() if depth < 3:
            for item in argument:
                _check_argument(op, item, known, sizes, depth + 1)
            return
        case {"v": int(number)} if len(argument) == 1 and 0 <= number < known:
            return
        case {"size": int(number)} if len(argument) == 1 and 0 <= number < sizes:
            return
        case {"dtype": str(name)} if len(argument) == 1 and name in TORCH_DTYPES:
            return
        case {"complex": list(parts) | tuple(parts)} if len(argument) == 1 and len(parts) == 2:
            if all(isinstance(part, float) and math.isfinite(part) for part in parts):
                return
        case {"float": str(text)} if len(argument) == 1 and text in _FLOATS:
            return
    raise PlanError(
        f"the torch operator {_short(op.target)} has the argument {_short(repr(argument))}, which regions lack"
    )


def _short(text: str) -> str:
    return repr(text[:80])


# --- which operators -------------------------------------------------------------------------------------------------


def operators(region: TorchRegion, depth: int = 0) -> Iterator[str]:
    """The operators of a region, those of branches included; a condition is `cond`. PlanError where these are too deep
    inside each other, so that a region need not have been checked before."""
    if depth > DEEPEST:
        raise PlanError(f"a region of torch operators has more than {DEEPEST} conditions inside each other")
    for op in region.ops:
        yield op.target
        for branch in op.branches:
            yield from operators(branch, depth + 1)


def is_safe(name: str) -> bool:
    """Whether a file may name this overload: an ATen operator of the list that computes new tensors and nothing else.

    Overloads that write into an argument are told by their names here, and by their schemas in `torch_runner`.
    """
    space, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    return space == "aten" and packet in SAFE_OPERATORS and not overload.endswith("out")


def check_trusted(names: Iterable[str], trusted: Collection[str]) -> None:
    """TrustError names the operators that are neither safe nor trusted by the caller."""
    unknown = sorted({name for name in names if name != COND and not is_safe(name) and name not in trusted})
    if unknown:
        listed = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise TrustError(
            f"the program calls torch operators that are not on the list of those known to be harmless: {listed}. If "
            f"you know and trust them, load it with trust_operators={unknown[:8]!r}"
        )


# --- who runs them ---------------------------------------------------------------------------------------------------


class Place(Strict, frozen=True):
    """A contiguous tensor in memory: where a region reads an input, or writes an output."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    written: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Ready(Protocol):
    """A region whose operators were found and whose calls fit their schemas."""

    def on_host(self, sizes: Sequence[int], inputs: Sequence[Place], outputs: Sequence[Place]) -> None:
        """Runs it on memory of the host. RuntimeFailure names the operator that failed, or an output whose shape or
        type is not the declared one, before anything is written."""

    def on_cuda(
        self, sizes: Sequence[int], inputs: Sequence[Place], outputs: Sequence[Place], device: str, stream: int
    ) -> None:
        """The same on a GPU's memory, in the order of a stream (by its handle)."""


class Runner(Protocol):
    """`qcompiler.frontends.torch.capture.torch_runner`."""

    def prepare(self, region: TorchRegion) -> Ready:
        """PlanError for an operator that torch does not have, or a call that its schema does not allow."""


_RUNNER = "qcompiler.frontends.torch.capture.torch_runner"


def runner() -> Runner:
    """What runs regions; it imports torch, which nothing else does that runs programs. MissingDependencyError."""
    try:
        found: Any = importlib.import_module(_RUNNER)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise MissingDependencyError(
            'a part of this program runs in torch (it was compiled with fallback="torch"), and torch is not '
            "installed: pip install torch"
        ) from error
    prepared: Runner = found.TorchRunner()
    return prepared
