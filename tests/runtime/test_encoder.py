"""Compiled encoders: the bytes and the errors of NumPy's, whatever goes in; and what happens without a compiler."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.errors import CompilerMissingError, FormatValueError
from qcompiler.formats.base import Encoding, TileEncoder
from qcompiler.formats.made import MadeMatrix
from qcompiler.kernels.encode.source import compiled_encoder
from qcompiler.runtime import compiler, encoder, isa, progress

Values = npt.NDArray[Any]

DEFAULTS = tuple(name for name in formats.names() if compiled_encoder(formats.get(name)) is not None)
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nf4", {"double_quant": True, "block": 4096}),
    ("fp4", {"block": 32}),
    ("int8", {"group": 64, "symmetric": False}),
    ("int8", {"scale": "fp16"}),
    ("int4", {"symmetric": False, "scale": "fp32"}),
    ("int4", {"group": 128, "scale": "bf16"}),
    ("int3", {"group": "row", "symmetric": False}),
    ("int2", {"group": "row"}),
    ("fp8_e4m3", {"per": "block"}),
    ("fp8_e5m2", {"per": "tensor"}),
    ("mxfp4", {"exponent": "ceil"}),
    ("mxfp8", {"exponent": "even"}),
    ("mxfp8", {"element": "e5m2", "exponent": "rceil"}),
    ("nvfp4", {"divisor": True}),
)

KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Values]] = {
    "normal": lambda rng, shape: 0.02 * rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape),
    "halves": lambda rng, shape: rng.integers(-16, 17, shape) / 2,
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.05),
    "constant": lambda rng, shape: np.repeat(rng.standard_normal((shape[0], -(-shape[1] // 32))), 32, 1)[:, : shape[1]],
    "positive": lambda rng, shape: rng.uniform(1, 2, shape),
    "orders of magnitude": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 4, shape),
    "denormals": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "large": lambda rng, shape: rng.uniform(-60000, 60000, shape),
    "beyond fp16": lambda rng, shape: rng.uniform(-3e38, 3e38, shape),
    "zeros of both signs": lambda rng, shape: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encoder, "WORTH_COMPILING", 0)
    monkeypatch.setattr(encoder, "_loaded", {})
    yield
    progress.note_once.cache_clear()


def compiled(fmt: formats.Format) -> TileEncoder:
    tiles = encoder.tile_encoder(fmt, 1)
    assert tiles is not None, "the encoder does not compile"
    return tiles


def outcome(work: Callable[[], formats.PackedTensor]) -> bytes | str:
    try:
        return work().to_bytes()
    except FormatValueError as error:
        return str(error)


def same(fmt: formats.Format, weights: Values, importance: Values | None, what: str) -> int:
    """Encodes in both ways; how many tiles the compiled one left to NumPy."""
    tiles, left = compiled(fmt), 0

    def counted(job: Encoding, start: int, tile: Values) -> bool:
        nonlocal left
        done = tiles(job, start, tile)
        left += not done
        return done

    with np.errstate(over="ignore"):
        expected = outcome(lambda: fmt.encode(weights, importance=importance))
        made = outcome(lambda: fmt.encode(weights, importance=importance, tiles=counted))
    if made != expected:  # not in the assertion: pytest would print both
        places = [i for i, (a, b) in enumerate(zip(made, expected, strict=False)) if a != b][:8]
        pytest.fail(
            f"{fmt}, {what}, {weights.shape}: {made[:200] if isinstance(made, str) else f'differs at {places}'}"
        )
    return 0 if isinstance(expected, str) else left


def check(fmt: formats.Format, shapes: tuple[tuple[int, int], ...]) -> None:
    rng = np.random.default_rng(len(repr(fmt)))
    for shape in shapes:
        importances: list[Values | None] = [None]
        if fmt.takes_importance:
            importances += [rng.exponential(1, shape[1]), 1.0 * (rng.random(shape[1]) < 0.1), np.zeros(shape[1])]
        for kind, draw in KINDS.items():
            weights = draw(rng, shape)
            for importance in importances:
                left = same(fmt, weights.astype(np.float32), importance, kind)
                if kind not in ("denormals", "beyond fp16"):
                    assert left == 0, f"{fmt} leaves tiles of {kind} weights to NumPy"
        for dtype in (ml_dtypes.bfloat16, np.float16, np.float64):
            same(fmt, KINDS["normal"](rng, shape).astype(dtype), None, str(np.dtype(dtype)))
        for value in (np.nan, np.inf, -np.inf):
            weights = rng.standard_normal(shape).astype(np.float32)
            weights[shape[0] // 2, shape[1] // 2] = value
            same(fmt, weights, None, str(value))


SLOW = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq1_m", "iq1_s")
"""Formats whose encoders share their code with iq2_xxs's, and take NumPy long."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in DEFAULTS])
def test_compiled_encoders_write_the_bytes_of_numpys(name: str) -> None:
    fmt = formats.get(name)
    if name == "tq":  # NumPy's search of a trellis takes a second for five rows
        check(fmt, ((2, 512),))
    else:
        check(fmt, ((5, 768),) if fmt.declaration.tail == "refuse" else ((5, 768), (7, 103)))


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
@pytest.mark.slow
def test_compiled_encoders_of_every_parameter(name: str, params: dict[str, Any]) -> None:
    check(formats.get(name, **params), ((5, 768), (37, 4096)))


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.slow
def test_compiled_encoders_of_large_matrices(name: str) -> None:
    check(formats.get(name), ((37, 4096), (3, 256 * 19)))


@pytest.mark.parametrize("level", isa.supported_isas()[:-1])
@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.slow
def test_compiled_encoders_agree_on_every_instruction_set(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QC_ISA", level)
    check(formats.get(name), ((5, 768),))


def test_mxfp4_of_ggml_rounds_logarithms_as_numpy_does() -> None:
    """Just below a power of two log2 rounds up to it in fp32, in some octaves for more numbers than in others."""
    ends = np.ldexp(np.float32(1), np.arange(-140, 128)).astype(np.float32)
    below = (ends.view(np.int32)[:, None] - np.arange(32, dtype=np.int32)).view(np.float32).reshape(-1)
    weights = np.zeros((below.size, 32), np.float32)
    weights[:, 0], weights[:, 1] = np.abs(below), np.abs(below) / 3
    same(formats.get("mxfp4_ggml"), weights, None, "next to powers of two")


def test_formats_with_shared_searches_keep_their_own_tables_in_one_process() -> None:
    """The loader once gave q4_1 the tables of q4_0: both libraries had them under one name."""
    weights = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for name in ("q4_0", "q5_1", "q4_K", "q4_0"):
        same(formats.get(name), weights, None, name)


@pytest.mark.parametrize("name", ["nf4", "q4_K", "int8"])
def test_threads_and_pieces_do_not_change_the_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 4096)
    fmt = formats.get(name)
    weights = np.random.default_rng(0).standard_normal((48, 4096)).astype(np.float32)
    expected, steps, lock = fmt.encode(weights).to_bytes(), [], threading.Lock()

    def step(elements: int) -> None:
        with lock:
            steps.append(elements)

    for threads in (1, 2, 5):
        assert encoder.encode(fmt, weights, threads=threads, step=step).to_bytes() == expected
    assert sum(steps) == 3 * weights.size
    made = MadeMatrix(48, 4096, lambda first, stop: weights[first:stop])
    assert encoder.encode_made(fmt, made).to_bytes() == expected


def test_an_error_names_the_first_element_in_the_matrix_with_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 4096)
    weights = np.zeros((64, 1024), np.float32)
    weights[60, 3] = weights[9, 7] = np.nan
    with pytest.raises(FormatValueError, match="row 9, column 7"):
        encoder.encode(formats.get("nf4"), weights, threads=4)


def test_an_importance_that_may_overflow_is_refused_as_numpy_does() -> None:
    with pytest.raises(FormatValueError, match="only ratios matter"):
        encoder.encode(formats.get("q4_K"), np.ones((1, 256), np.float32), importance=np.full(256, 1e16))


# --- when ------------------------------------------------------------------------------------------------------------


def test_little_work_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoder, "WORTH_COMPILING", 1000)
    monkeypatch.setattr(encoder, "_elements", {})
    monkeypatch.setattr(encoder, "cache_dir", lambda kind: tmp_path)
    fmt = formats.get("int2")
    assert encoder.tile_encoder(fmt, 600) is None
    assert encoder.tile_encoder(fmt, 600) is not None
    monkeypatch.setattr(encoder, "_loaded", {})
    monkeypatch.setattr(encoder, "_elements", {})
    monkeypatch.setattr(encoder, "cache_dir", lambda kind: tmp_path if kind == "plans" else compiler.cache_dir(kind))
    assert encoder.tile_encoder(fmt, 1) is not None, "compiled before, and not found again"


def test_fewer_elements_are_worth_compiling_where_numpy_is_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def none(*arguments: object, **named: object) -> Path:
        asked.append(arguments)
        raise CompilerMissingError("none")

    monkeypatch.setattr(encoder, "WORTH_COMPILING", 1000)
    monkeypatch.setattr(encoder, "_elements", {})
    monkeypatch.setattr(encoder, "cache_dir", lambda kind: tmp_path)
    monkeypatch.setattr(encoder, "compile_code", none)
    for name, compiles in (("q4_K", False), ("iq1_s", True)):
        encoder.tile_encoder(formats.get(name), 16)
        assert bool(asked) == compiles, name


def test_without_a_compiler_numpy_encodes_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def none(*arguments: object, **named: object) -> Path:
        raise CompilerMissingError("no C++ compiler was found; install one")

    monkeypatch.delenv("QC_QUIET", raising=False)
    monkeypatch.setattr(encoder, "cache_dir", lambda kind: tmp_path)
    monkeypatch.setattr(encoder, "compile_code", none)
    weights = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    for name in ("nf4", "nf4", "q4_K"):
        fmt = formats.get(name)
        assert encoder.encode(fmt, weights).to_bytes() == fmt.encode(weights).to_bytes()
    assert capfd.readouterr().err.count("encoded by NumPy, which is slower: no C++ compiler was found") == 1


def test_a_damaged_record_of_an_encoder_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoder, "cache_dir", lambda kind: tmp_path if kind == "plans" else compiler.cache_dir(kind))
    fmt = formats.get("int2")
    assert encoder.tile_encoder(fmt, 1) is not None
    (record,) = tmp_path.glob("encoder-*")
    whole = record.read_bytes()
    evil, gone = (whole.replace(b"encoder-", name) for name in (b"../encoder-", b"encoder-0"))
    for text in (b"\xff\xff", b"[]", b"{}", b'"text"', b"", whole[:9], evil, gone):
        record.write_bytes(text)
        monkeypatch.setattr(encoder, "_loaded", {})
        assert encoder.tile_encoder(fmt, 1) is not None
    assert record.read_bytes() == whole


# --- progress --------------------------------------------------------------------------------------------------------


class _Terminal:
    """A stderr that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_terminal_shows_a_bar_for_long_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QC_QUIET", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "BAR_AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    shown = threading.Event()
    show = progress.Progress._show
    monkeypatch.setattr(progress.Progress, "_show", lambda self: (show(self), shown.set()))
    with progress.Progress("packing weights", 4_000_000_000) as work:
        assert shown.wait(10)
        work.step(1_000_000_000)
        work.reach(4_000_000_000)
    assert "packing weights" in terminal.text and "4.0 GB of 4.0 GB" in terminal.text
    monkeypatch.setattr(progress, "BAR_AFTER", 1000.0)
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    with progress.Progress("packing weights", 10) as work:
        work.step(10)
    assert terminal.text == ""


def test_elsewhere_lines_are_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QC_QUIET", raising=False)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.Progress("merging", 2_000_000_000) as work:
        work.step(500_000_000)
    first, _, rate = capsys.readouterr().err.partition(", ")
    assert first == "qcompiler: merging: 500.0 MB of 2.0 GB"
    assert rate.endswith(" s left\n") and "B/s, " in rate
    monkeypatch.setenv("QC_QUIET", "1")
    with progress.Progress("merging", 2) as work:
        work.step(1)
    assert capsys.readouterr().err == ""
