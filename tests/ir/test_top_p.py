"""qc.top_p draws what its definition says, among the tokens that Hugging Face's top-p keeps, in their proportions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from top_p_cases import drawn, rows, shares
from xdsl.dialects import test
from xdsl.utils.exceptions import VerifyException

from qcompiler.ir.interpreter import evaluate_op
from qcompiler.ir.qc_index import TopPOp
from qcompiler.ir.types import tensor
from qcompiler.plan.kernel import DType


def drawn_by_the_interpreter(x: np.ndarray, top: np.ndarray, draw: np.ndarray, dtype: DType = "f32") -> np.ndarray:
    kinds = [tensor(x.shape, dtype), tensor(top.shape, "f32"), tensor(draw.shape, "f32")]
    op = TopPOp(*test.TestOp(result_types=kinds).results, tensor(top.shape, "i64"))
    op.verify()
    (out,) = evaluate_op(op, [x, top, draw], {})
    return np.asarray(out)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("cols", [1, 2, 13, 64, 257])
def test_the_interpreter_draws_what_is_defined(dtype: DType, cols: int) -> None:
    for seed in range(12):
        x, (top, draw) = rows(dtype, cols, seed), shares(9, seed)
        assert np.array_equal(drawn_by_the_interpreter(x, top, draw, dtype), drawn(x, top, draw))


def test_all_dims_but_the_last_are_rows() -> None:
    x, (top, draw) = rows("f32", 13)[:8], shares(8)
    out = drawn_by_the_interpreter(x.reshape(2, 2, 2, 13), top.reshape(2, 2, 2), draw.reshape(2, 2, 2))
    assert np.array_equal(out.reshape(-1), drawn(x, top, draw))
    assert drawn_by_the_interpreter(x[0], top[0], draw[0]) == drawn(x[:1], top[:1], draw[:1])[0]


@pytest.mark.parametrize("top", [0.1, 0.5, 0.9, 0.99])
def test_what_is_drawn_is_what_transformers_keeps_as_often_as_it_is_probable(top: float) -> None:
    from transformers import TopPLogitsWarper

    logits = torch.randn(200, generator=torch.Generator().manual_seed(5)) * 2
    kept = torch.softmax(TopPLogitsWarper(top)(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].double(), -1)
    count = 20_000
    draws = ((np.arange(count) + 0.5) / count).astype(np.float32)
    x = np.broadcast_to(torch.softmax(logits, -1).numpy(), (count, 200))
    out = drawn_by_the_interpreter(x, np.full(count, top, np.float32), draws)
    often = np.bincount(out, minlength=200) / count
    assert (often[kept.numpy() == 0] == 0).all()
    # Draws are evenly spaced: each entry is met as often as its share says, but for one draw at either end.
    np.testing.assert_allclose(often, kept.numpy(), atol=2.5 / count)


def test_a_share_of_another_type_is_refused() -> None:
    kinds = [tensor((3, 8), "f32"), tensor((3,), "f16"), tensor((3,), "f32")]
    op = TopPOp(*test.TestOp(result_types=kinds).results, tensor((3,), "i64"))
    with pytest.raises(VerifyException, match="top must be f32"):
        op.verify()
