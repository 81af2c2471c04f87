"""The tokenizer of a checkpoint folder as the keys of a GGUF file.

    tokenizer.json, byte-level BPE              tokenizer.ggml.model = "gpt2", tokens, token types, merges, pre
    tokenizer.json, BPE with byte fallback      tokenizer.ggml.model = "llama", tokens, token types, scores
    tokenizer.model (SentencePiece)             the same, with its own scores

llama.cpp splits text for byte-level BPE by a pattern that `tokenizer.ggml.pre` names.  A tokenizer that splits in
another way has no name here and is refused: otherwise the file would load without an error and give other tokens.

A SentencePiece model of llama.cpp joins the two neighbours whose union has the best score.  tokenizer.json has ordered
merges instead, so a token's score is minus the position of its first merge.  That is equivalent if all merges that
make a token are contiguous.  Sources: llama.cpp's src/llama-vocab.cpp (patterns, token types) and sentencepiece's
sentencepiece_model.proto.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.json_text import read_json_object, read_small_file, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (llama_token_type)."""

MOST_TOKENS = 1 << 22
_MAX_MODEL = 256 << 20
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = {
    _MODERN.replace("NUMBER", "{1,3}"): "llama-bpe", _MODERN.replace("NUMBER", ""): "qwen2", _GPT2: "gpt-2",
}  # fmt: skip
"""The pattern that splits a text before BPE, and llama.cpp's name for it."""

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""The last part of GGUF's keys, spelled as llama.cpp spells them."""


@dataclass
class _Vocabulary:
    """The tokens by number, with types; scores or merges."""

    kind: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    pre: str = "default"
    flags: dict[str, bool] = field(default_factory=dict)


def tokenizer_keys(folder: Path, size: int, config: Any) -> dict[str, Any]:
    """The keys of a folder's tokenizer, padded to the `size` of the model's table.

    WeightsError for a folder without a tokenizer, and for one that llama.cpp would read differently.
    """
    described = _optional(folder / "tokenizer.json")
    settings = _optional(folder / "tokenizer_config.json") or {}
    if (folder / "tokenizer.model").is_file() and not _is_byte_level(described):
        vocabulary = _sentencepiece(folder / "tokenizer.model")
        _add_tokens(vocabulary, described or {}, settings, folder)
    elif described is not None:
        vocabulary = _of_json(described, folder / "tokenizer.json")
        _add_tokens(vocabulary, described, settings, folder)
    else:
        raise WeightsError(
            f"{folder} has neither tokenizer.json nor tokenizer.model, and a GGUF file holds the tokenizer"
        )
    count = len(vocabulary.tokens)
    if count > size:
        raise WeightsError(f"{folder}: the tokenizer has {count} tokens, the model's table {size}")
    for number in range(count, size):
        vocabulary.tokens.append(f"[PAD{number}]")
        vocabulary.types.append(UNUSED)
        if vocabulary.scores is not None:
            vocabulary.scores.append(-1000.0 - number)
    return _keys(vocabulary, settings, described or {}, folder, config)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json_object(path, WeightsError) if path.is_file() else None


def _keys(
    vocabulary: _Vocabulary, settings: Mapping[str, Any], described: Mapping[str, Any], folder: Path, config: Any
) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "model": vocabulary.kind,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens,
        "token_type": np.asarray(vocabulary.types, np.int32),
    }
    if vocabulary.scores is not None:
        keys["scores"] = np.asarray(vocabulary.scores, np.float32)
    if vocabulary.merges is not None:  # llama.cpp wants the key of a table whose tokens are single bytes, too
        keys["merges"] = vocabulary.merges or np.zeros(0, np.str_)
    for kind in _SPECIAL:
        number = _special(kind, vocabulary.tokens, settings, config)
        if number is not None:
            keys[f"{_KEYS[kind]}_token_id"] = number
    begins, ends = _added_by_template(described, vocabulary.tokens, keys)
    keys["add_bos_token"] = begins if begins is not None else bool(settings.get("add_bos_token", False))
    keys["add_eos_token"] = ends if ends is not None else bool(settings.get("add_eos_token", False))
    keys |= vocabulary.flags
    found = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    template = _template(folder, settings)
    return found | ({"tokenizer.chat_template": template} if template else {})


def _special(kind: str, tokens: Sequence[str], settings: Mapping[str, Any], config: Any) -> int | None:
    """The number of a special token: named by the tokenizer, else by the model's configuration."""
    named = settings.get(f"{kind}_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    if isinstance(text, str) and text in tokens:
        return tokens.index(text)
    number = getattr(config, f"{kind}_token_id", None)
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) and 0 <= number < len(tokens) else None


def _added_by_template(
    described: Mapping[str, Any], tokens: Sequence[str], keys: Mapping[str, Any]
) -> tuple[bool | None, bool | None]:
    """Whether the post-processor adds tokens before and after a text; None if it does not say."""
    steps = described.get("post_processor")
    steps = steps.get("processors", [steps]) if isinstance(steps, Mapping) else []
    for step in steps if isinstance(steps, list) else []:
        if not isinstance(step, Mapping) or step.get("type") != "TemplateProcessing":
            continue
        parts = step.get("single")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            continue
        named = [part.get("SpecialToken") for part in parts]
        names = [each.get("id") if isinstance(each, Mapping) else None for each in named]

        def is_token(name: Any, kind: str) -> bool:
            return name in tokens and tokens.index(name) == keys.get(f"{kind}_token_id")

        place = names.index(None) if None in names else len(names)
        before, behind = names[:place], names[place + 1 :]
        odd = [name for name in before if not is_token(name, "bos")]
        odd += [name for name in behind if not is_token(name, "eos")]
        if odd or len(before) > 1 or len(behind) > 1:
            raise WeightsError(
                f"the tokenizer puts {', '.join(map(shown, [*before, *behind]))} around a text; a GGUF file says only "
                "whether the first token and the last one are added"
            )
        return bool(before), bool(behind)
    return None, None


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: in tokenizer_config.json, or in a file of its own."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        by_name = {str(each.get("name")): each.get("template") for each in found if isinstance(each, Mapping)}
        found = by_name.get("default")
    if found is None and (folder / "chat_template.jinja").is_file():
        found = read_small_file(folder / "chat_template.jinja", WeightsError).decode(errors="replace")
    return found if isinstance(found, str) else None


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _is_byte_level(described: Mapping[str, Any] | None) -> bool:
    model = (described or {}).get("model")
    return isinstance(model, Mapping) and model.get("type", "BPE") == "BPE" and not model.get("byte_fallback")


def _of_json(described: Mapping[str, Any], where: Path) -> _Vocabulary:
    model = described.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, Mapping) else model
        raise WeightsError(f"{where} is a tokenizer of the type {shown(kind)}; GGUF files are made from BPE ones")
    tokens, merges = _tokens(model, where), _merges(model, where)
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise WeightsError(f"{where} drops merges out or marks parts of words, for which GGUF files have no key")
    if model.get("byte_fallback"):
        types = [BYTE if _BYTE.match(token) else NORMAL for token in tokens]
        scores = _scores(tokens, merges, where)
        return _Vocabulary("llama", tokens, types, scores, flags={"add_space_prefix": _space_prefix(described, where)})
    _check_normalizer(described.get("normalizer"), where)
    return _Vocabulary(
        "gpt2",
        tokens,
        [NORMAL] * len(tokens),
        merges=[" ".join(pair) for pair in merges],
        pre=_pre_tokenizer(described.get("pre_tokenizer"), where),
    )


def _tokens(model: Mapping[str, Any], where: Path) -> list[str]:
    table = model.get("vocab")
    if not isinstance(table, Mapping) or not all(type(number) is int for number in table.values()):
        raise WeightsError(f"{where} has no table of tokens with numbers")
    if len(table) > MOST_TOKENS or sorted(table.values()) != list(range(len(table))):
        raise WeightsError(f"{where}: the numbers of {len(table)} tokens are not 0 to {len(table) - 1}")
    return sorted(table, key=lambda token: int(table[token]))


def _merges(model: Mapping[str, Any], where: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    listed = model.get("merges")
    for each in listed if isinstance(listed, list) else []:
        pair = each.split(" ") if isinstance(each, str) else each
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise WeightsError(f"{where}: the merge {shown(each)} is no pair of tokens")
        if any(" " in part for part in pair):
            raise WeightsError(f"{where}: the merge {shown(each)} holds a space, which separates the two in GGUF files")
        found.append((pair[0], pair[1]))
    return found


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]], where: Path) -> list[float]:
    """Minus the position of each token's first merge. WeightsError if the merges of a token are not contiguous."""
    first: dict[str, int] = {}
    last = ""
    for place, (left, right) in enumerate(merges):
        made = left + right
        if made in first and made != last:
            raise WeightsError(
                f"{where}: the token {shown(made)} is made by merges that are not contiguous, which the scores of a "
                "SentencePiece model in a GGUF file cannot express; add tokenizer.model to the folder"
            )
        first.setdefault(made, place)
        last = made
    return [-float(first[token] + 1) if token in first else 0.0 for token in tokens]


def _space_prefix(described: Mapping[str, Any], where: Path) -> bool:
    """Whether a space is added before a text. WeightsError for a pre-tokenizer that is not SentencePiece's."""
    steps = [
        *_steps(described.get("normalizer"), "normalizers"),
        *_steps(described.get("pre_tokenizer"), "pretokenizers"),
    ]
    prefix = False
    for step in steps:
        match step.get("type"):
            case "Prepend" if step.get("prepend") == "▁":
                prefix = True
            case "Metaspace":
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                prefix = prefix or scheme in ("always", "first")
                if step.get("split", True) and step.get("replacement", "▁") == "▁":
                    continue
            case "Replace":
                continue
            case kind:
                raise WeightsError(
                    f"{where}: {shown(kind)} in front of BPE with byte fallback has no key in GGUF files"
                )
    return prefix


def _steps(found: Any, name: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, or a single step."""
    if not isinstance(found, Mapping):
        return []
    inner = found.get(name) if found.get("type") == "Sequence" else [found]
    return [step for step in inner if isinstance(step, Mapping)] if isinstance(inner, list) else []


def _check_normalizer(found: Any, where: Path) -> None:
    """Refuses normalizers. llama.cpp takes a text's bytes unchanged; NFC changes only text that is not composed."""
    odd = [step.get("type") for step in _steps(found, "normalizers") if step.get("type") != "NFC"]
    if odd:
        raise WeightsError(f"{where}: the normalizer {shown(odd[0])} has no key in GGUF files")


def _pre_tokenizer(found: Any, where: Path) -> str:
    """llama.cpp's name for the way a text is split. WeightsError for a way without a name here."""
    steps = _steps(found, "pretokenizers")
    kinds = [step.get("type") for step in steps]
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0].get("pattern")
        text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        plain = steps[0].get("behavior") in ("Isolated", "Removed") and not steps[1].get("add_prefix_space")
        inverted = steps[0].get("behavior") == "Removed"
        if text in PATTERNS and plain and bool(steps[0].get("invert")) == inverted:
            return PATTERNS[text]
    elif kinds[-1:] == ["ByteLevel"] and steps[-1].get("use_regex", True) and not steps[-1].get("add_prefix_space"):
        if len(steps) == 1:
            return "gpt-2"
        if kinds[0] == "Digits" and len(steps) == 2 and steps[0].get("individual_digits"):
            return "smollm"
    raise WeightsError(
        f"{where}: a text is split by {', '.join(map(shown, kinds)) or 'nothing'} in a way that llama.cpp has no name "
        "for that is known here (gpt-2, llama-bpe, qwen2, smollm)"
    )


# --- added tokens ----------------------------------------------------------------------------------------------------


def _add_tokens(
    vocabulary: _Vocabulary, described: Mapping[str, Any], settings: Mapping[str, Any], folder: Path
) -> None:
    """Adds special tokens and the user's own: their types, and tokens behind the table."""
    found: dict[int, tuple[str, bool]] = {}
    for each in _listed(described.get("added_tokens")):
        number = each.get("id")
        if type(number) is not int:
            raise WeightsError(f"{folder}: an added token has the number {shown(number)}")
        found[number] = (each.get("content", ""), bool(each.get("special")))
    decoder = settings.get("added_tokens_decoder")
    for number, each in decoder.items() if isinstance(decoder, Mapping) else ():
        if str(number).isdecimal() and len(number) < 10 and isinstance(each, Mapping):
            found.setdefault(int(number), (each.get("content", ""), bool(each.get("special"))))
    for number in sorted(found):
        text, special = found[number]
        if not isinstance(text, str) or not 0 <= number <= len(vocabulary.tokens):
            raise WeightsError(f"{folder}: the added token {shown(text)} has the number {shown(number)}, behind a gap")
        kind = CONTROL if special else USER_DEFINED
        if number == len(vocabulary.tokens):
            vocabulary.tokens.append(text)
            vocabulary.types.append(kind)
            if vocabulary.scores is not None:
                vocabulary.scores.append(-1000.0)
        elif vocabulary.tokens[number] != text:
            raise WeightsError(f"{folder}: token {number} is {shown(text)}, and {shown(vocabulary.tokens[number])} too")
        elif vocabulary.types[number] != UNKNOWN:
            vocabulary.types[number] = kind
    model = described.get("model")
    unknown = model.get("unk_token") if isinstance(model, Mapping) else None
    if vocabulary.kind == "llama" and unknown in vocabulary.tokens:
        vocabulary.types[vocabulary.tokens.index(unknown)] = UNKNOWN


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


# --- tokenizer.model -------------------------------------------------------------------------------------------------


def _sentencepiece(path: Path) -> _Vocabulary:
    """SentencePiece's ModelProto: field 1 the pieces, 2 the trainer's settings, 3 the normalizer's."""
    data = read_small_file(path, WeightsError, _MAX_MODEL)
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    prefix, kind = True, 1
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                tokens.append(bytes(piece.get(1, b"")).decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(int(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                kind = int(dict(_fields(value)).get(3, 1))
            elif number == 3 and isinstance(value, bytes):
                prefix = bool(dict(_fields(value)).get(3, 1))
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} is no SentencePiece model: {shown(error)}") from error
    if not tokens or len(tokens) > MOST_TOKENS or not set(types) <= set(range(1, 7)):
        raise WeightsError(f"{path} is no SentencePiece model: it has {len(tokens)} pieces")
    if kind != 2:
        raise WeightsError(f"{path} is a SentencePiece model of kind {kind}, not BPE (2), the one that GGUF's llama is")
    return _Vocabulary("llama", tokens, types, scores, flags={"add_space_prefix": prefix})


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol-buffers message: numbers, four bytes, eight bytes, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
            case 1:
                yield key >> 3, data[at : at + 8]
                at += 8
            case 2:
                size, at = _varint(data, at)
                if at + size > len(data):
                    raise ValueError("a field ends after the end of the file")
                yield key >> 3, data[at : at + size]
                at += size
            case 5:
                yield key >> 3, data[at : at + 4]
                at += 4
            case wire:
                raise ValueError(f"a field of the wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


__all__ = ["PATTERNS", "tokenizer_keys"]
