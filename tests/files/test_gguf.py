"""Language models from GGUF files: the program holds the file's own codes, and computes what they mean."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from by_path import load
from gguf import GGMLQuantizationType as Type
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.config import QuantConfig
from qcompiler.errors import FormatError, RecipeError, WeightsError
from qcompiler.frontends.checkpoints.gguf_files import PACKED, GgufFile, NewTensor
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.runtime.program_file import read_program

written = load("tests/files/writing.py")
build, write, Written, rows_for_llama_cpp = written.build, written.write, written.Written, written.rows_for_llama_cpp

DIMS = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 32)}}
MIXED = {
    "attn_q": Type.Q8_0, "attn_k": Type.Q4_0, "attn_v": Type.Q6_K, "attn_output": Type.Q4_K, "ffn_gate": Type.Q4_K,
    "ffn_up": Type.F16, "ffn_down": Type.Q5_0, "token_embd": Type.Q4_0, "output": Type.F32,
    "ffn_gate_inp": Type.F32, "ffn_gate_exps": Type.Q4_K, "ffn_up_exps": Type.Q4_K, "ffn_down_exps": Type.Q8_0,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", BIASES),
    "mistral": ("Mistral", "llama", {"sliding_window": None, "head_dim": 64}),
    "qwen2": ("Qwen2", "qwen2", {}),
    "mixtral": ("Mixtral", "llama", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
}


def mixed(name: str) -> Type:
    return MIXED[name.split(".")[-2]]


def compiled(checkpoint: qc.Checkpoint, ids: torch.Tensor, **options: Any) -> qc.Program:
    return qc.qcompile(checkpoint, (), {"input_ids": ids}, dynamic_shapes=DIMS, **options)


def check_equal(found: torch.Tensor, model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert expected.std() > 0.5, "logits that all are alike would show nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama"]


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_a_file_compiles_to_what_its_codes_mean_and_the_program_holds_those_codes(
    name: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    kind, arch, options = MODELS[name]
    made = write(tmp_path / "model.gguf", build(kind, num_hidden_layers=1, **options), arch, mixed)
    checkpoint = qc.from_gguf(made.path)
    program = compiled(checkpoint, ids)
    check_equal(program(input_ids=ids[:1, :5]).logits, made.model, ids[:1, :5])
    rows = {row.parameters[0]: row for row in program.ledger if row.reason.startswith("as stored")}
    assert len(rows) >= (6 if name == "mixtral" else 7)
    path = tmp_path / "canonical.qca"
    program.save(path, layout="canonical")
    for parameter, stored in _stored(path).items():
        if parameter in rows:
            assert stored == _expected(made, arch, parameter), parameter
            del rows[parameter]
    assert not rows, "every weight that the ledger calls stored was compared"


def decode(step: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a prompt, of a token, and of two."""
    calls = [(0, ids.shape[1]), (ids.shape[1], 1), (ids.shape[1] + 1, 2)]
    more = torch.cat([ids, ids[:, :3]], 1)
    return [step(input_ids=more[:, a : a + n], cache_position=torch.arange(a, a + n)) for a, n in calls]


@pytest.mark.parametrize(
    ("activations", "buckets"),
    [
        ("int8", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, True), (None, False), ("int8", False))),
    ],
)
@pytest.mark.slow
def test_the_recipe_of_a_static_cache_takes_the_model_of_a_file(
    llama: Any, ids: torch.Tensor, activations: str | None, buckets: bool
) -> None:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    checkpoint, size = qc.from_gguf(llama.path), ("s", 1, 16)
    checkpoint.module.generation_config.cache_implementation = "static"
    step = TorchExportableModuleWithStaticCache(checkpoint.module, batch_size=1, max_cache_len=24)
    program = qc.qcompile(
        step,
        kwargs={"input_ids": ids[:1, :7], "cache_position": torch.arange(7)},
        dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 16)})] if buckets else None,
        quant=QuantConfig("float", activations=activations) if activations else None,
        weights=checkpoint.weights,
    )
    llama.model.generation_config.update(use_cache=True, cache_implementation="static")
    plain = TorchExportableModuleWithStaticCache(llama.model, batch_size=1, max_cache_len=24)
    with torch.no_grad():
        expected = decode(program.oracle if activations else plain, ids[:1, :7])
    limit = 1e-2 if activations else 1e-5  # a code that rounds the other way moves one number by 1/127 of the largest
    for found, wanted in zip(decode(program.session(), ids[:1, :7]), expected, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) <= limit


def test_what_a_checkpoint_lacks_is_said_to_be_its_modules(llama: Any, ids: torch.Tensor) -> None:
    checkpoint = qc.from_gguf(llama.path)
    with pytest.raises(AttributeError, match=r"no attribute 'generation_config': its model is checkpoint\.module"):
        _ = checkpoint.generation_config
    with pytest.raises(WeightsError, match=r"weights=checkpoint\.weights"):
        qc.qcompile(checkpoint.module, (), {"input_ids": ids})


def _expected(made: Any, arch: str, parameter: str) -> bytes:
    """The file's bytes for a parameter, their rows in transformers' order."""
    parts = {name: np.frombuffer(made.raw[name], np.uint8) for name in made.names[parameter]}
    if len(parts) == 2:  # gate and up of each expert, one behind the other
        experts = made.model.config.num_local_experts
        return np.stack([part.reshape(experts, -1) for part in parts.values()], axis=1).tobytes()
    (raw,) = parts.values()
    config = made.model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parameter.split(".")[-2])
    if arch != "llama" or heads is None:
        return raw.tobytes()
    (values,) = made.names[parameter].values()
    rows = raw.reshape(len(values), -1)
    return rows[np.argsort(rows_for_llama_cpp(np.arange(len(rows)), heads))].tobytes()


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_the_eager_oracle_decodes_the_codes_of_every_architecture(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    kind, arch, options = MODELS[name]
    made = write(tmp_path / "model.gguf", build(kind, **options), arch, mixed)
    checkpoint = qc.from_gguf(made.path)
    imported = import_torch(checkpoint.module, (), {"input_ids": ids}, dynamic_shapes=DIMS, weights=checkpoint.weights)
    with torch.no_grad():
        check_equal(imported.quantized.module(input_ids=ids).logits, made.model, ids)
    for path, parameter in made.model.named_parameters():
        assert torch.equal(checkpoint.weights.tensors[path].view().float(), parameter.detach()), path


def _stored(path: Path) -> dict[str, bytes]:
    """The packed tensors of a program file in canonical bytes, by parameter."""
    header, _ = read_program(path)
    assert header.layout == "canonical"
    with zipfile.ZipFile(path) as file:
        raw = file.read("weights.safetensors")
    data = raw[8 + struct.unpack_from("<Q", raw)[0] :]
    return {e.parameters[0]: data[e.offset : e.offset + e.nbytes] for e in header.stored if e.format is not None}


# --- recipes and places ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One file for what follows, its output matrix in fp32."""
    return write(tmp_path_factory.mktemp("gguf") / "llama.gguf", build("Llama", num_hidden_layers=1), "llama", mixed)


@pytest.mark.slow
def test_a_recipe_decides_about_what_the_file_has_in_floating_point(
    llama: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = qc.from_gguf(llama.path)
    program = compiled(checkpoint, ids, quant=QuantConfig("int8"), workdir=tmp_path)
    stored = {row.parameters[0]: (row.format, row.reason) for row in program.ledger}
    assert stored["lm_head.weight"] == ("int8", "")
    assert stored["model.layers.0.self_attn.v_proj.weight"] == ("q6_K", "as stored")
    again = compiled(qc.from_gguf(llama.path), ids, quant=QuantConfig("int8"), workdir=tmp_path)
    assert torch.equal(again(input_ids=ids).logits, program(input_ids=ids).logits)


def test_a_rule_for_a_weight_that_is_stored_as_codes_is_an_error(llama: Any, ids: torch.Tensor) -> None:
    rule = QuantConfig("float", rules={"*.v_proj": "int8"})
    with pytest.raises(
        RecipeError, match=r"'\*\.v_proj' asks for int8, but 'model.layers.0.self_attn.v_proj.weight' is q6_K"
    ):
        compiled(qc.from_gguf(llama.path), ids, quant=rule)


def test_a_file_of_fp16_makes_a_model_of_fp16_unless_asked_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path / "f16.gguf", build("Llama", num_hidden_layers=1), "llama", lambda name: Type.F16).path
    module = qc.from_gguf(path).module
    assert module.dtype == torch.float16
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32, "positions need it, as in from_pretrained"
    assert qc.from_gguf(path, dtype=torch.bfloat16).module.dtype == torch.bfloat16


@pytest.mark.slow
def test_factors_of_the_rotary_embedding_divide_its_frequencies(tmp_path: Path, ids: torch.Tensor) -> None:
    """Llama 3.1: transformers computes the factors from the configuration, llama.cpp stores them."""
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    model = build("Llama", num_hidden_layers=1, rope_parameters=scaling)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    made = write(tmp_path / "m.gguf", model, "llama", mixed, tensors={"rope_freqs.weight": factors})
    far = ids.repeat(1, 3)[:, :25]
    check_equal(compiled(qc.from_gguf(made.path), ids)(input_ids=far).logits, made.model, far)


@pytest.mark.parametrize(("key", "value", "kind"), [
    ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR, "linear"),
    ("add_rope_scaling_type", gguf.RopeScalingType.YARN, "yarn"),
    ("add_sliding_window", 7, None),
])  # fmt: skip
def test_keys_of_the_file_become_the_configuration(key: str, value: Any, kind: str | None, tmp_path: Path) -> None:
    more = {key: value}
    if kind is not None:
        more |= {"add_rope_scaling_factor": 4.0, "add_rope_scaling_orig_ctx_len": 64}
    if kind == "yarn":
        more |= {"add_rope_scaling_yarn_beta_fast": 24.0, "add_rope_scaling_yarn_beta_slow": 2.0}
    made = write(tmp_path / "m.gguf", build("Llama", num_hidden_layers=1), "llama", mixed, **more)
    config = qc.from_gguf(made.path).config
    if kind is None:
        assert (type(config).__name__, config.sliding_window) == ("MistralConfig", 7)
        return
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == (kind, 4.0)
    if kind == "yarn":
        wanted = {"original_max_position_embeddings": 64, "beta_fast": 24.0, "beta_slow": 2.0}
        assert wanted.items() <= config.rope_parameters.items()


# --- files that are refused ------------------------------------------------------------------------------------------


def small(path: Path, tensors: dict[str, Any], **keys: Any) -> Path:
    qc.write_gguf(path, tensors, {"general.architecture": "llama", **keys})
    return path


def test_a_type_that_is_not_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 292), np.uint8), raw_dtype=Type.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"'blk.0.attn_q.weight' in .*m.gguf has the type Q8_K.*q4_K"):
        qc.from_gguf(tmp_path / "m.gguf")


def test_a_file_cut_off_anywhere_is_refused(llama: Any, tmp_path: Path) -> None:
    """In its header, at every byte of the first keys and at many others; and in its data."""
    whole = llama.path.read_bytes()
    header = GgufFile(llama.path).data_start
    path = tmp_path / "cut.gguf"
    last = max(t.start + t.nbytes for t in GgufFile(llama.path).tensors.values())
    for size in [*range(0, 200), *range(200, header, 97), header, (header + last) // 2, last - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"was cut off|is empty|no GGUF file"):
            GgufFile(path)
    path.write_bytes(whole[:last])
    GgufFile(path)


def test_damaged_headers_are_refused_and_never_read_beyond_the_file(llama: Any, tmp_path: Path) -> None:
    """Each byte of the header's beginning, and bytes all over the header, with another value."""
    whole, path = llama.path.read_bytes(), tmp_path / "bad.gguf"
    header = GgufFile(llama.path).data_start
    refused = 0
    for place in [*range(0, 120), *range(120, header, 61)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            for tensor in GgufFile(path).tensors.values():
                assert tensor.bytes().size == tensor.nbytes
        except WeightsError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: b"GGML" + raw[4:], "is no GGUF file"),
    (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
    (lambda raw: raw[:4] + struct.pack("<I", 4) + raw[8:], "version 4; versions 2 and 3"),
])  # fmt: skip
def test_other_files_are_refused(change: Any, message: str, llama: Any, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(change(llama.path.read_bytes()))
    with pytest.raises(WeightsError, match=message):
        GgufFile(tmp_path / "x.gguf")


def test_what_does_not_fit_a_model_is_named(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(WeightsError, match=r"architecture 'gemma4-assistant'; .* there are: deepseek4, qwen4exp, "):
        qc.write_gguf(path, {}, {"general.architecture": "gemma4-assistant"})
        qc.from_gguf(path)
    with pytest.raises(WeightsError, match=r"lacks the key 'general.architecture'"):
        qc.write_gguf(path, {})
        qc.from_gguf(path)
    with pytest.raises(WeightsError, match=r"lacks the key 'llama.attention.head_count'"):
        qc.from_gguf(small(path, {}))
    file = GgufFile(llama.path)
    tensors = {name: NewTensor(t.shape, t.type, t.bytes) for name, t in file.tensors.items()}
    for damage, message in (
        ({"blk.0.attn_v.weight": None}, r"lacks 'blk.0.attn_v.weight', the parameter 'model.layers.0.self_attn.v_proj"),
        (
            {"blk.0.more.weight": np.zeros(4, np.float32)},
            r"holds 1 tensor that LlamaForCausalLM does not have: 'blk.0.more.weight'",
        ),
        (
            {"output_norm.weight": np.ones(128, np.float32)},
            r"'output_norm.weight' .* has the shape \[128\], and .*\[256\]",
        ),
        ({"output_norm.weight": np.ones(256, np.int32)}, r"'output_norm.weight' .* is int32, which no weight is"),
    ):
        changed = {name: t for name, t in {**tensors, **damage}.items() if t is not None}
        qc.write_gguf(path, changed, file.metadata)
        with pytest.raises(WeightsError, match=message):
            qc.from_gguf(path)
    for key, value, message in (
        ("llama.attention.head_count", [8, 4], "models whose layers differ"),
        ("llama.rope.dimension_count", 16, "rope.dimension_count is 16, and heads have 32"),
        ("llama.rope.scaling.type", "longrope", "supported are none, linear and yarn"),
        ("llama.rope.scaling.attn_factor", 0.5, "llama.rope.scaling.attn_factor is 0.5; only 1 is supported"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier is 0.1.*; only 0 is supported"),
    ):
        keys = {name: file.metadata[name] for name in file.metadata if not name.startswith("tokenizer")}
        qc.write_gguf(path, tensors, {**keys, key: value})
        with pytest.raises(WeightsError, match=message):
            qc.from_gguf(path)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_every_format_of_gguf_is_written_as_its_package_reads_it(tmp_path: Path) -> None:
    """Codes and numbers, keys of every kind; read back by the `gguf` package and by us."""
    values = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    tensors: dict[str, Any] = {fmt.name: fmt.encode(values) for fmt in PACKED.values()}
    tensors |= {"f32": values, "f16": values.astype(np.float16), "cube": np.arange(24, dtype=np.int32).reshape(2, 3, 4)}
    keys = {"a.int": 3, "a.negative": -3, "a.large": 1 << 40, "a.float": 0.5, "a.text": "ä\n", "a.yes": True,
            "a.texts": ["a", "", "bc"], "a.ints": [1, -2, 1 << 35], "a.floats": [1.0, 2.5]}  # fmt: skip
    path = tmp_path / "all.gguf"
    qc.write_gguf(path, tensors, keys)
    theirs = gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        ours = tensors[tensor.name]
        expected = ours.data if isinstance(ours, formats.PackedTensor) else ours
        assert bytes(tensor.data) == expected.tobytes(), tensor.name
        if isinstance(ours, formats.PackedTensor):
            decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(decoded, ours.format.decode(ours)), tensor.name
    assert {key: theirs.fields[key].contents() for key in keys} == keys
    mine = GgufFile(path)
    assert dict(mine.metadata) == keys and mine.tensors["cube"].shape == (2, 3, 4)
    copy = tmp_path / "copy.gguf"
    qc.write_gguf(copy, {n: NewTensor(t.shape, t.type, t.bytes) for n, t in mine.tensors.items()}, mine.metadata)
    assert copy.read_bytes() == path.read_bytes()


def test_what_gguf_does_not_hold_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    nf4 = formats.get("nf4").encode(np.ones((2, 64), np.float32))
    with pytest.raises(FormatError, match=r"'w' is nf4.*which GGUF files do not hold; they hold q4_0"):
        qc.write_gguf(path, {"w": nf4})
    with pytest.raises(FormatError, match=r"'w' is complex64"):
        qc.write_gguf(path, {"w": np.ones(3, np.complex64)})
    with pytest.raises(FormatError, match=r"the key 'k' is a list of several types"):
        qc.write_gguf(path, {}, {"k": [1, "a"]})

    def fails() -> Any:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        qc.write_gguf(path, {"w": NewTensor((4,), 0, fails)})
    assert not list(tmp_path.iterdir())
