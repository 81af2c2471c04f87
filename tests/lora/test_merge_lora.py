"""qc.merge_lora: what peft adds to a model's weights is added to quantised ones, and it says what rounding took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qcompiler as qc
from qcompiler.errors import AdapterError, ArgumentError, FormatValueError, MergeError
from qcompiler.formats import PackedTensor, made
from qcompiler.frontends.quantise.lora_adapter import LoraLayer, read_adapter
from qcompiler.frontends.quantise.merge_lora import merged_rows

TARGETS = ("q_proj", "down_proj")
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"down_proj": 3, "0.self_attn.q_proj": 5},
        "alpha_pattern": {r"layers\.1\..*q_proj": 40},
    },
    "dora": {"use_dora": True},
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=False)).eval()


def adapted(model: nn.Module, targets: Any = TARGETS, **settings: Any) -> peft.PeftModel:
    """The model under an adapter whose factors, and magnitudes, are no longer what they begin with."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(targets), **settings))
    torch.manual_seed(1)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            noise = torch.randn_like(parameter)
            parameter.data.copy_(parameter.data * (1 + 0.1 * noise) if "magnitude" in name else 0.05 * noise)
    return found.eval()


def floats(model: nn.Module, targets: Any = TARGETS) -> dict[str, np.ndarray]:
    """The weights of the target modules by their paths."""
    return {
        name: module.weight.detach().numpy().copy()
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and hasattr(module, "weight")
    }


def exact(layer: LoraLayer, w: np.ndarray) -> np.ndarray:
    """The merged weight, whole."""
    rows, cols = w.shape
    return merged_rows(layer, lambda first, stop: w[first:stop], rows, cols, outputs_first=False)(0, rows)


@pytest.mark.parametrize("kind", CONFIGS)
def test_floats_merge_to_what_peft_merges(kind: str, tmp_path: Path) -> None:
    model = adapted(llama(), **CONFIGS[kind])
    model.save_pretrained(tmp_path)
    before = floats(llama())
    merged, report = qc.merge_lora(before, tmp_path)
    expected = floats(model.merge_and_unload())
    assert merged.keys() == expected.keys() == before.keys() and len(before) == 4
    for name, value in merged.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-6)
        assert np.abs(value - before[name]).max() > 1e-3
    assert [row.kept for row in report.layers] == pytest.approx([1] * 4, abs=1e-5)
    ranks = {row.path: row.rank for row in report.layers}
    assert ranks["model.layers.0.self_attn.q_proj"] == (5 if kind == "patterns" else 4)
    tensors = peft.get_peft_model_state_dict(adapted(llama(), **CONFIGS[kind]))  # torch's, in memory
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    again, _ = qc.merge_lora({f"{name}.weight": w for name, w in before.items()}, tensors, config=config)
    assert all((again[f"{name}.weight"] == value).all() for name, value in merged.items())


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_transposed_weight_and_an_embedding_merge_as_peft_merges_them(use_dora: bool, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 80}
        return GPT2LMHeadModel(GPT2Config(**sizes)).eval()

    targets = ("c_attn", "c_fc") if use_dora else ("c_attn", "wpe")
    model = adapted(gpt2(), targets, fan_in_fan_out=True, use_dora=use_dora)
    model.save_pretrained(tmp_path)
    merged, report = qc.merge_lora(floats(gpt2(), targets), tmp_path)
    expected = floats(model.merge_and_unload(), targets)
    assert {row.shape for row in report.layers} == {(64, 192), (64, 256) if use_dora else (32, 64)}
    for name, value in merged.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-6)


VARIANTS = [
    "nf4", "nf4:double_quant", "fp4:block=4096", "llm_int8", "int8", "int4:symmetric=False", "int3", "int2:group=row",
    "fp8_e4m3", "fp8_e4m3:per=tensor", "fp8_e5m2:per=block", "mxfp4", "mxfp8", "nvfp4", "nvfp4:divisor", "mxfp4_ggml",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs",
    "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq1_0", "tq2_0",
    "tq:bits=2",
]  # fmt: skip


def test_every_format_is_named_above() -> None:
    assert {text.partition(":")[0] for text in VARIANTS} == set(qc.formats.names())


SLOW = ("iq3_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq:bits=2")
"""Formats that take NumPy long to encode; iq3_xxs stands for them in the short run."""


WITH_DORA = ("nf4", "int8", "q4_K")
"""The short run scales the rows of these."""


@pytest.mark.parametrize(
    ("text", "use_dora"),
    [
        pytest.param(text, dora, marks=[pytest.mark.slow] * (text in SLOW or (dora and text not in WITH_DORA)))
        for dora in (False, True) for text in VARIANTS
    ],
)  # fmt: skip
def test_codes_are_those_of_the_exact_sum(text: str, use_dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompiler.config import resolve_format

    monkeypatch.setattr(made, "PIECE", 40 * 256)  # several pieces, the last one short
    fmt, rng = resolve_format(text), np.random.default_rng(3)
    packed = fmt.encode(rng.normal(scale=0.05, size=(150, 256)).astype(np.float32))
    a, b = rng.normal(size=(4, 256)).astype(np.float32), rng.normal(scale=0.02, size=(150, 4)).astype(np.float32)
    tensors = {"base_model.model.up.lora_A.weight": a, "base_model.model.up.lora_B.weight": b}
    if use_dora:
        tensors["base_model.model.up.lora_magnitude_vector"] = rng.uniform(0.5, 1, 150).astype(np.float32)
    config = {"r": 4, "lora_alpha": 8, "use_dora": use_dora}
    (layer,) = read_adapter(tensors, config)
    kept = packed.to_bytes()
    merged, report = qc.merge_lora({"up": packed, "other": packed}, tensors, config=config)
    assert packed.to_bytes() == kept and merged["other"] is packed
    w = fmt.decode(packed)
    total = exact(layer, w)
    assert merged["up"].to_bytes() == fmt.encode(total).to_bytes()
    if not use_dora:
        np.testing.assert_allclose(total, w + 2 * (b @ a), rtol=0, atol=1e-6)
    after, (row,) = fmt.decode(merged["up"]), report.layers
    assert row.error == pytest.approx(np.linalg.norm(after - total) / np.linalg.norm(total), rel=1e-4)
    d, change = (total - w).ravel().astype(np.float64), (after - w).ravel().astype(np.float64)
    assert row.kept == pytest.approx(np.linalg.norm(change) / np.linalg.norm(d), rel=1e-4)
    assert row.cosine == pytest.approx(change @ d / np.linalg.norm(change) / np.linalg.norm(d), rel=1e-4)


def factors(path: str, rows: int, cols: int, rank: int = 2, scale: float = 0.1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        f"base_model.model.{path}.lora_A.weight": rng.normal(size=(rank, cols)).astype(np.float32),
        f"base_model.model.{path}.lora_B.weight": (scale * rng.normal(size=(rows, rank))).astype(np.float32),
    }


def packed(text: str, rows: int, cols: int) -> PackedTensor:
    w = np.random.default_rng(2).normal(size=(rows, cols)).astype(np.float32)
    return qc.formats.get(text).encode(w)


CONFIG = {"r": 2, "lora_alpha": 2}


def test_an_update_below_the_formats_step_is_seen_not_to_survive() -> None:
    weights = {"coarse": packed("q2_K", 64, 256), "fine": packed("q8_0", 64, 256)}
    tensors = {**factors("coarse", 64, 256, scale=1e-3), **factors("fine", 64, 256, scale=1e-1)}
    _, report = qc.merge_lora(weights, tensors, config=CONFIG)
    coarse, fine = report.layers
    assert fine.kept == pytest.approx(1, abs=0.05) and fine.cosine > 0.99
    assert coarse.cosine < 0.6
    assert "coarse" in str(report) and f"{coarse.error:.2e}" in str(report)


def test_a_threshold_refuses_before_anything_is_returned_and_lists_the_layers() -> None:
    weights = {"coarse": packed("q2_K", 64, 256), "fine": packed("q8_0", 64, 256), "two": packed("int2", 64, 256)}
    tensors = {**factors("coarse", 64, 256), **factors("fine", 64, 256), **factors("two", 64, 256)}
    with pytest.raises(MergeError, match=r"2 of 3 layers .*'coarse' \(q2_K\(\)\) by .*'two' \(int2") as caught:
        qc.merge_lora(weights, tensors, config=CONFIG, threshold=0.05)
    assert len(caught.value.report.layers) == 3
    assert "'fine'" not in str(caught.value)
    assert len(qc.merge_lora(weights, tensors, config=CONFIG, threshold=1.0).report.layers) == 3
    with pytest.raises(ArgumentError, match="threshold=0"):
        qc.merge_lora(weights, tensors, config=CONFIG, threshold=0)


def test_everything_that_does_not_fit_is_listed_in_one_error() -> None:
    weights: dict[str, Any] = {"a": packed("nf4", 64, 256), "b": packed("nf4", 64, 128), "c": "text"}
    tensors = {n: t for path in "abcd" for n, t in factors(path, 64, 256).items()}
    with pytest.raises(AdapterError) as caught:
        qc.merge_lora(weights, tensors, config=CONFIG)
    message = str(caught.value)
    assert "'d' is not among the weights" in message and "'b' is 64 x 128, and the adapter's is 64 x 256" in message
    assert "'c' is str" in message and "'a'" not in message
    with pytest.raises(ArgumentError, match="not list"):
        qc.merge_lora([weights], tensors, config=CONFIG)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "is a IA3"),
        ({"r": 2}, "no lora_alpha"),
        ({**CONFIG, "init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
        ({**CONFIG, "use_qalora": True}, "use_qalora=True"),
        ({**CONFIG, "lora_bias": True}, "lora_bias=True"),
        ({**CONFIG, "bias": "all"}, "bias='all'"),
        ({**CONFIG, "modules_to_save": ["head"]}, "modules_to_save"),
        ({**CONFIG, "target_parameters": ["experts.w"]}, "target_parameters"),
        ({**CONFIG, "r": 3}, "factors of rank 2, and its config says 3"),
        ({**CONFIG, "use_dora": True}, "no lora_magnitude_vector"),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        qc.merge_lora({"a": packed("nf4", 64, 256)}, factors("a", 64, 256), config=config)


def test_tensors_that_are_no_pair_of_factors_are_listed(tmp_path: Path) -> None:
    tensors = factors("a", 64, 256)
    tensors["base_model.model.b.lora_A.weight"] = tensors["base_model.model.a.lora_A.weight"]
    tensors["base_model.model.a.lora_B.bias"] = np.ones(64, np.float32)
    tensors["base_model.model.a.lora_A.second.weight"] = np.ones((2, 256), np.float32)
    with pytest.raises(AdapterError) as caught:
        qc.merge_lora({"a": packed("nf4", 64, 256)}, tensors, config=CONFIG)
    for said in ("'b' has no lora_B", "'base_model.model.a.lora_B.bias' is no factor", "a second lora_A of 'a'"):
        assert said in str(caught.value)
    with pytest.raises(AdapterError, match="needs its config"):
        qc.merge_lora({"a": packed("nf4", 64, 256)}, factors("a", 64, 256))
    with pytest.raises(AdapterError, match=r"cannot read .*adapter_config.json"):
        qc.merge_lora({"a": packed("nf4", 64, 256)}, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors cannot be read"):
        qc.merge_lora({"a": packed("nf4", 64, 256)}, tmp_path)


def test_layers_have_one_order_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    tensors = {key: torch.from_numpy(value) for name in "acb" for key, value in factors(name, 6, 8).items()}
    safetensors.torch.save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    for _ in range(8):  # safetensors' order changes from call to call
        assert [each.path for each in read_adapter(tmp_path, None)] == ["a", "b", "c"]


def test_a_sum_beyond_the_formats_range_names_the_layer() -> None:
    weights = {"a": packed("q8_0", 64, 256)}
    with pytest.raises(FormatValueError, match=r"'a', merged: .*row"):
        qc.merge_lora(weights, factors("a", 64, 256, scale=1e38), config={"r": 2, "lora_alpha": 1e4})


def test_a_program_takes_an_adapter_and_runs_saves_and_loads_with_it(tmp_path: Path) -> None:
    class Logits(nn.Module):
        def __init__(self, inner: LlamaForCausalLM) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids, use_cache=False).logits

    ids = torch.arange(12).reshape(1, 12)
    rules = {"*.1.self_attn.q_proj": None, "*.0.mlp.down_proj": "q8_0"}
    quant = qc.QuantConfig("int8", rules=rules, promise_bits=None)
    program = qc.qcompile(Logits(llama()), (ids,), quant=quant)
    model = adapted(llama(), fan_in_fan_out=False)
    model.save_pretrained(tmp_path)
    before = program(ids)
    merged, report = qc.merge_lora(program, tmp_path)
    kinds = {row.path: row.format.partition("(")[0] for row in report.layers}
    assert [kinds[path] for path in sorted(kinds)] == ["q8_0", "int8", "int8", "float32"]
    with torch.no_grad():
        expected, base = Logits(model.merge_and_unload())(ids), Logits(llama())(ids)
    found = merged(ids)
    assert (base - expected).norm() > 0.05 * expected.norm()
    assert (found - expected).norm() < 0.03 * expected.norm()
    assert torch.equal(program(ids), before)
    merged.save(tmp_path / "merged.qca")
    assert torch.equal(qc.load(tmp_path / "merged.qca")(ids), found)
    with pytest.raises(AdapterError, match="'lm_tail' is not among the program's weights"):
        qc.merge_lora(program, factors("lm_tail", 96, 128), config=CONFIG)


def test_a_program_on_another_device_stays_there_with_the_same_codes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    x = torch.randn(3, 64)
    adapter = factors("0", 96, 64)
    programs = [qc.qcompile(model, (x,), quant="int8", device=device) for device in ("cpu", "sim:1")]
    merged = [qc.merge_lora(program, adapter, config=CONFIG) for program in programs]
    assert [each.weights.device for each in merged] == ["cpu", "sim:1"]
    assert merged[0].report == merged[1].report
    before, after = programs[1](x), merged[1].weights(x)
    assert (after - before).norm() > 0.01 * before.norm()
    torch.testing.assert_close(after, merged[0].weights(x), rtol=1e-5, atol=1e-5)


def test_tied_weights_of_a_program_are_refused() -> None:
    embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head).eval()
    program = qc.qcompile(model, (torch.arange(5),), quant="int8")
    with pytest.raises(AdapterError, match=r"'1' is stored once for .* and .*tied"):
        qc.merge_lora(program, factors("1", 64, 32), config=CONFIG)


def test_a_mapping_of_half_precision_keeps_its_type() -> None:
    w = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float16)
    merged, report = qc.merge_lora({"a": w}, factors("a", 64, 256), config=CONFIG)
    assert merged["a"].dtype == np.float16 and 0 < report.layers[0].error < 1e-3
    assert isinstance(merged["a"], np.ndarray) and not isinstance(merged["a"], PackedTensor)
