"""Names for a tensor or an op that replaces several of the model."""

from __future__ import annotations

from collections.abc import Sequence


def joined_paths(paths: Sequence[str]) -> str:
    """One path for several: the common parts, then the different ones. `attn.q` and `attn.k` give `attn.q+k`."""
    return ".".join(joined_parts(paths))


def joined_parts(paths: Sequence[str]) -> tuple[str, ...]:
    """The parts of the joined path: `("attn", "q+k")`. The last one may have dots in it."""
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return (*parts[0][:shared], "+".join(".".join(part[shared:]) for part in parts))
