"""Regular expressions from files: names of layers in the settings of foreign checkpoints and adapters.

Python's `re` tries every way to divide a name among repetitions: a repetition inside another takes exponential time, n
repetitions side by side take the n-th power of the name's length.  So a pattern may have at most three unbounded
repetitions, none inside another, and names of more than `LONGEST_MATCHED` characters do not match.
"""

from __future__ import annotations

import re

MAX_PATTERN, MAX_REPEATS, LONGEST_MATCHED = 300, 3, 160

_NESTED = re.compile(r"(?<!\\)\)[*+{]|\(\?P?=|\(\?\(|\\[1-9]")  # a repeated group, a reference to one
_OUTSIDE = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)


class PatternError(ValueError):
    """A pattern is refused; the caller adds where it was found."""


def compiled(text: str, before: str = "", after: str = "") -> re.Pattern[str]:
    """`before` + text + `after`. PatternError for an invalid pattern, or one that could take long."""
    if len(text) > MAX_PATTERN:
        raise PatternError(f"it has {len(text)} characters; the limit is {MAX_PATTERN}")
    if _NESTED.search(text):
        raise PatternError("a group is repeated or referred to, which may take exponential time; write it out")
    if (count := len(re.findall(r"[*+{]", _OUTSIDE.sub("", text)))) > MAX_REPEATS:
        raise PatternError(f"it has {count} repetitions (*, +, {{}}); the limit is {MAX_REPEATS}")
    try:
        return re.compile(before + text + after)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is no regular expression: {error}") from error


def matches(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a name begins with the pattern."""
    return len(name) <= LONGEST_MATCHED and pattern.match(name) is not None


__all__ = ["LONGEST_MATCHED", "MAX_PATTERN", "MAX_REPEATS", "PatternError", "compiled", "matches"]
