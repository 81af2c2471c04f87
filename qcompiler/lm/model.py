"""`CausalLM`: a compiled language model that generates text. It needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qcompiler.errors import ArgumentError, CorruptFileError
from qcompiler.lm.cache_layers import cache_lines, wrong_cache
from qcompiler.lm.conversation import DRAWN, MARKS, Conversation, tokens_of
from qcompiler.lm.draws import Draws
from qcompiler.lm.record import MEMBER, LanguageModel, mark_slots
from qcompiler.lm.sampling import Allowed, Sampling
from qcompiler.lm.text import Text
from qcompiler.runtime import load
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.units import counted

if TYPE_CHECKING:
    from qcompiler.inspect.upstream import UpstreamModule, Weights
    from qcompiler.program import Program

Stream = Callable[[int, int], object]
"""Is called with each new token and the index of its sequence."""

Stop = Callable[[Sequence[int], int], bool]
"""Is called with the tokens of a sequence so far, prompt and new one included, and its index; true ends the text."""

TEXT = "tokenizer.json"
"""The attachment that holds the tokenizer."""

NEW_TOKENS = 128
"""How many tokens `generate` adds at most if nothing else is said."""


class CausalLM:
    """A language model as a program, with its sizes: `qc.compile_causal_lm` and `qc.load_causal_lm` return it.

    `program` is the compiled program (its IR, report and ledger) of a model that was compiled here, else None; `run` is
    the loaded one.  `record` has the sizes, and `text` the tokenizer, or None: then ids go in and out.
    """

    def __init__(
        self, run: LoadedProgram | None, record: LanguageModel, program: Program | None = None, text: Text | None = None
    ) -> None:
        """Without `run` the program is loaded when something runs: a model may be compiled for a GPU elsewhere."""
        self._run, self.record, self.program, self.text = run, record, program, text

    @property
    def run(self) -> LoadedProgram:
        """The loaded program. DeviceUnavailableError if it was compiled for a GPU that is not present."""
        if self._run is None:
            assert self.program is not None
            self._run = self.program.run
        return self._run

    def _made(self) -> Program | LoadedProgram:
        """The compiled program, or the loaded one of a model that was not compiled here."""
        return self.program if self.program is not None else self.run

    def require_text(self) -> Text:
        """The tokenizer. ArgumentError without one."""
        if self.text is None:
            raise ArgumentError(
                "this language model has no tokenizer: compile it from a folder or a .gguf file that has one, or with "
                "compile_causal_lm(text=qcompiler.lm.text.Text.from_folder(…))"
            )
        return self.text

    @property
    def device(self) -> str:
        return self._made().device

    @property
    def max_seq_len(self) -> int:
        """The number of tokens, prompt included, that one sequence may have."""
        return self.record.max_seq_len

    @property
    def max_batch(self) -> int:
        """The number of sequences that one conversation may have."""
        return self.record.max_batch

    def cache_report(self) -> str:
        """The rows and bytes of the cache, by kind of layer."""
        return "\n".join(cache_lines(self.record, self._made().plan))

    def conversation(self, sequences: int = 1) -> Conversation:
        """A new conversation with a cache of its own, for that many sequences."""
        return Conversation(self.run, self.record, sequences)

    def generate(
        self,
        ids: Any = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        min_new_tokens: int = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        do_sample: bool | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        allowed: Allowed | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop: Stop | None = None,
        stream: Stream | None = None,
        conversation: Conversation | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
    ) -> Any:
        """The prompt's tokens and those generated after them, in the form of the prompt.

        `ids` (or `input_ids`) are a list of tokens, a list of such lists of any lengths, or an array or tensor (b, s),
        with `attention_mask` (b, s) where rows are padded.  Lists give lists; arrays and tensors give arrays and
        tensors (b, longest), filled up at the end with `pad_token_id` (by default the first end token, else 0).

        The most likely token is taken unless `temperature`, `top_k`, `top_p`, `min_p` or `do_sample` asks for samples;
        then the temperature is 1 if it is not given.  docs/language-models.md describes every option.  A sequence ends
        with an end token (`eos_token_id`; by default the model's own), or after `max_new_tokens` (128, or as many as
        the cache takes), or at `max_length` tokens with the prompt, or where `stop(text, sequence)` is true for its
        tokens so far.  No end token is chosen for the first `min_new_tokens` tokens.

        `stream(token, sequence)` is called with every new token.  `conversation` is one to go on with: prompt and new
        tokens are added to those that it has, apart from the last new one, which no call has read.  The next prompt
        begins with that token.

        ArgumentError for a prompt that is empty, too long, or has unknown tokens, and for options out of range.
        """
        prompts, give_back = prompts_of(ids if input_ids is None else input_ids, attention_mask)
        if input_ids is not None and ids is not None:
            raise ArgumentError("`ids` and `input_ids` are the same argument; give one of them")
        held = conversation if conversation is not None else self.conversation(len(prompts))
        if len(held) != len(prompts):
            raise ArgumentError(
                f"{counted(len(prompts), 'prompt')} for a conversation of {counted(len(held), 'sequence')}"
            )
        ends = self._ends(eos_token_id)
        sampling = Sampling(
            temperature=_temperature(temperature, do_sample, (top_k, top_p, min_p)), top_k=top_k or 0,
            top_p=1.0 if top_p is None else top_p, min_p=min_p or 0.0, repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, bias=logit_bias or {},
            allowed=allowed, seed=seed, ends=ends, min_new_tokens=min_new_tokens,
        )  # fmt: skip
        sampling.check(self.record.vocabulary)
        found = [list(prompt) for prompt in prompts]
        with held.alone():
            limits = self._limits(prompts, held, max_new_tokens, max_length)
            for token, sequence in self._steps(held, prompts, sampling, limits, stop):
                found[sequence].append(token)
                if stream is not None:
                    stream(token, sequence)
        fill = pad_token_id if pad_token_id is not None else next(iter(sorted(ends)), 0)
        return give_back(found, fill)

    def complete(self, prompt: str, **options: Any) -> str:
        """The text that follows a prompt; `options` are those of `generate`."""
        text = self.require_text()
        ids = text.encode(prompt)
        return text.decode(self.generate(ids, **options)[len(ids) :], continues=True)

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The answer to the last message of `[{"role": "user", "content": "…"}]`, by the model's chat template."""
        text = self.require_text()
        ids = text.encode_chat(messages)
        return text.decode(self.generate(ids, **options)[len(ids) :], continues=True)

    def _steps(
        self,
        held: Conversation,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limits: Sequence[int],
        stop: Stop | None,
    ) -> Iterator[tuple[int, int]]:
        """Each new token with its sequence, as soon as it is known. All sequences that go on take a step together."""
        texts = [[*tokens, *prompt] for tokens, prompt in zip(held.tokens, prompts, strict=True)]
        draws = Draws(held, sampling, texts)
        new: list[list[int]] = [list(prompt) if limit else [] for prompt, limit in zip(prompts, limits, strict=True)]
        while any(new):
            found = draws.step(new)
            new = [[] for _ in new]
            for i in sorted(found):
                token = draws.token(found[i], i)
                texts[i].append(token)
                yield token, i
                is_done = token in sampling.ends or draws.made(i) == limits[i]
                if not is_done and not (stop is not None and stop(texts[i], i)):
                    new[i] = [token]

    def _ends(self, given: int | Sequence[int] | None) -> frozenset[int]:
        if given is None:
            return frozenset(self.record.end_ids) | (self.text.end_ids if self.text is not None else frozenset())
        return frozenset([int(given)] if isinstance(given, int | np.integer) else map(int, given)) - {-1}

    def _limits(
        self, prompts: Sequence[Sequence[int]], held: Conversation, new: int | None, length: int | None
    ) -> list[int]:
        """How many tokens each sequence may get. ArgumentError if the cache cannot take what was asked for."""
        if new is not None and length is not None:
            raise ArgumentError("max_new_tokens and max_length both limit the text; give one of them")
        for name, value in (("max_new_tokens", new), ("max_length", length)):
            if value is not None and value < 0:
                raise ArgumentError(f"{name}={value}: choose 0 or more")
        limits = []
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ArgumentError(
                    f"prompt {i} is empty: a text begins with at least one token, such as the start token"
                )
            before = len(held.tokens[i]) + len(prompt)
            room = self.max_seq_len - before + 1  # the last token is returned, and never read
            if room < 1 or (new is not None and new > room) or (length is not None and length > self.max_seq_len + 1):
                asked = f" and {new} new ones" if new is not None else ""
                raise ArgumentError(
                    f"sequence {i} has {counted(before, 'token')}{asked}: the model was compiled for "
                    f"max_seq_len={self.max_seq_len}. Shorten the prompt, ask for fewer tokens, or compile for more"
                )
            limits.append(min(room, NEW_TOKENS) if new is None and length is None else room)
            if new is not None:
                limits[-1] = new
            if length is not None:
                limits[-1] = max(0, min(room, length - before))
        return limits

    def to_mlir(
        self, dialect: Literal["linalg"] = "linalg", *, entry: str | None = None, weights: Weights = "resources"
    ) -> UpstreamModule:
        """One call of the decoder in upstream MLIR dialects; see `Program.to_mlir` and docs/mlir.md.

        It takes `ids`, `positions`, `rows`, `wanted`, `how` and, where layers have states beside keys and values,
        `counts` (docs/mlir.md says what they hold), then the states, and returns logits and tokens, then the new
        states. States have names: `keys_0`, `values_0`, …, `conv_0_0`, `recurrent_0_0`, …, `marks` and `drawn`.
        `entry` is "prefill" (any number of tokens, as without it), "decode" (one token of one sequence) or
        "decode_batch" (one token of several sequences).

        ArgumentError for a model that was loaded from a file; else the errors of `Program.to_mlir`.
        """
        if self.program is None:
            self.run.to_mlir()
        return self.program.to_mlir(dialect, entry=entry, weights=weights)

    def save(self, path: str | Path, *, stages: bool = False) -> dict[str, str]:
        """Writes the model to a .qca file, which `qc.load_causal_lm` reads; see `Program.save`."""
        attachments = {MEMBER: self.record.encode()}
        if self.text is not None:
            attachments[TEXT] = self.text.to_record()
        return self._made().save(path, stages=stages, attachments=attachments)

    def __repr__(self) -> str:
        record = self.record
        return (
            f"<CausalLM {record.architecture} on {self.device}: {record.max_batch} x {record.max_seq_len} tokens, "
            f"vocabulary {record.vocabulary}>"
        )


def load_causal_lm(path: str | Path, *, device: str | None = None, **options: Any) -> CausalLM:
    """Loads a language model from a file of `CausalLM.save`. `options` are those of `qc.load`.

    ForeignFileError for a program that is no language model; else the errors of `qc.load`.
    """
    run = load(path, device=device, **options)
    record = checked(LanguageModel.decode(run.attachments.get(MEMBER), path), run, path)
    data = run.attachments.get(TEXT)
    return CausalLM(run, record, text=None if data is None else Text.from_record(data))


def checked(record: LanguageModel, run: LoadedProgram, path: object) -> LanguageModel:
    """The record. CorruptFileError unless the program has the arguments, the sizes and the result that it states."""
    entry = run.entries[0]
    names = tuple(sig.name for sig in entry.inputs)
    out = entry.outputs[0].shape if entry.outputs else ()
    largest: dict[str, int] = {}
    for symbol in (symbol for each in run.entries for symbol in each.symbols):
        largest[symbol.name] = max(symbol.max, largest.get(symbol.name, 1))
    sizes = (largest.get("s", 1), largest.get("b", 1))
    states = {arena.name: arena.nbytes for arena in run.plan.arenas if arena.kind == "state"}
    fits = sizes == (record.chunk, record.max_batch)
    if record.samples:
        slots = mark_slots(record.max_batch)
        marks = states.pop(MARKS, 0), states.pop(DRAWN, 0)
        fits = fits and marks == (8 * slots * record.vocabulary, 8 * slots)
    named = names == (
        "ids", "positions", "rows", "wanted", *["how"] * record.samples, *["counts"] * record.counts,
    )  # fmt: skip
    results = len(entry.outputs) == (2 if record.samples else 1)
    if not (fits and named and results and states and len(out) == 2 and str(out[1]) == str(record.vocabulary)):
        raise CorruptFileError(f"{path}: its program takes {names} and is not what {MEMBER} describes")
    wrong = wrong_cache(record, run.plan)
    if wrong is not None:
        raise CorruptFileError(f"{path}: its program is not what {MEMBER} describes: {wrong}")
    return record


def _temperature(given: float | None, do_sample: bool | None, others: Sequence[float | None]) -> float:
    if do_sample is False:
        return 0.0
    if given is not None:
        if do_sample and given == 0:
            raise ArgumentError("do_sample=True with temperature=0: a temperature above 0 draws samples")
        return given
    return 1.0 if do_sample or any(value is not None for value in others) else 0.0


GiveBack = Callable[[list[list[int]], int], Any]


def prompts_of(ids: Any, attention_mask: Any) -> tuple[list[list[int]], GiveBack]:
    """The prompts as lists, and what turns the finished texts into the form of `ids`."""
    if ids is None:
        raise ArgumentError("generate needs the prompt's tokens: generate([1, 17, 4])")
    if isinstance(ids, str):
        raise ArgumentError("generate takes token ids, which a tokenizer makes of text; `complete` takes text")
    if isinstance(ids, list | tuple):
        if attention_mask is not None:
            raise ArgumentError("attention_mask belongs to an array of prompts; lists have their own lengths")
        if not ids or isinstance(ids[0], int | np.integer):
            return [tokens_of(ids, 2**62).tolist()], lambda found, _fill: found[0]
        return [tokens_of(each, 2**62).tolist() for each in ids], lambda found, _fill: found
    array = np.asarray(ids)
    flat = array.ndim == 1
    rows = array[None] if flat else array
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise ArgumentError(f"prompts are integers of shape (b, s) or (s,), not {array.dtype} of shape {array.shape}")
    kept = np.ones(rows.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    if kept.shape != rows.shape:
        raise ArgumentError(f"attention_mask has shape {kept.shape}, the prompts have {rows.shape}")

    def give_back(found: list[list[int]], fill: int) -> Any:
        result = np.full((len(found), max(map(len, found))), fill, np.int64)
        for row, tokens in zip(result, found, strict=True):
            row[: len(tokens)] = tokens
        result = result[0] if flat else result
        return ids.new_tensor(result) if hasattr(ids, "new_tensor") else result  # torch's tensors have new_tensor

    return [row[keep].tolist() for row, keep in zip(rows, kept, strict=True)], give_back
