"""Runs a command with sanitised kernels: `python -m qcompiler.runtime.sanitized pytest tests/kernels`.

Sets `QC_SANITIZE` (the given value, else address,undefined) and preloads AddressSanitizer's runtime before the
command's own libraries.  A report of a sanitiser ends its process with exit status 66.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qcompiler.errors import RuntimeFailure
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.sanitize import COMMAND, KINDS, parse

EXIT_STATUS = 66


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs sanitised kernels: with the sanitisers in `base`'s `QC_SANITIZE`, else
    both.

    CompilerMissingError, and RuntimeFailure if the compiler has no runtime of the sanitisers.
    """
    kinds = parse(base.get("QC_SANITIZE", "")) or KINDS
    result = {**base, "QC_SANITIZE": ",".join(kinds)}
    if "address" in kinds:
        # libstdc++ is preloaded, too: at its start the runtime looks for the real __cxa_throw, which Python lacks.
        libraries = [_file("libasan.so"), _file("libstdc++.so.6")]
        result["LD_PRELOAD"] = ":".join([*map(str, libraries), *filter(None, [base.get("LD_PRELOAD")])])
    # Python frees little at exit; that is not a leak of the kernels.
    own = {"ASAN_OPTIONS": f"detect_leaks=0:exitcode={EXIT_STATUS}:allocator_may_return_null=1",
           "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={EXIT_STATUS}"}  # fmt: skip
    for name, options in own.items():
        result[name] = ":".join(filter(None, [options, base.get(name)]))
    return result


def _file(name: str) -> Path:
    """The path of a library of the compiler."""
    compiler = find_compiler()
    command = [*compiler.command, f"-print-file-name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = Path(done.stdout.strip())
    if not path.is_absolute() or not path.exists():
        raise RuntimeFailure(
            f"{compiler.version} has no {name}, which QC_SANITIZE=address needs; the mode works with g++ and its "
            "libasan (`apt install g++`)"
        )
    return path.resolve()


def main(arguments: Sequence[str]) -> None:
    """Replaces this process by the command."""
    if not arguments:
        raise SystemExit(f"usage: {COMMAND}")
    os.execvpe(arguments[0], list(arguments), environment(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
