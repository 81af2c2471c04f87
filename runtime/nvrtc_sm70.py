"""CUDA 12's NVRTC in a process of its own, for sm_70: the CUDA 13 version of the main process has dropped it.

    python -I nvrtc_sm70.py LIBRARY [OPTION…] < kernels.cu

With options, stdin is compiled to a cubin.  Stdout: one line of JSON (`version`, `error` as text or null, `log`), then
the cubin's bytes.  The file imports nothing of qcompiler, so that it runs by its path in an isolated interpreter.
"""

from __future__ import annotations

import ctypes
import json
import sys


class Nvrtc:
    """The functions of libnvrtc used here (NVRTC User Guide, "Basic Usage")."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def error(self, status: int) -> str:
        return f"{status}: {self.library.nvrtcGetErrorString(status).decode()}"

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}"

    def compile(self, source: bytes, options: list[str]) -> tuple[str | None, str, bytes]:
        """(error, log, cubin)."""
        program = ctypes.c_void_p()
        status = self.library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
        if status:
            return self.error(status), "", b""
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(program, len(options), words)
        log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            return self.error(status), log, b""
        return None, log, self._read(program, "CUBIN")

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw[: size.value]

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self.error(status))


def main(arguments: list[str]) -> None:
    path, *options = arguments
    nvrtc = Nvrtc(path)
    error, log, cubin = nvrtc.compile(sys.stdin.buffer.read(), options) if options else (None, "", b"")
    head = json.dumps({"version": nvrtc.version(), "error": error, "log": log})
    sys.stdout.buffer.write(head.encode() + b"\n" + cubin)


if __name__ == "__main__":
    main(sys.argv[1:])
