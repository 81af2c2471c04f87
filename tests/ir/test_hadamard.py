"""qc.hadamard is a product with the orthonormal Hadamard matrix, and the fast transform defines its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hadamard_cases import by_matrix, numbers, transformed
from xdsl.dialects import test
from xdsl.utils.exceptions import VerifyException

from qcompiler.frontends.torch.qc_ops import torch_hadamard  # noqa: F401  (registers the operator)
from qcompiler.ir import qc
from qcompiler.ir.interpreter import evaluate_op
from qcompiler.ir.types import tensor
from qcompiler.plan.kernel import DType


def interpreted(x: np.ndarray, block: int, dtype: DType = "f32") -> np.ndarray:
    op = qc.HadamardOp(test.TestOp(result_types=[tensor(x.shape, dtype)]).results[0], block=block)
    op.verify()
    (out,) = evaluate_op(op, [x], {})
    return np.asarray(out)


@pytest.mark.parametrize(("cols", "block"), [(2, 2), (24, 8), (96, 32), (512, 512)])
def test_the_interpreter_multiplies_by_the_matrix(cols: int, block: int) -> None:
    """A step rounds once, relative to at most the sum of magnitudes of the run; the scale and the result once each."""
    x = numbers("f32", 6, cols).reshape(2, 3, cols)
    out = interpreted(x, block)
    assert np.array_equal(out, transformed(x, block))
    sums = np.abs(x.reshape(2, 3, -1, block)).sum(-1, keepdims=True) / np.sqrt(block)
    bound = (block.bit_length() + 1) * 2.0**-24 * np.broadcast_to(sums, (2, 3, cols // block, block)).reshape(x.shape)
    assert (np.abs(out - by_matrix(x, block)) <= bound).all()
    twice = interpreted(out, block)
    np.testing.assert_allclose(twice, x, atol=float(bound.max()) * np.sqrt(block) * 2)


@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("f32", "f16"))])
def test_torch_and_the_interpreter_give_equal_bits(dtype: DType) -> None:
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    x = numbers("f32", 5, 48)
    given = torch.from_numpy(x).to(kind)
    eager = torch.ops.qc.hadamard(given, 16)
    ours = interpreted(numbers(dtype, 5, 48), 16, dtype)
    assert np.array_equal(eager.to(torch.float32).numpy(), ours.astype(np.float32))
    torch.library.opcheck(torch.ops.qc.hadamard.default, (given, 16))


def test_a_row_of_symbolic_length_is_refused() -> None:
    op = qc.HadamardOp(test.TestOp(result_types=[tensor((3, "n"), "f32")]).results[0], block=4)
    with pytest.raises(VerifyException, match="a last dim of a known size"):
        op.verify()
