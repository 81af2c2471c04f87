"""Random programs of accesses and synchronisations: a race is reported if and only if vector clocks say there is one.

The oracle knows nothing of shadow cells: it compares every pair of accesses of the whole program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import SimulationError

THREADS, WARPS, SLOTS = 64, 2, 2
NONE, BARRIER, SYNCWARP = 0, 1, 2

TEXT = r"""
// An access is offset | size << 16 | write << 24 | global << 25, or -1.
__device__ __forceinline__ uint32_t touch(unsigned char* p, int op) {
    const int size = op >> 16 & 255;
    if (op >> 24 & 1) {
        if (size == 1) *p = 1; else if (size == 2) *(uint16_t*)p = 1; else *(uint32_t*)p = 1;
        return 0;
    }
    return size == 1 ? *p : size == 2 ? *(uint16_t*)p : *(uint32_t*)p;
}
extern "C" __global__ void qk_play(const int* accesses, const int* syncs, const uint32_t* masks, unsigned char* memory,
        uint32_t* y, int64_t phases) {
    QC_SHARED(unsigned char, tile, 0, 512);
    const int t = threadIdx.x, b = blockIdx.x, thread = b * 64 + t;
    for (int i = 0; i < 8; ++i) tile[8 * t + i] = 0;
    __syncthreads();
    uint32_t sum = 0;
    for (int64_t p = 0; p < phases; ++p) {
        for (int s = 0; s < 2; ++s) {
            const int op = accesses[((p * gridDim.x * 64) + thread) * 2 + s];
            if (op >= 0) sum += touch((op >> 25 & 1 ? memory : tile) + (op & 0xffff), op);
        }
        const int sync = syncs[p * gridDim.x * 2 + thread / 32];
        if (sync == 1) __syncthreads();
        else if (sync == 2) __syncwarp(masks[p * gridDim.x * 64 + thread]);
    }
    y[thread] = sum;
}
"""


@dataclass
class Program:
    accesses: np.ndarray  # (phases, blocks * 64, 2)
    syncs: np.ndarray  # (phases, blocks * 2): of each warp
    masks: np.ndarray  # (phases, blocks * 64)

    @property
    def blocks(self) -> int:
        return self.masks.shape[1] // THREADS

    def groups(self, phase: int) -> list[np.ndarray]:
        """The sets of threads that meet after a phase."""
        found = []
        for warp in range(self.blocks * WARPS):
            lanes = np.arange(32 * warp, 32 * warp + 32)
            if self.syncs[phase, warp] == BARRIER and warp % WARPS == 0:
                found.append(np.arange(THREADS * (warp // WARPS), THREADS * (warp // WARPS + 1)))
            elif self.syncs[phase, warp] == SYNCWARP:
                masks = self.masks[phase, lanes]
                found += [lanes[[(int(mask) >> i & 1) == 1 for i in range(32)]] for mask in np.unique(masks)]
        return found


def random_program(rng: np.random.Generator) -> Program:
    """Threads exchange cells within 8 lanes, a warp or the block, and meet in groups that may be too small."""
    phases, blocks = int(rng.integers(2, 7)), int(rng.integers(1, 3))
    threads = blocks * THREADS
    accesses = np.full((phases, threads, SLOTS), -1, np.int32)
    syncs = np.zeros((phases, blocks * WARPS), np.int32)
    masks = np.zeros((phases, threads), np.uint32)
    careful = rng.random() < 0.6  # most meetings are then as wide as the exchange after them
    t = np.arange(threads)
    for phase in range(phases):
        exchange = int(rng.choice([0, 1, 5, 8, 16, 31, 32, 40]))  # the cell of thread t ^ exchange
        size = int(rng.choice([1, 2, 4]))
        active = rng.random(threads) < rng.choice([0.3, 1.0])
        cell = (t % THREADS) ^ exchange
        if rng.random() < 0.2:
            cell = np.full(threads, int(rng.integers(THREADS)))  # all look at one cell
            writes = np.full(threads, rng.random() < 0.05)
        else:
            writes = np.full(threads, rng.random() < 0.5)
        where = int(rng.random() < 0.3)
        base = cell * size + (t // THREADS) * 256 * where * int(rng.random() < 0.9)  # blocks: mostly apart
        op = base | size << 16 | writes.astype(np.int32) << 24 | where << 25
        accesses[phase, active, 0] = op[active]
        if rng.random() < 0.3:
            accesses[phase, :, 1] = (t % THREADS) * 4 | 4 << 16 | 0 << 24
        for block in range(blocks):
            scope = int(rng.choice([0, 1, 2, 3])) if not careful else int(rng.choice([1, 2, 3, 3, 3]))
            for warp in range(block * WARPS, block * WARPS + WARPS):
                lanes = np.arange(32)
                syncs[phase, warp] = (NONE, SYNCWARP, SYNCWARP, BARRIER)[scope]
                group = 0xFF << (lanes // 8 * 8) if scope == 1 else np.full(32, 0xFFFFFFFF)
                masks[phase, 32 * warp : 32 * warp + 32] = group.astype(np.uint32)
    return Program(accesses, syncs, masks)


def has_race(program: Program) -> bool:
    """Two accesses of one byte, one a write, by threads of which neither knows of the other's."""
    threads = program.blocks * THREADS
    clocks = np.eye(threads, dtype=np.int32)  # clocks[t]: what thread t knows of each thread's time
    records: list[tuple[int, int, int, int, int, bool, np.ndarray]] = []
    for phase in range(len(program.accesses)):
        for thread in range(threads):
            for op in program.accesses[phase, thread]:
                if op >= 0:
                    space = -1 if op >> 25 & 1 else thread // THREADS
                    low = int(op & 0xFFFF)
                    size, write = int(op >> 16 & 255), bool(op >> 24 & 1)
                    time = int(clocks[thread, thread])
                    records.append((space, low, low + size, thread, time, write, clocks[thread]))
        clocks = clocks.copy()
        for group in program.groups(phase):
            clocks[group] = clocks[group].max(0)
            clocks[group, group] += 1
    by_space: dict[int, list[Any]] = {}
    for record in records:
        by_space.setdefault(record[0], []).append(record)
    return any(_conflict(each) for each in by_space.values())


def _conflict(records: list[Any]) -> bool:
    low, high, thread, time = (np.array([r[i] for r in records]) for i in range(1, 5))
    write = np.array([r[5] for r in records])
    known = np.stack([r[6] for r in records])[:, thread]  # known[b, a]: what b's thread knew of a's thread
    overlap = (low[:, None] < high[None]) & (low[None] < high[:, None])
    conflict = overlap & (write[:, None] | write[None]) & (thread[:, None] != thread[None])
    before = time[:, None] <= known.T  # before[a, b]: a is ordered before b
    return bool((conflict & ~before & ~before.T).any())


def play(cuda: Any, program: Program, seed: int) -> None:
    cuda.run(
        "play", grid=program.blocks, block=THREADS, shared=512, seed=seed, accesses=("r", program.accesses),
        syncs=("r", program.syncs), masks=("r", program.masks), memory=("rw", np.zeros(512, np.uint8)),
        y=("w", np.zeros(program.blocks * THREADS, np.uint32)), phases=len(program.accesses),
    )  # fmt: skip


def agree(cuda: Any, number: int) -> bool:
    """Whether program `number` has a race, after comparing what three orders of execution report."""
    program = random_program(np.random.default_rng(number))
    expected = has_race(program)
    for seed in range(3):
        try:
            play(cuda, program, seed)
            found = False
        except SimulationError as error:
            assert error.finding == "race", error
            assert expected, f"program {number}, seed {seed}: a false alarm\n{error}"
            found = True
        assert found == expected, f"program {number}, seed {seed}: a race was missed"
    return expected


def test_races_are_reported_exactly_where_vector_clocks_see_one(compile_cuda: Callable[..., Any]) -> None:
    cuda = compile_cuda(TEXT)
    races = [agree(cuda, number) for number in range(80)]
    assert 20 <= sum(races) <= 60  # both answers are tested


@pytest.mark.slow
def test_races_in_many_random_programs(compile_cuda: Callable[..., Any]) -> None:
    cuda = compile_cuda(TEXT)
    for number in range(80, 1500):
        agree(cuda, number)
