"""Finds what a call of a model assigns to attributes, and what a later call sees of it: states, or an error.

    self.h = self.h * 0.5 + x            a tensor that keeps shape and type: a state
    self.hidden = (h, c)                 items of tuples, lists, dicts and objects as well
    self.frames.append(x)                a list that grows: an error if a later call reads it, else a line of the report
    self.step += 1                       a Python number: the same

torch.export restores attributes after a trace and only warns, so the graph would begin each call with the first one's
values.  Here every reachable place (attributes.py) is compared before and after a traced call.  If something was
assigned, the model is traced again: its tensors are then buffers, the assigned values are copied into them at the end,
and they become states like buffers that are written in place.  If anything but such tensors was assigned (a tensor of
another shape, a tensor in place of None, a number), the *second* call is traced, too, starting from the first one's
result.  If it has the same graph, no later call sees the difference, and the report says so.  If it has another graph,
the model may still have the same meaning, as with a table that is computed once.  That is accepted only if the kept
value depends on no argument, and if consecutive calls of model and graph agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.capture import attributes, same_graph
from qcompiler.frontends.torch.capture.attribute_lines import Assignments, Looks, plain, watched
from qcompiler.frontends.torch.capture.attributes import Contents, Place
from qcompiler.frontends.torch.capture.held_buffers import HeldBuffers, sharing
from qcompiler.frontends.torch.capture.narrowing import Note
from qcompiler.frontends.torch.common import empty_weights

_Values = dict[str, Any]


def _hints(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(plain(size)) for size in shape)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape ({', '.join(map(str, value.shape))})"
    return "missing" if attributes.is_missing(value) else str(plain(value))


@dataclass
class _Call:
    """One traced call: every place before and after it, and for new tensors whether they depend on an argument."""

    before: _Values = field(default_factory=dict)
    after: _Values = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)
    from_arguments: set[str] = field(default_factory=set)
    shared: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of paths whose new tensors share memory without being one tensor."""

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The values of each path before and after the call, if they differ."""
        missing = attributes._MISSING
        pairs = {p: (self.before.get(p, missing), self.after.get(p, missing)) for p in {**self.before, **self.after}}
        return {path: (b, a) for path, (b, a) in pairs.items() if _differs(b, a)}


def _differs(before: Any, after: Any) -> bool:
    if before is after:
        return False
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return True
    values = [plain(v) for v in (before, after)]
    if all(_is_plain(v) for v in values):
        return bool(values[0] is not values[1] and (type(values[0]) is not type(values[1]) or values[0] != values[1]))
    return False  # containers and objects: their contents have paths of their own


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str) or attributes.is_number(value) or attributes.is_missing(value)


def _fits(before: Any, after: Any) -> bool:
    """Whether one piece of memory can hold both: the size depends on no argument, and shape and type stay."""
    both = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return (
        both
        and not any(isinstance(size, torch.SymInt) for size in after.shape)
        and tuple(before.shape) == tuple(after.shape)
        and before.dtype == after.dtype
        and not isinstance(before, nn.Parameter)
    )


def _misfits(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    """The paths of tensors whose shape or type changed."""
    return sorted(p for p, (b, a) in changed.items() if isinstance(b, torch.Tensor) and not _fits(b, a))


class Remembered:
    """Traces a model so that values that its calls assign to attributes are kept, or refused.

    `trace` is torch.export of the unmodified model.  After `run`: `notes` are for the report, `names` are the paths of
    the buffers that replace attributes, `doubts` are changes that only consecutive calls can clear.
    """

    def __init__(self, model: nn.Module, trace: Callable[[], ExportedProgram]) -> None:
        self.model, self._trace = model, trace
        self.notes: list[Note] = []
        self.names: dict[str, str] = {}
        self.doubts: dict[str, ExportError] = {}
        self._lines: dict[str, str] = {}
        self._ends: _Values = {}
        self._left: Contents

    def run(self) -> ExportedProgram:
        """The program. ExportError for a value that a later call would see and no state can hold."""
        with attributes.unchanged(self.model):
            first = _Call()
            begin = {place.path: value for place, value in attributes.walk(self.model)}
            program, error = None, None
            try:
                program = self._traced(first)
            except Exception as caught:  # such as torch's own copy into a registered buffer of another size
                error = caught
            changed = {path: (begin.get(path, before), after) for path, (before, after) in first.changed().items()}
            if error is not None and not (first.after and _misfits(changed)):
                raise error
            if program is not None and not changed:
                return program
            self._ends = first.after
            return self._traced_with_states(changed, first)

    def _traced_with_states(self, changed: dict[str, tuple[Any, Any]], first: _Call) -> ExportedProgram:
        states = {path for path, (before, after) in changed.items() if _fits(before, after)}
        others = {path for path in changed if path not in states}
        self._refuse_parameters(changed)
        watch = Assignments({path: _watched_places(path, first) for path in changed})
        call = _Call()
        try:
            program = self._traced(call, states, watch)
        except Exception as error:
            self._lines = watch.lines
            misfits = _misfits(changed) if call.after else []
            raise (self._refusal(misfits, changed, {}) if misfits else error) from error
        self._lines = watch.lines
        self._refuse_shared(program, call, states)
        if others:
            self._second_call(program, call, changed, states, others)
        unread = self._paths(same_graph.unread(program, self._targets(states)))
        for path in sorted(states):
            if path in unread:
                self._forgotten(path)
            else:
                what = f"'{path}' is a state, {_text(changed[path][0])}"
                self.notes.append(Note(what, f"forward assigns it{self._at(path)}"))
                self.doubts.setdefault(path, self._doubt(path))
        return program

    def _forgotten(self, path: str) -> None:
        self.notes.append(
            Note(
                f"'{path}' is not kept between calls", f"forward assigns it, and no later call reads it{self._at(path)}"
            )
        )

    def _targets(self, states: set[str]) -> set[str]:
        """The names of the states' buffers in a traced graph."""
        return {self._buffers[path] for path in states if path in self._buffers}

    def _paths(self, targets: set[str]) -> set[str]:
        return {path for path, target in self._buffers.items() if target in targets}

    # --- the second call ---

    def _second_call(
        self,
        program: ExportedProgram,
        call: _Call,
        changed: dict[str, tuple[Any, Any]],
        states: set[str],
        others: set[str],
    ) -> None:
        """Starts from the end of the first call. Notes changes without effect, and refuses changes with an effect."""
        begin = {path: changed[path][0] for path in states}
        left = {path: changed[path][1] for path in others}
        looks, again = Looks(), _Call()
        contents = Contents(self.model)
        try:
            self._after_first_call(begin, left, looks)
            second = self._traced_again(again, states, looks)
            buffers, last = dict(self._buffers), self._left
            counted = {path: line for path, line in looks.lines.items() if self._changes_again(path, again)}
            if second is not None and same_graph.equal(program, second) and not counted:
                for path in sorted(others):
                    if isinstance(changed[path][1], torch.Tensor) or attributes.is_number(changed[path][0]):
                        self._forgotten(path)
                return
            tensors = {p for p in others if isinstance(changed[p][1], torch.Tensor)}
            if second is not None:
                read = same_graph.read(second)
                tensors = {path for path in tensors if buffers.get(path, path) in read}
            goes_on = sorted(p for p in others if attributes.is_number(changed[p][0]) and self._changes_again(p, again))
            guilty = sorted(tensors & call.from_arguments)
            guilty = guilty or [p for p in sorted(others) if p in counted or p.rpartition(".")[0] in counted]
            if not guilty and goes_on:  # is the third call like the second, although numbers were counted up?
                self._left = last
                self._after_first_call(begin, {path: again.after.get(path) for path in others}, Looks())
                third = self._traced_again(_Call(), states, Looks())
                guilty = goes_on if second is None or third is None or not same_graph.equal(second, third) else []
        finally:
            contents.put_back()
        if guilty or not others or empty_weights.has_empty_parameters(self.model):
            raise self._refusal(guilty or sorted(tensors) or sorted(others) or sorted(states), changed, counted)
        self.doubts = {path: self._refusal([path], changed, {}) for path in sorted(tensors) or sorted(others)}
        for path in sorted(set(others) - tensors):
            if isinstance(changed[path][1], torch.Tensor) or path in goes_on:
                self._forgotten(path)
        for path in sorted(tensors):
            why = f"forward keeps it{self._at(path)}, it depends on no argument, and consecutive calls agree"
            self.notes.append(Note(f"'{path}' is computed in every call", why))

    def _traced_again(self, call: _Call, states: set[str], looks: Looks) -> ExportedProgram | None:
        """None if a later call cannot even be traced: then it differs."""
        try:
            return self._traced(call, states, None, looks)
        except Exception:
            return None

    @staticmethod
    def _changes_again(path: str, again: _Call) -> bool:
        """Whether the second call changes a number or a list again."""
        inside = f"{path}."
        changed = again.changed() if again.after else {}  # nothing is known about a call that did not end
        return any(p == path or p.startswith(inside) for p in changed)

    def _after_first_call(self, begin: _Values, others: _Values, looks: Looks) -> None:
        """The model as the traced call left it, with real tensors of the traced sizes in place of fake ones."""
        self._left.put_back(registered=False)
        made: dict[int, torch.Tensor] = {}
        for place, value in list(attributes.walk(self.model)):
            if isinstance(value, torch._subclasses.FakeTensor) and not place.registered:
                if id(value) not in made:
                    zeros = torch.zeros(_hints(value.shape), dtype=value.dtype, device=value.device)
                    made[id(value)] = begin[place.path].clone() if place.path in begin else zeros
                place.set(made[id(value)])
            elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                place.set(plain(value))
            elif place.registered and isinstance(new := others.get(place.path), torch.Tensor):
                place.set(torch.zeros(_hints(new.shape), dtype=new.dtype, device=new.device))
        grows = {path.rpartition(".")[0] for path in others}
        for place, value in list(attributes.walk(self.model)):
            if place.path in others or (place.path in grows and type(value) is list):
                place.set(watched(plain(value), looks, place.path))

    # --- one traced call ---

    def _values(self) -> Iterator[tuple[Place, Any]]:
        """Every place except those where torch keeps a second reference to parameters."""
        mirrors = attributes.mirrors(self.model)
        inside = tuple(f"{path}." for path in mirrors)
        for place, value in attributes.walk(self.model):
            if place.path not in mirrors and not place.path.startswith(inside):
                yield place, value

    def _traced(
        self,
        call: _Call,
        states: set[str] | None = None,
        watch: Assignments | None = None,
        looks: Looks | None = None,
    ) -> ExportedProgram:
        """Traces once. With `states`, all tensors are buffers, and the states are written at the end of the call."""
        held = HeldBuffers(self.model, states, self._ends)
        if states is not None:
            call.shared = held.overlaps()

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            held.bind()
            call.before = {place.path: value for place, value in self._values()}
            call.places = {place.path: [place] for place, _ in self._values()}
            self._arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if looks is not None:
                looks.open = True
            if watch is not None:
                watch.begin()

        def end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if watch is not None:
                watch.end()
            if looks is not None:
                looks.open = False
            for place, value in self._values():
                call.after[place.path] = value
                call.places.setdefault(place.path, []).append(place)
            call.from_arguments = _from_arguments(call, self._arguments)
            call.shared += sharing(call.after, states or set(), held.buffers)
            self._left = Contents(self.model)
            held.write_states(call.after)
            held.release()

        contents = Contents(self.model)
        handles = [
            self.model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(end, with_kwargs=True),
        ]
        try:
            with held.registered():
                program = self._trace()
        finally:
            for handle in handles:
                handle.remove()
            if watch is not None:
                watch.end()
            contents.put_back()
        self.names |= held.names
        self._buffers = held.buffers
        return program

    # --- refusals ---

    def _at(self, path: str) -> str:
        line = self._lines.get(path, "")
        return f" ({line})" if line else ""

    def _refuse_parameters(self, changed: dict[str, tuple[Any, Any]]) -> None:
        for path, (before, _) in sorted(changed.items()):
            if isinstance(before, nn.Parameter) and path in dict(self.model.named_parameters(remove_duplicate=False)):
                raise ExportError(
                    f"forward assigns the parameter '{path}'; what changes from call to call is a state: register it "
                    "with register_buffer"
                )

    def _doubt(self, path: str) -> ExportError:
        return ExportError(
            f"forward assigns '{path}'{self._at(path)}, and consecutive calls of the model do not give what its graph "
            "gives: they depend on something else that changes between calls. Keep it in a registered buffer that is "
            "changed in place, or pass it in and return it"
        )

    def _refuse_shared(self, program: ExportedProgram, call: _Call, states: set[str]) -> None:
        """Refuses a state that is written in place and shares memory, now or from the second call on."""
        written = self._paths(same_graph.written(program, self._targets(states)))
        for one, other in call.shared:
            if one in written or other in written:
                raise ExportError(
                    f"the model keeps '{one}' and '{other}' in tensors that share memory{self._at(one)}, and writes "
                    "one of them in place: in a program each is a state of its own. Assign a copy to one, .clone()"
                )

    def _refusal(
        self, paths: Sequence[str], changed: dict[str, tuple[Any, Any]], counted: dict[str, str]
    ) -> ExportError:
        path = paths[0]
        before, after = changed.get(path, (None, None))
        if attributes.is_number(before):
            names = ", ".join(
                f"'{p}' ({_text(changed[p][0])} to {_text(changed[p][1])})" if p in changed else f"'{p}'"
                for p in paths[:3]
            )
            looked = f", and looks at it in {counted[path]}" if counted.get(path) else ""
            return ExportError(
                f"the model changes Python numbers from call to call: {names}{self._at(path)}{looked}. In a program "
                "every call would begin with the first number. Keep the number in a registered tensor buffer and "
                "change it in place (for transformers: a cache of StaticLayers instead of sliding-window ones, "
                "docs/state.md)"
            )
        if not isinstance(after, torch.Tensor) or _fits(before, after):
            return ExportError(
                f"forward changes {', '.join(map(repr, paths[:3]))}, {_text(before)} before the first call and "
                f"{_text(after)} after it{self._at(path)}, and the second call has another graph, but a program has "
                "only one. Begin with the values after the first call (call the model once before compiling), or pass "
                "them in and return them"
            )
        sizes = ", ".join(map(str, _hints(after.shape))) + ("," if after.dim() == 1 else "")
        moving = any(isinstance(size, torch.SymInt) for size in after.shape)
        way = (
            "its size is a dynamic one, and memory of a state is fixed: fix that size, or pass the tensor in and "
            "return the new one"
            if moving
            else f"give it a tensor of the shape ({sizes}) and the type {after.dtype} before compiling, and it becomes "
            "a state"
        )
        grows = isinstance(self._container(path), list | deque)
        if grows and attributes.is_missing(before):
            way = "a list that grows has no fixed memory: keep a tensor of the maximum size, and write by position"
        return ExportError(
            f"the attribute '{path}' carries a tensor from call to call that a program cannot hold: it is "
            f"{_text(before)} before the first call and {_text(after)} after it{self._at(path)}; {way} (docs/state.md)"
        )

    def _container(self, path: str) -> Any:
        parent = path.rpartition(".")[0]
        return next((value for place, value in attributes.walk(self.model) if place.path == parent), None)


def _watched_places(path: str, call: _Call) -> list[Place]:
    """The place of a path and those of its containers, both before the call and after it."""
    parts = path.split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return [place for prefix in prefixes for place in call.places.get(prefix, [])]


def _from_arguments(call: _Call, arguments: Sequence[torch.Tensor]) -> set[str]:
    """The paths of new tensors that are computed from an argument, according to the graph under trace."""
    mode = get_proxy_mode()
    if mode is None:
        return set()

    def node(tensor: torch.Tensor) -> torch.fx.Node | None:
        found = get_proxy_slot(tensor, mode.tracer, None, lambda proxy: proxy.proxy.node)
        return found if isinstance(found, torch.fx.Node) else None

    inputs = {node(argument) for argument in arguments} - {None}
    found = set()
    for path, (_, after) in call.changed().items():
        start = node(after) if isinstance(after, torch.Tensor) else None
        pending, seen = [start] if start is not None else [], {start}
        while pending:
            current = pending.pop()
            if current in inputs:
                found.add(path)
                break
            fresh = [each for each in current.all_input_nodes if each not in seen]
            seen.update(fresh)
            pending += fresh
    return found
