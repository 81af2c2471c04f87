"""A whole model's dumps, and its file on other machines: without torch and xdsl, and for other instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.ir.text import parse_module, print_module
from qcompiler.runtime.isa import supported_isas


@dataclass
class Compiled:
    program: qc.Program
    dumps: Path
    tokens: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """A small BERT, compiled with QC_DUMP_IR set."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=211, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64,
    )  # fmt: skip
    tokens = {"input_ids": torch.randint(0, 211, (3, 13)), "attention_mask": torch.ones(3, 13, dtype=torch.int64)}
    tokens["attention_mask"][1:, 9:] = 0
    shapes = {name: {0: ("b", 1, 8), 1: ("s", 1, 61)} for name in tokens}
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QC_DUMP_IR", str(folder / "new"))
        program = qc.qcompile(BertModel(config).eval(), kwargs=tokens, quant="int4", dynamic_shapes=shapes)
    yield Compiled(program, folder / "new", tokens)


def test_qc_dump_ir_writes_every_stage_under_its_number_and_name(bert: Compiled) -> None:
    suffix = {"export": "txt", "insert-qdq": "txt", "emit-kernels": "cpp"}
    names = [f"{i:02}-{stage}.{suffix.get(stage, 'mlir')}" for i, stage in enumerate(bert.program.stages)]
    assert sorted(path.name for path in bert.dumps.iterdir()) == names
    assert names[:3] == ["00-export.txt", "01-insert-qdq.txt", "02-import.mlir"]
    for number, (stage, name) in enumerate(zip(bert.program.stages, names, strict=True)):
        text = (bert.dumps / name).read_text().rstrip()
        assert bert.program.ir(stage).rstrip() == bert.program.ir(str(number)).rstrip() == text


def test_every_dump_parses_again_to_the_same_module(bert: Compiled) -> None:
    files = sorted(bert.dumps.glob("*.mlir"))
    assert len(files) == len(bert.program.stages) - 3
    for path in files:
        module = parse_module(path.read_text(), name=path.name)
        module.verify()
        assert print_module(module).rstrip() == path.read_text().rstrip()
        again = parse_module(print_module(module, generic=True))
        assert again.is_structurally_equivalent(module), path.name


def test_the_pipeline_can_go_on_from_a_dump(bert: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "canonicalize,cse,dce,fold-views,raise-idioms,specialize"
    assert main(["opt", str(bert.dumps / "02-import.mlir"), "-p", passes]) == 0
    assert capsys.readouterr().out.rstrip() == bert.program.ir("specialize").rstrip()


RUN = r"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "xdsl", "transformers"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import numpy as np
import qcompiler as qc
run = qc.load(sys.argv[1])
y = run(**np.load(sys.argv[2]))
assert not {"torch", "xdsl"} & set(sys.modules)
np.savez(sys.argv[3], isa=run.isa, **{name: value for name, value in y.items() if value is not None})
"""


def run_elsewhere(bert: Compiled, folder: Path, layout: str, **environment: str) -> tuple[dict[str, np.ndarray], str]:
    """Results of the saved program in a new process that has neither torch nor xdsl, and what it wrote on stderr."""
    bert.program.save(folder / "p.qca", layout=layout)  # type: ignore[arg-type]
    np.savez(folder / "x.npz", **{name: value.numpy() for name, value in bert.tokens.items()})
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, folder / "p.qca", folder / "x.npz", folder / "y.npz"],
        env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "y.npz")), done.stderr


@pytest.mark.parametrize("layout", ["target", "canonical"])
def test_a_process_without_torch_and_xdsl_gives_the_same_bits(bert: Compiled, tmp_path: Path, layout: str) -> None:
    here = bert.program(**bert.tokens)
    there, log = run_elsewhere(bert, tmp_path, layout)
    assert there.pop("isa") == bert.program.run.isa
    assert list(there) == list(here.keys())
    for name, values in there.items():
        assert values.tobytes() == here[name].numpy().tobytes(), name
    assert ("packing the weights" in log) == (layout == "canonical")


@pytest.mark.parametrize("isa", [isa for isa in supported_isas() if isa != supported_isas()[-1]])
def test_a_portable_file_is_right_on_a_machine_with_another_instruction_set(
    bert: Compiled, tmp_path: Path, isa: str
) -> None:
    there, log = run_elsewhere(bert, tmp_path, "canonical", QC_ISA=isa)
    assert there["isa"] == isa
    assert "packing the weights" in log
    with torch.no_grad():
        exact = bert.program.oracle(**bert.tokens)
    for name in ("last_hidden_state", "pooler_output"):
        wanted = exact[name].numpy()
        assert np.linalg.norm(there[name] - wanted) <= 1e-5 * np.linalg.norm(wanted)
