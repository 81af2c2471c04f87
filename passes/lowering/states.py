"""Decides which ops may write a state's memory directly.

    %s = qc.state @cache                                     in place: only the new rows are written
    %1 = qc.index_update %s, %at, %rows
    qc.state_update @cache, %1

    %s = qc.state @mean                                      in place: every element is read before it is written
    %1 = linalg.generic ins(%s, %x) { mulf; addf }
    qc.state_update @mean, %1

A *chain* is the sequence of partial updates (index_update, scatter, linear_attention, insert_slice) between a state and
its new value. Its ops write the state's memory. A new value that one op computes is also computed in the state's
memory, if no later op reads the old value and the op itself reads it element by element or not at all. Any other new
value is copied into the state at the end of the entry point.
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
    """The ops that write the memory of states.

    `chains`: ops that update their base in place, each with the whole value that the base is a part of. `absorbed`:
    insert_slices whose source was already written in place. `results`: op results that are computed in a state's
    memory, each with the state's update.
    """

    chains: dict[Operation, SSAValue] = field(default_factory=dict)
    absorbed: set[Operation] = field(default_factory=set)
    results: dict[SSAValue, qc.StateUpdateOp] = field(default_factory=dict)


def in_place(block: Block, device_of: DeviceOf) -> InPlace:
    """The ops of one entry point that may write states in place."""
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
    """Moves the computation of a state's new value behind the readers of the old value, if nothing needs it earlier."""
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
    """The operand that a partial update modifies; None for other ops."""
    if isinstance(op, qc.IndexUpdateOp | qc.ScatterOp):
        return op.x
    if isinstance(op, qc.LinearAttentionOp):
        return op.state
    return op.dest if isinstance(op, tensor_dialect.InsertSliceOp) else None


def _chain(value: SSAValue) -> tuple[list[Operation], SSAValue]:
    """The partial updates that lead to `value`, and the value that they start from."""
    chain: list[Operation] = []
    while True:
        value = unreshaped(value)
        owner = value.owner
        base = base_of(owner)
        if base is None or not isinstance(owner, Operation) or value is not owner.results[0]:
            return chain, value
        chain.append(owner)
        value = base


def _enter(op: Operation, found: InPlace, whole: SSAValue | None = None) -> None:
    """Adds one update of a chain. If it inserts an updated slice back into its source, the slice is updated in place.

    %layer = tensor.extract_slice %caches [3, …]          a slice of the value that it goes back into
    %1 = qc.index_update %layer, %at, %rows               writes the memory of %caches
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
    """Whether both slices are the same part, and that part is contiguous: one dim is cut, and the dims after it are
    whole."""
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
    """Whether the op reads each element of the state, through this operand, only where it writes the same element."""
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
    """The first op after `update` that reads `value` or a view of it. Ops in `absorbed` do not count."""
    block = update.parent_block()
    assert block is not None
    position = {each: i for i, each in enumerate(block.ops)}
    found = {reader for reader, _ in readers(value) if reader is not update and reader not in absorbed}
    late = [reader for reader in found if position.get(reader, -1) > position[update]]
    return min(late, key=position.__getitem__, default=None)
