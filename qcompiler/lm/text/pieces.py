"""The bytes of each token, so that a text can be given out while its tokens arrive.

A token is often a part of a character.  Joining bytes and cutting them into characters gives the same text whether
tokens arrive one by one or together; a decoder that sees some of the tokens cannot promise that.

    byte-level BPE          a letter of the token stands for a byte; tokens that were added stand for themselves
    BPE with byte fallback  "▁" is a space, "<0x0A>" is the byte 10
    WordPiece and others    no bytes: `tokenizers` decodes the last tokens again, and the difference is given out
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes are their own letters, the other 68 follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    """The steps of a decoder, sequences within sequences opened."""
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    return [step for each in inner for step in _steps(each)] if isinstance(inner, list) else []


def spelling(decoder: Any) -> tuple[str, bool] | None:
    """How tokens spell bytes: ("letters" | "fallback", whether one leading space is dropped); None if neither."""
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return "letters", False
    if "ByteFallback" not in kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    drops = False
    for step in steps:
        match step.get("type"):
            case "Replace" if step.get("pattern") != {"String": "▁"} or step.get("content") != " ":
                return None
            case "Metaspace":
                drops = drops or step.get("prepend_scheme", "always") != "never"
            case "Strip":
                if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                    return None
                drops = True
    return "fallback", drops


def letters_to_bytes(token: str, added: bool) -> bytes:
    """The bytes of a token of byte-level BPE. A token with another character stands for itself, as added ones do."""
    if added or not all(letter in _LETTERS for letter in token):
        return token.encode()
    return bytes(_LETTERS[letter] for letter in token)


def fallback_to_bytes(token: str, added: bool) -> bytes:
    """The bytes of a token of BPE with byte fallback."""
    found = None if added else _BYTE.match(token)
    return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode()


class Stream:
    """Text while tokens arrive: `push` returns what is certain so far, `finish` the rest.

    What `push` and `finish` return is, joined, what `Text.decode` gives for all tokens.  Bytes that no character begins
    with, and characters cut off by the end, become U+FFFD.
    """

    def __init__(self, piece: Callable[[int], bytes | None], drops_space: bool, whole: Callable[[list[int]], str]):
        self._piece = piece
        self._whole = whole
        self._drops_space = drops_space
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._given: list[int] = []
        self._shown = ""

    def push(self, number: int) -> str:
        """The text that this token completes; empty within a character, and for special tokens."""
        piece = self._piece(number)
        return self._from_whole(number) if piece is None else self._out(self._bytes.decode(piece))

    def finish(self) -> str:
        """What is left; the stream begins anew."""
        left = self._out(self._bytes.decode(b"", final=True))
        if self._given:
            left += self._whole(self._given)[len(self._shown) :]
        self._bytes.reset()
        self._given, self._shown = [], ""
        return left

    def _out(self, text: str) -> str:
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def _from_whole(self, number: int) -> str:
        """Decodes all tokens again. What the next token may still change, an incomplete end, waits."""
        self._given.append(number)
        text = self._whole(self._given)
        if text.endswith("\ufffd") or not text.startswith(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


def joined(pieces: Sequence[bytes], drops_space: bool) -> str:
    """The text of all pieces."""
    text = b"".join(pieces).decode("utf-8", "replace")
    return text.removeprefix(" ") if drops_space else text


__all__ = ["Stream", "fallback_to_bytes", "joined", "letters_to_bytes", "spelling"]
