"""The model's source lines in a program file: a text that is there only if the user asked for it (`source_lines=True`).

    {"blocks.0.up": [["/home/me/net.py:12 in forward: h = self.up(x)", ["linear.default"]]], …}

Lines have paths of the machine that compiled the model, and text of its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from qcompiler.errors import CorruptFileError

LINES_FILE = "ir/source-lines.json"
"""The name of the text in a program file. It is no stage: those begin with a number."""

Lines = Mapping[str, Sequence[tuple[str, Sequence[str]]]]
"""Module path -> lines with the operators that each became, in the model's order."""


def lines_text(lines: Lines) -> str:
    """The text of the file."""
    return msgspec.json.encode(lines).decode()


def read_lines(texts: Mapping[str, str], where: str) -> Lines:
    """The lines in a program file's texts; empty if there are none. CorruptFileError for a malformed text."""
    if LINES_FILE not in texts:
        return {}
    try:
        return msgspec.json.decode(texts[LINES_FILE], type=dict[str, tuple[tuple[str, tuple[str, ...]], ...]])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise CorruptFileError(f"{where}: the model's source lines are malformed: {str(error)[:500]}") from error


__all__ = ["LINES_FILE", "Lines", "lines_text", "read_lines"]
