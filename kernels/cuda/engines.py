"""Engines: which of a template's kernels serves an op on an architecture, and why the others do not.

    choose(linear.ENGINES, linear_facts(…), 75)
        -> EngineChoice(engine "fma", (("tensor cores", "bf16 mma needs sm_80 (f16: sm_75)"), …))

An engine states its requirements as data, over facts of an op: element types, the M class, how the weight is stored,
sizes. `select-kernels` reports the decision and `emit_kernel` follows the same decision, so the report is always true.
The last engine of a template requires nothing: every op compiles for every architecture.

Every engine here is deterministic: sums are taken in one order, independent of scheduling. None converts bf16 operands
to f16, whose range is smaller. Below sm_80, bf16 is only a storage type and arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qcompiler.kernels.cuda.geometry import SHARED_LIMIT
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import DType

Facts = Mapping[str, object]
"""The facts about an op that engines ask for, by name."""

MMA_SINCE: dict[str, int] = {"bf16": 80, "f16": 75}
"""Types that tensor cores multiply with fp32 accumulation, and the first architecture that supports each."""


# --- requirements ----------------------------------------------------------------------------------------------------


class Requirement(Protocol):
    """One requirement of an engine."""

    @property
    def text(self) -> str:
        """The requirement in words, for tables."""

    def unmet(self, facts: Facts, number: int) -> str | None:
        """Why an op with `facts` does not meet it on sm_`number`; None if it does."""


@dataclass(frozen=True)
class Mma:
    """The operands share a 16-bit type that the architecture's tensor cores multiply. `types` names the fact."""

    types: str = "types"

    @property
    def text(self) -> str:
        return ", ".join(f"{dtype} mma: sm_{least}" for dtype, least in MMA_SINCE.items())

    def unmet(self, facts: Facts, number: int) -> str | None:
        types = facts[self.types]
        assert isinstance(types, tuple)
        kinds = set(types)
        if len(kinds) != 1 or not kinds <= set(MMA_SINCE):
            return f"operands are {', '.join(sorted(kinds))}, not one 16-bit type"
        least = MMA_SINCE[types[0]]
        return None if number >= least else f"{types[0]} mma: sm_{least}"


@dataclass(frozen=True)
class On:
    """The architecture is sm_`number` itself: not those after it, which lack its instructions."""

    number: int

    @property
    def text(self) -> str:
        return f"sm_{self.number} alone"

    def unmet(self, facts: Facts, number: int) -> str | None:
        return None if number == self.number else f"it takes {self.text}"


@dataclass(frozen=True)
class OneOf:
    """The fact is one of `values`."""

    fact: str
    values: tuple[object, ...]

    @property
    def text(self) -> str:
        return f"{self.fact}: {', '.join(map(str, self.values))}"

    def unmet(self, facts: Facts, number: int) -> str | None:
        return None if facts[self.fact] in self.values else f"{self.fact} is {facts[self.fact]}, it takes {self.text}"


@dataclass(frozen=True)
class AtMost:
    """The fact is a known number and at most `most`."""

    fact: str
    most: int

    @property
    def text(self) -> str:
        return f"{self.fact} <= {self.most}"

    def unmet(self, facts: Facts, number: int) -> str | None:
        value = facts[self.fact]
        if not isinstance(value, int):
            return f"{self.fact} is not known at compile time, it takes {self.text}"
        return None if value <= self.most else f"{self.fact} is {value}, it takes {self.text}"


@dataclass(frozen=True)
class MultipleOf:
    """The fact is a multiple of `unit`."""

    fact: str
    unit: int

    @property
    def text(self) -> str:
        return f"{self.fact} % {self.unit} == 0"

    def unmet(self, facts: Facts, number: int) -> str | None:
        value = facts[self.fact]
        assert isinstance(value, int)
        return None if value % self.unit == 0 else f"{self.fact} is {value}, it takes {self.text}"


@dataclass(frozen=True)
class Shared:
    """The architecture has the shared memory that a block needs. The fact is the bytes of the engine's smallest
    tile."""

    fact: str

    @property
    def text(self) -> str:
        return f"{self.fact} <= the architecture's"

    def unmet(self, facts: Facts, number: int) -> str | None:
        needed = facts[self.fact]
        assert isinstance(needed, int)
        limit = SHARED_LIMIT[number]
        return None if needed <= limit else f"{needed} bytes of shared memory, sm_{number} has {limit}"


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One kernel of a template. `key` is its name in the template's module, `name` its name in reports."""

    key: str
    name: str
    requires: tuple[Requirement, ...] = ()
    deterministic: bool = True

    def refuses(self, facts: Facts, number: int) -> str | None:
        """The requirements that are not met; None if all are."""
        return "; ".join(r for each in self.requires if (r := each.unmet(facts, number)) is not None) or None


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, and (name, reason) of all others: a requirement that is not met, or "not preferred"."""

    engine: Engine
    rejected: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        return self.engine.key

    @property
    def why_not(self) -> str:
        """The engines that were not chosen, in one line."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.rejected)


def choose(engines: tuple[Engine, ...], facts: Facts, number: int) -> EngineChoice:
    """The first engine, in order of preference, whose requirements are met on sm_`number`."""
    rejected: list[tuple[str, str]] = []
    for place, engine in enumerate(engines):
        reason = engine.refuses(facts, number)
        if reason is None:
            later = [(e.name, e.refuses(facts, number) or "not preferred") for e in engines[place + 1 :]]
            return EngineChoice(engine, (*rejected, *later))
        rejected.append((engine.name, reason))
    raise AssertionError("the last engine of a template requires nothing")


TILES = ("codes", "values")
"""Weights stored in tiles of cuda_t16_v1, packed or plain."""

IN_TILES = OneOf("weight in tiles", (True,))
GROUPS = OneOf("groups of columns that chunks of 64 meet", (True,))

CUDA_CORES = (Engine("fma", "CUDA cores"),)
"""The engines of a kind with one kernel."""

# --- facts -----------------------------------------------------------------------------------------------------------


class WeightFacts(Protocol):
    """The facts about a weight that engines ask for; weights.Weight provides them."""

    @property
    def storage(self) -> str: ...
    @property
    def dtype(self) -> DType: ...


def _weight(x: DType, weight: WeightFacts, groups: bool, shared: int) -> dict[str, object]:
    return {
        "types": (x, weight.dtype), "weight in tiles": weight.storage in TILES,
        "groups of columns that chunks of 64 meet": groups, "mma shared bytes": shared,
    }  # fmt: skip


def linear_facts(
    x: DType, weight: WeightFacts, rows: str, *, windows: bool, groups: bool, shared: int
) -> dict[str, object]:
    """Facts of a linear. `rows` is the M class; `groups` and `shared` come from linear_mma."""
    source = "windows of an image" if windows else "rows"
    return {**_weight(x, weight, groups, shared), "rows": rows, "x": source}


def grouped_facts(x: DType, weight: WeightFacts, pairs: Dim, *, groups: bool, shared: int) -> dict[str, object]:
    """Facts of a grouped linear."""
    known = dim(pairs)
    number = known.value if known.is_static else None
    return {**_weight(x, weight, groups, shared), "pairs": number}


def attention_facts(
    types: tuple[DType, ...], queries: Dim, head_dim: int, value_dim: int, cache: str | None
) -> dict[str, object]:
    """Facts of an attention whose q, k and v have these types. The rows of a cache are multiplied in the type of q."""
    known = queries if isinstance(queries, int) else None
    types = types if cache is None else types[:1]
    return {"types": types, "queries": known, "head_dim": head_dim, "value_dim": value_dim}
