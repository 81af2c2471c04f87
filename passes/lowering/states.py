"""Which ops may write a state's own memory, and what has to be copied because of it.

    %s = qc.state @cache                                     in place: only the new rows are written
    %1 = qc.index_update %s, %at, %rows
    qc.state_update @cache, %1

    %s = qc.state @mean                                      in place: every element is read before it is written
    %1 = linalg.generic ins(%s, %x) { mulf; addf }
    qc.state_update @mean, %1

A *chain* are the updates of a part (index_update, scatter, insert_slice) between a state and its new value; they write
the state's memory.  A new value that one op computes is computed there, too, if no op behind it reads the old value and
the op itself reads it element by element or not at all.  Everything else is a copy at the end of the entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xdsl.dialects import tensor as tensor_dialect
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import Block, Operation, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering.placer import root_of
from qcompiler.passes.views.views import readers, unreshaped

DeviceOf = Callable[[Operation], str]


@dataclass
class InPlace:
    """What writes the memory of states.

    `chains`: ops that write where their base is, each with the whole value whose memory that is a part of.  `absorbed`:
    insert_slices whose source was written in place already.  `results`: op results that are computed in a state's
    memory, with the update that says which.
    """

    chains: dict[Operation, SSAValue] = field(default_factory=dict)
    absorbed: set[Operation] = field(default_factory=set)
    results: dict[SSAValue, qc.StateUpdateOp] = field(default_factory=dict)


def in_place(block: Block, device_of: DeviceOf) -> InPlace:
    """What may be done in place in one entry point."""
    found = InPlace()
    _sink(block)
    position = {op: i for i, op in enumerate(block.ops)}
    states = {op.key: op for op in position if isinstance(op, qc.StateOp)}
    for update in [op for op in position if isinstance(op, qc.StateUpdateOp)]:
        state = states.get(update.key)
        chain, value = _chain(update.value)
        if state is None or value is not state.result:
            root = root_of(value)
            if root is None or root in found.results or not _fits(root, update, state, position, device_of):
                continue
            found.results[root] = update
        for op in chain:
            _enter(op, found)
    return found


def _sink(block: Block) -> None:
    """Computes a state's new value behind the readers of its old one, where nothing else needs it before."""
    states = {op.key: op for op in block.ops if isinstance(op, qc.StateOp)}
    for update in [op for op in block.ops if isinstance(op, qc.StateUpdateOp) and op.key in states]:
        root = root_of(unreshaped(update.value))
        op = root.owner if root is not None else None
        if not isinstance(op, Operation):
            continue
        position = {each: i for i, each in enumerate(block.ops)}
        late = max((position[reader] for reader, _ in readers(states[update.key].result)), default=0)
        users = [use.operation for result in op.results for use in result.uses]
        if position[op] < late < len(position) - 1 and all(position[user] > late for user in users):
            anchor = list(position)[late]
            block.detach_op(op)
            block.insert_op_after(op, anchor)


def base_of(op: object) -> SSAValue | None:
    """The operand that an update of a part begins as; None for other ops."""
    if isinstance(op, qc.IndexUpdateOp | qc.ScatterOp):
        return op.x
    return op.dest if isinstance(op, tensor_dialect.InsertSliceOp) else None


def _chain(value: SSAValue) -> tuple[list[Operation], SSAValue]:
    """The updates of parts behind which `value` stands, and what they begin with."""
    chain: list[Operation] = []
    while True:
        value = unreshaped(value)
        owner = value.owner
        base = base_of(owner)
        if base is None:
            return chain, value
        assert isinstance(owner, Operation)
        chain.append(owner)
        value = base


def _enter(op: Operation, found: InPlace, whole: SSAValue | None = None) -> None:
    """One update of a chain; where it inserts what was cut out and updated, those updates are made in place instead.

    %layer = tensor.extract_slice %caches [3, …]          cut out of the value that it goes back to: writes there
    %1 = qc.index_update %layer, %at, %rows
    %2 = tensor.insert_slice %1 into %caches [3, …]       nothing is left to do
    """
    base = base_of(op)
    assert base is not None
    whole = unreshaped(base) if whole is None else whole
    if not isinstance(op, tensor_dialect.InsertSliceOp):
        found.chains[op] = whole
        return
    inner, start = _chain(op.source)
    cut = start.owner
    if inner and isinstance(cut, tensor_dialect.ExtractSliceOp) and _same_part(cut, op):
        found.absorbed.add(op)
        for each in inner:
            _enter(each, found, whole)
    else:
        found.chains[op] = whole


def _same_part(cut: tensor_dialect.ExtractSliceOp, paste: tensor_dialect.InsertSliceOp) -> bool:
    """Whether one part is cut out and put back, and lies in one piece: whole inner dims behind one that is cut."""
    if cut.source is not paste.dest or any(cut.offsets) or any(cut.sizes) or any(cut.strides):
        return False
    part, back = (
        [tuple(each.static_offsets.get_values()), tuple(each.static_sizes.get_values())] for each in (cut, paste)
    )
    steps = {*cut.static_strides.get_values(), *paste.static_strides.get_values()}
    if part != back or steps != {1} or any(paste.offsets) or any(paste.sizes):
        return False
    sizes, full = part[1], shape_of(cut.source.type)
    first = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
    return all(size == whole for size, whole in zip(sizes[first + 1 :], full[first + 1 :], strict=True))


def _fits(
    root: SSAValue,
    update: qc.StateUpdateOp,
    state: qc.StateOp | None,
    position: dict[Operation, int],
    device_of: DeviceOf,
) -> bool:
    op = root.owner
    if not isinstance(op, Operation) or device_of(op) != device_of(update):
        return False
    if state is None:
        return True
    for reader, value in readers(state.result):
        if position[reader] > position[op]:
            return False
        if reader is op and not _element_by_element(op, value, state.result, root):
            return False
    return True


def _element_by_element(op: Operation, operand: SSAValue, state: SSAValue, result: SSAValue) -> bool:
    """Whether the op reads an element of the state, by this operand, only where it writes the same one."""
    if (
        unreshaped(operand) is not state
        or not isinstance(op, GenericOp)
        or shape_of(operand.type) != shape_of(result.type)
    ):
        return False
    if any(kind.data != IteratorType.PARALLEL for kind in op.iterator_types) or operand in op.outputs:
        return False
    maps = [attribute.data for attribute in op.indexing_maps]
    written = maps[len(op.inputs) + [each is result for each in op.results].index(True)]
    return all(maps[i] == written for i, each in enumerate(op.inputs) if each is operand)


def later_reader(value: SSAValue, update: Operation, absorbed: set[Operation]) -> Operation | None:
    """The first op behind `update` that reads `value` or a view of it; ops in `absorbed` do nothing."""
    block = update.parent_block()
    assert block is not None
    position = {each: i for i, each in enumerate(block.ops)}
    found = {reader for reader, _ in readers(value) if reader is not update and reader not in absorbed}
    late = [reader for reader in found if position.get(reader, -1) > position[update]]
    return min(late, key=position.__getitem__, default=None)
