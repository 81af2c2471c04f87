"""The number of blocks of a kernel that a multiprocessor holds at once, from ptxas' figures.

Limits by compute capability: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".  Registers
are allocated to warps in units of 256, shared memory to blocks in units of 128 bytes after 1 KiB that the system keeps
(from 8.0 on).
"""

from __future__ import annotations

from qcompiler.kernels.cuda.signature import arch_number

REGISTERS = 65536
SHARED_KIB = {70: 96, 75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
THREADS = {70: 2048, 75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
MOST_BLOCKS = {70: 32, 75: 16, 80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}


def blocks_per_multiprocessor(arch: str, threads: int, registers: int, shared: int) -> int:
    """Blocks of `threads` threads with these registers per thread and bytes of shared memory per block; 0: none
    fits."""
    number = arch_number(arch)
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // warps
    system = 1024 if number >= 80 else 0
    by_shared = (SHARED_KIB[number] << 10) // max(1, -(-(shared + system) // 128) * 128)
    by_threads = THREADS[number] // (32 * warps)
    return min(by_registers, by_shared, by_threads, MOST_BLOCKS[number])
