"""How many launches a layer takes: models of two sizes that differ by one layer, and what they launch apart.

    python tests/support/launches.py                 # the table of docs/performance.md
    python tests/support/launches.py llama bert
    python tests/support/launches.py --int8          # with int8 weights, without and with int8 activations

Decoders take one token at batch 1 with transformers' static cache (OPT with given positions, see given_positions.py);
BERT takes seven tokens and ViT an image at batch 1.  Counted are the steps of the schedule: everything that is
launched or copied.  Programs of decoders have an entry point for prompts as well, which shares their weights, except
in the rows `…-tokens`.  In `llama-mixed` v has another format than q and k.  They are compiled as far as the
schedule, not to machine code.

Beside them stand the bytes of activations that the steps read and write: the operands that are neither weights, nor
tables made at load, nor states.  An element that a step reads several times counts once for that step, and one that it
reads and writes twice.  The models are small (hidden 64), so the bytes compare schedules, not machines.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from by_path import load

from qcompiler import QuantConfig
from qcompiler.api import pass_options
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.rt import ArenaOp, BufferOp, CopyOp, EntryOp, KernelOp, StepOp
from qcompiler.passes.pipeline import run_pipeline, upto, with_options
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import View

CACHE, WORDS = 40, 199
TARGETS = {"cpu": Target("cpu", "x86-64-v4"), "sm_90a": Target("cuda", "sm_90a")}


def _decoder(name: str, layers: int, quant: Any, *, prompts: bool = True) -> Any:
    """One decode step, of `layers` layers; without `prompts` for single tokens alone."""
    import transformers
    from given_positions import GivenPositions
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
    adapter = GivenPositions if name == "opt" else TorchExportableModuleWithStaticCache
    step = adapter(model, batch_size=1, max_cache_len=CACHE)
    if not prompts:
        given = {"input_ids": torch.full((1, 1), 5), "cache_position": torch.arange(1)}
        return import_torch(step, (), given, quant=quant)
    size = ("s", 1, 24)
    given = {"input_ids": torch.full((1, 7), 5), "cache_position": torch.arange(7)}
    return import_torch(
        step, (), given, dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}}, quant=quant
    )


def _bert(layers: int, quant: Any) -> Any:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160}
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **sizes)).eval()
    return import_torch(model, (), {"input_ids": torch.full((1, 7), 5)}, quant=quant)


def _vit(layers: int, quant: Any) -> Any:
    import transformers

    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    model = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=layers, **sizes)).eval()
    return import_torch(model, (torch.randn(1, 3, 32, 32),), quant=quant)


def _flux(layers: int, quant: Any, *, single: bool) -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    counts = {"num_layers": 1 if single else layers, "num_single_layers": layers if single else 1}
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **counts,
    ).eval()  # fmt: skip
    given = load("tests/models/test_diffusion.py").inputs(1, 16, 7, None)
    return import_torch(model, (), given, quant=quant)


MODELS: dict[str, Callable[[int, Any], Any]] = {
    **{
        name: (lambda layers, quant, name=name: _decoder(name, layers, quant))
        for name in ("llama", "mistral", "qwen3", "gemma3", "phi3", "gpt2", "neox", "mixtral", "qwen3-moe", "opt")
    },
    **{
        f"{name}-tokens": (lambda layers, quant, name=name: _decoder(name, layers, quant, prompts=False))
        for name in ("qwen3", "gemma3")
    },
    "llama-mixed": lambda layers, quant: _decoder("llama", layers, mixed(quant)),
    "bert": _bert, "vit": _vit,
    "flux-double": lambda layers, quant: _flux(layers, quant, single=False),
    "flux-single": lambda layers, quant: _flux(layers, quant, single=True),
}  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Steps by the kind of kernel, and the bytes of activations that they read and write."""

    kinds: Counter[str]
    nbytes: int


def _steps(imported: Any, target: str) -> Steps:
    """The steps of the entry point for one token, or of the only one."""
    module = imported.module.clone()
    device = "cpu" if target == "cpu" else "cuda:0"
    context = QCContext.default(weights=imported.weights.copy(), target=TARGETS[target], devices=(device,))
    head = str(imported.module.body.block.first_op)[:2000]
    prompts = "cache_position" in head and '"s"' in head
    options = pass_options([("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 24)})], None) if prompts else {}
    run_pipeline(module, context, stages=with_options(upto("merge-launches"), options))
    ops = list(module.body.block.ops)
    (entry,) = [op for op in ops if isinstance(op, EntryOp) and not op.is_init and op.sym in ("decode", "main")]
    kernels = {op.sym: [each.access for each in op.operand_records] for op in ops if isinstance(op, KernelOp)}
    kinds = {op.sym: op.kind.data for op in ops if isinstance(op, ArenaOp)}
    moving = {
        op.sym for op in ops
        if isinstance(op, BufferOp) and kinds[op.arena_name] in ("activations", "input", "output")
    }  # fmt: skip
    found: Counter[str] = Counter()
    nbytes = 0
    for step in entry.steps:
        kernel = _kernel(step)
        assert kernel is None or kernel in kernels
        found[_kind(kernel or step.name.removeprefix("rt."))] += 1
        accesses = kernels[kernel] if kernel is not None else ["r", "w"]
        assert kernel is not None or isinstance(step, CopyOp), step.name
        for access, view in zip(accesses, step.view_records, strict=True):
            nbytes += len(access) * _nbytes(view) if view.buffer in moving else 0
    return Steps(found, nbytes)


def _kernel(step: StepOp) -> str | None:
    """The kernel of a launch."""
    kernel = getattr(step, "kernel", None)
    return None if kernel is None else str(kernel.root_reference.data)


def _nbytes(view: View) -> int:
    """Bytes of the elements in a view, each once: along a stride of 0 there is one."""
    count = 1
    for size, stride in zip(view.shape, view.strides, strict=True):
        count *= dim(size).evaluate({}) if dim(stride).evaluate({}) else 1
    return count * ITEMSIZE[view.dtype]


def _kind(kernel: str) -> str:
    """`linear_nf4_128x64_m1_0` is a linear, `rms_norm_0` a norm, loops and reductions are loops."""
    for kind in ("grouped_linear", "linear", "norm", "attention", "index_update", "copy", "softmax", "topk", "gather"):
        if kind in kernel:
            return kind
    return "loop" if kernel.startswith(("loop", "reduce", "fill")) else kernel.rstrip("_0123456789")


def per_layer(name: str, quant: Any = "nf4") -> dict[str, Steps]:
    """The steps of a layer, by target: half the difference of four layers and two, rounded up, since neighbours share a
    launch where their linears read the same rows (the modulations of Flux)."""
    few, more = (MODELS[name](layers, quant) for layers in (2, 4))
    found = {}
    for target in TARGETS:
        small, large = _steps(few, target), _steps(more, target)
        difference = large.kinds.copy()
        difference.subtract(small.kinds)
        shared = name.startswith(("gemma3", "flux"))
        assert all(count % 2 == 0 or shared for count in difference.values()), (name, difference)
        kinds = Counter({kind: -(-count // 2) for kind, count in difference.items() if count})
        found[target] = Steps(kinds, (large.nbytes - small.nbytes) // 2)
    return found


def _table(names: Sequence[str]) -> None:
    print("| layer | CPU | sm_90a | bytes | what |")
    print("|---|---|---|---|---|")
    for name in names:
        counts = per_layer(name)
        cpu = counts["cpu"]
        launches = [str(each.kinds.total()) for each in counts.values()]
        print(f"| {name} | {' | '.join(launches)} | {cpu.nbytes} | {_listed(cpu.kinds)} |", flush=True)


def int8(activations: str | None) -> QuantConfig:
    """Weights in int8, and perhaps activations."""
    return QuantConfig("int8", activations=activations, promise_bits=None)


def _int8_table(names: Sequence[str]) -> None:
    print("| layer, int8 weights | CPU | CPU, int8 activations | sm_90a | sm_90a, int8 activations | more |")
    print("|---|---|---|---|---|---|")
    for name in names:
        plain, rows = (per_layer(name, int8(activations)) for activations in (None, "int8"))
        launches = [str(each[target].kinds.total()) for target in TARGETS for each in (plain, rows)]
        more = {target: rows[target].kinds - plain[target].kinds for target in TARGETS}
        said = "; ".join(f"{target}: {_listed(kinds)}" for target, kinds in more.items() if kinds)
        print(f"| {name} | {' | '.join(launches)} | {said} |", flush=True)


def mixed(quant: Any) -> QuantConfig:
    """A recipe with the weights of v in another format, as in llama.cpp's mixtures."""
    config = QuantConfig.of(quant)
    return replace(
        config, rules={"*.v_proj": "int4:group=32" if config.preset == "int8" else "int8"}, promise_bits=None
    )


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def main(given: Sequence[str] = tuple(sys.argv[1:])) -> None:
    names = [each for each in given if each != "--int8"] or list(MODELS)
    (_int8_table if "--int8" in given else _table)(names)


if __name__ == "__main__":
    main()
