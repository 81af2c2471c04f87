"""What a search has found so far, in a working folder: a small file for each weight or group that is known.

    codes-3f1c9a5e0b7d2c44-17.npz      the codes of weight 17, for the facts with this digest
    scales-90b2…-3.npz                 AWQ's scales of group 3

A file is written whole or not at all.  One that cannot be read is found again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qcompiler.errors import WorkdirError
from qcompiler.frontends.quantise.calibrate import UNREADABLE
from qcompiler.runtime.files import write_private
from qcompiler.runtime.progress import note


@dataclass(frozen=True)
class NumberedFiles:
    """Files of arrays, ``<stem>-<number>.npz``. `again` says what happens to one that is not of use."""

    stem: Path
    again: str

    @staticmethod
    def of(folder: Path, kind: str, facts: Sequence[Any], again: str) -> NumberedFiles:
        """`facts` is JSON of all that the findings depend on."""
        return NumberedFiles(folder / f"{kind}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}", again)

    def path(self, number: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}-{number}.npz")

    def read(self, number: int, names: Sequence[str]) -> list[Any] | None:
        """The arrays of these names; None if there is no such file yet, or if it is damaged, which a note says."""
        try:
            with np.load(self.path(number), allow_pickle=False) as file:
                return [np.array(file[name]) for name in names]
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            note(f"{self.path(number)} cannot be read ({error}): {self.again}")
            return None

    def refuse(self, number: int) -> None:
        """Says that a file has other arrays than it must."""
        note(f"{self.path(number)} holds other data: {self.again}")

    def write(self, number: int, arrays: dict[str, Any]) -> None:
        """WorkdirError if the folder cannot be written."""
        data = io.BytesIO()
        np.savez(data, **arrays)
        try:
            self.stem.parent.mkdir(parents=True, exist_ok=True)
            write_private(self.path(number), data.getvalue())
        except OSError as error:
            raise WorkdirError(f"cannot write {self.path(number)}: {error}") from error


__all__ = ["NumberedFiles"]
