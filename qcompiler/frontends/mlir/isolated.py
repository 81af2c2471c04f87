"""A text is parsed in a process of its own first: MLIR's C++ ends the process on some damaged texts.

    parent                                        child, with limits of memory and time
    the text                     ->               parse, verify, print in generic form, parse and verify that; print
                                                  each place and type
    parse the printed text       <-               the printed text, or the error

The parent parses only what MLIR printed, which the child has parsed already.  A child that crashes, or that takes more
than it may, is an `ExportError`.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from qcompiler.errors import ExportError
from qcompiler.frontends.mlir import bindings
from qcompiler.frontends.mlir.text import ModuleText

MEMORY = 2 << 30
MEMORY_PER_BYTE = 200
"""Bytes of memory that parsing may take, and for each byte of the text: ops, types and locations take up to about 60,
and two modules and one printed text are alive at once."""
SECONDS = 30
BYTES_PER_SECOND = 50_000
"""Processor time, and more of it for long texts: parsing reads a megabyte a second or more."""
ASLEEP = 10
"""A child that takes this many times its processor time by the clock is taken to wait for something."""
PRINTED = 16 << 20
PRINTED_PER_BYTE = 40
"""Characters that the printed module may have. Types that nest by their aliases double with each line of the text; the
generic form of an exporter's text, with its places, is 2 to 6 times as long."""

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qcompiler.frontends.mlir import isolated; isolated.serve()"
)


def printed(text: ModuleText, file: str) -> ModuleText:
    """The text as MLIR prints it, in generic form with all places. ExportError as `bindings.parse` has it, and for a
    text that crashes the parser or takes too much."""
    if not sys.executable:
        raise ExportError(
            f"{file} is parsed in a process of its own, and there is no sys.executable to start: if the text comes "
            "from an exporter that you ran yourself, from_mlir(…, trusted=True) parses it in this process"
        )
    seconds = SECONDS + len(text.body) // BYTES_PER_SECOND
    head = json.dumps({"dialect": text.dialect, "mixed": text.mixed, "file": file, "seconds": seconds})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path)],
            input=head.encode() + b"\n" + text.body.encode("utf-8", "replace"),
            capture_output=True, timeout=ASLEEP * seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"{file}: MLIR's parser did not end within {ASLEEP * seconds} s") from error
    if done.returncode:
        raise ExportError(_ended(done.returncode, done.stderr.decode("utf-8", "replace"), file, seconds))
    first, _, rest = done.stdout.partition(b"\n")
    if refused := json.loads(first)["refused"]:
        raise ExportError(refused)
    return replace(text, body=rest.decode(), mixed=False)


def _ended(code: int, said: str, file: str, seconds: int) -> str:
    if code == -signal.SIGXCPU:
        return f"{file}: MLIR's parser took more than {seconds} s of processor time, as it does for no exporter's text"
    if code > 0:
        last = said.strip().splitlines()[-1:] or ["no message"]
        return f"{file}: the process that parses it ended with {code}: {last[0][:300]}"
    name = signal.Signals(-code).name
    return (
        f"{file}: MLIR's parser crashed on it ({name}), or took more memory than it may. The text is damaged, or was "
        "written for another version of MLIR: export it again"
    )


# --- the child -------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Reads a text from the standard input, and writes what became of it."""
    head = json.loads(sys.stdin.buffer.readline())
    body = sys.stdin.buffer.read().decode()
    text, file = ModuleText(body, head["dialect"], head["mixed"]), head["file"]
    bindings.load(text, file)
    _limit(len(body), head["seconds"])
    try:
        found = _again(text, file)
    except ExportError as error:
        sys.stdout.buffer.write(json.dumps({"refused": str(error)}).encode() + b"\n")
        return
    sys.stdout.buffer.write(json.dumps({"refused": ""}).encode() + b"\n" + found.encode())


def _again(text: ModuleText, file: str) -> str:
    """The printed module, which parses, too."""
    module = bindings.parse(text, file)
    found = str(module.operation.get_asm(print_generic_op_form=True, enable_debug_info=True))
    if len(found) > PRINTED + PRINTED_PER_BYTE * len(text.body):
        raise ExportError(
            f"{file} has {len(text.body)} characters, and MLIR prints it as {len(found)}: its types or places refer to "
            "each other so that they multiply, which no exporter writes"
        )
    _print_parts(bindings.parse(replace(text, body=found, mixed=False), file))
    return found


def _print_parts(module: Any) -> None:
    """What readers print alone: places and types, whose aliases stand for a text that doubles with each line."""
    for op in bindings.walk(module.operation):
        str(op.location)
        blocks = [block for region in op.regions for block in region.blocks]
        for value in (*op.results, *(each for block in blocks for each in block.arguments)):
            str(value.type)
            str(getattr(value, "location", ""))


def _limit(size: int, seconds: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY + MEMORY_PER_BYTE * size
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
