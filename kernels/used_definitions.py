"""Reduces headers to the definitions that a text uses, so that a module with one small kernel does not carry a library.

    headers = [CppHeader.parse(text) for text in (…)]     in the order in which they build on each other
    used(headers, kernel_text)                         their texts, without what nothing in `kernel_text` reaches

A compiler parses everything in a translation unit: NVRTC spent most of its time for a norm on headers for linear
layers. Shorter text is also easier to read.

A header is split at its top level into pieces: one definition or macro each, with the comment above it. A piece defines
names and uses names. The pieces kept are those that the kernels' identifiers reach. All pieces that define one name
stay together, so that overloads and specialisations resolve as in the whole text. An `#if` with its branches stays
around the pieces that are kept inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.S)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TAG = re.compile(r"\b(?:struct|enum|union|class)\b\s*(?:alignas\(\d+\)\s*)?(\w+)?")


def identifiers(text: str) -> frozenset[str]:
    """Every identifier outside comments and strings."""
    return frozenset(_IDENTIFIER.findall(_SKIPPED.sub(" ", text)))


@dataclass(frozen=True)
class Conditional:
    """The branch of an `#if` that contains a piece: the directives from `#if` to the one that opens the branch."""

    number: int
    directives: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """One definition with the comment above it. `names` are the names it defines; `uses` are all identifiers in it."""

    text: str
    names: frozenset[str]
    uses: frozenset[str]
    inside: tuple[Conditional, ...]


@dataclass(frozen=True)
class CppHeader:
    """A header: its title (the comment at its start) and its pieces in order."""

    title: str
    pieces: tuple[Piece, ...]

    @staticmethod
    def parse(text: str) -> CppHeader:
        """ValueError if braces or directives are not closed, or a piece defines nothing."""
        return _Parser(text).header()


class _Parser:
    """Splits a text line by line. A definition ends with the line that closes its braces and its statement."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.at = 0
        self.inside: list[Conditional] = []
        self.conditionals = 0

    def header(self) -> CppHeader:
        pieces: list[Piece] = []
        title = self._comment() if self.lines and self.lines[0].startswith("//") else []
        comment: list[str] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith("//"):
                comment = self._comment()
            elif not line.strip():
                comment, self.at = [], self.at + 1
            elif line.startswith("#") and not line.startswith("#define"):
                self._directive(line)
                self.at += 1
            else:
                pieces.append(self._piece(comment, self._macro() if line.startswith("#") else self._definition()))
                comment = []
        if self.inside:
            raise ValueError(f"'{self.inside[-1].directives[0]}' has no #endif")
        return CppHeader("\n".join(title), tuple(pieces))

    def _comment(self) -> list[str]:
        begin = self.at
        while self.at < len(self.lines) and self.lines[self.at].startswith("//"):
            self.at += 1
        return self.lines[begin : self.at]

    def _directive(self, line: str) -> None:
        if line.startswith("#if"):
            self.conditionals += 1
            self.inside.append(Conditional(self.conditionals, (line,)))
        elif line.startswith("#el"):
            last = self.inside.pop()
            self.inside.append(Conditional(last.number, (*last.directives, line)))
        elif line.startswith("#endif"):
            self.inside.pop()
        else:
            raise ValueError(f"line {self.at + 1}: '{line}' is no directive that headers of kernels have")

    def _macro(self) -> list[str]:
        begin = self.at
        while self.lines[self.at].endswith("\\"):
            self.at += 1
        self.at += 1
        return self.lines[begin : self.at]

    def _definition(self) -> list[str]:
        begin = self.at
        while self.at < len(self.lines):
            self.at += 1
            if _is_whole("\n".join(self.lines[begin : self.at])):
                return self.lines[begin : self.at]
        raise ValueError(f"line {begin + 1}: '{self.lines[begin]}' does not end")

    def _piece(self, comment: list[str], lines: list[str]) -> Piece:
        text = "\n".join(lines)
        names = _defined(text)
        if not names:
            raise ValueError(f"'{lines[0]}' defines nothing that has a name")
        return Piece("\n".join([*comment, *lines]), names, identifiers(text), tuple(self.inside))


def _is_whole(text: str) -> bool:
    """Whether all braces and parentheses are closed and the text ends like a definition."""
    plain = _without_directives(_SKIPPED.sub(" ", text)).strip()
    if any(plain.count(a) != plain.count(b) for a, b in ("{}", "()")):
        return False
    return plain.endswith(";") or (plain.endswith("}") and _is_function(plain))


def _without_directives(text: str) -> str:
    return re.sub(r"^#[^\n]*$", "", text, flags=re.M)


def _head(plain: str) -> str:
    """A definition up to its body or value, without its template parameters."""
    head = re.split(r"[{;]|(?<![=!<>])=(?!=)", _without_template(plain), maxsplit=1)[0]
    return head.strip()


def _without_template(plain: str) -> str:
    text = plain.strip()
    while text.startswith("template"):
        depth, end = 0, text.index("<")
        for end in range(text.index("<"), len(text)):
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            if depth == 0:
                break
        text = text[end + 1 :].strip()
    return text


def _is_function(plain: str) -> bool:
    return "(" in _head(re.sub(r"alignas\(\d+\)", "", plain))


def _defined(text: str) -> frozenset[str]:
    """The names that one definition or macro adds to file scope."""
    if text.startswith("#define"):
        return frozenset(_IDENTIFIER.findall(text)[1:2])
    plain = _without_directives(_SKIPPED.sub(" ", text))
    head = _head(plain)
    if head.startswith("typedef"):
        return frozenset(_IDENTIFIER.findall(plain)[-1:])
    if _is_function(plain):
        return frozenset(re.findall(r"(\w+)\s*\(", re.sub(r"alignas\(\d+\)", "", head))[:1])
    if tag := _TAG.search(head):
        named = [tag[1]] if tag[1] else []
        if head.startswith("enum"):
            body = plain[plain.index("{") + 1 : plain.rindex("}")]
            named += [name for each in body.split(",") for name in _IDENTIFIER.findall(each.partition("=")[0])[:1]]
        return frozenset(named)
    return frozenset(_IDENTIFIER.findall(head.partition("[")[0])[-1:])


def used(headers: Sequence[CppHeader], text: str) -> list[str]:
    """The headers that `text` uses, each reduced to the pieces that it reaches."""
    by_name: dict[str, list[Piece]] = {}
    for header in headers:
        for piece in header.pieces:
            for name in piece.names:
                by_name.setdefault(name, []).append(piece)
    reached, todo = set[str](), set(identifiers(text))
    while todo:
        name = todo.pop()
        if name in reached or name not in by_name:
            continue
        reached.add(name)
        todo.update(*(piece.uses | _asked(piece.inside) for piece in by_name[name]))
    kept = [(header, [piece for piece in header.pieces if piece.names & reached]) for header in headers]
    return [_text(header.title, pieces) for header, pieces in kept if pieces]


def _asked(inside: Iterable[Conditional]) -> frozenset[str]:
    return identifiers("\n".join(line for each in inside for line in each.directives))


def _text(title: str, pieces: Sequence[Piece]) -> str:
    lines = [title, ""] if title else []
    opened: tuple[Conditional, ...] = ()
    for piece in pieces:
        lines += _turn(opened, piece.inside)
        if piece.text.startswith("//") and lines[-1:] != [""]:
            lines.append("")
        lines.append(piece.text)
        opened = piece.inside
    return "\n".join([*lines, *_turn(opened, ()), ""])


def _turn(opened: tuple[Conditional, ...], wanted: tuple[Conditional, ...]) -> Iterator[str]:
    """The directives between two consecutive pieces, the first inside `opened` and the second inside `wanted`."""
    same = 0
    while same < min(len(opened), len(wanted)) and opened[same] == wanted[same]:
        same += 1
    further = same < min(len(opened), len(wanted)) and opened[same].number == wanted[same].number
    yield from ["#endif"] * (len(opened) - same - further)
    if further:
        yield from wanted[same].directives[len(opened[same].directives) :]
    for each in wanted[same + further :]:
        yield from each.directives
