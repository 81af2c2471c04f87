"""The meaning of `qc.linear_attention`: token by token, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qcompiler.ir import qc
from qcompiler.ir.interpreter_base import Array, Frame, rule


@rule(qc.LinearAttentionOp)
def _linear_attention(op: qc.LinearAttentionOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    state, query, key, value, decay, first, counts, *rest = operands
    rate = rest.pop(0) if op.rate is not None else np.float32(1)
    beta = rest.pop(0) if op.beta is not None else None
    shared = state.shape[1] // query.shape[2]
    after, out = state.copy(), np.zeros(value.shape, np.float32)
    for b in range(len(query)):
        count = min(max(int(counts[b]), 0), query.shape[1])
        if count and first[b] == 0:
            after[b] = 0
        for t in range(count):
            k, q = (np.repeat(each[b, t], shared, axis=0)[:, None, :] for each in (key, query))  # (H, 1, N)
            kept = np.exp(decay[b, t] * rate)[:, None, :]
            added, before = value[b, t], after[b] * kept
            if beta is not None:
                added = beta[b, t][:, None] * (added - (before * k).sum(-1))
            after[b] = before + added[:, :, None] * k
            out[b, t] = (after[b] * q).sum(-1)
    return [after, out]
