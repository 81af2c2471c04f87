"""What `forward` assigns to attributes: a state with torch's values in each call, a line of the report, or an error.

Each model of `KEPT` remembers something in a way of its own, and one program holds them all.  Nothing may change in
silence: `REFUSED` are the ways that no program can hold, with the attribute and the line that the error names.
"""

from __future__ import annotations

import collections
import copy
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import ExportError


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class Holder:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("h",)

    def __init__(self) -> None:
        self.h = torch.zeros(4)


class Remembers(nn.Module):
    """A module whose attributes and forward are given."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any], held: dict[str, Any]) -> None:
        super().__init__()
        self.body = (body,)  # a tuple: torch binds no method
        for name, value in copy.deepcopy(held).items():
            if name.startswith("buffer_"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body[0](self, x)


KEPT: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {}


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def kept(**held: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        KEPT[body.__name__] = lambda: Remembers(body, held)
        return body

    return register


def refused(text: str, line: str, **held: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`text` is in the error, and so is the number of the line of the body that has `line` in it."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        source, first = inspect.getsourcelines(body)
        number = next(first + n for n, each in enumerate(source) if line in each and "refused" not in each)
        REFUSED[body.__name__] = (lambda: Remembers(body, held), text, f"{__file__}:{number} in {body.__name__}")
        return body

    return register


# --- what becomes a state ---------------------------------------------------------------------------------------------


@kept(h=zeros(4))
def plain_tensor(s: Any, x: torch.Tensor) -> Any:
    s.h = s.h * 0.5 + x
    return s.h


@kept(h=zeros(4))
def returns_the_old_one(s: Any, x: torch.Tensor) -> Any:
    old = s.h
    s.h = old * 0.5 + x
    return old, s.h


@kept(h=zeros(4))
def adds_with_an_assignment(s: Any, x: torch.Tensor) -> Any:
    s.h += x
    return s.h * 1


@kept(h=zeros(4))
def in_place_and_then_assigned(s: Any, x: torch.Tensor) -> Any:
    s.h.add_(x)
    y = s.h * 2
    s.h = y - x
    return y


@kept(n=torch.tensor(0))
def counts_in_a_tensor(s: Any, x: torch.Tensor) -> Any:
    s.n = s.n + 1
    return x * s.n


@kept(hidden=(zeros(4), zeros(4)))
def tuple_of_two(s: Any, x: torch.Tensor) -> Any:
    h, c = s.hidden
    c = c * 0.5 + x
    s.hidden = (torch.tanh(c) + h, c)
    return s.hidden[0]


@kept(hidden=Pair(zeros(4), zeros(4)))
def named_tuple(s: Any, x: torch.Tensor) -> Any:
    s.hidden = Pair(s.hidden.c + x, s.hidden.h)
    return s.hidden.h


@kept(layers=[(zeros(4), zeros(4)), (zeros(4), zeros(4))])
def list_of_tuples(s: Any, x: torch.Tensor) -> Any:
    for i, (h, c) in enumerate(s.layers):
        s.layers[i] = (h + x, c - h)
        x = x + s.layers[i][1]
    return x


@kept(frames=[zeros(4), zeros(4), zeros(4)])
def list_that_keeps_its_length(s: Any, x: torch.Tensor) -> Any:
    s.frames.append(x)
    s.frames.pop(0)
    return torch.stack(s.frames).sum(0)


@kept(frames=collections.deque([zeros(4), zeros(4)], maxlen=2))
def deque_of_frames(s: Any, x: torch.Tensor) -> Any:
    s.frames.append(x)
    return s.frames[0] - s.frames[1]


@kept(held={"h": zeros(4), "of": {"c": zeros(4)}})
def dicts(s: Any, x: torch.Tensor) -> Any:
    s.held["h"] = s.held["h"] + x
    s.held["of"]["c"] = s.held["of"]["c"] + s.held["h"]
    return s.held["of"]["c"]


@kept(held=Holder(h=zeros(4), of=Holder(c=zeros(4))))
def objects(s: Any, x: torch.Tensor) -> Any:
    s.held.h = s.held.h + x
    s.held.of = Holder(c=s.held.of.c + s.held.h)
    return s.held.of.c


@kept(held=Slotted())
def object_with_slots(s: Any, x: torch.Tensor) -> Any:
    s.held.h = s.held.h * 2 + x
    return s.held.h


@kept(buffer_h=zeros(4))
def registered_buffer(s: Any, x: torch.Tensor) -> Any:
    old = s.buffer_h
    s.buffer_h = old * 0.5 + x
    return old, s.buffer_h


@kept(a=zeros(4), b=torch.ones(4))
def two_that_change_places(s: Any, x: torch.Tensor) -> Any:
    s.a, s.b = s.b, s.a + x
    return s.a - s.b


@kept(a=zeros(4), b=torch.ones(4))
def two_that_become_one(s: Any, x: torch.Tensor) -> Any:
    y = s.a + s.b
    s.a = s.b = s.b + x
    return y


@kept(hidden=zeros(8))
def halves_of_one_result(s: Any, x: torch.Tensor) -> Any:
    h, c = s.hidden.chunk(2)
    s.hidden = torch.cat([h + x, c + h])
    return s.hidden


@kept(h=zeros(4), c=zeros(4))
def chunks_that_share_memory(s: Any, x: torch.Tensor) -> Any:
    s.h, s.c = torch.cat([s.h + x, s.c + s.h]).chunk(2)
    return s.h + s.c


@kept(h=torch.zeros(4, dtype=torch.int64), seen=torch.zeros(4, dtype=torch.bool))
def integers_and_booleans(s: Any, x: torch.Tensor) -> Any:
    s.h = s.h + x.to(torch.int64)
    s.seen = s.seen | (x > 0)
    return s.h, s.seen


@kept(h=zeros(4), w=torch.ones(4))
def beside_a_constant(s: Any, x: torch.Tensor) -> Any:
    s.h = s.h + s.w * x
    return s.h


class Shared(nn.Module):
    """Two modules that hold one object, and a tensor that both have and one of them assigns."""

    def __init__(self) -> None:
        super().__init__()
        together, one = Holder(h=zeros(4)), torch.ones(4)
        self.first, self.second = Remembers(_adds_to_shared, {}), Remembers(_adds_to_shared, {})
        self.first.held = self.second.held = together
        self.first.own = self.second.own = one

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x) + self.second(x) * self.first.own - self.second.own


def _adds_to_shared(s: Any, x: torch.Tensor) -> Any:
    s.held.h = s.held.h + x
    if s.held is not None and s.own is not None:
        s.own = s.own + s.held.h
    return s.held.h


class OneOfTwoAssigns(nn.Module):
    """One tensor by two attributes: what is assigned to the one is not seen in the other."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.inner = nn.Module()
        one = torch.ones(4)
        if registered:
            self.register_buffer("a", one)
            self.inner.register_buffer("b", one)
        else:
            self.a = self.inner.b = one

    def forward(self, x: torch.Tensor) -> Any:
        self.inner.b = self.inner.b + x
        return self.inner.b * self.a


class InAList(nn.Module):
    """A module that torch does not see, since a plain list holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Remembers(plain_tensor, {"h": zeros(4)}), Remembers(registered_buffer, {"buffer_h": zeros(4)})]

    def forward(self, x: torch.Tensor) -> Any:
        return self.hidden[0](x), self.hidden[1](x)


class OfTheClass(nn.Module):
    total = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> Any:
        OfTheClass.total = OfTheClass.total + x
        return OfTheClass.total


class Recurrent(nn.Module):
    """What BeatNet and many others do with `self.hidden`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell = nn.GRUCell(4, 4)
        self.hidden = torch.zeros(1, 4)

    def forward(self, x: torch.Tensor) -> Any:
        self.hidden = self.cell(x[None], self.hidden)
        return self.hidden[0]


KEPT |= {
    "shared": Shared,
    "one_of_two": lambda: OneOfTwoAssigns(False),
    "one_of_two_buffers": lambda: OneOfTwoAssigns(True),
    "in_a_list": InAList,
    "of_the_class": OfTheClass,
    "recurrent": Recurrent,
}


# --- what is assigned and makes no difference -------------------------------------------------------------------------


@kept(last=None, sizes=[], step=0)
def harmless(s: Any, x: torch.Tensor) -> Any:
    s.step += 1
    s.sizes.append(x * 2)
    s.last = x + 1
    return x * 3


@kept(last=zeros(4))
def writes_what_it_never_reads(s: Any, x: torch.Tensor) -> Any:
    s.last = x + 1
    return s.last * 3


@kept(table=None, w=torch.arange(4.0))
def table_computed_once(s: Any, x: torch.Tensor) -> Any:
    if s.table is None:
        s.table = torch.cos(s.w)
    return x * s.table


class Every(nn.Module):
    """All in one program: one export, one run of the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.case = nn.ModuleDict({name: make() for name, make in KEPT.items()})

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {name: module(x) for name, module in self.case.items()}


@cache
def compiled(device: str) -> qc.Program:
    OfTheClass.total = torch.zeros(4)
    return qc.qcompile(Every().eval(), (torch.ones(4),), device=device)


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    leaves = torch.utils._pytree.tree_leaves

    def same(name: str) -> bool:
        pairs = zip(leaves(ours[name]), leaves(theirs[name]), strict=True)
        return all(a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-4) for a, b in pairs)

    return [name for name in theirs if not same(name)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)])
def test_what_forward_assigns_is_there_in_the_next_call(device: str) -> None:
    program = compiled(device)
    OfTheClass.total = torch.zeros(4)
    model = Every().eval()
    for x in torch.randn(5, 4, generator=torch.Generator().manual_seed(3)):
        with torch.no_grad():
            assert differing(program(x), copy.deepcopy(model(x))) == []


def test_states_and_what_is_not_kept_stand_in_the_report_with_their_lines() -> None:
    text = str(compiled("cpu").report())
    here = re.escape(__file__)
    assert re.search(
        rf"'case\.plain_tensor\.h' is a state, float32 of shape \(4\)[^']*{here}:\d+ in plain_tensor", text
    )
    for path in ("last", "step", r"sizes\.0"):
        assert re.search(rf"'case\.harmless\.{path}' is not kept between calls[^']*{here}:\d+ in harmless", text), path
    assert "'case.writes_what_it_never_reads.last' is not kept between calls" in text
    states = {arena.name for arena in compiled("cpu").plan.arenas if arena.kind == "state"}
    assert "state.case.plain_tensor.h" in states and "state.case.registered_buffer.buffer_h" in states
    assert not any("never_reads" in name for name in states)


def test_compiling_leaves_attributes_as_they_were() -> None:
    model = Every().eval()
    before = copy.deepcopy(model)
    qc.qcompile(model, (torch.ones(4),), weights="none")
    for name, module in model.case.named_children():
        old = before.case.get_submodule(name)
        assert set(vars(module)) == set(vars(old)) and set(module._buffers) == set(old._buffers), name
    assert model.case["harmless"].step == 0 and model.case["harmless"].sizes == []
    assert model.case["harmless"].last is None
    assert torch.equal(model.case["tuple_of_two"].hidden[1], torch.zeros(4))
    assert torch.equal(model.case["in_a_list"].hidden[1].buffer_h, torch.zeros(4))


# --- what no program can hold -----------------------------------------------------------------------------------------


@refused("'h' .*is None before the first call.*give it a tensor of the shape \\(4,\\)", "s.h = torch", h=None)
def none_at_first(s: Any, x: torch.Tensor) -> Any:
    if s.h is None:
        s.h = torch.zeros(4)
    s.h = s.h * 0.5 + x
    return s.h


@refused("'frames.0' .*a list that grows", "append", frames=[])
def list_that_grows(s: Any, x: torch.Tensor) -> Any:
    s.frames.append(x)
    return torch.stack(s.frames).sum(0)


@refused("'h' .*shape \\(1\\) before .* shape \\(4\\) after", "s.h = s.h", h=zeros(1))
def shape_changes(s: Any, x: torch.Tensor) -> Any:
    s.h = s.h * 0.5 + x
    return s.h


@refused("'buffer_h' .*shape \\(1, 4\\) before .* shape \\(2, 4\\) after", "s.buffer_h = ", buffer_h=zeros(1, 4))
def buffer_that_grows(s: Any, x: torch.Tensor) -> Any:
    s.buffer_h = torch.cat([s.buffer_h, x[None]])
    return s.buffer_h.sum(0)


@refused("'h' .*float32 .* before .*float64", "s.h = ", h=zeros(4))
def type_changes(s: Any, x: torch.Tensor) -> Any:
    s.h = s.h.double() + x
    return s.h


@refused("'step' \\(0 to 1\\)", "s.step += 1", step=0)
def counts_in_a_number(s: Any, x: torch.Tensor) -> Any:
    s.step += 1
    return x * s.step


@refused("'step' \\(0 to 1\\)", "s.step += 1", step=0)
def counts_and_makes_a_tensor(s: Any, x: torch.Tensor) -> Any:
    s.step += 1
    return x * torch.tensor(s.step)


@refused("'step' \\(0 to 1\\).*looks at it in .*if s.step > 3", "s.step += 1", step=0)
def counts_and_looks_late(s: Any, x: torch.Tensor) -> Any:
    s.step += 1
    if s.step > 3:
        x = x * 2
    return x


@refused("'scale' \\(1.0 to 0.5\\)", "s.scale *= ", scale=1.0)
def decays_in_a_number(s: Any, x: torch.Tensor) -> Any:
    s.scale *= 0.5
    return x * s.scale


@refused("'frames.0'", "s.frames.append", frames=[])
def list_that_is_looked_at_late(s: Any, x: torch.Tensor) -> Any:
    s.frames.append(x)
    if len(s.frames) > 3:
        x = x * 2
    return x


@refused("'ready' \\(False to True\\)", "s.ready = True", ready=False)
def first_call_is_another(s: Any, x: torch.Tensor) -> Any:
    if not s.ready:
        s.ready = True
        return x * 2
    return x


@refused("'h' and 'c' in tensors that share memory", "s.h = s.c = x", h=zeros(4), c=zeros(4))
def becomes_one_and_is_written(s: Any, x: torch.Tensor) -> Any:
    s.h.add_(x)
    y = s.h + s.c
    s.h = s.c = x * 2
    return y


@refused("'h'.*share memory", "s.h = s.big[0]", h=zeros(4), big=zeros(2, 4))
def view_that_is_written(s: Any, x: torch.Tensor) -> Any:
    s.h.add_(x)
    s.h = s.big[0]
    return s.big.sum(0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_hold_is_refused_with_attribute_and_line(name: str) -> None:
    make, text, line = REFUSED[name]
    with pytest.raises(ExportError) as error:
        qc.qcompile(make().eval(), (torch.ones(4),), weights="none")
    assert re.search(text, str(error.value)), error.value
    assert line in str(error.value), error.value


class Batch(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.h = torch.zeros(size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h * 0.5 + x
        return self.h


def test_a_state_of_the_size_of_the_batch_is_a_state_if_that_is_fixed_and_refused_if_it_is_dynamic() -> None:
    program, model = qc.qcompile(Batch(3).eval(), (torch.ones(3, 4),)), Batch(3)
    for x in torch.randn(3, 3, 4):
        assert torch.allclose(program(x), model(x))
    with pytest.raises(ExportError, match=r"'h'.*dynamic.*self\.h = self\.h \* 0\.5|'h'.*self\.h = .*dynamic"):
        qc.qcompile(Batch(1).eval(), (torch.ones(3, 4),), dynamic_shapes={"x": {0: ("b", 1, 8)}}, weights="none")


class Sequence(nn.Module):
    """A state of fixed size beside a dynamic length, and a table that is made again where a call is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(4)
        self.longest, self.table = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != self.longest:
            self.longest, self.table = x.shape[0], torch.arange(x.shape[0]).float()[:, None]
        self.h = self.h * 0.5 + x.sum(0)
        return x + self.h + self.table


def test_states_and_tables_beside_a_dynamic_length() -> None:
    program = qc.qcompile(Sequence().eval(), (torch.ones(5, 4),), dynamic_shapes={"x": {0: ("s", 1, 32)}})
    model = Sequence()
    for length in (5, 1, 32, 2, 2):
        x = torch.randn(length, 4)
        assert torch.allclose(program(x), model(x), atol=1e-5), length


class History(nn.Module):
    """A table whose values depend on the longest call so far: no graph of one call means that."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.longest:
            self.longest = x.shape[0]
            self.scale = torch.arange(4.0) * self.longest
        return x * self.scale


def test_a_table_that_depends_on_earlier_lengths_is_refused() -> None:
    with pytest.raises(ExportError, match=r"'(longest|scale)'"):
        qc.qcompile(History().eval(), (torch.ones(5, 4),), dynamic_shapes={"x": {0: ("s", 1, 32)}})


class SilentlyElsewhere(nn.Module):
    """A state beside something that no walk reaches: consecutive calls tell that the graph is not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(4)
        self.hidden = iter([float(n) for n in range(1, 50)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h + x
        return self.h * next(self.hidden)


def test_a_state_beside_what_cannot_be_found_is_doubted() -> None:
    with pytest.raises(ExportError, match=r"assigns 'h'.*consecutive calls"):
        qc.qcompile(SilentlyElsewhere().eval(), (torch.ones(4),))
