"""IR text from outside: checks before xDSL's parser runs, and which of its errors become ours.

xDSL's lexer matches strings by a regular expression that takes exponential time if the closing quote is missing. Its
parser recurses for each bracket. Integers become Python integers, whose conversion is quadratic in their digits. So the
text is scanned once before, in linear time, and refused if it cannot be valid.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xdsl
from xdsl.utils.exceptions import ParseError, UnregisteredConstructException, VerifyException

from qcompiler.errors import PassError, QCompilerError

MAX_DEPTH = 64
"""Nested brackets: the parser recurses about ten times for each. Our own text has twelve at most."""
MAX_DIGITS = 400
"""Digits of an integer. The largest 64-bit float has 309."""
MAX_WIDTH = 1024
"""Bits of an integer type: the parser computes 2 to this power for each value."""
LONGEST_MESSAGE = 2000

_TOKENS = re.compile(
    r'(?P<skip>//[^\n]*|->)|"(?:[^"\\\n\v\f]|\\["nt\\]|\\[0-9A-Fa-f]{2})*+(?P<closed>"?)|(?P<open>[(\[{<])'
    r"|(?P<close>[)\]}>])|(?<![\w.$%@#!^])[su]?i(?P<width>[0-9]+)(?![\w.$])|(?P<digits>[0-9]+)"
)

_XDSL_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, AssertionError, NotImplementedError,
    UnregisteredConstructException,
)  # fmt: skip
"""What xDSL's code raises for malformed text besides ParseError and VerifyException: attributes with values that their
types do not allow, ops whose parsed form cannot be printed, undefined names."""


def check_text(text: str, name: str) -> None:
    """QCompilerError for text that no printer writes and that would keep the parser busy. `name` names the text."""
    depth = 0
    for match in _TOKENS.finditer(text):
        kind = match.lastgroup
        if kind == "open":
            depth += 1
            if depth > MAX_DEPTH:
                raise _error(text, match.start(), name, f"brackets are nested deeper than {MAX_DEPTH}")
        elif kind == "close":
            depth = max(depth - 1, 0)
        elif kind == "digits" and len(match[0]) > MAX_DIGITS:
            raise _error(text, match.start(), name, f"a number has {len(match[0])} digits; the limit is {MAX_DIGITS}")
        elif kind == "width" and (len(match["width"]) > MAX_DIGITS or int(match["width"]) > MAX_WIDTH):
            raise _error(text, match.start(), name, f"an integer type has more than {MAX_WIDTH} bits")
        elif kind == "closed" and not match["closed"]:
            raise _error(text, match.start(), name, "a string does not end, or holds an unknown escape")


def _error(text: str, at: int, name: str, what: str) -> QCompilerError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return QCompilerError(f"{name} is not a valid module: line {line}, column {column}: {what}")


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turns errors about the text, raised by the parser and the verifier, into QCompilerErrors.

    A Python exception counts only if xDSL's code raised it. One from our code is a bug and passes unchanged.
    """
    try:
        yield
    except (ParseError, VerifyException) as error:
        raise QCompilerError(f"{name} is not a valid module: {_shortened(str(error))}") from error
    except RecursionError as error:
        raise QCompilerError(f"{name} is not a valid module: something in it is nested too deeply") from error
    except _XDSL_ERRORS as error:
        if not _raised_by_xdsl(error):
            raise
        what = f"{type(error).__name__}: {_shortened(str(error))}"
        raise QCompilerError(f"{name} is not a valid module: xdsl refuses it: {what}") from error


@contextmanager
def applying(name: str) -> Iterator[None]:
    """For a single pass on IR it may not be made for: turns what xDSL refuses into a PassError."""
    try:
        yield
    except VerifyException as error:
        raise PassError(f"the pass {name} left IR that is not valid: {_shortened(str(error))}", stage=name) from error
    except _XDSL_ERRORS as error:
        if not _raised_by_xdsl(error):
            raise
        what = f"{type(error).__name__}: {_shortened(str(error))}"
        raise PassError(f"the pass {name} does not take this IR, for xdsl refuses: {what}", stage=name) from error


def _raised_by_xdsl(error: BaseException) -> bool:
    """Whether the innermost frame of xDSL's or our code is xDSL's. Python's own functions count for their caller."""
    # Passes are beside the package in the repository, and inside it when installed.
    theirs, ours = Path(xdsl.__file__).parent, {Path(__file__).parents[1], Path(__file__).parents[2] / "passes"}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folders = Path(frame.filename).parents
        if theirs in folders:
            return True
        if ours.intersection(folders):
            return False
    return False


def _shortened(text: str) -> str:
    """The start and the end of the message: xDSL prints the whole line, and the error below it."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]} … {text[-half:].strip()}"


__all__ = ["applying", "check_text", "refusing"]
