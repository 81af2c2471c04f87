"""Where the keys of an attention of few queries pay divided into parts, on a GPU, and into how many.

An attention of few queries has a block for each key head of a sequence, which reads all keys: 8 blocks for a model
with 8 key heads, on a GPU of 132 multiprocessors. With parts there are as many blocks for each part
(kernels/cuda/attention_decode.py). What it costs is a kernel that joins them (join_attention.py): a launch and its
trips to memory.

The number of parts makes two blocks for each multiprocessor of the largest GPU of the target, and no part is shorter
than `PART_KEYS` when the cache is full. The estimates are those of a cache that is half full, as a text finds it on
average. While it has no more than `PART_KEYS` keys, one part has them all, and the launch that joins is paid for
nothing. No GPU has measured this yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cost import ATTAINED_FRACTION, ROUND_TRIPS, DeviceCost, device_cost
from qcompiler.kernels.cuda.attention_decode import PART_KEYS, ROWS, STRIP
from qcompiler.plan.attention_parts import FEW_QUERIES, MOST_PARTS
from qcompiler.plan.dims import Range

BLOCKS_PER_MULTIPROCESSOR = 2
"""Blocks of a part that a multiprocessor holds at once: 128 registers for each of 2 x 256 threads fill its registers
(tests/cuda/test_attention_parts.py)."""

WARPS = 16
"""Warps that a multiprocessor holds, of one block without parts or of two with them."""

INSTRUCTIONS = 69
"""Instructions of a warp for a key of 128 columns in bf16 with four rows, from its loads to its weighted value
(tests/cuda/test_attention_parts.py counts them in machine code). More rows and columns take more, and fewer take fewer:
the estimates are those of a large model's head."""

CLOCK = 1700.0
"""Cycles per microsecond, about that of an H100 and of an A100 (1.4 to 1.8 GHz). A multiprocessor issues four
instructions a cycle."""

TRIPS_PER_STRIP = 6
"""Trips to memory, one after the other, for a strip of keys of 128 columns in bf16: four for keys, two for values."""


@dataclass(frozen=True)
class SplitQuery:
    """An attention. `batch` has its range, `queries` is None if it is a symbol, `keys` is the most keys that one call's
    queries see."""

    batch: Range
    heads: int
    kv_heads: int
    queries: int | None
    keys: int
    part_rows: int
    """Rows, of a head and a query, of a block that takes a part."""
    key_bytes: int
    """Bytes of a key and its value."""


@dataclass(frozen=True)
class Verdict:
    """The number of parts, 1 for none, and the estimate or the limit that says so."""

    parts: int
    why: str


def verdict(query: SplitQuery, kind: str, isas: tuple[str, ...]) -> Verdict:
    """For a target of this kind. All architectures of a program share its plan, and so the number of parts."""
    limit = _limit(query, kind)
    if limit is not None:
        return Verdict(1, limit)
    devices = {isa: device_cost(isa, kind) for isa in isas}
    wanted = BLOCKS_PER_MULTIPROCESSOR * max(_multiprocessors(device) for device in devices.values())
    blocks = blocks_of(query, query.part_rows)
    parts = min(-(-wanted // blocks), -(-query.keys // PART_KEYS), MOST_PARTS)
    if parts < 2:
        if query.keys <= PART_KEYS:
            return Verdict(1, f"it sees at most {query.keys} keys, and a part has at least {PART_KEYS}")
        return Verdict(1, f"{blocks} blocks have work for every multiprocessor")
    estimates = list[str]()
    for isa, device in devices.items():
        whole, divided = time_whole(query, device), time_in_parts(query, parts, device)
        text = (
            f"estimated for {isa} with {_expected(query)} of {query.keys} keys: {divided:.1f} us in {parts} parts, "
            f"{whole:.1f} us whole"
        )
        if divided >= whole:
            return Verdict(1, text)
        estimates.append(text)
    return Verdict(parts, "; ".join(estimates))


def blocks_of(query: SplitQuery, rows: int) -> int:
    """Blocks of all keys, or of each part, that take so many rows; of the smallest batch."""
    assert query.queries is not None
    every = query.heads // query.kv_heads * query.queries
    return max(1, query.batch[0]) * query.kv_heads * -(-every // rows)


def time_whole(query: SplitQuery, device: DeviceCost) -> float:
    """The estimated time, in microseconds, of the kernel without parts: a multiprocessor reads all keys of a head."""
    rounds = -(-blocks_of(query, ROWS) // _multiprocessors(device))
    return max(rounds * _time_of_keys(_expected(query), device), _time_of_bytes(query, device))


def time_in_parts(query: SplitQuery, parts: int, device: DeviceCost) -> float:
    """The same of `parts` parts, and of the kernel that joins them: its launch, and its trips to memory."""
    keys = max(PART_KEYS, -(-_expected(query) // parts))
    used = blocks_of(query, query.part_rows) * min(parts, -(-_expected(query) // keys))
    each = -(-used // _multiprocessors(device))  # parts of a multiprocessor
    reading = max(_time_of_keys(each * keys, device), _time_of_bytes(query, device))
    return reading + device.launch + ROUND_TRIPS * device.latency


def _expected(query: SplitQuery) -> int:
    """The keys that the estimates are made for."""
    return -(-query.keys // 2)


def _time_of_keys(keys: int, device: DeviceCost) -> float:
    """The time of one multiprocessor for so many keys: the longer of its instructions and of its trips to memory."""
    strips = -(-keys // (STRIP * WARPS))
    return max(keys * INSTRUCTIONS / 4 / CLOCK, strips * TRIPS_PER_STRIP * device.latency)


def _time_of_bytes(query: SplitQuery, device: DeviceCost) -> float:
    """The time in which the device's memory gives all keys and values."""
    nbytes = max(1, query.batch[0]) * query.kv_heads * _expected(query) * query.key_bytes
    return nbytes / (ATTAINED_FRACTION * device.bandwidth)


def _multiprocessors(device: DeviceCost) -> int:
    return device.threads_to_fill // 128


def _limit(query: SplitQuery, kind: str) -> str | None:
    """What no kernel does."""
    if kind == "cpu":
        return "the threads of a CPU share one attention"
    if query.queries is None:
        return "the number of queries is known only at run time"
    return f"more than {FEW_QUERIES} queries have blocks enough" if query.queries > FEW_QUERIES else None
