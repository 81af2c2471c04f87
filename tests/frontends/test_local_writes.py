"""Operators in place are made functional one by one, or by torch's functionalisation; results are the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import qcompiler as qc
from qcompiler.frontends.torch.capture.export import export_model


class Writes(nn.Module):
    """A buffer of (4, 8), rows of which a call writes; `step` is what forward does."""

    def __init__(self, step: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.step = step
        for name, value in {"kept": torch.arange(32.0).view(4, 8), **buffers}.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        return self.step(self, x, rows)


def rows_written(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    return m.kept.transpose(0, 1) * 2


def twice(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    first = m.kept * 2
    m.kept.mul_(0.5)
    return first, m.kept + 1


def result_of_a_write_is_written(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    return m.kept.index_copy_(0, rows, x).add_(1) * 3


def read_before(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    before = m.kept.sum(1)
    m.kept.index_copy_(0, rows, x)
    return before, m.kept.sum(1)


def two_buffers(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.other.index_put_((rows,), x)
    m.kept.index_copy_(0, rows, x * 2)
    return m.kept @ m.other.transpose(0, 1)


def copied(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    new = m.kept * 0.5 + x.sum()
    m.kept.copy_(new)
    return new


def counted(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.count.add_(1)
    return x * m.count


def returned_as_it_is(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    return m.kept


def without_gradients(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    with torch.no_grad():
        return (m.kept * 3).sum(0)


def view_before(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    view = m.kept.transpose(0, 1)
    m.kept.index_copy_(0, rows, x)
    return view * 2


def view_between(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    view = m.kept[1:3]
    m.kept.add_(1)
    return view * 2


def part_is_written(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept[1:3] = x
    return m.kept * 2


def parts_and_the_whole(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept[1] += x[0]
    m.kept[:, 2:6:2].mul_(3)
    first = m.kept[1:3] * 1
    m.kept.add_(1)
    m.kept[2:].copy_(x[1])
    return first, m.kept.sum(0)


def elements_in_another_shape(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.view(-1).index_add_(0, rows * 8, x[:, 0])
    return m.kept.view(8, 4)[rows]


def places_from_the_end(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept[-1].mul_(2)
    m.kept[-3:-1].add_(1)
    m.kept[0] = 5
    return m.kept * 2


def what_was_written_is_read(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    part = m.kept[1:3].mul_(2)
    return part * x


def part_that_is_written_over(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    part = m.kept[1:3]
    part.mul_(2)
    m.kept.add_(x.sum())
    return part * x


def part_of_a_part(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept[1:3][0].copy_(x[0])
    return m.kept * 2


def part_is_read_and_written_again(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    """As rotary positions of several kinds of places are put together (Qwen 3 VL)."""
    m.kept.index_copy_(0, rows, x)
    three = torch.stack([m.kept, m.kept * 2, m.kept - 1]) * 3
    first = three[0]
    for i in (1, 2):
        first[..., i:7:3] = three[i, ..., i:7:3]
    return torch.cat([first, first]), three.sum(0)


def written_without_gradients(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    """As transformers makes rotary positions."""
    m.kept.index_copy_(0, rows, x)
    with torch.no_grad():
        three = torch.stack([m.kept, m.kept * 2])
        three[1].mul_(2)
        first = three[0]
        first[:, 1:3] = three[1, :, 1:3]
    return torch.cat([first, three.sum(0)])


def buffer_written_without_gradients(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    with torch.no_grad():
        y = m.kept * 2
        m.kept.add_(x.sum())
    return y + x.sum()


def parts_of_three_kinds(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept[1:].view(3, 2, 4)[2, :, 1:3].add_(x[0, 0])
    part = m.kept[:3]
    part[1, 2:5] = x[1, 2:5]
    part[:, -1].mul_(2)
    return part * 2, m.kept + 1


def older_view_inside_of_a_part(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    part = m.kept[1:3]
    view = part[0]
    part[:, 1:3].mul_(2)
    return view * 3 + x.sum()


def part_that_overlaps(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    one, other = m.kept[0:2], m.kept[1:3]
    one[1, 2:].add_(1)
    return other * 2 + x.sum()


def view_is_read_before(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    before = m.kept.transpose(0, 1)[1:3] * 2
    m.kept.index_copy_(0, rows, x)
    return before + m.kept.sum()


def integers_in_a_column(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept[..., 0] = rows[0]
    return m.kept * 2


def wider_operand(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.mul_(m.wide)
    return m.kept + x.sum()


def result_in_place(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    return (m.kept * 2).relu_().add_(1)


def modules_in_place(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    y = torch.nn.functional.relu(torch.nn.functional.linear(x, m.kept), inplace=True)
    y += 1
    y[0] = 3
    return y * y.sum()


def result_is_read_through_an_older_view(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    y = x * 2
    view = y[0]
    y.add_(1)
    return view * 3


def argument_or_a_copy(m: Any, x: torch.Tensor, rows: torch.Tensor) -> Any:
    m.kept.index_copy_(0, rows, x)
    y = x.to(torch.float32, copy=True)
    y.mul_(2)
    return y + x


LOCAL = [rows_written, twice, result_of_a_write_is_written, read_before, two_buffers, copied, counted,
         returned_as_it_is, without_gradients, part_is_written, parts_and_the_whole, elements_in_another_shape,
         places_from_the_end,
         part_of_a_part, part_is_read_and_written_again, parts_of_three_kinds,
         written_without_gradients, what_was_written_is_read,
         view_is_read_before, integers_in_a_column, result_in_place,
         modules_in_place]  # fmt: skip
BY_TORCH = [view_before, view_between, part_that_is_written_over, wider_operand, older_view_inside_of_a_part,
            part_that_overlaps, buffer_written_without_gradients,
            result_is_read_through_an_older_view, argument_or_a_copy]  # fmt: skip
MORE = {
    two_buffers: {"other": torch.ones(4, 8)}, counted: {"count": torch.tensor(3.0)},
    wider_operand: {"wide": torch.full((4, 8), 1.5, dtype=torch.float64)},
}  # fmt: skip


@pytest.fixture
def torchs_way(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that torch traced again."""
    found: list[ExportedProgram] = []
    plain = ExportedProgram.run_decompositions

    def run(self: ExportedProgram, *args: Any, **kwargs: Any) -> ExportedProgram:
        found.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", run)
    return found


@pytest.mark.parametrize("step", [*LOCAL, *BY_TORCH], ids=lambda step: step.__name__)
def test_results_and_buffers_are_the_models(step: Any, torchs_way: list[ExportedProgram]) -> None:
    """Over three calls, each from the buffers that the one before left."""
    buffers = MORE.get(step, {})
    model, calls = (
        Writes(step, **buffers),
        [(torch.randn(2, 8), torch.tensor(rows)) for rows in ([1, 3], [0, 1], [2, 0])],
    )
    program = qc.qcompile(model, calls[0])
    assert bool(torchs_way) == (step in BY_TORCH)
    session = program.session()
    eager = Writes(step, **{name: value.clone() for name, value in buffers.items()})
    for x, rows in calls:
        expected, found = eager(x, rows), session(x, rows)
        for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True):
            torch.testing.assert_close(torch.as_tensor(one), other.to(torch.as_tensor(one).dtype))
    held = session.states()
    written = {name: value for name, value in eager.named_buffers() if f"state.{name}" in held}
    assert ("count" if step is counted else "kept") in written
    for name, value in written.items():
        torch.testing.assert_close(torch.from_numpy(held[f"state.{name}"]).view(value.dtype), value.reshape(-1))


class InPlace(nn.Module):
    """Writes its own results, whose sizes are dynamic, as a whole, in part and in another shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.relu(x * 2, inplace=True)
        y[:, 1:].add_(1)
        z = y * 3
        z.view(-1).mul_(2)
        return y - z


def test_results_of_dynamic_sizes_are_written() -> None:
    program = qc.qcompile(InPlace(), (torch.randn(3, 8),), dynamic_shapes={"x": {0: ("b", 1, 8)}})
    for rows in (1, 3, 8):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(torch.as_tensor(program(x)), InPlace()(x))


class Asks(nn.Module):
    """Asks for the type and the device that its values have, as models do."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("kept", torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.writes:
            self.kept.to(torch.float32).mul_(2)
        copy = x.to(torch.float32, copy=True)
        return x.to(x.device), self.kept.float() + x.to(dtype=torch.float32).type_as(x), copy, x.to(torch.float64)


@pytest.mark.parametrize("writes", [False, True])
def test_a_conversion_to_what_a_value_is_already_is_no_operator(writes: bool) -> None:
    x = torch.randn(3, 8)
    graph = export_model(Asks(writes), (x,)).program.graph
    named = [getattr(node.target, "overloadpacket", None) for node in graph.nodes]
    assert torch.ops.aten.type_as not in named and named.count(torch.ops.aten.to) <= 2  # a copy, and float64
    program, model = qc.qcompile(Asks(writes), (x,)), Asks(writes)
    for _ in range(2):
        for ours, theirs in zip(program(x), model(x), strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), theirs)


def as_its_type(m: Any, x: torch.Tensor) -> Any:
    m.kept.type_as(x).mul_(2)
    return m.kept * 1


def before_it_is_written(m: Any, x: torch.Tensor) -> Any:
    y, z = m.kept.to(x.device), m.kept.type_as(x)
    m.kept.mul_(2)
    return y + x, z * 1


@pytest.mark.parametrize("step", [as_its_type, before_it_is_written])
def test_what_returns_its_argument_shares_its_memory(step: Callable[..., Any]) -> None:
    x, model = torch.randn(4, 8), Writes(lambda m, x, rows: step(m, x))
    given = x, torch.tensor([1, 3])
    program = qc.qcompile(model, given)
    for _ in range(3):
        for ours, theirs in zip(*map(pytree.tree_leaves, (program(*given), model(*given))), strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), theirs)


def test_a_conversion_of_an_argument_by_name() -> None:
    exported = torch.export.export(Asks(False), (torch.randn(3, 8),))
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.to.dtype:
            source, dtype, *rest = node.args
            assert not rest or True in rest
            if not rest:
                node.args, node.kwargs = (), {"self": source, "dtype": dtype}
    x = torch.randn(3, 8)
    for ours, theirs in zip(qc.qcompile(exported, (x,))(x), Asks(False)(x), strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), theirs)


def test_strides_that_the_functional_operator_does_not_keep(torchs_way: list[ExportedProgram]) -> None:
    model = Writes(rows_written, kept=torch.arange(32.0).view(8, 4).t())
    given = torch.randn(2, 8), torch.tensor([1, 3])
    found = qc.qcompile(model, given)(*given)
    torch.testing.assert_close(torch.as_tensor(found), model(*given))


def test_the_signature_is_that_of_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompiler.frontends.torch.capture import decompose

    given = torch.randn(2, 8), torch.tensor([1, 3])
    model = Writes(two_buffers, other=torch.ones(4, 8))
    ours = export_model(model, given).program
    monkeypatch.setattr(decompose, "_local_writes", lambda program: None)
    theirs = export_model(model, given).program
    kinds = [[(spec.kind, spec.target) for spec in each.graph_signature.output_specs] for each in (ours, theirs)]
    assert kinds[0] == kinds[1]
    for one, other in zip(ours.module()(*given), theirs.module()(*given), strict=True):
        torch.testing.assert_close(one, other)
