"""A run as Markdown, in this order: is it right, can the times be trusted, where do they go, which predictions were
missed, and only then every figure.

    text(report)     the text that `gpu_report.py` prints, and writes into docs/performance.md
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpubench.cells import KEYS, MS, OURS, PEERS, PREFILL, SHAPES, WEIGHT_ONLY
from gpubench.claims import between, copy_rate, shown
from gpubench.document import Document, Row, counted
from gpubench.marks import Mark, judged, mark

LAYER_TIMES = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}
"""The number of times a decoder layer runs a linear of (N, K)."""

WORST = 15
CACHED, FAST = 4 << 20, 1.1
"""Bytes below which a cache may serve a call, and the excess over a copy's rate that is not noise."""

FEW_ROWS = 16
"""Up to this many rows of x a linear is judged by bytes, above by operations."""


@dataclass
class Report:
    """A run with its predictions. `check` is the rest of a gpu-check.json, as plain JSON."""

    document: Document
    claims: Sequence[dict[str, Any]] = ()
    frozen: str = ""
    source: str = ""
    check: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return self.document.cells

    def by_id(self) -> dict[str, Row]:
        return {row.id: row for row in self.rows}


def text(report: Report) -> str:
    """All sections that are not empty."""
    parts = [_head(report), *(part(report) for part in SECTIONS)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; "" without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def section(title: str, *blocks: str) -> str:
    found = [block for block in blocks if block]
    return "\n\n".join([f"### {title}", *found]) if found else ""


def _head(report: Report) -> str:
    document, env = report.document, report.document.environment
    what = env.get("gpu") or document.device or "no device"
    packages = ", ".join(f"{name} {version}" for name, version in (env.get("packages") or {}).items() if version)
    lines = [
        f"{what} ({env.get('arch', '?')}, CUDA {env.get('driver_cuda', '?')}), {document.began[:10] or 'no date'}, "
        f"commit {document.commit or 'unknown'}; {packages or 'packages unknown'}.",
        f"{len(report.rows)} cells: {counted(report.rows)}; {document.seconds:.0f} s of {document.budget:.0f}."
        + (f" Raw samples: `{report.source}`." if report.source else ""),
    ]
    if not document.timed:
        lines.append("**No GPU: cells ran for their results; nothing was timed.**")
    if document.kind == "stub":
        lines.append("**A stub of the driver stood in the GPU's place: times mean nothing.**")
    if document.scale != "full":
        lines.append("Sizes are small ones; cells keep the names of the full sizes.")
    if document.restarts:
        lines.append(f"{len(document.restarts)} new processes: {'; '.join(document.restarts)}.")
    return "\n".join(lines)


# --- is it right? ----------------------------------------------------------------------------------------------------


def _wrong(report: Report) -> str:
    bad = [row for row in report.rows if row.status in ("wrong", "failed")]
    rows = [
        (row.id, row.status, ", ".join(f"{m} {_error(e)}" for m, e in row.errors.items()) or "–", row.reason or "–")
        for row in bad
    ]
    matrix = [
        (f"{f.get('template')} {f.get('format') or ''} {f.get('shape')}", f"wrong, {f.get('mode')}",
         _error(f.get("error")), f.get("reason") or _mismatched(f))
        for f in report.check.get("failures", ())
    ]  # fmt: skip
    findings = [
        (f"{p.get('kernel')}", f"{p.get('tool')}", "–", "; ".join(p.get("findings", ())[:2]) or p.get("reason", ""))
        for p in report.check.get("profile", ())
        if not p.get("ok")
    ]
    return section("What is wrong", table(("what", "how", "error", "why"), [*rows, *matrix, *findings]))


def _error(value: Any) -> str:
    return "none, or NaN" if value is None else f"{value:.1e}"


def _mismatched(failure: dict[str, Any]) -> str:
    count = failure.get("mismatches")
    return "" if count is None else f"{count} of {failure.get('elements')} elements differ from an eager launch's"


def _learned(report: Report) -> str:
    rows = []
    for each in report.check.get("learned", ()):
        seen = each["seen"].splitlines()[0] if each["seen"] else ""
        rows.append((each["case"], each["expected"], seen + ("" if each["expected"] == each["seen"] else " (differs)")))
    return section("What this driver does where CUDA is silent", table(("case", "expected", "seen"), rows))


def _missing(report: Report) -> str:
    document = report.document
    peers = [(name, reason) for name, reason in sorted(document.peers_missing.items())]
    left = [row.id for row in report.rows if row.status == "left out"]
    more = f"Left out for lack of time: {len(left)} cells, the first of them `{left[0]}`." if left else ""
    return section("What did not run", table(("peer", "reason"), peers), more)


# --- can the times be trusted? ---------------------------------------------------------------------------------------


def _machine(report: Report) -> str:
    rows, document = [], report.document
    for moment in dict.fromkeys(probe.moment for probe in document.probes):
        found = {probe.name: probe for probe in document.probes if probe.moment == moment}
        copies = found["copy"].values.get("terabytes_per_second") if "copy" in found else None
        clocks = found["clocks"].values if "clocks" in found else {}
        launches = found["launch"].values if "launch" in found else {}
        rows.append(
            (
                moment, f"{statistics.median(copies):.2f} TB/s" if copies else "–",
                clocks.get("clocks.sm", "–"), clocks.get("temperature.gpu", "–"),
                clocks.get("clocks_event_reasons.active", "–"), _number(launches.get("node_us"), 2),
                _number(launches.get("eager_device_us"), 2),
            )
        )  # fmt: skip
    spreads = sorted(((row.spread, row.id) for row in report.rows if row.spread is not None), reverse=True)
    noisy = [f"`{name}` {spread:.0%}" for spread, name in spreads if spread > 0.1][:5]
    said = f"Rounds that differ by more than 10 %: {', '.join(noisy)}." if noisy else ""
    if not document.timed:
        return ""
    rate = copy_rate(document) or float("inf")
    fast = [
        row.id for row in report.rows if row.median and row.nbytes > CACHED and row.nbytes / row.median > FAST * rate
    ]
    if fast:
        said += f" Faster than a copy, so not from memory: {', '.join(f'`{name}`' for name in fast[:5])}" + (
            f" and {len(fast) - 5} more." if len(fast) > 5 else "."
        )
    head = ("moment", "copy", "SM clock", "°C", "throttling", "µs a node", "µs an eager launch")
    return section("The machine during the run", table(head, rows), said.strip())


# --- claims and predictions ------------------------------------------------------------------------------------------


def _claims(report: Report) -> str:
    if not report.document.timed:
        return ""
    rows = []
    for each in judged(report.document, report.claims):
        claim, unit = each.claim, each.claim["unit"]
        rows.append(
            (
                claim["name"], between(claim["low"], claim["high"], unit),
                "–" if each.value is None else shown(each.value, unit), each.verdict,
                "–" if claim.get("aim") is None else f"{shown(claim['aim'], unit)} {each.aim}".strip(),
            )
        )  # fmt: skip
    said = f"Predictions of {report.frozen}." if report.frozen and rows else ""
    return section("What was predicted", said, table(("", "predicted", "measured", "prediction", "aim"), rows))


def marked(report: Report) -> list[tuple[Row, Mark]]:
    return [(row, found) for row in report.rows if (found := mark(row)) is not None]


def _marks(report: Report) -> str:
    found = marked(report)
    if not found:
        return ""
    counts = {verdict: sum(m.verdict == verdict for _, m in found) for verdict in ("right", "faster", "slower")}
    said = f"{counts['right']} of {len(found)} predicted cells are in their range, {counts['faster']} are faster, " \
           f"{counts['slower']} slower."  # fmt: skip
    missed = sorted((pair for pair in found if pair[1].verdict != "right"), key=lambda pair: -pair[1].factor)
    rows = [
        (
            f"`{row.id}`", f"{row.median:.1f}", f"{row.predicted['low_us']:.1f} to {row.predicted['high_us']:.1f}",
            f"{m.verdict} by {m.factor:.2f}×", row.predicted["bound"], f"{m.where} ({m.share:.0%})",
        )
        for row, m in missed[:WORST]
    ]  # fmt: skip
    head = ("cell", "µs", "predicted", "missed", "expected limit", "nearest limit")
    return section("Where predictions were missed most", said, table(head, rows))


# --- where the time goes ---------------------------------------------------------------------------------------------


def _step(report: Report) -> str:
    row = next((r for r in report.rows if r.kind == "layer" and r.median is not None), None)
    if row is None or row.median is None:
        return ""
    extra = row.extra
    steps: dict[str, list[dict[str, Any]]] = {}
    for each in extra.get("steps", ()):
        steps.setdefault(each["kernel"], []).append(each)
    rate, serial = copy_rate(report.document), statistics.median(extra.get("serial_us") or [row.median])
    floor = row.nbytes / rate if rate else None
    rows = []
    for name, group in sorted(steps.items(), key=lambda item: -sum(e.get("us", 0.0) for e in item[1])):
        took = sum(e.get("us", 0.0) for e in group)
        least = sum(e["nbytes"] for e in group) / rate if rate else None
        rows.append((f"`{name}`", str(len(group)), f"{took:.1f}", f"{took / serial:.0%}", _number(least, 1)))
    node = next((p.values.get("node_us") for p in report.document.probes if p.name == "launch" and p.values), None)
    count = int(extra.get("launches", 0))
    parts = [
        f"One layer of an 8 B Llama over {extra.get('keys')} keys, nf4: {row.median:.1f} µs as a captured graph of "
        f"{count} launches, {serial:.1f} µs on one stream, {_number(extra.get('eager_us'), 1)} µs eagerly.",
        f"Its bytes take {floor:.1f} µs at a copy's rate." if floor else "",
        f"{count} nodes that do nothing would take {count * node:.1f} µs." if node else "",
        "A launch's time is what the step is shorter without it.",
    ]
    body = table(("kernel", "launches", "µs", "of the step", "its bytes, µs"), rows)
    return section("Where a decode step's time goes", " ".join(part for part in parts if part), body)


def _lost(report: Report) -> str:
    """Microseconds per layer above the time to read its bytes: the possible gain per format."""
    rate = copy_rate(report.document)
    if rate is None:
        return ""
    known, rows = report.by_id(), []
    for engine in WEIGHT_ONLY:
        cells = [(known.get(f"linear/{engine}/{n}x{k}/m1"), times) for (n, k), times in LAYER_TIMES.items()]
        if any(row is None or row.median is None for row, _ in cells):
            continue
        took = sum((row.median or 0.0) * times for row, times in cells if row is not None)
        least = sum(row.nbytes / rate * times for row, times in cells if row is not None)
        wheres = [found.where for row, _ in cells if row is not None and (found := mark(row)) is not None]
        limit = ", ".join(dict.fromkeys(wheres)) or "–"
        rows.append((engine, f"{took:.1f}", f"{least:.1f}", f"{took - least:.1f}", f"{least / took:.0%}", limit))
    head = ("format", "µs of a layer's 7 linears", "their bytes, µs", "to be won, µs", "of copy", "nearest limits")
    return section("One row: what is to be won", table(head, rows))


# --- every figure ----------------------------------------------------------------------------------------------------


def _linears(report: Report) -> str:
    known, rate, blocks = report.by_id(), copy_rate(report.document), []
    for n, k in SHAPES:
        rows = []
        engines = [each for each in (*PEERS, *OURS) if any(f"linear/{each}/{n}x{k}/m{m}" in known for m in MS)]
        for m in MS:
            base = known.get(f"linear/torch/{n}x{k}/m{m}")
            cells = [known.get(f"linear/{engine}/{n}x{k}/m{m}") for engine in engines]
            if any(row is not None and row.median is not None for row in cells):
                rows.append((str(m), *(_cell(row, base, rate) for row in cells)))
        if rows:
            title = f"{n} × {k}: µs, share of copy bandwidth (M ≤ {FEW_ROWS}) or TFLOP/s, speed over torch's bf16"
            blocks += [title, table(("M", *engines), rows)]
    return section("Linears", *blocks)


def _cell(row: Row | None, base: Row | None, rate: float | None) -> str:
    if row is None or row.status == "left out":
        return ""
    if row.median is None:
        return row.status
    if row.m <= FEW_ROWS and rate:
        second = f"{row.nbytes / row.median / rate:.0%}"
    else:
        second = f"{row.operations / row.median / 1e6:.0f} T"
    found = mark(row)
    sign = "" if found is None or found.verdict == "right" else " ▲" if found.verdict == "slower" else " ▼"
    over = f", {base.median / row.median:.2f}×" if base is not None and base.median and row.engine != "torch" else ""
    return f"{row.median:.1f}, {second}{over}{sign}"


def _symbolic(report: Report) -> str:
    known, rows = report.by_id(), []
    for row in report.rows:
        fixed = known.get(row.id.removesuffix("/symbolic"))
        if row.rows != "symbolic" or row.median is None or fixed is None or fixed.median is None:
            continue
        rows.append((f"{row.engine} {row.n} × {row.k}", str(row.m), f"{fixed.median:.1f}", f"{row.median:.1f}",
                     f"{row.median / fixed.median:.2f}×"))  # fmt: skip
    rows.sort(key=lambda each: -float(each[-1][:-1]))
    head = ("linear", "M", "fixed, µs", "any M, µs", "times")
    return section("What a program for any M pays", table(head, rows[:WORST]))


def _others(report: Report) -> str:
    known, rate, rows = report.by_id(), copy_rate(report.document), []
    names = [
        *((f"attention_decode/{{}}/{keys}", f"one query, {keys} keys") for keys in sorted(KEYS)),
        (f"attention_prefill/{{}}/{PREFILL}", f"{PREFILL} queries and keys, causal"),
        ("norm/{}/1x4096", "RMS norm of 1 × 4096"), ("norm/{}/4096x4096", "RMS norm of 4096 × 4096"),
    ]  # fmt: skip
    for pattern, what in names:
        ours, peer = known.get(pattern.format("ours")), known.get(pattern.format("torch"))
        if ours is None or ours.median is None:
            continue
        beside = "–" if peer is None or peer.median is None else f"{peer.median:.1f}"
        least = ours.nbytes / rate if rate else None
        found = mark(ours)
        verdict = "–" if found is None else found.verdict
        rows.append((what, f"{ours.median:.1f}", beside, _number(least, 1), verdict))
    grouped = [row for row in report.rows if row.kind == "grouped" and row.median is not None]
    rows += [
        (f"{r.m} rows, 2 of 8 experts of {r.n} × {r.k}, {r.engine}", f"{r.median:.1f}", "–",
         _number(r.nbytes / rate if rate else None, 1), m.verdict if (m := mark(r)) else "–")
        for r in grouped
    ]  # fmt: skip
    return section("Attention, norms, experts", table(("", "µs", "torch, µs", "its bytes, µs", "prediction"), rows))


def _resources(report: Report) -> str:
    rows = []
    for row in report.rows:
        kernel = row.kernel
        if (
            "registers" not in kernel
            or row.rows == "symbolic"
            or (row.kind == "linear" and (row.n, row.k) != SHAPES[0])
        ):
            continue
        spill = kernel.get("spill_stores", 0) + kernel.get("stack", 0)
        x, y, z = kernel["grid"]
        threads = kernel["block"][0] * kernel["block"][1] * kernel["block"][2]
        rows.append(
            (
                f"`{row.id}`", kernel["engine"], str(x * y * z), str(threads), str(kernel["registers"]),
                f"{kernel['shared'] / 1024:.0f}", str(spill), str(kernel.get("blocks_per_sm", "–")),
                str(kernel.get("waves", "–")),
            )
        )  # fmt: skip
    head = ("cell", "engine", "blocks", "threads", "registers", "shared, KiB", "local, bytes", "blocks an SM", "waves")
    return section("Resources", table(head, rows))


def _number(value: Any, digits: int) -> str:
    return "–" if value is None else f"{float(value):.{digits}f}"


SECTIONS: tuple[Callable[[Report], str], ...] = (
    _wrong, _claims, _step, _lost, _marks, _machine, _missing, _learned, _linears, _symbolic, _others, _resources,
)  # fmt: skip
"""In the order of questions. Each is "" if a run has nothing for it."""

__all__ = ["Report", "marked", "section", "table", "text"]
