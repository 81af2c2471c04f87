"""Copy bandwidth of `cuda:0`, for `make gpu-check`: what every speed is compared with.

    python -P probe.py [--mib 2048] [--samples 15]

Prints one line of JSON, the fields of the schema's Copy: device-to-device copies between two buffers that exceed the L2
cache, timed by events around four copies each; bytes read plus bytes written.  They are not in a graph: there a copy
engine carries them out, which reaches two thirds of the memory's rate on an H200, while a stream's copies are kernels.
"""

from __future__ import annotations

import argparse
import json

from qcompiler.runtime.backends.cuda import CudaBackend

COPIES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=15)
    chosen = parser.parse_args()
    nbytes = chosen.mib << 20
    backend = CudaBackend(0)
    driver, check = backend.api.driver, backend.api.check
    source, target = backend.allocate(nbytes, label="source"), backend.allocate(nbytes, label="target")
    stream = backend.stream("probe")
    # Not zeros: a memory that compresses would flatter itself.
    with backend.api.current(backend.context):
        words = nbytes // 4
        check(driver.cuMemsetD32Async(source.address, 0x9E3779B9, words, stream.driver_handle), "filling")
    samples = []
    with backend.api.current(backend.context):
        begin, end = (check(driver.cuEventCreate(0), "making an event") for _ in range(2))
        for number in range(chosen.samples + 2):
            check(driver.cuEventRecord(begin, stream.driver_handle), "recording an event")
            for _ in range(COPIES):
                backend.copy(stream, target.address, source.address, nbytes)
            check(driver.cuEventRecord(end, stream.driver_handle), "recording an event")
            check(driver.cuStreamSynchronize(stream.driver_handle), "waiting for the copies")
            milliseconds = float(check(driver.cuEventElapsedTime(begin, end), "reading the time"))
            if number >= 2:  # the first two warm up
                samples.append(2 * COPIES * nbytes / (milliseconds * 1e-3) / 1e12)
    print(json.dumps({"nbytes": nbytes, "terabytes_per_second": [round(each, 4) for each in samples]}))


if __name__ == "__main__":
    main()
