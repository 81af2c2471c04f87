"""The tokenizer in the keys of a GGUF file, as the JSON that `tokenizers` reads.

    tokenizer.ggml.model = "llama"   SentencePiece BPE: scores, a token for each byte
                           "gpt2"    byte-level BPE: merges, and the name of a way to split a text (splits.py)
                           "bert"    WordPiece
    tokenizer.ggml.token_type        control tokens are special; user-defined ones are found in every text

The `llama` kind joins the two neighbours whose union has the best score.  `tokenizers` has ordered merges instead: each
way to cut a token into two tokens is a merge, and merges are ordered by the score of what they make.  The two differ
only where two tokens with one score overlap in a text.  Sources: llama.cpp's src/llama-vocab.cpp, gguf-py's keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompiler.errors import TokenizerError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.gguf_files import GgufFile
from qcompiler.lm.text.splits import SPLITS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (llama_token_type)."""

MAX_TABLE = 64 << 20
"""Maximum bytes of a table in the file. The largest known, 262,144 tokens with merges, takes 9 MB."""
MAX_TOKENS = 1 << 20
MAX_ENTRIES = 1 << 21
"""Maximum entries of a list: tokens, or merges, of which some tables have more than tokens."""
MAX_LENGTH = 512
"""Maximum characters of a token that merges make: a token of n characters is cut in n ways."""

_ARRAY = 9
"""GGUF's type of lists: the type of the entries in 4 bytes, their number in 8, the entries."""

_END_NAMES = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
})  # fmt: skip
"""Control tokens that end an answer, whatever the keys say: files often name only one of several.  (The names are those
of llama.cpp's llama-vocab.cpp.)"""
_OF_PARTS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"})
"""Where a table has these, "<|end|>" ends a part of an answer (gpt-oss: its thoughts), and not the answer."""


@dataclass(frozen=True)
class Described:
    """What a file says: the JSON of `tokenizers` as Python values, and the tokens with a role, by name."""

    tokenizer: dict[str, Any]
    start: int | None
    ends: frozenset[int]
    names: dict[str, str]
    template: str | None


class _Table:
    """The keys of one file, checked when they are read."""

    def __init__(self, file: GgufFile, pre: str | None) -> None:
        self.file = file
        self.pre = pre
        self.path = file.path
        self.tokens: list[str] = self._list("tokens", str, needed=True)
        self.count = len(self.tokens)
        if not 0 < self.count <= MAX_TOKENS:
            raise TokenizerError(f"{self.path} has a tokenizer of {self.count:,} tokens; 1 to {MAX_TOKENS:,} are read")
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        if len(self.numbers) != self.count:
            twice = next(token for number, token in enumerate(self.tokens) if self.numbers[token] != number)
            raise TokenizerError(f"{self.path}: the token {shown(twice)} is in the table twice")
        self.types = self._list("token_type", int) or [NORMAL] * self.count
        if len(self.types) != self.count:
            raise TokenizerError(f"{self.path} has {self.count} tokens, but {len(self.types)} types of tokens")

    def _list(self, key: str, kind: type, needed: bool = False) -> list[Any]:
        name = f"tokenizer.ggml.{key}"
        stored = self.file.metadata.values_.get(name)
        if stored is None:
            if needed:
                raise TokenizerError(f"{self.path} has no key {name}: the file holds no tokenizer table")
            return []
        size = stored.end - stored.start
        count = int.from_bytes(self.file.mapped()[stored.start + 4 : stored.start + 12].tobytes(), "little")
        if size > MAX_TABLE or (stored.type == _ARRAY and count > MAX_ENTRIES):
            raise TokenizerError(
                f"{self.path}: the key {name} has {count:,} entries in {size:,} bytes; the limits are {MAX_ENTRIES:,} "
                f"and {MAX_TABLE:,}"
            )
        try:
            found = self.file.metadata[name]
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.path}: the key {name} holds a text that is no UTF-8: {error}") from error
        if not isinstance(found, list) or not all(type(each) is kind for each in found):
            raise TokenizerError(f"{self.path}: the key {name} is no list of {kind.__name__}")
        return found

    def scalar(self, key: str, kind: type) -> Any:
        """The value of a key, or None. TokenizerError for one of another type, or above the limit."""
        stored = self.file.metadata.values_.get(key)
        if stored is None:
            return None
        if stored.end - stored.start > MAX_TABLE:
            raise TokenizerError(f"{self.path}: the key {key} takes {stored.end - stored.start:,} bytes")
        try:
            found = self.file.metadata[key]
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.path}: the key {key} is no UTF-8: {error}") from error
        if type(found) is not kind:
            raise TokenizerError(f"{self.path}: the key {key} is {shown(found)}, no {kind.__name__}")
        return found

    def number(self, *names: str) -> int | None:
        """The number of a token with a role. TokenizerError if the table has no such number."""
        for name in names:
            found = self.scalar(f"tokenizer.ggml.{name}_token_id", int)
            if found is not None:
                if not 0 <= found < self.count:
                    raise TokenizerError(f"{self.path}: {name}_token_id is {found}, and the table has {self.count}")
                return int(found)
        return None

    def flag(self, name: str, default: bool) -> bool:
        found = self.scalar(f"tokenizer.ggml.{name}", bool)
        return default if found is None else bool(found)

    def merges(self) -> list[list[str]]:
        pairs = []
        for each in self._list("merges", str):
            cut = each.find(" ", 1)
            if cut < 0:
                raise TokenizerError(f"{self.path}: the merge {shown(each)} is no pair of tokens")
            pair = [each[:cut], each[cut + 1 :]]
            for token in (*pair, "".join(pair)):
                if token not in self.numbers:
                    raise TokenizerError(
                        f"{self.path}: the merge {shown(each)} needs {shown(token)}, which is no token"
                    )
            pairs.append(pair)
        return pairs

    def scores(self) -> list[float]:
        found = self._list("scores", float)
        if len(found) != self.count or any(map(math.isnan, found)):
            raise TokenizerError(f"{self.path} needs a score, a number, for each of {self.count} tokens")
        return found

    def added(self, special: Sequence[int]) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is split: special ones, and those of the user."""
        return [
            {
                "id": number, "content": token, "special": kind in special,
                "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            }
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and (kind in special or kind == USER_DEFINED)
        ]  # fmt: skip


def describe(path: str | Path, pre: str | None = None) -> Described:
    """The tokenizer of a GGUF file; `pre` replaces the file's `tokenizer.ggml.pre`.

    TokenizerError if it has none, a malformed one, or one of an unknown kind.
    """
    file = GgufFile(path)
    if "tokenizer.ggml.model" not in file.metadata:
        raise TokenizerError(
            f"{path} holds no tokenizer (no key tokenizer.ggml.model); take the one of the model's folder with "
            "Text.from_folder, or pass ids"
        )
    table = _Table(file, pre)
    kind = table.scalar("tokenizer.ggml.model", str)
    if kind not in _KINDS:
        raise TokenizerError(
            f"{path} has a tokenizer of the kind {shown(kind)}; there are: {', '.join(_KINDS)}. Take the tokenizer of "
            "the model's folder with Text.from_folder, or pass ids"
        )
    made = _KINDS[kind](table)
    unknown = table.number("unknown")
    by_role = {
        "bos_token": table.number("bos", "cls"), "eos_token": table.number("eos"), "unk_token": unknown,
        "sep_token": table.number("seperator"), "pad_token": table.number("padding"),
        "cls_token": table.number("cls"), "mask_token": table.number("mask"),
    }  # fmt: skip
    ends = {table.number("eos"), table.number("eot"), table.number("eom")} - {None}
    named = {
        token: number
        for number, (token, kind) in enumerate(zip(table.tokens, table.types, strict=True))
        if token in _END_NAMES and kind == CONTROL
    }
    if any(marks <= set(named) for marks in _OF_PARTS):
        ends.discard(named.pop("<|end|>", None))
    ends |= set(named.values())
    return Described(
        made,
        by_role["bos_token"],
        frozenset(number for number in ends if number is not None),
        {role: table.tokens[number] for role, number in by_role.items() if number is not None},
        table.scalar("tokenizer.chat_template", str),
    )


# --- the kinds -------------------------------------------------------------------------------------------------------


def _llama(table: _Table) -> dict[str, Any]:
    unknown = table.number("unknown")
    if unknown is None:
        unknown = next((number for number, kind in enumerate(table.types) if kind == UNKNOWN), None)
    has_bytes = all(f"<0x{byte:02X}>" in table.numbers for byte in range(256))
    if unknown is None and not has_bytes:
        raise TokenizerError(f"{table.path} has neither a token for each byte nor one for what is unknown")
    prefix = table.flag("add_space_prefix", True)
    replace: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] * prefix + [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    model = _bpe(table, _merges_of_scores(table)) | {
        "unk_token": None if unknown is None else table.tokens[unknown], "fuse_unk": True, "byte_fallback": has_bytes,
    }  # fmt: skip
    return _tokenizer(
        table, model, (CONTROL, UNKNOWN),
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
        post_processor=_around(table, table.flag("add_bos_token", True), table.flag("add_eos_token", False)),
    )  # fmt: skip


def _merges_of_scores(table: _Table) -> list[list[str]]:
    """Each way to cut a token into two, in the order of the tokens' scores. Control and byte tokens are not made."""
    usable = {NORMAL, USER_DEFINED, UNUSED}
    parts = {token for token, kind in zip(table.tokens, table.types, strict=True) if kind in usable}
    scores = table.scores()
    found: list[list[str]] = []
    for number in sorted(range(table.count), key=lambda number: (-scores[number], number)):
        token = table.tokens[number]
        if len(token) < 2 or token not in parts:
            continue
        if len(token) > MAX_LENGTH:
            raise TokenizerError(f"{table.path}: token {number} has {len(token):,} characters; {MAX_LENGTH} are read")
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        found += [[left, right] for left, right in cuts if left in parts and right in parts]
    return found


def _gpt2(table: _Table) -> dict[str, Any]:
    name = table.pre or table.scalar("tokenizer.ggml.pre", str) or "default"
    split = SPLITS.get(name)
    if split is None:
        raise TokenizerError(
            f"{table.path} splits texts in the way that tokenizer.ggml.pre calls {shown(name)}, which is not known; "
            f"there are: {', '.join(SPLITS)}. Take the tokenizer of the model's folder with Text.from_folder, or pass "
            "the name of one that splits in the same way: Text.from_gguf(path, pre=…)"
        )
    return _byte_level(table, split.patterns, split.whole_tokens, split.starts)


def _byte_level(table: _Table, patterns: Sequence[str], whole_tokens: bool, starts: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = _bpe(table, table.merges()) | {"ignore_merges": whole_tokens}
    return _tokenizer(
        table, model, (CONTROL, UNKNOWN),
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, level]},
        decoder=level,
        post_processor=_around(table, table.flag("add_bos_token", starts), table.flag("add_eos_token", False)),
    )  # fmt: skip


def _bert(table: _Table) -> dict[str, Any]:
    """WordPiece. A file marks tokens that begin a word by "▁"; `tokenizers` marks the others by "##"."""
    unknown = table.number("unknown")
    if unknown is None:
        raise TokenizerError(f"{table.path} is WordPiece and names no token for unknown words (unknown_token_id)")
    words: list[str] = []
    for token, kind in zip(table.tokens, table.types, strict=True):
        plain = kind in (CONTROL, UNKNOWN, UNUSED) or (token.startswith("[") and token.endswith("]") and len(token) > 2)
        words.append(token if plain else token[1:] if token.startswith("▁") else f"##{token}")
    if len(set(words)) != len(words):
        raise TokenizerError(f"{table.path}: two tokens of its WordPiece table are the same word")
    table.tokens, table.numbers = words, {word: number for number, word in enumerate(words)}
    model = {
        "type": "WordPiece", "unk_token": words[unknown], "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": table.numbers,
    }  # fmt: skip
    return _tokenizer(
        table, model, (CONTROL, UNKNOWN),
        normalizer={
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        post_processor=_around(
            table, table.flag("add_bos_token", True), table.flag("add_eos_token", True), ("seperator", "eos")
        ),
    )  # fmt: skip


def _bpe(table: _Table, merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": table.numbers, "merges": merges,
    }  # fmt: skip


def _tokenizer(table: _Table, model: Mapping[str, Any], special: Sequence[int], **parts: Any) -> dict[str, Any]:
    empty = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": table.added(special)}
    return {**head, **empty, **parts, "model": model}


def _around(table: _Table, starts: bool, ends: bool, last_names: Sequence[str] = ("eos",)) -> dict[str, Any] | None:
    """The step that adds the start token before a text and the end token behind it."""
    first = table.number("bos", "cls") if starts else None
    last = table.number(*last_names) if ends else None
    for flag, number in (("add_bos_token", first), ("add_eos_token", last)):
        if number is None and table.flag(flag, False):
            raise TokenizerError(f"{table.path} sets {flag}, but no key says which token that is")
    if first is None and last is None:
        return None
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    named = {}
    for place, number in ((0, first), (len(parts) + 1, last)):
        if number is not None:
            token = table.tokens[number]
            parts.insert(place, {"SpecialToken": {"id": token, "type_id": 0}})
            named[token] = {"id": token, "ids": [number], "tokens": [token]}
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": named}


_KINDS = {"llama": _llama, "gpt2": _gpt2, "bert": _bert}

__all__ = ["Described", "describe"]
