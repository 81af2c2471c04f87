"""What a saved program file says about its language model: an attachment beside the program."""

from __future__ import annotations

from typing import Literal

import msgspec

from qcompiler.errors import CorruptFileError, ForeignFileError, NewerFileError
from qcompiler.formats.foreign.json_text import shown

MEMBER = "language-model.json"
VERSION = 4
"""2: the program samples. A program of version 1 gives logits, and the host samples. 3: layers with a window may keep a
ring of rows. 4: layers may keep states beside keys and values."""

MAX_SIZE = 1 << 40
"""Above every size that a program has; a cache of as many rows does not exist."""


def mark_slots(batch: int) -> int:
    """The slots of `drawn` and `marks`. There is a spare one, so that no trace takes all slots for the sequences of a
    call."""
    return batch + 1 if batch > 1 else 1


class _Version(msgspec.Struct):
    """What every version has: read first, since a newer one may have fields that this one does not know."""

    version: int


class LanguageModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a compiled language model, and its special tokens.

    The cache has `max_batch` slots of `rows` rows each; positions 0 to `max_seq_len` - 1 are tokens', the rows behind
    them take what idle sequences write.  A call reads up to `chunk` tokens of each sequence.  `samples`: the program
    takes `how` and gives tokens beside logits.

    The layers in `ring_layers` have slots of `ring` rows: position p lies in row p % ring, and a token sees at most
    `window` positions in them.  The host names the rows of whole sequences; the program finds those of the rings.

    `counts`: layers have states that each token changes (lm/states.py). The program takes how many tokens each sequence
    reads: all of a call's, or none.
    """

    vocabulary: int
    max_seq_len: int
    max_batch: int
    rows: int
    chunk: int
    cache_dtype: str
    architecture: str = ""
    end_ids: tuple[int, ...] = ()
    start_id: int | None = None
    samples: bool = False
    window: int = 0
    ring: int = 0
    ring_layers: tuple[int, ...] = ()
    counts: bool = False
    version: int = VERSION
    kind: Literal["causal-lm"] = "causal-lm"

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="deterministic")

    @staticmethod
    def decode(data: bytes | None, path: object) -> LanguageModel:
        """ForeignFileError for a program that is no language model, NewerFileError, CorruptFileError for bad values."""
        if data is None:
            raise ForeignFileError(
                f"{path} is a program, but not one of compile_causal_lm: load it with qc.load, or compile the model "
                "with qc.compile_causal_lm"
            )
        try:
            version = msgspec.json.decode(data, type=_Version).version
            if version > VERSION:
                raise NewerFileError(f"{path}: {MEMBER} has version {version}, this version reads {VERSION}")
            record = msgspec.json.decode(data, type=LanguageModel, strict=True)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptFileError(f"{path}: {MEMBER} does not follow its schema: {error}") from error
        wrong = record.wrong()
        if wrong is not None:
            raise CorruptFileError(f"{path}: {MEMBER} has sizes or tokens that no language model has: {wrong}")
        return record

    def rows_of(self, layer: int) -> int:
        """The rows of a slot in a layer of the cache."""
        return self.ring if layer in self.ring_layers else self.rows

    def wrong(self) -> str | None:
        """The first value that no language model has, with its key; None if there is none."""
        spare = self.chunk if self.max_batch > 1 else 0
        tokens = {f"end_ids[{i}]": token for i, token in enumerate(self.end_ids)}
        if self.start_id is not None:
            tokens["start_id"] = self.start_id
        is_ring = bool(self.ring or self.window or self.ring_layers)
        if is_ring and not (self.ring_layers and list(self.ring_layers) == sorted(set(self.ring_layers))):
            return (
                f"ring_layers is {shown(self.ring_layers)} where ring is {shown(self.ring)} and window is "
                f"{shown(self.window)}, and it must be some layers, each once, in order"
            )
        rings = [
            ("window", self.window, 1, self.max_seq_len),
            ("ring", self.ring, self.window + self.chunk - 1, self.max_seq_len - 1),
            *((f"ring_layers[{i}]", number, 0, MAX_SIZE) for i, number in enumerate(self.ring_layers)),
        ]
        # key, value, least, most
        ranges = [
            ("version", self.version, 1, VERSION),
            *((key, getattr(self, key), 1, MAX_SIZE) for key in ("vocabulary", "max_seq_len", "max_batch", "chunk")),
            ("chunk", self.chunk, 1, self.max_seq_len),
            ("rows", self.rows, self.max_seq_len + spare, MAX_SIZE),
            *((key, token, 0, self.vocabulary - 1) for key, token in tokens.items()),
            *(rings if is_ring else []),
        ]
        for key, value, least, most in ranges:
            if not least <= value <= most:
                beside = f"max_seq_len is {shown(self.max_seq_len)}, vocabulary is {shown(self.vocabulary)}"
                return f"{key} is {shown(value)}, and it must be from {least:,} to {most:,} where {beside}"
        return None
