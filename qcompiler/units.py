"""How sizes and texts are printed: one unit for bytes everywhere, the decimal one (kB, MB, GB).

Decimal, since model cards, downloads, disks and bandwidths (GB/s) are decimal: a size over a rate is seconds, without a
factor of 1.074.  KiB and MiB are used only for limits that are powers of two.  JSON has whole bytes.
"""

from __future__ import annotations


def human_bytes(count: int) -> str:
    """Bytes in the largest decimal unit that leaves at least 1: `835 B`, `90.9 MB`."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if round(size, 1) < 1000 or unit == "TB":
            break
    return f"{size:.1f} {unit}"


def counted(count: int | str, thing: str, things: str = "") -> str:
    """`1 step`, `3 steps`, `b rows` for a size with a name; `things` is the plural if it is not `thing` with an s."""
    return f"{count} {thing}" if count == 1 else f"{count} {things or thing + 's'}"


def human_seconds(seconds: float) -> str:
    """A duration as two figures at most: `48 s`, `12 min`, `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def human_nanoseconds(ns: float) -> str:
    """A short time with four figures: `812.4 us`, `3.217 ms`."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= factor:
            return f"{ns / factor:.4g} {unit}"
    return f"{ns:.4g} ns"


def printable(text: str) -> str:
    """The text without control characters: an untrusted file must not control the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
