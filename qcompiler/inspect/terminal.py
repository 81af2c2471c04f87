"""What a command prints: plain text into a pipe or a file; on a terminal with colours, and page by page if it is long.

`NO_COLOR` (https://no-color.org) or `TERM=dumb` turns colours off; `FORCE_COLOR` turns them on in a pipe.
The pager is `QC_PAGER`, else `PAGER`, else `less`; an empty value, or `cat`, means none.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

from qcompiler.runtime.progress import note

Syntax = Literal["text", "ir", "diff"]

_RESET = "\033[0m"
_COLOURS = {
    "comment": "\033[90m",
    "string": "\033[32m",
    "type": "\033[36m",
    "op": "\033[1m",
    "heading": "\033[1;34m",
    "removed": "\033[31m",
    "added": "\033[32m",
}
"""The terminal's own sixteen colours, so that they fit its background. Values stay plain: they are most of a text."""

_TOKENS = re.compile(
    r'(?P<comment>//.*$|^\s*#\w.*$)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<type>![a-z]+\.\w+|\b(?:tensor|memref|vector)\b(?=<))'
    r"|(?P<op>\b(?:builtin|func|qc|rt|linalg|tensor|arith|math|test)\.[\w.]+)",
    re.MULTILINE,
)
_LINES: Mapping[str, str] = {"-": "removed", "+": "added", "@": "heading", "=": "heading"}
"""The first character of a line of a difference -> its colour."""


def has_colours(stream: TextIO) -> bool:
    """Whether text on this stream may be coloured."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(text: str, syntax: Syntax) -> str:
    """The text with the escape sequences of its colours."""
    if syntax == "text":
        return text
    if syntax == "diff":
        return "\n".join(_coloured_line(line) for line in text.split("\n"))
    return _TOKENS.sub(lambda found: f"{_COLOURS[found.lastgroup or '']}{found[0]}{_RESET}", text)


def _coloured_line(line: str) -> str:
    colour = _LINES.get(line[:1])
    return line if colour is None else f"{_COLOURS[colour]}{line}{_RESET}"


def show(text: str, syntax: Syntax = "text") -> None:
    """Prints a text to stdout: coloured on a terminal, and through a pager if it is longer than the terminal."""
    if sys.stdout is None:  # closed by the caller, `>&-`
        return
    shown = coloured(text, syntax) if has_colours(sys.stdout) else text
    pager = _pager() if _is_long(text) else None
    if pager is None:
        print(shown)
        return
    _page(shown + "\n", pager)


def width(default: int = 120) -> int:
    """The columns of the terminal on stdout; `default` for a pipe or a file."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size((default, 24)).columns if is_terminal else default


def _is_long(text: str) -> bool:
    """Whether a person at a terminal could not see the beginning of the text any more."""
    if not (sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty()):
        return False
    size = shutil.get_terminal_size()
    rows = sum(-(-len(line) // max(size.columns, 1)) or 1 for line in text.splitlines())
    return rows >= size.lines


def _pager() -> list[str] | None:
    """The pager's command, or None for none. One that is named and does not exist is said, and not used."""
    for variable in ("QC_PAGER", "PAGER"):
        if variable in os.environ:
            try:
                command = shlex.split(os.environ[variable])
            except ValueError as error:  # a quote without its end
                note(f"{variable}={os.environ[variable]!r} is no command ({error}): printed without a pager")
                return None
            if not command or command == ["cat"]:
                return None
            if shutil.which(command[0]) is None:
                note(f"{variable}={os.environ[variable]!r} names no program that exists: printed without a pager")
                return None
            return command
    return ["less"] if shutil.which("less") else None


def _page(text: str, command: list[str]) -> None:
    """Runs the pager until its reader is done. Ctrl-C is the pager's, as it is in `man`."""
    # F: leave at once if it fits; R: show colours; X: leave the text on the screen. A user's own LESS wins.
    environment = {"LESS": "FRX", **os.environ}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment, errors="replace")
    assert process.stdin is not None
    try:
        process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # left before the end, with `q`
    except KeyboardInterrupt:
        process.stdin.close()
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            continue


__all__ = ["Syntax", "coloured", "has_colours", "show", "width"]
