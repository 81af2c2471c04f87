"""The texts of stages, from a program file or a folder of `dump_ir`: whole, the ops that match, what two differ in.

    texts = read_stages("model.qca")
    texts.text("fuse-epilogues")
    texts.matching(re.compile(r"layers\\.0\\.mlp"))          # in every stage
    difference(texts.text("import"), texts.text("dce"))

All of this works on lines and needs no parser, so that it is fast for large models and safe for damaged files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from qcompiler.errors import ArgumentError
from qcompiler.inspect.files import names_of, stage_files, stage_name
from qcompiler.runtime.program_file import read_program
from qcompiler.units import printable

_DUMP = re.compile(r"\d+-[a-z0-9-]+\.(?:txt|mlir|cpp|cu)")
_VALUE = re.compile(r"%[\w.$-]+")
_DEFINED = re.compile(r"^\s*(%[\w.$-]+(?:\s*,\s*%[\w.$-]+)*)(?::\d+)?\s*=")


@dataclass(frozen=True)
class Op:
    """An op with its regions, or a function of C++ with the comments above it, as it stands in a stage's text.

    `line` counts from 1.
    """

    stage: str
    line: int
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StageTexts:
    """The texts of the stages of a program, by file name, in order. `where` names the program in messages."""

    where: str
    files: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(stage_name, self.files))

    def text(self, stage: str) -> str:
        """The text after a stage, by its name, number or file name; `emit-kernels` is the C++.

        ArgumentError lists the stages that there are.
        """
        for file in self.files:
            if stage in names_of(file):
                return printable(self.files[file])
        raise ArgumentError(f"{self.where} holds no stage '{stage}'; it holds: {', '.join(self.names) or 'none'}")

    def matching(self, pattern: re.Pattern[str], stage: str | None = None) -> dict[str, list[Op]]:
        """The outermost ops in which the pattern is found, by stage: of one stage, or of all.

        It is searched in an op's first and last line, where its name, its operands, its path and its types stand,
        not in its regions; and in the comments above it.
        """
        chosen = self.names if stage is None else (stage,)
        return {name: list(_matching(name, self.text(name), pattern)) for name in chosen}


def read_stages(path: str | Path) -> StageTexts:
    """The stages in a program file, or in a folder that `--dump-ir` has written. Raises the errors of `read_program`,
    and ArgumentError for a folder without dumps."""
    path = Path(path)
    if not path.is_dir():
        _, texts = read_program(path)
        return StageTexts(str(path), _Chosen(texts, stage_files(texts)))
    names = sorted(each.name for each in path.iterdir() if _DUMP.fullmatch(each.name) and each.is_file())
    if not names:
        raise ArgumentError(f"'{path}' is a folder without dumps of stages, which `qc compile --dump-ir {path}` writes")
    return StageTexts(str(path), _Folder(path, names))


class _Chosen(Mapping[str, str]):
    """Some of the texts of a file, which are unpacked only when they are read."""

    def __init__(self, texts: Mapping[str, str], names: Sequence[str]) -> None:
        self._texts, self._names = texts, names

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Folder(Mapping[str, str]):
    """The files of a folder, which are read when they are asked for."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names

    def __getitem__(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- ops -------------------------------------------------------------------------------------------------------------


def _matching(stage: str, text: str, pattern: re.Pattern[str]) -> Iterator[Op]:
    lines = text.splitlines()
    ends, at = _ends(lines), 0
    while at < len(lines):
        begin = at
        while at < len(lines) and lines[at].lstrip().startswith("//"):
            at += 1
        if at == len(lines):
            return
        if not lines[at].strip() or lines[at].lstrip().startswith(("}", "^", "#")):
            at += 1
            continue
        end = ends.get(at, at)
        head = [*lines[begin : at + 1], *([lines[end]] if end > at else [])]
        if any(map(pattern.search, head)):
            yield Op(stage, begin + 1, "\n".join(lines[begin : end + 1]))
            at = end
        at += 1


def _ends(lines: Sequence[str]) -> dict[int, int]:
    """For each line that opens a region, the line that closes it: the next one of the same indentation with a brace."""
    found: dict[int, int] = {}
    open_at: dict[int, int] = {}  # indentation -> the line that opened
    for number, line in enumerate(lines):
        bare = line.lstrip()
        indent = len(line) - len(bare)
        if bare.startswith("}") and indent in open_at:
            found[open_at[indent]] = number
            if not bare.rstrip().endswith("{"):
                del open_at[indent]
        elif bare.rstrip().endswith("{"):
            open_at[indent] = number
    return found


def ops_text(found: Mapping[str, Sequence[Op]]) -> str:
    """The ops stage by stage. Stages that left them as they were, apart from the numbers of values, share a line."""
    parts: list[str] = []
    before, same = "", []
    for stage, ops in found.items():
        text = "\n".join(op.text for op in ops)
        bare = _VALUE.sub("%", text)
        if parts and bare == before:
            same.append(stage)
            continue
        if same:
            parts.append(f"// after {', '.join(same)}: the same")
        many = f"{len(ops)} op" + "s" * (len(ops) != 1)
        parts.append(f"// after {stage}: {many}" + (f"\n{text}" if ops else ""))
        before, same = bare, []
    return "\n".join([*parts, *([f"// after {', '.join(same)}: the same"] if same else [])])


# --- differences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """What stands in one text and not in the other. `hunks` are lines with " ", "-" or "+" in front."""

    removed: int
    added: int
    hunks: tuple[tuple[str, ...], ...]

    def text(self, first: str, second: str) -> str:
        """As `diff -u` prints it; the numbers of values count only where they tell values apart."""
        lines = [f"--- {first}", f"+++ {second}"]
        for hunk in self.hunks:
            lines += ["@@", *hunk]
        lines.append(f"= {self.removed} lines removed, {self.added} added")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def difference(first: str, second: str, context: int = 3) -> Difference:
    """Compares two texts of IR by line, up to renamed values.

    A pass that deletes one op renumbers all values behind it.  So lines are aligned without the numbers, by Ratcliff
    and Obershelp's matching as in difflib.  Then the definitions in aligned lines say which new value is which old one,
    and a line whose operands are other values than before counts as changed.
    """
    old, new = first.splitlines(), second.splitlines()
    script = _script(old, new)
    changes = [at for at, (mark, _) in enumerate(script) if mark != " "]
    shown = {near for at in changes for near in range(at - context, at + context + 1)}
    hunks: list[list[str]] = []
    for at, (mark, line) in enumerate(script):
        if at in shown:
            if at - 1 not in shown or at == 0:
                hunks.append([])
            hunks[-1].append(f"{mark}{line}")
    removed, added = (sum(mark == which for mark, _ in script) for which in "-+")
    return Difference(removed, added, tuple(map(tuple, hunks)))


def _script(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """All lines with what happened to them: " ", "-" or "+"."""
    bare_old, bare_new = ([_VALUE.sub("%", line) for line in lines] for lines in (old, new))
    # Equal ends are cut first: difflib's time grows with the square of what is left.
    head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(bare_old, bare_new, strict=False)))
    limit = min(len(old), len(new)) - head
    ends = zip(bare_old[::-1], bare_new[::-1], strict=False)
    tail = min(limit, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends)))
    middle = bare_old[head : len(old) - tail], bare_new[head : len(new) - tail]
    matcher = difflib.SequenceMatcher(None, *middle, autojunk=False)
    blocks = [(0, 0, head), *((a + head, b + head, size) for a, b, size in matcher.get_matching_blocks())]
    blocks.append((len(old) - tail, len(new) - tail, tail))
    script: list[tuple[str, str]] = []
    renamed: dict[str, str] = {}
    at_old = at_new = 0
    for a, b, size in blocks:
        script += [("-", line) for line in old[at_old:a]]
        renamed.update((value, "") for line in old[at_old:a] for value in _defined(line))
        script += [("+", line) for line in new[at_new:b]]
        for before, after in zip(old[a : a + size], new[b : b + size], strict=True):
            script += [(" ", after)] if _same(before, after, renamed) else [("-", before), ("+", after)]
        at_old, at_new = a + size, b + size
    return script


def _defined(line: str) -> list[str]:
    """The values on the left of a line's `=`."""
    found = _DEFINED.match(line)
    return _VALUE.findall(found[1]) if found else []


def _same(before: str, after: str, renamed: dict[str, str]) -> bool:
    """Whether two lines that are equal without numbers have the same operands; learns what they define. A value whose
    definition is gone equals no other."""
    values = list(zip(_VALUE.findall(before), _VALUE.findall(after), strict=True))
    if before.lstrip().startswith("^") or "func.func" in before:  # arguments of a block or of a function
        renamed.update(values)
        return True
    count = len(_defined(before))
    renamed.update(values[:count])
    return all(renamed.get(old, new) == new for old, new in values[count:])


__all__ = ["Difference", "Op", "StageTexts", "difference", "ops_text", "read_stages"]
