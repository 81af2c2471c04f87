"""The result of every stage as text: `prog.stages`, `prog.ir(stage)`, and files with `dump_ir=` or `QC_DUMP_IR`.

00-export.txt  01-insert-qdq.txt  02-import.mlir  03-canonicalize.mlir  …  32-emit-kernels.cpp

A folder holds the dumps of one compile: those of an earlier one are deleted when the next one begins.

`QC_PRINT_AFTER=import,dce` prints the text after these stages to stderr; `all` prints every one, and `change` those
that changed it.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qcompiler.errors import ArgumentError
from qcompiler.inspect.terminal import coloured, has_colours

ALL, CHANGE = "all", "change"
"""Words of `QC_PRINT_AFTER` that are not the names of stages."""


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
    """The stages of one compilation in order. With a directory, each stage is also written there when it ends;
    `print_after` are the stages whose text is printed to stderr (`print_after_of`).

    `known` are the names of all stages: their dumps that an earlier compile left in the directory are deleted first.
    Otherwise a compile that fails, or one with other stages, would leave a mixture. Other files stay.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        print_after: frozenset[str] = frozenset(),
        known: Collection[str] = (),
    ) -> None:
        self._stages: list[StageDump] = []
        self._directory = Path(directory) if directory is not None else None
        self._print_after, self._last = print_after, ""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            _delete_dumps(self._directory, known)

    def add(self, name: str, text: str, seconds: float, suffix: str = "mlir") -> None:
        dump = StageDump(len(self._stages), name, suffix, zlib.compress(text.encode(), 1), seconds)
        self._stages.append(dump)
        if self._directory is not None:
            (self._directory / dump.file_name).write_text(text)
        changed = text != self._last
        if self._print_after & {name, ALL} or (CHANGE in self._print_after and changed):
            _print_after(name, text, changed=changed)
        self._last = text

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


_DUMP = re.compile(r"\d\d-(?P<stage>.+)\.(?:txt|mlir|cpp|cu)")


def _delete_dumps(folder: Path, known: Collection[str]) -> None:
    """Deletes the files in a folder that have the name of a dump of one of these stages. Links are not followed.

    Numbers of dumps have two digits: `2024-export.txt` is none.
    """
    for file in folder.iterdir():
        found = _DUMP.fullmatch(file.name)
        if found is not None and found["stage"] in known and (file.is_symlink() or file.is_file()):
            file.unlink()


def print_after_of(text: str | None, stages: Sequence[str]) -> frozenset[str]:
    """The stages to print after, from a list with commas: by default that of QC_PRINT_AFTER.

    ArgumentError for a name that is no stage, before anything is compiled.
    """
    given = os.environ.get("QC_PRINT_AFTER", "") if text is None else text
    names = frozenset(name.strip() for name in given.split(",") if name.strip())
    for name in sorted(names - {*stages, ALL, CHANGE}):
        near = difflib.get_close_matches(name, [*stages, ALL, CHANGE], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ArgumentError(f"print after '{name}': there is no such stage{hint} (all, change, {', '.join(stages)})")
    return names


def _print_after(name: str, text: str, *, changed: bool) -> None:
    """Prints a text to stderr under a line that names the stage."""
    if sys.stderr is None:  # closed by the caller
        return
    shown = coloured(text, "ir") if has_colours(sys.stderr) else text
    print(f"// ----- after {name}{'' if changed else ' (unchanged)'}\n{shown.rstrip()}", file=sys.stderr, flush=True)
