"""The steps of the `rt` dialect: what an entry point does, in order. See rt.py for the syntax of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    FlatSymbolRefAttrConstr,
    StringAttr,
    SymbolRefAttr,
)
from xdsl.ir import Attribute
from xdsl.irdl import (
    IRDLOperation,
    ParsePropInAttrDict,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
)

from qcompiler.ir.region_text import attribute_of, region_of
from qcompiler.ir.rt_attrs import CaseAttr, ViewAttr
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.plan import (
    Copy,
    Launch,
    Record,
    Select,
    SelectCase,
    Step,
    TorchCall,
    View,
    Wait,
)
from qcompiler.plan.torch_regions import TorchRegion, operators

NO_STREAM = ""
"""The stream of a plan record whose rt op has none yet; the verifier refuses it."""


def name_of(ref: SymbolRefAttr | None) -> str:
    """The name in a reference; NO_STREAM for None."""
    return NO_STREAM if ref is None else ref.root_reference.data


def _ref(name: str | None) -> SymbolRefAttr | None:
    return SymbolRefAttr(name) if name else None


class StepOp(IRDLOperation):
    """Base class of steps. `stream_name` is None until assign-streams has run."""

    stream = opt_prop_def(FlatSymbolRefAttrConstr)

    @property
    def stream_name(self) -> str | None:
        return None if self.stream is None else name_of(self.stream)

    def set_stream(self, name: str) -> None:
        self.stream = SymbolRefAttr(name)

    @property
    def record(self) -> Step:
        """The plan's step; its stream is NO_STREAM where this op has none yet."""
        raise NotImplementedError

    @property
    def view_records(self) -> tuple[View, ...]:
        """Every view the step touches, in order."""
        return ()


@irdl_op_definition
class LaunchOp(StepOp):
    """Runs a kernel with one view for each of its operands: plan.Launch."""

    name = "rt.launch"
    kernel = prop_def(FlatSymbolRefAttrConstr)
    views = prop_def(ArrayAttr[ViewAttr])
    assembly_format = "$kernel (`on` $stream^)? $views attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, kernel: str, views: Sequence[View], stream: str | None = None) -> None:
        properties: dict[str, Attribute | None] = {
            "kernel": SymbolRefAttr(kernel), "stream": _ref(stream), "views": ArrayAttr(ViewAttr.of(v) for v in views),
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: Launch) -> LaunchOp:
        return LaunchOp(record.kernel, record.operands, record.stream)

    @property
    def kernel_name(self) -> str:
        return name_of(self.kernel)

    @property
    def record(self) -> Launch:
        return Launch(kernel=self.kernel_name, stream=name_of(self.stream), operands=self.view_records)

    @property
    def view_records(self) -> tuple[View, ...]:
        return tuple(v.record for v in self.views)


@irdl_op_definition
class SelectOp(StepOp):
    """A launch whose kernel is chosen by a shape expression: plan.Select."""

    name = "rt.select"
    on = prop_def(StringAttr)
    cases = prop_def(ArrayAttr[CaseAttr])
    views = prop_def(ArrayAttr[ViewAttr])
    assembly_format = "$on $cases (`on` $stream^)? $views attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, on: Dim, cases: Sequence[SelectCase], views: Sequence[View], stream: str | None = None) -> None:
        properties: dict[str, Attribute | None] = {
            "on": StringAttr(str(dim(on))), "cases": ArrayAttr(CaseAttr.of(c) for c in cases), "stream": _ref(stream),
            "views": ArrayAttr(ViewAttr.of(v) for v in views),
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: Select) -> SelectOp:
        return SelectOp(record.on, record.cases, record.operands, record.stream)

    @property
    def record(self) -> Select:
        return Select(
            on=dim(self.on.data).to_dim(), cases=tuple(c.record for c in self.cases), stream=name_of(self.stream),
            operands=self.view_records,
        )  # fmt: skip

    @property
    def view_records(self) -> tuple[View, ...]:
        return tuple(v.record for v in self.views)


@irdl_op_definition
class CopyOp(StepOp):
    """Copies the bytes of a contiguous view: plan.Copy. The only step that may cross devices."""

    name = "rt.copy"
    source = prop_def(ViewAttr)
    target = prop_def(ViewAttr)
    assembly_format = "(`on` $stream^)? `from` $source `to` $target attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(self, source: View, target: View, stream: str | None = None) -> None:
        properties: dict[str, Attribute | None] = {
            "stream": _ref(stream), "source": ViewAttr.of(source), "target": ViewAttr.of(target),
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: Copy) -> CopyOp:
        return CopyOp(record.source, record.target, record.stream)

    @property
    def record(self) -> Copy:
        return Copy(stream=name_of(self.stream), source=self.source.record, target=self.target.record)

    @property
    def view_records(self) -> tuple[View, ...]:
        return self.source.record, self.target.record


class EventStepOp(StepOp):
    """Base class of steps that name an event, and have a record of (stream, event)."""

    event = prop_def(FlatSymbolRefAttrConstr)
    assembly_format = "$event (`on` $stream^)? attr-dict"
    irdl_options = (ParsePropInAttrDict(),)
    STEP: ClassVar[type[Record] | type[Wait]]

    def __init__(self, event: str, stream: str | None = None) -> None:
        super().__init__(properties={"event": SymbolRefAttr(event), "stream": _ref(stream)})

    @classmethod
    def of(cls, record: Record | Wait) -> Self:
        return cls(record.event, record.stream)

    @property
    def record(self) -> Record | Wait:
        return self.STEP(stream=name_of(self.stream), event=name_of(self.event))


@irdl_op_definition
class RecordOp(EventStepOp):
    """Records an event after everything enqueued on its stream so far: plan.Record."""

    name = "rt.record"
    STEP: ClassVar = Record


@irdl_op_definition
class WaitOp(EventStepOp):
    """Later work on the stream starts after the event's record: plan.Wait."""

    name = "rt.wait"
    STEP: ClassVar = Wait


@irdl_op_definition
class TorchCallOp(StepOp):
    """A region of torch operators with its inputs and outputs: plan.TorchCall. `target` lists them for readers."""

    name = "rt.torch_call"
    target = prop_def(StringAttr)
    region = prop_def(DictionaryAttr)
    sizes = prop_def(ArrayAttr[StringAttr])
    inputs = prop_def(ArrayAttr[ViewAttr])
    outputs = prop_def(ArrayAttr[ViewAttr])
    serves = prop_def(StringAttr)
    assembly_format = "$target (`on` $stream^)? $inputs `to` $outputs attr-dict"
    irdl_options = (ParsePropInAttrDict(),)

    def __init__(
        self,
        region: TorchRegion,
        sizes: Sequence[Dim],
        inputs: Sequence[View],
        outputs: Sequence[View],
        *,
        serves: str = "",
        stream: str | None = None,
    ) -> None:
        properties: dict[str, Attribute | None] = {
            "target": StringAttr(", ".join(dict.fromkeys(operators(region)))),
            "region": attribute_of(region),
            "sizes": ArrayAttr(StringAttr(str(dim(size))) for size in sizes), "stream": _ref(stream),
            "inputs": ArrayAttr(ViewAttr.of(v) for v in inputs), "outputs": ArrayAttr(ViewAttr.of(v) for v in outputs),
            "serves": StringAttr(serves),
        }  # fmt: skip
        super().__init__(properties=properties)

    @staticmethod
    def of(record: TorchCall) -> TorchCallOp:
        return TorchCallOp(
            record.region, record.sizes, record.inputs, record.outputs, serves=record.serves, stream=record.stream
        )

    @property
    def record(self) -> TorchCall:
        return TorchCall(
            stream=name_of(self.stream), region=region_of(self.region),
            sizes=tuple(dim(size.data).to_dim() for size in self.sizes), inputs=tuple(v.record for v in self.inputs),
            outputs=tuple(v.record for v in self.outputs), serves=self.serves.data,
        )  # fmt: skip

    @property
    def view_records(self) -> tuple[View, ...]:
        return tuple(v.record for v in (*self.inputs, *self.outputs))


_STEP_OPS: dict[type[Step], type[StepOp]] = {
    Launch: LaunchOp, Select: SelectOp, Copy: CopyOp, Record: RecordOp, Wait: WaitOp,
    TorchCall: TorchCallOp,
}  # fmt: skip


def step_op(record: Step) -> StepOp:
    """The op of a plan's step."""
    return _STEP_OPS[type(record)].of(record)  # type: ignore[attr-defined,no-any-return]
