"""qc.route chooses and weighs as its definition says, and as transformers' routers do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from route_cases import FORMS, close, routed, rows
from xdsl.dialects import test

from qcompiler.ir.interpreter import evaluate_op
from qcompiler.ir.qc_index import RouteOp
from qcompiler.ir.types import tensor
from qcompiler.plan.kernel import DType
from qcompiler.plan.kinds.route import Scores

Form = tuple[Scores, bool]


def interpreted(x: np.ndarray, count: int, form: Form, dtype: DType = "f32", made: DType = "f32") -> list[np.ndarray]:
    picked = (*x.shape[:-1], count)
    given = test.TestOp(result_types=[tensor(x.shape, dtype)])
    kinds = [tensor(picked, made), tensor(picked, "i64")]
    op = RouteOp(given.results[0], kinds, k=count, scores=form[0], normalise=form[1])
    op.verify()
    return [np.asarray(each) for each in evaluate_op(op, [x], {})]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "made"), [("f32", "f32"), ("bf16", "f32"), ("f32", "bf16"), ("f16", "f16")])
@pytest.mark.parametrize(("cols", "count"), [(1, 1), (8, 2), (31, 31), (257, 8)])
def test_the_interpreter_routes_as_is_defined(form: Form, dtype: DType, made: DType, cols: int, count: int) -> None:
    x = rows(dtype, cols)
    weights, indices = interpreted(x, count, form, dtype, made)
    wanted, places = routed(x, count, form)
    assert np.array_equal(indices, places)
    close(weights, wanted, made)


def test_all_dims_but_the_last_are_rows() -> None:
    x = rows("f32", 13)[:6]
    weights, indices = interpreted(x.reshape(2, 1, 3, 13), 2, ("all", True))
    flat = interpreted(x, 2, ("all", True))
    assert np.array_equal(weights.reshape(6, 2), flat[0]) and np.array_equal(indices.reshape(6, 2), flat[1])
    assert np.array_equal(interpreted(x[0], 2, ("all", True))[1], flat[1][0])


def test_mixtral_and_gpt_oss_route_alike() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(2))
    sizes = {"num_experts_per_tok": 3, "num_local_experts": 9, "hidden_size": 16}
    of_all = MixtralTopKRouter(transformers.MixtralConfig(**sizes)).requires_grad_(False)
    chosen = GptOssTopKRouter(transformers.GptOssConfig(**sizes)).requires_grad_(False)
    for router, form in ((of_all, ("all", True)), (chosen, ("chosen", False))):
        router.weight.copy_(torch.randn(9, 16, generator=torch.Generator().manual_seed(3)))
        if form[0] == "chosen":
            router.bias.zero_()
        _, theirs, places = router(x)
        weights, indices = interpreted((x @ router.weight.T).numpy(), 3, form)
        assert np.array_equal(indices, places.numpy())
        if theirs.shape != places.shape:
            theirs = theirs.gather(1, places)
        np.testing.assert_allclose(weights, theirs.numpy(), rtol=1e-5)
