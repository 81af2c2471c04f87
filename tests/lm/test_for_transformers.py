"""`qc.for_transformers(lm)` in transformers' own pipeline, beside transformers' model, on four trained layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from by_path import ROOT

import qcompiler as qc
from qcompiler.errors import ArgumentError

OWN = ROOT / "examples" / "models" / "tiny_llama"
PROMPTS = ["def read(path):\n", "import o"]
PAD = 0


@cache
def theirs() -> Any:
    """Fewer layers of the repository's model repeat one token, which no text to stop at is in."""
    model = transformers.LlamaForCausalLM.from_pretrained(
        OWN, dtype=torch.float32, local_files_only=True, num_hidden_layers=4
    ).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=0, pad_token_id=0)
    return model


@cache
def ours() -> Any:
    return qc.for_transformers(qc.compile_causal_lm(theirs(), max_seq_len=96, max_batch=2, chunk=16))


@cache
def tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(OWN / "tokenizer.json"), pad_token="Ā", eos_token="Ā"
    )


def pipe(model: Any, **options: Any) -> Any:
    return transformers.pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu", **options)


def padded(texts: list[str]) -> Any:
    return tokenizer()(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)


@pytest.mark.parametrize("options", [
    {"max_new_tokens": 24, "do_sample": False},
    {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3, "return_full_text": False},
    {"max_length": 24, "do_sample": False, "use_cache": True, "num_beams": 1},
    {"max_new_tokens": 8, "do_sample": True, "top_k": 1, "temperature": 0.4},
    {"max_new_tokens": 9, "do_sample": False, "eos_token_id": [ord("\n")], "return_tensors": True},
], ids=["greedy", "penalty", "max_length", "one candidate", "end token"])  # fmt: skip
def test_a_pipeline_prints_what_transformers_model_prints(options: dict[str, Any]) -> None:
    ours_, theirs_ = pipe(ours()), pipe(theirs())
    assert ours_(PROMPTS[0], **options) == theirs_(PROMPTS[0], **options)
    if "repetition_penalty" not in options:  # transformers counts padding as text that was seen
        assert ours_(PROMPTS, batch_size=2, **options) == theirs_(PROMPTS, batch_size=2, **options)


def test_defaults_of_a_pipeline_draw_tokens_that_follow_torchs_seed() -> None:
    made = pipe(ours(), max_new_tokens=40)
    texts = []
    for seed in (1, 1, 2):
        transformers.set_seed(seed)
        texts.append(made(PROMPTS[0])[0]["generated_text"])
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(PROMPTS[0])


def test_prompts_stay_padded_at_the_left_and_results_are_transformers() -> None:
    given = padded([*PROMPTS, "x = "])  # three sequences in groups of two
    found = ours().generate(**given, max_new_tokens=10, do_sample=False)
    assert torch.equal(found, theirs().generate(**given, max_new_tokens=10, do_sample=False))
    without = ours().generate(given["input_ids"], max_new_tokens=10, pad_token_id=PAD, eos_token_id=-1)
    assert torch.equal(without, found), "the mask follows from the padding token"
    assert ours().generate(**given).shape[1] == given["input_ids"].shape[1] + 20, "transformers' default"


@pytest.mark.parametrize("options", [
    {"stop_strings": ["turn", "f._re"]},
    {"stop_strings": "(", "max_new_tokens": 40},
    {"eos_token_id": [ord(" "), ord("\n")], "min_new_tokens": 7},
    {"eos_token_id": [ord(" "), ord("\n")], "min_length": 20, "repetition_penalty": 1.0},
    {"eos_token_id": ord("e"), "min_new_tokens": 34},  # no fewer than max_new_tokens
    {"eos_token_id": [ord("e"), 0], "min_new_tokens": 3, "stop_strings": ["_rea"], "pad_token_id": 1},
    {"generation_config": transformers.GenerationConfig(stop_strings=["re"], max_new_tokens=34, eos_token_id=0)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("count", [1, 3])
def test_texts_end_where_transformers_ends_them(options: dict[str, Any], count: int) -> None:
    texts = [*PROMPTS, "x = "][:count]  # three are two groups
    given = ({} if "generation_config" in options else {"max_new_tokens": 34}) | options
    given = {"do_sample": False, "pad_token_id": PAD, "tokenizer": tokenizer()} | given
    found, expected = (model.generate(**padded(texts), **given) for model in (ours(), theirs()))
    assert torch.equal(found, expected)
    if count == 1 and "min_new_tokens" not in options and "min_length" not in options:
        assert found.shape[1] < padded(texts)["input_ids"].shape[1] + given.get("max_new_tokens", 34), (
            "nothing ended the text"
        )


def test_stopping_criteria_see_each_row_with_its_padding() -> None:
    seen: list[tuple[int, ...]] = []

    class FiveOrSpace(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            seen.append(tuple(input_ids.shape))
            return (input_ids[:, -1] == ord(" ")) | torch.tensor(input_ids.shape[1] >= 24)

    given = {
        **padded([*PROMPTS, "x = "]),
        "do_sample": False,
        "max_new_tokens": 30,
        "stopping_criteria": [FiveOrSpace()],
    }
    found = ours().generate(**given)
    assert seen[0] == (1, 17) and {rows for rows, _ in seen} == {1}
    assert torch.equal(found, theirs().generate(**given))


def test_no_sampled_text_ends_before_its_least_length() -> None:
    ids = padded(PROMPTS[:1])["input_ids"]
    ends = [token for token in range(256) if token != ord("a")]  # nothing else may be drawn at first
    found = ours().generate(
        ids, do_sample=True, temperature=2.0, eos_token_id=ends, min_new_tokens=5, max_new_tokens=9,
        num_return_sequences=3, repetition_penalty=1.1, seed=1,
    )  # fmt: skip
    new = found[:, ids.shape[1] :]
    assert (new[:, :5] == ord("a")).all() and (new[:, 5] != ord("a")).any()


def test_each_returned_sequence_draws_its_own_tokens() -> None:
    ids = padded(PROMPTS[:1])["input_ids"]
    found = ours().generate(ids, do_sample=True, temperature=2.0, max_new_tokens=12, num_return_sequences=5, seed=4)
    assert found.shape[0] == 5 and torch.equal(found[:, : ids.shape[1]], ids.expand(5, -1))
    assert len({tuple(row) for row in found.tolist()}) == 5
    again = ours().generate(ids, do_sample=True, temperature=2.0, max_new_tokens=12, num_return_sequences=5, seed=4)
    assert torch.equal(found, again)


def test_a_streamer_gets_prompt_tokens_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    for model in (ours(), theirs()):
        streamer = transformers.TextStreamer(tokenizer())
        model.generate(**padded(PROMPTS[:1]), max_new_tokens=16, do_sample=False, streamer=streamer)
    first, second = capsys.readouterr().out.split(PROMPTS[0])[1:]
    assert first == second and first


@pytest.mark.parametrize(("options", "message"), [
    ({"num_beams": 3, "penalty_alpha": 0.5}, r"does not take num_beams=3, penalty_alpha=0\.5: leave them out"),
    ({"stop_strings": ["x"]}, r"stop_strings=\['x'\] need the tokenizer .* generate\(tokenizer="),
    ({"no_such_option": None}, "does not take no_such_option=None"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1: choose 0 or more"),
    ({"max_time": 2.0, "logits_processor": [len]}, r"does not take logits_processor=\[.*\], max_time=2\.0"),
    ({"generation_config": transformers.GenerationConfig(num_beams=2)}, "does not take num_beams=2"),
    ({"num_return_sequences": 2}, "without do_sample=True"),
    ({"max_length": 3}, "max_length=3: the prompts have 16 tokens"),
    ({"max_new_tokens": 100}, "compiled for max_seq_len=96"),
    ({"attention_mask": torch.tensor([[1] * 15 + [0]])}, "row 0 of input_ids has padding behind a token"),
    ({"attention_mask": torch.ones(1, 3)}, r"attention_mask has shape \[1, 3\]"),
    ({"temperature": -1.0, "do_sample": True}, "temperature=-1.0"),
])  # fmt: skip
def test_what_is_not_supported_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ours().generate(padded(PROMPTS[:1])["input_ids"], **options)


def test_shapes_devices_and_empty_prompts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tensor of integers \(b, s\), not torch.float32 \[1, 2\]"):
        ours().generate(torch.ones(1, 2))
    with pytest.raises(ArgumentError, match="runs on cpu: load it there"):
        ours().to("cuda:0")
    with pytest.raises(ArgumentError, match="a streamer shows one sequence; there are 2"):
        ours().generate(**padded(PROMPTS), streamer=transformers.TextStreamer(tokenizer()))
    begun = ours().generate(max_new_tokens=4, do_sample=False)
    assert begun.tolist() == theirs().generate(max_new_tokens=4, do_sample=False, bos_token_id=0).tolist()
