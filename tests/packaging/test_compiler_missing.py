"""A machine without a C++ compiler: the message names the package that brings one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qcompiler as qc
from qcompiler import errors
from qcompiler.cli import main
from qcompiler.runtime.compiler import find_compiler


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with an empty folder and a cache that holds no library yet; returns the folder of PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QC_CXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return programs


def test_the_message_names_the_package(no_compiler: Path) -> None:
    with pytest.raises(errors.CompilerMissingError, match=r"apt install g\+\+"):
        find_compiler()


def test_on_debian_the_message_is_one_command(no_compiler: Path) -> None:
    (no_compiler / "apt-get").write_text("#!/bin/sh\n")
    (no_compiler / "apt-get").chmod(0o755)
    with pytest.raises(errors.CompilerMissingError, match=r"install one with `apt install g\+\+`"):
        find_compiler()


def test_a_compiler_named_by_a_variable_must_exist(no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_CXX", "nowhere-g++")
    with pytest.raises(errors.CompilerMissingError, match=r"QC_CXX='nowhere-g\+\+' names no program"):
        find_compiler()


def test_compiling_a_model_fails_with_that_message(no_compiler: Path) -> None:
    with pytest.raises(errors.CompilerMissingError, match=r"apt install g\+\+"):
        qc.qcompile(torch.nn.Linear(8, 8), (torch.zeros(2, 8),))


def test_doctor_says_it_too(no_compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    assert "apt install g++" in capsys.readouterr().err
