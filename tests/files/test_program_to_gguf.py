"""The codes of a program as a GGUF file: byte for byte, by the reader of the `gguf` package and by our own.

Short tests take a program that has weights and nothing to run, with codes that are not the nearest ones; slow tests
compile theirs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.config import resolve_format
from qcompiler.errors import ArgumentError, FormatError, QCompilerError, WeightsError
from qcompiler.formats import PackedTensor
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.frontends.quantise.stored_places import places_of
from qcompiler.lm.llama_cpp_reader import LlamaCpp
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.plan import MovedParameter, Plan, Signature, WeightEntry
from qcompiler.plan.weights import DTYPE_NAMES
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.loaded import LoadedProgram

folders, rows_for_llama_cpp = (
    load("tests/files/test_folder_to_gguf.py"),
    load("tests/files/writing.py").rows_for_llama_cpp,
)
ROOT = Path(__file__).resolve().parents[2]
Matrix = PackedTensor | npt.NDArray[Any]
Folder = tuple[nn.Module, Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A Llama of two layers with four query heads and two of k and v; K is 64 or 96."""
    return folders.folder_of("llama", tmp_path_factory.mktemp("program") / "folder", tie_word_embeddings=False)


def codes_beside(text: str, values: npt.NDArray[np.float32]) -> PackedTensor:
    """Codes of a format near `values`, a fifth of which are not the nearest ones."""
    noise = np.random.default_rng(values.size).standard_normal(values.shape).astype(np.float32)
    return resolve_format(text).encode(values * (1 + noise / 16))


def matrices(model: nn.Module, text: str, **others: str | None) -> dict[str, Matrix]:
    """What a program holds of a model whose linears are `text`; `others` name formats by the module's name."""
    found: dict[str, Matrix] = {}
    for name, parameter in model.named_parameters():
        values, chosen = parameter.detach().float().numpy(), others.get(name.split(".")[-2], text)
        is_linear = "proj" in name and values.ndim == 2
        packs = chosen is not None and values.ndim == 2 and (is_linear or name.split(".")[-2] in others)
        found[name] = codes_beside(chosen, values) if packs and chosen is not None else values
    return found


def program_of(held: dict[str, Matrix], names: dict[str, tuple[str, ...]] | None = None, **plan: Any) -> ProgramImage:
    """A program that has these weights. `names` are all names of a weight that has several."""
    entries, data, offset = [], [], 0
    for name, each in held.items():
        raw = each.data if isinstance(each, PackedTensor) else np.ascontiguousarray(each).reshape(-1).view(np.uint8)
        fmt = each.format if isinstance(each, PackedTensor) else None
        entries.append(WeightEntry(
            name, "f32" if isinstance(each, PackedTensor) else DTYPE_NAMES[each.dtype],
            (each.rows, each.cols) if isinstance(each, PackedTensor) else each.shape, offset, raw.nbytes,
            None if fmt is None else FormatRef(fmt.name, dict(fmt.params)), parameters=(names or {}).get(name, (name,)),
        ))  # fmt: skip
        data.append(raw)
        offset += raw.nbytes
    made = Plan(*[()] * 7, weights=tuple(entries), **{"moved": (), **plan})
    return ProgramImage(made, Signature(None, None), np.concatenate(data))


ARCHS = {"Llama": "LLAMA", "Mistral": "LLAMA", "Qwen2": "QWEN2", "Qwen3": "QWEN3"}


def in_files_order(name: str, rows: npt.NDArray[Any], model: nn.Module) -> npt.NDArray[Any]:
    """The rows of q and k as llama.cpp's converter writes them: by a function that is not the one under test."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    is_llama = ARCHS[type(model).__name__.removesuffix("ForCausalLM")] == "LLAMA"
    return rows_for_llama_cpp(rows, heads) if heads is not None and is_llama else rows


def by_parameter(path: Path, model: nn.Module) -> dict[str, gguf.ReaderTensor]:
    """The file's tensor for each parameter, by the `gguf` package's table of names."""
    arch = ARCHS[type(model).__name__.removesuffix("ForCausalLM")]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 2)
    there = {each.name: each for each in gguf.GGUFReader(path).tensors}
    found = {}
    for name, _ in model.named_parameters():
        base, _, kind = name.rpartition(".")
        found[name] = there[f"{table.get_name(base)}.{kind}"]
    return found


def check_file(path: Path, model: nn.Module, held: dict[str, Matrix]) -> int:
    """Compares each tensor of the file with what the program holds: its bytes if that is of GGUF, and its values
    by the decoder of the `gguf` package.  Returns the number of those with codes."""
    for name, tensor in by_parameter(path, model).items():
        each = held[name]
        if not isinstance(each, PackedTensor):
            wanted = in_files_order(name, each, model)
            np.testing.assert_array_equal(tensor.data.reshape(each.shape), wanted, err_msg=name)
            continue
        if isinstance(each.format, GgmlFormat):
            raw = in_files_order(name, each.data.reshape(each.rows, -1), model)
            np.testing.assert_array_equal(tensor.data.reshape(raw.shape), raw, err_msg=name)
        values = in_files_order(name, each.format.decode(each), model)
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        np.testing.assert_array_equal(theirs, values, err_msg=name)
    return sum(isinstance(each, PackedTensor) for each in held.values())


def test_every_byte_is_the_programs_in_ggufs_order_of_rows(folder: Folder, tmp_path: Path) -> None:
    model, path = folder
    held = matrices(model, "q5_1", v_proj="q8_0", embed_tokens="q4_0", lm_head="q8_0")
    done = qc.convert(path, tmp_path / "out.gguf", program=program_of(held))
    assert not done.lossy and not done.notes
    assert check_file(tmp_path / "out.gguf", model, held) == 16
    nearest = resolve_format("q5_1").encode(model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().numpy())
    assert held["model.layers.0.mlp.up_proj.weight"].to_bytes() != nearest.to_bytes()
    assert gguf.GGUFReader(tmp_path / "out.gguf").fields["general.file_type"].contents() == 9  # MOSTLY_Q5_1


@pytest.mark.slow
def test_integers_in_groups_of_32_become_ggufs_formats_without_loss(folder: Folder, tmp_path: Path) -> None:
    model, path = folder
    held = matrices(model, "int4:group=32", v_proj="int8:group=32,scale=fp16", down_proj="mxfp4")
    qc.convert(path, tmp_path / "out.gguf", program=program_of(held))
    found = by_parameter(tmp_path / "out.gguf", model)
    kinds = {name.split(".")[-2]: found[name].tensor_type.name for name in held}
    assert (kinds["q_proj"], kinds["v_proj"], kinds["down_proj"], kinds["lm_head"]) == ("Q4_0", "Q8_0", "MXFP4", "F32")
    assert check_file(tmp_path / "out.gguf", model, held) == 14


@pytest.mark.slow
def test_a_head_in_a_format_that_gguf_lacks_is_the_folders_and_the_result_says_so(
    folder: Folder, tmp_path: Path
) -> None:
    model, path = folder
    held = matrices(model, "q4_0", embed_tokens="int8", lm_head="nf4")
    done = qc.convert(path, tmp_path / "out.gguf", program=program_of(held))
    assert [note.split("'")[1] for note in done.notes] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert "is nf4:block=64 in the program, which GGUF files do not hold" in str(done)
    plain = {
        name: model.get_parameter(name).detach().numpy() for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    assert check_file(tmp_path / "out.gguf", model, held | plain) == 14
    qc.convert(path, tmp_path / "mixed.gguf", program=program_of(held), quant="q8_0")
    assert by_parameter(tmp_path / "mixed.gguf", model)["lm_head.weight"].tensor_type.name == "Q8_0"
    assert by_parameter(tmp_path / "mixed.gguf", model)["model.layers.1.mlp.up_proj.weight"].tensor_type.name == "Q4_0"


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[nn.Module], dict[str, Matrix]]:
    def make(model: nn.Module) -> dict[str, Matrix]:
        held = matrices(model, "q4_0")
        return held | {name: change(held[name])}

    return make


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
REFUSED: dict[str, tuple[str, Callable[[nn.Module], dict[str, Matrix]]]] = {
    "a norm of other values": (f"'{NORM}' has other values in the program", _changed(NORM, lambda w: w * 2)),
    "an embedding of other rows": (
        r"'model.embed_tokens.weight' is \[400, 64\] in the program and \[408, 64\]",
        _changed("model.embed_tokens.weight", lambda w: w[:400]),
    ),
    "a head with its rows in another order": (
        "'lm_head.weight' has other values", _changed("lm_head.weight", lambda w: w[::-1]),
    ),
    "codes of other weights": (
        f"'{UP}' of the program is 1[34]. % from the weight",
        _changed(UP, lambda w: codes_beside("q4_0", w.format.decode(w)[::-1])),
    ),
    "codes of another shape": (
        f"'{UP}' is 95 x 64 in the program and", _changed(UP, lambda w: codes_beside("q4_0", w.format.decode(w)[1:])),
    ),
    "a format that GGUF lacks": (
        f"'{UP}' is int4:group=64,symmetric=True in the program, which GGUF files do not hold: compile it",
        _changed(UP, lambda w: codes_beside("int4:group=64", w.format.decode(w))),
    ),
    "scales that GGUF's are too narrow for": (
        f"'{UP}' is int8:group=32 in the program, which q8_0 holds with a relative error",
        _changed(UP, lambda w: codes_beside("int8:group=32", w.format.decode(w))),
    ),
    "a parameter that the folder lacks": (
        "the program has 'model.layers.2.mlp.up_proj.weight', and the model of .* has no such",
        lambda model: matrices(model, "q4_0") | {"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)},
    ),
    "a layer that the program lacks": (
        "has 'model.layers.1.self_attn.q_proj.weight', which the program does not hold",
        lambda model: {name: each for name, each in matrices(model, "q4_0").items() if ".layers.1." not in name},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_is_not_the_folders_leaves_no_file(name: str, folder: Folder, tmp_path: Path) -> None:
    model, path = folder
    match, make = REFUSED[name]
    with pytest.raises(QCompilerError, match=match) as raised:
        qc.convert(path, tmp_path / "out.gguf", program=program_of(make(model)))
    assert isinstance(raised.value, FormatError if "GGUF" in name else WeightsError)
    assert not list(tmp_path.iterdir())


def test_moved_weights_and_wrong_arguments_are_refused(folder: Folder, tmp_path: Path) -> None:
    model, path = folder
    held = matrices(model, "q4_0")
    moved = program_of(held, moved=(MovedParameter(UP, ("smooth-scales",)),))
    with pytest.raises(WeightsError, match=f"'{UP}' has other values than in the model .smooth-scales.; compile"):
        qc.convert(path, tmp_path / "out.gguf", program=moved)
    with pytest.raises(WeightsError, match=r"does not record which .* are the model's own"):
        qc.convert(path, tmp_path / "out.gguf", program=program_of(held, moved=None))
    with pytest.raises(ArgumentError, match=r"keeps the program's formats: leave to= .* with quant="):
        qc.convert(path, tmp_path / "out.gguf", program=program_of(held), to="q8_0")
    with pytest.raises(ArgumentError, match="is no program"):
        qc.convert(path, tmp_path / "out.gguf", program="model.qca")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArgumentError, match=r"gives the codes of the folder it was compiled from, and .* is a file"):
        qc.convert(tmp_path / "x.gguf", tmp_path / "out.gguf", program=program_of(held))
    assert [each.name for each in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.slow
def test_a_tied_weight_has_one_tensor_of_the_programs_codes(tmp_path: Path) -> None:
    model, path = folders.folder_of("llama", tmp_path / "folder", tie_word_embeddings=True)
    held = matrices(model, "q4_0", embed_tokens="q8_0")
    both = ("lm_head.weight", "model.embed_tokens.weight")
    for number, names in enumerate((both, both[:1], both[1:])):  # a program names it by what reads it
        image = program_of(held, {"model.embed_tokens.weight": names})
        qc.convert(path, tmp_path / f"{number}.gguf", program=image)
        assert check_file(tmp_path / f"{number}.gguf", model, held) == 15
        assert "output.weight" not in {each.name for each in gguf.GGUFReader(tmp_path / f"{number}.gguf").tensors}
    values = model.get_parameter("model.embed_tokens.weight").detach().numpy()
    twice = held | {"lm_head.weight": codes_beside("q4_0", values)}
    with pytest.raises(WeightsError, match=r"are one tensor in .* and two in the program, with different codes"):
        qc.convert(path, tmp_path / "out.gguf", program=program_of(twice))
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
def test_a_failure_keeps_the_file_that_would_be_replaced(folder: Folder, tmp_path: Path) -> None:
    model, path = folder
    (tmp_path / "out.gguf").write_bytes(b"an earlier file")
    image = program_of(REFUSED["codes of other weights"][1](model))
    with pytest.raises(WeightsError, match="from the weight in"):
        qc.convert(path, tmp_path / "out.gguf", program=image, force=True)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"an earlier file"]


# --- compiled programs -----------------------------------------------------------------------------------------------

IDS = torch.arange(256).reshape(2, 128) * 7 % 400
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def held_by(program: Any, model: nn.Module) -> dict[str, Matrix]:
    places = places_of(program.plan)
    found = {name: places[name].read(program.image.weights) for name, _ in model.named_parameters()}
    return {name: each.reshape(model.get_parameter(name).shape) if isinstance(each, np.ndarray) else each
            for name, each in found.items()}  # fmt: skip


Recipe = tuple[str, dict[str, Any], bool]
"""A model of test_folder_to_gguf.py, the recipe, and whether it needs data."""
RECIPES: dict[str, Recipe] = {
    "gptq": ("llama", {"preset": "float", "linear": "q4_K", "embedding": "q6_K", "algorithm": "gptq"}, True),
    "hqq": ("qwen2", {"preset": "float", "linear": "int4:group=32", "algorithm": "hqq"}, False),
    "rounding": ("biases", {"preset": "float", "linear": "q4_0", "embedding": "q8_0", "algorithm": "round"}, True),
    "a mixture": ("mistral", {"preset": "q3_K_M"}, False),
    "rules": (
        "qwen3",
        {"preset": "float", "linear": "q5_K, else q5_1", "rules": {"*.v_proj": "q8_0", "*.0.mlp.*": None}},
        False,
    ),
}


def compiled(path: Path, name: str) -> qc.Program:
    _, fields, calibrated = RECIPES[name]
    data = [{"input_ids": row[None]} for row in IDS]
    return qc.qcompile(
        qc.from_checkpoint(path), (), data[0], quant=qc.QuantConfig(**fields), calibrate=data if calibrated else None,
        device="cpu",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_program_and_its_file_have_the_same_codes_and_logits(name: str, tmp_path: Path) -> None:
    model, path = folders.folder_of(RECIPES[name][0], tmp_path / "folder", **WIDE)
    program = compiled(path, name)
    done = qc.convert(path, tmp_path / "out.gguf", program=program)
    assert not done.notes and not done.lossy
    assert check_file(tmp_path / "out.gguf", model, held_by(program, model)) >= 11
    inputs = {"input_ids": IDS[:1]}
    again = qc.qcompile(qc.from_gguf(tmp_path / "out.gguf"), (), inputs, device="cpu")
    ours, theirs = program(**inputs).logits, again(**inputs).logits
    assert float(ours.std()) > 0.5
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


@pytest.mark.slow
def test_a_saved_language_model_becomes_a_file_and_nothing_is_loaded_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = folders.folder_of("llama", tmp_path / "folder", **WIDE)
    quant = qc.QuantConfig("float", linear="q4_K", embedding="q6_K", compute="exact")
    lm = qc.compile_causal_lm(path, quant, calibrate=["the cat sat on the mat"] * 2, max_seq_len=64)
    lm.save(tmp_path / "lm.qca")
    with monkeypatch.context() as patched:
        patched.setattr(LoadedProgram, "from_image", None)
        main(["convert", str(path), str(tmp_path / "out.gguf"), "--program", str(tmp_path / "lm.qca")])
    assert "5 tensors as they were, 16 in another format without loss" in capsys.readouterr().err  # norms stay
    assert check_file(tmp_path / "out.gguf", model, held_by(lm.program, model)) == 16
    again = qc.compile_causal_lm(tmp_path / "out.gguf", qc.QuantConfig("float", compute="exact"), max_seq_len=64)
    prompt = IDS[0, :16].tolist()
    assert again.generate(prompt, max_new_tokens=8) == lm.generate(prompt, max_new_tokens=8)


@pytest.mark.slow
def test_the_layouts_of_a_gpu_are_undone(folder: Folder, tmp_path: Path) -> None:
    model, path = folder
    quant = qc.QuantConfig("float", linear="q4_0", embedding="q8_0")
    program = qc.qcompile(qc.from_checkpoint(path), (), {"input_ids": IDS[:1, :8]}, quant=quant, device="sim:0")
    assert any(place.entry.layout.startswith("cuda") for place in places_of(program.plan).values())
    qc.convert(path, tmp_path / "out.gguf", program=program)
    assert check_file(tmp_path / "out.gguf", model, held_by(program, model)) == 16


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_computes_what_the_program_computes(tmp_path: Path) -> None:
    """The trained model of the repository, on Python text. llama.cpp rounds the inputs of its products to int8 and its
    cache to fp16, which costs about what int8 weights cost, 1e-4 bits (docs/quality.md); ten times that are allowed.
    With the rows of q and k in another order it is more than a bit."""
    path = ROOT / "examples" / "models" / "tiny_llama"
    ids = torch.from_numpy(np.frombuffer(Path(__file__).read_bytes()[: 4 * 512], np.uint8).reshape(4, 512).astype(int))
    data = [{"input_ids": row[None]} for row in ids[1:]]
    quant = qc.QuantConfig("float", linear="q4_K", embedding="q8_0", algorithm="gptq")
    checkpoint = qc.from_checkpoint(path, dtype=torch.float32)
    program = qc.qcompile(checkpoint, (), data[0], quant=quant, calibrate=data, device="cpu")
    qc.convert(path, tmp_path / "out.gguf", program=program)
    ours = program(input_ids=ids[:1]).logits[0].double().log_softmax(-1)
    reader = LlamaCpp(tmp_path / "out.gguf", 512, 512, 256)
    theirs = torch.from_numpy(reader.read(ids[0].tolist(), logits="all")[0]).double().log_softmax(-1)
    bits = float((ours.exp() * (ours - theirs)).sum(-1).mean()) / math.log(2)
    assert 0 < bits < 1e-3


# --- float convolutions ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_folders_with_float_convolutions_are_compared_filter_by_filter(tmp_path: Path) -> None:
    """Programs store filters with the channels last; a folder of the same model was refused for that."""
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        hidden_sizes=[64, 128], depths=[1, 1], num_stages=2, image_size=32, patch_size=4
    )
    model = transformers.ConvNextModel(config)
    model.save_pretrained(tmp_path / "folder")
    quant = qc.QuantConfig("float", linear="int4:group=64,scale=fp16",
                           rules={"*embeddings*": None, "*downsampling*": None})  # fmt: skip
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
    program = qc.qcompile(qc.from_checkpoint(tmp_path / "folder"), (), inputs, quant=quant, device="cpu")
    done = qc.convert(tmp_path / "folder", tmp_path / "out", layout="gptq", program=program)
    assert sum(each.after == "int4" for each in done.tensors) == 4 and not done.lossy
    for name in ("embeddings.patch_embeddings.weight", "encoder.stages.1.layers.0.dwconv.weight"):
        other = transformers.ConvNextModel.from_pretrained(tmp_path / "folder")
        with torch.no_grad():
            other.get_parameter(name)[0, 0, 0, 0] += 1
        other.save_pretrained(tmp_path / name)
        with pytest.raises(WeightsError, match=f"'{name}' has other values in the program"):
            qc.convert(tmp_path / name, tmp_path / "never", layout="gptq", program=program)
    assert not (tmp_path / "never").exists()
