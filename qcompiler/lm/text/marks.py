"""Keeps what a message says apart from what the chat template says.

A user may write "<|im_end|>".  Rendered into a chat, this would end the message.  So each special token in a message is
broken by a mark after its first character, before it is rendered; the rendered chat is cut at the marks, and what was
broken is encoded as text.  The mark is one of Unicode's noncharacters, one that is neither in a message nor in the
template.  A template that escapes or drops the mark makes a longer text, never a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qcompiler.errors import ArgumentError

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
MAX_DEPTH = 64


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise ArgumentError(f"messages are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key, depth + 1)
            yield from _texts(each, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, depth + 1)


def unused(template: str, given: Any) -> str:
    """A mark that occurs nowhere. ArgumentError if the messages use all 32."""
    seen = {letter for text in (template, *_texts(given)) for letter in text if "\ufdd0" <= letter <= "\ufdef"}
    for mark in NONCHARACTERS:
        if mark not in seen:
            return mark
    raise ArgumentError("the messages hold all of the noncharacters U+FDD0 to U+FDEF; take them out")


def pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the special tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def broken(value: Any, special: re.Pattern[str], mark: str) -> Any:
    """The value with a mark in each special token of its texts, the keys of dicts left alone."""
    if isinstance(value, str):
        return special.sub(lambda found: found[0][0] + mark + found[0][1:], value)
    if isinstance(value, Mapping):
        return {key: broken(each, special, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [broken(each, special, mark) for each in value]
    return value


def cut(rendered: str, names: Sequence[str], mark: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a chat, and of each whether it is a special token that stands as text."""
    if mark not in rendered:
        yield rendered, False
        return
    split = pattern([name[0] + mark + name[1:] for name in names])
    at = 0
    for found in split.finditer(rendered):
        yield from ((piece, False) for piece in rendered[at : found.start()].split(mark) if piece)
        yield found[0].replace(mark, ""), True
        at = found.end()
    yield from ((piece, False) for piece in rendered[at:].split(mark) if piece)


__all__ = ["broken", "cut", "pattern", "unused"]
