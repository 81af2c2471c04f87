"""Folders of transformers as GGUF files: read back by gguf-py, by transformers and by `from_gguf`.

The tokenizers are trained here, small, of the kinds that folders have.  What a file says of its tokenizer is judged by
transformers' own reader of GGUF files, and by a tokenizer of a few lines that knows nothing but the file's keys.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentError, FormatError, WeightsError
from qcompiler.frontends.checkpoints.gguf_files import GgufFile
from qcompiler.frontends.checkpoints.gguf_tokenizer import PATTERNS

TEXTS = [
    "Hello world", "the cat sat on the mat, 1234567 times!", "  two  spaces\n\nand lines\t", "I'll say it's DON'T",
    "naïve café 日本語 🙂", "x", " ", "<|end|>and on<|end|>", "a=b+c; // 3.14", "",
]  # fmt: skip
CORPUS = [*TEXTS, *(f"the {word} of {word}s and {number}" for number, word in enumerate(["cat", "house", "tree"] * 20))]
VOCABULARY = 400


def byte_level(pre: str) -> tokenizers.Tokenizer:
    """Byte-level BPE, split in one of the ways that llama.cpp has a name for."""
    made = tokenizers.Tokenizer(models.BPE())
    level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "smollm":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif pre != "gpt-2":
        (pattern,) = [text for text, name in PATTERNS.items() if name == pre]
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        level = pre_tokenizers.Sequence([split, level])
    made.pre_tokenizer = level
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("<mine>", normalized=False)])
    return made


def with_bytes() -> tokenizers.Tokenizer:
    """What transformers makes of Llama 2's SentencePiece model."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<|begin|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    made.train_from_iterator([f"▁{text}".replace(" ", "▁") for text in CORPUS], trainer)
    described = json.loads(made.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if not each["content"].startswith("<0x")]
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    begin = made.token_to_id("<|begin|>")
    made.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    return made


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY + 8, "max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], tokenizers.Tokenizer]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, with_bytes),
    "llama 3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
        lambda: byte_level("llama-bpe"),
    ),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, lambda: byte_level("gpt-2")),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}, with_bytes),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, lambda: byte_level("qwen2")),
    "qwen3": ("Qwen3", {"head_dim": 32}, lambda: byte_level("smollm")),
}  # fmt: skip


def folder_of(name: str, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Any, Path]:
    """A model with random weights and its tokenizer, as transformers saves them."""
    kind, options, tokenizer = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options | sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), bos_token="<|begin|>", eos_token="<|end|>",
        unk_token="<unk>" if tokenizer is with_bytes else None,
    )  # fmt: skip
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(path)
    return model, path


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits  # type: ignore[no-any-return]


def check_logits(file: Path, wanted: Any, ids: torch.Tensor, tolerance: float = 1e-5) -> None:
    checkpoint = qc.from_gguf(file)
    program = qc.qcompile(checkpoint, (), {"input_ids": ids})
    expected = logits(wanted, ids)
    assert expected.std() > 0.5, "logits that all are alike would show nothing"
    torch.testing.assert_close(
        program(input_ids=ids).logits, expected, rtol=0, atol=tolerance * float(expected.abs().max())
    )


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in ("llama", "qwen2")]


@pytest.mark.parametrize("name", ["llama", "qwen2", *SLOW])
def test_the_file_computes_what_the_folder_does(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    model, folder = folder_of(name, tmp_path / "folder")
    done = qc.convert(folder, tmp_path / "out.gguf")
    assert not done.lossy
    check_logits(tmp_path / "out.gguf", model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_transformers_reads_the_model_and_the_tokenizer(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    model, folder = folder_of(name, tmp_path / "folder")
    qc.convert(folder, tmp_path / "out.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits(read, ids), logits(model, ids), rtol=0, atol=1e-4)
    if name == "qwen2":  # of a SentencePiece model transformers makes merges by a rule of its own
        there = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
        here = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for text in TEXTS:
            assert there(text)["input_ids"] == here.encode(text).ids, text


def test_gguf_py_reads_every_key_and_tensor(tmp_path: Path) -> None:
    model, folder = folder_of("llama", tmp_path / "folder", torch.bfloat16)
    qc.convert(folder, tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "llama" and keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert keys["llama.attention.head_count_kv"] == 2 and keys["llama.rope.freq_base"] == 5e5
    assert keys["tokenizer.ggml.model"] == "llama" and len(keys["tokenizer.ggml.tokens"]) == VOCABULARY + 8
    assert keys["tokenizer.ggml.add_bos_token"] is True and keys["tokenizer.ggml.add_eos_token"] is False
    assert keys["tokenizer.ggml.tokens"][keys["tokenizer.ggml.bos_token_id"]] == "<|begin|>"
    assert keys["tokenizer.ggml.tokens"][keys["tokenizer.ggml.eos_token_id"]] == "<|end|>"
    assert keys["tokenizer.chat_template"].startswith("{% for m")
    for name, kind in (("token_type", gguf.GGUFValueType.INT32), ("scores", gguf.GGUFValueType.FLOAT32)):
        assert reader.fields[f"tokenizer.ggml.{name}"].types == [gguf.GGUFValueType.ARRAY, kind]
    names = {tensor.name: tensor for tensor in reader.tensors}
    count = sum(1 for _ in model.named_parameters())
    assert len(names) == count and names["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert names["blk.1.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.BF16


# --- the tokenizer, from the keys alone ------------------------------------------------------------------------------


def pieces_of_sentencepiece(keys: dict[str, Any], text: str) -> list[int]:
    """llama.cpp's rule: join the two neighbours whose union has the best score, the leftmost among equals; what is no
    token is its bytes."""
    tokens = {token: number for number, token in enumerate(keys["tokens"])}
    special = [t for t, kind in zip(keys["tokens"], keys["token_type"], strict=True) if kind in (3, 4) and t]
    found: list[int] = []
    for part, is_token in split_at(text, special):
        if is_token:
            found.append(tokens[part])
            continue
        parts = list(part)
        while True:
            joined = [
                (-keys["scores"][tokens[a + b]], place)
                for place, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in tokens
            ]
            if not joined:
                break
            _, place = min(joined)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        for piece in parts:
            byte_tokens = [tokens[f"<0x{byte:02X}>"] for byte in piece.encode()]
            found += [tokens[piece]] if piece in tokens else byte_tokens
    return found


def split_at(text: str, special: Sequence[str]) -> list[tuple[str, bool]]:
    parts = [(text, False)]
    for token in special:
        new: list[tuple[str, bool]] = []
        for part, done in parts:
            if done:
                new.append((part, True))
                continue
            for number, each in enumerate(part.split(token)):
                new += [(token, True)] * (number > 0) + [(each, False)] * bool(each)
        parts = new
    return parts


def test_scores_give_the_tokens_of_the_folder(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path / "folder")
    qc.convert(folder, tmp_path / "out.gguf")
    metadata = GgufFile(tmp_path / "out.gguf").metadata
    keys = {name.removeprefix("tokenizer.ggml."): metadata[name] for name in metadata if name.startswith("tokenizer.g")}
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert keys["add_space_prefix"] is True
    for text in TEXTS:
        if "<|end|>" in text or not text:
            continue  # what stands around a special token differs between readers
        ids = pieces_of_sentencepiece(keys, "▁" + text.replace(" ", "▁"))
        assert ids == reference.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_merges_and_the_name_of_the_pattern_give_the_tokens_of_the_folder(pre: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    made = byte_level(pre)
    made.save(str(tmp_path / "folder" / "tokenizer.json"))
    keys = tokenizer_keys_of(tmp_path / "folder")
    assert keys["model"] == "gpt2" and keys["pre"] == pre
    again = tokenizers.Tokenizer(
        models.BPE({t: n for n, t in enumerate(keys["tokens"])}, [tuple(m.split(" ")) for m in keys["merges"]])
    )
    again.pre_tokenizer = byte_level(keys["pre"]).pre_tokenizer
    special = [t for t, kind in zip(keys["tokens"], keys["token_type"], strict=True) if kind == 3]
    assert special == ["<|begin|>", "<|end|>"] and keys["token_type"][keys["tokens"].index("<mine>")] == 4
    again.add_special_tokens(special)
    for text in TEXTS:
        assert again.encode(text).ids == made.encode(text, add_special_tokens=False).ids, text


def tokenizer_keys_of(folder: Path, size: int = VOCABULARY) -> dict[str, Any]:
    from qcompiler.frontends.checkpoints.gguf_tokenizer import tokenizer_keys

    found = tokenizer_keys(folder, size, transformers.LlamaConfig())
    return {name.removeprefix("tokenizer.ggml."): value for name, value in found.items()}


def message(*fields: tuple[int, int, bytes]) -> bytes:
    """A message of protocol buffers: (number, wire type, encoded value)."""
    return b"".join(bytes([number << 3 | wire]) + value for number, wire, value in fields)


def sized(data: bytes) -> bytes:
    assert len(data) < 1 << 14
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return size + data


def sentencepiece_model(pieces: Sequence[tuple[str, float, int]], kind: int = 2, prefix: int = 1) -> bytes:
    parts = [
        (1, 2, sized(message((1, 2, sized(text.encode())), (2, 5, struct.pack("<f", score)), (3, 0, bytes([type_])))))
        for text, score, type_ in pieces
    ]
    trained, normal = message((3, 0, bytes([kind]))), message((1, 2, sized(b"identity")), (3, 0, bytes([prefix])))
    return message(*parts, (2, 2, sized(trained)), (3, 2, sized(normal)))


def test_a_sentencepiece_model_brings_its_own_scores_and_types(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x41>", 0.0, 6), ("▁a", -1.5, 1), ("b", -2.25, 1)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(pieces, prefix=0))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>", "add_bos_token": True,
        "added_tokens_decoder": {"5": {"content": "<mine>", "special": False}},
    }))  # fmt: skip
    keys = tokenizer_keys_of(tmp_path, 8)
    assert keys["tokens"] == ["<unk>", "<s>", "<0x41>", "▁a", "b", "<mine>", "[PAD6]", "[PAD7]"]
    assert list(keys["token_type"]) == [2, 3, 6, 1, 1, 4, 5, 5]
    np.testing.assert_array_equal(keys["scores"][:5], np.array([0, 0, 0, -1.5, -2.25], np.float32))
    assert keys["add_bos_token"] and not keys["add_space_prefix"] and keys["bos_token_id"] == 1


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (sentencepiece_model([("a", 0.0, 1)], kind=1), "of kind 1, not BPE"),
        (b"\x0a\xff\xff\xff\xff\x0f", "no SentencePiece model"),
        (b"", "has 0 pieces"),
        (bytes(range(256)), "no SentencePiece model"),
        (sentencepiece_model([("a", 0.0, 9)]), "no SentencePiece model"),
    ],
)
def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(WeightsError, match=match):
        tokenizer_keys_of(tmp_path)


def _edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        described = json.loads(path.read_text())
        change(described)
        path.write_text(json.dumps(described))

    return edit


REFUSED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "unigram": ("type 'Unigram'", _edited(lambda d: d["model"].update(type="Unigram"))),
    "another pattern": (
        "split by",
        _edited(lambda d: d.update(pre_tokenizer={"type": "Whitespace"})),
    ),
    "prefix space": ("split by", _edited(lambda d: d["pre_tokenizer"].update(add_prefix_space=True))),
    "lower case": ("normalizer 'Lowercase'", _edited(lambda d: d.update(normalizer={"type": "Lowercase"}))),
    "a gap": ("numbers of", _edited(lambda d: d["model"]["vocab"].update(beyond=5000))),
    "an added token without a number": (
        "an added token has the number",
        _edited(lambda d: d["added_tokens"].append({"id": ["x"], "content": "<other>"})),
    ),
    "an added token that is another": (
        "is '<other>', and",
        _edited(lambda d: d["added_tokens"].append({"id": 3, "content": "<other>"})),
    ),
    "an added token behind a gap": (
        "behind a gap",
        _edited(lambda d: d["added_tokens"].append({"id": 9999, "content": "<other>"})),
    ),
    "an added token of nothing": ("behind a gap", _edited(lambda d: d["added_tokens"].append({"id": 3, "content": 7}))),
    "a broken merge": ("no pair", _edited(lambda d: d["model"]["merges"].append("abc"))),
    "no table": ("no table", _edited(lambda d: d["model"].update(vocab=[]))),
    "tokens around a text": (
        "around a text",
        _edited(
            lambda d: d.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<mine>"}}, {"Sequence": {"id": "A"}}],
                }
            )
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    byte_level("gpt-2").save(str(tmp_path / "tokenizer.json"))
    match, edit = REFUSED[name]
    edit(tmp_path)
    with pytest.raises(WeightsError, match=match):
        tokenizer_keys_of(tmp_path)


def test_any_damage_to_a_tokenizer_is_one_of_our_errors(tmp_path: Path) -> None:
    """Every value of tokenizer.json in turn is of another type: the file is written, or refused in our words."""
    byte_level("gpt-2").save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer.json"
    sound = json.loads(path.read_text())
    sound["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin|>"}}]}
    sound["model"]["merges"] = sound["model"]["merges"][:3]
    refused = 0
    for place in list(places_of(sound))[:400]:
        for value in (None, 7, "text", [], {}, [[1]], {"a": {}}):
            damaged = json.loads(json.dumps(sound))
            inner = damaged
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(damaged))
            try:
                tokenizer_keys_of(tmp_path)
            except WeightsError:
                refused += 1
    assert refused > 100


def places_of(value: Any, *before: Any) -> Any:
    """The places of a JSON value's parts, of the tokens' table the first."""
    if len(before) > 1 and before[:2] == ("model", "vocab"):
        return
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, key)
        yield from places_of(value[key], *before, key)


# --- quantised -------------------------------------------------------------------------------------------------------


def test_a_mixture_chooses_as_llama_cpp_does_and_names_the_file_so(
    tmp_path: Path, ids: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = folder_of("llama", tmp_path / "folder", hidden_size=256, intermediate_size=512)
    target = tmp_path / "out.gguf"
    assert main(["convert", str(folder), str(target), "--quant", "q4_K_M"]) == 0
    assert "with a loss" in capsys.readouterr().err
    file = GgufFile(target)
    kinds = {name: tensor.format.name for name, tensor in file.tensors.items() if tensor.format is not None}
    model.config.use_cache = False
    program = qc.qcompile(model, (), {"input_ids": ids}, quant="q4_K_M")
    assert kinds["output.weight"] == "q6_K" and kinds["token_embd.weight"] == "q4_K"
    rows = {row.parameters[0]: row.format for row in program.ledger if row.format}
    assert kinds["blk.0.attn_v.weight"] == rows["model.layers.0.self_attn.v_proj.weight"]
    assert sorted(kinds.values()) == sorted(rows.values())
    assert file.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    check_same(qc.qcompile(qc.from_gguf(target), (), {"input_ids": ids}), program, ids)


def check_same(found: qc.Program, wanted: qc.Program, ids: torch.Tensor) -> None:
    """The same codes: the file's rows of q and k are only in another order."""
    expected = wanted(input_ids=ids).logits
    torch.testing.assert_close(found(input_ids=ids).logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_one_format_for_all_matrices(name: str, tmp_path: Path) -> None:
    _, folder = folder_of("qwen2", tmp_path / "folder")
    done = qc.convert(folder, tmp_path / "out.gguf", quant=name)
    file = GgufFile(tmp_path / "out.gguf")
    assert {t.format.name for t in file.tensors.values() if len(t.shape) > 1 and t.format is not None} == {name}
    assert all(t.type == 0 for t in file.tensors.values() if len(t.shape) == 1)
    assert {each.name for each in done.lossy} == {n for n, t in file.tensors.items() if t.format is not None}


def test_blocks_that_do_not_divide_take_the_next_format(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path / "folder", hidden_size=64, intermediate_size=96)
    qc.convert(folder, tmp_path / "out.gguf", quant="q4_K_M")
    kinds = {n: t.format.name for n, t in GgufFile(tmp_path / "out.gguf").tensors.items() if t.format is not None}
    assert kinds["blk.0.ffn_gate.weight"] == "q5_0" and kinds["output.weight"] == "q8_0"


def test_codes_of_a_folder_stay_where_gguf_has_them(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path / "folder")
    qc.convert(folder, tmp_path / "first.gguf", quant="q4_0")
    qc.convert(tmp_path / "first.gguf", tmp_path / "gptq", layout="gptq")
    for path in folder.glob("tokenizer*"):
        (tmp_path / "gptq" / path.name).write_bytes(path.read_bytes())
    done = qc.convert(tmp_path / "gptq", tmp_path / "again.gguf")
    assert not done.lossy
    first, again = GgufFile(tmp_path / "first.gguf"), GgufFile(tmp_path / "again.gguf")
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        assert again.tensors[name].format == first.tensors[name].format
        np.testing.assert_array_equal(again.tensors[name].values(), first.tensors[name].values())


def test_what_cannot_be_written_is_said_before_it_is_read(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path / "folder")
    target = tmp_path / "out.gguf"
    with pytest.raises(FormatError, match="GGUF files do not hold nf4"):
        qc.convert(folder, target, quant="nf4")
    with pytest.raises(FormatError, match=r"with a .*lossy=True"):
        qc.convert(folder, target, to="q4_0")
    with pytest.raises(ArgumentError, match=r"quant= .*for a folder that becomes a GGUF file"):
        qc.convert(folder, tmp_path / "other", layout="gptq", quant="q4_0")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(WeightsError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        qc.convert(folder, target)
    assert not target.exists()


def test_a_window_that_llama_cpp_would_not_slide_is_refused(tmp_path: Path) -> None:
    _, folder = folder_of("mistral", tmp_path / "folder", sliding_window=16)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"sliding_window": 16}))
    with pytest.raises(WeightsError, match=r"has a sliding window of 16 positions in a context of 128.*null"):
        qc.convert(folder, tmp_path / "out.gguf")
    (folder / "config.json").write_text(json.dumps(described | {"sliding_window": 128}))
    qc.convert(folder, tmp_path / "out.gguf")
    assert not any("window" in key for key in GgufFile(tmp_path / "out.gguf").metadata)


def test_a_model_that_gguf_has_no_names_for_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "folder")
    byte_level("gpt-2").save(str(tmp_path / "folder" / "tokenizer.json"))
    with pytest.raises(WeightsError, match=r"holds a GPT2LMHeadModel; models that become GGUF files are Llama"):
        qc.convert(tmp_path / "folder", tmp_path / "out.gguf")
