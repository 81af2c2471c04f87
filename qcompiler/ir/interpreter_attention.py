"""The meaning of `qc.attention` and `qc.join_attention`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from qcompiler.formats import cache_rows
from qcompiler.ir import qc
from qcompiler.ir.interpreter_base import Array, Frame, accumulator, round_to, rule
from qcompiler.ir.types import tensor_dtype
from qcompiler.plan.kernel import DType


@rule(qc.AttentionOp)
def _attention(op: qc.AttentionOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    read = list(operands[:3])
    if op.rows_of is not None:
        dims = (operands[0].shape[-1], int(op.value_dim))
        kind = cache_rows.kind_of(op.rows_of)
        read[1:] = [cache_rows.dequantise(rows, cols, kind) for rows, cols in zip(read[1:], dims, strict=True)]
    acc = accumulator(*read)
    narrow: DType | None = "bf16" if op.rounds_to is not None else None
    stored = None if op.rows_of in ("int8", "fp8") else narrow  # codes of a cache are exact in bf16
    there = [name for name in ("mask", "last", "sinks") if getattr(op, name) is not None]
    extra = dict(zip(there, operands[3:], strict=True))
    q, k, v = (_factor(x, acc, to) for x, to in zip(read, (narrow, stored, stored), strict=True))
    repeat = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, repeat, axis=1) if repeat > 1 else x for x in (k, v))
    scores = np.matmul(q, k.swapaxes(-1, -2)) * acc.type(op.scale.value.data)
    if op.cap is not None:
        scores = acc.type(op.cap) * np.tanh(scores / acc.type(op.cap))
    if op.mask is not None:
        mask = extra["mask"]
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask.astype(acc, copy=False)
    rows, columns = np.ogrid[: q.shape[2], : k.shape[2]]
    if op.last is not None:
        rows = extra["last"].astype(np.int64)[:, None, :, None]
    if op.causal is not None or op.last is not None:
        scores = np.where(columns <= rows, scores, -np.inf)
    if op.ring is not None:
        scores = np.where((rows - columns) % k.shape[2] < op.keys_back, scores, -np.inf)
    elif op.keys_back is not None:
        scores = np.where(columns > rows - op.keys_back, scores, -np.inf)
    if op.sinks is not None:  # of a key whose value is zero
        sinks = np.broadcast_to(extra["sinks"].astype(acc, copy=False), (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
        v = np.concatenate([v, np.zeros_like(v, shape=(*v.shape[:2], 1, v.shape[3]))], axis=2)
    if op.parts is None:
        sums, _, total = _weighed(scores, v, narrow)
        return [round_to(sums / np.where(total == 0, 1, total), tensor_dtype(op.result.type))]
    bounds = np.linspace(0, v.shape[2], (op.divided_into or 1) + 1).astype(int)
    runs = [slice(first, end) for first, end in itertools.pairwise(bounds)]
    parts = [np.concatenate(_weighed(scores[..., run], v[:, :, run], narrow), axis=-1) for run in runs]
    return [round_to(np.stack(parts, axis=3), "f32")]


def _factor(x: Array, acc: np.dtype[Any], narrow: DType | None) -> Array:
    """`x` as attention multiplies it: rounded to `narrow`, if there is one."""
    return (x if narrow is None else round_to(x, narrow)).astype(acc, copy=False)


def _weighed(scores: Array, values: Array, narrow: DType | None) -> tuple[Array, Array, Array]:
    """The sums of the weighted values (…, Dv), the largest score and the total of the weights (…, 1)."""
    acc = scores.dtype
    peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(peak), 0, peak)).astype(acc, copy=False)
    total = weights.sum(axis=-1, keepdims=True, dtype=acc)
    return np.matmul(_factor(weights, acc, narrow), values), peak, total


@rule(qc.JoinAttentionOp)
def _join_attention(op: qc.JoinAttentionOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    (parts,) = operands
    sums, peaks, totals = parts[..., :-2], parts[..., -2:-1], parts[..., -1:]
    peak = peaks.max(axis=3, keepdims=True)
    fades = np.exp(peaks - np.where(np.isneginf(peak), 0, peak))
    total = (totals * fades).sum(axis=3)
    out = (sums * fades).sum(axis=3) / np.where(total == 0, 1, total)
    return [round_to(out, tensor_dtype(op.result.type))]
