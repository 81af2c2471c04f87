"""Reads the text of a dimension: ``+ - * // % max(,) min(,)`` over integers and symbols.

The text may come from an untrusted file. So this grammar reads it, not Python's parser. The nesting depth is limited,
and a long chain of operators needs no recursion.

    sum      ["-"] product (("+" | "-") product)*
    product  factor (("*" | "//" | "%") factor)*
    factor   integer | symbol | "-" factor | "(" sum ")" | ("max" | "min") "(" sum "," sum ")"
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from qcompiler.errors import DimError

MAX_TEXT = 4096
"""The most characters of a dimension. Dimensions of real models have tens."""

MAX_DEPTH = 32
"""The most parentheses and calls that may nest."""

MAX_DIGITS = 40
"""The most digits of an integer. No size has as many."""

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z0-9_]*)|(//|[-+*%(),]))")

T = TypeVar("T")


@dataclass(frozen=True)
class Builder(Generic[T]):
    """Makes a value from each part of a text. `operators` are the binary ones, by their text; a unary "-" is 0 - x."""

    constant: Callable[[int], T]
    symbol: Callable[[str], T]
    operators: dict[str, Callable[[T, T], T]]


def read(text: str, builder: Builder[T]) -> T:
    """DimError for text that is no dimension, is too long, or nests too deeply."""
    if len(text) > MAX_TEXT:
        raise DimError(f"a dimension expression of {len(text)} characters is too long (limit {MAX_TEXT})")
    reader = _Reader(text, builder)
    value = reader.sum(0)
    if reader.kind != "end":
        raise reader.error()
    return value


class _Reader(Generic[T]):
    """A recursive-descent parser; `kind` and `word` describe the current token."""

    def __init__(self, text: str, builder: Builder[T]) -> None:
        self.text = text
        self.builder = builder
        self.place = 0
        self.kind = self.word = ""
        self.advance()

    def error(self) -> DimError:
        return DimError(
            f"cannot read the dimension expression {self.text[:200]!r}: it uses something other than "
            "+ - * // % max min over integers and symbols"
        )

    def advance(self) -> None:
        found = _TOKEN.match(self.text, self.place)
        if found is None:
            if self.text[self.place :].strip():
                raise self.error()
            self.kind, self.word = "end", ""
            return
        self.place = found.end()
        number, name, sign = found.groups()
        self.kind, self.word = ("number", number) if number else ("name", name) if name else (sign, sign)

    def expect(self, kind: str) -> None:
        if self.kind != kind:
            raise self.error()
        self.advance()

    def sum(self, depth: int) -> T:
        if depth > MAX_DEPTH:
            raise DimError(f"the dimension expression {self.text[:80]!r}… nests more than {MAX_DEPTH} deep")
        value = self.product(depth)
        while self.kind in ("+", "-"):
            combine = self.builder.operators[self.kind]
            self.advance()
            value = combine(value, self.product(depth))
        return value

    def product(self, depth: int) -> T:
        value = self.factor(depth)
        while self.kind in ("*", "//", "%"):
            combine = self.builder.operators[self.kind]
            self.advance()
            value = combine(value, self.factor(depth))
        return value

    def factor(self, depth: int) -> T:
        negative = False
        while self.kind == "-":
            negative = not negative
            self.advance()
        value = self.atom(depth)
        return self.builder.operators["-"](self.builder.constant(0), value) if negative else value

    def atom(self, depth: int) -> T:
        kind, word = self.kind, self.word
        if kind == "number":
            if len(word) > MAX_DIGITS:
                raise DimError(f"the dimension expression {self.text[:80]!r}… has an integer of {len(word)} digits")
            self.advance()
            return self.builder.constant(int(word))
        if kind == "name":
            if keyword.iskeyword(word):
                raise self.error()
            self.advance()
            return self.call(word, depth) if self.kind == "(" else self.builder.symbol(word)
        self.expect("(")
        value = self.sum(depth + 1)
        self.expect(")")
        return value

    def call(self, word: str, depth: int) -> T:
        if word not in ("max", "min"):
            raise self.error()
        self.expect("(")
        first = self.sum(depth + 1)
        self.expect(",")
        second = self.sum(depth + 1)
        self.expect(")")
        return self.builder.operators[word](first, second)
