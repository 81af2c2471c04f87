"""Running a language model: compile it once, then generate text without torch.

    python examples/generate.py                                             # a prompt of its own
    python examples/generate.py --prompt "def mean(values):" --tokens 120 --temperature 0.7
    python examples/generate.py --quant nf4                                 # also int8, int4:group=32; none: float

The first run with a --quant compiles the repository's own model (examples/models/tiny_llama: its tokens are bytes, its
text is Python) and writes a .qca file; later runs load that file and import neither torch nor transformers.  The same
three steps run any Llama: `build` compiles the program, `generate` calls it, `pick` chooses a token from its logits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import qcompiler as qc
from qcompiler.runtime import LoadedProgram

MODEL = Path(__file__).resolve().parent / "models" / "tiny_llama"
LENGTH = 512  # tokens that the cache holds, prompt included: what the model was trained with
END = 0  # the token behind the end of a file
PROMPT = "import os\n\n\ndef read_lines(path):\n"

Logits = npt.NDArray[np.float32]


def build(path: Path, quant: str | None, model: Path = MODEL) -> None:
    """Compiles the model with a cache for LENGTH tokens and writes the program to `path`."""
    import torch  # only here: running the program does not need it
    from transformers import LlamaForCausalLM
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    # A static cache is a buffer that the model writes: a state of the program, which a call updates in place.
    llama.generation_config.cache_implementation = "static"
    step = TorchExportableModuleWithStaticCache(llama, batch_size=1, max_cache_len=LENGTH)
    # One graph for any number of tokens. Of its two entry points one takes the prompt, the other a single token.
    tokens = ("s", 1, LENGTH)
    program = qc.qcompile(
        step,
        kwargs={"input_ids": torch.zeros(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)},
        dynamic_shapes={"input_ids": {1: tokens}, "cache_position": {0: tokens}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, LENGTH)})],
        quant=quant,
        device="cpu",
    )
    print(program.ledger.totals())
    program.save(path)


def pick(logits: Logits, temperature: float, rng: np.random.Generator) -> int:
    """The most likely token at temperature 0, else one drawn from softmax(logits / temperature)."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def generate(
    program: LoadedProgram, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[int]:
    """Yields up to `tokens` tokens after the prompt, each as soon as it is known; ends early at the end of the text.

    ValueError if the cache is too short for all of them.
    """
    if not 0 < len(prompt) <= LENGTH - tokens:
        raise ValueError(f"a prompt of {len(prompt)} bytes and {tokens} tokens: from 1 byte on, and {LENGTH} in all")
    session = program.session()  # has its own cache: other sessions can run other texts with the same weights
    rng = np.random.default_rng(seed)
    ids, position = np.frombuffer(prompt, np.uint8).astype(np.int64)[None], 0
    for _ in range(tokens):
        positions = np.arange(position, position + ids.shape[1])
        logits = session(input_ids=ids, cache_position=positions)  # (1, tokens, 256)
        position += ids.shape[1]
        token = pick(logits[0, -1], temperature, rng)
        if token == END:
            return
        yield token
        ids = np.array([[token]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=200, help="how many to generate at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quant", default="int8", help="a recipe such as nf4, or none for float (default: int8)")
    parser.add_argument("--program", type=Path, help="the .qca file (default: by the recipe, in this folder)")
    options = parser.parse_args()

    name = options.quant.replace(":", "-").replace("=", "").replace(",", "-")
    path = options.program or Path(f"tiny_llama-{name}.qca")
    if not path.exists():
        build(path, None if options.quant == "none" else options.quant)
    program = qc.load(path)

    prompt = options.prompt.encode()
    sys.stdout.buffer.write(prompt)
    times = [time.perf_counter()]
    for token in generate(program, prompt, options.tokens, options.temperature, options.seed):
        times.append(time.perf_counter())
        sys.stdout.buffer.write(bytes([token]))
        sys.stdout.flush()
    print()
    if len(times) > 2:
        speed = (len(times) - 2) / (times[-1] - times[1])
        first = (times[1] - times[0]) * 1e3
        print(f"[{len(times) - 1} tokens; the first after {first:.1f} ms, then {speed:.0f} a second]", file=sys.stderr)


if __name__ == "__main__":
    main()
