"""The `rt` dialect: the schedule, one to one with `qcompiler.plan`. It has no SSA values: as in the plan, names refer
to things.

    rt.device @d0 {kind = "cpu", index = 0 : i64}
    rt.stream @s0 on @d0
    rt.event @e0
    rt.arena @act {device = @d0, kind = "activations", nbytes = 4096 : i64, entry = "main"}
    rt.buffer @b0 {arena = @act, offset = 0 : i64, nbytes = 1024 : i64}
    rt.buffer @w0 {arena = @constants, offset = 0 : i64, nbytes = 2048 : i64, weight = "encoder.w"}
    rt.kernel @linear_0 attributes {symbols = ["b"], operands = [#rt.operand<…>]} { the one compute op, on tensors }
    rt.entry @main attributes {symbols = [#rt.symbol<…>], inputs = [#rt.sig<…>], outputs = [#rt.sig<…>]} {
      rt.launch @linear_0 on @s0 [#rt.view<…>, …]
      rt.select "b*s" [#rt.case<@linear_1, 1>, #rt.case<@linear_0>] on @s0 [#rt.view<…>, …]
      rt.copy on @s0 from <@b0, …> to <@b1, …>
      rt.record @e0 on @s0
      rt.wait @e0 on @s1
      rt.torch_call "aten.lgamma.default" on @s0 [#rt.view<…>] to [#rt.view<…>] {region = {…}, sizes = [], serves = "…"}
    }

A step may lack its stream before assign-streams, and a buffer its offset before plan-memory; the plan has both. A
buffer of the constants arena names the weight whose bytes it holds (`weight`).

A kernel's region has one block argument per operand, in order. An argument has the operand's element type
(`!qc.qtensor` for a packed operand) and its shape or a reshape of it. The argument of a write-only operand is a
destination (`outs`) without defined contents. Besides the one compute op (`qc.*` or `linalg.generic`), the region may
contain `tensor.empty`, `linalg.fill`, `qc.dim`, constants and view ops. `rt.yield` yields one tensor for each written
operand (w, rw), in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from xdsl.dialects.builtin import (
    ArrayAttr,
    FlatSymbolRefAttrConstr,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    UnitAttr,
    i64,
)
from xdsl.ir import Attribute, Block, Dialect, Operation, Region, SSAValue
from xdsl.irdl import (
    AnyAttr,
    IRDLOperation,
    ParsePropInAttrDict,
    irdl_op_definition,
    opt_prop_def,
    opt_region_def,
    prop_def,
    region_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import IsolatedFromAbove, IsTerminator, NoTerminator
from xdsl.utils.exceptions import VerifyException

from qcompiler.errors import PlanError, ScheduleError
from qcompiler.ir.rt_attrs import CaseAttr, OperandAttr, SigAttr, SymbolAttr, ViewAttr
from qcompiler.ir.rt_steps import (
    NO_STREAM,
    CopyOp,
    LaunchOp,
    RecordOp,
    SelectOp,
    StepOp,
    TorchCallOp,
    WaitOp,
    name_of,
    step_op,
)
from qcompiler.plan.kernel import Operand
from qcompiler.plan.plan import (
    Arena,
    ArenaKind,
    Buffer,
    DeviceSlot,
    EntryPoint,
    Event,
    Stream,
    Symbol,
    TensorSig,
)

__all__ = [
    "NO_STREAM", "RT", "ArenaOp", "BufferOp", "CopyOp", "DeviceOp", "EntryOp", "EventOp", "KernelOp", "LaunchOp",
    "NamedOp", "RecordOp", "SelectOp", "StepOp", "StreamOp", "TorchCallOp", "WaitOp", "YieldOp",
    "name_of", "step_op",
]  # fmt: skip

_MODULE_LEVEL_KINDS = ("cpu", "cuda", "sim")
_ARENA_KINDS = ("constants", "init", "activations", "state", "input", "output")


def _integer(value: int) -> IntegerAttr:
    return IntegerAttr(value, i64)


class NamedOp(IRDLOperation):
    """Base class of declarations; `sym` is the name. As in the plan, names are unique per kind, not per module. MLIR
    requires unique values of `sym_name`, so the property has another name."""

    sym_name = prop_def(SymbolNameConstraint(), prop_name="name")

    @property
    def sym(self) -> str:
        return self.sym_name.data


# --- declarations ----------------------------------------------------------------------------------------------------


@irdl_op_definition
class DeviceOp(NamedOp):
    """A device slot: plan.DeviceSlot."""

    name = "rt.device"
    kind = prop_def(StringAttr)
    index = prop_def(IntegerAttr)
    assembly_format = "$name attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, name: str, kind: str, index: int = 0) -> None:
        properties: dict[str, Attribute | None] = {
            "name": StringAttr(name), "kind": StringAttr(kind), "index": _integer(index),
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: DeviceSlot) -> DeviceOp:
        return DeviceOp(record.name, record.kind, record.index)

    @property
    def record(self) -> DeviceSlot:
        return DeviceSlot(name=self.sym, kind=self.kind.data, index=self.index.value.data)  # type: ignore[arg-type]

    def verify_(self) -> None:
        if self.kind.data not in _MODULE_LEVEL_KINDS:
            raise VerifyException(f"rt.device kind must be one of {', '.join(_MODULE_LEVEL_KINDS)}")


@irdl_op_definition
class StreamOp(NamedOp):
    """An in-order queue of one device: plan.Stream."""

    name = "rt.stream"
    device = prop_def(FlatSymbolRefAttrConstr)
    assembly_format = "$name `on` $device attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, name: str, device: str) -> None:
        super().__init__(properties={"name": StringAttr(name), "device": SymbolRefAttr(device)})

    @staticmethod
    def of(record: Stream) -> StreamOp:
        return StreamOp(record.name, record.device)

    @property
    def record(self) -> Stream:
        return Stream(name=self.sym, device=name_of(self.device))


@irdl_op_definition
class EventOp(NamedOp):
    """An event: plan.Event."""

    name = "rt.event"
    assembly_format = "$name attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, name: str) -> None:
        super().__init__(properties={"name": StringAttr(name)})

    @staticmethod
    def of(record: Event) -> EventOp:
        return EventOp(record.name)

    @property
    def record(self) -> Event:
        return Event(name=self.sym)


@irdl_op_definition
class ArenaOp(NamedOp):
    """A contiguous range of memory on a device: plan.Arena. `nbytes` may be 0 until plan-memory sets it.

    A `gathered` constants arena holds the weights of its buffers, each at its buffer's offset. Otherwise the arena has
    the same bytes as the file.
    """

    name = "rt.arena"
    device = prop_def(FlatSymbolRefAttrConstr)
    kind = prop_def(StringAttr)
    nbytes = prop_def(IntegerAttr)
    entry = opt_prop_def(StringAttr)
    gathered = opt_prop_def(UnitAttr)
    assembly_format = "$name attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(
        self,
        name: str,
        device: str,
        kind: ArenaKind,
        nbytes: int = 0,
        entry: str | None = None,
        *,
        gathered: bool = False,
    ) -> None:
        properties: dict[str, Attribute | None] = {
            "name": StringAttr(name), "device": SymbolRefAttr(device), "kind": StringAttr(kind),
            "nbytes": _integer(nbytes), "entry": StringAttr(entry) if entry is not None else None,
            "gathered": UnitAttr() if gathered else None,
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: Arena, *, gathered: bool = False) -> ArenaOp:
        return ArenaOp(record.name, record.device, record.kind, record.nbytes, record.entry, gathered=gathered)

    @property
    def record(self) -> Arena:
        return Arena(
            name=self.sym, device=name_of(self.device), kind=cast(ArenaKind, self.kind.data),
            nbytes=self.nbytes.value.data, entry=self.entry.data if self.entry is not None else None,
        )  # fmt: skip

    def set_nbytes(self, nbytes: int) -> None:
        self.nbytes = _integer(nbytes)

    def verify_(self) -> None:
        if self.kind.data not in _ARENA_KINDS:
            raise VerifyException(f"rt.arena kind must be one of {', '.join(_ARENA_KINDS)}")


@irdl_op_definition
class BufferOp(NamedOp):
    """A range of an arena: plan.Buffer. It has no `offset` before plan-memory; `weight` is a constant's key."""

    name = "rt.buffer"
    arena = prop_def(FlatSymbolRefAttrConstr)
    offset = opt_prop_def(IntegerAttr)
    nbytes = prop_def(IntegerAttr)
    weight = opt_prop_def(StringAttr)
    assembly_format = "$name attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(
        self, name: str, arena: str, nbytes: int, offset: int | None = None, weight: str | None = None
    ) -> None:
        properties: dict[str, Attribute | None] = {
            "name": StringAttr(name), "arena": SymbolRefAttr(arena),
            "offset": _integer(offset) if offset is not None else None, "nbytes": _integer(nbytes),
            "weight": StringAttr(weight) if weight is not None else None,
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: Buffer, weight: str | None = None) -> BufferOp:
        return BufferOp(record.name, record.arena, record.nbytes, record.offset, weight)

    @property
    def record(self) -> Buffer:
        """ScheduleError if the buffer has no offset yet."""
        if self.offset is None:
            raise ScheduleError(f"buffer '{self.sym}' has no offset yet; run plan-memory first", rule="unplaced-buffer")
        return Buffer(
            name=self.sym, arena=name_of(self.arena), offset=self.offset.value.data, nbytes=self.nbytes.value.data
        )

    @property
    def arena_name(self) -> str:
        return name_of(self.arena)

    def set_offset(self, offset: int) -> None:
        self.offset = _integer(offset)


# --- kernels ---------------------------------------------------------------------------------------------------------


@irdl_op_definition
class KernelOp(NamedOp):
    """One kernel: its operands, and what it computes as a region with one compute op on tensors."""

    name = "rt.kernel"
    symbols = prop_def(ArrayAttr[StringAttr])
    operand_attrs = prop_def(ArrayAttr[OperandAttr], prop_name="operands")
    serves = opt_prop_def(StringAttr)
    body = opt_region_def()
    assembly_format = "$name attr-dict-with-keyword ($body^)?"
    irdl_options = (ParsePropInAttrDict(),)
    traits = traits_def(IsolatedFromAbove())

    def __init__(
        self,
        name: str,
        symbols: Sequence[str],
        operands: Sequence[Operand],
        body: Region | None = None,
        serves: str = "",
    ) -> None:
        properties: dict[str, Attribute | None] = {
            "name": StringAttr(name), "symbols": ArrayAttr(StringAttr(s) for s in symbols),
            "operands": ArrayAttr(OperandAttr.of(o) for o in operands),
            "serves": StringAttr(serves) if serves else None,
        }  # fmt: skip
        super().__init__(properties=properties, regions=[[body] if body is not None else []])

    @property
    def symbol_names(self) -> tuple[str, ...]:
        return tuple(s.data for s in self.symbols)

    @property
    def operand_records(self) -> tuple[Operand, ...]:
        return tuple(o.record for o in self.operand_attrs)

    @property
    def serves_text(self) -> str:
        return self.serves.data if self.serves is not None else ""

    @property
    def yielded(self) -> tuple[SSAValue, ...]:
        """The region's results, one for each written operand. PlanError for a kernel without a region."""
        if self.body is None:
            raise PlanError(f"kernel '{self.sym}' has no body")
        last = self.body.block.last_op
        assert isinstance(last, YieldOp)
        return tuple(last.values)

    def verify_(self) -> None:
        if self.body is None:
            return
        if not self.body.blocks or not isinstance(self.body.block.last_op, YieldOp):
            raise VerifyException(f"the body of rt.kernel @{self.sym} must end in rt.yield")
        operands = self.operand_records
        if len(self.body.block.args) != len(operands):
            raise VerifyException(
                f"rt.kernel @{self.sym} has {len(operands)} operands but {len(self.body.block.args)} block arguments"
            )
        written = sum(o.access != "r" for o in operands)
        if len(self.yielded) != written:
            raise VerifyException(f"rt.kernel @{self.sym} writes {written} operands but yields {len(self.yielded)}")


@irdl_op_definition
class YieldOp(IRDLOperation):
    """Ends a kernel's body with one tensor for each written operand."""

    name = "rt.yield"
    values = var_operand_def(AnyAttr())
    traits = traits_def(IsTerminator())
    assembly_format = "attr-dict ($values^ `:` type($values))?"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, *values: SSAValue | Operation) -> None:
        super().__init__(operands=[list(values)])


# --- entry points ----------------------------------------------------------------------------------------------------


@irdl_op_definition
class EntryOp(NamedOp):
    """One entry point: its symbols with ranges, its signature and its steps. `init` marks the plan's init entry."""

    name = "rt.entry"
    symbols = prop_def(ArrayAttr[SymbolAttr])
    inputs = prop_def(ArrayAttr[SigAttr])
    outputs = prop_def(ArrayAttr[SigAttr])
    init = opt_prop_def(UnitAttr)
    body = region_def()  # has no block if it was parsed and has no steps
    traits = traits_def(NoTerminator(), IsolatedFromAbove())
    assembly_format = "$name attr-dict-with-keyword $body"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(
        self,
        name: str,
        symbols: Sequence[Symbol],
        inputs: Sequence[TensorSig],
        outputs: Sequence[TensorSig],
        steps: Sequence[StepOp] = (),
        *,
        is_init: bool = False,
    ) -> None:
        properties: dict[str, Attribute | None] = {
            "name": StringAttr(name), "symbols": ArrayAttr(SymbolAttr.of(s) for s in symbols),
            "inputs": ArrayAttr(SigAttr.of(s) for s in inputs), "outputs": ArrayAttr(SigAttr.of(s) for s in outputs),
            "init": UnitAttr() if is_init else None,
        }  # fmt: skip
        super().__init__(properties=properties, regions=[Region(Block(steps))])

    @staticmethod
    def of(record: EntryPoint, *, is_init: bool = False) -> EntryOp:
        steps = [step_op(s) for s in record.steps]
        return EntryOp(record.name, record.symbols, record.inputs, record.outputs, steps, is_init=is_init)

    @property
    def is_init(self) -> bool:
        return self.init is not None

    @property
    def symbol_records(self) -> tuple[Symbol, ...]:
        return tuple(s.record for s in self.symbols)

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        return {s.name: (s.min, s.max) for s in self.symbol_records}

    @property
    def steps(self) -> Iterator[StepOp]:
        for block in self.body.blocks:
            for op in block.ops:
                assert isinstance(op, StepOp)
                yield op

    @property
    def record(self) -> EntryPoint:
        return EntryPoint(
            name=self.sym, symbols=self.symbol_records, inputs=tuple(s.record for s in self.inputs),
            outputs=tuple(s.record for s in self.outputs), steps=tuple(s.record for s in self.steps),
        )  # fmt: skip

    def verify_(self) -> None:
        if len(self.body.blocks) > 1:
            raise VerifyException(f"rt.entry @{self.sym} has more than one block")
        for block in self.body.blocks:
            for op in block.ops:
                if not isinstance(op, StepOp):
                    raise VerifyException(f"rt.entry @{self.sym} holds {op.name}, which is not a step")


RT = Dialect(
    "rt",
    [
        DeviceOp, StreamOp, EventOp, ArenaOp, BufferOp, KernelOp, YieldOp, EntryOp,
        LaunchOp, SelectOp, CopyOp, RecordOp, WaitOp, TorchCallOp,
    ],
    [SymbolAttr, SigAttr, OperandAttr, ViewAttr, CaseAttr],
)  # fmt: skip
