"""The recurrence of one layer on the CPU (`qc.linear_attention`), beside torch's implementations, in one run.

    python benchmarks/recurrence_cpu.py [--rounds 15] [--threads 2] [--json FILE]
    python benchmarks/recurrence_cpu.py --model [--tokens 128 512]        # its share of the time of a prompt instead

Shapes are those of Qwen 3 Next (gated delta rule, 32 heads of 128 x 128), Kimi Linear (the same with a decay for each
column), Mamba 2 of 2.7 B (80 heads of 64 x 128) and Mamba of 1.4 B (4096 heads of 1 x 16).  A call has one token of one
sequence or of 8, or a prompt.  The peers are the functions of transformers that run without kernels of others:
`torch_recurrent_gated_delta_rule` and `torch_chunk_gated_delta_rule`, `mamba2_selective_state_update` and
`mamba2_chunk_scan` (the form of matrix products over chunks).  `mul_` multiplies the states by a number in place: what
torch takes to read and write them once.

Every round has a turn of each engine, in a varying order.  A turn is one call for each of some states, for one token so
many that they miss the caches.  Figures are medians over rounds, ratios those of the rounds' ratios.  `of fma` counts 7
operations for each number of a state and token (5 without the delta rule) and compares with fused multiply-adds; since
a decay is a product alone, no kernel with this arithmetic has more than 7 / 8 (5 / 6).  `of read` compares the bytes of
a state, once read and once written, with what the same run reads from memory.  Before they are timed, results are
compared with torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from cpubench.probes import Bench, aligned
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import qcompiler as qc
from qcompiler.lm.sampling import Sampling
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.threads import resolve_num_threads

Array = npt.NDArray[Any]
Turn = Callable[[int], float]
"""The seconds of one call with the state of this number."""


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    groups: int
    width: int
    depth: int
    has_beta: bool = False
    decays_columns: bool = False
    has_rate: bool = False

    @property
    def numbers(self) -> int:
        """Of a sequence's state."""
        return self.heads * self.width * self.depth


SHAPES = (
    Shape("Qwen 3 Next", 32, 16, 128, 128, has_beta=True),
    Shape("Kimi Linear", 32, 32, 128, 128, has_beta=True, decays_columns=True),
    Shape("Mamba 2", 80, 1, 64, 128),
    Shape("Mamba", 4096, 1, 1, 16, has_rate=True),
)
CALLS = ((1, 1), (8, 1), (1, 128), (1, 512))
"""Sequences and tokens of each."""


def spec_of(shape: Shape, batch: int, tokens: int) -> KernelSpec:
    options = {name: getattr(shape, name) for name in ("has_beta", "decays_columns", "has_rate")}
    body = LinearAttentionKernel(
        slots=batch, batch=batch, steps=tokens, heads=shape.heads, groups=shape.groups, width=shape.width,
        depth=shape.depth, **options,
    )  # fmt: skip
    keys, values = (batch, tokens, shape.groups, shape.depth), (batch, tokens, shape.heads, shape.width)
    sizes: dict[str, tuple[int, ...]] = {
        "state": (batch, shape.heads, shape.width, shape.depth), "query": keys, "key": keys, "value": values,
        "decay": (batch, tokens, shape.heads, shape.depth if shape.decays_columns else 1), "first": (batch,),
        "counts": (batch,), "rate": (shape.heads, shape.depth), "beta": (batch, tokens, shape.heads), "out": values,
    }  # fmt: skip
    operands = []
    for name in body.names:
        strides = [int(np.prod(sizes[name][axis + 1 :])) for axis in range(len(sizes[name]))]
        access: Any = {"state": "rw", "out": "w"}.get(name, "r")
        dtype: Any = "i64" if name in ("first", "counts") else "f32"
        operands.append(Operand(name=name, dtype=dtype, access=access, shape=sizes[name], strides=tuple(strides)))
    name = f"{shape.name.lower().replace(' ', '_')}_{batch}_{tokens}"
    return KernelSpec(name=name, symbols=(), operands=tuple(operands), body=body)


def numbers_of(spec: KernelSpec, seed: int) -> dict[str, Array]:
    """Operands in which a state neither dies out nor grows."""
    draw, made = np.random.default_rng(seed), {}
    for operand in spec.operands:
        shape = tuple(int(size) for size in operand.shape)
        x: Array = draw.standard_normal(shape).astype(np.float32)
        if operand.name in ("key", "query"):
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
        elif operand.name == "decay":
            x = 0.1 * np.abs(x) * (1 if "rate" in {each.name for each in spec.operands} else -1)
        elif operand.name == "rate":
            x = -np.abs(x)
        elif operand.name == "beta":
            x = 1 / (1 + np.exp(-x))
        elif operand.name in ("first", "counts"):
            x = np.full(shape, 9 if operand.name == "first" else int(spec.operands[1].shape[1]), np.int64)
        made[operand.name] = aligned(np.ascontiguousarray(x).view(np.uint8).reshape(-1)).view(x.dtype).reshape(shape)
    return made


def peer_of(shape: Shape, given: dict[str, Array]) -> tuple[str, Callable[[torch.Tensor], Any]] | None:
    """The name of torch's function, and a call of it on a state of ours: (what tokens read, the new state)."""
    at = {name: torch.from_numpy(array) for name, array in given.items()}
    tokens = at["value"].shape[1]
    if shape.has_rate or shape.decays_columns:  # transformers has Python loops over tokens for these
        return None
    if shape.has_beta:
        names = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
        rule: Any = getattr(qwen3_next, names[tokens > 1])
        query = at["query"] * shape.depth**0.5  # both functions divide by it

        def delta(state: torch.Tensor) -> Any:
            return rule(
                query, at["key"], at["value"], at["decay"][..., 0], at["beta"], initial_state=state,
                output_final_state=True,
            )  # fmt: skip

        return rule.__name__, delta
    steps, rates = torch.ones(at["value"].shape[:3]), torch.full((shape.heads,), -0.05)
    at["decay"].copy_((steps * rates).unsqueeze(3))  # of a step of 1
    if tokens > 1:
        return "mamba2_chunk_scan", lambda state: mamba2.mamba2_chunk_scan(
            at["value"], steps, rates, at["key"], at["query"], 256, initial_states=state, return_final_states=True
        )
    wide = rates[:, None, None].expand(-1, shape.width, shape.depth)
    step = steps[:, 0, :, None].expand(-1, -1, shape.width)

    def update(state: torch.Tensor) -> Any:
        out = mamba2.mamba2_selective_state_update(
            state, at["value"][:, 0], step, wide, at["key"][:, 0], at["query"][:, 0]
        )
        return out[:, None], state

    return "mamba2_selective_state_update", update


def engines_of(
    bench: Bench, shape: Shape, spec: KernelSpec, layers: int, clock: Callable[[], float]
) -> dict[str, Turn]:
    """By name. RuntimeError where torch's results are others."""
    given = numbers_of(spec, 0)
    peer = peer_of(shape, given)
    states = [given["state"], *(numbers_of(spec, seed)["state"] for seed in range(1, layers))]
    calls = [bench.caller(spec, list({**given, "state": state}.values()), []) for state in states]
    tensors = [torch.from_numpy(state) for state in states]
    found: dict[str, Turn] = {"ours": lambda layer: calls[layer](1)}
    if given["value"].shape[1] == 1:
        found["torch mul_"] = lambda layer: _timed(lambda: tensors[layer].mul_(0.999), clock)
    if peer is None:
        return found
    name, call = peer
    turned = [state.transpose(2, 3).contiguous() if shape.has_beta else state.clone() for state in tensors]
    out, after = call(turned[0].clone())
    calls[0](1)
    wanted = (out, after.transpose(2, 3) if shape.has_beta else after)
    for ours, theirs in zip((torch.from_numpy(given["out"]), tensors[0]), wanted, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        if not error < 1e-5:
            raise RuntimeError(f"{spec.name}: our results differ from {name} by {error:.1e} (relative norm)")
    found[name] = lambda layer: _timed(lambda: call(turned[layer]), clock)
    return found


def _timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def measure(bench: Bench, engines: dict[str, Turn], layers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call in each round by engine, and the two limits of the rounds."""
    times: dict[str, list[float]] = {name: [] for name in (*engines, "bandwidth", "fp32")}
    for turn in range(rounds + 1):
        first = turn % len(engines)
        for name in (*list(engines)[first:], *list(engines)[:first])[:: 1 if turn % 2 else -1]:
            time.sleep(0.003)  # the other engine's threads stop spinning
            found = [engines[name](layer) for layer in range(layers)]
            if turn:  # the first round warms up
                times[name].append(sum(found[1:]) / (layers - 1))
        if turn:
            times["bandwidth"].append(bench.bandwidth())
            times["fp32"].append(bench.peak())
    return times


@dataclass(frozen=True)
class Result:
    shape: str
    sequences: int
    tokens: int
    engine: str
    us: float
    of_fma: float
    of_read: float
    of_ours: float


def results_of(shape: Shape, call: tuple[int, int], times: dict[str, list[float]]) -> list[Result]:
    batch, tokens = call
    fp32, bandwidth = (statistics.median(times.pop(name)) for name in ("fp32", "bandwidth"))
    operations = (7 if shape.has_beta else 5) * shape.numbers * batch * tokens
    found = []
    for name, each in times.items():
        seconds = statistics.median(each)
        ratio = statistics.median(a / b for a, b in zip(each, times["ours"], strict=True))
        of_fma = 0.0 if name == "torch mul_" else operations / seconds / fp32
        of_read = 8 * shape.numbers * batch / seconds / bandwidth
        found.append(Result(shape.name, batch, tokens, name, 1e6 * seconds, of_fma, of_read, ratio))
    return found


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen 3 Next": (
        "Qwen3NextConfig",
        {
            "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"], "mlp_only_layers": [0, 1, 2, 3],
        },
    ),
    "Mamba 2": (
        "Mamba2Config",
        {
            "vocab_size": 1024, "hidden_size": 2560, "num_hidden_layers": 2, "num_heads": 80, "head_dim": 64,
            "state_size": 128, "n_groups": 1,
        },
    ),
}  # fmt: skip
"""Some layers with the sizes of the published models: of Qwen 3 Next three with the recurrence and one of attention,
with one dense network (FFN 5120) for its experts; of Mamba 2 two."""


def program_of(name: str, quant: str, most: int, folder: Path, threads: int) -> Any:
    """The compiled model, from `folder` if it lies there."""
    path = folder / f"{name.lower().replace(' ', '-')}-{quant}-{most}.qca"
    if not path.exists():
        kind, values = MODELS[name]
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values))
        qc.compile_causal_lm(model.eval(), quant=quant, max_seq_len=most, chunk=most).save(path)
    return qc.load_causal_lm(path, num_threads=threads)


def model_shares(
    names: list[str], tokens: list[int], quant: str, rounds: int, folder: Path, threads: int
) -> list[dict[str, Any]]:
    """Milliseconds of the recurrences and of all steps of a prompt."""
    found = []
    for name in names:
        lm = program_of(name, quant, max(tokens), folder, threads)
        for count in tokens:
            positions = np.arange(count, dtype=np.int64)[None]
            given: dict[str, Any] = {"ids": positions % 1000, "positions": positions, "rows": positions}
            given |= {"wanted": np.array([count - 1]), "counts": np.array([count])}
            if lm.record.samples:
                given["how"] = np.stack([Sampling().words(0, 0)])
            profile = lm.run.profile(**given, rounds=rounds, keep_states=False)
            part = sum(step.us for step in profile.steps if step.kind == "linear_attention")
            whole = profile.steps_us
            found.append({"model": name, "quant": quant, "tokens": count, "us": whole, "recurrence_us": part})
            print(f"| {name} | {count} | {whole / 1e3:.1f} | {part / 1e3:.2f} | {part / whole:.1%} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for a busy machine (--threads 1)")
    parser.add_argument("--only", nargs="*", default=[], help="shapes, by name")
    parser.add_argument("--model", action="store_true", help="the share of a prompt's time in some layers of a model")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--folder", type=Path, help="keeps compiled models, and takes those that lie there already")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads = resolve_num_threads(options.threads)
    if options.cpu_time and threads != 1:
        parser.error("--cpu-time adds up the time of all threads, waiting included: it needs --threads 1")
    torch.set_num_threads(threads)
    found: dict[str, Any] = {"threads": threads, "isa": host_isa(), "torch": torch.__version__}
    found["clock"] = "processor" if options.cpu_time else "wall"
    print(f"{threads} threads, {host_isa()}, torch {torch.__version__}, medians of {options.rounds}\n")
    if options.model:
        print("| layers of | tokens | ms | recurrence, ms | share |\n|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            names = [name for name in MODELS if not options.only or name in options.only]
            place = options.folder or Path(folder)
            found["model"] = model_shares(names, options.tokens, options.quant, options.rounds, place, threads)
    else:
        shapes = [shape for shape in SHAPES if not options.only or shape.name in options.only]
        specs = {(shape, call): spec_of(shape, *call) for shape in shapes for call in CALLS}
        bench, found["results"] = Bench(list(specs.values()), threads, cpu_time=options.cpu_time), []
        clock = time.process_time if options.cpu_time else time.perf_counter
        print(f"| shape | sequences | tokens | engine | us | of fma | of read | times ours |\n|{'---|' * 8}")
        with torch.no_grad():
            for (shape, call), spec in specs.items():
                states = 2 if call[1] > 1 else max(3, (48 << 20) // (4 * shape.numbers * call[0]))
                times = measure(bench, engines_of(bench, shape, spec, states, clock), states, options.rounds)
                for row in results_of(shape, call, times):
                    found["results"].append(asdict(row))
                    print(
                        f"| {row.shape} | {row.sequences} | {row.tokens} | {row.engine} | {row.us:.0f} | "
                        f"{row.of_fma:.0%} | {row.of_read:.0%} | {row.of_ours:.2f} |",
                        flush=True,
                    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
