"""Small tokenizers, trained here, as GGUF files and as folders; and texts that are hard to split."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

HARD = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "\r\n", " \n ", "a", " a", "a ", "Hello world",
    "  Hello  world  ", "    Hello\n    Hello", "I'll say it's DON'T, 'Tis y'all'd've", "' era", "1", "12",
    "123", "1234", "12345678901", "3.14159e-10", "w048 7tuijk dsdfhu", "naïve café", "cafe\u0301 e\u0301\u0323",
    "\u0301", "日本語 テスト", "한국어 안녕", "កាន់តែពិសេស", "العربية ٣٤٥", "हिन्दी में", "🦙.cpp",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👍🏽", "🚀🚀", "ǅungla ŐŰ ĲĳǱ", "ſ's Ω'S", "\x00", "a\x00b",
    "\u200b\u200d\ufeff", "\u00a0x\u2003y\u3000z\u0085", "x = [1, 2];  // done\n\treturn x == y != z;",
    "<|end|>and on<|end|>", "<s></s><unk>", "<0x41><0x0A>", "▁under▁score", "a▁b", "Ġspace Ċ",
    "[CLS] x [SEP] [UNK]", "!!!???...,,,", "###### ----", "CamelCaseWords ALLCAPS mixedCASE", "\ufffd",
    "\U0010ffff", "ﬁ ﬀ", "x" * 300, " " * 50 + "x" + " " * 50, "tab\tsep\tvalues\n" * 3,
    "https://a.b/c?d=e&f=%20#g", "a/b\\c", "e.g. i.e., U.S.A.",
]  # fmt: skip
"""Unicode, combining marks, joiners, spaces, digits, contractions, spelled special tokens, NUL."""

CORPUS = [
    *(text for text in HARD if len(text) < 100),
    *(f"the {word} of {word}s and {place}" for place, word in enumerate(["cat", "house", "tree"] * 20)),
    *(f"def {name}(self):\n    return self.{name}\n" for name in ("value", "count", "index") * 5),
]  # fmt: skip


def trained_byte_level(patterns: tuple[str, ...], size: int = 500) -> tokenizers.Tokenizer:
    """Byte-level BPE that splits by these expressions, in order."""
    made = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("<mine>", normalized=False)])
    return made


def keys_of_byte_level(made: tokenizers.Tokenizer, pre: str | None, **changes: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for such a tokenizer."""
    described = json.loads(made.to_str())
    count = made.get_vocab_size()
    tokens = [made.id_to_token(number) for number in range(count)]
    added = {each["id"]: CONTROL if each["special"] else USER_DEFINED for each in described["added_tokens"]}
    keys = {
        "model": "gpt2", "tokens": tokens, "token_type": [added.get(number, NORMAL) for number in range(count)],
        "merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "bos_token_id": made.token_to_id("<|begin|>"), "eos_token_id": made.token_to_id("<|end|>"),
        "add_bos_token": False,
    }  # fmt: skip
    return keys | ({} if pre is None else {"pre": pre}) | changes


def trained_sentencepiece(size: int = 500, prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    """A BPE model with a token for each byte, without normalisation, as Llama's is."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, vocab_size=size, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix,
        character_coverage=0.98, user_defined_symbols=["<mine>"], minloglevel=2, split_digits=True,
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def keys_of_sentencepiece(model: sentencepiece.SentencePieceProcessor, prefix: bool = True) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for such a model."""

    def kind(number: int) -> int:
        if model.is_byte(number):
            return BYTE
        if model.is_control(number):
            return CONTROL
        if model.is_unknown(number):
            return UNKNOWN
        return USER_DEFINED if model.id_to_piece(number) == "<mine>" else NORMAL

    numbers = range(model.vocab_size())
    return {
        "model": "llama", "tokens": [model.id_to_piece(number) for number in numbers],
        "scores": [model.get_score(number) for number in numbers], "token_type": [kind(number) for number in numbers],
        "bos_token_id": model.bos_id(), "eos_token_id": model.eos_id(), "unknown_token_id": model.unk_id(),
        "add_bos_token": True, "add_space_prefix": prefix,
    }  # fmt: skip


def write_gguf(path: Path, keys: Mapping[str, Any], template: str | None = None) -> Path:
    """A GGUF file with these keys of a tokenizer and one small tensor, by the package `gguf`."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
