"""Figures in a page: what stands between two marks, each on a line of its own."""

from __future__ import annotations

from collections.abc import Sequence

NOT_MEASURED = "not measured"


def between(page: str, begin: str, end: str, text: str, where: str) -> str:
    """`page` with `text` between the marks. ValueError, naming `where`, unless both are there, once, in order."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{where} needs the line {begin} and, behind it, the line {end}, each once")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def rows_between(
    page: str, begin: str, end: str, titles: Sequence[str], rows: Sequence[Sequence[str]], where: str, *, keys: int = 1
) -> str:
    """`page` with `rows` put into the Markdown table between the marks. ValueError as `between`.

    The first `keys` cells name a row. A row that the table has gets the new cells and keeps the others; other rows stay
    as they are, and so do columns that `titles` does not name. A cell without a figure says so.
    """
    between(page, begin, end, "", where)  # checks the marks
    old = [_cells(line) for line in page.split(begin)[1].split(end, maxsplit=1)[0].strip().splitlines()]
    before = old[0] if old else []
    columns = list(dict.fromkeys([*titles[:keys], *before, *titles[keys:]]))
    table = {tuple(each[:keys]): dict(zip(before, each, strict=True)) for each in old[2:]}
    for each in rows:
        table.setdefault(tuple(each[:keys]), {}).update(zip(titles, each, strict=True))
    cells = [columns, *([each.get(title, NOT_MEASURED) for title in columns] for each in table.values())]
    head, *body = (f"| {' | '.join(each)} |" for each in cells)
    rule = f"|{'---|' * keys}{'---:|' * (len(columns) - keys)}"
    return between(page, begin, end, "\n".join([head, rule, *body]), where)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
