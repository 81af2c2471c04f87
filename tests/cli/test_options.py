"""What the command line says about itself, what it refuses before it does any work, and what it keeps away."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import qcompiler
from qcompiler.cli import main
from qcompiler.compile_command import READ, add_compile, check_read
from qcompiler.errors import ArgumentError
from qcompiler.inspect import doctor


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"qcompiler {qcompiler.__version__}"


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "qcompiler", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"qcompiler {qcompiler.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "x.qca", "--rounds", "0"],
        ["bench", "x.qca", "--rounds", "-1"],
        ["bench", "x.qca", "--rounds", "many"],
        ["bench", "x.qca", "--dim", "b=0"],
        ["bench", "x.qca", "--dim", "b"],
        ["bench", "x.qca", "--num-threads", "0"],
        ["run", "x.qca", "--num-threads", "-2"],
        ["inspect", "x.qca", "--timeline", "--dim", "=3"],
        ["inspect", "x.qca", "--timeline", "--between", "5"],
        ["inspect", "x.qca", "--timeline", "--between", "9,3"],
        ["inspect", "x.qca", "--timeline", "--between", "a,b"],
    ],
    ids=" ".join,
)
def test_values_that_mean_nothing_are_usage_errors(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """x.qca is not there: the command line is judged before any file is opened."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and arguments[-2] in said and "usage: qc" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "small_model:never", "-o", "nowhere/x.qca"],
        ["run", "never.qca", "x.npy", "-o", "nowhere/y.npz"],
        ["inspect", "never.qca", "--perfetto", "nowhere/trace.json"],
        ["convert", "never.gguf", "nowhere/x.gguf"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_output_folder_that_is_not_there_is_said_before_any_work(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """What is to be read does not exist, and is not asked for."""
    assert main(arguments) == 1
    assert "there is no folder 'nowhere'" in capsys.readouterr().err


def _compile_parser() -> argparse.ArgumentParser:
    return add_compile(argparse.ArgumentParser().add_subparsers())


def test_an_option_of_compile_is_refused_for_each_kind_of_model_that_does_not_name_it() -> None:
    """Also one that is declared and forgotten: nothing is ignored in silence."""
    command = _compile_parser()
    command.add_argument("--forgotten", default=1)
    known = {action.dest: action for action in command._actions if action.dest != "help"}
    assert set().union(*READ.values()) == set(known) - {"forgotten"}, "a name of READ is that of no argument"
    models = dict(zip(READ, ("m:f", "x.mlir", "x.gguf"), strict=True))
    for kind, model in models.items():
        given = argparse.Namespace(**{name: action.default for name, action in known.items()})
        given.model = model
        check_read(given, command._actions)
        for name in set(known) - READ[kind]:
            changed = argparse.Namespace(**{**vars(given), name: "given"})
            with pytest.raises(ArgumentError, match=f"'{model}' is taken for {kind}.*{known[name].option_strings[0]}"):
                check_read(changed, command._actions)


class _Recorded(argparse.Namespace):
    """A command line that remembers which of its options were read."""

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_"):
            super().__getattribute__("__dict__").setdefault("_seen", set()).add(name)
        return super().__getattribute__(name)


@pytest.mark.slow  # torch and transformers
def test_a_compile_of_a_language_model_reads_each_option_that_it_does_not_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    options = _Recorded(**{action.dest: action.default for action in _compile_parser()._actions})
    options.model, options.output = str(tmp_path / "x.gguf"), tmp_path / "x.qca"
    monkeypatch.setattr("qcompiler.lm.compile.compile_causal_lm", lambda *_, **__: _Saved())
    monkeypatch.setattr("qcompiler.compile_command.check_read", lambda *_: None)  # it looks at all of them
    _compile_parser().get_default("run")(options)
    assert READ["a .gguf file or a folder with config.json"] <= options._seen


class _Saved:
    """What the command asks of a compiled language model."""

    program = SimpleNamespace(ledger=SimpleNamespace(totals=lambda: "totals"), timing=lambda: "timing")

    def save(self, path: Path, *, stages: bool) -> dict[str, str]:
        path.write_bytes(b"x")
        return {}


def test_a_program_is_not_saved_into_a_folder_that_is_not_there(program: Path, tmp_path: Path) -> None:
    with pytest.raises(qcompiler.errors.ArgumentError, match="there is no folder"):
        qcompiler.load(program).save(tmp_path / "nowhere" / "x.qca")


def test_a_trace_needs_no_chart(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert main(["inspect", str(program), "--perfetto", str(out), "--dim", "b=3"]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())


def test_what_belongs_to_a_timeline_is_not_ignored_without_one(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in (["--entry", "main"], ["--dim", "b=2"]):
        assert main(["inspect", str(program), *extra]) == 1
        assert "add --timeline or --perfetto" in capsys.readouterr().err
    assert main(["inspect", str(program), "--between", "1,2"]) == 1
    assert "--between is a part of the chart: add --timeline" in capsys.readouterr().err


BUCKETS = """
import torch, qcompiler
torch.manual_seed(0)
made = qcompiler.qcompile(
    torch.nn.Linear(16, 8).eval(), (torch.randn(5, 16),), dynamic_shapes=({0: ("b", 1, 64)},),
    buckets=[("one", {"b": (1, 1)}), ("many", {"b": (1, 64)})],
)
made.save("buckets.qca")
"""


def test_bench_times_the_entry_point_asked_for(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BUCKETS, "buckets", "exec"), {})
    found = {}
    for entry in ("one", "many"):
        assert main(["bench", "buckets.qca", "--entry", entry, "--rounds", "2", "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        found[entry] = (figures["entry"], figures["dims"])
    assert found == {"one": ("one", {}), "many": ("many", {"b": 64})}
    assert main(["bench", "buckets.qca", "--entry", "none"]) == 1
    assert "the entry points are one, many" in capsys.readouterr().err
    assert main(["bench", "buckets.qca", "--entry", "many", "--dim", "b=1"]) == 1
    assert "a call runs 'one'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "status"),
    [
        ((), 0),
        (("compiler",), 0),  # NVRTC compiles for a GPU
        (("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), 0),
        (("compiler", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), 1),
        (("torch",), 1),
    ],
)
def test_doctor_fails_where_nothing_could_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: tuple[str, ...], status: int
) -> None:
    names = ("compiler", "torch", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    facts = {name: "missing" if name in missing else "1" for name in names}
    monkeypatch.setattr(doctor, "examine", lambda: facts)
    assert main(["doctor", "--no-measure"]) == status
    assert ("no C++ compiler" in capsys.readouterr().err) == ("compiler" in missing)


@pytest.mark.parametrize(("name", "status"), [("torch", 1), ("numbers_of_mine", 70)])
def test_a_missing_torch_is_said_with_the_command_that_installs_it(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base package does not bring it, and its absence is no bug."""

    def run(_: argparse.Namespace) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("qcompiler.lm.commands.generate", run)
    assert main(["generate", "x.gguf", "--prompt", "a"]) == status
    assert ("pip install 'qcompiler[files]'" in capsys.readouterr().err) == (status == 1)


NOISY_PACKAGES = {
    "torchao.py": "import logging\nsay = logging.getLogger('torchao').warning\nsay('noise of an import')\n",
    "transformers.py": "import torchao\ndef used():\n    torchao.say('true, through transformers')\n",
    "users.py": "import torchao\n",
}
NOISY_IMPORTS = """
import sys
from qcompiler.import_noise import without_import_noise

with without_import_noise():
    import transformers
    transformers.used()
    print("-", file=sys.stderr, flush=True)
    del sys.modules["torchao"]
    import users
del sys.modules["torchao"], sys.modules["transformers"]
print("-", file=sys.stderr, flush=True)
import transformers
"""


def test_only_lines_of_an_import_by_transformers_are_dropped(tmp_path: Path) -> None:
    """What torchao says is kept away where another package imports it. The packages are stand-ins of a few lines."""
    for name, text in NOISY_PACKAGES.items():
        (tmp_path / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", NOISY_IMPORTS], capture_output=True, text=True, check=True, env=env)
    within, by_the_user, after = done.stderr.split("-\n")
    assert within == "true, through transformers\n"
    assert by_the_user == after == "noise of an import\n"
