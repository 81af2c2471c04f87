"""Folders with lies: a clear error, no code of others, and texts that are what was given."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_path import ROOT, load
from hypothesis import given, settings
from hypothesis import strategies as st

import qcompiler as qc
from qcompiler.errors import (
    CorruptFileError,
    ExportError,
    FormatError,
    NewerFileError,
    QCompilerError,
    TokenizerError,
    WeightsError,
)
from qcompiler.lm.record import MAX_SIZE, LanguageModel
from qcompiler.lm.text import Text


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "model"
    build = load("tests/models/zoo.py").DECODERS["llama"].build
    build(vocab_size=256, num_hidden_layers=1).save_pretrained(path)
    shutil.copy(ROOT / "examples/models/tiny_llama/tokenizer.json", path)
    return path


NAN = float("nan")


def changed(sound: Path, folder: Path, file: str, **values: Any) -> Path:
    """A copy of the folder in which a JSON file says something else."""
    shutil.copytree(sound, folder)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **values}))
    return folder


@pytest.mark.parametrize(("values", "message"), [
    ({"num_attention_heads": 0}, "num_attention_heads is 0, and it must be 1 or more"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0, and"),
    ({"num_attention_heads": -4}, "attention_heads is -4"),
    ({"hidden_size": 0}, "hidden_size is 0, and"), ({"head_dim": -8}, "head_dim is -8, and"),
    ({"vocab_size": 0}, "vocab_size is 0, and"), ({"max_position_embeddings": 0}, "max_position_embeddings is 0, and"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan, and it must be a finite number"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, and it must be 0 or more"),
    ({"rope_theta": 0}, "rope_theta is 0, and it must be above 0"), ({"rope_theta": NAN}, "rope_theta is nan"),
    ({"rope_theta": float("inf")}, "rope_theta is inf, and it must be a finite number"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_parameters.rope_theta is -1.0, and"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "rope_scaling.factor is 0.0, and it must be above 0"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, NAN]}}, "rope_scaling.short_factor is nan"),
    ({"anything": {"deep": [[NAN]]}}, "anything.deep is nan"),
    ({"num_key_value_heads": 3}, "cannot read tokens with a cache .*check that its configuration is that of"),
    ({"num_hidden_layers": 0}, "hands neither keys and values nor states to a cache"),
    ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776"),
    ({"vocab_size": 2**50}, "vocab_size is"),
    ({"max_position_embeddings": 2**60}, "max_position_embeddings is"),
    ({"hidden_act": "__import__('os')"}, "cannot be built from the configuration: KeyError"),
    ({"architectures": ["LlamaModel"]}, "has no output embeddings"),
])  # fmt: skip
def test_sizes_that_make_no_model_are_named(values: dict[str, Any], message: str, sound: Path, tmp_path: Path) -> None:
    with pytest.raises((WeightsError, ExportError), match=message):
        qc.compile_causal_lm(changed(sound, tmp_path / "x", "config.json", **values), max_seq_len=16)


def keys_of(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all values of a JSON object that are no objects."""
    if not isinstance(value, dict):
        return [path]
    return [each for key, inner in value.items() for each in keys_of(inner, (*path, key))]


HOSTILE = [0, -1, 1, 3, 2**31, 2**62, 10**300, NAN, float("inf"), -0.0, 1e-320, 1e308, 0.5, True, None, "", "x", [], {}]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_value_of_a_configuration_makes_a_model_or_a_clear_error(sound: Path, data: st.DataObject) -> None:
    """A model is only described here: a size that its files do not fill would be an error before memory is taken."""
    before = (sound / "config.json").read_text()
    described = json.loads(before)
    path, value = data.draw(st.sampled_from(keys_of(described))), data.draw(st.sampled_from(HOSTILE))
    inner = described
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        (sound / "config.json").write_text(json.dumps(described))
        qc.from_checkpoint(sound)
    except QCompilerError as error:
        assert isinstance(error, WeightsError | FormatError) and str(sound) in str(error)
    finally:
        (sound / "config.json").write_text(before)


RECORD = LanguageModel(
    vocabulary=256, max_seq_len=32, max_batch=2, rows=48, chunk=16, cache_dtype="float32", end_ids=(0,), start_id=0
)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("vocabulary", 0, "vocabulary is 0, and it must be from 1 to"), ("max_batch", -1, "max_batch is -1, and"),
    ("max_seq_len", 2**62, "max_seq_len is 4611686018427387904, and"),
    ("rows", 47, "rows is 47, and it must be from 48"),
    ("chunk", 33, "chunk is 33, and it must be from 1 to 32"), ("start_id", 256, "start_id is 256, and"),
    ("end_ids", [3, -1], r"end_ids\[1\] is -1, and it must be from 0 to 255"), ("version", 0, "version is 0, and"),
    ("chunk", 1.5, r"`int`, got `float` - at `\$.chunk`"),
    ("chunk", NAN, "language-model.json does not follow its schema"),
])  # fmt: skip
def test_a_record_of_sizes_that_no_model_has_names_the_key(key: str, value: Any, message: str) -> None:
    data = json.dumps({**json.loads(RECORD.encode()), key: value}).encode()
    with pytest.raises(CorruptFileError, match=f"^x.qca: .*{message}"):
        LanguageModel.decode(data, "x.qca")


@settings(deadline=None)
@given(st.sampled_from(sorted(json.loads(RECORD.encode()))), st.sampled_from(HOSTILE))
def test_any_value_of_a_record_is_in_range_or_an_error(key: str, value: Any) -> None:
    data = json.dumps({**json.loads(RECORD.encode()), key: value}).encode()
    try:
        found = LanguageModel.decode(data, "x.qca")
    except (CorruptFileError, NewerFileError) as error:
        assert key in str(error) or (isinstance(value, float) and "schema" in str(error))
        return
    assert 1 <= found.chunk <= found.max_seq_len < found.rows <= MAX_SIZE and found.vocabulary >= 1


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
