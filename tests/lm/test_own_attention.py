"""Models whose attention transformers cannot replace: right for sequences of different lengths, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from by_path import load
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from qcompiler.errors import ExportError
from qcompiler.lm.compile import example_inputs
from qcompiler.lm.reads import check_reads
from qcompiler.lm.step import prepared

IDS: Any = {"vocab_size": 199, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
DECODER: Any = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, **IDS}
BERT: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, **IDS}
CONFIGS: dict[str, Any] = {
    "gptj": lambda t: t.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64, **IDS),
    "bloom": lambda t: t.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **IDS),
    "codegen": lambda t: t.CodeGenConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64, **IDS),
    "xglm": lambda t: t.XGLMConfig(d_model=64, num_layers=2, attention_heads=4, ffn_dim=96, **IDS),
    "megatron-bert": lambda t: t.MegatronBertConfig(is_decoder=True, **BERT),
    "gpt-neo": lambda t: t.GPTNeoConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=64,
        **IDS,
    ),
    "gpt-neox-japanese": lambda t: t.GPTNeoXJapaneseConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_multiple_size=2, **IDS
    ),
    "bart": lambda t: t.BartConfig(is_decoder=True, **DECODER),
    "roberta": lambda t: t.RobertaConfig(is_decoder=True, **BERT),
}


def build(name: str) -> Any:
    """A model whose attention is far from uniform, so that a wrong mask shows."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](transformers)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["gptj", "bloom", "codegen", "xglm", "megatron-bert"])
def test_logits_are_those_of_transformers(name: str, batch: int) -> None:
    load("tests/lm/test_architectures.py").check(build(name), batch)


def follow(model: Any, batch: int) -> None:
    """What `compile_causal_lm` does before it compiles."""
    with prepared(model, batch, 45, None, 40, 5) as step:
        check_reads(step, example_inputs(batch, 45, 5))


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [
        ("gpt-neo", 1, "has a mask of its own in 'transformer.h.0.attn.attention.bias'"),
        ("roberta", 1, "counts positions from its tokens"),
        ("bart", 3, "counts positions from the length of its cache.*max_batch=1"),
        ("gpt-neox-japanese", 3, r"key = key.view\(batch_size \* num_attention_heads.*max_batch=1"),
    ],
)
def test_a_model_whose_numbers_would_be_wrong_is_refused(name: str, batch: int, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        follow(build(name), batch)


class Looked(torch.nn.Module):
    """A table of positions that is looked up in one of torch's ways."""

    def __init__(self, table: torch.Tensor, way: str) -> None:
        super().__init__()
        self.weight, self.way = torch.nn.Parameter(table.clone()), way

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        flat, rows = positions.reshape(-1), torch.arange(self.weight.shape[0])
        if self.way == "index_select":
            found = self.weight.index_select(0, flat)
        elif self.way == "gather":
            found = self.weight.gather(0, flat[:, None].expand(-1, self.weight.shape[1]))
        elif self.way == "product":
            found = (flat[:, None] == rows).float() @ self.weight
        else:
            found = self.weight[flat]
        return found.view(*positions.shape, -1)


@pytest.mark.parametrize("way", ["index_select", *(pytest.param(way, marks=pytest.mark.slow) for way in (
    "index", "gather", "product"))])  # fmt: skip
def test_positions_that_are_counted_are_seen_however_they_are_looked_up(way: str) -> None:
    model = build("roberta")
    embeddings = model.roberta.embeddings
    embeddings.position_embeddings = Looked(embeddings.position_embeddings.weight.detach(), way)
    with pytest.raises(ExportError, match="counts positions from its tokens"):
        follow(model, 1)


@pytest.mark.parametrize("way", ["index", *(pytest.param(way, marks=pytest.mark.slow) for way in (
    "index_select", "gather"))])  # fmt: skip
def test_a_look_up_of_tokens_counts_nothing(way: str) -> None:
    """Words are looked up by tokens; sums over what was looked up are no counts (recurrences sum decays)."""
    model = build("gptj")
    words = Looked(model.transformer.wte.weight.detach(), way)
    model.transformer.wte.forward = lambda ids: torch.cumsum(words(ids), 1)
    follow(model, 1)


SQUARES: dict[str, Any] = {
    "flags": lambda size: torch.ones(size, size, dtype=torch.bool).tril(),
    "a triangle of numbers": lambda size: torch.full((size, size), -1e4).triu(1),
    "a window of bytes": lambda size: torch.ones(size, size, dtype=torch.uint8).tril().triu(-3),
}


@pytest.mark.parametrize(
    "kind", ["flags", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SQUARES if kind != "flags")]
)
def test_a_mask_of_any_size_is_seen(kind: str) -> None:
    """Its model has 64 positions, and keeps a mask for more."""
    model = build("gptj")
    assert model.config.max_position_embeddings == 64
    with_square(model, SQUARES[kind](80))
    with pytest.raises(
        ExportError, match=r"has a mask of its own in 'transformer.h.0.attn.square', cut by the number of"
    ):
        follow(model, 1)


@pytest.mark.slow
@pytest.mark.parametrize("square", [torch.eye(16), torch.ones(16, 16).tril() + 0.5])
def test_other_squares_are_no_masks(square: torch.Tensor) -> None:
    model = build("gptj")
    with_square(model, square)
    follow(model, 1)


def with_square(model: Any, square: torch.Tensor) -> None:
    """Lets the first layer's attention read a part of a buffer."""
    attention = model.transformer.h[0].attn
    attention.register_buffer("square", square, persistent=False)
    attention.out_proj.register_forward_hook(lambda module, args, out: out + attention.square[:1, :1].float())


@pytest.mark.parametrize(("name", "batch"), [("gptj", 3), ("bart", 1), ("gpt-neox-japanese", 1)])
def test_what_is_right_is_not_refused(name: str, batch: int) -> None:
    follow(build(name), batch)


def test_other_calls_keep_the_masks_of_transformers() -> None:
    model = build("gptj")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(ids).logits
        follow(model, 3)
        after = model(ids).logits
    assert torch.equal(before, after) and model.config._attn_implementation == "eager"
    mask: Any = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    assert mask.by_position, "the name has our function now, which gives others transformers' mask"


def test_falcon_is_among_them() -> None:
    model = load("tests/models/zoo.py").DECODERS["falcon"].build()
    with prepared(model, 3, 45, None, 40, 5) as step:
        assert not step.replaced and step.has_mask
