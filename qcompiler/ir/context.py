"""What passes share besides the IR: the weight store, the target, the device map, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.func import Func
from xdsl.dialects.linalg import Linalg
from xdsl.dialects.tensor import Tensor
from xdsl.dialects.test import Test

from qcompiler.errors import QCompilerError
from qcompiler.ir.qc import QC
from qcompiler.ir.rt import RT
from qcompiler.ir.scalar_ops import ARITH, MATH
from qcompiler.plan.plan import Plan
from qcompiler.plan.weights import WeightStore


@dataclass(frozen=True)
class Target:
    """What code is generated for. `isa` is x86-64, x86-64-v3, x86-64-v4 or generic for kind "cpu"; for kind "cuda" (a
    GPU or the simulated GPU) it is an architecture such as sm_90a.

    `others` are more of the same kind that the plan must serve; each gets its own build.
    """

    kind: str = "cpu"
    isa: str = "x86-64-v4"
    others: tuple[str, ...] = ()

    @property
    def isas(self) -> tuple[str, ...]:
        """All that the plan must serve, `isa` first."""
        return (self.isa, *self.others)


@dataclass(frozen=True)
class Decision:
    """One decision of a pass: `stage` (the pass's name), `path` (the module path), `what`, and `why`."""

    stage: str
    path: str
    what: str
    why: str


class Report:
    """An append-only list of decisions."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []
        self._once: set[Decision] = set()

    def add(self, stage: str, path: str, what: str, why: str) -> None:
        self._decisions.append(Decision(stage, path, what, why))

    def add_once(self, stage: str, path: str, what: str, why: str) -> None:
        """The same of a decision that may repeat: a module has an op in each function of a program."""
        decision = Decision(stage, path, what, why)
        if decision not in self._once:
            self._once.add(decision)
            self._decisions.append(decision)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def of(self, stage: str) -> tuple[Decision, ...]:
        """The decisions of one stage."""
        return tuple(d for d in self._decisions if d.stage == stage)


@dataclass(frozen=True)
class Emitted:
    """The result of the last stage: the program's plan, and the text of its kernels."""

    plan: Plan
    source: str


@dataclass
class QCContext(Context):
    """An xDSL context with the shared data of a compilation. Passes get it through `qc_context(ctx)`."""

    weights: WeightStore = field(default_factory=WeightStore)
    target: Target = field(default_factory=Target)
    devices: tuple[str, ...] = ("cpu",)
    device_map: dict[str, str] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    emitted: Emitted | None = None

    @staticmethod
    def default(
        *,
        weights: WeightStore | None = None,
        target: Target | None = None,
        devices: tuple[str, ...] = ("cpu",),
        device_map: Mapping[str, str] | None = None,
    ) -> QCContext:
        """A context that knows every dialect of the pipeline (each loaded on first use)."""
        ctx = QCContext(
            weights=weights if weights is not None else WeightStore(),
            target=target if target is not None else Target(),
            devices=devices,
            device_map=dict(device_map or {}),
        )
        for dialect in (Builtin, Func, ARITH, MATH, Linalg, Tensor, QC):
            ctx.load_dialect(dialect)
        ctx.register_dialect("rt", lambda: RT)
        ctx.register_dialect("test", lambda: Test)  # what filecheck files take their operands from
        return ctx

    def clone(self) -> QCContext:
        """A context with the same dialects and its own weight store. The weights' bytes and the report are shared."""
        base = super().clone()
        return QCContext(
            base.allow_unregistered,
            base._loaded_dialects,
            base._loaded_ops,
            base._loaded_attrs,
            base._loaded_types,
            base._registered_dialects,
            weights=self.weights.copy(),
            target=self.target,
            devices=self.devices,
            device_map=dict(self.device_map),
            report=self.report,
            emitted=self.emitted,
        )


def qc_context(ctx: Context) -> QCContext:
    """The context as a `QCContext`; QCompilerError for a plain xDSL context."""
    if isinstance(ctx, QCContext):
        return ctx
    raise QCompilerError(
        "this pass needs the weight store and the target of a compilation, which a plain xDSL context does not have; "
        "run it through `qc opt` or with QCContext.default()"
    )
