"""GPTQ for codes of a trellis: paths whose errors cancel in the layer's outputs, by the second moments of its inputs.

    for each sequence of each block, those with the largest moments first:
        path     minimises sum of (rest[j] - value[j])^2 / U[j, j]^2, where every path makes up for its own errors:
                 rest[j + 1:] -= (rest[j] - value[j]) / U[j, j] * U[j, j + 1:]          inside of the sequence
        rest     of the columns behind the sequence makes up for the errors of the path that was chosen

U is the factor of gptq.py, for the columns in this order.  Between sequences this is GPTQ.  Inside of one, the value of
a code depends on the codes before it, so that codes are chosen by Viterbi's algorithm (formats/trellis_search.py), and
every state of the trellis keeps what the columns behind it have to make up for (per-survivor processing).  The state in
which the circle begins and ends is found without such corrections.

Sources: Frantar et al., GPTQ (arXiv 2210.17323); Tseng et al., QTIP (arXiv 2406.11235), which makes up for errors
between blocks of columns; Raheli, Polydoros, Tzou, "Per-Survivor Processing", IEEE Trans. Communications 43 (1995).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from qcompiler.formats import PackedTensor
from qcompiler.formats.tq import UNIT
from qcompiler.formats.trellis import BLOCK, LENGTH, Codes, Trellis, to_sequences
from qcompiler.formats.trellis_search import ends_of_circles, least
from qcompiler.runtime.encoder import PathSolver, path_solver
from qcompiler.runtime.threads import resolve_num_threads

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

ROWS = 16
"""Rows that are searched at a time: what their states keep at 2 bits takes 4 MiB."""


def order_of(moments: Float64) -> npt.NDArray[np.intp]:
    """The columns (K,) of all sequences, one after another: those with the largest sum of moments first."""
    columns = to_sequences(np.arange(len(moments))[None]).reshape(-1, LENGTH)
    sums = np.diag(moments)[columns].sum(axis=1)
    return np.asarray(columns[np.argsort(-sums, kind="stable")].reshape(-1), np.intp)


def sweep(
    wanted: Float64, nearest: PackedTensor, rows: slice, order: npt.NDArray[np.intp], factor: Float64
) -> tuple[Codes, Float64]:
    """Codes and values (rows, K) of `rows` of a matrix, whose weights are `wanted`, with the scales of `nearest`.

    `order` are the columns as `order_of` puts them, and `factor` is U for them.
    """
    trellis, solver = nearest.format.declaration.trellis, path_solver(nearest.format)
    assert trellis is not None
    stored = (
        nearest.format.entries_of_rows(nearest, rows.start, rows.stop)["scales"][:, ::BLOCK].astype(np.float64) * UNIT
    )
    codes, decoded = np.zeros(wanted.shape, np.uint8), np.zeros(wanted.shape)
    rest = wanted[:, order]
    for first in range(0, len(order), LENGTH):
        columns, part = order[first : first + LENGTH], slice(first, first + LENGTH)
        scale = stored[:, columns[0] // BLOCK, None]
        corner = factor[part, part]
        live = np.flatnonzero(scale[:, 0] != 0)
        found = np.zeros((len(rest), LENGTH), np.intp)
        diagonal = np.diag(corner)
        share = (np.triu(corner, 1) / diagonal[:, None]).astype(np.float32)
        weights = (diagonal.min() / diagonal).astype(np.float32) ** 2
        target = (rest[live, part] / scale[live]).astype(np.float32)
        if solver is None:
            found[live] = paths(trellis, target, weights, share)
        else:
            found[live] = _on_threads(solver, target, weights, share)
        codes[:, columns] = found >> trellis.width - trellis.bits
        decoded[:, columns] = values = trellis.values[found] * scale
        errors = np.empty_like(values)
        for j in range(LENGTH):
            errors[:, j] = (rest[:, first + j] - values[:, j]) / corner[j, j]
            rest[:, first + j + 1 : part.stop] -= errors[:, j, None] * corner[j, j + 1 :]
        rest[:, part.stop :] -= errors @ factor[part, part.stop :]
    return codes, decoded


def _on_threads(solver: PathSolver, wanted: Float32, weights: Float32, share: Float32) -> npt.NDArray[np.intp]:
    count = min(resolve_num_threads(None), -(-len(wanted) // ROWS))
    if count < 2:
        return solver(wanted, weights, share).astype(np.intp)
    with ThreadPoolExecutor(count) as pool:
        parts = pool.map(lambda part: solver(part, weights, share), np.array_split(wanted, count))
    return np.concatenate(list(parts)).astype(np.intp)


def paths(trellis: Trellis, wanted: Float32, weights: Float32, share: Float32) -> npt.NDArray[np.intp]:
    """The windows (rows, 64) of the paths with the smallest error.

    `weights` (64,) are those of squared errors, and `share` (64, 64) what later elements make up for. This is the
    definition; kernels/encode/trellis.h is the same in C++.
    """
    found = np.empty(wanted.shape, np.intp)
    for first in range(0, len(wanted), ROWS):
        some = wanted[first : first + ROWS]
        ends = ends_of_circles(trellis, some, np.broadcast_to(weights, some.shape))
        found[first : first + ROWS] = _survivors(trellis, some, weights, share, ends)
    return found


def _survivors(
    trellis: Trellis, wanted: Float32, weights: Float32, share: Float32, ends: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Viterbi's algorithm from and to the states `ends` (rows,), where each state has its own `wanted` (rows, 64)."""
    count, bits = len(wanted), trellis.bits
    branches, size = 1 << bits, 1 << trellis.width - bits
    each = np.arange(count)[:, None]
    cost = np.full((count, size), np.inf, np.float32)
    cost[each[:, 0], ends] = 0
    rest = np.repeat(wanted[:, None], size, axis=1)
    table = np.ascontiguousarray(trellis.values.reshape(size, branches).T)
    states = np.arange(size)
    chosen = np.empty((LENGTH, count, size), np.uint8)

    def by_branch(of_states: Float32) -> Float32:  # as in trellis_search.py: (rows, oldest code, newest code, others)
        return of_states.reshape(count, 1, size // branches, branches).transpose(0, 3, 1, 2)

    for step in range(LENGTH):
        error = np.empty((count, branches, branches, size // branches), np.float32)
        np.subtract(by_branch(rest[..., 0]), table.reshape(error.shape[1:]), out=error)
        error *= error
        error *= weights[step]
        error += by_branch(cost)
        cost, chosen[step] = least(error.reshape(count, branches, size))
        windows = states << bits | chosen[step]
        before = windows & size - 1
        difference = rest[each, before, 0] - trellis.values[windows]
        rest = rest[each, before, 1:]
        rest -= difference[..., None] * share[step, step + 1 :]
    found, state = np.empty((count, LENGTH), np.intp), ends
    for step in reversed(range(LENGTH)):
        found[:, step] = state << bits | chosen[step, each[:, 0], state]
        state = found[:, step] & size - 1
    return found


__all__ = ["order_of", "paths", "sweep"]
