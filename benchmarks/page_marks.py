"""Figures in a page: what stands between two marks, each on a line of its own."""

from __future__ import annotations


def between(page: str, begin: str, end: str, text: str, where: str) -> str:
    """`page` with `text` between the marks. ValueError, naming `where`, unless both are there, once, in order."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{where} needs the line {begin} and, behind it, the line {end}, each once")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"
