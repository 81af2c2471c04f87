"""What a narrower cache costs in quality: each type against fp32, on the repository's language model.

    python benchmarks/cache_types.py                  # 8192 bytes of the held-out text, weights in fp32
    python benchmarks/cache_types.py --bytes 65024 --quant q4_K
    python benchmarks/cache_types.py --outliers 8     # four columns of each head's keys are eight times as large

With `--outliers`, rows of the projections to keys are multiplied and those to queries divided, so that the model with a
cache in fp32 is the same.  Large models have such columns by themselves.

All programs read the same windows of 512 tokens together.  Bits per byte are of the text; divergence (KL, in nats) and
the share of equal most likely tokens compare a program's predictions with those of the program whose cache is fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import qcompiler as qc
from qcompiler.lm.compile import CacheType, text_of
from qcompiler.lm.evaluate import scores

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny_llama"
TYPES = [kind for kind in get_args(CacheType) if kind != "auto"]
WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=8192, help="of the held-out text")
    parser.add_argument("--quant", help="a format for the weights (default: fp32)")
    parser.add_argument("--outliers", type=float, default=1, help="a factor for four columns of the keys of each head")
    options = parser.parse_args()
    text = (MODEL / "held_out.txt").read_bytes()[: options.bytes].decode(errors="ignore")
    # Keys in bf16 would be exact in every wider type.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    enlarge(model, options.outliers)
    programs = {
        kind: qc.compile_causal_lm(
            model, options.quant, max_seq_len=WINDOW, chunk=128, kv_cache=kind, device="cpu", text=text_of(MODEL)
        )
        for kind in TYPES
    }
    first = programs["fp32"]
    assert first.text is not None
    ids = first.text.encode(text)
    readers = {kind: lm.conversation() for kind, lm in programs.items()}
    found = scores(readers, ids, len(text.encode()), WINDOW, 128, reference="fp32")
    print("| cache | bytes per token | bits per byte | KL, mean | KL, 99 % | same token |")
    print("|---|---|---|---|---|---|")
    for kind, score in found.items():
        lm, away = programs[kind], score.divergence
        assert lm.program is not None
        kept = sum(a.nbytes for a in lm.program.plan.arenas if a.name.startswith(("state.keys", "state.values")))
        cells = [f"{kept // lm.record.rows:,}", f"{score.bits_per_byte:.4f}"]
        cells += ["", "", ""] if away is None else [f"{away.mean:.1e}", f"{away.high:.1e}", f"{away.agreement:.2%}"]
        print(f"| {kind} | {' | '.join(cells)} |")


def enlarge(model: LlamaForCausalLM, factor: float) -> None:
    """Multiplies two pairs of columns of each head's keys, and divides those of the queries that meet them.

    Column c and c + half of a head are rotated together by their position, so both get the factor.
    """
    half, draw = model.config.head_dim // 2, torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        attention = layer.self_attn
        keys = attention.k_proj.weight.data.view(-1, 2, half, model.config.hidden_size)
        queries = attention.q_proj.weight.data.view(len(keys), -1, 2, half, model.config.hidden_size)
        for key, group in zip(keys, queries, strict=True):
            columns = torch.randperm(half, generator=draw)[:2]
            key[:, columns] *= factor
            group[:, :, columns] /= factor


if __name__ == "__main__":
    main()
