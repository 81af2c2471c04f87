"""Regions of torch operators, as data: the parts of a model that `fallback="torch"` leaves to torch.

    %1 = aten._fft_r2c(%0, [1], 0, true)        {"target": "aten._fft_r2c.default", "args": [{"v": 0}, [1], 0, true]}
    %2 = aten.abs(%1)                           {"target": "aten.abs.default", "args": [{"v": 1}]}

A region is straight-line code over numbered values: its inputs first, then the results of its operators in order. An
argument is a number, a truth value, null, a word, a list of these, or one of `{"v": n}` (a value), `{"size": n}` (a
size of the call), `{"dtype": "complex64"}`, `{"float": "inf"}` and `{"complex": [0.0, 1.0]}`. The inputs and outputs of
a region have types that a plan can hold. Values inside it may have other types, such as complex ones.

An untrusted file may hold regions. So an operator is a name from `SAFE_OPERATORS`, or one that the caller trusts by
name. It is never code. `torch_runner` compares each call with torch's schema before anything runs.
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
"""The operator of `torch.cond`: its arguments are (predicate, *values), its branches a region for true and for
false."""

FOREIGN_DTYPES = ("complex64", "complex128", "complex32")
TORCH_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", *FOREIGN_DTYPES,
)  # fmt: skip

MOST_OPERATORS = 10_000
MOST_RESULTS = 4_096
DEEPEST = 8
"""The most levels of nested `torch.cond`."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z_][A-Za-z0-9_]{0,63}){2}\Z")
_WORD = re.compile(r"[a-z_]{1,32}\Z")
_FLOATS = ("inf", "-inf", "nan")
_INT64 = 1 << 63


class TorchOp(Strict, frozen=True):
    """One operator, by the name of its overload. `results` is the number of values that it defines. `branches` are the
    two regions of a `cond`: their inputs are its arguments after the predicate, and their outputs are its results."""

    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    results: int = 1
    branches: tuple[TorchRegion, ...] = ()


class TorchRegion(Strict, frozen=True):
    """Operators in order. The values 0 … `inputs` - 1 are the inputs; `outputs` lists value numbers."""

    inputs: int
    ops: tuple[TorchOp, ...]
    outputs: tuple[int, ...]


def region_to_json(region: TorchRegion) -> str:
    """Deterministic JSON, without fields that have their default."""
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
    """PlanError for text that is no region."""
    try:
        return msgspec.json.decode(text, type=TorchRegion, strict=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PlanError(f"the region of torch operators is malformed: {error}") from error


# --- what a region must be -------------------------------------------------------------------------------------------


def check_region(region: TorchRegion, inputs: int, outputs: int, sizes: int) -> None:
    """PlanError unless the region is well formed: it takes `inputs` tensors and `sizes` sizes and gives `outputs`
    tensors, every value is defined before its use, and every argument is of a known kind."""
    if region.inputs != inputs or len(region.outputs) != outputs:
        raise PlanError(
            f"a region of torch operators takes {region.inputs} tensors and gives {len(region.outputs)}; its step "
            f"passes {inputs} and takes {outputs}"
        )
    _check(region, sizes, 0)


def _check(region: TorchRegion, sizes: int, depth: int) -> None:
    if depth > DEEPEST:
        raise PlanError(f"a region of torch operators has more than {DEEPEST} conditions inside each other")
    least = 0 if depth else 1  # a branch may return its inputs, without any operator
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
    """The names of all operators of a region and of its branches; a condition is `cond`. PlanError for branches that
    nest too deeply: the region need not be checked before."""
    if depth > DEEPEST:
        raise PlanError(f"a region of torch operators has more than {DEEPEST} conditions inside each other")
    for op in region.ops:
        yield op.target
        for branch in op.branches:
            yield from operators(branch, depth + 1)


def is_safe(name: str) -> bool:
    """Whether a file may name this overload: it belongs to a listed ATen operator and does not write into an argument.

    Here the name shows whether an overload writes into an argument; `torch_runner` also looks at its schema.
    """
    space, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    return space == "aten" and packet in SAFE_OPERATORS and not overload.endswith("out")


def check_trusted(names: Iterable[str], trusted: Collection[str]) -> None:
    """TrustError for operators that are neither safe nor trusted by the caller; it names them."""
    unknown = sorted({name for name in names if name != COND and not is_safe(name) and name not in trusted})
    if unknown:
        listed = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise TrustError(
            f"the program calls torch operators that are not on the list of those known to be harmless: {listed}. If "
            f"you know and trust them, load it with trust_operators={unknown[:8]!r}"
        )


# --- running a region ------------------------------------------------------------------------------------------------


class TensorMemory(Strict, frozen=True):
    """The memory of a contiguous tensor: an input or, if `written`, an output of a region."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    written: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Ready(Protocol):
    """A region that is ready to run: torch has its operators, and the calls fit their schemas."""

    def on_host(self, sizes: Sequence[int], inputs: Sequence[TensorMemory], outputs: Sequence[TensorMemory]) -> None:
        """Runs the region on host memory. RuntimeFailure names the operator that failed, or an output whose shape or
        type differs from the declared one; in both cases nothing is written."""

    def on_cuda(
        self,
        sizes: Sequence[int],
        inputs: Sequence[TensorMemory],
        outputs: Sequence[TensorMemory],
        device: str,
        stream: int,
    ) -> None:
        """Runs the region on GPU memory, on the stream with this handle."""


class Runner(Protocol):
    """`qcompiler.frontends.torch.capture.torch_runner`."""

    def prepare(self, region: TorchRegion) -> Ready:
        """PlanError for an operator that torch does not have, or a call that its schema does not allow."""


_RUNNER = "qcompiler.frontends.torch.capture.torch_runner"


def runner() -> Runner:
    """The runner of regions. It imports torch; nothing else that runs programs does. MissingDependencyError."""
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
