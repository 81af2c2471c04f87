"""How much anonymous memory this process has (RssAnon: no pages of files), and the most that it had meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The largest RssAnon between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._running = 0, True

    def run(self) -> None:
        while self._running:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.002)

    def stop(self) -> int:
        self._running = False
        self.join()
        return self.peak
