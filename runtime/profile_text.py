"""A profile as tables: what is known of the whole call, then rows by kind, kernel, module or step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from qcompiler.errors import ArgumentError
from qcompiler.units import printable

if TYPE_CHECKING:
    from qcompiler.runtime.profile import GroupProfile, Profile, StepProfile

MOST_ROWS = 20
"""Rows of a table of kernels or modules, unless asked otherwise: with layers folded, models have fewer."""

WIDEST_NAME = 60

UNDISTURBED = 0.8
"""The sum of the steps' medians over the median of their sums, below which the text names the reason."""

Row = tuple[str, ...]
HEAD = ("us", "share", "GB/s", "Gop/s", "of limit", "estimate", "torch")


def tables(found: Profile, by: Literal["module", "kernel", "step", ""] = "", most: int | None = None) -> str:
    """One table; without `by` all of the profile: the call, kinds, kernels, and modules with their layers folded.
    Without control characters, since names may come from an untrusted file."""
    return printable(_tables(found, by, most))


def _tables(found: Profile, by: Literal["module", "kernel", "step", ""], most: int | None) -> str:
    if by == "step":
        return "\n".join(_grid(("step", "kernel", "module", *HEAD), _step_rows(found)[:most], left=3))
    if by in ("module", "kernel"):
        groups = found.by_module() if by == "module" else found.by_kernel()
        return "\n".join(_group_table(by, groups, most if most is not None else len(groups)))
    if by:
        raise ArgumentError(f"by={by!r}: a table is by 'module', 'kernel' or 'step'")
    most = MOST_ROWS if most is None else most
    parts = [_title(found), _kinds(found), _group_table("kernel", found.by_kernel(), most),
             _group_table("module, layers folded", found.by_module(layers=False), most), _notes(found)]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _title(found: Profile) -> list[str]:
    sizes = ", ".join(f"{name}={size}" for name, size in found.symbols.items())
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}" if found.device == "cpu" else found.device
    lines = [f"{found.entry}{f', {sizes}' if sizes else ''}: {threads}, medians of {found.rounds} rounds"]
    lines.append(
        f"steps {found.steps_us:.1f} us; all one by one {found.round_us:.1f} us, untimed {found.entry_us:.1f} us "
        f"({found.timing_us:+.1f} us for timing and what lies between steps)"
    )
    lines.append(f"limit: {found.machine}" if found.machine is not None else f"no limit: {found.machine_missing}")
    if found.eager is not None:
        lines.append(f"torch eager: {found.eager.us:.1f} us a call; {found.eager.note}")
    else:
        lines.append(f"no torch eager: {found.eager_missing}")
    return lines


def _kinds(found: Profile) -> list[str]:
    rows = [f"{'kind':16}{'launches':>9}{'regions':>9}{'tasks':>9}{'us':>11}{'share':>8}"]
    for each in found.kinds():
        rows.append(f"{each.kind:16}{each.launches:9}{each.regions:9}{each.tasks:9}{each.us:11.1f}{each.share:8.1%}")
    counted = [sum(getattr(step, name) for step in found.steps) for name in ("regions", "tasks")]
    for label, us, counts in (
        ("all steps", found.steps_us, (len(found.steps), *counted)),
        ("outside of steps", found.outside_us, ("", "", "")),
        ("the call", found.call_us, ("", "", "")),
    ):
        columns = "".join(f"{count:>9}" for count in counts)
        rows.append(f"{label:16}{columns}{us:11.1f}{us / found.call_us:8.1%}")
    inside = f"; {found.with_products:.1%} are attention and recurrences" if found.with_products else ""
    rows.append(f"of the time in steps {found.not_product:.1%} are not matrix products{inside}")
    return rows


def _group_table(what: str, groups: Sequence[GroupProfile], most: int) -> list[str]:
    rows = [
        (_short(each.name or "(not known)"), str(each.launches),
         *_figures(each.us, each.share, each.nbytes, each.operations, each.of_limit, each.estimate_us, each.eager_us))
        for each in groups[:most]
    ]  # fmt: skip
    left = groups[most:]
    lines = _grid((what, "launches", *HEAD), rows, left=1)
    if left:
        lines.append(f"and {len(left)} more: {sum(each.us for each in left):.1f} us")
    return lines


def _step_rows(found: Profile) -> list[Row]:
    total = found.steps_us or 1.0
    return [
        (str(each.step), _short(each.kernel or each.kind), _short(_where(each)),
         *_figures(each.us, each.us / total, each.nbytes, each.operations, each.of_limit, each.estimate_us, None))
        for each in found.steps
    ]  # fmt: skip


def _where(step: StepProfile) -> str:
    return step.place + " ~" * (step.path_from == "neighbours")


def _figures(
    us: float, share: float, nbytes: int, operations: int, of_limit: float | None, estimate: float | None,
    eager: float | None,
) -> Row:  # fmt: skip
    """The columns of HEAD; bytes and operations per microsecond are thousands of millions per second."""
    moved, done = (f"{amount / us / 1e3:.1f}" if us else "" for amount in (nbytes, operations))
    return (
        f"{us:.1f}", f"{share:.1%}", moved, done,
        f"{of_limit:.0%}" if of_limit is not None else "", f"{estimate:.1f}" if estimate is not None else "",
        f"{eager:.1f}" if eager is not None else "",
    )  # fmt: skip


def _notes(found: Profile) -> list[str]:
    lines = []
    beyond = {step.limited_by == "bytes" for step in found.steps if (step.of_limit or 0) > 1}
    if True in beyond:
        lines.append("more than 100 % of the limit: the bytes were in caches, and the limit is that of the memory")
    if False in beyond:
        lines.append("more than 100 % of the limit by operations: other work disturbed the probes, profile again")
    if found.steps_us < UNDISTURBED * found.round_us:
        lines.append("other work interrupted whole runs, and fewer of the single steps, whose medians stand here")
    if late := sum(step.late for step in found.steps):
        were = "1 step was" if late == 1 else f"{late} steps were"
        lines.append(f"{were} submitted late in every round: the time has waiting for the host in it")
    return [*lines, *found.notes]


def _short(name: str) -> str:
    """A name at most WIDEST_NAME wide; what is cut out of its middle is "…"."""
    if len(name) <= WIDEST_NAME:
        return name
    half = (WIDEST_NAME - 1) // 2
    return f"{name[: WIDEST_NAME - 1 - half]}…{name[-half:]}"


def _grid(head: Row, rows: Sequence[Row], left: int) -> list[str]:
    """Rows in columns, the first `left` of them to the left; a column without any value is left out."""
    kept = [n for n in range(len(head)) if n < left or any(row[n] for row in rows)]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in kept]
    return [
        "  ".join(
            f"{row[n]:<{width}}" if n < left else f"{row[n]:>{width}}" for n, width in zip(kept, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
