"""What a saved program file says about its language model: an attachment beside the program."""

from __future__ import annotations

from typing import Literal

import msgspec

from qcompiler.errors import CorruptFileError, ForeignFileError, NewerFileError

MEMBER = "language-model.json"
VERSION = 2
"""2: the program samples. A program of version 1 gives logits, and the host samples."""


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
        sizes = (record.vocabulary, record.max_seq_len, record.max_batch, record.chunk)
        tokens = (*record.end_ids, *(() if record.start_id is None else (record.start_id,)))
        spare = record.chunk if record.max_batch > 1 else 0
        fits = record.rows >= record.max_seq_len + spare and record.chunk <= record.max_seq_len and version >= 1
        if min(sizes) < 1 or not fits or not all(0 <= t < record.vocabulary for t in tokens):
            raise CorruptFileError(f"{path}: {MEMBER} has sizes or tokens that no language model has")
        return record
