"""Finds the line of a model that assigns an attribute, appends to a list, or reads a number that it counts.

`Assignments` follows the model's own lines with `sys.settrace` during one traced call, and checks after each line
whether a place holds another value.  `WatchedInt` and the like replace counted numbers and growing lists, and record
the line that reads them: such a read (`if self.step > 3:`) leaves nothing in the graph.
"""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from qcompiler.frontends.torch.capture.attributes import Place
from qcompiler.frontends.torch.common.origins import is_user_file, line_of_frame

_LIBRARY = sysconfig.get_paths()["stdlib"]


@functools.cache
def _is_model_file(path: str) -> bool:
    """Whether a file is not part of torch, this frontend, or Python's library (which torch calls at every step)."""
    return is_user_file(path) and (not path.startswith(_LIBRARY) or "site-packages" in path)


class Assignments:
    """The line at which each path first changed.  `places` are the places to check for a path, with its containers."""

    def __init__(self, places: Mapping[str, Sequence[Place]]) -> None:
        self.lines: dict[str, str] = {}
        self._places = places
        self._now: dict[str, list[Any]] = {}
        self._line: tuple[str, int, str] = ("", 0, "")
        self._outer: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Follows functions called from here on."""
        self._now = {path: _look(places) for path, places in self._places.items()}
        self._outer = sys.gettrace()
        sys.settrace(self._call)

    def end(self) -> None:
        """Stops following; records changes of the last line."""
        sys.settrace(self._outer)
        self._compare()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_model_file(frame.f_code.co_filename):
            return None
        self._line = _line(frame)
        return self._event

    def _event(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._compare()
        if event == "return":  # the rest of the line that called
            caller = frame.f_back
            while caller is not None and not _is_model_file(caller.f_code.co_filename):
                caller = caller.f_back
            frame = caller if caller is not None else frame
        self._line = _line(frame)
        return self._event

    def _compare(self) -> None:
        for path, places in self._places.items():
            if path in self.lines:
                continue
            now = _look(places)
            if any(a is not b and a != b for a, b in zip(now, self._now[path], strict=True)):
                file, number, function = self._line
                code = linecache.getline(file, number).strip()
                self.lines[path] = f"{file}:{number} in {function}: {code}" if file else ""


def _line(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def _look(places: Sequence[Place]) -> list[Any]:
    """Evidence of a change of a place: the object itself, or the value of a number."""
    values = [place.get() for place in places]
    return [value if type(value) in (bool, int, float, str) else _Same(value) for value in values]


class _Same:
    """Equal to the same object with the same length."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._length = len(value) if isinstance(value, list | dict) else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value and self._length == other._length

    def __hash__(self) -> int:
        return id(self._value)


# --- reads of a number or a list -------------------------------------------------------------------------------------


class Looks:
    """The first line that read each watched value, by path."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self.open = False
        """Reads count only inside the model's call, not in this frontend's code around it."""

    def note(self, path: str) -> None:
        """Called by a watched value when something depends on it."""
        if self.open:
            self.lines.setdefault(path, line_of_frame(sys._getframe(2))[0])


class WatchedInt(int):
    """An int that may be counted up, and records when it is compared, used as a size, an index or a condition."""

    looks: Looks
    path: str


class WatchedFloat(float):
    """The same for a float."""

    looks: Looks
    path: str


class WatchedList(list[Any]):
    """A list that may be appended to, and records when it is read."""

    looks: Looks
    path: str


def watched(value: Any, looks: Looks, path: str) -> Any:
    """A stand-in for a plain int, float or list that records reads of it; other values unchanged."""
    kinds: dict[type, type] = {int: WatchedInt, float: WatchedFloat, list: WatchedList}
    kind = kinds.get(type(value))
    if kind is None:
        return value
    made: Any = kind(value)
    made.looks, made.path = looks, path
    return made


def plain(value: Any) -> Any:
    """The value behind a stand-in; for a symbolic number the traced example's; other values unchanged."""
    for kind, of in ((WatchedInt, int), (WatchedFloat, float)):
        if isinstance(value, kind):
            return of(value)
    node = getattr(value, "node", None)
    return value if node is None or getattr(node, "hint", None) is None else node.hint


def _counts(kind: type, name: str) -> None:
    """Makes arithmetic on a watched number return a watched number."""
    original = getattr(kind.__mro__[1], name)

    def method(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        return watched(result, self.looks, self.path) if type(result) in (int, float) else result

    setattr(kind, name, method)


def _notes(kind: type, name: str) -> None:
    original = getattr(kind.__mro__[1], name)

    def method(self: Any, *args: Any) -> Any:
        self.looks.note(self.path)
        return original(self, *args)

    setattr(kind, name, method)


for _kind in (WatchedInt, WatchedFloat):
    for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "truediv", "neg", "pos"):
        _counts(_kind, f"__{_name}__")
    for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "hash", "int", "float", "round"):
        _notes(_kind, f"__{_name}__")
_notes(WatchedInt, "__index__")
for _name in ("len", "iter", "getitem", "contains", "reversed", "eq", "add"):
    _notes(WatchedList, f"__{_name}__")
