"""The stages as the explorer lists them: their ops counted, and what each changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qcompiler.inspect.explore.model import Stage

_MLIR_OP = re.compile(r'^[ \t]*(?:%[^=\n]*= )?"?([a-z][a-z_0-9]*\.[a-zA-Z_][\w.]*)', re.M)
"""No part matches a line break: a match would be tried again from each line that it had read (quadratic time)."""
_TORCH_OP = re.compile(r"= (torch\.ops\.[\w.]+|operator\.\w+)\(")


@dataclass(frozen=True)
class StageText:
    """The text after a stage; `suffix` is that of its file: txt, mlir, cpp or cu."""

    index: int
    name: str
    suffix: str
    text: str
    seconds: float | None = None

    @property
    def kind(self) -> Literal["torch", "mlir", "source"]:
        if self.suffix == "mlir":
            return "mlir"
        return "torch" if self.suffix == "txt" else "source"


class Texts:
    """The page's long texts, each once: a stage that changed nothing shares the text of the one before it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> tuple[str, ...]:
        return tuple(self._numbers)


def count_ops(text: str, kind: str) -> dict[str, int]:
    """The ops of a text by name, most frequent first. Source code has none."""
    if kind == "source":
        return {}
    found = Counter((_MLIR_OP if kind == "mlir" else _TORCH_OP).findall(text))
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def stage_records(stages: Iterable[StageText], texts: Texts) -> tuple[Stage, ...]:
    """One record for each stage. A stage is compared with the one before it, if both are of one kind."""
    records: list[Stage] = []
    before: StageText | None = None
    for stage in stages:
        ops = count_ops(stage.text, stage.kind)
        alike = before is not None and before.kind == stage.kind
        old = records[-1].ops if alike else {}
        delta = {
            name: ops.get(name, 0) - old.get(name, 0) for name in (*ops, *(name for name in old if name not in ops))
        }
        records.append(Stage(
            index=stage.index, name=stage.name, kind=stage.kind, seconds=stage.seconds,
            changed=before is None or not alike or before.text != stage.text,
            lines=stage.text.count("\n") + (not stage.text.endswith("\n")),
            ops=ops, delta={name: count for name, count in delta.items() if count} if alike else {},
            text=texts.add(stage.text),
        ))  # fmt: skip
        before = stage
    return tuple(records)
