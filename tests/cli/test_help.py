"""The examples in the help are command lines that exist; shells get scripts; every ending has its status."""

from __future__ import annotations

import argparse
import io
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from qcompiler import cli
from qcompiler.cli import main
from qcompiler.command_help import EXAMPLES, SHELLS
from qcompiler.inspect import terminal

(COMMANDS,) = (a.choices for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
QC = [sys.executable, "-P", "-m", "qcompiler"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_the_parser_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        first, *arguments = shlex.split(example)
        assert (first, arguments[0]) == ("qc", name)
        cli._parser().parse_args(arguments)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and EXAMPLES[name][0] in capsys.readouterr().out


def test_every_command_and_every_argument_says_what_it_is() -> None:
    silent = [
        f"{name} {'/'.join(action.option_strings) or action.dest}"
        for name, command in COMMANDS.items()
        for action in command._actions
        if not action.help
    ]
    assert not silent
    assert all(command.description for command in COMMANDS.values())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_a_script_that_it_reads(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "inspect" in script and ("--ledger" in script or "l ledger" in script)
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], check=False).returncode == 0


def test_completion_without_shtab_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'qcompiler[completion]'" in capsys.readouterr().err


def test_bash_completes_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "qc.bash").write_text(capsys.readouterr().out)
    (tmp_path / "tiny.qca").touch()
    lines = ["source qc.bash"]
    for words in ("qc insp", "qc inspect --led", "qc inspect tin"):
        lines += [
            f"COMP_WORDS=({words})",
            f"COMP_CWORD={len(words.split()) - 1}",
            "_shtab_qc",
            'echo "${COMPREPLY[@]}"',
        ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["inspect", "--ledger", "tiny.qca"], done.stderr


def test_any_other_exception_is_one_message_a_report_and_status_70(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "broken_model.py").write_text("def model():\n    raise ValueError('of the \\x1b[31m model')\n")
    assert main(["compile", "broken_model:model", "-o", "x.qca"]) == 70
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("qc: ValueError: of the \\x1b[31m model; the traceback is in ")
    report = Path(message.rpartition(" ")[2]).read_text()
    assert "broken_model.py" in report and "packages   torch " in report and "Traceback" in report


def test_a_stream_without_some_characters_gets_them_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    stdout.flush()
    assert ended.value.code == 0 and b"\\u2026" in stdout.buffer.getvalue()  # type: ignore[attr-defined]


# --- as processes ----------------------------------------------------------------------------------------------------


def in_terminal(arguments: Sequence[str], keys: bytes = b"", **environment: str) -> tuple[str, int]:
    """Runs qc in a terminal of 24 lines; the keys are pressed once something is shown."""
    child, fd = pty.fork()
    if child == 0:
        os.environ.update({"TERM": "xterm", "LINES": "24", "COLUMNS": "80", **environment})
        for name in {"NO_COLOR", "FORCE_COLOR", "PAGER", "QC_PAGER", "LESS"} - set(environment):
            os.environ.pop(name, None)
        os.execv(QC[0], [*QC, *arguments])
    shown, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        if not select.select([fd], [], [], 0.2)[0]:
            if shown and keys:
                os.write(fd, keys[:1])
                keys = keys[1:]
            continue
        try:
            part = os.read(fd, 1 << 16)
        except OSError:  # the terminal closes with the process
            break
        if not part:
            break
        shown += part
    else:
        os.kill(child, signal.SIGKILL)
    return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_terminal_has_colours_unless_they_are_refused(program: Path) -> None:
    arguments = ["inspect", str(program), "--stage", "fuse-dequant-matmul"]
    shown, status = in_terminal(arguments, PAGER="")
    assert status == 0 and "\033[1mqc.linear" in shown
    shown, status = in_terminal(arguments, PAGER="", NO_COLOR="1")
    assert status == 0 and "\033[" not in shown


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("less") is None, reason="less is not installed: the pager that is looked for")
def test_long_texts_are_paged_and_the_pager_keeps_its_keys(program: Path) -> None:
    shown, status = in_terminal(["inspect", str(program), "--stage", "emit-kernels"], b"\x03q")
    assert status == 0 and shown.count("\n") < 60, "the rest is behind the first page"


@pytest.mark.slow
def test_a_pager_that_does_not_exist_is_said(program: Path) -> None:
    shown, status = in_terminal(["inspect", str(program), "--stage", "import"], PAGER="no-such-pager")
    assert status == 0 and "names no program that exists" in shown and "func.return" in shown.replace("\033[0m", "")


def test_a_pager_with_a_quote_without_its_end_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QC_PAGER", "less '")
    monkeypatch.setattr(terminal, "_is_long", lambda text: True)
    terminal.show("a text")
    out, err = capsys.readouterr()
    assert out == "a text\n" and "is no command (No closing quotation)" in err


@pytest.mark.parametrize(
    "part", [[], pytest.param(["--stage", "emit-kernels"], marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_reader_that_goes_away_ends_the_command_quietly(program: Path, part: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*QC, "inspect", str(program), *part], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_full_disk_is_one_message(program: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*QC, "inspect", str(program)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1 and done.stderr.startswith("qc: ") and done.stderr.count("\n") == 1
