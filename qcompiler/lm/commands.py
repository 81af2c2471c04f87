"""`qc generate | chat | eval`: language models on the command line.

Generated text goes to stdout as it comes, everything else to stderr.  A MODEL is a .qca file of `CausalLM.save`, a
.gguf file or a folder of Hugging Face; the latter two are compiled first, which needs torch and transformers.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qcompiler.config import QuantConfig, recipe_of
from qcompiler.errors import ArgumentError, QCompilerError
from qcompiler.lm.conversation import Conversation
from qcompiler.lm.evaluate import Reader, Score, scores
from qcompiler.lm.llama_cpp_reader import LlamaCpp
from qcompiler.lm.model import CausalLM, load_causal_lm
from qcompiler.lm.sampling import Sampling
from qcompiler.lm.text import Text
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.plan import Plan
from qcompiler.runtime.progress import Counted, note
from qcompiler.units import counted, printable

if TYPE_CHECKING:
    from qcompiler.program import Program


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """How tokens are drawn. ArgumentError for a value out of its range, which is found before a model is opened."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    chosen = {name: getattr(options, name) for name in names}
    Sampling(**{name: value for name, value in chosen.items() if value is not None})
    if options.tokens is not None and options.tokens < 1:
        raise ArgumentError(f"--tokens {options.tokens}: choose 1 or more")
    return chosen


def open_model(options: argparse.Namespace, *, chats: bool = False) -> CausalLM:
    """The model that the command line names. ArgumentError if it has no tokenizer, or no template where it `chats`;
    that and what else is known of the files is found out before anything is compiled."""
    for file, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors=errors)
    path: Path = options.model
    adapter: Path | None = options.adapter or options.adapter_beside
    if path.suffix == ".qca":
        if options.quant or options.compute or options.max_seq_len or options.kv_cache != "auto":
            raise ArgumentError(
                f"{path} is compiled already: --quant, --compute, --max-seq-len and --kv-cache come too late"
            )
        if adapter is not None:
            raise ArgumentError(
                f"{path} is compiled already: name the folder or the .gguf file it was made from, or merge the adapter "
                "into the program in Python (qc.merge_lora)"
            )
        lm = load_causal_lm(path, device=options.device)
        _check_text(lm.require_text(), path, chats=chats)
        return lm
    _check_there(path, "a model is a .qca file, a .gguf file or a folder with config.json")
    recipe = recipe_of(options.quant, options.compute)
    from qcompiler.lm.compile import compile_causal_lm  # torch and transformers, which take seconds to import
    from qcompiler.lm.sources import text_of

    text = text_of(path)
    if text is None:
        raise ArgumentError(
            f"{path} has no tokenizer that is read (docs/tokenizers.md): a folder needs a tokenizer.json, a .gguf file "
            "has its tokens in its keys"
        )
    _check_text(text, path, chats=chats)
    lm = compile_causal_lm(
        path, recipe, max_seq_len=options.max_seq_len, kv_cache=options.kv_cache, device=options.device, text=text,
        adapter=adapter, merge=options.adapter_beside is None,
    )  # fmt: skip
    if options.compute is None and (said := _arithmetic(lm)) is not None:
        note(f"{said} (docs/language-models.md, Arithmetic)")
    return lm


def _arithmetic(lm: CausalLM) -> str | None:
    """What to say of a model's arithmetic where the options name none."""
    decided = [] if lm.program is None else lm.program.report().choices
    for choice in decided:
        if choice.stage == "arithmetic":
            return f"arithmetic: {choice.what} ({choice.why})"
    if lm.device == "cpu" and multiplies_in_fp32(lm.run.plan):
        return "linears multiply in fp32, exactly; with --compute bf16 or --compute int8 they take less time"
    return None


def multiplies_in_fp32(plan: Plan) -> bool:
    """Whether a linear with a quantised weight multiplies in fp32, although its recipe could say otherwise."""
    linears = (kernel for kernel in plan.kernels if isinstance(kernel.body, LinearKernel) and not kernel.body.codes)
    return any(kernel.operands[1].format is not None and kernel.operands[1].dtype != "bf16" for kernel in linears)


def _check_text(text: Text, path: Path, *, chats: bool) -> None:
    if chats and text.template is None:
        raise ArgumentError(f"{path} has no chat template; `qc generate` continues a text")


def _check_there(path: Path, kinds: str) -> None:
    if not path.exists():
        raise ArgumentError(f"there is no file or folder '{path}': {kinds}")


# --- compile ----------------------------------------------------------------------------------------------------------


def compile_to_file(options: argparse.Namespace, recipe: QuantConfig | None) -> tuple[Program, dict[str, str]]:
    """`qc compile` of a .gguf file or a folder: writes the language model with its tokenizer to a .qca file. Returns
    the program, and the digests of the native builds by target."""
    path = Path(options.model)
    _check_there(path, "a language model is a .gguf file or a folder with config.json")
    from qcompiler.lm.compile import compile_causal_lm  # torch and transformers, which take seconds to import

    lm = compile_causal_lm(
        path, recipe, max_seq_len=options.max_seq_len, device=options.device,
        max_batch=1 if options.max_batch is None else options.max_batch, kv_cache=options.kv_cache,
        targets=options.targets.split(",") if options.targets else None,
        verify_each=options.verify_each, dump_ir=options.dump_ir, workdir=options.workdir,
    )  # fmt: skip
    assert lm.program is not None
    return lm.program, lm.save(options.output, stages=not options.no_stages)


# --- generate ---------------------------------------------------------------------------------------------------------


def generate(options: argparse.Namespace) -> None:
    prompt = options.prompt if options.prompt is not None else _read(options.prompt_file)
    sampling = _sampling(options)
    lm = open_model(options)
    ids = lm.require_text().encode(prompt)
    answer = Answer(lm, lm.conversation(), sys.stdout, quiet=options.json)
    if not options.json:
        answer.show(prompt)
    try:
        interrupted = answer.give(ids, options.tokens, sampling)
    except QCompilerError:
        if not options.json:
            print(flush=True)  # the message begins a line of its own
        raise
    if options.json:
        print(json.dumps({"text": prompt + answer.text, "tokens": answer.tokens, **answer.speed()}, ensure_ascii=False))
    else:
        print(flush=True)
        print(answer.summary(), file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt


def _read(path: Path) -> str:
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is no text in UTF-8: {error}") from error


class Answer:
    """One answer: its text is shown as it comes, and its times are taken."""

    def __init__(self, lm: CausalLM, held: Conversation, out: TextIO, *, quiet: bool = False) -> None:
        self.lm, self.held, self.out, self.quiet = lm, held, out, quiet
        self.tokens: list[int] = []
        self.text = ""
        self.prompt = 0
        self.times: list[float] = []

    def give(self, ids: Sequence[int], limit: int | None, sampling: dict[str, Any]) -> bool:
        """Generates after `ids`; returns whether Ctrl-C ended it early. What was generated until then is kept."""
        stream = self.lm.require_text().stream(continues=True)

        def take(token: int, _sequence: int) -> None:
            self.times.append(time.perf_counter())
            self.tokens.append(token)
            self.show(stream.push(token), answer=True)

        self.prompt = len(ids)
        self.times.append(time.perf_counter())
        try:
            self.lm.generate(list(ids), max_new_tokens=limit, stream=take, conversation=self.held, **sampling)
            return False
        except KeyboardInterrupt:
            return True
        finally:
            self.show(stream.finish(), answer=True)

    def show(self, text: str, *, answer: bool = False) -> None:
        """Prints a piece. Control characters, which could steer a terminal, are spelled out there."""
        if answer:
            self.text += text
        if text and not self.quiet:
            self.out.write(printable(text) if self.out.isatty() else text)
            self.out.flush()

    def speed(self) -> dict[str, float]:
        """Tokens of the prompt, seconds until the first new token, and tokens a second after it."""
        made = len(self.tokens)
        return {
            "prompt_tokens": self.prompt,
            "seconds_to_first": round(self.times[1] - self.times[0], 4) if made else 0.0,
            "tokens_per_second": round((made - 1) / (self.times[-1] - self.times[1]), 2) if made > 1 else 0.0,
        }

    def summary(self) -> str:
        speed = self.speed()
        read, made = counted(self.prompt, "token"), counted(len(self.tokens), "token")
        if not self.tokens:  # Ctrl-C came first
            return f"[{read} in the prompt, no new one]"
        rate = f", {speed['tokens_per_second']:.1f} a second" if len(self.tokens) > 1 else ""
        return f"[{read} read, the first new one after {speed['seconds_to_first'] * 1e3:.0f} ms; {made}{rate}]"


# --- chat -------------------------------------------------------------------------------------------------------------


def chat(options: argparse.Namespace) -> None:
    sampling = _sampling(options)
    lm = open_model(options, chats=True)
    messages: list[dict[str, str]] = [{"role": "system", "content": options.system}] if options.system else []
    held = lm.conversation()
    if sys.stdin.isatty():
        print("Ctrl-C ends an answer, Ctrl-D the chat; /reset forgets it.", file=sys.stderr)
    while (said := _line()) is not None:
        if said == "/reset":
            messages = messages[:1] if options.system else []
            continue
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        try:
            answer = respond(lm, held, messages, options.tokens, sampling, quiet=options.json)
        except QCompilerError as error:  # the chat goes on: a shorter message may fit
            messages.pop()
            print(f"qc: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
            continue
        if not answer.tokens:  # Ctrl-C before the first token: as if nothing was said
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})
        if options.json:
            print(json.dumps({"text": answer.text, "tokens": answer.tokens, **answer.speed()}, ensure_ascii=False))
        else:
            print(flush=True)
            print(answer.summary(), file=sys.stderr)


def _line() -> str | None:
    """The next line from the user; None at the end. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)


def respond(
    lm: CausalLM,
    held: Conversation,
    messages: Sequence[dict[str, str]],
    limit: int | None,
    sampling: dict[str, Any],
    *,
    quiet: bool = False,
) -> Answer:
    """The answer to the last message. Tokens of the chat that the conversation has read already are not read again."""
    ids = lm.require_text().encode_chat(messages)
    same = 0
    for ours, theirs in zip(held.tokens[0], ids[:-1], strict=False):  # at least one token is read, for its logits
        if ours != theirs:
            break
        same += 1
    held.truncate(same)
    answer = Answer(lm, held, sys.stdout, quiet=quiet)
    answer.give(ids[same:], limit, sampling)
    return answer


# --- eval -------------------------------------------------------------------------------------------------------------


def eval(options: argparse.Namespace) -> None:
    text = _read(options.text)
    for path, kinds in ((options.reference, "a folder, a .gguf or a .qca file"), (options.llama_cpp, "a .gguf file")):
        if path is not None:
            _check_there(path, f"it is {kinds}")
    lm = open_model(options)
    if options.limit is not None:
        text = text.encode()[: max(options.limit, 0)].decode(errors="ignore")  # whole characters
    ids = lm.require_text().encode(text, special=options.special)
    readers: dict[str, Reader] = {"model": lm.conversation()}
    if options.reference is not None:
        readers["reference"] = _reference(options, lm, text, ids).conversation()
    if options.llama_cpp is not None:
        readers["llama.cpp"] = LlamaCpp(options.llama_cpp, lm.max_seq_len, lm.record.chunk, lm.record.vocabulary)
    began = time.perf_counter()
    with Counted("evaluating", len(ids), "tokens") as progress:
        found = scores(
            readers, ids, len(text.encode()), lm.max_seq_len, lm.record.chunk,
            reference="reference" if options.reference is not None else None, progress=progress.reach,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    own = found["model"]
    if options.json:
        values: dict[str, Any] = {**_figures(own), "tokens": own.tokens, "bytes": own.nbytes, "seconds": seconds}
        if len(found) == 1:
            values["tokens_per_second"] = own.tokens / seconds
        others = {name.replace(".", "_"): _figures(each) for name, each in found.items() if name != "model"}
        print(json.dumps(values | others))
        return
    for name, each in found.items():
        print(f"{name}: " * (len(found) > 1) + _sentence(each))
    speed = f", {own.tokens / seconds:.0f} a second" if len(found) == 1 else f", {len(found)} models in {seconds:.1f} s"
    print(f"[{own.tokens} tokens{speed}]", file=sys.stderr)


def _figures(found: Score) -> dict[str, float]:
    """What `qc eval --json` says of one model."""
    values = {"bits_per_byte": found.bits_per_byte, "perplexity": found.perplexity}
    far = found.divergence
    if far is not None:
        values |= {
            "kl_mean": far.mean,
            "kl_99": far.high,
            "top1_agreement": far.agreement,
            "lost": far.lost,
            "won": far.won,
        }
    return values


def _sentence(found: Score) -> str:
    text = f"{found.bits_per_byte:.4f} bits per byte, perplexity {found.perplexity:.3f}"
    far = found.divergence
    if far is None:
        return text
    text += f"; KL {far.mean:.3g} nats (99 %: {far.high:.3g}), the same top token {far.agreement:.2%}"
    return f"{text}, {far.lost} right ones became wrong and {far.won} wrong ones right"


def _reference(options: argparse.Namespace, lm: CausalLM, text: str, ids: list[int]) -> CausalLM:
    """The model that --reference names, in floating point. ArgumentError if it does not read the same tokens."""
    path: Path = options.reference
    if path.suffix == ".qca":
        found = load_causal_lm(path, device=options.device)
    else:
        from qcompiler.lm.compile import in_fp32

        found = in_fp32(path, lm.max_seq_len, lm.record.chunk, options.device)
    ours, theirs = lm.record, found.record
    if theirs.vocabulary != ours.vocabulary:
        raise ArgumentError(
            f"--reference {path} has a vocabulary of {theirs.vocabulary} tokens, and {options.model} one of "
            f"{ours.vocabulary}: name the model that it was made from"
        )
    if theirs.max_seq_len < ours.max_seq_len:
        raise ArgumentError(
            f"--reference {path} takes {theirs.max_seq_len} tokens, and windows have {ours.max_seq_len}: compile it "
            f"with max_seq_len={ours.max_seq_len}"
        )
    if found.text is not None and found.text.encode(text, special=options.special) != ids:
        raise ArgumentError(f"--reference {path} has another tokenizer, which makes other tokens of {options.text}")
    return found
