"""A run of matmul_cpu.py as text and as Markdown, and its plots. A run is what it writes as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_marks import between

from . import growth, plots

CELLS = "<!-- matmul figures -->", "<!-- end of matmul figures -->"
GROWTH = "<!-- growth figures -->", "<!-- end of growth figures -->"
KINDS = {"fp32": "fp32", "bf16": "bf16", "int8": "int8 rows"}
Run = dict[str, Any]


def share(row: dict[str, Any]) -> str:
    return "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"


def heading(cell: dict[str, Any]) -> str:
    """What was measured, the limits before and after, and what others took."""
    low, high = cell["limits"]
    rates = [
        f"{name} {low[name] / 1e9:.0f}, {high[name] / 1e9:.0f}" if low[name] else f"{name} none"
        for name in ("bandwidth", "fp32", "bf16", "int8")
    ]
    said = f"M {cell['m']}, N {cell['n']}, K {cell['k']}: {'; '.join(rates)} (G/s before, after)"
    said += f"; others took {cell['others']:.1%} of the cores, measured {cell['tries']} time(s)"
    return said + (", DISTURBED" if cell["disturbed"] else "")


def text(cell: dict[str, Any]) -> str:
    """A cell's table."""
    lines = [
        heading(cell),
        f"  {'product':24} {'kind':>5} {'us':>10} {'quartiles':>21} {'limit':>6} {'by':>6} {'error':>8}",
    ]
    for row in cell["rows"]:
        quartiles = f"{row['low_us']:.1f} … {row['high_us']:.1f}"
        lines.append(
            f"  {row['product']:24} {row['kind']:>5} {row['us']:>10.1f} {quartiles:>21} {share(row):>6} "
            f"{row['bound'] or '?':>6} {row['error']:>8.1e}"
        )
    return "\n".join([*lines, *(f"  missing: {name}: {why}" for name, why in cell["missing"].items())])


def shapes(run: Run) -> list[tuple[int, int]]:
    return list(dict.fromkeys((cell["n"], cell["k"]) for cell in run["cells"]))


def cells_of(run: Run, n: int, k: int) -> list[dict[str, Any]]:
    return [cell for cell in run["cells"] if (cell["n"], cell["k"]) == (n, k)]


def table(run: Run, n: int, k: int) -> list[str]:
    """Every product against M: its time, its share of the limit, and what the limit is."""
    cells = cells_of(run, n, k)
    names = dict.fromkeys(name for cell in cells for name in cell["products"])
    found = [{row["product"]: row for row in cell["rows"]} for cell in cells]
    heads = [f"M = {cell['m']}" + (" (disturbed)" if cell["disturbed"] else "") for cell in cells]
    out = [f"| {n} × {k} | {' | '.join(heads)} | limit | without a figure |", "|---" * (len(cells) + 3) + "|"]
    for name in names:
        rows = [each.get(name) for each in found]
        texts = [f"{row['us']:.0f} µs {share(row)}".strip() if row else "–" for row in rows]
        bounds = dict.fromkeys(row["bound"] or "unknown" for row in rows if row)
        reasons = dict.fromkeys(cell["missing"][name] for cell in cells if name in cell["missing"])
        out.append(f"| {name} | {' | '.join(texts)} | {', then '.join(bounds)} | {'; '.join(reasons)} |")
    return out


def limits(run: Run) -> list[str]:
    out = [
        "| N × K, M | read, GB/s | fp32, GFLOP/s | bf16, GFLOP/s | int8, GOP/s | others' share | times measured |",
        "|---" * 7 + "|",
    ]
    for cell in run["cells"]:
        before, after = cell["limits"]
        pairs = [
            f"{before[name] / 1e9:.0f} … {after[name] / 1e9:.0f}" if before[name] else "none"
            for name in ("bandwidth", "fp32", "bf16", "int8")
        ]
        name = f"{cell['n']} × {cell['k']}, {cell['m']}"
        out.append(f"| {name} | {' | '.join(pairs)} | {cell['others']:.1%} | {cell['tries']} |")
    return out


def rate_plots(run: Run) -> dict[str, str]:
    """Operations per second against M: a plot for each shape and kind of arithmetic."""
    found = {}
    for n, k in shapes(run):
        cells = cells_of(run, n, k)
        for kind, words in KINDS.items():
            rows = [(cell["m"], row) for cell in cells for row in cell["rows"] if row["kind"] == kind]
            names = dict.fromkeys(row["product"] for _, row in rows)
            drawn = [
                plots.Line(
                    name,
                    [(m, 2e-3 * m * n * k / row["us"]) for m, row in rows if row["product"] == name],
                    next(row["ours"] for _, row in rows if row["product"] == name),
                )
                for name in names
            ]
            if drawn:
                title = f"{n} × {k}, arithmetic in {words}"
                found[f"matmul-{n}x{k}-{kind}"] = plots.lines(title, "rows M", "GOP/s", drawn)
    return found


def growth_plots(run: Run) -> dict[str, str]:
    """Time against one size: a plot for each sweep."""
    found = {}
    for sweep in run["growth"]:
        drawn = [
            plots.Line(
                f"{each['product']}, {each['threads']} thread{'s' * (each['threads'] > 1)}",
                list(zip(sweep["sizes"], each["us"], strict=True)),
                each["threads"] > 1,
                frozenset(point["size"] for point in each["outliers"]),
            )
            for each in sweep["lines"]
        ]
        axis = {"m": "rows M", "n": "rows of the weight, N", "k": "columns, K"}[sweep["axis"]]
        found[f"growth-{sweep['name']}"] = plots.lines(sweep["title"], axis, "µs", drawn)
    return found


def growth_text(run: Run) -> list[str]:
    """A line for each point above its trend."""
    counted = sum(len(each["us"]) for sweep in run["growth"] for each in sweep["lines"])
    found = [
        f"{sweep['title']}, {each['product']}, {each['threads']} thread(s): {sweep['axis'].upper()} = "
        f"{point['size']:g} takes {point['ratio']:.2f} times the trend of its neighbours"
        + " (others disturbed the line)"
        * each["disturbed"]
        for sweep in run["growth"]
        for each in sweep["lines"]
        for point in each["outliers"]
    ]
    return [f"{len(found)} of {counted} points are above {growth.ALLOWED} times the trend of their neighbours.", *found]


def shown(images: Sequence[str], folder: str) -> list[str]:
    """The lines that show plots, each behind an empty one."""
    return [line for image in images for line in ("", f"![{image}]({folder}/{image}.svg)")]


def cells_page(run: Run, images: Sequence[str], folder: str) -> str:
    """The part of a page between CELLS."""
    versions = "".join(f", {name} {version}" for name, version in run["versions"].items())
    out = [
        f"{run['machine']}, threads for everybody: {run['threads']}, {run['isa']}, {run['date']}{versions}. Medians "
        f"of {run['rounds']} rounds in turns.",
    ]
    for n, k in shapes(run):
        out += ["", *table(run, n, k)]
    out += ["", *limits(run)]
    if run["missing"]:
        out += ["", *(f"- missing: {name}: {why}" for name, why in run["missing"].items())]
    return "\n".join([*out, *shown(images, folder)])


def growth_page(run: Run, images: Sequence[str], folder: str) -> str:
    """The part of a page between GROWTH."""
    first, *rest = growth_text(run)
    on = f"{run['machine']}, {run['isa']}, {run['date']}. {first}"
    return "\n".join([on, *[""] * bool(rest), *(f"- {line}" for line in rest), *shown(images, folder)])


def write(path: Path, run: Run) -> list[Path]:
    """Puts what the run has of cells and of growth between the page's markers of these, and plots into a folder beside
    the page, named like it. ValueError unless each marker that is needed is there once."""
    folder, filled, images = path.with_suffix(""), path.read_text(encoding="utf-8"), dict[str, str]()
    for has, marks, part, plotted in (
        (run["cells"], CELLS, cells_page, rate_plots), (run["growth"], GROWTH, growth_page, growth_plots),
    ):  # fmt: skip
        if has:
            drawn = plotted(run)
            filled = between(filled, *marks, part(run, list(drawn), folder.name), str(path))
            images |= drawn
    folder.mkdir(exist_ok=True)
    written = [folder / f"{name}.svg" for name in images]
    for file, drawn in zip(written, images.values(), strict=True):
        file.write_text(drawn, encoding="utf-8")
    path.write_text(filled, encoding="utf-8")
    return written
