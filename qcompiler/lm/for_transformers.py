"""A compiled language model where transformers calls `model.generate`: in `pipeline("text-generation", model=…)`.

    pipe = pipeline("text-generation", model=qc.for_transformers(lm), tokenizer=tokenizer)
    pipe("import os", max_new_tokens=32)

Names, defaults and results are those of transformers' `generate`: padding stays at the left, new tokens follow, and
what is not supported is an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig, PretrainedConfig, StoppingCriteriaList, StopStringCriteria

from qcompiler.errors import ArgumentError
from qcompiler.lm.model import CausalLM

NEW_TOKENS = 20
"""transformers' default, where neither max_new_tokens nor max_length is given."""
TOP_K = 50
"""transformers' default, where tokens are drawn."""

_PASSED = ("temperature", "top_p", "min_p", "repetition_penalty")
_TAKEN = {
    *_PASSED, "do_sample", "top_k", "max_new_tokens", "max_length", "num_return_sequences", "eos_token_id",
    "pad_token_id", "bos_token_id", "seed", "min_new_tokens", "min_length", "stop_strings",
}  # fmt: skip
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "use_cache": (True, False),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "typical_p": (1.0,),
    "top_h": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "return_dict_in_generate": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "synced_gpus": (False,),
    "logits_processor": ([], ()),
}
"""Options of transformers that this does not have, with the values at which they change nothing. None never does."""


class TransformersModel:
    """What transformers' text generation needs of a model, with a `CausalLM` behind it.

    The class of an instance has the name of the architecture, which pipelines look at.
    """

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        name = lm.device if lm.device.startswith("cuda") else "cpu"  # where ids and results lie; sim:N is on the host
        self.device, self.dtype = torch.device(name), torch.float32
        ends = sorted({*lm.record.end_ids, *(lm.text.end_ids if lm.text is not None else ())})
        special: dict[str, Any] = {
            "bos_token_id": lm.record.start_id, "eos_token_id": ends or None, "pad_token_id": None,
        }  # fmt: skip
        config, generation = cast(Any, PretrainedConfig), cast(Any, GenerationConfig)  # they have no types
        self.config: PretrainedConfig = config(
            vocab_size=lm.record.vocabulary, max_position_embeddings=lm.max_seq_len,
            architectures=[lm.record.architecture], **special,
        )  # fmt: skip
        self.generation_config: GenerationConfig = generation(**special)
        self.input_modalities = self.output_modalities = ("text",)

    def can_generate(self) -> bool:
        return True

    def eval(self) -> TransformersModel:
        return self

    def to(self, device: Any) -> TransformersModel:
        """The model itself. ArgumentError for another device than its own."""
        if torch.device(device).type != self.device.type:
            raise ArgumentError(
                f"the language model runs on {self.lm.device}: load it there with qc.load_causal_lm(path, "
                f"device={str(device)!r}), or give the pipeline device={str(self.device)!r}"
            )
        return self

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """The prompts with the tokens generated after them, (b · num_return_sequences, longest), int64.

        Prompts are (b, s), padded at the left where `attention_mask` is 0 (or where the tokens are `pad_token_id`, if
        that ends no text).  Sequences that ended are filled up with `pad_token_id`, else with the first end token.
        `stop_strings` need `tokenizer`, one of transformers.  Each of `stopping_criteria` is called with one row (1, s)
        at a time, padding included, and with None for the scores.

        Samples follow torch's random numbers (`torch.manual_seed`), or `seed`.  More sequences than the model's
        `max_batch` run in several groups.

        ArgumentError names options that are not supported, and values out of range.
        """
        given = self._options(generation_config, options)
        ids = self._prompts(inputs if inputs is not None else input_ids, given)
        ends, pad = _listed(given["eos_token_id"]), given["pad_token_id"]
        mask = _mask(ids, attention_mask, pad, ends)
        count, copies = ids.shape[0], given["num_return_sequences"] or 1
        if copies > 1 and not given["do_sample"]:
            raise ArgumentError(f"num_return_sequences={copies} without do_sample=True would give equal texts")
        if streamer is not None and count * copies > 1:
            raise ArgumentError(f"a streamer shows one sequence; there are {count * copies}")
        prompts = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True) for _ in range(copies)]
        how = self._how(given, ids.shape[1], ends, streamer)
        criteria = _criteria(given["stop_strings"], stopping_criteria, tokenizer)
        if streamer is not None:
            streamer.put(ids.cpu())
        new = self._generated(prompts, how, _stop(criteria, ids.repeat_interleave(copies, 0), prompts))
        if streamer is not None:
            streamer.end()
        fill = pad if pad is not None else ends[0] if ends else 0
        longest = max(map(len, new))
        tail = torch.tensor([row + [fill] * (longest - len(row)) for row in new], dtype=torch.int64)
        return torch.cat([ids.repeat_interleave(copies, 0), tail.reshape(len(new), longest).to(ids.device)], 1)

    def _how(self, given: dict[str, Any], width: int, ends: list[int], streamer: Any) -> dict[str, Any]:
        """The options of `CausalLM.generate`. Prompts have `width` tokens with their padding."""
        least = max(given["min_new_tokens"] or 0, (given["min_length"] or 0) - width)
        how: dict[str, Any] = {
            "do_sample": False, "max_new_tokens": _new_tokens(given, width), "min_new_tokens": least,
            "eos_token_id": ends or -1,
        }  # fmt: skip
        if given["do_sample"]:
            seed = given["seed"] if given["seed"] is not None else int(torch.randint(2**62, ()))
            top_k = TOP_K if given["top_k"] is None else given["top_k"]
            how |= {"do_sample": True, "seed": seed, "top_k": top_k}
            how |= {name: given[name] for name in ("temperature", "top_p", "min_p") if given[name] is not None}
        if given["repetition_penalty"] is not None:
            how["repetition_penalty"] = given["repetition_penalty"]
        if streamer is not None:
            how["stream"] = lambda token, _sequence: streamer.put(torch.tensor([token]))
        return how

    def _generated(
        self, prompts: list[list[int]], how: dict[str, Any], stop: Callable[[Sequence[int], int], bool] | None
    ) -> list[list[int]]:
        """The new tokens of each prompt. More of them than `max_batch` run in groups."""
        new: list[list[int]] = []
        for at in range(0, len(prompts), self.lm.max_batch):
            group = prompts[at : at + self.lm.max_batch]
            within = None if stop is None else functools.partial(_of_group, stop, at)
            found = self.lm.generate(group, stop=within, **how)
            new += [row[len(prompt) :] for row, prompt in zip(found, group, strict=True)]
            if "seed" in how:
                how["seed"] = (how["seed"] + 1) % 2**64  # the next group draws other numbers
        return new

    def _options(self, config: GenerationConfig | None, options: dict[str, Any]) -> dict[str, Any]:
        """The options by name, None where they are not given. ArgumentError for those that are not supported."""
        named = {**({} if config is None else config.to_diff_dict()), **options}
        refused = [f"{name}={value!r}"[:80] for name, value in named.items() if not _harmless(name, value)]
        if refused:
            raise ArgumentError(
                f"a compiled language model does not take {', '.join(sorted(refused))}: leave them out. There are "
                f"{', '.join(sorted(_TAKEN))}, attention_mask and streamer; lm.generate has more options of its own"
            )
        own = self.generation_config.to_diff_dict()
        return {name: named[name] if named.get(name) is not None else own.get(name) for name in _TAKEN}

    def _prompts(self, ids: torch.Tensor | None, given: dict[str, Any]) -> torch.Tensor:
        if ids is None:
            if given["bos_token_id"] is None:
                raise ArgumentError("generate needs input_ids: the model has no token that begins a text")
            return torch.tensor([[int(given["bos_token_id"])]])
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.shape[0]:
            what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ArgumentError(f"input_ids are a tensor of integers (b, s), not {what}")
        return ids.to(torch.int64)


def for_transformers(lm: CausalLM) -> TransformersModel:
    """The language model as an object that stands where transformers calls `model.generate`; see `TransformersModel`.

    `transformers.pipeline("text-generation", model=qc.for_transformers(lm), tokenizer=tokenizer)` runs it.
    """
    name = lm.record.architecture
    kind = type(name if name.isidentifier() else "TransformersModel", (TransformersModel,), {})
    made: TransformersModel = kind(lm)
    return made


def _harmless(name: str, value: Any) -> bool:
    """Whether an option is supported, or changes nothing at this value."""
    if name in _TAKEN or name == "transformers_version":
        return True
    values = _WITHOUT_EFFECT.get(name)
    if value is None:
        return values is not None or name in vars(cast(Any, GenerationConfig)())
    return values is not None and any(type(value) is type(each) and value == each for each in values)


def _listed(ends: Any) -> list[int]:
    """End tokens in their order; -1 (none) and None give an empty list."""
    if ends is None:
        return []
    listed = ends.reshape(-1).tolist() if isinstance(ends, torch.Tensor) else ends
    return [int(each) for each in (listed if isinstance(listed, Sequence) else [listed]) if int(each) != -1]


def _mask(ids: torch.Tensor, given: torch.Tensor | None, pad: int | None, ends: list[int]) -> torch.Tensor:
    """(b, s), true for tokens. ArgumentError unless each row is padding, then tokens."""
    if given is not None:
        mask = torch.as_tensor(given, device=ids.device).bool()
        if mask.shape != ids.shape:
            raise ArgumentError(f"attention_mask has shape {list(mask.shape)}, input_ids have {list(ids.shape)}")
    elif pad is not None and pad not in ends:
        mask = ids != pad
    else:
        mask = torch.ones_like(ids, dtype=torch.bool)
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(1) if ids.shape[1] > 1 else torch.zeros(len(ids), dtype=torch.bool)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ArgumentError(
            f"row {row} of input_ids has padding behind a token: pad at the left (tokenizer.padding_side = 'left')"
        )
    return mask


def _criteria(strings: Any, given: Sequence[Callable[..., Any]] | None, tokenizer: Any) -> Any:
    """transformers' list of what ends a text; empty if nothing but end tokens does. ArgumentError without tokenizer."""
    criteria = StoppingCriteriaList(given or [])
    if strings:
        if tokenizer is None:
            raise ArgumentError(
                f"stop_strings={strings!r} need the tokenizer that they are looked for with: generate(tokenizer=…)"
            )
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria


def _stop(criteria: Any, ids: torch.Tensor, prompts: list[list[int]]) -> Callable[[Sequence[int], int], bool] | None:
    """Whether a criterion ends the text of row i: it sees the row of `ids`, padding included, and the new tokens."""
    if not criteria:
        return None

    def is_done(text: Sequence[int], i: int) -> bool:
        new = torch.tensor(text[len(prompts[i]) :], dtype=torch.int64, device=ids.device)
        return bool(criteria(torch.cat([ids[i], new])[None], None).all())

    return is_done


def _of_group(stop: Callable[[Sequence[int], int], bool], begin: int, text: Sequence[int], i: int) -> bool:
    """`stop` for the i-th sequence of the group that begins at the prompt `begin`."""
    return stop(text, begin + i)


def _new_tokens(given: dict[str, Any], prompt: int) -> int:
    """How many tokens may be added. As in transformers, max_length counts the padding of the prompts."""
    if given["max_new_tokens"] is not None:
        return int(given["max_new_tokens"])
    if given["max_length"] is None:
        return NEW_TOKENS
    if given["max_length"] <= prompt:
        raise ArgumentError(f"max_length={given['max_length']}: the prompts have {prompt} tokens; set max_new_tokens")
    return int(given["max_length"]) - prompt


__all__ = ["TransformersModel", "for_transformers"]
