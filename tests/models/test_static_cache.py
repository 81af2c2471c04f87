"""A Llama with transformers' static cache: one graph for prompt and single tokens, caches as states in place."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import ExportError
from qcompiler.inspect.checks import copied_bytes
from qcompiler.plan.kinds.attention import AttentionKernel

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, KV_HEADS, DIM, LENGTH = 2, 4, 2, 16, 40


def llama(dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=HEADS * DIM, intermediate_size=112, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=256, **others,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    model.generation_config.cache_implementation = "static"
    return model


@cache
def compiled(device: str = "cpu", dtype: torch.dtype = torch.float32, quant: str | None = None) -> tuple[Any, Any]:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model = llama(dtype)
    step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=LENGTH)
    size = ("s", 1, 24)
    program = qc.qcompile(
        step,
        kwargs={"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)},
        dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 24)})],
        quant=quant,
        device=device,
    )
    return model, program


def prompt(length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def decode(step: Any, ids: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Logits of a prompt and of `tokens` greedy tokens behind it."""
    found, position = [], 0
    for _ in range(tokens + 1):
        positions = torch.arange(position, position + ids.shape[1])
        found.append(step(input_ids=ids, cache_position=positions))
        position += ids.shape[1]
        ids = found[-1][:, -1:].argmax(-1)
    return found


def eager(model: Any, ids: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """The same of the model itself, on a static cache of its own."""
    memory = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)

    def step(input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids, past_key_values=memory, use_cache=True).logits
        return logits

    return decode(step, ids, tokens)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def attentions(program: Any) -> list[AttentionKernel]:
    return [k.body for k in program.plan.kernels if isinstance(k.body, AttentionKernel)]


@pytest.mark.parametrize("stepwise", [False, True])
def test_prompt_and_tokens_match_eager(stepwise: bool) -> None:
    model, program = compiled()
    ours = decode(program.session(stepwise=stepwise), prompt(), 16)
    for a, b in zip(ours, eager(model, prompt(), 16), strict=True):
        assert error(a, b) <= 1e-5


def test_caches_are_states_that_no_call_copies() -> None:
    _, program = compiled()
    assert [entry.name for entry in program.plan.entries] == ["decode", "prefill"]
    states = {arena.name for arena in program.plan.arenas if arena.kind == "state"}
    assert states == {f"state.{kind}_cache_{i}" for kind in ("key", "value") for i in range(LAYERS)}
    assert copied_bytes(program.plan) == {"decode": {}, "prefill": {}}


def test_attention_reads_the_cache_as_it_is_and_up_to_a_position() -> None:
    _, program = compiled()
    for body in attentions(program):
        assert (body.heads, body.kv_heads, body.kv_len) == (HEADS, KV_HEADS, LENGTH)
        assert body.last and body.mask == "none" and not body.causal


def changed_bytes(before: dict[str, Any], after: dict[str, Any]) -> int:
    flat = [(np.asarray(before[name]).view(np.uint8), np.asarray(after[name]).view(np.uint8)) for name in before]
    return int(sum((a.reshape(-1) != b.reshape(-1)).reshape(-1, 4).any(axis=1).sum() * 4 for a, b in flat))


DEVICES = ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_writes_its_rows_of_the_caches_and_nothing_else(device: str) -> None:
    _, program = compiled(device)
    session = program.session()
    decode(session, prompt(), 1)
    pattern = {name: np.frombuffer(b"\xa5" * np.asarray(v).nbytes, np.uint8) for name, v in session.states().items()}
    session.set_states(pattern)  # a value that no key has: what is written differs from it
    session(input_ids=prompt(1), cache_position=torch.tensor([10]))
    row = LAYERS * 2 * KV_HEADS * DIM * 4
    assert changed_bytes(pattern, session.states()) == row


def test_sessions_and_reset() -> None:
    model, program = compiled()
    first, second = program.session(), program.session()
    want, other = eager(model, prompt(), 2), eager(model, prompt(7, seed=5), 2)
    decode(first, prompt(), 1)
    assert error(decode(second, prompt(7, seed=5), 2)[-1], other[-1]) <= 1e-5
    first.reset()
    assert error(decode(first, prompt(), 2)[-1], want[-1]) <= 1e-5


def test_a_saved_program_decodes(tmp_path: Path) -> None:
    model, program = compiled()
    program.save(tmp_path / "llama.qca")
    loaded = qc.load(tmp_path / "llama.qca")
    assert error(decode(loaded, prompt(), 3)[-1], eager(model, prompt(), 3)[-1]) <= 1e-5


@pytest.mark.slow
def test_replays_go_on_in_the_cache() -> None:
    model, program = compiled("sim:0")
    session, want = program.session(), eager(model, prompt(), 6)
    ids = prompt()
    logits = session(input_ids=ids, cache_position=torch.arange(9))
    graph = session.capture(input_ids=ids[:, :1], cache_position=torch.tensor([9]))
    for step in range(6):
        logits = graph.replay(input_ids=logits[:, -1:].argmax(-1), cache_position=torch.tensor([9 + step]))
        assert error(logits, want[step + 1]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quant"), [(torch.bfloat16, None), (torch.float32, "nf4"), (torch.float32, "int8")])
def test_narrow_caches_and_quantised_linears_match_the_oracle(dtype: torch.dtype, quant: str | None) -> None:
    _, program = compiled("cpu", dtype, quant)
    with torch.no_grad():
        want = decode(program.oracle, prompt(), 8)
    session, ids, position = program.session(), prompt(), 0
    for logits in want:  # the oracle's tokens: a tie decided otherwise must not count as an error
        ours = session(input_ids=ids, cache_position=torch.arange(position, position + ids.shape[1]))
        assert error(ours, logits) <= (2e-2 if dtype == torch.bfloat16 else 1e-5)
        position += ids.shape[1]
        ids = logits[:, -1:].argmax(-1)


# --- caches without transformers --------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Grouped queries over registered caches of two sequences; a table of masks, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32 + 2 * 16)
        self.register_buffer("keys", torch.zeros(2, 2, 20, 8))
        self.register_buffer("values", torch.zeros(2, 2, 20, 8))
        self.register_buffer("triangle", torch.tril(torch.ones(20, 20, dtype=torch.bool)))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).split([32, 16, 16], -1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        out = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, self.triangle[at], enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def test_caches_as_registered_buffers() -> None:
    torch.manual_seed(0)
    model, size = Attends().eval(), ("s", 1, 9)
    program = qc.qcompile(
        model, (torch.randn(2, 5, 32), torch.arange(5)), dynamic_shapes={"x": {1: size}, "at": {0: size}}
    )
    assert all(body.last and body.kv_heads == 2 for body in attentions(program))
    assert set(map(str, copied_bytes(program.plan).values())) == {"{}"}
    position = 0
    for count in (7, 1, 1, 4, 1):
        x, at = torch.randn(2, count, 32), torch.arange(position, position + count)
        with torch.no_grad():
            assert error(program(x, at), model(x, at)) <= 1e-5
        position += count


class OwnCache(nn.Module):
    """A model and the cache of transformers, held as it is: the length counts on by itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.memory = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
        self.memory.early_initialization(1, KV_HEADS, DIM, model.dtype, torch.device("cpu"))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, past_key_values=self.memory, use_cache=True).logits
        return logits


@pytest.mark.slow
def test_a_cache_object_without_registered_buffers_is_state_too() -> None:
    model = llama()
    program = qc.qcompile(OwnCache(model), (prompt(7),), dynamic_shapes={"input_ids": {1: ("s", 1, 24)}})
    ours = decode(lambda input_ids, cache_position: program(input_ids), prompt(), 4)
    for a, b in zip(ours, eager(model, prompt(), 4), strict=True):
        assert error(a, b) <= 1e-5


@pytest.mark.slow
def test_a_sliding_cache_is_refused_since_it_counts_in_python() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    with pytest.raises(ExportError, match=r"cumulative_length_int.*StaticLayers"):
        qc.qcompile(OwnCache(model), (prompt(5),))
