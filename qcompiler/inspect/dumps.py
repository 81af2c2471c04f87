"""The result of every stage as text: `prog.stages`, `prog.ir(stage)`, and files with `dump_ir=` or `QC_DUMP_IR`.

00-export.txt  01-insert-qdq.txt  02-import.mlir  03-canonicalize.mlir  …  20-emit-kernels.cpp
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qcompiler.errors import ArgumentError


@dataclass(frozen=True)
class StageDump:
    """One stage: its place in the pipeline, its name, the text after it (compressed) and the seconds it took."""

    index: int
    name: str
    suffix: str
    packed: bytes
    seconds: float

    @property
    def text(self) -> str:
        return zlib.decompress(self.packed).decode()

    @property
    def file_name(self) -> str:
        return f"{self.index:02d}-{self.name}.{self.suffix}"


class StageDumps:
    """The stages of one compilation in order. With a directory, each stage is also written there when it ends."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self._stages: list[StageDump] = []
        self._directory = Path(directory) if directory is not None else None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, text: str, seconds: float, suffix: str = "mlir") -> None:
        dump = StageDump(len(self._stages), name, suffix, zlib.compress(text.encode(), 1), seconds)
        self._stages.append(dump)
        if self._directory is not None:
            (self._directory / dump.file_name).write_text(text)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._stages)

    def __iter__(self) -> Iterator[StageDump]:
        return iter(self._stages)

    def text(self, stage: str) -> str:
        """The text after a stage, by its name or number. ArgumentError, listing the stages, for any other."""
        for dump in self._stages:
            if stage in (dump.name, str(dump.index), dump.file_name):
                return dump.text
        raise ArgumentError(f"no stage '{stage}'; the stages are: {', '.join(self.names)}")

    def timing(self) -> str:
        """Seconds per stage as a table."""
        total = sum(stage.seconds for stage in self._stages)
        rows = [f"{stage.seconds:9.3f} s  {stage.name}" for stage in self._stages]
        return "\n".join([*rows, f"{total:9.3f} s  in all"])
