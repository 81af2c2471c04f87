"""An array in a device's memory: what a program gives back where its arguments were on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import CaptureRuleError, DeviceUnavailableError
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime import dlpack
from qcompiler.runtime.backends.base import Backend, Memory, Stream
from qcompiler.runtime.memory import address_of, align_up
from qcompiler.runtime.streams import is_capturing

GRANULE = 512
"""Bytes: results of nearly equal sizes reuse each other's memory."""


class Pool:
    """Result memory of one session and device: what a dropped array leaves is the next result's.

    Reuse is in the order of the session's stream, which waits for the caller's at each call.
    """

    def __init__(self, allocate: Callable[[int, str], Memory]) -> None:
        self._allocate = allocate
        # All of it, free or not: an array that dies in a reference cycle must not take its memory along.
        self._owned: list[Memory] = []
        self._free: dict[int, list[Memory]] = {}

    def take(self, nbytes: int) -> Lease:
        """Memory for a result of `nbytes`."""
        size = align_up(max(nbytes, 1), GRANULE)
        free = self._free.get(size)
        if free:
            return Lease(free.pop(), self)
        self._owned.append(self._allocate(size, "result"))
        return Lease(self._owned[-1], self)

    def give_back(self, memory: Memory) -> None:
        self._free.setdefault(memory.nbytes, []).append(memory)


class Lease:
    """Memory of a pool, returned to it when the last array on it is gone."""

    def __init__(self, memory: Memory, pool: Pool) -> None:
        self.memory = memory
        self._pool = pool

    def __del__(self) -> None:
        self._pool.give_back(self.memory)


class DeviceArray:
    """A row-major array on a device.

    `shape`, `dtype` (NumPy's; bfloat16 is ml_dtypes'), `device` ("cuda:0", "sim:1"), `nbytes`, `address`.  It is ready
    in the order of the caller's stream; `numpy()` waits for it and copies it to the host.  On CUDA other libraries read
    it in place through DLPack or `__cuda_array_interface__`.
    """

    def __init__(
        self,
        backend: Backend,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        stream: Stream,
        owner: Any,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.shape = shape
        self.type_name = dtype
        self.stream = stream
        self._address = address
        self._owner = owner
        self._check = check

    # --- what it is ---

    @property
    def address(self) -> int:
        """Where its first element lies. CaptureRuleError for a graph's output that a later replay has overwritten."""
        if self._check is not None:
            self._check()
        return self._address

    @property
    def device(self) -> str:
        return self.backend.device

    @property
    def dtype(self) -> np.dtype[Any]:
        return NUMPY_DTYPES[self.type_name]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.type_name]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array of rank 0")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on {self.device}>"

    # --- reading it ---

    def numpy(self) -> npt.NDArray[Any]:
        """A copy on the host, after everything that the caller has submitted on its stream so far.

        Raises what the kernels that made it reported.  CaptureRuleError, DeviceError 906 while the caller records a
        capture.
        """
        array = np.empty(self.shape, self.dtype)
        self._follow_caller()
        if array.nbytes:
            self.backend.download(self.stream, address_of(array), self.address, array.nbytes)
        self.backend.synchronize(self.stream)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError(f"an array on {self.device} cannot be read by NumPy without a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def _follow_caller(self) -> None:
        caller = self.backend.caller_stream()
        if is_capturing(self.backend, caller) or self.stream.is_capturing:
            raise CaptureRuleError("a capture is being recorded, in which nothing is read back; end it first")
        self._order(caller, self.stream)

    def _order(self, before: Stream, after: Stream) -> None:
        if before is not after:
            event = self.backend.event("read")
            self.backend.record(event, before)
            self.backend.wait(after, event)

    # --- other libraries ---

    def __dlpack_device__(self) -> tuple[int, int]:
        self._require_cuda()
        return dlpack.KDL_CUDA, int(self.device.partition(":")[2])

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """A capsule of this memory. The consumer's `stream` (None: the legacy one, -1: none) waits for it."""
        device = self.__dlpack_device__()
        if options.get("dl_device") not in (None, device) or options.get("copy"):
            raise BufferError(f"an array on {self.device} is handed out in place only; copy it with .numpy()")
        if stream != -1:
            consumer = self.backend.legacy_stream() if stream is None else self.backend.caller_stream(int(stream))
            self._order(self.stream, consumer)
        return dlpack.capsule_of(self.address, self.shape, self.type_name, device, self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.backend.kind != "cuda" or self.type_name == "bf16":  # NumPy's type strings have no bfloat16
            raise AttributeError(f"{self!r} has no __cuda_array_interface__; use DLPack or .numpy()")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.stream.handle,
        }

    def _require_cuda(self) -> None:
        if self.backend.kind != "cuda":
            raise DeviceUnavailableError(
                f"an array on {self.device} lies in the simulated GPU's memory, which no other library can read; "
                "copy it to the host with .numpy()"
            )
