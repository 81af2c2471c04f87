"""`qc inspect`: a file is described without being run."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from qcompiler import errors
from qcompiler.inspect.files import describe, plan_json, summary
from qcompiler.inspect.stage_texts import read_stages
from qcompiler.plan.plan import Launch, Select, SelectCase, from_json
from qcompiler.runtime import ProgramImage, save_image


@pytest.fixture
def saved(image: ProgramImage, tmp_path: Path) -> Path:
    path = tmp_path / "small.qca"
    save_image(image, path)
    return path


def digest_of(path: Path, member: str) -> str:
    with zipfile.ZipFile(path) as archive:
        return hashlib.sha256(archive.read(member)).hexdigest()


def test_description_holds_every_fact_and_is_json(saved: Path) -> None:
    facts = json.loads(json.dumps(describe(saved)))
    assert facts["bytes"] == saved.stat().st_size
    assert facts["target"] == {"kind": "cpu", "isa": "x86-64-v3"}
    assert facts["signature"] == "(x: f32[b, 4]) -> (f32[b, 4],)"
    assert facts["entries"][0]["symbols"] == {"b": [1, 64]}
    assert facts["entries"][0]["steps"] == {"launch": 1}
    assert facts["init_steps"] == 1
    assert facts["ledger"]["bits_per_weight"] == 4.5
    assert facts["weights"] == [{"stored": "f32", "layout": "canonical", "tensors": 1, "bytes": 16}]
    assert facts["memory"] == {"constants": 64, "init": 64, "input": 1024, "output": 1024}
    assert [(k["name"], k["template"], k["launches"]) for k in facts["kernels"]] == [
        ("add", "loop", 1),
        ("fill", "loop", 1),
    ]
    assert facts["stages"] == ["import", "dce", "emit-kernels"]
    assert facts["native"][0]["sha256"] == digest_of(saved, "native/x86-64-v3.so")


def test_summary_names_target_ranges_ledger_memory_kernels_stages_and_digest(saved: Path) -> None:
    text = summary(saved)
    for part in (
        "x86-64-v3", "b in [1, 64]", "(x: f32[b, 4]) -> (f32[b, 4],)", "recipe nf4", "4.500 bits per weight",
        "(promised 6.5)", "output 1.0 kB", "2 loop, launched by 2 steps", "import, dce, emit-kernels",
        digest_of(saved, "native/x86-64-v3.so"),
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("stage", ["import", "2", "02", "02-import.mlir", "ir/02-import.mlir"])
def test_a_stage_is_found_by_name_number_and_file(saved: Path, stage: str) -> None:
    assert read_stages(saved).text(stage) == "builtin.module {\n  // x\n}\n"


def test_the_source_is_the_last_stage(saved: Path) -> None:
    assert read_stages(saved).text("emit-kernels") == "// kernels\n"


def test_an_unknown_stage_lists_the_stages_there_are(saved: Path) -> None:
    with pytest.raises(errors.ArgumentError, match=r"no stage 'fuse'; it holds: import, dce, emit-kernels"):
        read_stages(saved).text("fuse")


def test_control_characters_in_a_file_do_not_reach_the_terminal(saved: Path) -> None:
    assert read_stages(saved).text("dce") == "builtin.module {}\\x1b[31m\n"


def test_the_plan_is_printed_as_json_that_loads_again(saved: Path, image: ProgramImage) -> None:
    assert from_json(plan_json(saved)).entries == image.plan.entries


def test_a_file_whose_plan_could_not_run_is_described_all_the_same(image: ProgramImage, tmp_path: Path) -> None:
    plan = msgspec.structs.replace(image.plan, streams=())
    save_image(replace(image, plan=plan), tmp_path / "bad.qca")
    assert describe(tmp_path / "bad.qca")["entries"][0]["name"] == "main"


def test_damaged_text_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    at = data.rindex(b"\x1f\x8b\x08") + 12
    saved.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(errors.CorruptFileError, match=r"small\.qca.*'kernels/program\.cpp\.gz' is damaged"):
        summary(saved)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.qca").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(errors.ForeignFileError):
        describe(tmp_path / "x.qca")


def test_a_ledger_of_another_shape_is_refused(image: ProgramImage, tmp_path: Path) -> None:
    save_image(replace(image, ledger={"totals": 3}), tmp_path / "x.qca")
    with pytest.raises(errors.CorruptFileError, match="ledger"):
        describe(tmp_path / "x.qca")


def test_a_file_without_ledger_native_or_texts_says_so(image: ProgramImage, tmp_path: Path) -> None:
    save_image(replace(image, ledger=None, native=(), texts={}), tmp_path / "x.qca")
    text = summary(tmp_path / "x.qca")
    assert describe(tmp_path / "x.qca")["ledger"] is None
    assert text.count("none") == 3


def test_a_select_counts_as_one_step(image: ProgramImage, tmp_path: Path) -> None:
    (launch,) = image.plan.entries[0].steps
    assert isinstance(launch, Launch)
    cases = (SelectCase(max=8, kernel="add"), SelectCase(max=None, kernel="fill"))
    select = Select(on="b", cases=cases, stream=launch.stream, operands=launch.operands)
    entry = msgspec.structs.replace(image.plan.entries[0], steps=(select,))
    plan = msgspec.structs.replace(image.plan, entries=(entry,), init=None)
    save_image(replace(image, plan=plan), tmp_path / "x.qca")
    facts = describe(tmp_path / "x.qca")
    assert facts["templates"] == {"loop": {"kernels": 2, "steps": 1}}
    assert [kernel["launches"] for kernel in facts["kernels"]] == [1, 1]
