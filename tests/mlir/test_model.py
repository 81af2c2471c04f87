"""A whole model, imported and halfway through the pipeline, compiled by upstream MLIR: it agrees with eager torch."""

from __future__ import annotations

import numpy as np
import torch
from transformers import BertConfig, BertModel

from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.mlir_oracle import parses_in_mlir, run_with_mlir
from qcompiler.ir.text import parse_module, print_for_mlir, print_module
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.passes.pipeline import run_pipeline, upto


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
        self.bert = BertModel(BertConfig(vocab_size=50, **sizes), add_pooling_layer=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return result


def test_bert_compiled_by_mlir_before_and_after_fusion_agrees_with_torch() -> None:
    torch.manual_seed(3)
    model, ids = Encoder().eval(), torch.randint(0, 50, (3, 7))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    shapes = {name: {0: ("b", 1, 8), 1: ("s", 1, 32)} for name in ("ids", "mask")}
    imported = import_torch(model, (ids, mask), dynamic_shapes=shapes)
    ctx, inputs = QCContext.default(weights=imported.weights), [ids.numpy(), mask.numpy()]
    with torch.no_grad():
        wanted = model(ids, mask).numpy()

    def check() -> None:
        lowered = imported.module.clone()
        LowerQcToLinalgPass().apply(ctx, lowered)
        lowered.verify()
        got = run_with_mlir(lowered, ctx.weights, inputs)[0]
        np.testing.assert_allclose(got, wanted, atol=1e-5)

    def dump(_stage: str, _module: object, _seconds: float, _changed: bool = True) -> None:
        text = print_module(imported.module)
        assert parse_module(text).is_structurally_equivalent(imported.module)
        parses_in_mlir(print_for_mlir(imported.module))

    check()
    dump("import", imported.module, 0.0)
    run_pipeline(imported.module, ctx, stages=upto("fuse-elementwise"), on_stage=dump)
    check()
    rest = upto("emit-kernels")[len(upto("fuse-elementwise")) :]
    run_pipeline(imported.module, ctx, stages=rest, on_stage=dump)
