"""How many launches a layer takes: models of two sizes that differ by one layer, and what they launch apart.

    python tests/support/launches.py                 # the table of docs/performance.md
    python tests/support/launches.py llama bert

Decoders take one token at batch 1 with transformers' static cache (OPT, which does not export with it, without a
cache); BERT takes seven tokens and ViT an image at batch 1.  Counted are the steps of the schedule: everything that is
launched or copied.  Programs of decoders have an entry point for prompts as well, which shares their weights.  They are
compiled as far as the schedule, not to machine code.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from by_path import load

from qcompiler.api import pass_options
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.rt import EntryOp, KernelOp
from qcompiler.passes.pipeline import run_pipeline, upto, with_options

CACHE, WORDS = 40, 199
TARGETS = {"cpu": Target("cpu", "x86-64-v4"), "sm_90a": Target("cuda", "sm_90a")}


def _decoder(name: str, layers: int) -> Any:
    """One decode step, of `layers` layers."""
    import transformers
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    zoo = load("tests/models/zoo.py")
    if name == "gpt2":
        torch.manual_seed(0)
        sizes = transformers.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=layers, n_head=4)
        model = transformers.GPT2LMHeadModel(sizes).eval()
    else:
        architecture = zoo.DECODERS[name]
        more = {"layer_types": architecture.options["layer_types"] * (layers // 2)} if name == "gemma3" else {}
        model = architecture.build(num_hidden_layers=layers, **more).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=CACHE)
    size = ("s", 1, 24)
    given = {"input_ids": torch.full((1, 7), 5), "cache_position": torch.arange(7)}
    return import_torch(
        step, (), given, dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}}, quant="nf4"
    )


def _opt(layers: int) -> Any:
    model = load("tests/models/zoo.py").DECODERS["opt"].build(num_hidden_layers=layers).eval()
    return import_torch(model, (), {"input_ids": torch.full((1, 1), 5)}, quant="nf4")


def _bert(layers: int) -> Any:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160}
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **sizes)).eval()
    return import_torch(model, (), {"input_ids": torch.full((1, 7), 5)}, quant="nf4")


def _vit(layers: int) -> Any:
    import transformers

    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    model = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=layers, **sizes)).eval()
    return import_torch(model, (torch.randn(1, 3, 32, 32),), quant="nf4")


def _flux(layers: int, *, single: bool) -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    counts = {"num_layers": 1 if single else layers, "num_single_layers": layers if single else 1}
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **counts,
    ).eval()  # fmt: skip
    given = load("tests/models/test_diffusion.py").inputs(1, 16, 7, None)
    return import_torch(model, (), given, quant="nf4")


MODELS: dict[str, Callable[[int], Any]] = {
    **{
        name: (lambda layers, name=name: _decoder(name, layers))
        for name in ("llama", "mistral", "qwen3", "gemma3", "phi3", "gpt2", "neox", "mixtral", "qwen3-moe")
    },
    "opt": _opt, "bert": _bert, "vit": _vit,
    "flux-double": lambda layers: _flux(layers, single=False), "flux-single": lambda layers: _flux(layers, single=True),
}  # fmt: skip


def _steps(imported: Any, target: str) -> Counter[str]:
    """The steps of the entry point for one token, or of the only one, by the kind of kernel."""
    module = imported.module.clone()
    device = "cpu" if target == "cpu" else "cuda:0"
    context = QCContext.default(weights=imported.weights.copy(), target=TARGETS[target], devices=(device,))
    decodes = "cache_position" in str(imported.module.body.block.first_op)[:2000]
    options = pass_options([("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 24)})], None) if decodes else {}
    run_pipeline(module, context, stages=with_options(upto("merge-launches"), options))
    entries = [op for op in module.body.block.ops if isinstance(op, EntryOp) and not op.is_init]
    kernels = {op.sym for op in module.body.block.ops if isinstance(op, KernelOp)}
    (entry,) = [op for op in entries if op.sym in ("decode", "main")]
    found: Counter[str] = Counter()
    for step in entry.body.block.ops:
        kernel = getattr(step, "kernel", None)
        name = kernel.root_reference.data if kernel is not None else step.name.removeprefix("rt.")
        assert kernel is None or name in kernels
        found[_kind(name)] += 1
    return found


def _kind(kernel: str) -> str:
    """`linear_nf4_128x64_m1_0` is a linear, `rms_norm_0` a norm, loops and reductions are loops."""
    for kind in ("grouped_linear", "linear", "norm", "attention", "index_update", "copy", "softmax", "topk", "gather"):
        if kind in kernel:
            return kind
    return "loop" if kernel.startswith(("loop", "reduce", "fill")) else kernel.rstrip("_0123456789")


def per_layer(name: str) -> dict[str, Counter[str]]:
    """The steps of a layer, by target: half the difference of four layers and two, which is whole."""
    few, more = (MODELS[name](layers) for layers in (2, 4))
    found = {}
    for target in TARGETS:
        difference = _steps(more, target)
        difference.subtract(_steps(few, target))
        assert all(count % 2 == 0 or name == "gemma3" for count in difference.values()), (name, difference)
        found[target] = Counter({kind: count // 2 for kind, count in difference.items() if count})
    return found


def main() -> None:
    print("| layer | CPU | sm_90a | what |")
    print("|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        counts = per_layer(name)
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(counts["cpu"].items()))
        print(f"| {name} | {counts['cpu'].total()} | {counts['sm_90a'].total()} | {what} |", flush=True)


if __name__ == "__main__":
    main()
