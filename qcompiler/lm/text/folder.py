"""The tokenizer of a checkpoint folder: tokenizer.json, and the files that name special tokens and a chat template.

tokenizer.json                 the tokenizer itself, read by the package `tokenizers`
tokenizer_config.json          the names of the start, end and other tokens; often the chat template
special_tokens_map.json        the same names, in older folders
chat_template.jinja            the chat template, in newer folders
chat_template.json             the same, in older folders of models that read images, too
generation_config.json         the numbers of the tokens that end an answer; config.json where it has none
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcompiler.errors import TokenizerError
from qcompiler.formats.foreign.json_text import json_object, read_json_object, read_small_file, shown
from qcompiler.lm.text.record import MAX_TEMPLATE, Record

MAX_TOKENIZER = 64 << 20
"""Maximum bytes of tokenizer.json. The largest known, of 262,144 tokens, has 34 MB."""


def read_folder(path: Path) -> Record:
    """The record of a folder. TokenizerError if it has no tokenizer.json, or a file in it is malformed."""
    main = path / "tokenizer.json"
    if not main.is_file():
        raise TokenizerError(_missing(path))
    raw = read_small_file(main, TokenizerError, MAX_TOKENIZER)
    described = json_object(raw, str(main), TokenizerError)
    names = _names(path)
    numbers = _numbers(described, main)
    template = _template(path)
    start = numbers.get(names.get("bos_token", names.get("cls_token", "")))
    return Record(
        kind="tokenizers", tokenizer=raw.decode(), start_id=start, end_ids=tuple(sorted(_ends(path, names, numbers))),
        names=names, template=template,
    ).checked(str(path))  # fmt: skip


def _missing(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is no folder; Text.from_folder reads a folder with a tokenizer.json"
    if (path / "tokenizer.model").is_file():
        return (
            f"{path} has a tokenizer.model (SentencePiece) and no tokenizer.json; write one with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or convert the model to GGUF"
        )
    return f"{path} has no tokenizer.json; add the tokenizer's files to the folder, or pass ids"


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, TokenizerError) if path.is_file() else {}


def _names(path: Path) -> dict[str, str]:
    """The texts of named tokens: "bos_token" and so on."""
    settings = _optional(path / "special_tokens_map.json") | _optional(path / "tokenizer_config.json")
    found = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _numbers(described: Mapping[str, Any], where: Path) -> dict[str, int]:
    """The number of each token, by its text."""
    model = described.get("model")
    table = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(table, list):  # Unigram: pairs of a text and a score
        table = {each[0]: place for place, each in enumerate(table) if isinstance(each, list) and each}
    if not isinstance(table, Mapping):
        raise TokenizerError(f"{where} has no table of tokens (model.vocab)")
    found = {text: number for text, number in table.items() if isinstance(text, str) and type(number) is int}
    added = described.get("added_tokens")
    for each in added if isinstance(added, list) else []:
        if isinstance(each, Mapping) and isinstance(each.get("content"), str) and type(each.get("id")) is int:
            found[each["content"]] = each["id"]
    return found


def _ends(path: Path, names: Mapping[str, str], numbers: Mapping[str, int]) -> set[int]:
    listed = _optional(path / "generation_config.json").get("eos_token_id")
    if listed is None:
        config = _optional(path / "config.json")
        text = config.get("text_config")  # of models that read images, too
        listed = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, Mapping) else None)
    found = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(type(number) is int for number in found):
        raise TokenizerError(f"{path}: eos_token_id is {shown(listed)}, neither a number nor a list of numbers")
    ends = set(found)
    if names.get("eos_token") in numbers:
        ends.add(numbers[names["eos_token"]])
    return ends


def _template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        raw = read_small_file(file, TokenizerError, MAX_TEMPLATE)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{file} is no UTF-8: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _optional(path / name).get("chat_template")
        if isinstance(found, list):  # several templates with names
            named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


__all__ = ["read_folder"]
