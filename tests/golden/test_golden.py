"""Program files of every kept release load, and compute what they computed. README.md here states the policy."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import TargetMismatchError
from qcompiler.inspect.files import describe
from qcompiler.runtime.program_file import FORMAT_VERSION, Header, load_image

FOLDER = Path(__file__).resolve().parent
RELEASES = sorted(path.name.removesuffix("-target.qca") for path in FOLDER.glob("*-target.qca"))
TOLERANCE = 1e-5
"""Of a result's norm: what docs/program-file.md promises between instruction sets and versions, in fp32."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this run: the kernels are compiled again, and all weights' digests are checked."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("QC_CACHE_DIR", str(path))
        patch.delenv("QC_ISA", raising=False)
        yield path


@cache
def arrays(release: str) -> Mapping[str, np.ndarray]:
    return dict(np.load(FOLDER / f"{release}.npz"))


def check(run: Any, release: str) -> dict[str, np.ndarray]:
    """All calls in order, since the states run through them; returns the last results."""
    stored = arrays(release)
    calls = 1 + max(int(name.split(".")[1]) for name in stored)
    results: dict[str, np.ndarray] = {}
    assert calls >= 3
    for call in range(calls):
        arguments = {name.split(".")[2]: value for name, value in stored.items() if name.startswith(f"in.{call}.")}
        results = run(**arguments)
        wanted = {name.split(".")[2]: value for name, value in stored.items() if name.startswith(f"out.{call}.")}
        assert list(results) == list(wanted)
        for name, value in wanted.items():
            found = results[name]
            assert (found.shape, found.dtype) == (value.shape, value.dtype), (call, name)
            if value.dtype.kind == "f":
                assert np.linalg.norm(found - value) <= TOLERANCE * np.linalg.norm(value), (call, name)
            else:
                assert np.array_equal(found, value), (call, name)
    return results


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_for_the_cpu_computes_what_it_computed_with_kernels_compiled_again(
    release: str, own_cache: Path
) -> None:
    run = qc.load(FOLDER / f"{release}-target.qca", verify="full", num_threads=2)
    assert Path(run.report()["library"]).is_relative_to(own_cache / "native")
    check(run, release)
    run.reset()
    assert check(run, release)["count"].item() > 0


@pytest.mark.parametrize("release", RELEASES)
def test_the_portable_file_is_packed_again_to_the_same_bits(release: str) -> None:
    packed, stored = (
        load_image(FOLDER / f"{release}-{kind}.qca", verify="full")[0] for kind in ("canonical", "target")
    )
    assert packed.plan == stored.plan
    for entry in stored.plan.weights:
        place = slice(entry.offset, entry.offset + entry.nbytes)
        assert np.array_equal(packed.weights[place], stored.weights[place]), entry.name
    check(qc.load(FOLDER / f"{release}-canonical.qca"), release)


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_for_gpus_computes_what_it_computed(release: str) -> None:
    check(qc.load(FOLDER / f"{release}-cuda.qca", device="sim:0", verify="full"), release)


@pytest.mark.skipif((platform.machine(), platform.system()) != ("x86_64", "Linux"), reason="the builds' machine")
@pytest.mark.parametrize("release", RELEASES)
def test_the_build_of_a_release_runs_or_is_refused_for_its_interface(release: str) -> None:
    path = FOLDER / f"{release}-target.qca"
    (build,) = describe(path)["native"]
    try:
        run = qc.load(path, trust_native=f"sha256:{build['sha256']}")
    except TargetMismatchError as error:
        assert not release.startswith(qc.__version__), "this version cannot run its own build"
        assert "version" in str(error) and "interface" in str(error)
        return
    assert run.isa == build["isa"] == "x86-64"
    check(run, release)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.qca")), ids=lambda path: path.name)
def test_inspect_reads_every_golden(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = describe(path)
    assert path.name.startswith(f"{facts['qcompiler']}-format{facts['format']}-")
    assert facts["layout"] == ("canonical" if path.name.endswith("-canonical.qca") else "target")
    assert {entry["name"] for entry in facts["entries"]} == {"main"}
    assert {group["stored"].partition(":")[0] for group in facts["weights"]} >= {"nf4", "int4", "int8", "f32"}
    assert {"attention", "embedding", "linear", "loop", "norm"} <= set(facts["templates"])
    for options in ([], ["--json"], ["--plan"], ["--ir", "import"]):
        assert main(["inspect", str(path), *options]) == 0
        assert len(capsys.readouterr().out) > 200


# --- the policy ------------------------------------------------------------------------------------------------------


def minor(version: str) -> tuple[int, int]:
    major, second = version.split(".")[:2]
    return int(major), int(second)


def test_the_release_at_hand_and_the_two_before_it_have_a_golden() -> None:
    changelog = (FOLDER.parents[1] / "CHANGELOG.md").read_text()
    releases = {minor(version) for version in re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)}
    assert max(releases) == minor(qc.__version__)
    kept = {minor(release) for release in RELEASES}
    assert set(sorted(releases)[-3:]) <= kept, "write one with tests/golden/make_golden.py"


@pytest.mark.parametrize("release", RELEASES)
def test_the_schema_of_a_release_is_still_read(release: str) -> None:
    """Fields may be added with defaults; none may go, become required, or take fewer values."""
    old = json.loads((FOLDER / f"{release}.schema.json").read_text())
    problems = [line for line in lost(old, schema(), "Header") if "LibraryCall" not in line]  # nothing ever wrote one
    assert not problems, "\n".join(problems)


def schema() -> Any:
    return msgspec.json.schema(Header)


def lost(old: Any, new: Any, where: str) -> Iterator[str]:
    """What a document that follows the schema `old` may hold and `new` refuses, as lines."""
    for name, record in old.get("$defs", {}).items():
        if name not in new["$defs"]:
            yield f"{name} is gone"
        else:
            yield from lost(record, new["$defs"][name], name)
    for name, field in old.get("properties", {}).items():
        if name not in new.get("properties", {}):
            yield f"{where}.{name} is gone"
        else:
            yield from lost(field, new["properties"][name], f"{where}.{name}")
    for name in set(new.get("required", ())) - set(old.get("required", ())):
        yield f"{where}.{name} has become required"
    for key in ("enum", "anyOf", "type", "const"):
        values = [value if isinstance(old.get(key), list) else old[key] for value in as_list(old.get(key))]
        known = as_list(new.get(key)) + as_list(new.get("enum") if key == "const" else None)
        for value in values:
            if value not in known and not widened(value, new):
                yield f"{where} no longer takes {value}"
    if "items" in old and isinstance(old["items"], dict):
        yield from lost(old["items"], new.get("items", {}), f"{where}[]")


def as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def widened(value: Any, new: Mapping[str, Any]) -> bool:
    """Whether what was one kind of value is now among several."""
    return value in new.get("anyOf", ()) or {"type": value} in new.get("anyOf", ())


def test_a_change_that_shuts_out_old_files_is_found() -> None:
    """The comparison itself: each of these changes would break a file of an earlier release."""
    old = schema()
    assert not list(lost(old, old, "Header"))
    first = next(iter(old["$defs"]["Operand"]["properties"]))
    for change, problem in (
        (lambda defs: defs.pop("Launch"), "Launch is gone"),
        (lambda defs: defs["Operand"]["properties"].pop(first), f"Operand.{first} is gone"),
        (lambda defs: defs["Operand"]["required"].append("new"), "Operand.new has become required"),
        (lambda defs: defs["Operand"]["properties"]["dtype"]["enum"].remove("bf16"), "dtype no longer takes bf16"),
    ):
        new = schema()
        change(new["$defs"])
        assert any(line.endswith(problem) for line in lost(old, new, "Header")), problem


def test_a_golden_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = tool()
    (tmp_path / f"{make.NAME}.npz").write_bytes(b"kept")
    with pytest.raises(FileExistsError, match=r"\.npz: a golden of a release is never overwritten"):
        make.write(tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"kept"]


@pytest.mark.slow
def test_the_script_writes_what_this_folder_holds(tmp_path: Path) -> None:
    """The script still runs, and what it writes now computes the same as the golden of this version."""
    make = tool()
    names = {path.name for path in make.write(tmp_path)}
    assert names == {path.name for path in FOLDER.glob(f"{qc.__version__}-format{FORMAT_VERSION}*")}
    check(qc.load(tmp_path / f"{make.NAME}-target.qca"), make.NAME)


@cache
def tool() -> ModuleType:
    """make_golden.py of this folder as a module."""
    spec = importlib.util.spec_from_file_location("make_golden", FOLDER / "make_golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
