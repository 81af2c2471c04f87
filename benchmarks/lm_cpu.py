"""Tokens per second of a language model on the CPU: ours beside llama.cpp on the same file, transformers in bf16, and
transformers with int4 weights by torchao, compiled.

    python benchmarks/lm_cpu.py --llama-python /path/to/python --json FILE     # a 0.84 B Llama, about 20 minutes
    python benchmarks/lm_cpu.py --small                                        # a tiny one: that everything runs

The weights are random and lie in one .gguf file (hidden 2048, 16 layers, FFN 5632, 32 heads, 4 of them for keys and
values, vocabulary 32000), which we compile by `compile_causal_lm` and llama.cpp reads as it is.  It stands in the table
three times for us: "ours" multiplies in fp32, "ours bf16" rounds the factors to bf16 (`compute="bf16"`), and "ours
int8" makes int8 rows of the activations (`compute="int8"`), as llama.cpp does.  All keep keys and values in fp16 and
use the same number of threads.  llama-cpp-python may lie in an environment of its own (`--llama-python`); a peer that
is not there is named as missing.  `--folder` keeps the file and the compiled programs, and takes those that lie there
already: remove them after a change of the compiler.

    decode    one token of each sequence, and the most likely next one taken from the logits, with so many tokens in
              the cache before; a step does not depend on which tokens these are
    prompt    an empty cache, so many tokens, the logits of the last
    first     a new process loads the saved program (its file is in the page cache) and makes one token

The engines take turns; figures are medians over the rounds, and the ratio is the median of the rounds' ratios.  The
bandwidth is that of reading 256 MiB, measured before and after each cell.  A cell during which other processes took
the cores is measured again, as in matmul_cpu.py, and marked if that does not help.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from cpubench import quiet
from cpubench.probes import Bench

import qcompiler as qc
from qcompiler.runtime.isa import host_isa

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int = 2048
    layers: int = 16
    inner: int = 5632
    heads: int = 32
    kv_heads: int = 4
    words: int = 32000

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(GGUF's name, rows, columns) of each."""
        narrow = self.kv_heads * self.head
        yield "token_embd.weight", self.words, self.hidden
        yield "output.weight", self.words, self.hidden
        for layer in range(self.layers):
            for name, rows, cols in (
                ("attn_q", self.hidden, self.hidden), ("attn_k", narrow, self.hidden), ("attn_v", narrow, self.hidden),
                ("attn_output", self.hidden, self.hidden), ("ffn_gate", self.inner, self.hidden),
                ("ffn_up", self.inner, self.hidden), ("ffn_down", self.hidden, self.inner),
            ):  # fmt: skip
                yield f"blk.{layer}.{name}.weight", rows, cols

    def weight_bytes(self, kind: str) -> int:
        """What a decoded token reads of the weights: all matrices but the embedding, of which it reads a row."""
        size, nbytes = gguf.GGML_QUANT_SIZES[FORMATS[kind]]
        return sum(rows * cols // size * nbytes for name, rows, cols in self.matrices() if name != "token_embd.weight")


SMALL = Shape(256, 2, 512, 4, 2, 1008)
FORMATS = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in ("q4_0", "q4_K", "q5_0", "q8_0", "q2_K", "q3_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs")
}
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "q4_0": ((0, 1 / 4.6),), "q5_0": ((0, 1 / 9.2),), "q8_0": ((0, 1 / 74),), "iq4_nl": ((0, 1 / 70),),
    "q4_K": ((0, 1 / 4.6 / 31), (2, 8 / 4.6 / 31)), "q5_K": ((0, 1 / 9.2 / 31), (2, 16 / 9.2 / 31)),
    "q2_K": ((80, 1 / 1.1 / 8), (82, 1.5 / 1.1 / 8)), "q3_K": ((108, 1 / 2.3 / 18),), "q6_K": ((208, 1 / 18.5 / 74),),
    "iq4_xs": ((0, 1 / 70 / 18),),
}  # fmt: skip
"""Of a block: the byte at which a scale in fp16 lies, and the scale with which random codes, and random scales inside
of a superblock, have a root mean square of about 1, and a mean of about 0."""


def blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> Any:
    """Random codes with scales that keep a product's size, in GGUF's blocks: (rows, bytes of a row)."""
    size, nbytes = gguf.GGML_QUANT_SIZES[FORMATS[kind]]
    data = rng.integers(0, 256, (rows, cols // size, nbytes), np.uint8)
    for at, scale in SCALES[kind]:
        data[..., at : at + 2] = np.frombuffer(np.float16(scale / np.sqrt(cols)).tobytes(), np.uint8)
    return data.reshape(rows, -1)


def write_model(path: Path, kind: str, shape: Shape, length: int) -> None:
    """Writes the .gguf file."""
    rng = np.random.default_rng(0)
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(length)
    out.add_embedding_length(shape.hidden)
    out.add_block_count(shape.layers)
    out.add_feed_forward_length(shape.inner)
    out.add_head_count(shape.heads)
    out.add_head_count_kv(shape.kv_heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(shape.head)
    out.add_vocab_size(shape.words)
    out.add_tokenizer_model("llama")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"w{number}" for number in range(shape.words - len(words))]
    out.add_token_list(words)
    out.add_token_scores([-float(number) for number in range(shape.words)])
    out.add_token_types([2, 3, 3, *[6] * 256, *[1] * (shape.words - 259)])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for name, rows, cols in shape.matrices():
        data = blocks(kind, rows, cols, rng)
        out.add_tensor(name, data, raw_dtype=FORMATS[kind])
    for name in [
        "output_norm",
        *(f"blk.{i}.{each}" for i in range(shape.layers) for each in ("attn_norm", "ffn_norm")),
    ]:
        out.add_tensor(f"{name}.weight", np.ones(shape.hidden, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


# --- engines ---------------------------------------------------------------------------------------------------------


class Ours:
    """A conversation per number of sequences, whose cache is taken as filled."""

    def __init__(self, name: str, lm: qc.CausalLM) -> None:
        self.name, self.lm = name, lm
        self.talks: dict[int, Any] = {}

    def fill(self, sequences: int, context: int) -> None:
        self.talk = self.talks.setdefault(sequences, None) or self.lm.conversation(sequences)
        self.talks = {sequences: self.talk}
        self.context = context
        self._rewind()

    def _rewind(self) -> None:
        for tokens in self.talk.tokens:
            tokens[:] = [5] * self.context

    def decode(self, steps: int) -> float:
        new = [[100 + i] for i in range(len(self.talk))]
        begin = time.perf_counter()
        for _ in range(steps):
            new = [[int(logits[0].argmax())] for logits in self.talk.read(new)]
        seconds = time.perf_counter() - begin
        self._rewind()
        return seconds

    def prompt(self, tokens: int) -> float:
        self.fill(1, 0)
        ids = [(7 * i) % self.lm.record.vocabulary for i in range(tokens)]
        begin = time.perf_counter()
        int(self.talk.read(ids)[0][0].argmax())
        return time.perf_counter() - begin


class LlamaCpp:
    """The process of lm_peer_llama_cpp.py."""

    name = "llama.cpp"

    def __init__(self, python: str, file: Path, length: int, sequences: int, threads: int) -> None:
        command = [python, str(HERE / "lm_peer_llama_cpp.py"), str(file), "--length", str(length)]
        command += ["--sequences", str(sequences), "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _ask(self, what: str, **given: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **given}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def fill(self, sequences: int, context: int) -> None:
        self._ask("fill", sequences=sequences, context=context)

    def decode(self, steps: int) -> float:
        return float(self._ask("decode", steps=steps)["seconds"])

    def prompt(self, tokens: int) -> float:
        return float(self._ask("prompt", tokens=tokens)["seconds"])

    def processor_seconds(self) -> float:
        return float(self._ask("cpu")["seconds"])


TORCHAO = "torchao int4"


class Transformers:
    """LlamaForCausalLM in bf16, eager, with a cache that grows."""

    name = "transformers bf16"

    def __init__(self, shape: Shape, length: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape.words, hidden_size=shape.hidden, intermediate_size=shape.inner,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            max_position_embeddings=length, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self.model = model

    def fill(self, sequences: int, context: int, room: int = 64) -> None:
        """A cache with `context` tokens. It grows: `room` for more is what a static one asks for."""
        from transformers import DynamicCache

        self.cache, self.context = DynamicCache(), context
        for begin in range(0, context, 512):
            self._call(torch.full((1, min(512, context - begin)), 5))
        if context:
            self.cache.batch_repeat_interleave(sequences)
        self.sequences = sequences

    @torch.no_grad()
    def _call(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def decode(self, steps: int) -> float:
        new = torch.full((self.sequences, 1), 100)
        begin = time.perf_counter()
        for _ in range(steps):
            new = self._call(new)
        seconds = time.perf_counter() - begin
        self._forget(steps)
        return seconds

    def _forget(self, steps: int) -> None:
        self.cache.crop(-steps)

    def prompt(self, tokens: int) -> float:
        self.fill(1, 0, tokens)
        begin = time.perf_counter()
        self._call(torch.full((1, tokens), 5))
        return time.perf_counter() - begin


class Torchao(Transformers):
    """The same with weights in int4 (groups of 32) by torchao, compiled by torch.compile, with a static cache. Every
    shape of a step is compiled before it is measured."""

    name = TORCHAO

    def __init__(self, shape: Shape, length: int) -> None:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        super().__init__(shape, length)
        quantize_(self.model, PrototypeInt4WeightOnlyConfig(group_size=32))
        torch._dynamo.config.cache_size_limit = 64  # a shape for each cell
        self.compiled = torch.compile(self.model, dynamic=False)

    def fill(self, sequences: int, context: int, room: int = 64) -> None:
        """The cache holds zeros: a step takes the same time whatever it holds."""
        from transformers import StaticCache

        config = self.model.config
        head = config.hidden_size // config.num_attention_heads
        self.cache = StaticCache(config, max_cache_len=context + room)
        self.cache.early_initialization(sequences, config.num_key_value_heads, head, torch.bfloat16, "cpu")
        self.context, self.sequences = context, sequences
        self._forget(0)

    def _forget(self, steps: int) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    @torch.no_grad()
    def _call(self, ids: torch.Tensor) -> torch.Tensor:
        return self.compiled(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)


# --- cells -----------------------------------------------------------------------------------------------------------


PAUSE = 0.05
"""Seconds before an engine's turn."""


def turns(engines: Sequence[Any], run: Callable[[Any], float], rounds: int) -> dict[str, Any]:
    """The median seconds of each engine and the median ratio of each to ours (the first), after a turn for warming.

    Each round begins with another engine, and each engine after a pause: threads that have just finished look for work
    for a while, and would take time from whoever comes next.
    """
    times: dict[str, list[float]] = {each.name: [] for each in engines}
    for turn in range(rounds + 1):
        first = turn % len(engines)
        for each in (*engines[first:], *engines[:first]):
            time.sleep(PAUSE)
            seconds = run(each)
            if turn:
                times[each.name].append(seconds)
    ours = times[engines[0].name]
    return {
        "seconds": {name: statistics.median(found) for name, found in times.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(found, ours, strict=True)) for name, found in times.items()
        },
    }


FIRST = """
import sys, time
begin = time.perf_counter()
import qcompiler as qc
imported = time.perf_counter()
lm = qc.load_causal_lm(sys.argv[1], num_threads=int(sys.argv[2]))
loaded = time.perf_counter()
lm.generate([5, 6, 7], max_new_tokens=1, eos_token_id=-1)
print(imported - begin, loaded - imported, time.perf_counter() - loaded)
"""


def first_token(path: Path, threads: int, rounds: int) -> dict[str, float]:
    """Median seconds of importing, of loading, and of the first token from a prompt of three. Modules are compiled to
    bytecode before, as those of an installed package are."""
    command = [sys.executable, "-c", FIRST, str(path), str(threads)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(path.parent / "bytecode")
    found = []
    for _ in range(rounds + 1):  # the first run brings the file into the page cache, and writes the bytecode
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append([float(each) for each in done.stdout.split()])
    return dict(zip(("import", "load", "token"), map(statistics.median, zip(*found[1:], strict=True)), strict=True))


def outside_products(lm: qc.CausalLM, context: int) -> dict[str, float]:
    """The shares of a decode step that are no product with a weight: attention, whose two products are with the cache,
    and everything else."""
    at, how = np.array([[context]]), np.zeros((1, 10), np.int64)
    profile = lm.run.profile(ids=np.array([[5]]), positions=at, rows=at, wanted=np.array([0]), how=how, rounds=15)
    attention = sum(each.us for each in profile.kinds() if each.kind == "attention") / profile.steps_us
    return {"attention": attention, "else": profile.not_product - attention}


OURS = "ours"
COMPUTES = {OURS: "exact", "ours bf16": "bf16", "ours int8": "int8"}


def compile_ours(chosen: argparse.Namespace, shape: Shape, length: int, folder: Path) -> tuple[Path, dict[str, Path]]:
    """The .gguf file, and the saved programs by name. What lies in the folder is taken as it is."""
    file = folder / f"{chosen.format}.gguf"
    if not file.exists():
        write_model(file, chosen.format, shape, length)
    found = {}
    for name, compute in COMPUTES.items():
        recipe = qc.QuantConfig(chosen.format, compute=compute)
        batch = max(chosen.batches)
        found[name] = folder / f"{chosen.format}-{name.replace(' ', '-')}-batch-{batch}.qca"
        if not found[name].exists():
            lm = qc.compile_causal_lm(file, recipe, max_seq_len=length, max_batch=batch, kv_cache="fp16")
            lm.save(found[name])
    return file, found


def peers(
    chosen: argparse.Namespace, shape: Shape, length: int, file: Path, stack: contextlib.ExitStack
) -> tuple[list[Any], dict[str, str]]:
    """The other engines, and why those that are missing are."""
    engines: list[Any] = []
    missing: dict[str, str] = {}
    if chosen.llama_python == sys.executable and importlib.util.find_spec("llama_cpp") is None:
        missing["llama.cpp"] = "llama-cpp-python is not installed here (`make bench-peers`, --llama-python)"
    else:
        try:
            engines.append(LlamaCpp(chosen.llama_python, file, length, max(chosen.batches), chosen.threads))
            stack.callback(engines[-1].process.kill)
        except (OSError, RuntimeError) as error:
            missing["llama.cpp"] = f"{error} (`make bench-peers` installs it in .venv-peers)"
    if chosen.no_transformers:
        missing["transformers bf16"] = "left out by --no-transformers"
    else:
        engines.append(Transformers(shape, length))
    if chosen.no_torchao:
        missing[TORCHAO] = "left out by --no-torchao"
    elif importlib.util.find_spec("torchao") is None:
        missing[TORCHAO] = "torchao is not installed here"
    else:
        engines.append(Torchao(shape, length))
    return engines, missing


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    shape, length = (SMALL, 160) if chosen.small else (Shape(), 4096 + 64)
    contexts = [1, 64] if chosen.small else chosen.contexts
    prompts = [16] if chosen.small else chosen.prompts
    rounds, steps = (1, 2) if chosen.small else (chosen.rounds, chosen.steps)
    torch.set_num_threads(chosen.threads)
    with contextlib.ExitStack() as stack:
        folder = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        file, saved = compile_ours(chosen, shape, length, folder)
        weights = shape.weight_bytes(chosen.format)
        ours = {name: qc.load_causal_lm(path, num_threads=chosen.threads) for name, path in saved.items()}
        others, missing = peers(chosen, shape, length, file, stack)
        engines: list[Any] = [*(Ours(name, lm) for name, lm in ours.items()), *others]
        probe = Bench((), chosen.threads)
        llama_cpp = next((each.version for each in engines if each.name == "llama.cpp"), None)
        facts: dict[str, Any] = {
            "format": chosen.format, "shape": vars(shape), "threads": chosen.threads, "isa": host_isa(),
            "torch": torch.__version__, "llama-cpp-python": llama_cpp,
            "missing": missing, "weight_bytes": weights, "cells": [],
            "not_product": {
                name: {context: outside_products(lm, context) for context in contexts} for name, lm in ours.items()
            },
            "first": first_token(saved[OURS], chosen.threads, 1 if chosen.small else 3),
        }  # fmt: skip
        for cell in cells(contexts, chosen.batches, prompts):
            facts["cells"].append(one_cell(cell, engines, probe, shape, weights, rounds, steps, chosen.tries))
            print(row(facts["cells"][-1]), flush=True)
        return facts


def cells(contexts: Sequence[int], batches: Sequence[int], prompts: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(what, tokens, sequences)."""
    for sequences in batches:
        yield from (("decode", context, sequences) for context in contexts)
    yield from (("prompt", tokens, 1) for tokens in prompts)


def one_cell(
    cell: tuple[str, int, int],
    engines: Sequence[Any],
    probe: Bench,
    shape: Shape,
    weights: int,
    rounds: int,
    steps: int,
    tries: int,
) -> dict[str, Any]:
    what, tokens, sequences = cell
    if what == "prompt":
        made, bound = tokens, None
    else:
        for each in engines:
            each.fill(sequences, tokens)
        made = sequences * steps
        cache = tokens * sequences * shape.layers * 2 * shape.kv_heads * shape.head * 2
        bound = steps * (weights + cache)
    others = [each for each in engines if isinstance(each, LlamaCpp)]
    watch = quiet.Watch(lambda: time.process_time() + sum(each.processor_seconds() for each in others))

    def measure() -> tuple[tuple[dict[str, Any], float, float], quiet.Noise]:
        before, stop = probe.bandwidth(), watch.start()
        found = turns(engines, lambda each: each.prompt(tokens) if what == "prompt" else each.decode(steps), rounds)
        noise = stop()
        return (found, before, probe.bandwidth()), noise

    (found, before, after), noise, count = quiet.until_quiet(measure, tries)
    result: dict[str, Any] = {"what": what, "tokens": tokens, "sequences": sequences, **found}
    result |= {"others": noise.share, "tries": count, "disturbed": noise.disturbed}
    result["tokens_per_second"] = {name: made / seconds for name, seconds in found["seconds"].items()}
    result["bandwidth"] = [before, after]
    if bound is not None:  # the bytes that must be read, by the seconds and the bandwidth
        result["of_bandwidth"] = bound / found["seconds"][OURS] / statistics.mean((before, after))
    return result


def row(cell: dict[str, Any]) -> str:
    """A line of the table in docs/language-models.md."""
    of = f"{cell['of_bandwidth']:.0%}" if "of_bandwidth" in cell else ""
    rates, ratios = cell["tokens_per_second"], cell["ratio"]
    peers = [f"{rates[name]:.1f} ({ratios[name]:.2f})" for name in rates if name != OURS]
    name = f"{cell['what']} {cell['tokens']}" + (f", batch {cell['sequences']}" if cell["what"] == "decode" else "")
    name += " (disturbed)" * cell["disturbed"]
    return f"| {name} | {rates[OURS]:.1f} | {' | '.join(peers)} | {of} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--format", choices=list(FORMATS), default="q4_0")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1, 512, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tries", type=int, default=3, help="how often a disturbed cell is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-torchao", action="store_true")
    parser.add_argument("--folder", type=Path, help="keeps the file and the programs, and takes those that are there")
    parser.add_argument("--small", action="store_true", help="a tiny model and one round")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    facts = measure(chosen)
    for name, reason in facts["missing"].items():
        print(f"missing: {name}: {reason}")
    print(f"not matrix product: {facts['not_product']}; first token: {facts['first']}")
    if chosen.json:
        chosen.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
