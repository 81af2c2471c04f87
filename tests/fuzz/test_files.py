"""Damaged and hostile files end in QCompilerErrors, in little time and memory. docs/testing.md, "Fuzzing".

`make fuzz SECONDS=300` runs more inputs. A finding becomes a file in `kept_files/` by `tests/fuzz/files.py --out`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from filefuzz import campaign, documents, seeds, server, targets
from filefuzz.targets import MIB, Steps, Target

KEPT = sorted(campaign.KEPT.glob("*.json"))
QUICK = {"qca": 12, "gguf": 24, "folder": 24, "safetensors": 48, "opt": 48, "arrays": 48}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    targets.prepare()


def found(target: str, outcomes: list[server.Outcome], names: list[str]) -> list[str]:
    assert len(outcomes) == len(names)
    return [
        f"{target} {name}: {outcome.kind}: {outcome.where}\n{outcome.detail}"
        for name, outcome in zip(names, outcomes, strict=True)
        if outcome.found
    ]


@pytest.mark.parametrize("target", targets.TARGETS)
def test_sound_files_are_accepted(target: str) -> None:
    """Else the fuzz would only look at one early check."""
    names = [name for name in seeds.names(target) if target != "opt" or name.startswith("passes/") or name == "context"]
    outcomes = server.run(target, [seeds.seed(target, name) for name in names])
    assert [
        (name, o.detail or o.messages) for name, o in zip(names, outcomes, strict=True) if o.kind != "accepted"
    ] == []


@pytest.mark.parametrize("target", targets.TARGETS)
def test_what_was_found_stays_mended(target: str) -> None:
    paths = [path for path in KEPT if campaign.read(path).target == target]
    assert paths or target == "qca"
    inputs = []
    for path in paths:
        case = campaign.read(path)
        inputs.append(documents.apply(seeds.seed(case.target, case.seed), case.edits))  # all edits, or an error
    assert found(target, server.run(target, inputs), [path.name for path in paths]) == []


@pytest.mark.parametrize("target", targets.TARGETS)
def test_random_files_end_in_our_errors(target: str) -> None:
    counts = campaign.campaign([target], 600, 0, QUICK[target], report=lambda _: None)[target]
    assert counts.inputs == QUICK[target]
    assert not counts.findings, campaign.table({target: counts}) + "".join(o.detail for _, o in counts.first.values())


@pytest.mark.slow
@pytest.mark.parametrize("target", targets.TARGETS)
def test_many_random_files_end_in_our_errors(target: str) -> None:
    counts = campaign.campaign([target], 1800, 1000, 40 * QUICK[target], report=lambda _: None)[target]
    assert counts.inputs == 40 * QUICK[target]
    assert not counts.findings, campaign.table({target: counts}) + "".join(o.detail for _, o in counts.first.values())


# --- whether the server finds anything -------------------------------------------------------------------------------


def _raises(folder: Path, step: Steps) -> None:
    step(lambda: json.loads("{"))


def _loops(folder: Path, step: Steps) -> None:
    while True:
        pass


def _sleeps(folder: Path, step: Steps) -> None:
    time.sleep(1000)


def _crashes(folder: Path, step: Steps) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _grows(folder: Path, step: Steps) -> None:
    bytearray(64 * MIB)[:] = b"x" * (64 * MIB)


def _talks(folder: Path, step: Steps) -> None:
    """Our errors leave out the middle of what is too long; this one does not."""
    from qcompiler.errors import ArgumentError

    class TalkativeError(ArgumentError):
        def __str__(self) -> str:
            return "x" * 100_000

    def fail() -> None:
        raise TalkativeError

    step(fail)


def test_our_errors_leave_out_the_middle_of_a_message_that_is_too_long() -> None:
    from qcompiler.errors import LONGEST_MESSAGE, PlanError, ScheduleError

    for error in (
        PlanError("a" * 50_000 + "the way out"),
        ScheduleError("a" * 50_000 + "the way out", rule="view-rank"),
    ):
        assert len(str(error)) < LONGEST_MESSAGE + 100
        assert "41,011 characters left out" in str(error) and str(error).endswith("the way out")
    whole = "b" * LONGEST_MESSAGE
    assert str(PlanError(whole)) == whole


@pytest.mark.parametrize(
    ("run", "kind"),
    [(_raises, "exception"), (_loops, "hang"), (_sleeps, "asleep"), (_crashes, "crash"), (_grows, "memory"),
     (_talks, "message")],
)  # fmt: skip
def test_the_server_sees_what_it_looks_for(run: object, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.TARGETS, "planted", Target(run, 16 * MIB, 8))  # type: ignore[arg-type]
    if kind == "hang":
        monkeypatch.setattr(server, "SECONDS", 0.2)
    monkeypatch.setattr(server, "ASLEEP", 1.0 if kind == "asleep" else 60.0)
    outcomes = server.run("planted", [{"a": b"x"}, {"a": b"y"}])
    assert [outcome.kind for outcome in outcomes] == [kind, kind]


def test_an_input_without_edits_is_the_seed() -> None:
    """Writers of documents lose nothing: an edit changes what it says and no more."""
    for target, made in seeds.SEEDS.items():
        for name in made:
            for file, raw in seeds.seed(target, name).items():
                assert isinstance(raw, bytes)
                opened = documents.document(file, raw)
                again = documents.document(file, opened.bytes())
                assert again.bytes() == opened.bytes(), (target, name, file)
                if file.endswith((".gguf", ".npy", ".mlir")):
                    assert opened.bytes() == raw, (target, name, file)
