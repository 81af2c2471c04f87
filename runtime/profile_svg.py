"""A flame-like chart of a profile as SVG: the width of a box is time, and the boxes under it are its parts.

By module the rows are the parts of module paths ("model", "layers", "3", "mlp", …) and then the kernels; by kernel
they are the kind, the kernel, and the module.  Boxes keep the order in which they first run.  Where the pointer rests,
a box shows its time, its share, and its share of the machine's limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal
from zlib import crc32

from qcompiler.units import counted, printable

if TYPE_CHECKING:
    from qcompiler.runtime.profile import Profile, StepProfile

WIDTH, ROW, TOP, LETTER = 1200, 18, 40, 6.5
"""Pixels: the drawing, a row, the heading, and about the width of a letter of its text."""

THINNEST = 0.2
"""Boxes that are less wide are not drawn; the heading counts them."""

DEEPEST = 40
"""Parts of a module path that get a row each; what lies deeper is one box. Paths may come from an untrusted file."""

PALETTE = ("#8ab6d6", "#f2b880", "#a8d5a2", "#e6a0a0", "#c3b1e1", "#f4d98b", "#9fd3d0", "#d9b99b")


@dataclass
class Box:
    """A part of the time, and its own parts by name."""

    name: str
    kind: str
    us: float = 0.0
    limit_us: float = 0.0
    known_us: float = 0.0
    launches: int = 0
    parts: dict[str, Box] = field(default_factory=dict)

    def add(self, step: StepProfile) -> None:
        self.us += step.us
        self.launches += 1
        if step.limit_us is not None:
            self.limit_us += step.limit_us
            self.known_us += step.us


def flame(found: Profile, by: Literal["module", "kernel"]) -> str:
    """The chart."""
    root = Box(found.entry, "")
    for step in found.steps:
        box = root
        box.add(step)
        for name in _frames(step, by):
            box = box.parts.setdefault(name, Box(name, step.kind))
            box.add(step)
    depth = _depth(root)
    scale = WIDTH / root.us if root.us else 0.0
    drawn = list(_boxes(root, 0.0, 0, scale, root.us))
    thin = _count(root) - len(drawn)
    steps = counted(len(found.steps), "step")
    heading = f"{found.entry} by {by}: {found.steps_us:.1f} us in {steps}, measured on {found.device}"
    if thin:
        heading += f"; {thin} {'box is' if thin == 1 else 'boxes are'} too thin to draw"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{TOP + ROW * depth + 10}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, f'<text x="4" y="24" font-size="13">{_text(heading)}</text>', *drawn, "</svg>", ""])


def _frames(step: StepProfile, by: Literal["module", "kernel"]) -> list[str]:
    kernel = step.kernel or step.kind
    if by == "kernel":
        return [step.kind, kernel, step.place or "(not known)"]
    frames = step.frames or ("(not known)",)
    if len(frames) > DEEPEST:
        frames = (*frames[: DEEPEST - 1], ".".join(frames[DEEPEST - 1 :]))
    return [*frames, kernel]


def _text(text: str) -> str:
    """The text inside of an element. XML has no control characters: they are spelled out."""
    return escape(printable(text))


def _depth(box: Box) -> int:
    return 1 + max((_depth(part) for part in box.parts.values()), default=0)


def _count(box: Box) -> int:
    return 1 + sum(_count(part) for part in box.parts.values())


def _boxes(box: Box, x: float, row: int, scale: float, total: float) -> Iterator[str]:
    """The box at `x` and its parts below it, from left to right."""
    width = box.us * scale
    if width < THINNEST:
        return
    colour = PALETTE[crc32(box.kind.encode()) % len(PALETTE)] if not box.parts else "#dddddd"
    title = f"{box.name}: {box.us:.1f} us, {box.us / total:.1%}, {box.launches} launches"
    if box.known_us:
        title += f", {box.limit_us / box.known_us:.0%} of the machine's limit"
    y, letters = TOP + ROW * row, int((width - 6) / LETTER)
    label = box.name if len(box.name) <= letters else f"{box.name[: letters - 1]}…" if letters > 2 else ""
    yield (
        f'<g><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 1}" fill="{colour}" stroke="white" '
        f'stroke-width="0.5"><title>{_text(title)}</title></rect>'
        + (f'<text x="{x + 3:.1f}" y="{y + 13}" pointer-events="none">{_text(label)}</text>' if label else "")
        + "</g>"
    )
    for part in box.parts.values():
        yield from _boxes(part, x, row + 1, scale, total)
        x += part.us * scale
