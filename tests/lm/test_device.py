"""Generation on a device: a step is the replay of one graph, and gives the texts of the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

import qcompiler as qc
from qcompiler.errors import ArgumentError, DeviceUnavailableError
from qcompiler.lm import conversation
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.graph import CapturedGraph

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1]]


@cache
def compiled(device: str, batch: int) -> qc.CausalLM:
    model = load("tests/models/zoo.py").DECODERS["llama"].build(num_hidden_layers=1)
    return qc.compile_causal_lm(model, quant="nf4", max_seq_len=48, chunk=16, max_batch=batch, device=device)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of each replay: (sequences, asked tokens)."""
    seen: list[tuple[int, int]] = []
    replay, replay_on_host = CapturedGraph.replay, CapturedGraph.replay_on_host

    def counted(self: CapturedGraph, *args: Any, **kwargs: Any) -> Any:
        seen.append((len(kwargs["ids"]), len(kwargs["wanted"])))
        return replay(self, *args, **kwargs)

    def counted_on_host(self: CapturedGraph, arguments: Any, results: Any) -> None:
        seen.append((len(arguments["ids"]), len(arguments["wanted"])))
        replay_on_host(self, arguments, results)

    monkeypatch.setattr(CapturedGraph, "replay", counted)
    monkeypatch.setattr(CapturedGraph, "replay_on_host", counted_on_host)
    return seen


@pytest.mark.slow
def test_each_step_is_one_replay_and_the_text_that_of_the_cpu(replays: list[tuple[int, int]]) -> None:
    wanted = compiled("cpu", 1).generate(PROMPTS[0], max_new_tokens=9)
    assert not replays
    lm = compiled("sim:0", 1)
    talk = lm.conversation()
    assert lm.generate(PROMPTS[0], max_new_tokens=9, conversation=talk) == wanted
    assert replays == [(1, 1)] * 8, "the first of nine tokens is the prompt's"
    assert len(talk._graphs) == 1
    talk.truncate(3)
    again = lm.generate(PROMPTS[0][3:], max_new_tokens=9, conversation=talk)
    assert again == wanted[3:]
    other = talk.fork()
    for each in (talk, other):  # a graph reads the cache of its own conversation
        each.truncate(5)
    a, b = talk.read([11])[0], other.read([12])[0]
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(talk.read([12])[0].shape, b.shape)
    talk.truncate(5)
    np.testing.assert_array_equal(talk.read([12])[0], b)


def test_a_conversation_whose_first_call_is_one_token_keeps_its_cache(replays: list[tuple[int, int]]) -> None:
    """Its graph is captured for that token, which runs twice and is written to the cache once."""
    lm = compiled("sim:0", 1)
    steps, whole = lm.conversation(), lm.conversation()
    for token in PROMPTS[0]:
        last = steps.read([token])[0]
    assert len(replays) == len(PROMPTS[0])
    wanted = whole.read(PROMPTS[0])[0]
    np.testing.assert_allclose(last, wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.9, "seed": 4},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"top_p": 0.5, "presence_penalty": -1.5, "logit_bias": {3: 5.0, 7: -2.0}, "seed": 2**64 - 1},
    {"temperature": 1.0, "allowed": [3, 9, 11, 150]}, {"allowed": lambda tokens: [len(tokens) % 7, 9]},
]  # fmt: skip


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_program_draws_the_tokens_that_the_host_draws_from_its_logits(batch: int) -> None:
    """The host's sampler is the oracle: it gets the logits of a conversation that reads and does not draw."""
    lm, prompts = compiled("cpu", batch), PROMPTS[:batch]
    for options in OPTIONS:
        found = lm.generate(prompts, max_new_tokens=6, **options)
        lm.record = msgspec.structs.replace(lm.record, samples=False)  # `Draws` then reads logits
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(conversation.Conversation, "read", logits_alone(lm))
                assert lm.generate(prompts, max_new_tokens=6, **options) == found, options
        finally:
            lm.record = msgspec.structs.replace(lm.record, samples=True)


def logits_alone(lm: qc.CausalLM) -> Any:
    """`Conversation.read` for a program that samples, in a conversation whose record says that it does not."""
    read = conversation.Conversation.read

    def reading(self: conversation.Conversation, *args: Any, **kwargs: Any) -> Any:
        self.record = msgspec.structs.replace(self.record, samples=True)
        try:
            return read(self, *args, **kwargs)
        finally:
            self.record = lm.record

    return reading


@pytest.mark.slow
def test_tokens_are_the_same_on_every_backend(replays: list[tuple[int, int]]) -> None:
    """With every option, with sequences that end early, and after forgetting: tallies begin anew with each text."""
    for options in OPTIONS:
        wanted = compiled("cpu", 3).generate(PROMPTS, max_new_tokens=9, **options)
        lm = compiled("sim:0", 3)
        assert lm.generate(PROMPTS, max_new_tokens=9, **options) == wanted
        ends = wanted[0][len(PROMPTS[0]) + 2]
        early = [
            each.generate(PROMPTS, max_new_tokens=9, eos_token_id=ends, **options) for each in (compiled("cpu", 3), lm)
        ]
        assert early[0] == early[1]
        talk = lm.conversation(3)
        lm.generate(PROMPTS, max_new_tokens=9, conversation=talk, **options)
        other = talk.fork()
        for held in (talk, other):
            for i in range(3):
                held.truncate(0, i)
            assert lm.generate(PROMPTS, max_new_tokens=9, conversation=held, **options) == wanted
    assert replays


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_copies_arguments_to_the_device_and_one_token_a_sequence_back(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, prompts = compiled("sim:0", batch), [prompt[:1] for prompt in PROMPTS[:batch]]
    copied: list[tuple[str, int]] = []
    for name in ("upload", "download"):
        real = getattr(SimBackend, name)

        def counted(
            self: Any, stream: Any, to: int, source: int, nbytes: int, name: str = name, real: Any = real
        ) -> Any:
            copied.append((name, nbytes))
            return real(self, stream, to, source, nbytes)

        monkeypatch.setattr(SimBackend, name, counted)
    talk = lm.conversation(batch)
    lm.generate(prompts, max_new_tokens=3, conversation=talk)  # records the graph
    options = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}}
    steps = []
    last = [[tokens[-1]] for tokens in lm.generate([[5]] * batch, max_new_tokens=1, conversation=talk)]
    lm.generate(last, max_new_tokens=4, conversation=talk, stream=lambda *_: steps.append(copied.copy()), **options)
    a_step = copied[copied.index(("download", 8 * batch), len(steps[-2 * batch]) - 1) + 1 :]
    numbers, words = -(-8 * batch // 16) * 16, 8 * 10 * batch  # four arguments of a number for each sequence, and `how`
    assert sorted(a_step) == [("download", 8 * batch), ("upload", 4 * numbers + words)]


def test_an_id_that_the_program_keeps_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step after a draw reads the token from device memory: the host sends `LAST_DRAWN` in its place."""
    lm, sent = compiled("cpu", 1), []
    call = type(lm.conversation()._session).__call__

    def counted(self: Any, **given: Any) -> Any:
        sent.append(given["ids"].reshape(-1).tolist())
        return call(self, **given)

    monkeypatch.setattr(type(lm.conversation()._session), "__call__", counted)
    found = lm.generate(PROMPTS[0], max_new_tokens=4)
    assert sent == [PROMPTS[0], *[[conversation.LAST_DRAWN]] * 3]
    talk = lm.conversation()
    talk.read(found[:-1])
    assert lm.generate(found[-1:], max_new_tokens=2, conversation=talk) == [
        *found[-1:],
        *lm.generate(found, max_new_tokens=2)[-2:],
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)])
def test_no_token_is_an_error_that_says_why(device: str) -> None:
    lm = compiled(device, 1)
    with pytest.raises(ArgumentError, match="token 2 of sequence 0 cannot be chosen: no token is allowed"):
        lm.generate([3, 4], max_new_tokens=2, allowed=lambda tokens: [])
    with pytest.raises(ArgumentError, match="the logits hold NaN or infinity"):
        lm.generate([3, 4], max_new_tokens=2, frequency_penalty=-3e38, presence_penalty=-3e38, logit_bias={7: 3e38})
    assert len(lm.generate([3, 4], max_new_tokens=2)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kept", [16, 1])
def test_sequences_that_end_earlier_leave_the_replays(
    kept: int, replays: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of sequences has a graph of its own, and none changes a text; nor does a graph that made room."""
    monkeypatch.setattr(conversation, "GRAPHS", kept)
    wanted = compiled("cpu", 3).generate(PROMPTS, max_new_tokens=6)
    ends = wanted[0][len(PROMPTS[0]) + 2]  # the first sequence ends after three tokens
    expected = compiled("cpu", 3).generate(PROMPTS, max_new_tokens=6, eos_token_id=ends)
    assert compiled("sim:0", 3).generate(PROMPTS, max_new_tokens=6, eos_token_id=ends) == expected
    assert len(replays) == 5 and (3, 3) in replays and len(set(replays)) > 1


def test_a_model_is_compiled_for_a_gpu_that_is_not_here(tmp_path: Any) -> None:
    model = load("tests/models/zoo.py").DECODERS["llama"].build(num_hidden_layers=1)
    lm = qc.compile_causal_lm(
        model, quant="nf4", max_seq_len=48, chunk=16, device="cuda:0", targets=["sm_90a"], kv_cache="fp16"
    )
    assert lm.device == "cuda:0"
    assert "48 rows" in lm.cache_report()
    lm.save(tmp_path / "model.qca")
    if not registry.is_available("cuda:0"):
        with pytest.raises(DeviceUnavailableError, match="cuda:0"):
            lm.generate(PROMPTS[0])
    moved = qc.load_causal_lm(tmp_path / "model.qca", device="sim:0")
    wanted = qc.compile_causal_lm(model, quant="nf4", max_seq_len=48, chunk=16, kv_cache="fp16")
    assert moved.generate(PROMPTS[0], max_new_tokens=2) == wanted.generate(PROMPTS[0], max_new_tokens=2)
