"""A tokenizer and a chat template as data: what a saved program carries.

The record is JSON.  Reading it checks types, sizes and numbers, and runs nothing; `tokenizers` and `jinja2` are needed
only when a text is encoded or a chat is rendered.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from qcompiler.errors import TokenizerError

MAX_RECORD = 128 << 20
"""Maximum bytes of a record. The largest known tokenizer, of 262,144 tokens, takes 34 MB."""
MAX_TEMPLATE = 1 << 20
MAX_TOKENS = 1 << 20
_MAX_NAMES, _MAX_NAME = 64, 4096


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`tokenizer` is the JSON text of the package `tokenizers`; it is empty for the kind "bytes"."""

    kind: Literal["tokenizers", "bytes"]
    version: Literal[1] = 1
    tokenizer: str = ""
    start_id: int | None = None
    end_ids: tuple[int, ...] = ()
    names: dict[str, str] = {}
    template: str | None = None

    def checked(self, where: str) -> Record:
        """The record itself. TokenizerError, beginning with `where`, if a number or a size is out of range."""
        numbers = [*self.end_ids, *([] if self.start_id is None else [self.start_id])]
        limit = 256 if self.kind == "bytes" else MAX_TOKENS
        if len(self.end_ids) > 1024 or not all(0 <= number < limit for number in numbers):
            raise TokenizerError(f"{where}: the start and end tokens {numbers[:16]} are not all from 0 to {limit - 1}")
        if (self.kind == "bytes") == bool(self.tokenizer):
            raise TokenizerError(
                f"{where}: the kind {self.kind} does not fit a tokenizer of {len(self.tokenizer)} bytes"
            )
        if self.template is not None and len(self.template) > MAX_TEMPLATE:
            raise TokenizerError(
                f"{where}: the chat template has {len(self.template):,} characters, above {MAX_TEMPLATE:,}"
            )
        if len(self.names) > _MAX_NAMES or any(len(key) + len(name) > _MAX_NAME for key, name in self.names.items()):
            raise TokenizerError(f"{where}: the names of special tokens are too many or too long")
        return self


def read_record(data: bytes) -> Record:
    """The record in `data`. TokenizerError if it is malformed, too large, or of a newer version."""
    if len(data) > MAX_RECORD:
        raise TokenizerError(f"the record of a tokenizer has {len(data):,} bytes, more than {MAX_RECORD:,}")
    try:
        found = msgspec.json.decode(data, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TokenizerError(f"the record of a tokenizer is malformed: {error}") from error
    return found.checked("the record of a tokenizer")


__all__ = ["MAX_TEMPLATE", "Record", "read_record"]
