"""Generation on a device: a step is the replay of one graph, and gives the texts of the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from by_path import load

import qcompiler as qc
from qcompiler.lm import conversation
from qcompiler.runtime.graph import CapturedGraph

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1]]


@cache
def compiled(device: str, batch: int) -> qc.CausalLM:
    model = load("tests/models/zoo.py").DECODERS["llama"].build()
    return qc.compile_causal_lm(model, quant="nf4", max_seq_len=48, chunk=16, max_batch=batch, device=device)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of each replay: (sequences, asked tokens)."""
    seen: list[tuple[int, int]] = []
    replay = CapturedGraph.replay

    def counted(self: CapturedGraph, *args: Any, **kwargs: Any) -> Any:
        seen.append((len(kwargs["ids"]), len(kwargs["wanted"])))
        return replay(self, *args, **kwargs)

    monkeypatch.setattr(CapturedGraph, "replay", counted)
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
