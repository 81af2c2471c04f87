r"""Regular expressions of a tokenizer.json: only those that take time in proportion to the text are run.

    ` ?\p{L}+`                     nothing follows the repetition: what it reads, it takes
    `[\s\S]*[\s\S]*\b\B`           each failure tries the repetitions again: 4,000 letters take three minutes

`tokenizers` runs expressions in an engine that backtracks (Oniguruma). The engine limits the steps of one match, 10
million, and a text has as many matches to try as letters; no call and no interrupt ends it. So an expression is read
here before the engine sees it. Each of its alternatives is one of a published model, or

    no repetition without bound has behind it what can fail (so that it never gives back what it has read),
    no repetition without bound is within another, or looks ahead, and
    its other repetitions and alternatives are tried in at most MAX_STEPS steps at one character.

The expressions of published models break the first rule in places. Those read a run of spaces or of letters again at
each of its letters at worst, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qcompiler.errors import TokenizerError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.lm.text.splits import SPLITS

MAX_STEPS = 1024
"""Steps that all expressions of a tokenizer may take at one character. A million characters take about 10 seconds."""
MAX_LENGTH = 4096
"""Characters of one expression. The longest known has 700."""
_MAX_DEPTH = 24

_HAN_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_THREES = r"(?=(\d{3})+(?!\d))", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r"\d{1,3}(?=(?:\d{3})*\b)"
"""Numbers in threes from the right."""


class _RefusedError(Exception):
    """Why an expression is not run."""


@dataclass(frozen=True)
class _One:
    """One character (`width` 1), or a place between two (`width` 0)."""

    width: int


@dataclass(frozen=True)
class _Repeat:
    part: _Part
    least: int
    most: int | None


@dataclass(frozen=True)
class _Choice:
    """Alternatives, each a sequence."""

    sequences: tuple[tuple[_Part, ...], ...]
    looks: bool = False


_Part = _One | _Repeat | _Choice

_CHARACTER = re.compile(r"\\(?:[pP]\{\^?[\w ]{1,64}\}|x\{[0-9a-fA-F]{1,8}\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
                        r"|[sSdDwWhHnrtfvae0]|[^\w\s]| )")  # fmt: skip
_PLACE = re.compile(r"\^|\$|\\[bBAzZG]")
_OPEN = re.compile(r"\((?:(\?<?[=!])|\?[im]*-?[im]*:|\?>|(?!\?))")
_COUNT = re.compile(r"\{(\d{1,4})?(,)?(\d{1,4})?\}")


class _Reader:
    """Reads an expression into parts. _RefusedError for what it does not know."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def whole(self) -> list[tuple[str, tuple[_Part, ...]]]:
        """The alternatives of the expression, each with its text."""
        found = []
        while True:
            begin = self.at
            parts = self._sequence(0)
            found.append((self.pattern[begin : self.at], parts))
            if self.at == len(self.pattern):
                return found
            if self.pattern[self.at] == ")":
                raise _RefusedError("it has a bracket that was not opened")
            self.at += 1

    def _sequence(self, depth: int) -> tuple[_Part, ...]:
        parts: list[_Part] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._repeated(self._part(depth)))
        return tuple(parts)

    def _part(self, depth: int) -> _Part:
        if place := _PLACE.match(self.pattern, self.at):
            self.at = place.end()
            return _One(0)
        if group := _OPEN.match(self.pattern, self.at):
            self.at = group.end()
            return self._group(depth + 1, looks=bool(group[1]))
        if self.pattern[self.at] == "[":
            self._class(0)
            return _One(1)
        if self.pattern[self.at] == "\\":
            return self._escape()
        if self.pattern[self.at] in "(*+?":
            raise _RefusedError(f"it has {shown(self.pattern[self.at : self.at + 4])}, which is not known here")
        self.at += 1
        return _One(1)

    def _group(self, depth: int, *, looks: bool) -> _Part:
        if depth > _MAX_DEPTH:
            raise _RefusedError(f"its brackets are nested deeper than {_MAX_DEPTH}")
        sequences = [self._sequence(depth)]
        while self._taken("|"):
            sequences.append(self._sequence(depth))
        if not self._taken(")"):
            raise _RefusedError("it has a bracket that is not closed")
        return _Choice(tuple(sequences), looks)

    def _escape(self) -> _Part:
        found = _CHARACTER.match(self.pattern, self.at)
        if found is None:
            raise _RefusedError(f"it has {shown(self.pattern[self.at : self.at + 3])}, which is not known here")
        self.at = found.end()
        return _One(1)

    def _class(self, depth: int) -> None:
        """Passes over a class of characters, with classes within it."""
        if depth > _MAX_DEPTH:
            raise _RefusedError(f"its classes are nested deeper than {_MAX_DEPTH}")
        self.at += 1
        self._taken("^")
        self._taken("]")  # in the first place it stands for itself
        while self.at < len(self.pattern):
            if self._taken("]"):
                return
            if self.pattern[self.at] == "[":
                self._class(depth + 1)
            elif self.pattern[self.at] == "\\":
                self._escape()
            else:
                self.at += 1
        raise _RefusedError("it has a class that is not closed")

    def _repeated(self, part: _Part) -> _Part:
        """The part with the quantifier behind it, if there is one. Further quantifiers are refused."""
        if self.at == len(self.pattern):
            return part
        sign, counted = self.pattern[self.at], _COUNT.match(self.pattern, self.at)
        if sign in "*+?":
            self.at += 1
            if not self._taken("?"):  # as few as possible, or
                self._taken("+")  # without giving back
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif counted and (counted[1] or counted[3]):
            self.at = counted.end()
            least = int(counted[1] or 0)
            most = int(counted[3]) if counted[3] else None if counted[2] else least
        else:
            return part
        if most is not None and least > most:
            raise _RefusedError(f"it repeats at least {least} and at most {most} times")
        if self.at < len(self.pattern) and (
            self.pattern[self.at] in "*+?" or _COUNT.match(self.pattern, self.at) is not None
        ):
            raise _RefusedError("it has a quantifier behind a quantifier")
        return _Repeat(part, least, most)

    def _taken(self, letter: str) -> bool:
        found = self.pattern.startswith(letter, self.at)
        self.at += found
        return found


def _can_fail(part: _Part) -> bool:
    """Whether there may be no match of this part, whatever stands before it."""
    match part:
        case _Repeat():
            return part.least > 0 and _can_fail(part.part)
        case _Choice():
            return part.looks or all(any(map(_can_fail, each)) for each in part.sequences)
    return True


def _takes(part: _Part) -> bool:
    """Whether each match of this part has a character."""
    match part:
        case _Repeat():
            return part.least > 0 and _takes(part.part)
        case _Choice():
            return not part.looks and all(any(map(_takes, each)) for each in part.sequences)
    return part.width > 0


def _steps(part: _Part, behind: int, *, ends: bool) -> int:
    """A bound of the steps in which a part and what stands behind it, of `behind` steps, are tried at one place.

    `ends`: nothing that stands behind it can fail.  There a repetition without bound is allowed: it goes on as long as
    it can and gives nothing back, so its steps are those of the characters that it takes.
    """
    match part:
        case _Choice():
            inside = 0 if part.looks else behind
            found = sum(_steps_of(each, inside, ends=ends and not part.looks) for each in part.sequences)
            return min(found + (behind if part.looks else 0), MAX_STEPS + 1)
        case _Repeat(most=None):
            if not ends:
                raise _RefusedError(
                    "it has a repetition without bound, and behind or around it what may make the engine try again"
                )
            if not _takes(part.part):
                raise _RefusedError("it repeats without bound what may match nothing")
            return min(behind + _steps(part.part, 1, ends=False) * max(part.least, 1), MAX_STEPS + 1)
        case _Repeat():
            found = behind
            for _ in range(part.most or 0):
                found = behind + 1 + _steps(part.part, found, ends=ends and part.most == 1)
                if found > MAX_STEPS:
                    break
            return found
    return min(1 + behind, MAX_STEPS + 1)


def _steps_of(sequence: tuple[_Part, ...], behind: int, *, ends: bool) -> int:
    for part in reversed(sequence):
        behind = _steps(part, behind, ends=ends)
        ends = ends and not _can_fail(part)
    return behind


def _published() -> frozenset[str]:
    """The alternatives of the expressions of published models."""
    patterns = {pattern for split in SPLITS.values() for pattern in split.patterns} | {_HAN_WORD, *_THREES}
    return frozenset(text for pattern in patterns for text, _parts in _Reader(pattern).whole())


PUBLISHED = _published()


def steps(pattern: str) -> int:
    """A bound of the steps in which an expression is tried at one character. _RefusedError if it has none."""
    if len(pattern) > MAX_LENGTH:
        raise _RefusedError(f"it has {len(pattern):,} characters, above {MAX_LENGTH:,}")
    found = sum(1 if text in PUBLISHED else _steps_of(parts, 1, ends=True) for text, parts in _Reader(pattern).whole())
    if found > MAX_STEPS:
        raise _RefusedError(f"at one character it may take more than {MAX_STEPS} steps")
    return found


def check_expressions(described: Mapping[str, Any]) -> None:
    """TokenizerError for an expression that could take more than linear time; it has the expression and the reason."""
    count = 0
    for where, pattern in _expressions(described):
        try:
            count += steps(pattern)
            if count > MAX_STEPS:
                raise _RefusedError(f"with the others, it may take more than {MAX_STEPS} steps at one character")
        except _RefusedError as error:
            raise TokenizerError(
                f"its {where} has an expression that might take hours on some texts, {shown(pattern)}: {error}. It is "
                "none of a model that is known here; if you trust the file, encode with the package tokenizers and "
                "pass ids (a folder without tokenizer.json compiles to a model of ids)"
            ) from None


def _expressions(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The part of the tokenizer, and each expression in it."""
    for where in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        waiting = [described.get(where)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, Mapping):
                if isinstance(value.get("Regex"), str):
                    yield where, value["Regex"]
                waiting.extend(value.values())
            elif isinstance(value, list):
                waiting.extend(value)


__all__ = ["MAX_STEPS", "check_expressions", "steps"]
