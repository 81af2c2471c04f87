"""The caches of a compiled language model: their rows and bytes by layer, and whether a plan agrees with its record."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import Launch, Plan, Select, View
from qcompiler.units import counted, human_bytes

if TYPE_CHECKING:
    from qcompiler.lm.record import LanguageModel

_NAME = re.compile(r"state\.(?:keys|values|index)_(\d{1,6})")
_STATE = re.compile(r"state\.(?:conv|recurrent)_(\d{1,6})_\d{1,3}")
"""What a layer keeps beside keys and values (lm/states.py)."""
_ENTRIES = re.compile(r"state\.entries_(\d{1,6})_(?:keys|index)")
"""Rows for blocks of tokens (lm/pooled.py)."""


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, and the keys of its index: the rows of each sequence, and the bytes of all."""

    layer: int
    rows: int
    nbytes: int
    is_ring: bool


def layer_caches(record: LanguageModel, plan: Plan) -> list[LayerCache]:
    """The caches of a program, by layer."""
    sizes: dict[int, int] = {}
    for arena in plan.arenas:
        found = _NAME.fullmatch(arena.name) if arena.kind == "state" else None
        if found is not None:
            sizes[int(found[1])] = sizes.get(int(found[1]), 0) + arena.nbytes
    return [
        LayerCache(layer, record.rows_of(layer), nbytes, layer in record.ring_layers)
        for layer, nbytes in sorted(sizes.items())
    ]


def cache_lines(record: LanguageModel, plan: Plan) -> list[str]:
    """The caches in words: a line for each kind of layer."""
    caches = layer_caches(record, plan)
    states, entries = layer_states(plan), layer_sizes(plan, _ENTRIES)
    total = sum(each.nbytes for each in caches) + sum(states.values()) + sum(entries.values())
    lines = [f"cache    {human_bytes(total)} for {counted(record.max_batch, 'sequence')}"]
    kinds = sorted({(each.is_ring, each.rows, each.nbytes) for each in caches})
    for is_ring, rows, nbytes in kinds:
        layers = [each.layer for each in caches if (each.is_ring, each.rows, each.nbytes) == (is_ring, rows, nbytes)]
        what = f"a ring of {rows} rows (window {record.window})" if is_ring else f"{rows} rows"
        lines.append(f"  layers {_spans(layers)}: {what}, {human_bytes(nbytes)} each")
    for held, what in ((entries, "a row for each block of tokens"), (states, "states that each token changes")):
        for nbytes in sorted(set(held.values())):
            layers = [layer for layer, size in held.items() if size == nbytes]
            lines.append(f"  layers {_spans(layers)}: {what}, {human_bytes(nbytes)} each")
    return lines


def layer_states(plan: Plan) -> dict[int, int]:
    """The bytes of the states that each token changes, by layer."""
    return layer_sizes(plan, _STATE)


def layer_sizes(plan: Plan, name: re.Pattern[str]) -> dict[int, int]:
    """The bytes of the states of a name, by layer."""
    sizes: dict[int, int] = {}
    for arena in plan.arenas:
        found = name.fullmatch(arena.name) if arena.kind == "state" else None
        if found is not None:
            sizes[int(found[1])] = sizes.get(int(found[1]), 0) + arena.nbytes
    return dict(sorted(sizes.items()))


def _spans(numbers: list[int]) -> str:
    """0-4, 6-10"""
    spans = []
    for _, group in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        spans.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(spans)


def wrong_cache(record: LanguageModel, plan: Plan) -> str | None:
    """What of a plan's caches the record does not describe; None if they agree.

    Bytes alone do not tell: a row may be larger and the rows fewer.  A step that writes keys sees the cache as (heads,
    rows of all sequences, row), which says how many rows there are.
    """
    caches = {arena.name: arena for arena in plan.arenas if arena.kind == "state" and _NAME.fullmatch(arena.name)}
    layers = {int(found[1]) for name in caches if (found := _NAME.fullmatch(name)) is not None}
    if record.counts != bool(layer_states(plan)):
        return "layers keep states that each token changes" if not record.counts else "no layer keeps other states"
    missing = set(record.ring_layers) - layers
    if missing:
        return f"layer {min(missing)} keeps a ring and has no cache"
    arenas = {buffer.name: buffer.arena for buffer in plan.buffers}
    views: dict[str, set[int]] = {name: set() for name in caches}
    for view in _views(plan):
        name = arenas.get(view.buffer, "")
        if name in caches and len(view.shape) == 3 and all(isinstance(size, int) for size in view.shape):
            sizes = [int(size) for size in view.shape]
            if math.prod(sizes) * ITEMSIZE[view.dtype] == caches[name].nbytes:
                views[name].add(sizes[1])
    for name, arena in caches.items():
        found = _NAME.fullmatch(name)
        assert found is not None
        rows = record.max_batch * record.rows_of(int(found[1]))
        if arena.nbytes % rows or not views[name] <= {rows}:
            have = ", ".join(map(str, sorted(views[name] - {rows}))) or f"{arena.nbytes} bytes, no multiple"
            return f"'{name}' has {rows} rows by the record and {have} in the program"
    return None


def _views(plan: Plan) -> Iterator[View]:
    for entry in plan.entries:
        for step in entry.steps:
            if isinstance(step, Launch | Select):
                yield from (view for view in step.operands if isinstance(view, View))


__all__ = ["LayerCache", "cache_lines", "layer_caches", "layer_states", "wrong_cache"]
