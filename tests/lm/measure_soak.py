"""A process of its own that generates many short texts on one program, and reports what grows, as JSON.

    measure_soak.py MODEL.qca GENERATIONS

The program has 256 tokens, 64 of a text and two sequences, and runs on the CPU.  The kinds of use take turns: greedy
and sampled texts, two sequences, penalties, conversations that go on, fork, forget and are saved, interrupts at a
token, and errors.  After each block of turns everything is counted: anonymous memory (RssAnon), blocks of Python's
allocator, threads, file descriptors, sessions.  Every greedy text is compared with the first.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from anonymous_memory import anonymous

import qcompiler as qc
from qcompiler.errors import ArgumentError, CorruptFileError
from qcompiler.lm.conversation import Conversation
from qcompiler.runtime.session import Session

PROMPT = list(b"import os\n\ndef ")
BLOCKS = 40


class Soak:
    """The kinds of use. Each checks what it gets."""

    def __init__(self, lm: qc.CausalLM, folder: Path) -> None:
        self.lm, self.saved = lm, folder / "talk.npz"
        self.expected = lm.generate(PROMPT, max_new_tokens=6)
        self.kept = lm.conversation()

    def greedy(self, _turn: int) -> None:
        assert self.lm.generate(PROMPT, max_new_tokens=6) == self.expected

    def sampled(self, turn: int) -> None:
        text = self.lm.generate(
            PROMPT,
            max_new_tokens=4,
            temperature=0.9,
            top_p=0.9,
            repetition_penalty=1.2,
            logit_bias={65: 1.0},
            seed=turn,
        )
        assert text[: len(PROMPT)] == PROMPT

    def together(self, turn: int) -> None:
        first, second = self.lm.generate([PROMPT, PROMPT[: 1 + turn % 5]], max_new_tokens=6)
        assert first == self.expected and len(second) <= 11

    def going_on(self, turn: int) -> None:
        if len(self.kept.tokens[0]) > 40:
            self.kept.truncate(3) if turn % 2 else self.kept.reset()
        text = self.lm.generate([turn % 200], max_new_tokens=3, conversation=self.kept, eos_token_id=-1)
        assert len(text) == 4

    def forked(self, _turn: int) -> None:
        talk = self.lm.conversation()
        talk.read(PROMPT[:-1])
        other = talk.fork()
        assert [*other.tokens[0], *self.lm.generate(PROMPT[-1:], max_new_tokens=6, conversation=other)] == self.expected
        talk.save(self.saved)
        other.restore(self.saved)
        assert other.tokens == talk.tokens

    def interrupted(self, _turn: int) -> None:
        def stop(_token: int, _sequence: int) -> None:
            raise KeyboardInterrupt

        talk = self.lm.conversation()
        _must_raise(KeyboardInterrupt, lambda: self.lm.generate(PROMPT, stream=stop, conversation=talk))
        talk.reset()
        assert self.lm.generate(PROMPT, max_new_tokens=6, conversation=talk) == self.expected

    def mistaken(self, turn: int) -> None:
        lm, bad = self.lm, self.saved.with_name("bad.npz")
        bad.write_bytes(b"no archive")
        mistakes: list[tuple[type[BaseException], Callable[[], object]]] = [
            (ArgumentError, lambda: lm.generate([*PROMPT, 256])),
            (ArgumentError, lambda: lm.generate(PROMPT * 9)),
            (ArgumentError, lambda: lm.generate(PROMPT, max_new_tokens=2, allowed=lambda _text: [])),
            (ArgumentError, lambda: lm.conversation(3)),
            (CorruptFileError, lambda: lm.conversation().restore(bad)),
        ]
        _must_raise(*mistakes[turn % len(mistakes)])
        self.greedy(turn)


def _must_raise(kind: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def counts() -> dict[str, int]:
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, Session | Conversation)]
    return {
        "anonymous": anonymous(),
        "blocks": sys.getallocatedblocks(),
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "sessions": sum(isinstance(each, Session) for each in alive),
        "conversations": sum(isinstance(each, Conversation) for each in alive),
    }


def main(path: Path, generations: int) -> None:
    with TemporaryDirectory() as folder:
        soak = Soak(qc.load_causal_lm(path), Path(folder))
        uses = [
            soak.greedy, soak.sampled, soak.together, soak.going_on, soak.forked, soak.interrupted, soak.mistaken,
        ]  # fmt: skip
        found = []
        for turn in range(generations):
            uses[turn % len(uses)](turn)
            if (turn + 1) % (generations // BLOCKS) == 0:
                found.append(counts())
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
