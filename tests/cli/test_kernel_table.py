"""`qc doctor`: which kernel serves each format and class of rows, and the machine's own figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qcompiler import formats
from qcompiler.cli import main
from qcompiler.inspect import machine
from qcompiler.inspect.doctor import diagnose, examine, extras, problems
from qcompiler.inspect.kernel_table import CLASSES, Served, kernel_table, table_text

ZEN5 = {"avx2", "avx512_vnni", "avx512vbmi", "avx512_bf16"}


def one(rows: list[Served], compute: str, name: str, m: str) -> Served:
    (found,) = [row for row in rows if (row.compute, row.format, row.m) == (compute, name, m)]
    return found


@pytest.mark.slow
def test_every_format_has_a_row_for_each_class_of_rows() -> None:
    rows = kernel_table("cpu", "x86-64-v4", ZEN5)
    names = {(row.compute, row.format, row.m) for row in rows}
    assert len(names) == len(rows) == 3 * (1 + len(formats.names())) * len(CLASSES)
    assert one(rows, "fp32", "nf4", "1").kernel == "linear.gemv" and one(rows, "fp32", "nf4", "65+").why_not == ()
    assert one(rows, "int8", "q4_K", "2-8").units == "AVX-512 VNNI"
    assert one(rows, "int8", "nf4", "1").kernel is None
    assert "a table, not for integers" in one(rows, "int8", "nf4", "1").why_not[0][1]
    assert all(row.kernel for row in rows if row.compute != "int8")


def test_what_the_processor_lacks_is_the_reason() -> None:
    rows = kernel_table("cpu", "x86-64-v4", {"avx2"}, ["nf4", "int8"])
    assert one(rows, "bf16", "nf4", "1").why_not == (("pairs of bf16", "this processor lacks avx512_bf16"),)
    assert one(rows, "int8", "int8", "1").why_not == (("AVX-512 VNNI", "this processor lacks avx512_vnni, avx512vbmi"),)
    plain = kernel_table("cpu", "x86-64-v3", {"avx2", "avx512f"}, ["int8"])
    (better, why) = one(plain, "fp32", "int8", "1").why_not[0]
    assert better == "AVX-512" and "avx512bw" in why and "avx512f," not in why


def test_what_multiplies_int8_follows_the_processor_and_qc_int8() -> None:
    def row(isa: str, flags: set[str], asked: str) -> Served:
        return one(kernel_table("cpu", isa, flags, ["int8"], int8=asked), "int8", "int8", "65+")

    amx = ZEN5 | {"amx_tile", "amx_int8"}
    assert row("x86-64-v3", {"avx2", "avx_vnni"}, "vnni").units == "AVX-VNNI"
    older = row("x86-64-v3", {"avx2"}, "vnni")
    assert older.units == "AVX2, pairs of integers" and ("AVX-VNNI", "this processor lacks avx_vnni") in older.why_not
    assert row("x86-64-v4", ZEN5, "pairs").why_not == (("AVX-512 VNNI", "QC_INT8=pairs asks for pairs"),)
    assert row("x86-64-v4", amx, "amx").units == "AMX from 8 to 14 rows on, by format, else AVX-512 VNNI"
    assert row("x86-64-v4", ZEN5, "amx").units == row("x86-64-v4", amx, "vnni").units == "AVX-512 VNNI"
    assert row("x86-64-v4", amx, "vnni").why_not == (("AMX", "QC_INT8=vnni asks for AVX-512 VNNI"),)
    refused = one(kernel_table("cpu", "x86-64-v4", amx, ["int8"], refused="refused"), "int8", "int8", "65+")
    assert (refused.units, refused.why_not) == ("AVX-512 VNNI", (("AMX", "refused"),))


def test_what_multiplies_bf16_follows_the_processor_and_qc_bf16() -> None:
    def row(flags: set[str], asked: str, refused: str | None = None) -> Served:
        table = kernel_table("cpu", "x86-64-v4", flags, ["nf4"], bf16=asked, refused=refused)
        return one(table, "bf16", "nf4", "65+")

    amx = ZEN5 | {"amx_tile", "amx_bf16"}
    assert row(amx, "amx").units == "AMX from 2 to 6 rows on, by format, else AVX512-BF16, pairs of bf16"
    assert row(ZEN5, "amx").units == row(amx, "dots").units == "AVX512-BF16, pairs of bf16"
    assert row(amx, "dots").why_not == (("AMX", "QC_BF16=dots asks for pairs"),)
    assert row(amx, "amx", "refused").why_not == (("AMX", "refused"),)


def test_what_multiplies_fp32_follows_the_processor_the_format_and_qc_bf16() -> None:
    def row(flags: set[str], name: str, m: str, asked: str = "amx", refused: str | None = None) -> Served:
        return one(kernel_table("cpu", "x86-64-v4", flags, [name], bf16=asked, refused=refused), "fp32", name, m)

    amx = ZEN5 | {"amx_tile", "amx_bf16"}
    assert row(amx, "int4", "65+").units == row(amx, "q4_K", "9-64").units == "AMX, fp32 as three numbers of bf16"
    for other in (row(amx, "nf4", "65+"), row(amx, "int4", "2-8"), row(ZEN5, "int4", "65+")):
        assert (other.units, other.why_not) == ("AVX-512, fp32", ())
    assert row(amx, "int4", "65+", "dots").why_not == (("AMX", "QC_BF16=dots asks for pairs"),)
    assert row(amx, "int4", "65+", refused="refused").why_not == (("AMX", "refused"),)


@pytest.mark.parametrize(("arch", "compute", "cores"), [
    ("sm_75", "bf16", "CUDA cores"), ("sm_75", "f16", "tensor cores"), ("sm_80", "bf16", "tensor cores"),
    ("sm_90a", "fp32", "CUDA cores"), ("sm_70", "f16", "CUDA cores"), ("sm_70", "int8", "CUDA cores, dp4a"),
    ("sm_90a", "bf16", "Hopper's tensor cores"),
])  # fmt: skip
def test_the_engine_of_a_gpu_has_its_reason(arch: str, compute: str, cores: str) -> None:
    found = one(kernel_table("cuda", arch, names=["int4"]), compute, "int4", "65+")
    others = [name for name, _ in found.why_not if name != "Hopper's tensor cores"]
    assert found.units == cores and bool(others) == cores.startswith("CUDA")


def test_formats_that_are_served_alike_share_a_line() -> None:
    text = table_text(kernel_table("cuda", "sm_75", names=["float", "int4", "int8"]))
    assert text.count("  float, int4, int8") == 3 and "not tensor cores: bf16 mma: sm_80" in text


@pytest.mark.slow
def test_doctor_says_what_the_machine_reaches_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--target", "sm_75"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["processor"]["limits"]["bandwidth"] > 1e8 and found["processor"]["limits"]["fp32"] > 1e8
    assert {row["target"] for row in found["kernels"]} >= {found["processor"]["isa"], "sm_75"}
    assert (
        any(each["used"] for each in found["compilers"])
        and found["gpu_problems" if not found["gpu_details"] else "gpus"]
    )
    assert main(["doctor", "--no-measure"]) == 0
    assert "not measured: not asked for" in capsys.readouterr().out
    assert main(["doctor", "--target", "sm_1"]) == 1
    assert "kernels are compiled for" in capsys.readouterr().err


@pytest.mark.slow
def test_a_machine_without_a_compiler_has_a_reason_in_place_of_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompiler.errors import CompilerMissingError

    def none(threads: int, isa: str) -> None:
        raise CompilerMissingError("no C++ compiler was found")

    monkeypatch.setattr(machine, "cpu_limits", none)
    found = diagnose(examine())
    assert found.processor.limits is None and "not measured: no C++ compiler was found" in str(found)


def test_extras_are_named_with_what_is_missing() -> None:
    facts = {"cuda-core": "1", "nvidia-cuda-nvrtc": "missing", "jax": "missing"}
    assert [text.partition(":")[0] for text in extras(facts)] == [
        "pip install 'qcompiler[cuda]'", "pip install 'qcompiler[jax]'",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_gpu_is_described_with_its_figures() -> None:
    gpu = machine.Gpu("cuda:0", "H100", "sm_90a", "13.1", 80 << 30, 70 << 30, 3e12, "H100 SXM", 6.7e13, 9.89e14)
    found = dataclasses.replace(diagnose(examine(), measure=False), gpus=[gpu], no_gpus=[])
    assert "H100, sm_90a, driver 13.1" in str(found) and "3000 GB/s measured" in str(found)


def test_doctor_answers_where_a_variable_or_a_cache_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("QC_CXX", 'g++ "-O2')
    assert machine.compilers()[0].version.startswith("cannot be read: ")
    (problem,) = problems(examine() | {"torch": "1"})
    assert "QC_CXX=" in problem and "cannot be read as a command" in problem

    for number, files in enumerate((("level", "type"), ("level", "type", "size"))):
        (tmp_path / f"index{number}").mkdir()
        for name in files:
            (tmp_path / f"index{number}" / name).write_text({"level": "2", "type": "Unified", "size": "1024K"}[name])
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine._caches() == {"L2": "1024K"}
