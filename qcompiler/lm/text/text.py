"""`Text`: the tokenizer, the special tokens and the chat template of a language model.

    text = Text.from_folder("model/")            # tokenizer.json and what stands beside it
    text = Text.from_gguf("model.gguf")          # the file's own table
    ids = text.encode("Hello")                   # special tokens in the text are text
    text.decode(ids)                             # "Hello"
    text.encode_chat([{"role": "user", "content": "Hello"}])

Needs the packages of `qcompiler[lm]`, apart from `Text.bytes` and from reading and writing a record.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from qcompiler.errors import ArgumentError, ChatTemplateError, MissingDependencyError, TokenizerError
from qcompiler.formats.foreign.json_text import json_object, shown
from qcompiler.lm.text import marks
from qcompiler.lm.text.expressions import check_expressions
from qcompiler.lm.text.folder import read_folder
from qcompiler.lm.text.gguf_table import describe
from qcompiler.lm.text.growth import check_growth
from qcompiler.lm.text.pieces import Stream, fallback_to_bytes, joined, letters_to_bytes, spelling
from qcompiler.lm.text.record import Record, read_record
from qcompiler.lm.text.template import ChatTemplate

Message = Mapping[str, Any]
"""A message of a chat: "role", "content", and what else the template reads."""

UNKNOWN_ID = "\ufffd"
Raw = bytes
"""Within the class, `bytes` is a method."""


class Text:
    """A model's tokenizer with its special tokens and its chat template. Safe to use from several threads."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._lock = threading.Lock()

    # --- where it comes from ---

    @classmethod
    def from_folder(cls, path: str | Path) -> Text:
        """The tokenizer of a folder of transformers (see folder.py for the files).

        TokenizerError if the folder has no tokenizer.json, or one that `tokenizers` refuses.
        """
        made = cls(read_folder(Path(path)))
        made._check(str(path))
        return made

    @classmethod
    def from_gguf(cls, path: str | Path, *, pre: str | None = None) -> Text:
        """The tokenizer in a GGUF file's keys. `pre` names how texts are split, in place of `tokenizer.ggml.pre`.

        TokenizerError if the file has no tokenizer, or one of a kind that is not read; WeightsError if it is no GGUF.
        """
        found = describe(path, pre)
        record = Record(
            kind="tokenizers", tokenizer=json.dumps(found.tokenizer, ensure_ascii=False), start_id=found.start,
            end_ids=tuple(sorted(found.ends)), names=found.names, template=found.template,
        )  # fmt: skip
        made = cls(record.checked(str(path)))
        made._check(str(path))
        return made

    @classmethod
    def bytes(cls, end: int | None = None, start: int | None = None) -> Text:
        """A model whose tokens are the 256 bytes of UTF-8. `end` is the byte that ends a text, often 0."""
        ends = () if end is None else (end,)
        return cls(Record(kind="bytes", start_id=start, end_ids=ends).checked("Text.bytes"))

    @classmethod
    def from_record(cls, data: Raw) -> Text:
        """The inverse of `to_record`. TokenizerError for data that is malformed, too large or newer than this."""
        return cls(read_record(data))

    def to_record(self) -> Raw:
        """All of it as JSON, for a file. Runs nothing, and needs no package."""
        return msgspec.json.encode(self._record)

    # --- tokens ---

    @property
    def start_id(self) -> int | None:
        """The token that begins a text; None if the model has none."""
        return self._record.start_id

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self._record.end_ids)

    @property
    def names(self) -> Mapping[str, str]:
        """The texts of named special tokens ("bos_token", "eos_token", …), as templates see them."""
        return dict(self._record.names)

    @property
    def template(self) -> str | None:
        """The source of the chat template, if there is one."""
        return self._record.template

    @functools.cached_property
    def size(self) -> int:
        """The number of tokens; the model's table may be larger."""
        return 256 if self._is_bytes else int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: without `special=True`, `encode` makes none from a text, and `decode` shows none."""
        if self._is_bytes:
            return self.end_ids if self.start_id is None else self.end_ids | {self.start_id}
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, *, special: bool = False, wrap: bool = True) -> list[int]:
        """The tokens of a text.

        Special tokens that are spelled out in the text are ordinary text, since a text may come from anyone; with
        `special` they become the tokens.  `wrap` adds the tokens that the tokenizer puts around each text (often a
        start token).  ArgumentError for a text with half of a surrogate pair, which has no UTF-8.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"encode takes a str, not {type(text).__name__}")
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"the text has half of a surrogate pair at character {error.start}, which no UTF-8 can express; "
                'decode its source with errors="replace"'
            ) from error
        if self._is_bytes:
            return self._encode_bytes(raw, special)
        ids, added = self._encode(text, special, wrap)
        if special:
            return ids
        found: list[int] = []
        for number, is_added in zip(ids, added, strict=True):
            harmless = is_added or number not in self._guarded
            found += [number] if harmless else self._spelled(number)
        return found

    def decode(self, ids: Sequence[int], *, special: bool = False, continues: bool = False) -> str:
        """The text of tokens. Special tokens are left out, or spelled out with `special`.

        Some tokenizers put a space before each text, which is dropped here; `continues` keeps it, for tokens that
        follow others.  Bytes that are no UTF-8, and ids without a token, become U+FFFD.
        """
        pieces = [self._piece(self._number(number), special) for number in ids]
        known = [piece for piece in pieces if piece is not None]
        if len(known) == len(pieces):
            return joined(known, self._drops_space and not continues)
        return self._decode_whole(ids, special)

    def stream(self, *, special: bool = False, continues: bool = False) -> Stream:
        """Decodes tokens as they arrive, as `decode` would all of them together."""
        return Stream(
            lambda number: self._piece(self._number(number), special),
            self._drops_space and not continues,
            lambda ids: self._decode_whole(ids, special),
        )

    def token(self, number: int) -> str:
        """A token as the tokenizer writes it, for people to look at."""
        if self._is_bytes:
            return f"<0x{self._number(number):02X}>"
        found = self._tokenizer.id_to_token(self._number(number))
        return UNKNOWN_ID if found is None else str(found)

    # --- chats ---

    def chat(self, messages: Sequence[Message], *, generation_prompt: bool = True, **variables: Any) -> str:
        """The messages as one text, by the model's template. `variables` (tools=…) are passed to the template.

        ChatTemplateError without a template, if the template refuses the messages, or if it exceeds its limits.
        """
        usual = {"tools": None, "documents": None}  # templates ask whether they are None, not whether they are defined
        given = {**usual, "messages": list(messages), "add_generation_prompt": generation_prompt, **variables}
        return self._template.render(dict(self._record.names) | given)

    def encode_chat(
        self, messages: Sequence[Message], *, generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The tokens of a chat. Special tokens are those of the template: in messages and variables they are text."""
        if self._is_bytes:
            names = [chr(number) for number in self.special_ids if number < 128]
        else:
            names = [self._tokenizer.id_to_token(number) for number in sorted(self.special_ids)]
        given: dict[str, Any] = {"messages": list(messages), **variables}
        mark = marks.unused(self._record.template or "", given)
        pattern = marks.pattern(names)
        rendered = self.chat(generation_prompt=generation_prompt, **marks.broken(given, pattern, mark))
        ids: list[int] = []
        for piece, is_text in marks.cut(rendered, names, mark):
            ids += self._continued(piece, special=not is_text) if ids else self.encode(
                piece, special=not is_text, wrap=False
            )  # fmt: skip
        return ids

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        if self._record.template is None:
            raise ChatTemplateError(
                "this model has no chat template; build the prompt yourself and pass it to encode(…, special=True)"
            )
        return ChatTemplate(self._record.template)

    def _continued(self, piece: str, special: bool) -> list[int]:
        """The tokens of a piece that follows another: after a newline, whose tokens are taken away again.

        Some tokenizers put a space before each text, and so would put one into the middle of this.
        """
        before = self.encode("\n", wrap=False)
        together = self.encode("\n" + piece, special=special, wrap=False)
        if together[: len(before)] == before:
            return together[len(before) :]
        return self.encode(piece, special=special, wrap=False)

    # --- the tokenizer ---

    @property
    def _is_bytes(self) -> bool:
        return self._record.kind == "bytes"

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = tokenizers_package()
        described = self._described
        check_merges(described)
        check_growth(described)
        check_expressions(described)
        try:
            made = library.Tokenizer.from_str(self._record.tokenizer)
        except BaseException as error:
            raise _failure(error, "tokenizers does not read this tokenizer") from error
        # As transformers does: a text is neither cut nor filled up, whatever its author's last call asked for. Filling
        # up to a number that no memory holds would end the process.
        made.no_truncation()
        made.no_padding()
        return made

    @property
    def _described(self) -> dict[str, Any]:
        return json_object(self._record.tokenizer.encode(), "the tokenizer", TokenizerError)

    @functools.cached_property
    def _spelling(self) -> tuple[str, bool] | None:
        if self._is_bytes:
            return "bytes", False
        return spelling(self._described.get("decoder"))

    @property
    def _drops_space(self) -> bool:
        return self._spelling is not None and self._spelling[1]

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @functools.cached_property
    def _guarded(self) -> frozenset[int]:
        """Special tokens that a text must not make; the token for unknown text is made by it."""
        model = self._tokenizer.model
        unknown = getattr(model, "unk_token", None)
        number = self._tokenizer.token_to_id(unknown) if isinstance(unknown, str) else getattr(model, "unk_id", None)
        return self.special_ids - {number}

    def _check(self, where: str) -> None:
        """Refuses a tokenizer that cannot be used, and ids beyond its table, when it is read rather than later."""
        try:
            self.encode("a")
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from error
        beyond = [
            number for number in (*self.end_ids, self.start_id or 0) if self._tokenizer.id_to_token(number) is None
        ]
        if beyond:
            raise TokenizerError(
                f"{where}: the start or end token {beyond[0]} is not in the table of {self.size} tokens"
            )

    def _encode(self, text: str, special: bool, wrap: bool) -> tuple[list[int], list[int]]:
        """Tokens, and for each whether the tokenizer put it around the text."""
        with self._lock:
            tokenizer = self._tokenizer
            try:
                tokenizer.encode_special_tokens = not special
                found = tokenizer.encode(text, add_special_tokens=wrap)
            except BaseException as error:
                raise _failure(error, f"tokenizers failed on a text of {len(text):,} characters") from error
        return found.ids, found.special_tokens_mask

    def _spelled(self, number: int) -> list[int]:
        """A special token that a text happened to make, letter by letter: no text makes a special token."""
        token = self._tokenizer.id_to_token(number)
        letters = [each.id for letter in token for each in self._tokenizer.model.tokenize(letter)]
        if self._guarded.intersection(letters):
            raise TokenizerError(
                f"a text holds {shown(token)}, a special token that has no other spelling; take it out of the text, "
                "or allow it with special=True"
            )
        return letters

    def _encode_bytes(self, raw: Any, special: bool) -> list[int]:
        ids = list(raw)
        for place, number in enumerate(ids if not special else []):
            if number in self.special_ids:
                raise ArgumentError(
                    f"byte {place} of the text is {number}, which ends a text of this model; take it out of the text, "
                    "or allow it with special=True"
                )
        return ids

    def _number(self, number: int) -> int:
        try:
            found = number.__index__()
        except AttributeError:
            raise ArgumentError(f"a token is a whole number, not {shown(number)}") from None
        if not 0 <= found < 1 << 31:
            raise ArgumentError(f"there is no token {found}: tokens count from 0")
        return found

    def _piece(self, number: int, special: bool) -> Any:
        """The bytes of a token; None if this tokenizer has no bytes for one."""
        if number in self.special_ids and not special:
            return b""
        if self._is_bytes:
            return bytes((number,)) if number < 256 else UNKNOWN_ID.encode()
        if self._spelling is None:
            return None
        token = self._tokenizer.id_to_token(number)
        if token is None:
            return UNKNOWN_ID.encode()
        of = letters_to_bytes if self._spelling[0] == "letters" else fallback_to_bytes
        return of(token, number in self._added)

    def _decode_whole(self, ids: Sequence[int], special: bool) -> str:
        try:
            return str(self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=not special))
        except BaseException as error:
            raise _failure(error, f"tokenizers failed to decode {len(ids)} tokens") from error


def tokenizers_package() -> Any:
    """The package `tokenizers`; MissingDependencyError has the command that installs it."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependencyError(
            'text needs the package tokenizers: pip install "qcompiler[lm]" (ids need no package)'
        ) from error
    return tokenizers


def check_merges(described: Mapping[str, Any]) -> None:
    """Refuses merges that `tokenizers` would cut within a character, which can end the process.

    With a continuing_subword_prefix, it drops as many bytes of a merge's right token as the prefix has, unseen.
    """
    model = described.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, Mapping) else None
    if not prefix or not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        return
    merges = model.get("merges")
    for each in merges if isinstance(merges, list) else []:
        pair = each.split(" ") if isinstance(each, str) else each
        right = pair[-1] if isinstance(pair, list) and pair else None
        if not (isinstance(prefix, str) and isinstance(right, str) and right.startswith(prefix)):
            raise TokenizerError(f"the merge {shown(each)} has a right part that does not begin with {shown(prefix)}")


def _failure(error: BaseException, what: str) -> BaseException:
    """The error to raise: ours for errors and panics of tokenizers, the same for an interrupt and the like."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return error if isinstance(error, MissingDependencyError) else TokenizerError(f"{what}: {shown(error)}")
    return error


__all__ = ["Message", "Text"]
