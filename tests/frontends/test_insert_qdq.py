"""What is encoded, once; what is kept, and why; and that the rewritten program is an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qcompiler import formats
from qcompiler.config import QuantConfig, Rule
from qcompiler.errors import FormatShapeError, FormatValueError, PromiseError, RecipeError
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.torch.frontend import import_torch


class Conv1D(nn.Module):
    """GPT-2's linear: the weight is (in, out)."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n)), nn.Parameter(torch.randn(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Model(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 128), Conv1D(128, 64)
        self.norm = nn.LayerNorm(64)
        self.gate = nn.Parameter(torch.randn(1, 64))
        self.unused = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.zeros(64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.gate + self.offset
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


IDS = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
SHAPES = {"ids": {0: ("b", 1, 8), 1: ("s", 1, 16)}}


def _quantized(model: nn.Module, quant: Any, ids: torch.Tensor = IDS) -> Quantized:
    return insert_qdq(export_model(model.eval(), (ids,), {}, {"ids": {0: ("b", 1, 8), 1: ("s", 1, 16)}}), quant)


def test_tied_weights_are_encoded_once_in_the_embeddings_format() -> None:
    quantized = _quantized(Model(), QuantConfig("nf4", promise_bits=None))
    tied = [row for row in quantized.ledger if len(row.parameters) > 1]
    assert [set(row.parameters) for row in tied] == [{"embed.weight", "head.weight"}]
    assert tied[0].format == "int8"
    assert len(quantized.weights) == 3
    calls = [n for n in quantized.exported.graph.nodes if n.target is torch.ops.qc.dequantize.default]
    assert len(calls) == 3


def test_untied_weights_follow_their_own_kind() -> None:
    rows = {
        row.parameters[0]: row for row in _quantized(Model(tied=False), QuantConfig("nf4", promise_bits=None)).ledger
    }
    assert rows["embed.weight"].format == "int8" and rows["head.weight"].format == "nf4:block=64"


def test_the_ledger_lists_every_tensor_with_its_bytes_or_its_reason() -> None:
    model = Model()
    ledger = _quantized(model, QuantConfig("nf4", promise_bits=None)).ledger
    named = {p for row in ledger for p in row.parameters}
    assert named == {n for n, _ in model.named_parameters(remove_duplicate=False)} | {
        n for n, _ in model.named_buffers()
    }
    rows = {row.parameters[0]: row for row in ledger}
    assert rows["gate"].reason == "not the weight of a linear, a convolution or an embedding" and rows["gate"].counts
    assert rows["norm.weight"].reason == "fewer than two dimensions" and not rows["norm.weight"].counts
    assert rows["offset"].reason == "buffer"
    assert rows["unused.weight"].reason == "not used by the graph" and rows["unused.weight"].bytes_after == 0
    assert rows["up.weight"].bytes_after == formats.get("nf4").nbytes(128, 64)
    assert rows["down.weight"].shape == (128, 64)


@pytest.mark.parametrize("quant", [None, "nf4", "int8", "int4", "int4:group=64,symmetric=False"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rewritten_program_computes_with_the_decoded_weights(quant: str | None, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    quantized = _quantized(model, QuantConfig(quant, promise_bits=None) if quant else None)
    twin = Model().to(dtype)
    for name, parameter in twin.named_parameters():
        row = next((r for r in quantized.ledger if name in r.parameters), None)
        if row is None or not row.format:
            continue
        stored = quantized.weights[row.parameters[0]]
        assert stored.format is not None
        fmt = formats.get(stored.format.name, **stored.format.params)
        decoded = torch.from_numpy(fmt.decode(formats.from_bytes(fmt, *stored.shape, stored.data)).copy()).to(dtype)
        parameter.data = decoded.t().contiguous() if name == "down.weight" else decoded
    with torch.no_grad():
        found, wanted = quantized.module(IDS), twin.eval()(IDS)
        other = torch.randint(0, 50, (1, 1))
        assert torch.allclose(quantized.module(other), twin(other), rtol=1e-2, atol=1e-2)
    assert float((found - wanted).float().norm() / wanted.float().norm()) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("quant", [None, "nf4", "int4"])
def test_conv1d_is_stored_transposed_and_becomes_a_linear(quant: str | None, check: Any) -> None:
    recipe = QuantConfig(quant, promise_bits=None) if quant else None
    result = check(Model(), IDS, dynamic=SHAPES, others=((IDS[:1, :1],),), quant=recipe)
    assert result.weights["down.weight"].shape == (64, 128)
    assert "qc.batch_matmul" not in str(result.module)


def test_rules_choose_by_module_and_are_printed() -> None:
    rules = (Rule("up", "int8", "first layer"), Rule("head", None))
    rows = {
        r.parameters[0]: r
        for r in _quantized(Model(tied=False), QuantConfig("nf4", rules=rules, promise_bits=None)).ledger
    }
    assert (rows["up.weight"].format, rows["up.weight"].reason) == ("int8", "rule 'up': first layer")
    assert (rows["head.weight"].format, rows["head.weight"].reason) == ("", "rule 'head'")
    assert rows["head.weight"].bytes_after == rows["head.weight"].bytes_before


def test_a_rule_for_a_missing_module_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'dwon' matches no module.*down"):
        _quantized(Model(), QuantConfig("nf4", rules={"dwon": "int8"}))


def test_a_k_that_a_group_cannot_divide_names_the_parameter_and_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 8))
    exported = export_model(model.eval(), (torch.randn(3, 40),))
    with pytest.raises(FormatShapeError, match=r"parameter '0\.weight' \(64 x 40\).*rules=\{'0': 'int8'\}"):
        insert_qdq(exported, QuantConfig("float", linear="int4"))


def test_a_weight_that_is_not_finite_names_the_parameter() -> None:
    model = nn.Linear(64, 64)
    model.weight.data[3, 5] = float("nan")
    with pytest.raises(FormatValueError, match=r"parameter 'weight' \(64 x 64\).*row 3, column 5"):
        insert_qdq(export_model(model.eval(), (torch.randn(3, 64),)), "nf4")


def test_a_missed_promise_is_an_error() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(100, 64))
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table.sum(0)

    exported = export_model(Wide(), (torch.randn(3, 64),))
    reason = r"table at 32\.00 bits \(not the weight of a linear, a convolution or an embedding\)"
    with pytest.raises(PromiseError, match=reason):
        insert_qdq(exported, "nf4")


def test_the_store_keeps_what_fmt_encode_gives() -> None:
    model = Model()
    stored = _quantized(model, QuantConfig("nf4", promise_bits=None)).weights["up.weight"]
    wanted = formats.get("nf4").encode(model.up.weight.detach().numpy()).data
    assert np.array_equal(stored.data, wanted)
    assert stored.parameters == ("up.weight",)


def test_dumps_show_shapes_formats_and_lines() -> None:
    result = import_torch(Model().eval(), (IDS,), {}, QuantConfig("nf4", promise_bits=None), SHAPES)
    assert "torch.ops.aten.linear.default" in result.texts["00-export"]
    assert "qc.dequantize" in result.texts["01-insert-qdq"] and "nf4:block=64" in result.texts["01-insert-qdq"]
    assert "test_insert_qdq.py" in result.texts["00-export"]
    assert "torch.ops.qc" not in result.texts["00-export"]


@pytest.mark.parametrize("quant", [None, QuantConfig("int8", promise_bits=None)])
def test_a_product_that_becomes_a_linear_may_be_the_result(quant: Any) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 64)
            self.up = nn.Parameter(torch.randn(64, 32))

        def forward(self, ids: torch.Tensor) -> Any:
            x = self.embed(ids)
            return x @ self.embed.weight.t(), {"up": x @ self.up, "table": self.embed.weight}

    quantized = _quantized(Head(), quant)
    logits, rest = quantized.module(IDS)
    table = rest["table"]
    assert torch.allclose(logits, table[IDS] @ table.t(), atol=1e-4)
    assert rest["up"].shape == (3, 7, 32)
