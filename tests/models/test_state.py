"""Buffers that models write, in every way a model may write them: values as in torch, and what is copied for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import ExportError
from qcompiler.inspect.checks import copied_bytes

Forward = Callable[[Any, torch.Tensor], Any]
CASES: dict[str, tuple[Forward, dict[str, torch.Tensor], dict[str, int]]] = {}


def case(copies: dict[str, int] | None = None, **buffers: torch.Tensor) -> Callable[[Forward], Forward]:
    """Registers a forward over buffers; `copies` are the bytes of its states that a call copies (none: in place)."""

    def register(forward: Forward) -> Forward:
        CASES[forward.__name__] = (forward, buffers, copies or {})
        return forward

    return register


def ramp(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def number(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


# --- whole buffers ---


@case(a=ramp(4))
def accumulates(s: Any, x: torch.Tensor) -> Any:
    s.a.add_(x)
    return s.a


@case(a=ramp(4), n=number(7, torch.int32))
def running_mean(s: Any, x: torch.Tensor) -> Any:
    s.a.lerp_(x, 0.1)
    s.n += 1
    return x - s.a, s.n


@case({"a": 16}, a=ramp(4))
def reads_between_writes(s: Any, x: torch.Tensor) -> Any:
    y = s.a * 2
    s.a.add_(1)
    y = y + s.a
    s.a.mul_(x)
    return y * s.a


@case({"a": 16}, a=ramp(4))
def returns_old_and_new(s: Any, x: torch.Tensor) -> Any:
    old = s.a.clone()
    s.a.mul_(0.5)
    s.a.add_(x)
    return old, s.a + 0


@case({"a": 16}, a=ramp(4))
def takes_an_argument(s: Any, x: torch.Tensor) -> Any:
    y = s.a + 1
    s.a.copy_(x)
    return y


@case({"a": 16, "b": 32}, a=ramp(4), b=ramp(4) * 3)
def swaps(s: Any, x: torch.Tensor) -> Any:
    old = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(old + x)
    return s.a - s.b


@case(a=ramp(4))
def writes_through_a_cast_that_casts_nothing(s: Any, x: torch.Tensor) -> Any:
    s.a.to(torch.float32).add_(x)
    return s.a * 1


@case(w=ramp(4, 3))
def fills_by_a_mask(s: Any, x: torch.Tensor) -> Any:
    s.w.masked_fill_(s.w > 0.5, -1.0)
    s.w.add_(x[0])
    return s.w + 0


@case(a=ramp(4), w=ramp(4, 3))
def broadcasts_in_copy(s: Any, x: torch.Tensor) -> Any:
    s.w.copy_(x[:3] * 1)
    y = s.w + s.a[0]
    s.a.add_(x)
    return y


@case(b=torch.tensor([True, False, False, False]))
def remembers_booleans(s: Any, x: torch.Tensor) -> Any:
    s.b.logical_or_(x > 0.5)
    return s.b, s.b.sum()


@case(h=ramp(4), m=ramp(4, 4))
def recurrence(s: Any, x: torch.Tensor) -> Any:
    s.h.copy_(torch.tanh(s.h @ s.m + x))
    return s.h + 1


@case({"w": 96}, w=ramp(4, 3))
def mixes_its_rows(s: Any, x: torch.Tensor) -> Any:
    s.w.copy_(s.w.clone().t().reshape(4, 3) + x[0])
    return s.w * 1


# --- parts of buffers ---


@case(c=torch.zeros(2, 5, 2), n=number(0))
def cache_by_position(s: Any, x: torch.Tensor) -> Any:
    s.c.index_copy_(1, s.n.view(1), x.view(2, 1, 2))
    s.n.add_(1)
    return s.c.sum(1)


@case({"c": 80}, c=ramp(2, 5, 2), n=number(0))
def old_cache_is_read_later(s: Any, x: torch.Tensor) -> Any:
    old = s.c.clone()
    s.c.index_copy_(1, s.n.view(1), x.view(2, 1, 2))
    s.n.add_(1)
    return s.c.sum(1) + old.sum(1)


@case(c=ramp(2, 5, 2), n=number(0))
def old_cache_is_returned(s: Any, x: torch.Tensor) -> Any:
    old = s.c.clone()
    s.c.index_copy_(1, s.n.view(1), x.view(2, 1, 2))
    s.n.add_(1)
    return old


@case({"c": 80}, c=ramp(2, 5, 2), n=number(0))
def an_update_that_is_not_kept(s: Any, x: torch.Tensor) -> Any:
    other = s.c.index_copy(1, s.n.view(1) + 1, x.view(2, 1, 2) * 3)
    s.c.index_copy_(1, s.n.view(1), x.view(2, 1, 2))
    s.n.add_(1)
    return other.sum(1) + s.c.sum(1)


@case(k=torch.zeros(3, 2, 5, 2), n=number(0))
def caches_of_all_layers_in_one(s: Any, x: torch.Tensor) -> Any:
    total = torch.zeros(2, 2)
    for layer in range(3):
        s.k[layer].index_copy_(1, s.n.view(1), (x + layer).view(2, 1, 2))
        total = total + s.k[layer].sum(1)
    s.n.add_(1)
    return total


@case({"k": 240}, k=ramp(3, 2, 5, 2), n=number(0))
def caches_in_one_of_which_the_old_is_read(s: Any, x: torch.Tensor) -> Any:
    old = s.k.clone()
    for layer in range(3):
        s.k[layer].index_copy_(1, s.n.view(1), (x + layer).view(2, 1, 2))
    s.n.add_(1)
    return s.k.sum() + old.sum(), old[1]


@case(w=ramp(4, 3))
def slices(s: Any, x: torch.Tensor) -> Any:
    s.w[1:3] = x[:2, None]
    s.w[0] = x[:3]
    s.w[3, :2] = x[1:3]
    return s.w, s.w[0]


@case({"w": 36}, w=ramp(4, 3))
def slice_of_itself(s: Any, x: torch.Tensor) -> Any:
    s.w[1:] = s.w[:-1].clone()
    s.w[0] = x[:3]
    return s.w * 1


@case(w=ramp(4, 3), i=torch.tensor([0, 2]))
def rows_of_a_computed_value(s: Any, x: torch.Tensor) -> Any:
    s.w.mul_(0.5)
    s.w[1] = x[:3]
    s.w.index_copy_(0, s.i, x[None, :3].expand(2, 3))
    return s.w * 1


@case(w=ramp(4, 3), i=torch.tensor([1, 3]))
def rows_by_index_put(s: Any, x: torch.Tensor) -> Any:
    s.w[s.i] = x[:2, None].expand(2, 3)
    return s.w * 1


@case(w=ramp(4, 3))
def scatters(s: Any, x: torch.Tensor) -> Any:
    s.w.scatter_(1, torch.tensor([[0], [1], [2], [0]]), x[:, None] * 1)
    s.w.scatter_add_(0, torch.tensor([[0, 1, 2]]), x[None, :3])
    return s.w * 1


@case(n=number(0))
def counts_what_nobody_reads(s: Any, x: torch.Tensor) -> Any:
    s.n += 1
    return x * 2


class One(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for key, value in CASES[name][1].items():
            self.register_buffer(key, value.clone())

    def forward(self, x: torch.Tensor) -> Any:
        return CASES[self.name][0](self, x)


class Every(nn.Module):
    """All cases in one program: one export, one run of the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.case = nn.ModuleDict({name: One(name) for name in CASES})

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {name: module(x) for name, module in self.case.items()}


@cache
def compiled(device: str) -> qc.Program:
    return qc.qcompile(Every().eval(), (torch.ones(4),), device=device)


def rows(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, generator=torch.Generator().manual_seed(3)))


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-5)

    leaves = torch.utils._pytree.tree_leaves
    pairs = {name: zip(leaves(ours[name]), leaves(theirs[name]), strict=True) for name in theirs}
    return [name for name, both in pairs.items() if not all(same(a, b) for a, b in both)]


DEVICES = ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stepwise", [False, True])
def test_values_follow_torch_from_call_to_call(device: str, stepwise: bool) -> None:
    model, session = Every().eval(), compiled(device).session(stepwise=stepwise)
    for x in rows(4):
        assert differing(session(x), copy.deepcopy(model(x))) == []


def test_copied_bytes_are_those_that_the_meaning_needs() -> None:
    program = compiled("cpu")
    found = {name: {} for name in CASES}
    for state, count in copied_bytes(program.plan)["main"].items():
        _, name, key = state.split(".")
        found[name][key] = count
    assert found == {name: copies for name, (_, _, copies) in CASES.items()}
    assert program.report().as_dict()["copied_state_bytes"] == copied_bytes(program.plan)
    assert "main copies" in str(program.report())


def test_a_buffer_that_is_written_and_never_read_takes_no_memory() -> None:
    states = {arena.name for arena in compiled("cpu").plan.arenas if arena.kind == "state"}
    assert "state.case.cache_by_position.c" in states
    assert "state.case.takes_an_argument.a" in states


def test_sessions_have_states_of_their_own_and_reset_puts_back() -> None:
    program, model = compiled("cpu"), Every().eval()
    first, second = program.session(), program.session()
    a, b, c, _ = rows(4)
    want_a, want_b = (copy.deepcopy(model(x)) for x in (a, b))
    assert differing(first(a), want_a) == []
    assert differing(second(a), want_a) == []  # had it shared states, it would be one call ahead
    assert differing(first(b), want_b) == []
    second.reset()
    assert differing(second(c), Every().eval()(c)) == []


@pytest.mark.slow
def test_replays_advance_the_states() -> None:
    session, model = compiled("sim:0").session(), Every().eval()
    a, b, c, d = rows(4)
    graph = session.capture(a)  # leaves the states as they were
    for x in (a, b, c):
        assert differing(graph.replay(x), copy.deepcopy(model(x))) == []
    assert differing(session(d), copy.deepcopy(model(d))) == []


# --- what a model may hold that is no buffer -------------------------------------------------------------------------


class Holder:
    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.seen = 0


class Unregistered(nn.Module):
    """A tensor in a plain object, one registered under two names, and the same one reached through the object."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [Holder()]
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", self.a)
        self.held[0].again = self.a  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held[0].total.add_(x)
        self.a.add_(x)
        self.b.mul_(2)
        self.held[0].again.sub_(1)  # type: ignore[attr-defined]
        return self.a + self.held[0].total


def test_tensors_reached_by_two_roads_are_one_state() -> None:
    model = Unregistered().eval()
    program = qc.qcompile(model, (torch.ones(2, 3).sum(0),))
    assert torch.equal(model.held[0].total, torch.zeros(3)) and torch.equal(model.a, torch.ones(3))
    names = sorted(arena.name for arena in program.plan.arenas if arena.kind == "state")
    assert names == ["state.a", "state.held_0_total"]
    for x in torch.randn(3, 3):
        assert torch.allclose(program(x), model(x))


class Counts(nn.Module):
    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.held, self.matters = Holder(), matters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.seen += 1
        return x * self.held.seen if self.matters else x * 2


def test_python_numbers_that_matter_are_refused_and_others_are_not() -> None:
    with pytest.raises(ExportError, match=r"'held\.seen' \(0 to 1\).*registered tensor buffer"):
        qc.qcompile(Counts(True), (torch.ones(3),))
    model = Counts(False)
    assert torch.equal(qc.qcompile(model, (torch.ones(3),))(torch.ones(3)), torch.full((3,), 2.0))
    assert model.held.seen == 0


class Overlaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(4, 3))
        self.register_buffer("first", self.all[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.add_(x)
        return self.all.sum(0)


class WritesItsArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class WritesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.p.add_(x)
        return self.p * 2


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Overlaps, "'first' in place, and 'all' shares its memory"),
        (WritesItsArgument, "its argument 'x' in place; return the new value"),
        (WritesItsParameter, "its parameter 'p' in place.*register_buffer"),
    ],
)
def test_what_cannot_be_a_state_is_named(model: type[nn.Module], text: str) -> None:
    with pytest.raises(ExportError, match=text):
        qc.qcompile(model(), (torch.ones(3),))
