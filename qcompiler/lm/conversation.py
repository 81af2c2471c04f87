"""Sequences of tokens and the cache that holds their keys and values."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError, CorruptFileError, SessionBusyError
from qcompiler.lm.record import mark_slots
from qcompiler.plan.kinds.sample import ROW, WORDS
from qcompiler.plan.sample_rule import Floats, Words
from qcompiler.runtime.array_files import read_arrays
from qcompiler.runtime.files import replacing
from qcompiler.units import counted

if TYPE_CHECKING:
    from qcompiler.lm.record import LanguageModel
    from qcompiler.runtime.graph import CapturedGraph
    from qcompiler.runtime.loaded import LoadedProgram

Ids = npt.NDArray[np.int64]
Arguments = dict[str, Ids]

GRAPHS = 16
"""The most graphs that a conversation on a device keeps: one for each number of sequences and of asked tokens."""

LAST_DRAWN = -1
"""An id that stands for the token that the last call drew for its sequence."""

MARKS = "state.marks"
"""The state with tallies and biases."""

DRAWN = "state.drawn"
"""The state with the tokens of the last call."""


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, apart from how it draws, and how many rows of its logits each sequence has."""

    given: Arguments
    shares: list[tuple[int, int]]

    def nothing_drawn(self) -> Words:
        return np.full((len(self.given["ids"]), WORDS), -1, np.int64)

    def ids_where(self, drawn: dict[int, int]) -> Ids:
        """The ids, with `LAST_DRAWN` in the place of tokens that the program keeps."""
        ids = self.given["ids"].copy()
        if ids.shape[1] == 1:
            for i, token in drawn.items():
                if i < len(ids) and ids[i, 0] == token:
                    ids[i, 0] = LAST_DRAWN
        return ids


class Conversation:
    """One to `max_batch` sequences, each with the tokens that its part of the cache holds.

    Conversations share the weights of a program and nothing else; several may be alive, in several threads.  One
    conversation does one thing at a time: what another thread asks meanwhile raises SessionBusyError.

    A call that fails or is interrupted leaves `tokens` as they were, or with some of the new ones.  What it wrote to
    the cache beyond `tokens` lies where no token looks, and is written again by the next call.  States that each token
    changes (lm/states.py) may then be those of other tokens: what is asked next begins with reading `tokens` again.
    """

    def __init__(self, program: LoadedProgram, record: LanguageModel, sequences: int = 1) -> None:
        if not 1 <= sequences <= record.max_batch:
            raise ArgumentError(
                f"{sequences} sequences: this model was compiled for 1 to {record.max_batch}; compile it with "
                f"max_batch={sequences}"
            )
        self.program, self.record = program, record
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self._session = program.session()
        self._graphs: dict[tuple[int, int], CapturedGraph] = {}
        self._kept = [0] * sequences  # the first position whose key every ring still has
        self._drawn: dict[int, int] = {}  # what the last call drew, and the program keeps: {sequence: token}
        self._is_torn = False  # whether states may be those of other tokens
        self._lock = threading.RLock()  # a text that is generated holds it over all its calls

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other threads out. SessionBusyError if one is in."""
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("another thread uses this conversation; give each thread its own: lm.conversation()")
        try:
            yield
        finally:
            self._lock.release()

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.tokens)

    def read(
        self, new: Sequence[Sequence[int]] | Sequence[int], *, logits: Literal["last", "all"] = "last"
    ) -> list[npt.NDArray[np.float32]]:
        """Adds tokens to each sequence (a list for each; for one sequence also a plain list).

        Returns one array for each sequence: the logits (1, vocabulary) that follow its last new token, or with
        `logits="all"` those that follow each new token, (new tokens, vocabulary).  A sequence without new tokens gets
        an array with no rows.

        ArgumentError for tokens that the vocabulary lacks, and for more of them than the cache takes.
        """
        with self.alone():
            self._mend()
            return self._read(self._checked(new), logits == "all")

    def _read(self, given: list[Ids], every: bool) -> list[npt.NDArray[np.float32]]:
        """`read` for checked tokens."""
        parts: list[list[npt.NDArray[np.float32]]] = [[] for _ in given]
        for call in self._calls(given, every):
            logits, _ = self._run(call, call.nothing_drawn(), reads_logits=True)
            begin = 0
            for i, share in call.shares:
                if share:
                    parts[i].append(np.asarray(logits[begin : begin + share], np.float32))
                begin += share
        none = np.zeros((0, self.record.vocabulary), np.float32)
        return [np.concatenate(part) if len(part) > 1 else part[0] if part else none for part in parts]

    def draw(self, new: Sequence[Sequence[int]], words: Words) -> dict[int, int]:
        """Adds tokens to each sequence, and draws the next token of those that got some, in the same calls.

        `words` (sequences, WORDS) say how (plan/kinds/sample.py); their `ROW` is filled in here.  A result below 0 says
        why there is no token.  On a device nothing else is copied back.
        """
        found: dict[int, int] = {}
        with self.alone():
            self._mend()
            for call in self._calls(self._checked(new), False):
                how = call.nothing_drawn()
                asked = [i for i, share in call.shares if share]
                how[asked] = words[asked]
                how[asked, ROW] = np.arange(len(asked))
                _, tokens = self._run(call, how, reads_logits=False)
                self._drawn = {i: int(tokens[i]) for i in asked if tokens[i] >= 0}
                found |= {i: int(tokens[i]) for i in asked}
        return found

    def set_marks(self, tallies: Sequence[Floats], biases: Sequence[Floats]) -> None:
        """Overwrites what `draw` reads of each sequence: a tally and a bias for each token of the vocabulary."""
        marks = np.zeros((2, mark_slots(self.record.max_batch), self.record.vocabulary), np.float32)
        marks[0, : len(tallies)], marks[1, : len(biases)] = tallies, biases
        with self.alone():
            self._session.set_states({MARKS: marks.reshape(-1).view(np.uint8)})

    def _calls(self, given: list[Ids], every: bool) -> Iterator[_Call]:
        """Pieces of at most a chunk. A piece's tokens are the conversation's when the next call is asked for."""
        done = [0] * len(given)
        while left := [len(ids) - done[i] for i, ids in enumerate(given) if done[i] < len(ids)]:
            # A padded token would change a state, so that each sequence reads all tokens of a call, or none.
            size = min(self.record.chunk, *left) if self.record.counts else self.record.chunk
            pieces = [ids[done[i] : done[i] + size] for i, ids in enumerate(given)]
            lasts = [done[i] + len(piece) == len(given[i]) for i, piece in enumerate(pieces)]
            call = self._call(pieces, lasts, every)
            self._overwrite(call)
            self._is_torn = self.record.counts
            yield call
            for i, piece in enumerate(pieces):
                self.tokens[i].extend(piece.tolist())
                done[i] += len(piece)
            self._is_torn = False

    def _checked(self, new: Sequence[Sequence[int]] | Sequence[int]) -> list[Ids]:
        rows: Any = [new] if len(self) == 1 and (not len(new) or np.ndim(new[0]) == 0) else new
        if len(rows) != len(self):
            raise ArgumentError(
                f"{counted(len(rows), 'list')} of tokens for a conversation of {counted(len(self), 'sequence')}"
            )
        found = [tokens_of(ids, self.record.vocabulary) for ids in rows]
        for i, ids in enumerate(found):
            if len(self.tokens[i]) + len(ids) > self.record.max_seq_len:
                raise ArgumentError(
                    f"sequence {i} has {counted(len(self.tokens[i]), 'token')} and would get {len(ids)} more: the "
                    f"cache takes {self.record.max_seq_len}. Shorten it (`truncate`, `reset`), "
                    "or compile with a larger max_seq_len"
                )
        return found

    def _call(self, pieces: list[Ids], lasts: list[bool], every: bool) -> _Call:
        """The arguments of one call. Sequences with fewer new tokens than others are filled up with tokens that write
        to the rows behind their own tokens, where the next ones write, and that see one key: they change nothing."""
        record = self.record
        count = max(i + 1 for i, piece in enumerate(pieces) if len(piece))
        longest = max(map(len, pieces))
        ids, positions = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.int64)
        rows = np.array([len(self.tokens[i]) for i in range(count)])[:, None] + np.arange(longest)
        wanted: list[int] = []
        shares: list[tuple[int, int]] = []
        for i, piece in enumerate(pieces[:count]):
            size, begin = len(piece), len(self.tokens[i])
            ids[i, :size] = piece
            positions[i, :size] = np.arange(begin, begin + size)
            asked = range(size) if every else range(size - 1, size) if size and lasts[i] else range(0)
            wanted += [i * longest + n for n in asked]
            shares.append((i, len(asked)))
        rows += np.arange(count)[:, None] * record.rows
        # The program computes logits for at least one token.
        given = {"ids": ids, "positions": positions, "rows": rows, "wanted": np.array(wanted or [0], np.int64)}
        if record.counts:
            given["counts"] = np.array([len(piece) for piece in pieces[:count]], np.int64)
        return _Call(given, shares)

    def _overwrite(self, call: _Call) -> None:
        """Notes which keys the rings lose to the rows that a call writes."""
        if not self.record.ring:
            return
        count, longest = call.given["ids"].shape
        for i in range(count):
            self._kept[i] = max(self._kept[i], len(self.tokens[i]) + longest - self.record.ring)

    def _run(self, call: _Call, how: Words, *, reads_logits: bool) -> tuple[Any, Any]:
        """Logits and drawn tokens of one call. On a device a call with one token of each sequence is a replay of its
        graph, and logits are copied to the host only if they are read."""
        drawn, self._drawn = self._drawn, {}
        graph, is_new = None, False
        if call.given["ids"].shape[1] == 1 and self.program.device != "cpu":
            graph, is_new = self._graph(call)
        run: Callable[..., Any] = self._session if graph is None else graph.replay
        if not self.record.samples:
            return run(**call.given), None
        given = {**call.given, "how": how}
        if not is_new:
            given["ids"] = call.ids_where(drawn)
        if reads_logits or self.program.device == "cpu":
            logits, tokens = run(**given)
            return logits, tokens
        tokens = np.empty(len(how), np.int64)
        if graph is not None:
            graph.replay_on_host(given, {1: tokens})
        else:
            run(**given, out=(None, tokens))
        return None, tokens

    def _graph(self, call: _Call) -> tuple[CapturedGraph, bool]:
        """The graph for calls of this shape, and whether it was recorded for this one.

        Before it is recorded, the call runs once for the same tokens and draws nothing.  It writes the rows of the
        cache that the replay writes again, and no sequence reads a token in the sense of `counts`, so the states need
        no copy; but the tokens of the call before it are lost.
        """
        shape = (len(call.given["ids"]), len(call.given["wanted"]))
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph, False
        if len(self._graphs) >= GRAPHS:  # the oldest makes room
            self._graphs.pop(next(iter(self._graphs))).close()
        more = {"how": call.nothing_drawn()} if self.record.samples else {}
        if self.record.counts:
            more["counts"] = np.zeros_like(call.given["counts"])
        graph = self._graphs[shape] = self._session.capture(**{**call.given, **more}, keep_states=False)
        return graph, True

    # --- changing what was said ---

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forgets all tokens of a sequence but the first `length`; what follows is written anew.

        Layers that keep only their window have written over old keys.  If the next token would see one of those, the
        tokens that remain are read again, from the first: a key depends on all tokens before it.  So they are where a
        layer has a state that each token changes.
        """
        if not 0 <= length <= len(self.tokens[sequence]):
            raise ArgumentError(
                f"length {length}: sequence {sequence} has {counted(len(self.tokens[sequence]), 'token')}"
            )
        with self.alone():
            self._mend()
            has_keys = max(0, length - self.record.window + 1) >= self._kept[sequence] or not self.record.ring
            has_states = not self.record.counts or length in (0, len(self.tokens[sequence]))
            if has_keys and has_states:
                del self.tokens[sequence][length:]
                return
            again = np.array(self.tokens[sequence][:length], np.int64)
            self.tokens[sequence], self._kept[sequence] = [], 0
            nothing = np.zeros(0, np.int64)
            self._read([again if i == sequence else nothing for i in range(len(self))], False)

    def _mend(self) -> None:
        """Reads all tokens again if a call did not end: its states may be those before it, after it, or between."""
        if not self._is_torn:
            return
        before, is_done = self.tokens, False
        try:
            self.tokens, self._kept = [[] for _ in before], [0] * len(self)
            self._read([np.array(tokens, np.int64) for tokens in before], False)
            is_done = True
        finally:
            if not is_done:  # interrupted again
                self.tokens, self._is_torn = before, True

    def reset(self) -> None:
        """Forgets all tokens. The cache keeps its memory."""
        with self.alone():
            for tokens in self.tokens:
                tokens.clear()
            self._kept = [0] * len(self)
            self._is_torn = False  # a sequence begins with zeros

    def fork(self) -> Conversation:
        """A conversation of its own with a copy of these tokens and of the cache."""
        other = Conversation(self.program, self.record, len(self))
        with self.alone():
            self._mend()
            other._session.set_states(self._session.states())
            other.tokens, other._kept = [list(tokens) for tokens in self.tokens], list(self._kept)
        return other

    def save(self, path: str | Path) -> None:
        """Writes tokens and cache to an .npz file, for `restore` by the same program."""
        with self.alone():
            self._mend()
            arrays: dict[str, Any] = {f"state:{name}": data for name, data in self._session.states().items()}
            arrays |= {f"tokens:{i}": np.array(tokens, np.int64) for i, tokens in enumerate(self.tokens)}
            arrays["kept"] = np.array(self._kept, np.int64)
        arrays["program"] = identity(self.program, self.record)
        with replacing(path) as file:
            np.savez(file, **arrays)

    def restore(self, path: str | Path) -> None:
        """Takes over tokens and cache from a file of `save`; nothing changes if it does not fit (CorruptFileError)."""
        try:
            arrays = read_arrays(Path(path))
        except ArgumentError as error:
            raise CorruptFileError(f"{path} is no saved conversation: {error}") from error
        if not isinstance(arrays, dict):
            raise CorruptFileError(f"{path} is no saved conversation: it is a single array")
        names = [f"tokens:{i}" for i in range(len(self))]
        if {name for name in arrays if name.startswith("tokens:")} != set(names):
            raise CorruptFileError(f"{path} does not hold a conversation of {counted(len(self), 'sequence')}")
        try:
            tokens = [tokens_of(arrays[name], self.record.vocabulary).tolist() for name in names]
        except ArgumentError as error:
            raise CorruptFileError(f"{path} holds no tokens of this model: {error}") from error
        if not np.array_equal(arrays.get("program", ()), identity(self.program, self.record)):
            raise CorruptFileError(f"{path} was saved by another program; its cache means nothing to this one")
        if max(map(len, tokens)) > self.record.max_seq_len:
            raise CorruptFileError(f"{path} has more tokens than the cache takes ({self.record.max_seq_len})")
        kept = arrays.get("kept", np.zeros(0))
        if kept.shape != (len(self),) or kept.dtype != np.int64:
            raise CorruptFileError(f"{path} does not say which keys its caches still have")
        states = {name.removeprefix("state:"): data for name, data in arrays.items() if name.startswith("state:")}
        if set(states) != {arena.name for arena in self.program.plan.arenas if arena.kind == "state"}:
            raise CorruptFileError(f"{path} was saved by another program: its caches are {', '.join(sorted(states))}")
        with self.alone():
            before, self.tokens = self.tokens, [[] for _ in tokens]  # an interrupt must not leave tokens without keys
            try:
                self._drawn = {}
                self._session.set_states(states)
            except ArgumentError as error:
                self.tokens = before
                raise CorruptFileError(f"{path} was saved by another program: {error}") from error
            self.tokens, self._kept, self._is_torn = tokens, kept.tolist(), False


def identity(program: LoadedProgram, record: LanguageModel) -> npt.NDArray[np.uint8]:
    """A digest of sizes, plan and a sample of the weights: caches of other programs are told apart by it."""
    weights = program.image.weights
    digest = hashlib.sha256(record.encode() + msgspec.json.encode(program.plan, order="deterministic"))
    digest.update(np.ascontiguousarray(weights[:: max(1, len(weights) >> 16)]).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def tokens_of(ids: Any, vocabulary: int) -> Ids:
    """Token ids as an array. ArgumentError unless they are integers, in one row, and in the vocabulary."""
    if type(ids) is list and len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < vocabulary:
        return np.array(ids, np.int64)  # a step's
    found = np.asarray(ids)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ArgumentError(f"token ids are one row of integers, not {found.dtype} of shape {found.shape}")
    wrong = found[(found < 0) | (found >= vocabulary)]
    if wrong.size:
        raise ArgumentError(f"the token {int(wrong[0])} is not in the vocabulary, which has {vocabulary}")
    return found.astype(np.int64)
