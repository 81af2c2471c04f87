"""Models with states beside keys and values, through `compile_causal_lm`: results are those of transformers, however a
text is cut into calls, whatever else is in the batch, and whatever happens to a conversation in between."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from by_path import load
from msgspec.structs import replace

import qcompiler as qc
from qcompiler.errors import CorruptFileError, ExportError
from qcompiler.inspect.checks import copied_bytes
from qcompiler.lm import probe, recurrences
from qcompiler.lm.bench import measure
from qcompiler.lm.compile import inputs_to_trace
from qcompiler.lm.model import CausalLM
from qcompiler.lm.step import prepared
from qcompiler.plan.plan import Launch

models = load("tests/support/state_models.py")

LENGTHS = (7, 64, 1)
CHUNK = 16

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(2, models.VOCABULARY, length).tolist() for length in LENGTHS]

_built: dict[tuple[str, int, str], tuple[Any, CausalLM]] = {}


def built(name: str = "small", batch: int = 1, device: str = "cpu") -> tuple[Any, CausalLM]:
    """The model and its program. Tests share them."""
    key = (name, batch, device)
    if key not in _built:
        model = models.small() if name == "small" else models.build(name)
        _built[key] = (
            model, qc.compile_causal_lm(model, max_seq_len=100, max_batch=batch, chunk=CHUNK, device=device)
        )  # fmt: skip
    return _built[key]


def logits_of(model: Any, tokens: Sequence[int]) -> Any:
    """transformers' logits for each token of a text, read at once and without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def assert_same(ours: Any, theirs: Any) -> None:
    """fp32 sums in another order: 1e-5 is the bound of tests/lm/test_architectures.py."""
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


BATCHES = ((1, "cpu"), (3, "cpu"), (1, "sim:0"), (3, "sim:0"))
CASES = [
    pytest.param(name, batch, device, marks=() if (name, batch, device) == ("small", 1, "cpu") else pytest.mark.slow)
    for name in ("small", *models.MODELS)
    for batch, device in BATCHES
    if (name, batch) != ("zamba", 3)  # refused below
]
several = pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])


def prompts_of(batch: int) -> list[list[int]]:
    """64 tokens, or prompts of 7, 64 and 1 tokens."""
    return PROMPTS[1:2] if batch == 1 else PROMPTS[:batch]


def each(batch: int, first: int) -> list[list[int]]:
    """Another token for each sequence."""
    return [[first + i] for i in range(batch)]


@pytest.mark.parametrize(("name", "batch", "device"), CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, batch: int, device: str) -> None:
    """The prompts have 7, 64 and 1 tokens (alone: 64), which are read in calls of up to 16, then token by token."""
    model, lm = built(name, batch, device)
    prompts = prompts_of(batch)
    models.check_texts(model, lm, prompts, 16, lambda ours, text: assert_same(ours, logits_of(model, text)))


@pytest.mark.slow
def test_a_sequence_that_reads_nothing_keeps_its_states() -> None:
    """What the other sequences read in between changes no bit of its logits."""
    _, lm = built("small", 3)
    together, alone = lm.conversation(3), lm.conversation(3)
    for held in (together, alone):
        held.read(PROMPTS)
    together.read([[], [5] * 20, []])
    together.read([[], [6], [7]])
    nothing: list[int] = []
    assert np.array_equal(together.read([[9, 8], nothing, nothing])[0], alone.read([[9, 8], nothing, nothing])[0])


@several
def test_a_reset_sequence_begins_with_zeros(batch: int) -> None:
    _, lm = built("small", batch)
    held = lm.conversation(batch)
    first = held.read(prompts_of(batch))
    held.reset()
    for one, again in zip(first, held.read(prompts_of(batch)), strict=True):
        assert np.array_equal(one, again)


@several
def test_truncate_reads_the_tokens_that_remain(batch: int) -> None:
    model, lm = built("small", batch)
    held, prompts, cut = lm.conversation(batch), prompts_of(batch), min(1, batch - 1)
    held.read(prompts)
    held.truncate(40, sequence=cut)
    if batch > 1:
        held.truncate(0, sequence=0)
    logits = held.read(each(batch, 11))
    for i, prompt in enumerate(prompts):
        text = prompt[:40] if i == cut else [] if i == 0 else prompt
        assert held.tokens[i] == [*text, 11 + i]
        assert_same(logits[i][-1], logits_of(model, held.tokens[i])[-1])


@several
def test_fork_save_and_restore_take_the_states_along(batch: int, tmp_path: Path) -> None:
    _, lm = built("small", batch)
    held = lm.conversation(batch)
    held.read(prompts_of(batch))
    other, third = held.fork(), lm.conversation(batch)
    held.save(tmp_path / "held.npz")
    wanted = held.read(each(batch, 11))
    third.restore(tmp_path / "held.npz")
    for conversation in (other, third):
        for one, again in zip(wanted, conversation.read(each(batch, 11)), strict=True):
            assert np.array_equal(one, again)


@several
@pytest.mark.parametrize("at", ["before", "after"])
def test_an_interrupted_call_leaves_no_other_states(batch: int, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states may have been changed, or not: the tokens of before are read again, also if that is interrupted."""
    model, lm = built("small", batch)
    held, prompts = lm.conversation(batch), prompts_of(batch)
    held.read(prompts)
    run = held._run

    def interrupted(*args: Any, **options: Any) -> Any:
        if at == "after":
            run(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(held, "_run", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                held.read(each(batch, 21))
    assert held.tokens == prompts
    logits = held.read(each(batch, 11))
    for i, prompt in enumerate(prompts):
        assert_same(logits[i][-1], logits_of(model, [*prompt, 11 + i])[-1])


def test_a_saved_program_keeps_its_states(tmp_path: Path) -> None:
    _, lm = built()
    lm.save(tmp_path / "model.qca")
    again = qc.load_causal_lm(tmp_path / "model.qca")
    assert again.record == lm.record and again.record.counts
    assert again.generate(PROMPTS[0], max_new_tokens=4) == lm.generate(PROMPTS[0], max_new_tokens=4)


def test_a_record_that_hides_the_states_is_refused(tmp_path: Path) -> None:
    """Such a program would be called without `counts`."""
    _, lm = built()
    hidden = CausalLM(lm.run, replace(lm.record, counts=False), lm.program)
    hidden.save(tmp_path / "model.qca")
    with pytest.raises(CorruptFileError, match="counts"):
        qc.load_causal_lm(tmp_path / "model.qca")


@several
def test_nothing_is_copied_and_the_report_names_the_states(batch: int) -> None:
    _, lm = built("small", batch)
    assert lm.program is not None
    entries = ["decode", "decode_batch", "prefill"] if batch > 1 else ["decode", "prefill"]
    assert copied_bytes(lm.program.plan) == {entry: {} for entry in entries}
    for entry in lm.program.plan.entries:
        found = [step for step in entry.steps if isinstance(step, Launch) and "linear_attention" in step.kernel]
        assert len(found) == 1, "one launch for all tokens of a call"
    assert "states that each token changes" in lm.cache_report()
    assert "a state of [32, 1, 4] for each sequence (recurrent)" in str(lm.program.report())


def test_bench_times_steps_of_a_model_with_states() -> None:
    """A step is profiled with the counts that the program takes beside its tokens."""
    _, lm = built()
    found = measure(lm, prompt=3, generate=2, batch=1, rounds=1)
    assert found.not_product is not None
    assert 0 < found.not_product < 1


def test_replaced_functions_are_transformers_own_again() -> None:
    built()
    module = sys.modules[type(models.small()).__module__]
    assert recurrences.kernel_of(module.mamba_selective_scan) == "selective_scan_fn"
    assert not recurrences._held


def test_a_model_that_reads_no_state_in_calls_of_several_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call would forget those before it, and no other error would say so."""
    with prepared(models.small(), 1, 100, None, 100, CHUNK) as step:
        inputs_to_trace(step, 100, CHUNK)
        assert not any(step.get_buffer(state.name).any() for state in step.states), "the check computes nothing"
        monkeypatch.setattr(recurrences, "_asked", lambda: None)
        with pytest.raises(ExportError, match="keeps the states recurrent_0_0 and does not read them"):
            inputs_to_trace(step, 100, CHUNK)


def test_a_call_that_leaves_a_state_as_it_was_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM 3 writes its state of a convolution in place where it reads one token, by a function of its own."""
    with prepared(models.build("lfm3"), 1, 100, None, 100, 1) as step:
        inputs_to_trace(step, 100, 1)
    kernel_of = recurrences.kernel_of
    with_kernels = lambda function: kernel_of(function) if hasattr(function, "__wrapped__") else None  # noqa: E731
    monkeypatch.setattr(recurrences, "kernel_of", with_kernels)
    with (
        prepared(models.build("lfm3"), 1, 100, None, 100, 1) as step,
        pytest.raises(ExportError, match="does not hand the states conv_0_0, conv_2_0 to its cache in a call of one"),
    ):
        inputs_to_trace(step, 100, 1)


def test_a_text_that_would_begin_with_a_bias_and_not_with_zeros_is_refused() -> None:
    kind, values = models.MODELS["zaya"]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values, attention_bias=True))
    with pytest.raises(ExportError, match="multiplies zeros by a linear with a bias while there is no state of before"):
        qc.compile_causal_lm(model.eval(), max_seq_len=32)


def test_a_state_whose_width_grows_with_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM 2 hands over the call's columns and says how many are kept. Where it does not, they are a prompt's length."""
    usual = probe._Recorder.update_conv_state

    def unsaid(self: Any, columns: Any, layer: int, index: int = 0, **_: Any) -> Any:
        return usual(self, columns, layer, index)

    monkeypatch.setattr(probe._Recorder, "update_conv_state", unsaid)
    with pytest.raises(ExportError, match=r"without saying its width .* 3 columns in a call of 3 tokens, but 4"):
        qc.compile_causal_lm(models.build("lfm2"), max_seq_len=32)


def rwkv() -> Any:
    return transformers.RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)


def recurrent_gemma() -> Any:
    return transformers.RecurrentGemmaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, lru_width=32
    )


def minimax() -> Any:
    return transformers.MiniMaxConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, num_local_experts=2,
    )  # fmt: skip


@pytest.mark.parametrize(("config", "message"), [
    (rwkv, "hands neither keys and values nor states to a cache"),
    (recurrent_gemma, r"keeps states in its modules \(model.layers.0.temporal_block.conv1d_state and 1 more\)"),
    (minimax, "MiniMax uses cache of its own .* takes a cache of transformers' common classes, not one of its own"),
])  # fmt: skip
def test_states_that_no_cache_of_transformers_has_are_refused(config: Any, message: str) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(config()).eval()
    with pytest.raises(ExportError, match=message):
        qc.compile_causal_lm(model, max_seq_len=32)
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert not [each for each in held if type(each).__name__ == "FakeTensor"], "the model is as it was"


@pytest.mark.slow
def test_heads_that_are_scanned_one_by_one_take_one_sequence() -> None:
    with pytest.raises(ExportError, match="scans each head of a layer by itself: compile it with max_batch=1"):
        qc.compile_causal_lm(models.build("zamba"), max_seq_len=100, max_batch=3, chunk=CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("taps", [1, 2, 3, 9])
def test_convolutions_of_every_width(taps: int) -> None:
    """Windows shorter than the probing call's three tokens, of three, and longer than a call's eight."""
    kind, values = models.MODELS["lfm2"]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values, conv_L_cache=taps)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    held = qc.compile_causal_lm(model, max_seq_len=100, chunk=8).conversation()
    assert_same(held.read(PROMPTS[1], logits="all")[0], logits_of(model, PROMPTS[1]))


def test_right_padding_changes_the_states_of_transformers() -> None:
    """Why no call is padded: with states of before, transformers' own mask of padding does not keep them."""
    model = models.small()
    with torch.no_grad():
        padded = model(torch.tensor([[5, 6, 7]]), use_cache=True).cache_params
        mask = torch.tensor([[1, 0, 0, 0]])
        model(torch.tensor([[8, 9, 9, 9]]), attention_mask=mask, cache_params=padded, use_cache=True)
        wanted = model(torch.tensor([[5, 6, 7]]), use_cache=True).cache_params
        model(torch.tensor([[8]]), cache_params=wanted, use_cache=True)
    for kind in ("conv_states", "recurrent_states"):
        found, right = (getattr(each.layers[0], kind)[0] for each in (padded, wanted))
        assert not torch.allclose(found, right, rtol=1e-2)
