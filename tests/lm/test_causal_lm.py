"""`compile_causal_lm` on a Llama of two layers: generation beside transformers', conversations, files, faults.

tests/models/test_tiny_llama.py and test_gguf_models.py compile the trained model of the repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from by_path import load
from oracle_logits import oracle_logits

import qcompiler as qc
from qcompiler.errors import (
    ArgumentError,
    CorruptFileError,
    ExportError,
    ForeignFileError,
    NewerFileError,
    SessionBusyError,
)
from qcompiler.inspect.checks import copied_bytes

LENGTH = 160
PROMPTS = [list(b"import os\n\n\ndef read_lines(path):\n"), list(b"x"), list(b"class A:\n    def __init__(self")]


@cache
def model() -> Any:
    """Two layers whose tokens are bytes."""
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "eos_token_id": None}
    return load("tests/models/zoo.py").DECODERS["llama"].build(**sizes)


@cache
def compiled(batch: int = 3, quant: str | None = "nf4") -> qc.CausalLM:
    """Torch must not trace the graph a second time, which took two fifths of a compilation: what the step writes itself
    (caches, drawn tokens, tallies) becomes functional where it stands."""
    again = AssertionError("the graph was traced a second time")
    with mock.patch.object(torch.export.ExportedProgram, "run_decompositions", side_effect=again):
        return qc.compile_causal_lm(model(), quant, max_seq_len=LENGTH, max_batch=batch, chunk=16)


@cache
def dequantised(quant: str | None = "nf4") -> Any:
    """The model with the weights that its program decodes."""
    program = compiled(quant=quant).program
    assert program is not None
    return load("tests/models/oracles.py").float64_model(model(), program).float()


def greedy(prompt: list[int], tokens: int, quant: str | None = "nf4") -> list[int]:
    assert tokens <= 64
    return longest(tuple(prompt), quant)[: len(prompt) + tokens]


@cache
def longest(prompt: tuple[int, ...], quant: str | None) -> list[int]:
    """64 greedy tokens; fewer ones are its beginning."""
    return generated(dequantised(quant), prompt, 64)


def generated(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    found: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )[0].tolist()  # fmt: skip
    return found


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_tokens_are_those_of_transformers(prompt: list[int]) -> None:
    assert compiled().generate(prompt, max_new_tokens=64) == greedy(prompt, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "quant"), [(1, None), (3, None), (1, "q4_K"), (2, "int8")])
def test_greedy_tokens_of_other_recipes_and_batches(batch: int, quant: str | None) -> None:
    found = compiled(batch, quant).generate(PROMPTS[:batch], max_new_tokens=64)
    assert found == [greedy(prompt, 64, quant) for prompt in PROMPTS[:batch]]


def test_sequences_of_a_batch_have_their_own_lengths_and_do_not_see_each_other() -> None:
    found = compiled().generate(PROMPTS, max_new_tokens=64)
    assert found == [greedy(prompt, 64) for prompt in PROMPTS]
    assert compiled().generate(PROMPTS[2], max_new_tokens=10) == greedy(PROMPTS[2], 10)
    assert compiled().generate(PROMPTS[::-1][:2], max_new_tokens=10) == [greedy(p, 10) for p in PROMPTS[::-1][:2]]


def test_quantised_logits_are_those_of_the_oracle() -> None:
    lm = compiled()
    pieces = [prompt[:14] for prompt in PROMPTS]  # a call of the graph reads at most a chunk
    for prompt, ours in zip(pieces, lm.conversation(3).read(pieces, logits="all"), strict=True):
        theirs = oracle_logits(lm, prompt)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_how_a_prompt_is_cut_into_calls_does_not_matter() -> None:
    lm, prompt = compiled(), PROMPTS[0]  # chunks are 16 tokens
    whole = lm.conversation().read(prompt, logits="all")[0]
    assert whole.shape == (len(prompt), 256)
    held = lm.conversation()
    parts = [held.read([token])[0] for token in prompt]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=2e-4)
    np.testing.assert_allclose(lm.conversation().read(prompt)[0][0], whole[-1], rtol=0, atol=2e-4)


def test_samples_depend_on_the_seed_and_not_on_the_batch() -> None:
    options = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    one = compiled().generate(PROMPTS[0], **options)
    assert compiled().generate([PROMPTS[0], PROMPTS[1]], **options)[0] == one
    assert compiled().generate(PROMPTS[0], **options | {"seed": 8}) != one
    assert compiled().generate(PROMPTS[0], max_new_tokens=4, do_sample=False, temperature=3.0) == greedy(PROMPTS[0], 4)


def test_lists_give_lists_arrays_arrays_and_tensors_tensors() -> None:
    lm, prompt = compiled(), PROMPTS[1]
    expected = greedy(prompt, 5)
    assert lm.generate(np.array(prompt), max_new_tokens=5).tolist() == expected
    found = lm.generate(torch.tensor([prompt]), max_new_tokens=5)
    assert isinstance(found, torch.Tensor) and found.tolist() == [expected]
    ids = np.zeros((2, 30), np.int64)
    mask = np.zeros((2, 30), np.int64)
    for row, tokens in enumerate(PROMPTS[1:]):
        ids[row, 30 - len(tokens) :] = tokens  # padded on the left, as transformers does
        mask[row, 30 - len(tokens) :] = 1
    padded = lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, pad_token_id=9)
    assert padded[1].tolist() == greedy(PROMPTS[2], 5)
    assert padded[0].tolist()[: len(prompt) + 5] == expected
    assert set(padded[0].tolist()[len(prompt) + 5 :]) == {9}


def test_tokens_come_as_they_are_made_and_an_end_token_ends_a_sequence() -> None:
    expected = greedy(PROMPTS[0], 20)[len(PROMPTS[0]) :]
    end = expected[8]
    seen: list[tuple[int, int]] = []
    found = compiled().generate(
        PROMPTS[0], max_new_tokens=20, eos_token_id=end, stream=lambda token, sequence: seen.append((sequence, token))
    )
    until = expected[: expected.index(end) + 1]
    assert found == PROMPTS[0] + until
    assert seen == [(0, token) for token in until]


def test_the_cache_is_filled_to_its_last_row() -> None:
    lm = compiled()
    assert len(lm.generate(PROMPTS[0], max_new_tokens=LENGTH - len(PROMPTS[0]) + 1, eos_token_id=-1)) == LENGTH + 1
    assert len(lm.generate([5] * LENGTH, eos_token_id=-1)) == LENGTH + 1
    assert len(lm.generate(PROMPTS[0], max_length=50, eos_token_id=-1)) == 50
    assert lm.generate(PROMPTS[0], max_new_tokens=0) == PROMPTS[0]


# --- conversations ----------------------------------------------------------------------------------------------------


def test_conversations_go_on_fork_and_forget() -> None:
    lm = compiled()
    held = lm.conversation()
    first = lm.generate(PROMPTS[0], max_new_tokens=8, conversation=held)
    assert held.tokens[0] == first[:-1]  # the last token was not read yet
    other = held.fork()
    rest = lm.generate(first[-1:], max_new_tokens=8, conversation=held)
    assert first + rest[1:] == greedy(PROMPTS[0], 16)
    assert lm.generate(first[-1:], max_new_tokens=8, conversation=other) == rest
    held.truncate(len(PROMPTS[0]) - 1)
    assert (
        lm.generate(PROMPTS[0][-1:], max_new_tokens=16, conversation=held)
        == greedy(PROMPTS[0], 16)[len(PROMPTS[0]) - 1 :]
    )
    held.reset()
    assert lm.generate(PROMPTS[2], max_new_tokens=8, conversation=held) == greedy(PROMPTS[2], 8)


def test_a_conversation_is_saved_and_restored(tmp_path: Path) -> None:
    lm = compiled()
    held = lm.conversation(2)
    held.read(PROMPTS[:2])
    held.save(tmp_path / "talk.npz")
    other = lm.conversation(2)
    other.restore(tmp_path / "talk.npz")
    assert other.tokens == held.tokens
    for ours, theirs in zip(other.read([[1], []]), held.read([[1], []]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(CorruptFileError, match="conversation of 1 sequence"):
        lm.conversation(1).restore(tmp_path / "talk.npz")
    single = lm.conversation()
    foreign = {"tokens:0": np.array([1]), "state:state.other": np.zeros(8, np.uint8)}
    np.savez(tmp_path / "other.npz", **foreign)  # type: ignore[arg-type]  # its names are keywords
    with pytest.raises(CorruptFileError, match="another program"):
        single.restore(tmp_path / "other.npz")
    assert single.tokens == [[]]
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(CorruptFileError):
        single.restore(tmp_path / "bad.npz")


def test_conversations_of_several_threads_share_a_program() -> None:
    lm = compiled()
    found: dict[int, list[int]] = {}

    def run(i: int) -> None:
        found[i] = lm.generate(PROMPTS[i], max_new_tokens=24)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: greedy(PROMPTS[i], 24) for i in range(3)}


def test_an_exception_from_the_stream_ends_the_text_and_nothing_else() -> None:
    lm = compiled()
    held = lm.conversation()

    def stop(token: int, sequence: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lm.generate(PROMPTS[0], max_new_tokens=8, conversation=held, stream=stop)
    assert held.tokens[0] == PROMPTS[0]
    next_token = greedy(PROMPTS[0], 1)[-1:]
    assert lm.generate(next_token, max_new_tokens=7, conversation=held)[1:] == greedy(PROMPTS[0], 8)[-7:]


# --- the program ------------------------------------------------------------------------------------------------------


def test_caches_are_written_in_place_and_the_ledger_has_the_models_names() -> None:
    program = compiled().program
    assert program is not None
    assert copied_bytes(program.plan) == {"decode": {}, "decode_batch": {}, "prefill": {}}
    listed = {name for row in program.ledger for name in row.parameters}
    assert listed >= {name for name, _ in model().named_parameters()}


def test_the_model_is_as_it_was_after_compiling() -> None:
    before = generated(model(), PROMPTS[1], 5)
    implementation = model().config._attn_implementation
    compiled()
    assert model().config._attn_implementation == implementation != "qcompiler"
    assert not model().lm_head._forward_pre_hooks
    assert generated(model(), PROMPTS[1], 5) == before


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_saved_model_generates_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "lm.qca"
    compiled().save(path)
    program = (
        "import sys\n"
        "import qcompiler as qc\n"
        f"lm = qc.load_causal_lm({str(path)!r})\n"
        f"print(lm.generate({PROMPTS[0]}, max_new_tokens=12))\n"
        "assert not {'torch', 'transformers', 'xdsl'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(greedy(PROMPTS[0], 12))


def test_a_text_ends_where_it_is_told_to_and_not_before_its_least_length() -> None:
    """Sequences of a batch end one by one; the text that a function sees has the prompt and the new token."""
    prompt, whole = PROMPTS[0], greedy(PROMPTS[0], 20)
    seen: list[list[int]] = []

    def stop(text: Sequence[int], sequence: int) -> bool:
        seen.append([sequence, *text])
        return len(text) == len(prompt) + (5 if sequence else 9)

    first, second = compiled().generate([prompt, prompt], max_new_tokens=12, stop=stop, eos_token_id=-1)
    assert (first, second) == (whole[: len(prompt) + 9], whole[: len(prompt) + 5])
    assert seen[0] == [0, *whole[: len(prompt) + 1]] and len(seen) == 14
    end = whole[len(prompt) + 3]  # an end token that the text would have soon
    later = compiled().generate(prompt, max_new_tokens=12, min_new_tokens=6, eos_token_id=end)
    assert end not in later[len(prompt) : len(prompt) + 6]
    penalty = {"presence_penalty": 0.5, "logit_bias": {65: 0.25}}
    free = compiled().generate(prompt, max_new_tokens=12, eos_token_id=-1, **penalty)
    unused = next(token for token in range(255, 0, -1) if token not in free)
    assert compiled().generate(prompt, max_new_tokens=12, min_new_tokens=4, eos_token_id=unused, **penalty) == free


def test_a_program_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    program = qc.qcompile(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    program.save(tmp_path / "linear.qca")
    with pytest.raises(ForeignFileError, match=r"qc\.load"):
        qc.load_causal_lm(tmp_path / "linear.qca")
    record = compiled().record.encode()
    program.save(tmp_path / "liar.qca", attachments={"language-model.json": record})
    with pytest.raises(CorruptFileError, match="is not what"):
        qc.load_causal_lm(tmp_path / "liar.qca")
    program.save(tmp_path / "bad.qca", attachments={"language-model.json": record.replace(b"256", b"-56")})
    with pytest.raises(CorruptFileError, match="sizes or tokens"):
        qc.load_causal_lm(tmp_path / "bad.qca")


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ids", "options", "message"), [
    ([], {}, "prompt 0 is empty"), ([256], {}, "the token 256 is not in the vocabulary"),
    ([-1], {}, "the token -1"), ([1.5], {}, "integers"), ("text", {}, "tokenizer"), (None, {}, "prompt's tokens"),
    ([1] * (LENGTH + 1), {}, "max_seq_len=160"), ([1], {"max_new_tokens": LENGTH + 1}, "max_seq_len=160"),
    ([[1]] * 4, {}, "4 sequences"), ([1], {"max_new_tokens": 3, "max_length": 9}, "give one of them"),
    ([1], {"max_new_tokens": -1}, "max_new_tokens=-1"), ([1], {"top_p": 2.0}, "top_p=2.0"),
    ([1], {"do_sample": True, "temperature": 0.0}, "temperature above 0"),
    ([1], {"attention_mask": [1]}, "lists have their own lengths"),
    (np.ones((1, 1, 1), np.int64), {}, "of shape"),
    (np.ones((1, 2), np.int64), {"attention_mask": np.ones((1, 3))}, "attention_mask has shape"),
])  # fmt: skip
def test_bad_prompts_are_refused(ids: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiled().generate(ids, **options)


def test_bad_models_and_sizes_are_refused() -> None:
    with pytest.raises(ExportError, match="takes a model of transformers"):
        qc.compile_causal_lm(torch.nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match="kv_cache='int3'"):
        qc.compile_causal_lm(model(), kv_cache="int3")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"would take \d+\.\d TB for \d+ tokens.*choose a smaller max_seq_len"):
        qc.compile_causal_lm(model(), max_seq_len=1 << 44, chunk=16)
    with pytest.raises(ArgumentError, match="max_batch=0"):
        qc.compile_causal_lm(model(), max_batch=0)
    with pytest.raises(ArgumentError, match="chunk=64 is more than max_seq_len=32"):
        qc.compile_causal_lm(model(), max_seq_len=32, chunk=64)
    with pytest.raises(ArgumentError, match="load_causal_lm"):
        qc.compile_causal_lm("model.qca")


# --- what a review found ----------------------------------------------------------------------------------------------


def test_another_thread_cannot_enter_a_conversation_that_is_in_use() -> None:
    lm = compiled()
    held = lm.conversation()
    found: list[BaseException] = []

    def intrude() -> None:
        for use in (lambda: held.read([1]), held.reset, held.fork, lambda: held.truncate(0)):
            try:
                use()
            except SessionBusyError as error:
                found.append(error)

    def start(token: int, sequence: int) -> None:
        if not found:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

    assert lm.generate(PROMPTS[0], max_new_tokens=6, conversation=held, stream=start) == greedy(PROMPTS[0], 6)
    assert len(found) == 4


def test_options_are_checked_before_the_prompt_is_read() -> None:
    lm = compiled()
    held = lm.conversation()
    for options in (
        {"logit_bias": {10**9: 1.0}},
        {"allowed": [256]},
        {"logit_bias": {1: float("inf")}},
        {"top_k": 2.5},
    ):
        with pytest.raises(ArgumentError):
            lm.generate(PROMPTS[1], conversation=held, **options)
    assert held.tokens == [[]]


def test_a_conversation_of_another_program_with_the_same_sizes_is_refused(tmp_path: Path) -> None:
    lm = compiled()
    lm.conversation().save(tmp_path / "talk.npz")
    with np.load(tmp_path / "talk.npz") as file:
        arrays = dict(file)
    arrays["program"] = arrays["program"][::-1]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(CorruptFileError, match="another program"):
        lm.conversation().restore(tmp_path / "other.npz")
    arrays["tokens:0"] = np.array([300])
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(CorruptFileError, match="the token 300"):
        lm.conversation().restore(tmp_path / "wrong.npz")


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"rows": LENGTH}, CorruptFileError, "sizes or tokens"),
    ({"chunk": LENGTH + 1}, CorruptFileError, "sizes or tokens"),
    ({"chunk": 8}, CorruptFileError, "is not what"), ({"max_batch": 2}, CorruptFileError, "is not what"),
    ({"rows": LENGTH + 17}, CorruptFileError, "is not what"), ({"version": 5, "more": 1}, NewerFileError, "version 5"),
    ({"version": -1}, CorruptFileError, "sizes or tokens"), ({"samples": False}, CorruptFileError, "is not what"),
])  # fmt: skip
def test_a_record_is_held_against_the_program(
    tmp_path: Path, changes: dict[str, int], kind: type[Exception], message: str
) -> None:
    record = json.loads(compiled().record.encode()) | changes
    compiled().run.save(tmp_path / "lm.qca", attachments={"language-model.json": json.dumps(record).encode()})
    with pytest.raises(kind, match=message):
        qc.load_causal_lm(tmp_path / "lm.qca")


def test_a_table_of_positions_limits_the_length() -> None:
    model = load("tests/models/zoo.py").gpt2().model
    with pytest.raises(ArgumentError, match=r"'transformer\.wpe' has 64 positions"):
        qc.compile_causal_lm(model, max_seq_len=65)


def test_modules_that_train_train_after_compiling() -> None:
    model = load("tests/lm/test_own_attention.py").build("bart").train()
    with pytest.raises(ExportError, match="compile it with max_batch=1"):
        qc.compile_causal_lm(model, max_seq_len=16, max_batch=2)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
