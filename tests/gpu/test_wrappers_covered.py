"""Inline PTX stands in wrappers of device.cuh only, and each has a twin for the simulator and a conformance check."""

from __future__ import annotations

import re
from importlib import resources
from types import ModuleType

from qcompiler.kernels.cuda.emit import header

_DEFINITION = re.compile(r"QC_DEVICE\s+[\w ]+?[\s*&]+(qc_\w+)\(")
PLAIN = {"qc_shared_memory", "qc_shared_address", "qc_fixed", "qc_fixed_global", "qc_wgmma_descriptor"}
"""Of the hardware half, but without PTX: how the wrappers reach shared memory. Kernels name it by QC_SHARED."""


def functions(text: str) -> dict[str, str]:
    """Name -> text of every function that a header defines (overloads joined)."""
    found: dict[str, str] = {}
    starts = [*_DEFINITION.finditer(text)]
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=True):
        found[start[1]] = found.get(start[1], "") + text[start.start() : end]
    return found


def hardware_half() -> dict[str, str]:
    """The functions that the simulator replaces."""
    text = header("device.cuh")
    begin = text.index("#ifndef QC_SIM", text.index("// --- inline PTX"))
    return functions(text[begin : text.index("#endif  // QC_SIM", begin)])


def with_ptx() -> set[str]:
    return {name for name, text in functions(header("device.cuh")).items() if re.search(r"\basm\b", text)}


def test_the_parser_sees_the_wrappers() -> None:
    assert {"qc_load_stream_16", "qc_cp_async_wait", "qc_mma_16816", "qc_atomic_add_acq_rel"} <= with_ptx()
    assert "qc_pack_bf16" in with_ptx(), "PTX outside the hardware half counts too"


def test_a_wrapper_without_a_conformance_check_fails(conformance: ModuleType) -> None:
    covered = {name for check in conformance.CHECKS for name in check.covers}
    assert with_ptx() - covered == set(), "add a Check to tests/gpu/conformance.py"
    assert covered - with_ptx() == set(), "these checks name no wrapper"
    for check in conformance.CHECKS:
        for name in check.covers:
            assert re.search(rf"\b{name}\b", check.body), f"{check.name} does not call {name}"


def test_a_wrapper_without_a_simulated_twin_fails() -> None:
    shim = header("shim.h", "qcompiler.kernels.sim")
    twins = set(re.findall(r"^#define\s+(qc_\w+)\(|\b(qc_\w+)\([^;{]*\)\s*\{", shim, flags=re.M))
    names = {name for pair in twins for name in pair if name}
    assert set(hardware_half()) - PLAIN - names == set()


def test_ptx_stands_in_device_cuh_alone() -> None:
    for file in resources.files("qcompiler.kernels.cuda").iterdir():
        if file.name.endswith((".cuh", ".py")) and file.name != "device.cuh":
            assert not re.search(r"\basm\b\s*(volatile)?\s*\(", file.read_text(encoding="utf-8")), file.name
