"""What a frontend hands to the pipeline, whatever the model was written in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from qcompiler.ledger import Ledger
from qcompiler.plan.plan import Signature
from qcompiler.plan.weights import Bytes, WeightStore
from qcompiler.runtime.progress import stage

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

FRONTEND_STAGES = ("export", "insert-qdq", "import")
"""The stages of every frontend, in order."""


@dataclass
class Stages:
    """What a frontend's stages take and write: `with stages("export"): …; stages.texts["00-export"] = …`."""

    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        stage(name)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


@dataclass(frozen=True)
class NodeValue:
    """A value of the model's graph: its name there, its operator, its module path, its line in the model, the array."""

    name: str
    op: str
    path: str
    line: str
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class GraphValues:
    """One run of a graph: its values in order (none where the frontend cannot look at them), and its results."""

    nodes: tuple[NodeValue, ...]
    results: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True)
class Compared:
    """The oracle's run, and the float model's; None without a float model."""

    oracle: GraphValues
    model: GraphValues | None


class Imported(Protocol):
    """The imported module of `qc` and `linalg`, and everything else that a program needs."""

    @property
    def module(self) -> ModuleOp: ...

    @property
    def weights(self) -> WeightStore: ...

    @property
    def signature(self) -> Signature: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def states(self) -> Mapping[str, npt.NDArray[Any]]:
        """Initial values of the states, keyed as `qc.state`."""

    @property
    def torch_parts(self) -> Sequence[Any]:
        """The regions that torch runs."""

    @property
    def torch_calls(self) -> tuple[str, ...]:
        """The operators that torch runs."""

    @property
    def texts(self) -> Mapping[str, str]:
        """The dumps of the stages before the import: "00-export", "01-insert-qdq"."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """The wall time of each stage of the frontend."""

    @property
    def notes(self) -> Sequence[tuple[str, str]]:
        """(what, why) of decisions of the export."""

    @property
    def decisions(self) -> Sequence[tuple[str, str, str]]:
        """(stage, path, what) of decisions about weights."""

    @property
    def lines(self) -> Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]:
        """The model's source lines by module path, each with the operators that it became; empty if none are known."""

    def compared(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flatten: Callable[[Any], Sequence[Any]]
    ) -> Compared:
        """One run of the oracle, and one of the float model unless it is None.

        `flatten` gives the arrays of a result.
        """

    def room(self, nbytes: int) -> Bytes:
        """Zeroed memory for the program's image."""

    def oracle(self) -> Callable[..., Any]:
        """The quantised model in the framework that it came from: the accuracy oracle. WeightsError without values."""

    def sample_inputs(self) -> list[npt.NDArray[Any]]:
        """The example inputs as flat arrays, for `verify_each="numerics"`."""
