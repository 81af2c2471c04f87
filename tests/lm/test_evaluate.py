"""`qc eval --reference` and `--llama-cpp`: divergences beside torch's, on windows that the test cuts itself."""

from __future__ import annotations

import copy
import json
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from by_path import load
from msgspec import structs

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.lm.evaluate import divergences, log_softmax
from qcompiler.lm.text import Text
from qcompiler.lm.text.record import Record

BYTES = Text(Record(kind="bytes"))
WINDOW = 32


@cache
def model() -> Any:
    """A model whose parameters bf16 holds exactly."""
    made = load("tests/models/zoo.py").DECODERS["llama"].build(num_hidden_layers=1, vocab_size=256, eos_token_id=None)
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float model without a tokenizer, its codes in 4 bits, and a text that is longer than a window."""
    path = tmp_path_factory.mktemp("eval")
    copy.deepcopy(model()).bfloat16().save_pretrained(path / "float")
    lm = qc.compile_causal_lm(model(), "q4_0", max_seq_len=WINDOW, chunk=8, text=BYTES)
    lm.save(path / "model.qca")
    (path / "text.txt").write_bytes(bytes(np.random.default_rng(0).integers(32, 127, 75).tolist()))
    return path


def windows(ids: list[int]) -> list[tuple[int, int, int]]:
    """(begin, end, the first token of the window that is predicted)."""
    found, begin, done = [], 0, 1
    while done < len(ids):
        end = min(begin + WINDOW, len(ids))
        found.append((begin, end, done))
        done, begin = end, end - WINDOW // 2
    return found


def evaluated(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main(["eval", str(folder / "model.qca"), str(folder / "text.txt"), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_divergence_from_a_float_folder_is_torchs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(folder, capsys, "--reference", str(folder / "float"))
    lm, float_model = qc.load_causal_lm(folder / "model.qca"), model()
    ids = list((folder / "text.txt").read_bytes())
    ours, theirs = [], []
    for begin, end, first in windows(ids):
        rows = slice(first - 1 - begin, end - 1 - begin)
        ours.append(torch.from_numpy(lm.conversation().read(ids[begin : end - 1], logits="all")[0][rows]))
        with torch.no_grad():
            theirs.append(float_model(torch.tensor([ids[begin : end - 1]])).logits[0][rows])
    q, p = (torch.cat(each).double().log_softmax(-1) for each in (ours, theirs))
    nats = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    bits = -p[torch.arange(len(p)), torch.tensor(ids[1:])].sum() / np.log(2)
    assert float(nats.mean()) > 1e-5, "4 bits change the predictions"
    assert found["kl_mean"] == pytest.approx(float(nats.mean()), rel=1e-3)
    assert found["kl_99"] == pytest.approx(float(nats.quantile(0.99)), rel=1e-3)
    assert found["top1_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    theirs_right, ours_right = (each.argmax(-1) == torch.tensor(ids[1:]) for each in (p, q))
    assert found["lost"] == int((theirs_right & ~ours_right).sum())
    assert found["won"] == int((~theirs_right & ours_right).sum())
    assert found["reference"]["bits_per_byte"] == pytest.approx(float(bits) / len(ids), rel=1e-5)
    assert "kl_mean" not in found["reference"]


def test_a_program_is_at_no_distance_from_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(folder, capsys, "--reference", str(folder / "model.qca"))
    assert (found["kl_mean"], found["kl_99"], found["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert (found["lost"], found["won"]) == (0, 0)
    plain = evaluated(folder, capsys)
    assert plain["perplexity"] == found["perplexity"] and set(plain) - set(found) == {"tokens_per_second"}
    path = str(folder / "model.qca")
    assert main(["eval", path, str(folder / "text.txt"), "--reference", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model: ") and "KL 0 nats (99 %: 0), the same top token 100.00%" in lines[0]
    assert lines[1].startswith("reference: ") and "KL" not in lines[1]


def test_divergence_of_tokens_that_a_reference_excludes_is_finite() -> None:
    reference = log_softmax(np.array([[0.0, -np.inf, 0.0]], np.float32))
    even = log_softmax(np.zeros((1, 3), np.float32))
    assert divergences(reference, even) == pytest.approx([np.log(1.5)])
    assert divergences(even, reference) == [np.inf]


def backwards() -> Text:
    """A tokenizer of 256 letters, which count down."""
    letters = {chr(number): 255 - number for number in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    return Text(Record(kind="tokenizers", tokenizer=made.to_str()))


@pytest.mark.parametrize("kind", ["vocabulary", "length", "tokenizer"])
def test_references_that_read_other_tokens_are_refused(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = qc.load_causal_lm(folder / "model.qca")
    match kind:
        case "vocabulary":
            build = load("tests/models/zoo.py").DECODERS["llama"].build
            lm = qc.compile_causal_lm(build(vocab_size=250, num_hidden_layers=1), max_seq_len=WINDOW, chunk=8)
            message = "one of 256: name the model that it was made from"
        case "length":
            lm.record = structs.replace(lm.record, max_seq_len=16)
            message = "takes 16 tokens, and windows have 32: compile it with max_seq_len=32"
        case "tokenizer":
            lm.text = backwards()
            message = "has another tokenizer"
    lm.save(tmp_path / "other.qca")
    command = ["eval", str(folder / "model.qca"), str(folder / "text.txt")]
    assert main([*command, "--reference", str(tmp_path / "other.qca")]) == 1
    assert message in capsys.readouterr().err


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def test_without_llama_cpp_the_command_names_the_package(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    command = ["eval", str(folder / "model.qca"), str(folder / "text.txt"), "--llama-cpp"]
    assert main([*command, str(tmp_path / "model.gguf")]) == 1
    assert "pip install llama-cpp-python" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "none.gguf")]) == 1
    assert "there is no file" in capsys.readouterr().err


class Llama:
    """What `LlamaCpp` uses of llama-cpp-python's class, with a model of transformers behind it."""

    def __init__(self, *, model_path: str, n_ctx: int, n_batch: int, logits_all: bool, verbose: bool) -> None:
        assert logits_all and not verbose and n_batch <= n_ctx == WINDOW
        if Path(model_path).read_bytes() != b"GGUF":
            raise ValueError("Failed to load model from file")
        self.scores = np.full((n_ctx, 256), np.nan, np.float32)
        self.tokens: list[int] = []

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def n_vocab(self) -> int:
        return 256

    def reset(self) -> None:
        self.tokens.clear()

    def eval(self, tokens: list[int]) -> None:
        self.tokens += tokens
        with torch.no_grad():
            self.scores[: self.n_tokens] = model()(torch.tensor([self.tokens])).logits[0].numpy()


def test_llama_cpp_reads_the_same_windows_and_is_compared_with_the_reference(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("llama_cpp")
    package.__dict__.update(Llama=Llama, __version__="0")
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    found = evaluated(folder, capsys, "--reference", str(folder / "float"), "--llama-cpp", str(file))
    theirs = found["llama_cpp"]
    assert theirs["perplexity"] == pytest.approx(found["reference"]["perplexity"], rel=1e-5) != found["perplexity"]
    assert theirs["kl_mean"] < 1e-9 < found["kl_mean"] and theirs["top1_agreement"] == 1.0
    file.write_bytes(b"else")
    assert main(["eval", str(folder / "model.qca"), str(folder / "text.txt"), "--llama-cpp", str(file)]) == 1
    assert "llama.cpp does not load" in capsys.readouterr().err
