"""`qc generate`, `qc chat` and `qc eval` on a small model whose tokens are bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentError
from qcompiler.lm.bench import _round
from qcompiler.lm.commands import multiplies_in_fp32, respond
from qcompiler.lm.evaluate import score
from qcompiler.lm.text import Text
from qcompiler.lm.text.record import Record
from qcompiler.plan.kinds.sample import WORDS
from qcompiler.units import printable

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@cache
def model() -> Any:
    return load("tests/models/zoo.py").DECODERS["llama"].build(num_hidden_layers=1, vocab_size=256, eos_token_id=None)


@cache
def compiled() -> qc.CausalLM:
    text = Text(Record(kind="bytes", template=TEMPLATE))
    return qc.compile_causal_lm(model(), max_seq_len=64, chunk=16, text=text)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lm") / "model.qca"
    compiled().save(file)
    return file


def expected(prompt: bytes, tokens: int) -> bytes:
    ids = compiled().generate(list(prompt), max_new_tokens=tokens)
    return bytes(ids[len(prompt) :])


def test_generate_prints_prompt_and_text(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(path), "--prompt", "ab", "--tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out == "ab" + expected(b"ab", 12).decode(errors="replace") + "\n"
    assert "2 tokens read" in err and "12 tokens" in err


def test_generate_as_json_and_from_a_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("ab")
    assert main(["generate", str(path), "--prompt-file", str(tmp_path / "prompt.txt"), "--tokens", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert bytes(found["tokens"]) == expected(b"ab", 5)
    assert (found["prompt_tokens"], len(found["tokens"])) == (2, 5)


def test_generate_says_what_is_wrong(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(path), "--prompt", "a" * 65]) == 1
    assert "max_seq_len=64" in capsys.readouterr().err
    assert main(["generate", str(path), "--prompt", ""]) == 1
    assert "prompt 0 is empty" in capsys.readouterr().err
    assert main(["generate", str(path), "--prompt", "a", "--compute", "bf16"]) == 1
    assert "compiled already" in capsys.readouterr().err
    without = qc.CausalLM(compiled().run, compiled().record)
    without.save(tmp_path / "ids.qca")
    assert main(["generate", str(tmp_path / "ids.qca"), "--prompt", "a"]) == 1
    assert "has no tokenizer" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "none.qca"), "--prompt", "a"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["float", "q8_0", "q8_0 bf16", "q8_0 int8"])
def test_exact_products_of_codes_are_pointed_out(quant: str) -> None:
    fmt, _, compute = quant.partition(" ")
    lm = qc.compile_causal_lm(model(), qc.QuantConfig(fmt, compute=compute or None), max_seq_len=64, chunk=16)
    assert multiplies_in_fp32(lm.run.plan) == (quant == "q8_0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "none", "--prompt", "a"], "there is no file or folder 'none': a model is a .qca file"),
        (["generate", "folder", "--prompt", "a"], "folder has no tokenizer that is read"),
        (["generate", "folder", "--prompt", "a", "--quant", "int44"], "no recipe is called 'int44'"),
        (["generate", "folder", "--prompt", "a", "--top-p", "3"], "top_p=3.0: choose above 0 and at most 1"),
        (["generate", "folder", "--prompt", "a", "--tokens", "0"], "--tokens 0: choose 1 or more"),
        (["chat", "spoken"], "spoken has no chat template"),
        (["compile", "none.gguf", "-o", "x.qca"], "there is no file or folder 'none.gguf'"),
        (["compile", "none.gguf", "-o", "x.qca", "--fallback", "torch"], "takes no --fallback torch; that of a"),
        (["compile", "folder:model", "-o", "x.qca", "--kv-cache", "int8"], "takes no --kv-cache int8; that of a .gguf"),
        (["compile", "folder:model", "-o", "x.qca", "--dynamic", "x:0=b,1,8"], "takes no --dynamic; that of a .mlir"),
        (["eval", "folder", "none.txt"], "none.txt: No such file"),
        (["eval", "folder", "text.txt", "--reference", "none"], "there is no file or folder 'none': it is a folder"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    """No folder has a config.json: a compile would fail by that."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "spoken"):
        Path(name).mkdir()
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    Path("spoken/tokenizer.json").write_text(json.dumps(vocabulary))
    Path("text.txt").write_text("a")
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_compile_writes_a_model_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = Path(__file__).parents[2] / "examples/models/tiny_llama", tmp_path / "x.qca"
    given = ["--quant", "int8", "--max-seq-len", "64", "--max-batch", "2", "--kv-cache", "int8"]
    assert main(["compile", str(folder), "-o", str(file), *given]) == 0
    said = capsys.readouterr()
    assert "recipe int8" in said.err and f"wrote {file}" in said.err and not said.out
    lm = qc.load_causal_lm(file)
    assert (lm.max_seq_len, lm.record.max_batch, lm.record.cache_dtype) == (64, 2, "int8")
    assert main(["generate", str(file), "--prompt", "import", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("import")


def test_a_chat_reads_only_what_is_new(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = qc.load_causal_lm(path)
    held = lm.conversation()
    messages = [{"role": "user", "content": "hi"}]
    first = respond(lm, held, messages, 4, {}, quiet=True)
    assert first.prompt == len("u:hi\na:")
    assert bytes(first.tokens) == expected(b"u:hi\na:", 4)
    whole = b"u:hi\na:" + bytes(first.tokens) + b"\nu:x\na:"
    messages += [
        {"role": "assistant", "content": bytes(first.tokens).decode("latin-1")},
        {"role": "user", "content": "x"},
    ]
    again = lm.require_text().encode_chat(messages)
    second = respond(lm, held, messages, 4, {}, quiet=True)
    if again == list(whole):  # the answer was plain ASCII: all but what was not read yet is in the cache
        assert second.prompt == len("\nu:x\na:") + 1
    assert bytes(second.tokens) == expected(bytes(again), 4)


def test_chat_as_a_process(path: Path) -> None:
    lines = "hello\n\n/reset\nhello\n"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "qcompiler", "chat", str(path), "--max-new-tokens", "3", "--json"],
        input=lines, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bytes(each["tokens"]) for each in answers] == [expected(b"u:hello\na:", 3)] * 2


def test_ctrl_c_ends_a_text_with_status_130(path: Path) -> None:
    slow = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us without it\n"
        "from qcompiler.lm import commands\n"
        "show = commands.Answer.show\n"
        "def slower(self, text, *, answer=False):\n"
        "    show(self, text, answer=answer); time.sleep(0.2)\n"
        "commands.Answer.show = slower\n"
        "from qcompiler.cli import main\n"
        f"sys.exit(main(['generate', {str(path)!r}, '--prompt', 'ab', '--tokens', '60']))\n"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 2) == b"ab"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.endswith(b"\n") and b"tokens read" in err and b"Traceback" not in err


def test_eval_counts_the_bits_of_transformers(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytes(np.random.default_rng(0).integers(32, 127, 50).tolist())
    (tmp_path / "text.txt").write_bytes(data)
    assert main(["eval", str(path), str(tmp_path / "text.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = torch.tensor([list(data)])
    with torch.no_grad():
        nats = float(
            torch.nn.functional.cross_entropy(model()(ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum")
        )
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / 50, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(nats / 49), rel=1e-5)


def test_a_text_longer_than_the_cache_is_scored_in_windows_and_each_token_once() -> None:
    ids = np.random.default_rng(1).integers(32, 127, 150).tolist()
    found = score(compiled(), ids, 150)
    window, bits, done = 64, 0.0, 1
    begin = 0
    while done < 150:
        end = min(begin + window, 150)
        with torch.no_grad():
            logp = model()(torch.tensor([ids[begin:end]])).logits[0].double().log_softmax(-1)
        bits -= sum(float(logp[at - begin - 1, ids[at]]) for at in range(done, end)) / np.log(2)
        done, begin = end, end - window // 2
    assert (found.tokens, found.nbytes) == (149, 150)
    assert found.bits == pytest.approx(bits, rel=1e-5)
    with pytest.raises(ArgumentError, match="1 token "):
        score(compiled(), [5], 1)


def test_complete_and_chat_return_text() -> None:
    lm = compiled()
    assert lm.complete("ab", max_new_tokens=6) == expected(b"ab", 6).decode(errors="replace")
    assert lm.chat([{"role": "user", "content": "q"}], max_new_tokens=3) == expected(b"u:q\na:", 3).decode(
        errors="replace"
    )


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tc\x07") == "a\\x1b[2Jb\n\tc\\x07"


# --- qc bench ---------------------------------------------------------------------------------------------------------


def test_bench_times_prompt_first_token_and_steps(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(path), "--prompt", "40", "--generate", "9", "--rounds", "2"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompt_tokens"], found["generated_tokens"], found["sequences"], found["rounds"]) == (40, 9, 1, 2)
    assert found["prompt_tokens_per_second"] == pytest.approx(40 / found["seconds_to_first"])
    assert 0 < found["step_seconds"] < 60 and found["decode_tokens_per_second"] > 0 and 0 < found["not_product"] < 1
    assert main(command) == 0
    assert "outside of matrix products" in capsys.readouterr().out
    assert main(["bench", str(path), "--prompt", "64", "--generate", "1", "--rounds", "1", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["decode_tokens_per_second"], whole["step_seconds"]) == (None, None), "the prompt gives one token"


def test_a_round_reads_what_it_says(path: Path) -> None:
    """Each round begins with an empty cache, and leaves all tokens but the last in it."""
    lm = qc.load_causal_lm(path)
    held = lm.conversation()
    for _ in range(2):
        first, steps = _round(held, [list(b"hello")], 4)
        assert first > 0 and len(steps) == 3
        assert bytes(held.tokens[0]) == b"hello" + expected(b"hello", 3)


@pytest.mark.parametrize(("options", "message"), [
    (["--prompt", "60", "--generate", "6"], "need 65 rows of the cache: the model was compiled for max_seq_len=64"),
    (["--prompt", "8", "--generate", "2", "--batch", "2"], "compile it with max_batch=2"),
    (["--prompt", "8", "--profile"], "leave --entry, --dim and --profile out"),
])  # fmt: skip
def test_bench_refuses_what_the_model_was_not_compiled_for(
    options: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(path), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_every_entry_point_is_profiled_with_its_modules_and_the_cache_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, two_layers = tmp_path / "m.qca", load("tests/models/zoo.py").DECODERS["llama"].build()
    qc.compile_causal_lm(two_layers, max_seq_len=64, chunk=16).save(path)
    lm = qc.load_causal_lm(path)
    for entry in lm.run.entries:
        assert main(["bench", str(path), "--entry", entry.name, "--rounds", "1", "--profile", "--json"]) == 0
        steps = json.loads(capsys.readouterr().out)["profile"]["steps"]
        layers = [step["paths"][0].split(".layers.")[1][0] for step in steps if step["kind"] == "attention"]
        assert layers == ["0", "1"], "each layer's attention is in that layer"
        known = [step["nbytes"] or step["limit_us"] for step in steps if step["kind"] == "attention"]
        assert not any(known), "the positions decide how many keys it reads, and not the size of the cache"
        assert all(step["paths"] for step in steps if step["kind"] in ("linear", "attention", "embedding"))
    one = np.array([[5]])
    given: dict[str, Any] = {"ids": one, "positions": one, "rows": one, "wanted": np.array([0])}
    if lm.record.samples:
        given["how"] = np.zeros((1, WORDS), np.int64)
    session = lm.run.session()
    before = session.states()
    session.profile(**given, rounds=1)
    assert all((before[name] == data).all() for name, data in session.states().items())


@pytest.mark.slow
def test_bench_times_sequences_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qc.compile_causal_lm(model(), max_seq_len=32, max_batch=3, chunk=8).save(tmp_path / "m.qca")
    command = ["bench", str(tmp_path / "m.qca"), "--prompt", "10", "--generate", "5", "--batch", "3", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens_per_second"] == pytest.approx(30 / found["seconds_to_first"])
    assert 0 < found["not_product"] < 1
