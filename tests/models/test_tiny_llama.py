"""The repository's own language model: the committed files are whole, and quantising it costs what the page says."""

from __future__ import annotations

import ast
import importlib.util
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import qcompiler as qc
from qcompiler import formats

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "models" / "tiny_llama"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny, generate = example("tiny_llama"), example("generate")


@pytest.fixture(scope="module")
def page() -> dict[str, tuple[float, ...]]:
    """docs/quality.md: the linears' format to (bits per weight, bits per byte, top-1 in percent)."""
    found = {}
    for line in (ROOT / "docs" / "quality.md").read_text().splitlines():
        cells = [cell.strip(" %") for cell in line.strip("|").split("|")]
        if len(cells) == 9 and re.fullmatch(r"[0-9.]+", cells[1]):
            found[cells[0].strip()] = (float(cells[1]), float(cells[5]), float(cells[8]))
    return found


def test_the_checkpoint_is_small_and_of_the_stated_architecture():
    assert (FOLDER / "model.safetensors").stat().st_size <= 12e6
    config = tiny.load_model().llama.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (256, 768, 6)
    assert config.num_key_value_heads < config.num_attention_heads, "grouped-query attention"


def test_the_page_lists_every_format_with_every_parameter(page):
    assert {text for text in tiny.recipes() if text} <= set(page)
    assert set(formats.FORMATS) <= set(page)


def test_a_format_that_does_not_take_most_matrices_has_no_error():
    narrow = [np.ones((4, 384), np.float32)] * 3
    assert tiny.error("q4_K", [*narrow, np.ones((4, 256), np.float32)]) is None
    assert tiny.error("q8_0", narrow) < 1e-3
    assert tiny.error("nf4", [np.full((2, 64), 0.4, np.float32)]) == 0


def test_the_card_states_what_the_training_recorded():
    card = (FOLDER / "README.md").read_text()
    history = json.loads((FOLDER / "loss.json").read_text())
    assert (FOLDER / "loss.png").stat().st_size > 5_000
    assert f"{history['held_out'][-1][1]:.3f} bits per byte" in card
    assert "loss.png" in card and f"{history['train_bytes']:,}" in card


SLOW_FORMATS = [pytest.param(each, marks=pytest.mark.slow) for each in (None, "int8", "q4_K", "int4:symmetric=False")]


@pytest.mark.parametrize("text", ["nf4", *SLOW_FORMATS])
@pytest.mark.slow
def test_a_quantised_program_predicts_held_out_text_as_the_page_says(text, page):
    """On a part of the text: compared with the eager fp32 model on the same part, so that the page's excess holds."""
    windows = tiny.held_out(64 * 1024)[::4]
    reference = [base.float() for base, _ in tiny.log_probabilities(tiny.load_model(), windows)]
    program = tiny.compiled(tiny.load_model(), text)
    found = tiny.measure(program, reference, windows)
    base = tiny.measure(tiny.load_model(), reference, windows)
    bits_per_weight, bits_per_byte, agreement = page[text or "float (compiled)"]
    assert program.ledger.bits_per_weight() == pytest.approx(bits_per_weight, abs=1e-3)
    stated = bits_per_byte / page["fp32 (eager torch)"][1]
    assert found.bits_per_byte / base.bits_per_byte == pytest.approx(stated, abs=0.01)
    assert found.agreement * 100 == pytest.approx(agreement, abs=2.0)
    if text is None:
        assert found.divergence < 1e-9


def test_the_model_knows_its_text_better_than_a_compressor():
    text = (FOLDER / "held_out.txt").read_bytes()
    compressed = len(lzma.compress(text, preset=9)) * 8 / len(text)
    stated = json.loads((FOLDER / "loss.json").read_text())["held_out"][-1][1]
    windows = tiny.held_out()[::16]
    reference = [base.float() for base, _ in tiny.log_probabilities(tiny.load_model(), windows)]
    measured = tiny.measure(tiny.load_model(), reference, windows).bits_per_byte
    assert measured == pytest.approx(stated, rel=0.05)
    assert measured < 0.75 * compressed


@pytest.mark.slow
def test_the_model_writes_python():
    """Of eight sampled continuations at least half parse as Python up to the end of one of their own lines."""
    prompt = b"import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        "
    torch.manual_seed(0)
    tokens = torch.tensor([list(prompt)] * 8)
    with torch.no_grad():
        sampled = tiny.load_model().llama.generate(
            tokens, max_new_tokens=160, do_sample=True, temperature=0.5, eos_token_id=None
        )
    first = prompt.count(b"\n") + 1
    good = 0
    for row in sampled:
        lines = bytes(row.tolist()).decode("utf-8", "replace").split("\n")
        good += any(parses("\n".join(lines[:end])) for end in range(first, len(lines)))
    assert good >= 4


# --- examples/generate.py ---------------------------------------------------------------------------------------------

PROMPTS = (generate.PROMPT.encode(), b"class Stack:\n    def __init__(self", b"x")


@pytest.fixture(scope="module")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "float.qca"
    generate.build(path, None)
    return path


def test_greedy_text_is_what_eager_transformers_generates(program_file):
    """60 tokens behind each prompt, from a cache that the prompt before has filled, too."""
    program, llama = qc.load(program_file), tiny.load_model().llama
    for prompt in PROMPTS:
        with torch.no_grad():
            wanted = llama.generate(torch.tensor([list(prompt)]), max_new_tokens=60, do_sample=False)
        assert list(generate.generate(program, prompt, 60)) == [t for t in wanted[0, len(prompt) :].tolist() if t]


def test_drawn_text_depends_on_the_seed_alone_and_follows_the_distribution(program_file):
    program = qc.load(program_file)
    first, again, other = (list(generate.generate(program, PROMPTS[0], 40, 0.8, seed)) for seed in (1, 1, 2))
    assert first == again != other
    rng, logits = np.random.default_rng(0), np.log(np.array([0.7, 0.2, 0.1], np.float32))
    drawn = np.bincount([generate.pick(logits, 0.5, rng) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(drawn, np.array([0.49, 0.04, 0.01]) / 0.54, atol=0.02)


def test_what_the_cache_cannot_hold_is_refused(program_file):
    program = qc.load(program_file)
    for prompt, tokens in ((b"", 5), (b"x" * 500, 13)):
        with pytest.raises(ValueError, match=rf"{len(prompt)} bytes and {tokens} tokens.* 512 in all"):
            next(generate.generate(program, prompt, tokens))
    assert len(list(generate.generate(program, b"x" * 500, 12))) == 12


def test_the_page_runs_without_torch_once_the_program_is_compiled(program_file):
    script = ROOT / "examples" / "generate.py"
    arguments = [str(script), "--program", str(program_file), "--tokens", "20", "--prompt", "import "]
    code = f"""
import runpy, sys
sys.modules.update(torch=None, transformers=None, xdsl=None)
sys.argv = {arguments!r}
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    text = bytes(generate.generate(qc.load(program_file), b"import ", 20))
    assert done.stdout == b"import " + text + b"\n"
    assert re.search(rb"\[20 tokens; the first after .* a second\]", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "nf4"])
def test_a_quantised_model_writes_much_of_the_same_text(quant, tmp_path):
    generate.build(tmp_path / "model.qca", quant)
    program = qc.load(tmp_path / "model.qca")
    prompt = (FOLDER / "held_out.txt").read_bytes()[:400]
    logits = program(input_ids=np.frombuffer(prompt, np.uint8).astype(np.int64)[None], cache_position=np.arange(400))
    with torch.no_grad():
        wanted = tiny.load_model()(torch.tensor([list(prompt)]))
    assert (torch.from_numpy(logits).argmax(-1) == wanted.argmax(-1)).float().mean() > 0.85


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
