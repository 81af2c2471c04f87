"""llama.cpp: `ggml_mul_mat` on ggml's CPU backend, called through the libraries of llama-cpp-python. It makes int8 rows
of x in each product. Weights that ggml repacks for x86-64 lie in its buffer for these, as llama.cpp has them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from shared import Array, Case, Engine, Made, UnableError

VERSION = llama_cpp.__version__
FOLDER = Path(llama_cpp.__file__).parent / "lib"
BASE, CPU = (ctypes.CDLL(str(FOLDER / name)) for name in ("libggml-base.so", "libggml-cpu.so"))
F32 = 0
TYPES = {"q4_0": (2, 4.5, True), "q4_K": (12, 4.5, True), "q6_K": (14, 6.5625, False), "q8_0": (8, 8.5, False)}
"""ggml's number of a type, its bits per weight, and whether it repacks weights of this type on x86-64 with AVX2."""


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


init = function(BASE, "ggml_init", c_void_p, InitParams)
free = function(BASE, "ggml_free", None, c_void_p)
overhead = function(BASE, "ggml_tensor_overhead", c_size_t)
graph_overhead = function(BASE, "ggml_graph_overhead_custom", c_size_t, c_size_t, c_bool)
new_tensor = function(BASE, "ggml_new_tensor_2d", c_void_p, c_void_p, c_int, c_int64, c_int64)
mul_mat = function(BASE, "ggml_mul_mat", c_void_p, c_void_p, c_void_p, c_void_p)
new_graph = function(BASE, "ggml_new_graph_custom", c_void_p, c_void_p, c_size_t, c_bool)
expand = function(BASE, "ggml_build_forward_expand", None, c_void_p, c_void_p)
row_size = function(BASE, "ggml_row_size", c_size_t, c_int, c_int64)
quantize = function(
    BASE, "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
)
place = function(BASE, "ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p, c_void_p)
set_tensor = function(BASE, "ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)
get_tensor = function(BASE, "ggml_backend_tensor_get", None, c_void_p, c_void_p, c_size_t, c_size_t)
compute = function(BASE, "ggml_backend_graph_compute", c_int, c_void_p, c_void_p)
buffer_free = function(BASE, "ggml_backend_buffer_free", None, c_void_p)
buffer_name = function(BASE, "ggml_backend_buft_name", c_char_p, c_void_p)
proc_address = function(BASE, "ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p)
device_of = function(BASE, "ggml_backend_reg_dev_get", c_void_p, c_void_p, c_size_t)
cpu_reg = function(CPU, "ggml_backend_cpu_reg", c_void_p)
cpu_init = function(CPU, "ggml_backend_cpu_init", c_void_p)
cpu_threads = function(CPU, "ggml_backend_cpu_set_n_threads", None, c_void_p, c_int)
cpu_buffer_type = function(BASE, "ggml_backend_cpu_buffer_type", c_void_p)
BACKEND = cpu_init()


def use_threads(threads: int) -> None:
    cpu_threads(BACKEND, threads)


def repacked() -> int:
    """ggml's buffer type for repacked weights."""
    get = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(
        proc_address(cpu_reg(), b"ggml_backend_dev_get_extra_bufts")
    )
    for found in get(device_of(cpu_reg(), 0)):
        if found is None:
            raise UnableError("this build of ggml does not repack weights")
        if buffer_name(found) == b"CPU_REPACK":
            return found
    raise AssertionError


class Graph:
    """The weights, x and a product of each copy."""

    def __init__(self, case: Case, kind: int, buffer_type: int) -> None:
        self.case = case
        contexts = [self._context(case.copies) for _ in range(2)]
        weights = [new_tensor(contexts[0], kind, case.k, case.n) for _ in range(case.copies)]
        x = new_tensor(contexts[1], F32, case.k, case.m)
        self.results = [mul_mat(contexts[1], w, x) for w in weights]
        self.graph = new_graph(contexts[1], 2 * case.copies + 8, False)
        for each in self.results:
            expand(self.graph, each)
        buffers = [place(contexts[0], buffer_type), place(contexts[1], cpu_buffer_type())]
        weakref.finalize(self, _release, buffers, contexts)
        nbytes = row_size(kind, case.k) * case.n
        packed = np.empty(nbytes, np.uint8)
        quantize(kind, case.first.ctypes.data, packed.ctypes.data, 0, case.n, case.k, None)
        for tensor, data in zip(weights, case.turned(packed.reshape(case.n, -1)), strict=True):
            set_tensor(tensor, data.ctypes.data, 0, nbytes)
        set_tensor(x, case.x.ctypes.data, 0, case.x.nbytes)

    @staticmethod
    def _context(copies: int) -> int:
        size = overhead() * (2 * copies + 8) + graph_overhead(2 * copies + 8, False)
        return int(init(InitParams(size, None, True)))

    def run(self) -> list[int]:
        code = compute(BACKEND, self.graph)
        if code:
            raise UnableError(f"ggml_backend_graph_compute gave {code}")
        return self.results

    def read(self, tensor: int) -> Array:
        found = np.empty((self.case.m, self.case.n), np.float32)
        get_tensor(tensor, found.ctypes.data, 0, found.nbytes)
        return found


def _release(buffers: list[int], contexts: list[int]) -> None:
    for buffer in buffers:
        buffer_free(buffer)
    for context in contexts:
        free(context)


def product(case: Case, kind: int, *, repacks: bool) -> Made:
    graph = Graph(case, kind, repacked() if repacks else cpu_buffer_type())
    return graph.run, graph.read


def engine(name: str) -> Engine:
    kind, bits, repacks = TYPES[name]
    return Engine("int8", bits, lambda case: product(case, kind, repacks=repacks))


ENGINES = {f"llama.cpp {name} a8": engine(name) for name in TYPES}
