"""What putting linears together that read the same rows is worth on a CPU: a decode step with and without it, in pairs.

    python benchmarks/merged_cpu.py                  # hidden 256, 1024 and 2048, nf4 and q4_K
    python benchmarks/merged_cpu.py --hidden 256 --pairs 500
    python benchmarks/merged_cpu.py --apart '*.up_proj'      # gate and up as one linear, and apart
    python benchmarks/merged_cpu.py --apart '*layernorm' '*.norm'    # norms as prologues, and in kernels of their own

A Llama of four layers with random weights and a static cache, one token at a time.  The two programs take turns in one
process, and change who begins; the figure is the median of the ratios of neighbours, so that what else the machine does
touches both.  Both answers are compared, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import qcompiler as qc

LENGTH, WORDS = 256, 1000


def model(hidden: int) -> Any:
    import transformers

    torch.manual_seed(0)
    heads = hidden // 64
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=hidden * 11 // 4 // 256 * 256, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=LENGTH,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    made.generation_config.cache_implementation = "static"
    return made


def programs(hidden: int, quant: str, apart: tuple[str, ...]) -> list[qc.Program]:
    """The step merged, and with the linears apart that `apart` names."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    size = ("s", 1, 32)
    found = []
    for separate in ((), apart):
        step = TorchExportableModuleWithStaticCache(model(hidden), batch_size=1, max_cache_len=LENGTH)
        found.append(
            qc.qcompile(
                step,
                kwargs={"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)},
                dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
                buckets=[("decode", {"s": (1, 1)})],
                quant=qc.QuantConfig(quant, separate=separate, promise_bits=None),
            )
        )
    return found


def measure(hidden: int, quant: str, pairs: int, separate: tuple[str, ...]) -> str:
    """One row of the table."""
    made = programs(hidden, quant, separate)
    sessions = [program.session() for program in made]
    ids = torch.tensor([[5]])
    times: list[list[float]] = [[], []]
    for turn in range(pairs + 20):
        answers: list[Any] = [None, None]
        at = torch.tensor([turn % LENGTH])
        for which in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            answers[which] = sessions[which](input_ids=ids, cache_position=at)
            if turn >= 20:
                times[which].append(time.perf_counter() - began)
        assert torch.equal(*answers), "merging changed the answer"
    launches = [len(program.plan.entries[0].steps) for program in made]
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    quarter = len(ratios) // 4
    merged, apart = (1e6 * statistics.median(each) for each in times)
    return (
        f"| {hidden} | {quant} | {launches[1]} → {launches[0]} | {apart:.0f} | {merged:.0f} | "
        f"{statistics.median(ratios):.3f} ({ratios[quarter]:.3f} … {ratios[-quarter - 1]:.3f}) |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--quant", nargs="+", default=["nf4", "q4_K"])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--apart", nargs="+", default=["*"], help="globs of what stays apart in the second program")
    given = parser.parse_args(arguments)
    print("| hidden | format | launches | apart, µs | merged, µs | merged / apart (quartiles) |")
    print("|---|---|---|---|---|---|", flush=True)
    for hidden in given.hidden:
        for quant in given.quant:
            print(measure(hidden, quant, given.pairs, tuple(given.apart)), flush=True)


if __name__ == "__main__":
    main()
