"""Fused weights of experts: every form of their product is one op, and formats store them like those of linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from torch import nn

from qcompiler.config import QuantConfig
from qcompiler.errors import FormatShapeError, RecipeError
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.torch.capture.expert_weights import as_pairs
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.ir import qc

E, N, K, TOP = 4, 6, 32, 2
ROWS = {"x": {0: ("t", 1, 16)}, "index": {0: ("t", 1, 16)}}


def inputs(rows: int = 5, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=generator).to(dtype)
    return x, torch.stack([torch.randperm(E, generator=generator)[:TOP] for _ in range(rows)])


class Experts(nn.Module):
    """The weights, (E, N, K) or (E, K, N), and one way of computing the product of every row with its experts."""

    def __init__(self, *, transposed: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        w = torch.randn(E, N, K, generator=generator) / K**0.5
        self.w = nn.Parameter((w.transpose(1, 2).contiguous() if transposed else w).to(dtype))


class Batched(Experts):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(TOP, dim=0)
        return torch.bmm(self.w[index.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)


class BatchedTransposed(Experts):
    def __init__(self) -> None:
        super().__init__(transposed=True)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(TOP, dim=0)
        return torch.bmm(rows.unsqueeze(1), self.w[index.reshape(-1)]).squeeze(1)


class Gathered(Experts):
    """Rows of x are picked by a gather, not copied; the product is a matmul."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        token = torch.arange(index.numel()) // TOP
        return (self.w[index.reshape(-1)] @ x[token][..., None])[..., 0]


class Sorted(Experts):
    """As transformers' default: rows sorted by expert, where each expert's end, and back."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        experts, order = torch.sort(index.reshape(-1))
        counts = torch.histc(experts.float(), bins=E, min=0, max=E - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        out = torch._grouped_mm(x[order // TOP], self.w.transpose(-2, -1), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return out[back]


class Ends(Experts):
    """The ends are an argument: nothing says where they come from."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=ends)


class Dense(Experts):
    """Every row goes through every expert."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(E, 1).view(E, -1, K)
        each = torch.bmm(wide, self.w.transpose(1, 2))
        return each[index.T.reshape(-1), torch.arange(x.shape[0]).repeat(TOP)]


class DenseTransposed(Experts):
    def __init__(self) -> None:
        super().__init__(transposed=True)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(E, -1, -1), self.w) * index.sum()


class Repeated(Experts):
    """`matmul` repeats x for every matrix: no product of pairs."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(0) @ self.w.transpose(1, 2)) * index.sum()


class Both(Experts):
    """A second use, which no product is."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(TOP, dim=0)
        return torch.bmm(self.w[index.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1) + self.w.sum()


def grouped(result: Any) -> list[qc.GroupedLinearOp]:
    return [op for op in result.module.walk() if isinstance(op, qc.GroupedLinearOp)]


@pytest.mark.parametrize("quant", [None, QuantConfig("int8", promise_bits=None)], ids=["float", "int8"])
@pytest.mark.parametrize(
    ("model", "repeat"), [(Batched, TOP), (BatchedTransposed, TOP), (Gathered, 1), (Dense, 1), (DenseTransposed, 1)]
)
def test_every_form_is_one_op_and_equals_torch(
    check: Callable[..., Any], model: type[Experts], repeat: int, quant: Any
) -> None:
    others = (inputs(1), inputs(16))
    result = check(model(), *inputs(), dynamic=ROWS, others=others, quant=quant)
    (op,) = grouped(result)
    assert (op.experts.value.data, op.repeat.value.data) == (E, repeat)
    assert not [each for each in result.module.walk() if isinstance(each, qc.BatchMatmulOp)]
    (row,) = (row for row in result.ledger if "w" in row.parameters)
    assert row.format == ("" if quant is None else "int8") and row.shape == tuple(model().w.shape)
    assert result.weights["w"].shape == (E * N, K)


def test_a_product_that_repeats_x_is_none_of_the_forms(check: Callable[..., Any]) -> None:
    result = check(Repeated(), *inputs(), dynamic=ROWS, quant=QuantConfig("int8", promise_bits=None))
    assert not grouped(result)


def test_sorted_rows_are_computed_by_the_sorted_experts(check: Callable[..., Any]) -> None:
    """No expert is counted: the sorted index says what the sums of counts say."""
    model = Sorted(dtype=torch.bfloat16)
    quant = QuantConfig("int8", promise_bits=None)
    result = check(
        model, *inputs(5, torch.bfloat16), dynamic=ROWS, others=(inputs(1, torch.bfloat16),), quant=quant,
        tolerance=1e-2,
    )  # fmt: skip
    (op,) = grouped(result)
    assert op.repeat.value.data == 1
    assert not [each for each in result.module.walk() if isinstance(each, qc.CumsumOp)]


def test_llama_4_computes_the_chosen_experts_only() -> None:
    """Its module sends every token through every expert, with zeros for those that were not chosen."""
    model = small("Llama4Text", num_local_experts=4, num_experts_per_tok=2, interleave_moe_layer_step=1)
    module = model.model.layers[0].feed_forward
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = module(x)[0]
        with as_pairs(model):
            ours = module(x)[0]
    assert "forward" not in vars(module), "the module is as it was"
    module.forward = mine = lambda hidden: (hidden, hidden)
    with as_pairs(model):
        assert module.forward is mine, "a user's own is left alone"
    del module.forward
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    quantized = insert_qdq(export_model(model, (), IDS, DIMS), QuantConfig("int8", promise_bits=None))
    targets = [str(node.target) for node in quantized.exported.graph.nodes]
    assert targets.count("qc.grouped_linear.default") == 2 and "aten.bmm.default" not in targets
    assert "aten.repeat.default" not in targets, "there is no row for every expert"
    assert {row.format for row in quantized.ledger if "experts" in row.parameters[0]} == {"int8"}


def test_dbrx_computes_the_chosen_experts_of_its_matrices() -> None:
    """Its module loops over the experts that occur, and its weights are matrices of which it takes views."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DbrxConfig(
        d_model=64, n_heads=4, n_layers=1, vocab_size=99, use_cache=False,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DbrxForCausalLM(config).eval()
    module = model.transformer.blocks[0].ffn
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
        wanted = module(x)
        with as_pairs(model):
            ours = module(x)
    assert "forward" not in vars(module.experts), "the module is as it was"
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    quantized = insert_qdq(export_model(model, (), IDS, DIMS), QuantConfig("int8", promise_bits=None))
    targets = [str(node.target) for node in quantized.exported.graph.nodes]
    assert targets.count("qc.grouped_linear.default") == 3 and "aten.bmm.default" not in targets
    rows = {row.parameters[0].rpartition(".")[2]: row for row in quantized.ledger if "experts" in row.parameters[0]}
    found = {name: (row.format, row.shape) for name, row in rows.items()}
    assert found == dict.fromkeys(("w1", "v1", "w2"), ("int8", (384, 64)))


@pytest.mark.parametrize(("kind", "products"), [("jetmoe", 4), ("longcat_flash", 4)])
def test_mixtures_that_loop_or_split_in_python_become_grouped_products(kind: str, products: int) -> None:
    """JetMoE has two mixtures in a layer, of attention and of the MLP, and LongCat two layers here with one each."""
    pytest.importorskip("transformers")
    every = load("tests/lm/test_every_decoder.py")
    layers = {"num_hidden_layers": 1} if kind == "jetmoe" else {"num_layers": 2}
    model = every.build(kind, use_cache=False, **layers)
    quantized = insert_qdq(export_model(model, (), IDS, DIMS), QuantConfig("int8", promise_bits=None))
    targets = [str(node.target) for node in quantized.exported.graph.nodes]
    assert targets.count("qc.grouped_linear.default") == products and "aten.bmm.default" not in targets
    assert not [module for module in model.modules() if "forward" in vars(module)], "the model is as it was"


class Views(nn.Module):
    """A matrix (E * N, K) of which one use takes a view (E, N, K), and another one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(E * N, K, generator=torch.Generator().manual_seed(7)) / K**0.5)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(TOP, dim=0)
        picked = torch.bmm(self.w.view(E, N, K)[index.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)
        return picked + nn.functional.linear(rows, self.w)[:, :N]


@pytest.mark.slow
def test_a_matrix_with_a_use_beside_its_views_is_no_weight_of_experts(check: Callable[..., Any]) -> None:
    assert not grouped(check(Views(), *inputs(), dynamic=ROWS))


def test_where_experts_end_may_be_any_numbers(check: Callable[..., Any]) -> None:
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    calls = [(x, torch.tensor(ends, dtype=torch.int32)) for ends in ([2, 2, 7, 9], [0, 0, 0, 9], [9, 9, 9, 9])]
    result = check(Ends(dtype=torch.bfloat16), *calls[0], others=calls[1:], tolerance=1e-2)
    assert len(grouped(result)) == 1


def test_a_weight_with_another_use_stays_and_the_ledger_says_so(check: Callable[..., Any]) -> None:
    result = check(Both(), *inputs(), dynamic=ROWS, quant=QuantConfig("int8", promise_bits=None))
    (row,) = (row for row in result.ledger if "w" in row.parameters)
    assert row.format == "" and "not the weight of a linear" in row.reason and not grouped(result)


# --- formats ---------------------------------------------------------------------------------------------------------


def quantized(model: nn.Module, quant: Any) -> Quantized:
    return insert_qdq(export_model(model.eval(), inputs(), {}, ROWS), quant)


@pytest.mark.parametrize("text", ["nf4:block=64", "int8", "q4_0", "int4:group=32,symmetric=False"])
def test_the_stored_bytes_are_those_of_the_matrices_below_each_other(text: str) -> None:
    """Flat blocks run over the whole parameter, as bitsandbytes' do; those of a transposed one run along K, too."""
    from qcompiler.config import resolve_format

    fmt, recipe = resolve_format(text), QuantConfig(text, promise_bits=None)
    matrix = Experts().w.detach().reshape(E * N, K).numpy()
    expected = fmt.encode(matrix).data
    for model in (Batched(), BatchedTransposed()):
        np.testing.assert_array_equal(quantized(model, recipe).weights["w"].data, expected)


def test_the_promise_counts_experts() -> None:
    ledger = quantized(Batched(), "q4_0").ledger
    assert ledger.bits_per_weight() == 4.5 and ledger.promise_bits == QuantConfig("q4_0").promise_bits


def test_a_format_that_does_not_fit_is_an_error_and_a_rule_is_the_way_out() -> None:
    with pytest.raises(FormatShapeError, match=r"parameter 'experts\.w' \(24 x 32\).*rules={'experts': 'int8'}"):
        quantized(Held(), QuantConfig("float", linear="q4_K", embedding="int8"))
    for rule in ("experts", "experts.w", "*"):
        kept = quantized(Held(), QuantConfig("q4_K", rules={rule: None}, promise_bits=None))
        (row,) = (row for row in kept.ledger if "experts.w" in row.parameters)
        assert row.format == "" and f"rule '{rule}'" in row.reason
    with pytest.raises(RecipeError, match="matches no module"):
        quantized(Held(), QuantConfig("int8", rules={"expert_": None}))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Batched()

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.experts(x, index)


# --- transformers ----------------------------------------------------------------------------------------------------


def small(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options}, use_cache=False)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


IDS = {"input_ids": torch.arange(12).reshape(2, 6)}
DIMS = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 8)}}


def test_a_users_choice_of_implementation_does_not_matter_and_is_left_as_it_is() -> None:
    """The default sorts rows; "eager" cannot be exported at all."""
    model, found = small("Mixtral", num_local_experts=4), set()
    for choice in ("grouped_mm", "eager"):
        model.set_experts_implementation(choice)
        quantized = insert_qdq(export_model(model, (), IDS, DIMS), QuantConfig("int8", promise_bits=None))
        assert model.config._experts_implementation == choice
        targets = [str(node.target) for node in quantized.exported.graph.nodes]
        assert targets.count("qc.grouped_linear.default") == 2 and "aten.sort.default" not in targets
        found.add(tuple(targets))
    assert len(found) == 1
    with pytest.raises(KeyError), as_pairs(model):
        assert model.config._experts_implementation == "batched_mm"
        raise KeyError
    assert model.config._experts_implementation == "eager"


@pytest.mark.slow
def test_an_implementation_of_the_users_own_is_exported_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def nothing(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    assert transformers.__version__
    ALL_EXPERTS_FUNCTIONS.register("of_this_test", nothing)
    model = small("Mixtral", num_local_experts=4)
    model.set_experts_implementation("of_this_test")
    ledger = insert_qdq(export_model(model, (), IDS, DIMS), None).ledger
    experts = [row for row in ledger if "experts" in row.parameters[0]]
    assert len(experts) == 2 and all(row.reason == "not used by the graph" for row in experts)


def test_a_program_exported_with_sorted_rows_is_raised_as_well(check: Callable[..., Any]) -> None:
    model = small("Mixtral", num_local_experts=4)
    model.set_experts_implementation("grouped_mm")
    sizes = {0: torch.export.Dim("b", min=1, max=4), 1: torch.export.Dim("s", min=1, max=8)}
    program = torch.export.export(model, (), IDS, dynamic_shapes={"input_ids": sizes}, strict=False)
    quantized = insert_qdq(export_model(program), QuantConfig("q8_0", promise_bits=None))
    targets = [str(node.target) for node in quantized.exported.graph.nodes]
    assert targets.count("qc.grouped_linear.default") == 2 and "aten.histc.default" not in targets
    assert {row.format for row in quantized.ledger if "experts" in row.parameters[0]} == {"q8_0"}
    with torch.no_grad():
        ours, theirs = quantized.module(**IDS).logits, model(**IDS).logits
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.parametrize(
    "quant",
    [pytest.param(None, marks=pytest.mark.slow), QuantConfig("int8", promise_bits=None)],
    ids=["float", "int8"],
)
def test_transposed_experts_with_biases(check: Callable[..., Any], quant: Any) -> None:
    """GPT-OSS keeps (E, K, N), interleaves gate and up, and has biases per expert, which stay as they are."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    result = check(Logits(), IDS["input_ids"], dynamic=DIMS, quant=quant, tolerance=1e-4)
    assert len(grouped(result)) == 2
    stored = {
        row.parameters[0].rpartition(".")[2]: row.format for row in result.ledger if "experts" in row.parameters[0]
    }
    assert stored["gate_up_proj"] == stored["down_proj"] == ("" if quant is None else "int8")
    assert stored["gate_up_proj_bias"] == stored["down_proj_bias"] == ""
