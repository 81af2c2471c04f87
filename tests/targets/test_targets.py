"""`targets=`: several native builds of one plan, and which of them a machine runs."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import (
    ArgumentError,
    CorruptFileError,
    TargetMismatchError,
    TrustError,
)
from qcompiler.inspect.files import describe
from qcompiler.kernels import select
from qcompiler.runtime import builds, isa
from qcompiler.runtime.backends import registry
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.program_file import load_image

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="builds of several x86-64 levels")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "program-file.md"
LEVELS = ("x86-64-v4", "x86-64-v3")


class Net(torch.nn.Module):
    """A linear whose rows are dynamic, a norm, a pointwise loop, a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 40)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.nn.functional.gelu(self.norm(self.up(x)))
        return {"y": self.down(h), "mean": h.mean(-1)}


@dataclass
class Saved:
    """A program for two instruction sets and its file; `alone` is the same model for the older one only."""

    program: qc.Program
    alone: qc.Program
    path: Path
    digests: dict[str, str]


def compiled(*targets: str, device: str = "cpu") -> qc.Program:
    torch.manual_seed(0)
    x = torch.randn(5, 64)
    return qc.qcompile(
        Net().eval(), (x,), quant="nf4", dynamic_shapes={"x": {0: ("b", 1, 40)}}, device=device, targets=targets or None
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """One program with builds for two instruction sets, from a cache of its own."""
    folder = tmp_path_factory.mktemp("targets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QC_CACHE_DIR", str(folder / "cache"))
        patch.delenv("QC_ISA", raising=False)
        program = compiled("x86-64-v3", "x86-64-v4")
        digests = program.save(folder / "net.qca")
        yield Saved(program, compiled("x86-64-v3"), folder / "net.qca", digests)


def x_of(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 64), np.float32)


def runs_up_to(patch: pytest.MonkeyPatch, best: str) -> None:
    """Makes this machine look like one whose best instruction set is `best`."""
    patch.setattr(isa, "supported_isas", lambda: isa.X86_LEVELS[: isa.X86_LEVELS.index(best) + 1])


# --- what is stored --------------------------------------------------------------------------------------------------


def test_a_file_holds_a_build_for_each_target_under_the_digest_that_save_returns(saved: Saved) -> None:
    listed = {build["isa"]: build for build in describe(saved.path)["native"]}
    assert set(saved.digests) == set(listed) == set(LEVELS)
    with zipfile.ZipFile(saved.path) as archive:
        for name in LEVELS:
            assert f"sha256:{listed[name]['sha256']}" == saved.digests[name]
            assert archive.getinfo(f"native/{name}.so").file_size > 20_000
            assert listed[name]["emitter"] and listed[name]["compiler"] == find_compiler().version


def test_inspect_shows_every_build_and_its_digest(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved.path)]) == 0
    text = capsys.readouterr().out
    for name, digest in saved.digests.items():
        assert re.search(rf"native/{name}\.so for {name}, {digest}", text)


def test_one_plan_serves_all_targets_and_the_report_says_so(saved: Saved) -> None:
    assert re.search(r"one plan for x86-64-v\d, x86-64-v\d", str(saved.program.report()))
    assert saved.program.plan == saved.alone.plan


def test_the_program_runs_the_best_of_its_targets_that_this_machine_can(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved.program.run.isa == max({*isa.supported_isas()} & {*LEVELS})
    runs_up_to(monkeypatch, "x86-64-v3")
    assert compiled("x86-64-v4", "x86-64-v3").run.isa == "x86-64-v3"


def test_a_target_that_cannot_run_here_is_built_and_saved_and_never_run(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_up_to(monkeypatch, "x86-64-v3")
    program = compiled("x86-64-v4")
    with pytest.raises(TargetMismatchError, match=r"compiled for x86-64-v4, and cpu runs .*x86-64-v3; save\(\) stores"):
        program(x_of(2))
    assert list(program.save(tmp_path / "v4.qca")) == ["x86-64-v4"]


def test_a_kernel_that_one_target_cannot_run_is_passed_over_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(query: select.LinearQuery, name: str) -> str | None:
        return "it needs AVX-512" if name == "x86-64-v3" else None

    fast = select.Candidate("linear.fast", "1", (1, None), refuses)
    monkeypatch.setitem(select.LINEAR, "cpu", (fast, *select.LINEAR_CPU))
    one = select.LinearQuery((1, 40), 96, 64, "f32", "f32", None, True, "cpu", ("x86-64-v4",))
    alone, both = select.choose_linear(one), select.choose_linear(replace(one, isas=LEVELS))
    assert [case.m_class for case in alone.cases] == ["1"]
    assert [case.m_class for case in both.cases] == ["2-8", "large"]
    assert ("linear.fast", "on x86-64-v3: it needs AVX-512") in both.rejected


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "targets", "why"),
    [
        ("cpu", ["x86-64-v3", "sm_80"], r"mixes GPU architectures and instruction sets.*compile twice"),
        ("sim:0", ["x86-64-v3", "sm_80"], r"mixes GPU architectures and instruction sets.*compile twice"),
        ("cpu", ["sm_80", "sm_90a"], r"'sm_80' is a GPU's; compile for it with device='cuda:0'"),
        ("sim:0", ["x86-64-v3"], r"'x86-64-v3' is not a GPU architecture to compile for; choose from sm_70, "),
        ("cpu", ["x86-64-v3", "aarch64"], r"builds for 'aarch64'; choose from generic, x86-64, .* C\+\+ compiler"),
    ],
)
def test_targets_that_one_program_cannot_have(device: str, targets: list[str], why: str) -> None:
    with pytest.raises(TargetMismatchError, match=why):
        compiled(*targets, device=device)


def test_one_name_instead_of_a_list_is_an_error_and_not_letters() -> None:
    with pytest.raises(ArgumentError, match=r"give a list of them, targets=\['x86-64-v3'\]"):
        qc.qcompile(torch.nn.Linear(8, 4), (torch.zeros(2, 8),), targets="x86-64-v3")


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "chosen"), [("x86-64-v4", "x86-64-v4"), ("x86-64-v3", "x86-64-v3"), ("x86-64", None)]
)
def test_trust_takes_the_best_build_that_the_machine_runs_and_no_other(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, machine: str, chosen: str | None
) -> None:
    runs_up_to(monkeypatch, machine)
    for trust in (True, saved.digests, list(saved.digests.values())):
        if chosen is None:
            with pytest.raises(
                TargetMismatchError, match=r"(?=.*needs x86-64-v4)(?=.*needs x86-64-v3).*Load without trust"
            ):
                load_image(saved.path, trust_native=trust)
            continue
        native = load_image(saved.path, trust_native=trust)[1]
        assert native is not None and native.isa == chosen


def test_qc_isa_makes_the_machine_an_older_one(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_ISA", "x86-64-v3")
    assert qc.load(saved.path, trust_native=True).isa == "x86-64-v3"
    monkeypatch.setenv("QC_ISA", "generic")
    with pytest.raises(TargetMismatchError, match="this machine runs generic"):
        load_image(saved.path, trust_native=True)


def test_a_trusted_build_that_the_machine_cannot_run_is_refused_though_another_would_run(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_up_to(monkeypatch, "x86-64-v3")
    with pytest.raises(TargetMismatchError, match=r"'native/x86-64-v4.so' needs x86-64-v4"):
        load_image(saved.path, trust_native=saved.digests["x86-64-v4"])


def test_builds_of_another_kind_of_machine_are_refused(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds.platform, "system", lambda: "Darwin")
    with pytest.raises(TargetMismatchError, match=r"is for Linux on x86_64, this is Darwin on x86_64"):
        load_image(saved.path, trust_native=True)


def test_builds_for_another_interface_of_kernels_are_refused(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "NATIVE_ABI", builds.NATIVE_ABI + 1)
    with pytest.raises(TargetMismatchError, match=r"compiled for version 2 of the kernels' interface"):
        load_image(saved.path, trust_native=True)


def test_the_interface_of_stored_builds_is_the_one_that_its_version_stands_for() -> None:
    """Whoever changes abi.h or what the runtime passes raises NATIVE_ABI, or old builds are called the wrong way."""
    text = resources.files("qcompiler.kernels.cpu").joinpath("abi.h").read_text()
    code = re.sub(r"\s+", " ", re.sub(r"//[^\n]*", "", text))
    assert (builds.NATIVE_ABI, hashlib.sha256(code.encode()).hexdigest()[:16]) == (2, "1692234daf4c975e")


def test_a_pinned_build_does_not_run_another_plan(saved: Saved, tmp_path: Path) -> None:
    """A build that the user trusts, in a file whose plan was changed: its arenas could be too small for that code."""
    with zipfile.ZipFile(saved.path) as archive:
        info, text = archive.getinfo("program.json"), archive.read("program.json")
    wide = f'"nbytes":{max(arena.nbytes for arena in saved.program.plan.arenas if arena.kind == "output")}'.encode()
    assert wide in text
    changed = text.replace(wide, b'"nbytes":' + b"1".ljust(len(wide) - 9, b"0"))
    data = saved.path.read_bytes().replace(text, changed)
    data = data.replace(struct.pack("<I", info.CRC), struct.pack("<I", zlib.crc32(changed)))
    (tmp_path / "changed.qca").write_bytes(data)
    with pytest.raises(TrustError, match="built from another plan than the one in the file; do not run it"):
        load_image(tmp_path / "changed.qca", trust_native=saved.digests)


def test_scratch_memory_is_what_the_build_itself_needs(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version's emitter may ask for less scratch than a build of this one writes to."""
    monkeypatch.setattr("qcompiler.runtime.loaded.scratch_stride", lambda plan, name: 0)
    run = qc.load(saved.path, trust_native=True)
    assert run.scratch_stride > 0
    assert run.scratch_stride == saved.program.run.scratch_stride


def test_a_member_that_is_no_build_is_refused() -> None:
    for data in (b"", b"x" * 40, b"x" * 8 + (1 << 40).to_bytes(8, "little") + builds.MAGIC):
        with pytest.raises(CorruptFileError, match=r"native/x86-64\.so"):
            builds.unpack_build("native/x86-64.so", "0" * 64, memoryview(data))


# --- a machine without a compiler ------------------------------------------------------------------------------------

ELSEWHERE = r"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "xdsl", "transformers", "cuda"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import json
import re
import numpy as np
import qcompiler as qc
from qcompiler.errors import CompilerMissingError
path, out = sys.argv[1:]
try:
    qc.load(path)
except CompilerMissingError as error:
    message = str(error)
found = re.search(r"sha256:[0-9a-f]{64}", message)
results = {"message": message}
if found:
    run = qc.load(path, trust_native=found[0], num_threads=2)
    x = {rows: np.random.default_rng(rows).standard_normal((rows, 64), np.float32) for rows in (1, 40)}
    results |= {f"{name}{rows}": value for rows in x for name, value in run(x[rows]).items()}
    results["isa"] = run.isa
    run.save(out + ".qca")  # a build goes on to the next machine with its thread pool
assert not {"torch", "xdsl"} & set(sys.modules)
np.savez(out, **results)
"""


def run_without_compiler(path: Path, out: Path, **environment: str) -> dict[str, np.ndarray]:
    """What `ELSEWHERE` finds on a machine with an empty cache, no programs on PATH, no torch and no xdsl."""
    (out.parent / "empty").mkdir(exist_ok=True)
    hidden = {"QC_CXX", "CXX", "QC_ISA"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    there = {"PATH": str(out.parent / "empty"), "QC_CACHE_DIR": str(out.parent / f"cache-{out.name}")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, path, out],
        env=kept | there | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(np.load(f"{out}.npz"))


def test_a_program_moves_to_machines_without_a_compiler(saved: Saved, tmp_path: Path) -> None:
    """An older machine and, with the file that it saved again, a third one; the bits are those of the same target."""
    older = run_without_compiler(saved.path, tmp_path / "older", QC_ISA="x86-64-v3")
    message = str(older["message"])
    assert str(older["isa"]) == "x86-64-v3"
    assert saved.digests["x86-64-v3"] in message and saved.digests["x86-64-v4"] not in message
    assert re.search(r"no C\+\+ compiler was found.* install one.*trust its author.*trust_native=", message)
    third = run_without_compiler(tmp_path / "older.qca", tmp_path / "third")
    assert str(third["isa"]) == "x86-64-v3"

    for rows in (1, 40):
        wanted = saved.alone(x_of(rows))
        with torch.no_grad():
            exact = saved.alone.oracle(torch.from_numpy(x_of(rows)))
        best = saved.program(x_of(rows))
        for name, value in wanted.items():
            assert older[f"{name}{rows}"].tobytes() == value.tobytes() == third[f"{name}{rows}"].tobytes()
            reference = exact[name].numpy()
            for result in (value, best[name]):  # instruction sets differ in the order of sums
                assert np.linalg.norm(result - reference) <= 1e-5 * np.linalg.norm(reference)


def test_without_a_build_that_runs_there_the_message_says_what_the_machine_needs(saved: Saved, tmp_path: Path) -> None:
    found = run_without_compiler(saved.path, tmp_path / "plain", QC_ISA="x86-64")
    message = str(found["message"])
    assert "install one" in message and "isa" not in found
    assert re.search(
        r"qcompile\(targets=\[…\]\) where there is a compiler: this machine runs generic, x86-64, ", message
    )
    assert re.search(r"the file has x86-64-v\d, x86-64-v\d", message)


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_several_gpu_architectures_are_compiled_without_a_gpu_and_the_fitting_one_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled("sm_80", "sm_90a", device="cuda:7")
    digests = program.save(tmp_path / "gpus.qca")
    assert set(digests) == {"sm_80", "sm_90a"}
    with zipfile.ZipFile(tmp_path / "gpus.qca") as archive:
        for name in digests:
            assert archive.read(f"native/{name}.cubin")[:4] == b"\x7fELF"
    report = str(program.report())
    assert " on sm_80: " in report and " on sm_90a: " in report
    monkeypatch.setattr(registry, "is_available", lambda device: True)
    for present, chosen in (("sm_86", "sm_80"), ("sm_90a", "sm_90a")):
        monkeypatch.setattr(registry, "architecture", lambda device, present=present: present)
        native = load_image(tmp_path / "gpus.qca", trust_native=digests, device="cuda:0")[1]
        assert native is not None and (native.isa, native.path.suffix) == (chosen, ".cubin")
    monkeypatch.setattr(registry, "architecture", lambda device: "sm_75")
    with pytest.raises(TargetMismatchError, match=r"needs sm_80, cuda:0 runs sm_70, sm_75"):
        load_image(tmp_path / "gpus.qca", trust_native=True, device="cuda:0")


# --- command line and page -------------------------------------------------------------------------------------------

MODEL = """
import torch
def model():
    return torch.nn.Linear(16, 8).eval(), (torch.zeros(2, 16),)
"""


def test_the_command_line_takes_targets_and_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net_for_targets.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert main(["compile", "net_for_targets:model", "-o", "net.qca", "--targets", "x86-64,x86-64-v3"]) == 0
    printed = dict(re.findall(r"native build for (\S+): (sha256:[0-9a-f]{64})", capsys.readouterr().err))
    assert set(printed) == {"x86-64", "x86-64-v3"}
    np.save("x.npy", np.ones((2, 16), np.float32))
    assert main(["run", "net.qca", "x.npy", "--trust-native", ",".join(printed.values())]) == 0
    assert main(["run", "net.qca", "x.npy", "--trust-native", "sha256:0"]) == 1


def test_the_page_s_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2 and "targets=" in blocks[0] and "trust_native=" in blocks[1]
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks), {})
    printed = capsys.readouterr().out
    assert re.search(r"^x86-64-v3 sha256:", printed, re.MULTILINE) and printed.endswith("the same\n")
