"""How much longer a tokenizer.json can make a text: bounded before any text is read.

    {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}     ten times as long; twelve: 10^12

`tokenizers` runs such steps without a limit of memory, and a process that has none left is ended by the system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qcompiler.errors import TokenizerError

MAX_GROWTH = 64
"""Times that all steps together may lengthen a text. Those of known models do not, apart from a few letters."""
MAX_STEPS = 256
MAX_PREPENDED = 1024
"""Characters that a step may put before a text."""


def check_growth(described: Mapping[str, Any]) -> None:
    """TokenizerError for normalizers or decoders that could make a text longer than MAX_GROWTH times."""
    for part in ("normalizer", "decoder"):
        growth = 1
        for count, step in enumerate(_steps(described.get(part), 0), 1):
            content = step.get("content", step.get("prepend"))
            length = len(content) if isinstance(content, str) else 0
            if step.get("type") == "Replace":
                growth *= max(1, length + (0 if _takes_something(step.get("pattern")) else 1))
            elif length > MAX_PREPENDED:
                raise TokenizerError(f"its {part} puts {length:,} characters before a text, above {MAX_PREPENDED}")
            if growth > MAX_GROWTH or count > MAX_STEPS:
                raise TokenizerError(
                    f"its {part} could make a text more than {MAX_GROWTH} times as long, or has more than {MAX_STEPS} "
                    "steps: that is no tokenizer of a language model"
                )


def _takes_something(pattern: Any) -> bool:
    """Whether each match is known to take at least one character. A regular expression may match nothing."""
    return isinstance(pattern, Mapping) and bool(pattern.get("String"))


def _steps(part: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The steps of a part; those of sequences one by one."""
    if not isinstance(part, Mapping):
        return
    if depth > 16:
        raise TokenizerError("its steps are nested deeper than 16")
    if part.get("type") != "Sequence":
        yield part
    for name in ("normalizers", "decoders"):
        inner = part.get(name)
        for each in inner if isinstance(inner, list) else []:
            yield from _steps(each, depth + 1)


__all__ = ["check_growth"]
