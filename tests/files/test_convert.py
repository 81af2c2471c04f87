"""`qc convert`: codes go to other packings as they are; what loses something has to be allowed, and is said."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from by_path import load
from gguf import GGMLQuantizationType as Type

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentError, FormatError, WeightsError

writing = load("tests/files/writing.py")


@pytest.fixture(scope="module")
def q4_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose layers and table are q4_0, its head q6_K."""

    def kind_of(name: str) -> Type:
        return Type.Q6_K if name == "output.weight" else Type.Q4_0

    path: Path = tmp_path_factory.mktemp("convert") / "llama.gguf"
    writing.write(path, writing.build("Llama", num_hidden_layers=1), "llama", kind_of)
    return path


def values(checkpoint: qc.Checkpoint) -> dict[str, np.ndarray]:
    return {name: item.view().float().numpy() for name, item in checkpoint.weights.tensors.items()}


def same(one: qc.Checkpoint, other: qc.Checkpoint) -> None:
    mine, theirs = values(one), values(other)
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        assert np.array_equal(array, theirs[name]), name


@pytest.mark.parametrize(("layout", "to"), [
    ("gptq", None), ("gptq_v2", "int4:group=32,symmetric=False"), ("awq", None), ("compressed-tensors", None),
    ("compressed-tensors", "int8:group=32,scale=fp32"),
])  # fmt: skip
def test_q4_0_goes_to_every_integer_packing_without_loss(
    layout: str, to: str | None, q4_0: Path, tmp_path: Path
) -> None:
    done = qc.convert(q4_0, tmp_path / "out", layout=layout, to=to)
    assert not done.lossy and sum(each.before == "q4_0" for each in done.tensors) == 8
    checkpoint = qc.from_checkpoint(tmp_path / "out")
    same(checkpoint, qc.from_gguf(q4_0))
    kept = [item for name, item in checkpoint.weights.tensors.items() if name.endswith("_proj.weight")]
    assert len(kept) == 7 and all(item.codes is not None for item in kept), "as codes, not as numbers"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == {
        "gptq_v2": "gptq"
    }.get(layout, layout)


def test_one_packing_goes_to_another(q4_0: Path, tmp_path: Path) -> None:
    qc.convert(q4_0, tmp_path / "awq", layout="awq")
    qc.convert(tmp_path / "awq", tmp_path / "ct", layout="compressed-tensors")
    qc.convert(tmp_path / "ct", tmp_path / "gptq", layout="gptq")
    same(qc.from_checkpoint(tmp_path / "gptq"), qc.from_gguf(q4_0))


def test_a_loss_is_refused_with_its_size_and_leaves_nothing(q4_0: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"_proj.weight' does not go from q4_0.* to nf4.* without loss: relative error 0\.\d+"
    ):
        qc.convert(q4_0, tmp_path / "out", layout="bitsandbytes", to="nf4")
    with pytest.raises(FormatError, match=r"does not go from q6_K\(\) to q4_0\(\) without loss"):
        qc.convert(q4_0, tmp_path / "out.gguf", to="q4_0")
    assert not list(tmp_path.iterdir())
    done = qc.convert(q4_0, tmp_path / "out", layout="bitsandbytes", to="nf4", lossy=True)
    assert len(done.lossy) == 7 and all(0 < each.loss.relative < 0.2 for each in done.lossy)
    mine, before = values(qc.from_checkpoint(tmp_path / "out")), values(qc.from_gguf(q4_0))
    for each in done.tensors:
        assert np.abs(mine[each.name] - before[each.name]).max() == each.loss.largest, each.name


def test_the_command_writes_a_gguf_file_with_all_its_keys(
    q4_0: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    assert main(["convert", str(q4_0), str(out), "--to", "q8_0"]) == 1
    assert "without loss" in capsys.readouterr().err and not out.exists()
    assert main(["convert", str(q4_0), str(out), "--to", "q8_0", "--lossy", "--json"]) == 0
    said = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(said.out)["tensors"]}
    assert rows["blk.0.attn_q.weight"]["loss"] == {"relative": 0.0, "largest": 0.0}, "q4_0 is in q8_0 without loss"
    assert rows["output.weight"]["loss"]["relative"] > 0 and "'output.weight': relative error" in said.err
    old, new = gguf.GGUFReader(q4_0), gguf.GGUFReader(out)
    keys = [key for key in old.fields if not key.startswith("GGUF.")]
    assert {key: old.fields[key].contents() for key in keys} == {key: new.fields[key].contents() for key in keys}
    assert {t.name: t.tensor_type for t in new.tensors if len(t.shape) > 1} == {
        t.name: Type.Q8_0 for t in old.tensors if len(t.shape) > 1
    }


@pytest.mark.parametrize("name", ["out.gguf", "out"])
def test_a_target_that_is_there_is_replaced_only_when_allowed(
    q4_0: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A file, and a folder: never in silence, by `--force`, or by a yes where a person can answer."""
    out, layout = tmp_path / name, [] if name.endswith(".gguf") else ["--layout", "gptq"]
    convert = ["convert", str(q4_0), str(out), *layout]
    content = out / "model.safetensors" if layout else out

    def spoil() -> None:
        content.write_bytes(b"old")

    assert main(convert) == 0
    made = content.read_bytes()
    spoil()
    assert main(convert) == 1
    assert "exists" in capsys.readouterr().err and content.read_bytes() == b"old"
    assert main([*convert, "--force"]) == 0 and content.read_bytes() == made
    for answer, status in (("n", 1), ("", 1), ("y", 0)):
        spoil()
        monkeypatch.setattr("sys.stdin", _Terminal(f"{answer}\n"))
        monkeypatch.setattr("sys.stderr", _Terminal())
        assert main(convert) == status
        assert content.read_bytes() == (b"old" if status else made)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is left beside it"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LOAD = """
import logging, sys
import qcompiler as qc
try:
    qc.compile_causal_lm("none.gguf")  # it asks transformers for a class first
except qc.errors.WeightsError:
    qc.from_gguf(sys.argv[1])
print("torchao" in sys.modules, logging.getLogger("torchao").filters, logging.getLogger("torch.utils._pytree").filters)
"""


@pytest.mark.slow
def test_reading_a_file_says_nothing_of_packages_that_nobody_asked_for(q4_0: Path) -> None:
    """transformers imports torchao with every model, and that complains of what it cannot load."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(q4_0)], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.split() == ["True", "[]", "[]"]


@pytest.mark.slow  # transformers loads three models
@pytest.mark.parametrize(("plain", "to"), [(Type.F16, "nf4"), (Type.F16, "llm_int8"), (Type.F32, "fp4")])
def test_a_folder_of_bitsandbytes_has_one_dtype_and_runs_in_transformers(plain: Type, to: str, tmp_path: Path) -> None:
    """Norms are fp32 in every GGUF file; a layer of fp16 does not take what a norm of fp32 gives."""
    source = tmp_path / "llama.gguf"
    writing.write(source, writing.build("Llama", num_hidden_layers=1), "llama", lambda name: plain)
    if plain == Type.F16:  # as llama.cpp converts a model of fp16: its norms are values of fp16
        _round_vectors(source)
    qc.convert(source, tmp_path / "out", layout="bitsandbytes", to=to, lossy=True)
    expected = torch.float16 if plain == Type.F16 else torch.float32
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(expected).removeprefix("torch.")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    assert floats == {expected}
    ids = torch.tensor([[1, 5, 9]])
    found = model(ids).logits.detach().float()
    ours = qc.qcompile(qc.from_checkpoint(tmp_path / "out"), kwargs={"input_ids": ids})(input_ids=ids).logits.float()
    share = 0.05 if to == "llm_int8" else 0.02  # bitsandbytes rounds what an int8 layer reads to int8, too
    assert torch.allclose(found, ours, atol=share * float(ours.abs().max())), (found - ours).abs().max()


def _round_vectors(path: Path) -> None:
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            tensor.data[:] = tensor.data.astype(np.float16).astype(np.float32)
    reader.data.flush()


def test_what_cannot_be_converted_is_named(q4_0: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ArgumentError, match=r"exists; name another"):
        qc.convert(q4_0, tmp_path / "full", layout="awq")
    with pytest.raises(ArgumentError, match=r"holds no checkpoint, and only checkpoints are replaced"):
        qc.convert(q4_0, tmp_path / "full", layout="awq", force=True)
    with pytest.raises(ArgumentError, match=r"there is no folder"):
        qc.convert(q4_0, tmp_path / "nowhere" / "out.gguf")
    with pytest.raises(ArgumentError, match=r"choose its layout: gptq, gptq_v2, awq"):
        qc.convert(q4_0, tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"converted onto itself"):
        qc.convert(q4_0, q4_0)
    with pytest.raises(FormatError, match=r"GGUF files do not hold nf4"):
        qc.convert(q4_0, tmp_path / "out.gguf", to="nf4")
    with pytest.raises(FormatError, match=r"'model.layers.0.*' as awq: AWQ's GEMM packing has 4-bit codes"):
        qc.convert(q4_0, tmp_path / "out", layout="awq", to="int8:group=32,scale=fp16")
    with pytest.raises(WeightsError, match=r"neither tokenizer\.json nor tokenizer\.model, and a GGUF file holds"):
        qc.convert(tmp_path, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert torch.is_tensor(next(iter(qc.from_gguf(q4_0).weights.tensors.values())).view())
