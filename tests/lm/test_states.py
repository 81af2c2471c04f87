"""Models with states beside keys and values, through `compile_causal_lm`: results are those of transformers, however a
text is cut into calls, whatever else is in the batch, and whatever happens to a conversation in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import CorruptFileError
from qcompiler.lm.model import CausalLM

models = load("tests/support/state_models.py")

LENGTHS = (7, 1, 64)
CHUNK = 16
QUICK = ("small", 3)

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


CASES = [
    pytest.param(name, batch, device, marks=() if (name, batch, device) == (*QUICK, "cpu") else pytest.mark.slow)
    for name in ("small", *models.MODELS)
    for batch, device in ((1, "cpu"), (3, "cpu"), (1, "sim:0"), (3, "sim:0"))
]


@pytest.mark.parametrize(("name", "batch", "device"), CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, batch: int, device: str) -> None:
    """The prompts have 7, 1 and 64 tokens, which are read in calls of up to 16, then token by token."""
    model, lm = built(name, batch, device)
    prompts = PROMPTS[-batch:] if batch == 1 else PROMPTS
    held = lm.conversation(batch)
    whole = held.read(prompts, logits="all")
    steps = [held.read([[5 + i] for i in range(batch)]) for _ in range(3)]
    for i, prompt in enumerate(prompts):
        theirs = logits_of(model, [*prompt, *[5 + i] * 3])
        assert_same(np.concatenate([whole[i], *(step[i] for step in steps)]), theirs)
    texts = lm.generate(prompts, max_new_tokens=16, eos_token_id=-1)
    for prompt, text in zip(prompts, texts, strict=True):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert text == made[0].tolist()


def test_a_sequence_that_reads_nothing_keeps_its_states() -> None:
    """What other sequences read in between changes no bit of its logits."""
    _, lm = built(*QUICK)
    together, alone = lm.conversation(3), lm.conversation(3)
    for held in (together, alone):
        held.read(PROMPTS)
    together.read([[], [5] * 20, []])
    together.read([[], [6], [7]])
    nothing: list[int] = []
    assert np.array_equal(together.read([[9, 8], nothing, nothing])[0], alone.read([[9, 8], nothing, nothing])[0])


def test_a_reset_sequence_begins_with_zeros() -> None:
    _, lm = built(*QUICK)
    held = lm.conversation(3)
    first = held.read(PROMPTS)
    held.reset()
    for one, again in zip(first, held.read(PROMPTS), strict=True):
        assert np.array_equal(one, again)


def test_truncate_reads_the_tokens_that_remain() -> None:
    model, lm = built(*QUICK)
    held = lm.conversation(3)
    held.read(PROMPTS)
    held.truncate(40, sequence=2)
    held.truncate(0, sequence=0)
    logits = held.read([[11], [12], [13]])
    assert [len(tokens) for tokens in held.tokens] == [1, 2, 41]
    for i, text in enumerate(([11], [*PROMPTS[1], 12], [*PROMPTS[2][:40], 13])):
        assert_same(logits[i][-1], logits_of(model, text)[-1])


def test_fork_save_and_restore_take_the_states_along(tmp_path: Path) -> None:
    _, lm = built(*QUICK)
    held = lm.conversation(3)
    held.read(PROMPTS)
    other, third = held.fork(), lm.conversation(3)
    held.save(tmp_path / "held.npz")
    wanted = held.read([[11], [12], [13]])
    third.restore(tmp_path / "held.npz")
    for each in (other, third):
        for one, again in zip(wanted, each.read([[11], [12], [13]]), strict=True):
            assert np.array_equal(one, again)


@pytest.mark.parametrize("at", ["before", "after"])
def test_an_interrupted_call_leaves_no_other_states(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states may have been changed, or not: the tokens of before are read again."""
    model, lm = built(*QUICK)
    held = lm.conversation(3)
    held.read(PROMPTS)
    run = held._run

    def interrupted(*args: Any, **options: Any) -> Any:
        if at == "after":
            run(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(held, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            held.read([[21], [22], [23]])
    logits = held.read([[11], [12], [13]])
    for i, prompt in enumerate(PROMPTS):
        assert_same(logits[i][-1], logits_of(model, [*prompt, 11 + i])[-1])


def test_a_saved_program_keeps_its_states(tmp_path: Path) -> None:
    _, lm = built(*QUICK)
    lm.save(tmp_path / "model.qca")
    again = qc.load_causal_lm(tmp_path / "model.qca")
    assert again.record == lm.record and again.record.counts
    assert again.generate(PROMPTS, max_new_tokens=4) == lm.generate(PROMPTS, max_new_tokens=4)


def test_a_record_that_hides_the_states_is_refused(tmp_path: Path) -> None:
    """Such a program would be called without `counts`."""
    _, lm = built(*QUICK)
    from msgspec.structs import replace

    hidden = CausalLM(lm.run, replace(lm.record, counts=False), lm.program)
    hidden.save(tmp_path / "model.qca")
    with pytest.raises(CorruptFileError, match="counts"):
        qc.load_causal_lm(tmp_path / "model.qca")


def test_right_padding_changes_the_states_of_transformers() -> None:
    """Why no call is padded: with states of before, transformers' own mask of padding does not keep them."""
    model = models.small()
    with torch.no_grad():
        first = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
        kept = first.layers[0].conv_states[0].clone()
        mask = torch.tensor([[1, 1, 1, 1, 0]])
        model(torch.tensor([[8, 9]]), attention_mask=mask, past_key_values=first, use_cache=True)
        padded = first.layers[0].conv_states[0]
        second = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
        model(torch.tensor([[8]]), past_key_values=second, use_cache=True)
    assert not torch.equal(padded, kept)
    assert not torch.allclose(padded, second.layers[0].conv_states[0])
