"""Recipes that choose per tensor, beside what llama.cpp's own quantiser chose (golden/make_mixtures.py)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.config import QuantConfig, resolve_format
from qcompiler.errors import FormatShapeError, PromiseError, RecipeError, UnknownFormatError
from qcompiler.format_mixtures import MIXTURES
from qcompiler.frontends.quantise.choose_formats import Described, FormatChooser

GOLDEN = Path(__file__).with_name("golden") / "mixtures.json"
LETTERS = {
    "q2_K": "2", "q3_K": "3", "q4_K": "4", "q5_K": "5", "q6_K": "6", "q8_0": "8", "q4_0": "a", "q5_0": "b", "q5_1": "c",
}  # fmt: skip
CASES: dict[str, Any] = json.loads(GOLDEN.read_text())
KINDS = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2", "gptneox": "GPTNeoX", "falcon": "Falcon",
    "phi3": "Phi3",
}  # fmt: skip


def _model(case: dict[str, Any]) -> nn.Module:
    """The case as a model of transformers, without values."""
    kind = "Mixtral" if "experts" in case else KINDS[case["arch"]]
    sizes: dict[str, Any] = {
        "hidden_size": case["hidden"], "num_hidden_layers": case["layers"], "num_attention_heads": case["heads"],
        "vocab_size": 96, "tie_word_embeddings": case["tied"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "GPT2":
        sizes |= {"n_inner": case["ffn"], "n_positions": 64}
    elif kind == "Falcon":
        sizes |= {"ffn_hidden_size": case["ffn"], "multi_query": True, "new_decoder_architecture": False}
    else:
        sizes |= {"intermediate_size": case["ffn"], "num_key_value_heads": case["kv"]}
        sizes |= {"num_local_experts": case["experts"]} if "experts" in case else {}
    if kind == "GPTNeoX":
        sizes.pop("num_key_value_heads")
    with torch.device("meta"):
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))


def _weights(model: nn.Module) -> list[Described]:
    """Every weight that the frontend takes for one that a format can store, tied ones together."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    transposed = {module.weight for module in model.modules() if type(module).__name__ == "Conv1D"}
    paths: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim > 1:
            paths.setdefault(parameter, []).append(name)
    found = []
    for parameter, names in paths.items():
        shape = tuple(reversed(parameter.shape)) if parameter in transposed else tuple(parameter.shape)
        stored = (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape
        kind: Any = "embedding" if parameter in tables else "linear"
        found.append(Described(tuple(names), kind, stored, tuple(parameter.shape)))
    return found


def _gguf_names(path: str, case: dict[str, Any]) -> list[str]:
    """What llama.cpp's converter calls a parameter, by the table of its `gguf` package."""
    if ".mlp.experts." in path:
        layer = path.split(".")[2]
        return [f"blk.{layer}.ffn_{part}_exps" for part in (("down",) if "down" in path else ("gate", "up"))]
    found = _table(case["arch"], case["layers"]).get_name(
        path.replace("mlp.gate.", "block_sparse_moe.gate."), try_suffixes=(".weight",)
    )
    assert found is not None, path
    return [found.removesuffix(".weight")]


@functools.cache
def _table(name: str, layers: int) -> gguf.TensorNameMap:
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    return gguf.get_tensor_name_map(arch, layers)


SHORT = ("llama-1", "llama-9", "llama-gqa4", "llama-ffn-360", "llama-80", "mixtral-8", "qwen2-tied", "gpt2", "falcon")
"""The short run has one case of each rule: few layers and many, shared heads, odd widths, experts, other names."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in CASES])
def test_every_mixture_chooses_to_the_tensor_what_llama_cpp_chooses(name: str) -> None:
    case, types = CASES[name]["case"], CASES[name]["types"]
    model = _model(case)
    weights = _weights(model)
    names = {weight.targets: _gguf_names(weight.targets[0], case) for weight in weights}
    assert set(types) == set(MIXTURES)
    for mixture, expected in types.items():
        chooser = FormatChooser(QuantConfig(mixture), model.config, weights)
        found: dict[str, dict[int, str]] = {}
        for weight in weights:
            chosen = chooser.choose(weight)[0]
            for each in names[weight.targets]:
                parts = each.split(".")
                layer = int(parts[1]) if parts[0] == "blk" else 0
                place = ".".join("*" if part.isdigit() else part for part in parts)
                found.setdefault(place, {})[layer] = "hf" if chosen is None else LETTERS[chosen]
        # what llama.cpp keeps stays in the model's own dtype; what nothing divides it stores as F16
        same = {place: [each[layer] for layer in sorted(each)] for place, each in found.items()}
        assert same.keys() == expected.keys()
        for place, letters in same.items():
            wanted = ["hf" if letter in "hf" else letter for letter in expected[place]]
            assert letters == wanted, f"{mixture} {place}: {''.join(letters)}, llama.cpp {expected[place]}"


def test_facts_come_from_shapes_where_a_model_has_no_config() -> None:
    """Layers, tied heads and grouped queries of an ExportedProgram: the golden rows of the same model."""
    for name in ("llama-9", "llama-gqa4", "llama-tied", "mixtral-8"):
        model = _model(CASES[name]["case"])
        weights = _weights(model)
        for mixture in MIXTURES:
            by_config, by_shape = (FormatChooser(QuantConfig(mixture), each, weights) for each in (model.config, None))
            assert [by_config.choose(w) for w in weights] == [by_shape.choose(w) for w in weights]


# --- compiled --------------------------------------------------------------------------------------------------------

writing = load("tests/files/writing.py")


@pytest.mark.slow
def test_a_compiled_model_holds_the_mixture_and_says_which_role_decided() -> None:
    model = writing.build("Llama", hidden_size=256, intermediate_size=352, num_hidden_layers=2)
    ids = torch.tensor([[1, 5, 9]])
    made = qc.qcompile(model, (ids,), quant="q4_K_M")
    rows = {row.parameters[0]: row for row in made.ledger if row.counts}
    assert rows["model.layers.1.self_attn.v_proj.weight"].format == "q6_K"
    assert rows["model.layers.1.self_attn.v_proj.weight"].reason == "q4_K_M: attn_v of layer 1"
    assert rows["model.layers.0.self_attn.k_proj.weight"].format == "q4_K"
    assert rows["lm_head.weight"].format == "q6_K" and rows["model.embed_tokens.weight"].format == "q4_K"
    down = rows["model.layers.0.mlp.down_proj.weight"]  # 352 columns
    assert down.format in ("q5_0", "q8_0") and "does not divide its 352 columns" in down.reason
    assert made.ledger.later == 2 and "2 tensors in a later choice" in made.ledger.totals()
    assert "model.layers.0.mlp.down_proj.weight" in str(made.report())
    expected = made.oracle(ids).logits
    assert torch.allclose(made(ids).logits, expected.detach(), atol=1e-4 * float(expected.detach().abs().max()))


# --- chains ----------------------------------------------------------------------------------------------------------


def _linears(*cols: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in zip(cols, (*cols[1:], 16), strict=True))).eval()


def _formats(quant: str | QuantConfig, *cols: int) -> dict[str, str]:
    made = qc.qcompile(_linears(*cols), (torch.randn(3, cols[0]),), quant=quant, weights="none")
    return {row.parameters[0]: row.format for row in made.ledger}


def test_the_first_choice_that_divides_k_is_taken() -> None:
    found = _formats("q4_K, else q5_0, else int8", 512, 288, 100)
    assert list(found.values()) == ["q4_K", "q5_0", "int8"]
    found = _formats(QuantConfig("nf4", linear="q6_K, else float", promise_bits=None), 256, 100)
    assert list(found.values()) == ["q6_K", ""]


@pytest.mark.parametrize("name", [n for n in qc.formats.names() if resolve_format(n).declaration.tail == "refuse"])
def test_every_recipe_that_is_a_format_has_something_for_every_k(name: str) -> None:
    for text in (name, f"{name}:group=128") if name.startswith("int") else (name,):
        if text in ("q2_K", *MIXTURES):
            continue  # a mixture, which keeps what no block divides, as llama.cpp does
        found = _formats(text, 256, 288, 100)
        assert found["0.weight"].startswith(name) and all(found.values())
        later = [QuantConfig(text).linear, *found.values()]
        assert found["2.weight"].startswith("int8"), later


def test_an_explicit_format_without_a_chain_is_an_error_that_shows_how_to_write_one() -> None:
    with pytest.raises(FormatShapeError, match=r"'0.weight' \(16 x 100\).*'q4_K, else int8' names an alternative"):
        _formats(QuantConfig("float", linear="q4_K"), 100)
    with pytest.raises(FormatShapeError, match=r"'0.weight'"):
        _formats(QuantConfig("nf4", rules={"0": "q4_K"}), 100)
    assert _formats(QuantConfig("nf4", rules={"0": "q4_K, else int8"}), 100) == {"0.weight": "int8"}


def test_the_presets_promise_grows_by_what_later_choices_take_and_an_own_promise_does_not() -> None:
    made = qc.qcompile(_linears(512, 100), (torch.randn(3, 512),), quant="q2_K, else float", weights="none")
    first = QuantConfig("q2_K, else float").promise_bits
    assert made.ledger.later == 1 and isinstance(first, float)
    elements = {row.parameters[0]: row.elements for row in made.ledger}
    expected = first + elements["1.weight"] * (32 - first) / sum(elements.values())
    assert made.ledger.promise_bits == pytest.approx(expected, abs=1.1e-3)
    with pytest.raises(PromiseError, match=r"promises 3.0 bits"):
        _formats(QuantConfig("q2_K, else float", promise_bits=3.0), 512, 100)


@pytest.mark.parametrize(("text", "error"), [
    ("q4_K, else q5_9", UnknownFormatError), ("q4_K, else", UnknownFormatError), ("q4_K, q5_0", UnknownFormatError),
    ("q4_K_M, else int8", RecipeError), ("q4_K, else q4_K_M", RecipeError), ("q6_K_M", UnknownFormatError),
])  # fmt: skip
def test_a_chain_that_names_something_else_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        QuantConfig(text)


def test_q2_K_is_the_mixture_and_the_plain_format_can_still_be_had() -> None:
    assert QuantConfig("q2_K").linear == QuantConfig("q2_K_M").linear == "q2_K_M"
    assert _formats(QuantConfig("float", linear="q2_K"), 256) == {"0.weight": "q2_K"}
