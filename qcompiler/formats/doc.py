"""Writes docs/formats.md and a page for each family below docs/formats/ from the declarations.

python -m qcompiler.formats.doc docs
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from qcompiler.formats import FORMATS
from qcompiler.formats.base import Declaration, Field, Format
from qcompiler.formats.diagram import diagram, entry_type, served

_GENERATED = """\
Generated from the declarations in `qcompiler/formats/` by `make docs`. Do not edit: a test compares the page with the
declarations.
"""

_HEADER = f"""\
# Storage formats

{_GENERATED}
A matrix of N rows and K columns is one buffer of canonical bytes: the sections of its format in order, each starting at
a multiple of its item size (gap bytes are zero). The entries of a section follow the elements in row-major order: an
entry that covers *c* elements serves elements *c·i* to *c·(i+1) − 1*. A format with one record for each block has one
section, the records. Items are little-endian. Values are computed in fp32, one rounding per operation. The NumPy
decoder of `qcompiler.formats` is the definition.

In the pictures, the highest bits of a byte are on the left, `i` counts bytes, and `codes[i + 16]` is the code
of element i + 16 of the block.

Encoders accept float32, float16, bfloat16 and float64 (rounded to fp32 first). NaN and infinity are errors that name
the row and the column. [packings.md](packings.md) says how the checkpoints of other systems map to these formats, and
[quality.md](quality.md) shows the quality of each format.

| format | family | bits per weight | blocks |
|---|---|---|---|
"""

FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "bitsandbytes": ("Formats of bitsandbytes", ("nf4", "fp4", "llm_int8")),
    "integers": ("Integers", ("integers",)),
    "gguf": ("Formats of GGUF", ("ggml_32", "k_quants", "iq4", "i_quants", "ternary")),
    "floats": ("Small floats", ("fp8", "mx", "nvfp4")),
    "trellis": ("Trellis codes", ("tq",)),
}
"""The page below docs/formats/: its title, and the modules of `qcompiler.formats` whose formats it shows."""


def variants(cls: type[Format]) -> Iterator[Format]:
    """One format for each combination of its boolean and `shown` parameters, everything else at its default."""
    flags = [p for p in cls.parameters if p.shown or isinstance(p.default, bool)]
    for values in itertools.product(*(p.choices for p in flags)):
        yield cls(**{p.name: v for p, v in zip(flags, values, strict=True)})


def family_of(cls: type[Format]) -> str:
    """The page that shows a format. KeyError if no family names the format's module."""
    module = cls.__module__.rpartition(".")[2]
    for page, (_, modules) in FAMILIES.items():
        if module in modules:
            return page
    raise KeyError(f"no family in {__name__} names the module {cls.__module__}")


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/."""
    made = {"formats.md": _index()}
    for page, (title, _) in FAMILIES.items():
        members = [cls for cls in FORMATS.values() if family_of(cls) == page]
        head = f"# {title}\n\n{_GENERATED}\n[formats.md](../formats.md) says how to read this page.\n"
        made[f"formats/{page}.md"] = "\n".join([head, *map(_format_page, members)])
    return made


def _index() -> str:
    """The text that all formats share, and one line for each format."""
    lines = []
    for cls in FORMATS.values():
        shown = cls()
        page = family_of(cls)
        link = f"[`{cls.name}`](formats/{page}.md#{cls.name.lower()})"
        bits = f"{shown.bits_per_weight(4096, 4096):.5g}"
        lines.append(f"| {link} | {FAMILIES[page][0]} | {bits} | {_blocks(shown.declaration)} |\n")
    note = "\nBits per weight are those of a matrix of 4096 × 4096 with default parameters.\n"
    return _HEADER + "".join(lines) + note


def _format_page(cls: type[Format]) -> str:
    lines = [f"## {cls.name}", ""]
    if cls.parameters:
        lines += ["| parameter | default | choices | meaning |", "|---|---|---|---|"]
        for p in cls.parameters:
            lines.append(f"| `{p.name}` | {p.default} | {', '.join(map(str, p.choices))} | {p.meaning} |")
        lines.append("")
    for fmt in variants(cls):
        lines += _variant(fmt)
    return "\n".join(lines)


def _variant(fmt: Format) -> list[str]:
    d = fmt.declaration
    lines = [f"### `{fmt}`", "", d.summary + ".", "", f"- value: `{d.decode.text}`", f"- blocks: {_blocks(d)}"]
    lines.append(f"- bits per weight at 4096 × 4096: {fmt.bits_per_weight(4096, 4096):.7g}")
    if fmt.takes_importance:
        lines.append("- the encoder accepts an importance for the columns")
    if d.table is not None:
        lines.append(f"- table: {_values(d.table)}")
    lines += [f"- {name}: {_values(values)}" for name, values in d.tables.items()]
    lines += ["", "```text", *diagram(fmt), "```"]
    part = "field" if d.interleaved else "section"
    lines += ["", f"| {part} | entry | one for each | packing |", "|---|---|---|---|"]
    lines += [f"| `{f.name}` | {entry_type(f)} | {served(f)} | {_packing(f)} |" for f in d.fields]
    lines += ["", "Numerics:", ""]
    for label, text in (
        ("ties", d.numerics.ties),
        ("zero block", d.numerics.zero_block),
        ("scale clamp", d.numerics.scale_clamp),
        ("zero point", d.numerics.zero_point),
        ("reciprocal", d.numerics.reciprocal),
        ("reference", d.reference),
    ):
        lines.append(f"- {label}: {text}")
    return [*lines, ""]


def _values(table: tuple[float, ...]) -> str:
    """A table's values; of a long table the ends and the middle."""
    texts = [f"{v:.10g}" for v in table]
    if len(texts) > 32:
        half = len(texts) // 2
        texts = [*texts[:3], "…", *texts[half - 2 : half + 2], "…", *texts[-3:], f"({len(table)} values)"]
    return ", ".join(texts)


def _blocks(d: Declaration) -> str:
    if d.block == "row":
        return "one per row, any K"
    if d.blocking == "flat":
        return f"{d.block} elements of the flattened matrix, across rows; any shape, the last block may be short"
    if d.tail == "short":
        return f"{d.block} elements of a row; any K, a row's last block may be short"
    return f"{d.block} elements of a row; K must be a multiple of {d.block}"


def _packing(f: Field) -> str:
    if f.packing is not None:
        return f.packing.describe()
    if f.bits >= 8:
        return f"{f.bits // 8} byte{'s' if f.bits > 8 else ''}"
    return f"{8 // f.bits} per byte, the first in the {'lowest' if f.order == 'low_first' else 'highest'} bits"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "formats").mkdir(exist_ok=True)
    for path, text in pages().items():
        (folder / path).write_text(text, encoding="utf-8")
