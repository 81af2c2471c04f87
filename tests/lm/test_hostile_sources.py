"""Folders with lies: a clear error, no code of others, and texts that are what was given."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_path import ROOT, load

import qcompiler as qc
from qcompiler.errors import ExportError, TokenizerError, WeightsError
from qcompiler.lm.text import Text


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "model"
    build = load("tests/models/zoo.py").DECODERS["llama"].build
    build(vocab_size=256, num_hidden_layers=1).save_pretrained(path)
    shutil.copy(ROOT / "examples/models/tiny_llama/tokenizer.json", path)
    return path


def changed(sound: Path, folder: Path, file: str, **values: Any) -> Path:
    """A copy of the folder in which a JSON file says something else."""
    shutil.copytree(sound, folder)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **values}))
    return folder


@pytest.mark.parametrize(("values", "message"), [
    ({"num_attention_heads": 0}, "LlamaConfig refuses the configuration"),
    ({"num_key_value_heads": 0}, "cannot be built from the configuration"),
    ({"num_key_value_heads": 3}, "cannot read tokens with a cache .*check that its configuration is that of"),
    ({"num_hidden_layers": 0}, "hands no keys and values to a cache"),
    ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776"),
    ({"vocab_size": 2**50}, "vocab_size is"),
    ({"max_position_embeddings": 2**60}, "max_position_embeddings is"),
    ({"hidden_act": "__import__('os')"}, "cannot be built from the configuration: KeyError"),
    ({"architectures": ["LlamaModel"]}, "has no output embeddings"),
])  # fmt: skip
def test_sizes_that_make_no_model_are_named(values: dict[str, Any], message: str, sound: Path, tmp_path: Path) -> None:
    with pytest.raises((WeightsError, ExportError), match=message):
        qc.compile_causal_lm(changed(sound, tmp_path / "x", "config.json", **values), max_seq_len=16)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_configuration_names_no_kernels_of_a_repository(key: str, sound: Path, tmp_path: Path) -> None:
    """transformers would download them and run them, where the package `kernels` is installed."""
    folder = changed(sound, tmp_path / "x", "config.json", **{key: "someone/kernels"})
    config: Any = qc.from_checkpoint(folder).config
    assert "someone" not in str(config._attn_implementation) + str(config._experts_implementation)


@pytest.mark.parametrize("target", ["../sound/model.safetensors", "/dev/zero", "/etc/passwd"])
def test_an_index_of_shards_stays_in_its_folder(target: str, sound: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": target}}
    folder = changed(sound, tmp_path / "x", "model.safetensors.index.json", **index)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with pytest.raises(WeightsError, match="names files that are not there"):
        qc.compile_causal_lm(folder, max_seq_len=16)


def test_texts_are_neither_cut_nor_filled_up(sound: Path, tmp_path: Path) -> None:
    """tokenizer.json keeps what its author's last call asked for; transformers ignores it, too."""
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    folder = changed(sound, tmp_path / "x", "tokenizer.json", padding=padding, truncation=cut)
    assert Text.from_folder(folder).encode("def f(x):") == list(b"def f(x):")


def replacing(length: int, pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": "a" * length}


@pytest.mark.parametrize(("normalizer", "message"), [
    ({"type": "Sequence", "normalizers": [replacing(10, {"String": "a"})] * 2}, "could make a text more than"),
    ({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [replacing(1, {"Regex": "x*"})] * 7}]},
     "normalizer could make a text more than 64 times as long"),
    ({"type": "Sequence", "normalizers": [{"type": "NFC"}] * 300}, "more than 256 steps"),
    ({"type": "Prepend", "prepend": "a" * 2000}, "puts 2,000 characters before a text"),
])  # fmt: skip
def test_steps_that_make_texts_grow_are_refused(
    normalizer: dict[str, Any], message: str, sound: Path, tmp_path: Path
) -> None:
    folder = changed(sound, tmp_path / "x", "tokenizer.json", normalizer=normalizer)
    with pytest.raises(TokenizerError, match=message):
        Text.from_folder(folder)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no pieces": lambda model: model.update(vocab={}),
    "numbers beyond the model": lambda model: model.update(vocab={k: v + 1000 for k, v in model["vocab"].items()}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tokenizer_without_the_models_tokens_is_refused(name: str, sound: Path, tmp_path: Path) -> None:
    model = json.loads((sound / "tokenizer.json").read_text())["model"]
    CHANGES[name](model)
    folder = changed(sound, tmp_path / "x", "tokenizer.json", model=model)
    with pytest.raises(TokenizerError, match="is not in the table of"):
        qc.compile_causal_lm(folder, max_seq_len=16)
