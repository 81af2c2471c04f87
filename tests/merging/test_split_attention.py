"""The pass split-attention: which attentions have parts, that they mean the same, and a language model with them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.interpreter import run
from qcompiler.ir.text import parse_module
from qcompiler.kernels.attention_split import SplitQuery, verdict
from qcompiler.kernels.cuda.attention_decode import PART_KEYS
from qcompiler.passes.pipeline import parse_passes
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel
from qcompiler.plan.plan import Launch
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.graph import CapturedGraph

LLAMA = SplitQuery(batch=(1, 1), heads=32, kv_heads=8, queries=1, keys=8192, part_rows=4, key_bytes=512)
"""A layer of Llama 3 8B in bf16."""


@pytest.mark.parametrize(
    ("changed", "parts", "why"),
    [
        ({}, 32, "in 32 parts"),  # 8192 / 256; 264 blocks would be 33 parts
        ({"keys": 2**17}, 33, "in 33 parts"),
        ({"kv_heads": 4, "keys": 2**17}, 33, "in 33 parts"),  # two blocks of four rows for each key head
        ({"kv_heads": 1, "heads": 4, "keys": 2**17}, 256, "in 256 parts"),
        ({"batch": (3, 8), "keys": 2**17}, 11, "in 11 parts"),
        ({"batch": (40, 40)}, 1, "320 blocks have work for every multiprocessor"),
        ({"queries": 5}, 1, "more than 4 queries have blocks enough"),
        ({"queries": None}, 1, "known only at run time"),
        ({"keys": 256}, 1, "it sees at most 256 keys, and a part has at least 256"),
        ({"keys": 512}, 1, "with 256 of 512 keys"),
        ({"keys": 1024}, 4, "in 4 parts"),
    ],
)
def test_parts_fill_the_gpu_where_the_cache_is_long(changed: dict[str, object], parts: int, why: str) -> None:
    found = verdict(replace(LLAMA, **changed), "cuda", ("sm_90a",))  # type: ignore[arg-type]
    assert found.parts == parts and why in found.why, found.why


def test_a_plan_for_several_gpus_has_parts_for_the_largest() -> None:
    assert verdict(replace(LLAMA, keys=2**17), "cuda", ("sm_80", "sm_90a")).parts == 33
    assert verdict(replace(LLAMA, keys=2**17), "cuda", ("sm_80",)).parts == 27
    assert verdict(LLAMA, "cpu", ("x86-64-v4",)).parts == 1


TEXT = """
func.func @main(%q: tensor<2x4x2x8xbf16>, %k: tensor<2x2x2048x8xbf16>, %n: tensor<2x2xi64>) -> tensor<2x4x2x8xbf16> {
  %y = qc.attention %q, %k, %k last(%n) {scale = 0.4, OPTIONS qc.path = "attn"} : tensor<2x4x2x8xbf16>
  func.return %y : tensor<2x4x2x8xbf16>
}
"""


def test_what_has_parts_is_not_divided_again() -> None:
    module, context = parse_module(TEXT.replace("OPTIONS", "")), QCContext(target=Target("cuda", "sm_90a"))
    (divide,) = parse_passes("split-attention")
    divide.apply(context, module)
    once = str(module)
    assert "qc.join_attention" in once
    divide.apply(context, module)
    assert str(module) == once


@pytest.mark.parametrize("options", ["", "softcap = 2.0,", "window = 1500,"])
def test_the_interpreter_gives_parts_and_join_the_meaning_of_the_whole(options: str) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype(NUMPY_DTYPES["bf16"]) for shape in ((2, 4, 2, 8), (2, 2, 2048, 8))]
    inputs.append(np.array([[1900, 1901], [-1, 0]]))
    whole, divided = (parse_module(TEXT.replace("OPTIONS", options)) for _ in range(2))
    context = QCContext(target=Target("cuda", "sm_90a"))
    for each in parse_passes("split-attention"):
        each.apply(context, divided)
    assert "parts = " in str(divided) and "qc.join_attention" in str(divided)
    (a,), (b,) = (run(module, context.weights, inputs) for module in (whole, divided))
    np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=1e-6)
    assert not b[1, :, 0].any(), "a query without a key gives zeros"


def test_a_recipe_keeps_an_attention_whole() -> None:
    module, context = parse_module(TEXT.replace("OPTIONS", "")), QCContext(target=Target("cuda", "sm_90a"))
    for each in parse_passes('split-attention{separate="at*"}'):
        each.apply(context, module)
    assert "parts" not in str(module)
    assert [d.why for d in context.report.of("split-attention")] == ["the recipe keeps it separate"]


@cache
def compiled(device: str, batch: int, cache_type: str) -> qc.CausalLM:
    model = load("tests/models/zoo.py").DECODERS["llama"].build(num_hidden_layers=1)
    return qc.compile_causal_lm(
        model, quant="nf4", max_seq_len=1024, chunk=32, max_batch=batch, device=device, kv_cache=cache_type
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "batch", "cache_type"), [("sim:0", 1, "auto"), ("sim:1", 3, "auto"), ("sim:0", 1, "int8")]
)
def test_a_language_model_with_a_long_cache_has_parts_and_the_tokens_of_the_cpu(
    device: str, batch: int, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch a layer more. Lengths go past a part's least keys while one graph is replayed."""
    lm = compiled(device, batch, cache_type)
    assert lm.program is not None
    kernels = {kernel.name: kernel.body for kernel in lm.program.plan.kernels}
    steps = next(entry for entry in lm.program.plan.entries if entry.name == "decode").steps
    launched = [kernels[step.kernel] for step in steps if isinstance(step, Launch)]
    (attention,) = [body for body in launched if isinstance(body, AttentionKernel)]
    assert attention.parts == -(-int(attention.kv_len) // PART_KEYS) >= 4
    assert sum(isinstance(body, JoinAttentionKernel) for body in launched) == 1
    replays = list[int]()
    replay = CapturedGraph.replay_on_host

    def counted(graph: CapturedGraph, *arguments: Any) -> None:
        replays.append(1)
        replay(graph, *arguments)

    monkeypatch.setattr(CapturedGraph, "replay_on_host", counted)
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(3, 190, size=n)] for n in (250, 511, 3)[:batch]]
    found = lm.generate(prompts, max_new_tokens=9)
    assert found == compiled("cpu", batch, cache_type).generate(prompts, max_new_tokens=9)
    assert len(replays) >= 8


class Step(torch.nn.Module):
    """One query of each sequence, which sees the keys up to its position."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(k.shape[2])[None, None, None] <= position[:, None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_a_replay_divides_the_keys_that_its_own_positions_see(device: str) -> None:
    """Lengths of 1, 7, 64, of one part and of four, and one key beyond each; a sequence may see none."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, n, 16) for n in (1, 1024, 1024))
    program = qc.qcompile(Step(), (q, k, v, torch.tensor([5, 9, 1000])), device=device)
    (attention,) = [each.body for each in program.plan.kernels if isinstance(each.body, AttentionKernel)]
    assert (attention.parts, attention.last) == (4, True)
    graph = program.capture(*(each.numpy() for each in (q, k, v, torch.tensor([5, 9, 1000]))))
    for lengths in ([1, 7, 64], [256, 257, 1024], [1023, 512, 513], [255, 8, 65]):
        given = [*(torch.randn_like(each) for each in (q, k, v)), torch.tensor(lengths) - 1]
        replayed, called = graph.replay(*(each.numpy() for each in given)), program.run(*given)
        assert np.array_equal(np.asarray(replayed), np.asarray(called))
        want = Step()(*(each.double() if each.is_floating_point() else each for each in given))
        np.testing.assert_allclose(np.asarray(replayed), want.numpy(), rtol=0, atol=2e-6)
