"""The arithmetic of a .gguf file of codes, which says nothing of it: bf16 unless the recipe names another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from gguf import GGMLQuantizationType as Type

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.lm.sources import source_of
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.linear import LinearKernel

written = load("tests/files/writing.py")

FLOAT = qc.QuantConfig("float")
EXACT = qc.QuantConfig("float", compute="exact")
BF16 = qc.QuantConfig("float", compute="bf16")
INT8 = qc.QuantConfig("float", compute="int8")
ROWS = qc.QuantConfig("float", activations="int8")


def file_of(path: Path, kind: Type) -> Path:
    written.write(path, written.build("Llama", num_key_value_heads=2), "llama", lambda _: kind)
    return path


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of(tmp_path_factory.mktemp("sources") / "codes.gguf", Type.Q8_0)


@pytest.mark.parametrize(
    ("recipe", "device", "targets", "dtype", "compute", "said"),
    [
        (FLOAT, None, None, torch.float32, "bf16", "linears and attention multiply in bf16"),
        (FLOAT, "cpu", ["generic"], torch.float32, "bf16", "linears and attention multiply in bf16"),
        (EXACT, None, None, torch.float32, "exact", None),
        (INT8, None, None, torch.float32, "int8", None),
        (BF16, None, None, torch.float32, "bf16", None),
        (ROWS, None, None, torch.float32, None, None),
        (FLOAT, "cuda:0", ["sm_90a"], torch.bfloat16, None, "a model in bf16"),
        (FLOAT, "sim:0", ["sm_90a", "sm_80"], torch.bfloat16, None, "a model in bf16"),
        (FLOAT, {"model": "sim:0", "lm_head": "sim:1"}, ["sm_80"], torch.bfloat16, None, "a model in bf16"),
        (INT8, "cuda:0", ["sm_90a"], torch.bfloat16, "int8", "a model in bf16"),
        (EXACT, "cuda:0", ["sm_90a"], torch.float32, "exact", None),
        (FLOAT, "cuda:0", ["sm_90a", "sm_75"], torch.float32, None, "a model in fp32"),
    ],
)
def test_codes_of_a_file_multiply_in_bf16_unless_the_recipe_names_another_arithmetic(
    codes: Path, recipe: qc.QuantConfig, device: Any, targets: Any, dtype: torch.dtype, compute: Any, said: Any
) -> None:
    found = source_of(codes, recipe, device, targets)
    assert (found.module.dtype, found.recipe.compute) == (dtype, compute)
    assert [choice.what for choice in found.choices] == ([] if said is None else [said])


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16])
def test_a_file_of_plain_numbers_multiplies_in_its_own_type(kind: Type, tmp_path: Path) -> None:
    found = source_of(file_of(tmp_path / "plain.gguf", kind), FLOAT, "cuda:0", ["sm_90a"])
    types = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
    assert (found.module.dtype, found.recipe, found.choices) == (types[kind], FLOAT, ())


def test_experts_of_a_mixture_are_named_where_it_has_some(tmp_path: Path) -> None:
    made = load("tests/files/recorded.py").write(tmp_path / "m.gguf", "mixtral", lambda part: Type.Q8_0)
    (choice,) = source_of(made.path, FLOAT, None, None).choices
    assert choice.what == "linears, experts and attention multiply in bf16"


def test_what_transformers_keeps_in_fp32_is_kept_in_a_model_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    load("tests/files/recorded.py").write(
        path, "deepseek32", load("tests/lm/test_gguf_models.py").types_of("deepseek32")
    )
    module = source_of(path, FLOAT, "cuda:0", ["sm_90a"]).module
    types = {name: value.dtype for name, value in (*module.named_parameters(), *module.named_buffers())}
    wide = {name for name, dtype in types.items() if dtype == torch.float32 and "rotary" not in name}
    assert wide == {"model.layers.1.mlp.gate.e_score_correction_bias"}


@pytest.mark.slow
def test_a_search_says_that_it_measures_in_fp32_what_multiplies_in_bf16(tmp_path: Path) -> None:
    kinds = {"attn_output": Type.F32}
    made = written.write(
        tmp_path / "mixed.gguf", written.build("Llama", num_hidden_layers=1), "llama",
        lambda name: kinds.get(name.split(".")[-2], Type.Q8_0),
    )  # fmt: skip
    how: Any = {"candidates": ("int4", "int8"), "sensitivity": "output", "max_seq_len": 8}
    found = qc.search(made.path, [list(range(3, 11))], "9 bits", **how)
    assert list(found.chosen.formats) == ["model.layers.0.self_attn.o_proj.weight"], "the others have codes"
    assert "measured with products in fp32" in found.table() and "compute='exact'" in found.table()
    in_memory = qc.search(qc.from_gguf(made.path), [list(range(3, 11))], "9 bits", **how)
    assert "products in fp32" not in in_memory.table(), "a checkpoint is compiled in its own type"
    assert in_memory.chosen.measured == found.chosen.measured


def test_a_checkpoint_keeps_its_type(codes: Path) -> None:
    found = source_of(qc.from_gguf(codes), FLOAT, None, None)
    assert (found.module.dtype, found.recipe, found.choices) == (torch.float32, FLOAT, ())


def types(lm: qc.CausalLM) -> tuple[set[str], set[str]]:
    """What weights of linears decode to, and what attention reads."""
    kernels = lm.run.plan.kernels
    linears = {k.operands[1].dtype for k in kernels if isinstance(k.body, LinearKernel) and k.operands[1].format}
    return linears, {k.operands[1].dtype for k in kernels if isinstance(k.body, AttentionKernel)}


@pytest.mark.slow
def test_the_default_is_what_the_recipe_would_say_and_its_cache_is_bf16(codes: Path) -> None:
    sizes: Any = {"max_seq_len": 32, "chunk": 8}
    default = qc.compile_causal_lm(codes, **sizes)
    named = qc.compile_causal_lm(codes, qc.QuantConfig("float", compute="bf16"), kv_cache="bf16", **sizes)
    exact = qc.compile_causal_lm(codes, EXACT, **sizes)
    assert types(default) == ({"bf16"}, {"bf16"}) and default.record.cache_dtype == "bfloat16"
    assert types(exact) == ({"f32"}, {"f32"}) and exact.record.cache_dtype == "float32"
    prompt = list(range(3, 20))
    ours, same, far = (lm.conversation().read(prompt, logits="all")[0] for lm in (default, named, exact))
    assert np.array_equal(ours, same) and 0 < np.abs(ours - far).max() < 0.02 * np.abs(far).max()


@pytest.mark.slow
def test_the_commands_say_the_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Path(__file__).parents[2] / "examples" / "models" / "tiny_llama"
    path = tmp_path / "tiny.gguf"
    assert main(["convert", str(own), str(path), "--quant", "q8_0"]) == 0
    for options, says in (([], True), (["--compute", "exact"], False)):
        assert main(["generate", str(path), "--prompt", "a", "--tokens", "1", "--max-seq-len", "64", *options]) == 0
        assert ("linears and attention multiply in bf16" in capsys.readouterr().err) == says
