"""An array in a device's memory: the result of a program whose arguments were on a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import CaptureRuleError, DeviceUnavailableError
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime import dlpack
from qcompiler.runtime.backends.base import Backend, Event, Memory, Stream
from qcompiler.runtime.memory import address_of, align_up, kept_if_it_fails
from qcompiler.runtime.streams import Queue, is_capturing

GRANULE = 512
"""Minimum bytes of a result's memory."""


class Pool:
    """Memory for the arrays of one queue: a later array reuses the memory of a dropped one.

    At each call the queue waits for its caller.  So memory is reused only for callers on the same stream: their work
    on the old array is over then.  The queue also waits for other sessions that used the array.
    """

    def __init__(self, queue: Queue, allocate: Callable[[int, str], Memory]) -> None:
        self._queue = queue
        self._allocate = allocate
        # All memory, free or not: an array that dies in a reference cycle must not free its memory.
        self._owned: list[Memory] = []
        self._free: dict[tuple[int, int], list[tuple[Memory, list[Event]]]] = {}

    def take(self, nbytes: int, caller: Stream) -> Lease:
        """Memory for an array of `nbytes`, in the order of the stream `caller`."""
        size = size_class(nbytes)
        free = self._free.get((size, caller.handle))
        if free:
            memory, uses = free.pop()
            for event in uses:
                self._queue.backend.wait(self._queue.stream, event)
            return Lease(memory, self, caller.handle)
        self._owned.append(self._allocate(size, "result"))
        return Lease(self._owned[-1], self, caller.handle)

    def give_back(self, memory: Memory, caller: int, uses: list[Event]) -> None:
        self._free.setdefault((memory.nbytes, caller), []).append((memory, uses))


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up by at most a quarter, to one of four sizes per power of two: arrays of varying sizes then
    share memory, and a pool holds only a few times its largest array."""
    step = max(GRANULE, 1 << max(nbytes.bit_length() - 3, 0))
    return align_up(max(nbytes, 1), step)


class Lease:
    """Memory of a pool, returned to it with the last array on it. `caller` is the handle of its caller's stream."""

    def __init__(self, memory: Memory, pool: Pool, caller: int) -> None:
        self.memory = memory
        self.pool = pool
        self._caller = caller
        self._uses: dict[int, Event] = {}

    def use(self, event: Event) -> None:
        """Another user than the pool's queue uses the memory until `event`."""
        self._uses[id(event)] = event

    def __del__(self) -> None:
        self.pool.give_back(self.memory, self._caller, list(self._uses.values()))


_reading: weakref.WeakKeyDictionary[Backend, Queue] = weakref.WeakKeyDictionary()


def _reading_queue(backend: Backend) -> Queue:
    """The queue on which a backend's arrays are copied to the host."""
    if backend not in _reading:
        _reading[backend] = Queue(backend, backend.stream("reads"))
    return _reading[backend]


class DeviceArray:
    """A row-major array on a device.

    `shape`, `dtype` (NumPy's; bfloat16 is ml_dtypes'), `device` ("cuda:0", "sim:1"), `nbytes`, `address`.  It is ready
    in the order of the caller's stream; `numpy()` waits for it and copies it to the host.  On CUDA, other libraries
    read it in place through DLPack or `__cuda_array_interface__`.

    `stream` is the stream that writes it.  Others wait for the event `ready` and do not use that stream: its owner may
    be recording a capture on it.  Without `ready`, a caller's capture writes it.
    """

    def __init__(
        self,
        backend: Backend,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        stream: Stream,
        owner: Any,
        ready: Event | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.shape = shape
        self.type_name = dtype
        self.stream = stream
        self.ready = ready
        self._address = address
        self._owner = owner
        self._check = check

    # --- what it is ---

    @property
    def lease(self) -> Lease | None:
        """The pool's memory of this array, if it is from a pool."""
        return self._owner if isinstance(self._owner, Lease) else None

    @property
    def address(self) -> int:
        """Address of the first element. CaptureRuleError for a graph's output that a later replay has overwritten."""
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

        Raises the errors that its kernels reported.  CaptureRuleError, DeviceError 906 while the caller records a
        capture.
        """
        caller = self.backend.caller_stream()
        if is_capturing(self.backend, caller) or self.is_captured:
            raise CaptureRuleError("a capture is being recorded, in which nothing is read back; end it first")
        array = np.empty(self.shape, self.dtype)
        reads = _reading_queue(self.backend)
        Queue(self.backend, caller).release([reads])
        self._release(reads.stream)
        with kept_if_it_fails(array):
            if array.nbytes:
                self.backend.download(reads.stream, address_of(array), self.address, array.nbytes)
            self.backend.synchronize(reads.stream)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError(f"an array on {self.device} cannot be read by NumPy without a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    @property
    def is_captured(self) -> bool:
        """Whether it is written by a capture that has not ended, so that it has no contents yet."""
        return self.ready is None and self.stream.is_capturing

    def _release(self, reader: Stream) -> None:
        """Orders the reader's later work after the array is ready."""
        if self.ready is not None:
            self.backend.wait(reader, self.ready)

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
            self._release(consumer)
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
