"""Other projects' work beside ours: a process for each project (cpupeers/process.py), which takes turns with us.

What is not installed, or cannot compute a case, is named with the reason, and the command that installs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .ours import MOST_COPIES, Runner

ROOT = Path(__file__).resolve().parents[2]
PROCESS = ROOT / "benchmarks" / "cpupeers" / "process.py"
OWN_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
INSTALL = "make bench-peers"
SILENT = 900.0
"""Seconds without an answer after which a process is ended: torch.compile of the largest case takes some minutes."""
PROJECTS = ("torch", "onnxruntime", "openvino", "bitsandbytes", "torchao", "llama_cpp")
"""Those with products of matrices …"""

OF_MODELS = ("onnxruntime", "openvino")
"""… and those with whole models, in processes of their own."""


class PeerError(Exception):
    """A peer cannot do what it is asked; the text says why."""


def default_python() -> str:
    """The environment that `make bench-peers` makes, or this one."""
    return str(OWN_PYTHON) if OWN_PYTHON.exists() else sys.executable


class Peer:
    """The process of a project. PeerError if it does not start."""

    def __init__(self, project: str, python: str, threads: int, silent: float = SILENT, work: str = "products") -> None:
        self.project, self.ended, self.silent, self.hung = project, "", silent, False
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
        command = [python, "-P", "-c", START, str(PROCESS), work, project, "--threads", str(threads)]
        # A library that looks for a GPU finds none, and OpenMP has as many threads as everybody.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{python} does not run: {error}") from error
        hello = self._answer()
        self.version: str = hello["version"]
        self.engines: dict[str, str] = hello["engines"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        watch = threading.Timer(self.silent, self._give_up)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        watch.join()
        if not line:
            code = self.process.wait()
            if self.hung:
                self.ended = f"it gave no answer within {self.silent:.0f} s, and was ended"
                raise PeerError(self.ended)
            self._said.seek(0)
            last = (self._said.read().strip().splitlines() or ["nothing"])[-1]
            self.ended = f"its process ended with {code}; it said last: {last[:300]}"
            raise PeerError(self.ended)
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise PeerError(found["failed"])
        return found

    def _give_up(self) -> None:
        self.hung = True
        self._kill()

    def _kill(self) -> None:
        """Ends the process and its children, which may hold its output open."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, what: str, **given: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        if self.ended:
            raise PeerError(self.ended)
        try:
            self.process.stdin.write(json.dumps({"do": what, **given}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has ended; why is read below
            pass
        return self._answer()

    def runner(self, engine: str, m: int, n: int, k: int, total: int) -> Runner:
        made = self.ask("make", engine=engine, m=m, n=n, k=k, bytes=total, most=MOST_COPIES)

        def turn(least: float) -> float:
            return float(self.ask("run", engine=engine, seconds=least)["seconds"])

        return Runner(engine, self.engines[engine], made["bytes"], made["copies"], made["error"], turn, ours=False)

    def model(self, engine: str, program: Path, inputs: Path, result: Path) -> Callable[[], float]:
        """Seconds of a call of a model (cpupeers/process.py says what the files are), after its first result."""
        self.ask("load", engine=engine, program=str(program), inputs=str(inputs), result=str(result))
        return lambda: float(self.ask("call", engine=engine)["seconds"])

    def processor_seconds(self) -> float:
        return float(self.ask("cpu")["seconds"])

    def close(self) -> None:
        self._kill()
        self.process.wait()
        self._said.close()


START = (
    "import runpy, sys; from pathlib import Path; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, str(Path(sys.argv[0]).parent)); runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script without the current folder on the path: a folder `kernels` there hides a package of that name."""


def start(
    projects: Sequence[str], python: str, threads: int, work: str = "products"
) -> tuple[list[Peer], dict[str, str]]:
    """(the processes, why those that are missing are)."""
    known = PROJECTS if work == "products" else OF_MODELS
    found, missing = [], {project: "left out by --peers" for project in known if project not in projects}
    for project in projects:
        try:
            found.append(Peer(project, python, threads, work=work))
        except PeerError as error:
            missing[project] = f"{error} (`{INSTALL}` installs it)"
    return found, missing
