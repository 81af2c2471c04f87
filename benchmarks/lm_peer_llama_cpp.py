"""llama.cpp as a peer of lm_cpu.py: a process of its own, which reads commands as lines of JSON and answers so.

    {"do": "fill", "sequences": 8, "context": 512}     tokens in the cache of each sequence, read once and copied
    {"do": "decode", "steps": 8}                       seconds of so many steps, one token of each sequence
    {"do": "prompt", "tokens": 128}                    seconds of an empty cache's prompt
    {"do": "cpu"}                                      seconds of processor time of all threads since the start

It runs in any Python that has llama-cpp-python and NumPy, such as an environment for it alone; it imports nothing else.
A step takes the most likely token of each sequence from the logits, as lm_cpu.py does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

LAST = -1
"""llama.cpp's number for the last token that has logits."""


class Model:
    """A context for up to `sequences` sequences of `length` tokens each, with an fp16 cache of its own for each."""

    def __init__(self, path: str, length: int, sequences: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(quiet, None)
        self._quiet = quiet
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.length, self.threads = length, threads
        self.context: Any = None
        self.sequences, self.at = 0, 0

    def open(self, sequences: int) -> None:
        """A new context: llama.cpp shares its cells out by the number of sequences."""
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = self.length * sequences, 512, 512
        options.n_seq_max, options.kv_unified = sequences, False
        options.n_threads = options.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context")
        self.sequences = sequences

    def put(self, tokens: list[list[int]], first: int, *, logits: bool) -> None:
        """Reads tokens (sequence, token), all at positions from `first` on."""
        count = sum(map(len, tokens))
        batch = llama_cpp.llama_batch_init(count, 0, self.sequences)
        batch.n_tokens = count
        at = 0
        for sequence, ids in enumerate(tokens):
            for i, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, first + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = logits and i == len(ids) - 1
                at += 1
        code = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if code:
            raise SystemExit(f"llama_decode gave {code}")

    def read(self, count: int, first: int = 0) -> None:
        """A prompt of `count` tokens of sequence 0, 512 at a time; logits of the last one."""
        for begin in range(0, count, 512):
            size = min(512, count - begin)
            self.put(
                [[(7 * (begin + i)) % self.vocabulary for i in range(size)]],
                first + begin,
                logits=begin + size == count,
            )

    def fill(self, sequences: int, context: int) -> dict[str, Any]:
        self.open(sequences)
        self.read(context)
        memory = llama_cpp.llama_get_memory(self.context)
        for sequence in range(1, sequences):
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        self.at, self.next = context, [100 + sequence for sequence in range(sequences)]
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Steps at the same position: what they wrote is taken back, so that the context stays as long as it is."""
        memory = llama_cpp.llama_get_memory(self.context)
        begin = time.perf_counter()
        for step in range(steps):
            self.put([[token] for token in self.next], self.at + step, logits=True)
            for row in range(self.sequences):
                logits = llama_cpp.llama_get_logits_ith(self.context, row)
                self.next[row] = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
        seconds = time.perf_counter() - begin
        for sequence in range(self.sequences):
            llama_cpp.llama_memory_seq_rm(memory, sequence, self.at, -1)
        return {"seconds": seconds}

    def prompt(self, tokens: int) -> dict[str, Any]:
        if self.sequences != 1:
            self.open(1)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        self.read(tokens)
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, LAST), (self.vocabulary,)).argmax()
        return {"seconds": time.perf_counter() - begin}

    def cpu(self) -> dict[str, Any]:
        return {"seconds": time.process_time()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    model = Model(chosen.model, chosen.length, chosen.sequences, chosen.threads)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(getattr(model, given.pop("do"))(**given)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
