"""Drawings as shapes, printed as SVG with the standard library, or as PNG with Pillow.

Pillow brings a font of its own.  A renderer of SVG would take the system's fonts, and leave texts out where there are
none.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from qcompiler.errors import ArgumentError, MissingDependencyError
from qcompiler.runtime.files import replacing

FONT = 11
"""Pixels of the letters."""

SCALE, FINER = 2, 3
"""A PNG has so many pixels for each of the drawing's, and is drawn so many times finer, since Pillow's
edges are not smooth."""

TEXT = "#222222"
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Line:
    """Through all points (x, y)."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0


@dataclass(frozen=True)
class Circle:
    """A filled circle; `title` is shown where the pointer rests (in SVG)."""

    x: float
    y: float
    radius: float
    colour: str
    title: str = ""


@dataclass(frozen=True)
class Bar:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""


@dataclass(frozen=True)
class Words:
    """A text that begins at, is centred on, or ends at x; y is its baseline."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"


Shape = Line | Circle | Bar | Words


@dataclass(frozen=True)
class Drawing:
    """Shapes on white, the later ones on top."""

    width: float
    height: float
    shapes: Sequence[Shape]

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" height="{self.height:.0f}" '
            f'font-family="sans-serif" font-size="{FONT}"><rect width="100%" height="100%" fill="white"/>'
        )
        return "\n".join([head, *map(_element, self.shapes), "</svg>", ""])

    def png(self) -> bytes:
        """MissingDependencyError without Pillow."""
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise MissingDependencyError(
                "a drawing as PNG needs Pillow, which is not installed: pip install 'qcompiler[plot]' (that is "
                "pillow); a name that ends in .svg needs nothing"
            ) from error
        size = round(self.width) * SCALE, round(self.height) * SCALE
        image = Image.new("RGB", (size[0] * FINER, size[1] * FINER), "white")
        pen = _Pen(ImageDraw.Draw(image), SCALE * FINER)
        for shape in self.shapes:
            pen.draw(shape)
        out = io.BytesIO()
        image.resize(size, Image.Resampling.LANCZOS).save(out, "PNG", optimize=True)
        return out.getvalue()


def save(path: str | Path, drawing: Drawing) -> None:
    """Writes a drawing. ArgumentError for a name that ends in neither .svg nor .png; MissingDependencyError."""
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ArgumentError(f"{path}: drawings are SVG or PNG; give a name that ends in .svg or .png")
    data = drawing.png() if path.suffix == ".png" else drawing.svg().encode()
    with replacing(path) as file:
        file.write(data)


def check_drawable(path: Path | None) -> None:
    """MissingDependencyError for a .png where Pillow is missing, before any work is done."""
    if path is not None and path.suffix == ".png":
        Drawing(1, 1, ()).png()


def _element(shape: Shape) -> str:
    match shape:
        case Line():
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            return f'<polyline points="{line}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
        case Circle():
            place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
            return f'<circle {place} fill="{shape.colour}"><title>{escape(shape.title)}</title></circle>'
        case Bar():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
            return f'<rect {place} fill="{shape.colour}"><title>{escape(shape.title)}</title></rect>'
        case Words():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"'
            return f'<text {place} fill="{TEXT}">{escape(shape.text)}</text>'


class _Pen:
    """Draws shapes on a picture of `scale` pixels for each of the drawing's."""

    def __init__(self, on: Any, scale: int) -> None:
        from PIL import ImageFont

        self._on, self._scale, self._font = on, scale, ImageFont.load_default(FONT * scale)

    def draw(self, shape: Shape) -> None:
        by = self._scale
        match shape:
            case Line():
                points = [(x * by, y * by) for x, y in shape.points]
                self._on.line(points, fill=shape.colour, width=max(1, round(shape.width * by)), joint="curve")
            case Circle():
                self._on.circle((shape.x * by, shape.y * by), shape.radius * by, fill=shape.colour)
            case Bar():
                low = shape.x * by, shape.y * by
                self._on.rectangle((*low, low[0] + shape.width * by, low[1] + shape.height * by), fill=shape.colour)
            case Words():
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                self._on.text((shape.x * by, shape.y * by), shape.text, fill=TEXT, font=self._font, anchor=anchor)


__all__ = ["Bar", "Circle", "Drawing", "Line", "Shape", "Words", "check_drawable", "save"]
