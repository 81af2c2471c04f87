"""docs/mlir.md runs as one program: upstream MLIR, then IREE."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_runs_as_one_program(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mlir.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    text = "\n".join([*blocks, "assert np.allclose(y, prog(x), atol=1e-5)"])
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.mlir").stat().st_size > 10_000
