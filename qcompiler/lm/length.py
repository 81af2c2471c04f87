"""How many tokens a cache has, for models that count with it in Python while they are traced.

    torch.arange(past, past + s)      positions: as many as tokens, though `past` is data
    max(0, 1 - (s + past))            0, since no cache has fewer than no tokens
    past + s + 2 > len(table)         False, where the table is longer than the longest text

`Length` is a tensor's number, or its negative, and an offset. Differences of two of them have the tensor no more, and a
comparison is decided where it comes out alike for every number of tokens. All else is done with the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.common.origins import line_of_frame

Size = int | torch.SymInt
_PACKAGE = str(Path(__file__).resolve().parents[1])


class Length:
    """`sign * tokens + offset`; `tokens` is an integer tensor without dims, from 0 to `most`."""

    def __init__(self, tokens: torch.Tensor, most: int, sign: int = 1, offset: Size = 0) -> None:
        self.tokens, self.most, self.sign, self.offset = tokens, most, sign, offset

    @property
    def value(self) -> torch.Tensor:
        """As a tensor."""
        return torch.add(self.tokens if self.sign == 1 else -self.tokens, self.offset)  # type: ignore[arg-type]

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int | torch.SymInt):
            return Length(self.tokens, self.most, self.sign, self.offset + other)
        if isinstance(other, Length):
            if other.tokens is self.tokens and other.sign == -self.sign:
                return self.offset + other.offset
            return self.value + other.value
        return self.value + other

    __radd__ = __add__

    def __neg__(self) -> Length:
        return Length(self.tokens, self.most, -self.sign, -self.offset)

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    __rmul__ = __mul__

    def __gt__(self, other: Any) -> bool:
        return self._decided(self - other, lambda least: least > 0)

    def __ge__(self, other: Any) -> bool:
        return self._decided(self - other, lambda least: least >= 0)

    def __lt__(self, other: Any) -> bool:
        return not self >= other

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        raise _decides()

    def __bool__(self) -> bool:
        raise _decides()

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def _decided(difference: Any, holds: Any) -> bool:
        """Whether a condition, which changes once at most as a number grows, holds for every number of tokens or for
        none. ExportError if the number of tokens decides."""
        if not isinstance(difference, Length):
            return bool(holds(difference))
        at_none = bool(holds(difference.offset))
        if at_none == bool(holds(difference.sign * difference.most + difference.offset)):
            return at_none
        raise _decides()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if function is torch.arange and len(args) == 2:
            start, count = args[0], args[1] - args[0]
            if isinstance(count, int | torch.SymInt):
                return torch.arange(count, **options) + (start.value if isinstance(start, Length) else start)
        return function(*map(_plain, args), **{name: _plain(each) for name, each in options.items()})


def _decides() -> ExportError:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    line, _ = line_of_frame(frame)
    return ExportError(
        "the model decides by the number of tokens in its cache, which is data of a program, not known while it is "
        "traced" + (f" ({line})" if line else "")
    )


def _plain(given: Any) -> Any:
    return given.value if isinstance(given, Length) else given


__all__ = ["Length"]
