"""Where attention may round its factors: what the interpreter computes, and that the permission reaches kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from xdsl.dialects.builtin import StringAttr
from xdsl.utils.exceptions import VerifyException

import qcompiler as qc
from qcompiler.errors import NumericsError, PassError
from qcompiler.ir import qc as dialect
from qcompiler.ir.types import tensor
from qcompiler.passes.checks.answers import answers
from qcompiler.passes.pipeline import STAGES, Stage, run_pipeline, with_options
from qcompiler.passes.round_attention import RoundAttentionPass
from qcompiler.plan.kinds.attention import AttentionKernel


def bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def attention(make: Any) -> list[np.ndarray[Any, Any]]:
    """Scores far apart, so that a rounding of q and k shows."""
    q, k, v = (make.arg((1, 2, 3, 16)) for _ in "qkv")
    make.finish(make.op(dialect.AttentionOp(q, k, v, None, tensor((1, 2, 3, 16), "f32"), scale=2.0)))
    return [np.random.default_rng(n).standard_normal((1, 2, 3, 16)).astype(np.float32) for n in range(3)]


def evaluated(make: Any, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = answers(make.module, make.ctx, inputs, {})["main"][0]
    return found


def test_the_interpreter_rounds_factors_and_weights(make: Any) -> None:
    inputs = attention(make)
    make.run(["round-attention"])
    assert "compute" not in next(o for o in make.module.walk() if isinstance(o, dialect.AttentionOp)).properties
    rounding = with_options(
        [s for s in STAGES if s.name == "round-attention"], {"round-attention": {"compute": "bf16"}}
    )
    run_pipeline(make.module, make.ctx, stages=rounding, verify_each="numerics", sample_inputs=inputs)
    q, k, v = map(bf16, inputs)
    scores = np.matmul(q, k.swapaxes(-1, -2)) * np.float32(2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.matmul(bf16(weights), v) / weights.sum(-1, keepdims=True)
    found = evaluated(make, inputs)
    assert np.abs(found - wanted).max() <= 1e-5
    assert np.abs(found - evaluated(make, list(map(bf16, inputs)))).max() <= 1e-6, "rounding twice is rounding once"
    exact = np.matmul(inputs[0], inputs[1].swapaxes(-1, -2)) * np.float32(2)
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    assert np.abs(found - np.matmul(exact, inputs[2]) / exact.sum(-1, keepdims=True)).max() >= 1e-3


class RoundAndScalePass(RoundAttentionPass):
    """Changes a value under the name of a permission."""

    def apply(self, ctx: Any, op: Any) -> None:
        super().apply(ctx, op)
        for each in op.walk():
            if isinstance(each, dialect.AttentionOp):
                each.properties["scale"] = type(each.scale)(3.0, each.scale.type)


def test_a_pass_that_permits_roundings_may_change_nothing_else(make: Any) -> None:
    inputs = attention(make)
    stages = [Stage("round-attention", lambda: RoundAndScalePass("bf16"))]
    with pytest.raises(NumericsError, match=r"without qc\.attention's compute"):
        run_pipeline(make.module, make.ctx, stages=stages, verify_each="numerics", sample_inputs=inputs)


def test_an_unknown_arithmetic_is_refused() -> None:
    with pytest.raises(PassError, match="compute is 'fp8'; it is one of exact, bf16, int8"):
        RoundAttentionPass("fp8")


def test_an_op_and_a_plan_with_another_arithmetic_are_refused(make: Any) -> None:
    attention(make)
    (op,) = (each for each in make.module.walk() if isinstance(each, dialect.AttentionOp))
    op.properties["compute"] = StringAttr("fp16")
    with pytest.raises(VerifyException, match="compute is bf16, if it is there"):
        op.verify()
    body = AttentionKernel(
        batch=1, heads=1, kv_heads=1, q_len=1, kv_len=1, head_dim=1, value_dim=1, scale=1.0, causal=False, mask="none",
        compute="bf16",
    )  # fmt: skip
    text = msgspec.json.encode(body)
    assert msgspec.json.decode(text, type=AttentionKernel) == body
    with pytest.raises(msgspec.ValidationError, match="compute"):
        msgspec.json.decode(text.replace(b'"bf16"', b'"fp16"'), type=AttentionKernel)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in "qkv")

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(1, -1, 2, 16).transpose(1, 2) for each in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])


@pytest.mark.parametrize(
    ("recipe", "dtype", "wanted"),
    [
        (qc.QuantConfig("int8", compute="bf16"), torch.float32, "bf16"),
        pytest.param(qc.QuantConfig("int8", activations="int8"), torch.float32, "bf16", marks=pytest.mark.slow),
        pytest.param(qc.QuantConfig("int8"), torch.float32, None, marks=pytest.mark.slow),
        pytest.param(None, torch.bfloat16, "bf16", marks=pytest.mark.slow),
        pytest.param(qc.QuantConfig("int8", compute="exact"), torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param(None, torch.float16, None, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_may_round_where_the_recipe_or_the_type_says_so(
    recipe: Any, dtype: torch.dtype, wanted: str | None
) -> None:
    model, x = Attends().eval().to(dtype), torch.randn(1, 5, 32).to(dtype)
    mask = torch.tensor([[True, True, False, True, True]])
    program = qc.qcompile(model, (x, mask), quant=recipe)
    (body,) = (kernel.body for kernel in program.plan.kernels if isinstance(kernel.body, AttentionKernel))
    assert body.compute == wanted
