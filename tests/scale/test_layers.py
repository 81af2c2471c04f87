"""What compiling costs grows linearly with a model's layers, and equal layers share kernels: by counts, not time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from by_path import load
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from qcompiler.frontends.torch.capture import decompose

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "scale.py"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def works(layers: int, target: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counter[str]]:
    """The program, and how much was done to make it: ops verified, printed characters, nodes traced to decompose."""
    done: Counter[str] = Counter()
    verify, trace = ModuleOp.verify, decompose._Decomposer._trace

    def counted_verify(self: Operation, *args: Any, **kwargs: Any) -> None:
        done["ops verified"] += sum(1 for _ in self.walk())
        verify(self, *args, **kwargs)

    def counted_trace(self: Any, *args: Any) -> Any:
        done["decompositions traced"] += 1
        return trace(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ModuleOp, "verify", counted_verify)
        patch.setattr(decompose._Decomposer, "_trace", counted_trace)
        program = load("benchmarks/scale.py").compile_llama(layers, "nf4", target, **SMALL)
    done["steps"] = sum(len(entry.steps) for entry in program.plan.entries)
    done["decisions"] = len(program.report().choices)
    return program, done


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, "sm_90a"])
def test_work_grows_linearly_and_kernels_not_at_all(target: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    two, first = works(2, target, monkeypatch)
    three, second = works(3, target, monkeypatch)
    four, third = works(4, target, monkeypatch)
    assert first["ops verified"] > 1000
    for name in ("ops verified", "steps", "decisions", "decompositions traced"):
        assert third[name] - second[name] == second[name] - first[name], name
    assert second["decompositions traced"] == first["decompositions traced"], "equal layers share traces"
    kernels = [[(spec.name, spec.digest) for spec in program.plan.kernels] for program in (two, three, four)]
    assert kernels[0] == kernels[1] == kernels[2], "equal layers share emitted kernels"
    assert "launches of" in str(four.report()) and "places" in str(four.report())
    uses = four.report().as_dict()["kernel_uses"]
    assert sum(count >= 4 for count in uses.values()) >= 5


def test_the_table_of_the_benchmark_shows_growth() -> None:
    scale = load("benchmarks/scale.py")
    assert scale.growth({8: 1.0, 16: 2.0, 32: 4.0}) == pytest.approx(1.0)
    assert scale.growth({8: 1.0, 16: 2.0, 32: 8.0}) == pytest.approx(2.0)
    assert scale.growth({8: 3.0, 16: 4.0, 32: 6.0}) == pytest.approx(1.0), "a constant part is no growth"


@pytest.mark.slow
def test_thirty_two_layers_of_llama_8b_stay_below_two_gigabytes() -> None:
    """Measured about 0.55 GB, most of it torch; four times that would still do."""
    command = [sys.executable, str(BENCHMARK), "--one", "32"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])
    assert found["peak_bytes"] < 2e9
    assert found["launches"] > 32 * 10
    assert found["kernels"] < 40
